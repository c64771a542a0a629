"""Figures for Prometheus, under vLLM's names where it has them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from specbeam import __version__
from specbeam.apps.serve.answers import drafting_passes
from specbeam.apps.serve.buckets import SECONDS, Buckets
from specbeam.apps.serve.engine import Engine, Job

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class ServerMetrics:
    """The figures of one server, in a registry of their own. No label comes from a request.

    They are added to by the event loop when a request ends; the engine counts plain numbers, which are read when asked for.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.registry = CollectorRegistry()
        self.engine: Engine | None = None
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.http: Counter[tuple[str, int]] = Counter()
        self.totals: Counter[str] = Counter()
        self.audio_seconds = 0.0  # that were transcribed
        self.passed: Counter[int] = Counter()  # draft layers, by their depth
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", SECONDS)
        self.queue = self._histogram("request_queue_time_seconds", "From arrival to decoding.", SECONDS)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Seconds per token after the first.", SECONDS
        )
        self.prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.generated = self._histogram("request_generation_tokens", "Tokens of the returned texts.", TOKENS)
        self.n = self._histogram("request_params_n", "Answers asked for.", WIDTHS)
        self.beams = self._histogram("request_params_beams", "Beams of the method.", WIDTHS)
        self.width = self._histogram("beam_width", "Beams that a step drew.", WIDTHS)
        self.registry.register(self)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Any:
        made = Histogram(f"specbeam:{name}", what, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self.name)

    def note(
        self, jobs: Sequence[Job], prompt_tokens: int, tokens: int, n: int, beams: int, reasons: Iterable[str]
    ) -> None:
        """Count a request that was answered."""
        self.finished.update(reasons)
        self.totals["prompt_tokens"] += prompt_tokens
        self.totals["generation_tokens"] += tokens
        self.prompt.observe(prompt_tokens)
        self.generated.observe(tokens)
        self.n.observe(n)
        self.beams.observe(beams)
        for job in jobs:
            count = job.session.count
            self.totals["drafts"] += drafting_passes(job)
            self.totals["drafted"] += count.drafted
            self.totals["accepted"] += count.accepted
            self.passed.update(count.passed)
            for width in count.widths:
                self.width.observe(width)
            if job.started is not None:
                self.queue.observe(job.started - job.arrived)
            if job.first_token is not None:
                self.first_token.observe(job.first_token - job.arrived)
            if job.ended is not None:
                self.latency.observe(job.ended - job.arrived)
            if job.ended is not None and job.first_token is not None and job.session.length > 1:
                self.per_token.observe((job.ended - job.first_token) / (job.session.length - 1))

    def collect(self) -> Iterable[Metric]:
        """Yield the plain numbers."""
        yield _gauge("build_info", "Version.", {(("version", __version__),): 1})
        yield from self._counters()
        engine = self.engine
        if engine is None:
            return
        yield self._gauge("num_requests_running", "Texts that are decoded.", len(engine.inside))
        yield self._gauge("num_requests_waiting", "Texts that wait.", engine.waiting)
        yield from self._engine_counters(engine)
        yield from self._store(engine)

    def _engine_counters(self, engine: Engine) -> Iterable[Metric]:
        """Yield counters of the engine's work."""
        counts = engine.counts
        yield self._counter("target_passes", "Passes of the target, by texts.", counts.target_passes)
        yield self._counter("draft_passes", "Passes of the draft, by texts.", counts.draft_passes)
        yield self._counter("target_rows", "Rows that the target scored.", counts.target_rows)
        yield self._counter("cancelled", "Texts that were cancelled.", counts.cancelled)
        yield self._counter("engine_restarts", "Times that the engine had to start again.", counts.restarts)
        yield self._counter("audit_failures", "Texts whose audit speaks against their law.", counts.audit_failures)
        yield self._counter("step_seconds", "Seconds of decoding.", counts.step_seconds)
        if counts.joules is not None:
            yield self._by("energy_joules", "Energy used while decoding.", "source", {"cpu_packages": counts.joules})
        yield self._buckets(
            "pass_seconds", "Seconds of a turn: drafts, a pass of the target, verdict.", counts.turn_seconds
        )
        yield self._buckets(
            "inter_token_latency_seconds", "Seconds of a token after the one before.", counts.token_seconds
        )

    def _store(self, engine: Engine) -> Iterable[Metric]:
        """Yield numbers of stored tokens of prompts and texts."""
        known = getattr(engine.pair.target, "known_prompts", None)
        if known is not None:
            yield self._counter("prefix_cache_queries", "Tokens of prompts that could be known.", known.asked)
            yield self._counter("prefix_cache_hits", "Tokens of prompts that were known.", known.found)
            yield self._counter("prefix_cache_evictions", "Chunks that were dropped.", known.dropped)
            yield self._gauge("prefix_cache_bytes", "Memory of known prompts.", known.size)
        if engine.kv_share is not None:
            yield self._gauge(
                "kv_cache_usage_perc", "Share of the memory that texts may need, 0 to 1.", engine.kv_share
            )
        models = {"target": engine.pair.target, "draft": engine.pair.draft}
        stored = engine.counts.kv_tokens
        yield self._by_role("lanes", "Rows of the store in use.", {
            role: len(getattr(lm, "caches", ())) for role, lm in models.items() if lm is not None
        })  # fmt: skip
        yield self._by_role("kv_tokens", "Tokens that are stored for texts.", {
            role: stored.get(lm, 0) for role, lm in models.items() if lm is not None
        })  # fmt: skip

    def _counters(self) -> Iterable[Metric]:
        yield self._counter("prompt_tokens", "Tokens of prompts.", self.totals["prompt_tokens"])
        yield self._counter("generation_tokens", "Tokens of returned texts.", self.totals["generation_tokens"])
        yield self._counter("audio_seconds", "Seconds of audio that were transcribed.", self.audio_seconds)
        yield self._counter("spec_decode_num_drafts", "Turns of texts whose method drafts.", self.totals["drafts"])
        yield self._counter("spec_decode_num_draft_tokens", "Draft nodes.", self.totals["drafted"])
        yield self._counter("spec_decode_num_accepted_tokens", "Draft layers that passed.", self.totals["accepted"])
        by_depth = {str(depth): number for depth, number in sorted(self.passed.items())}
        what = "Draft layers that passed, by depth."
        yield self._by("spec_decode_num_accepted_tokens_per_pos", what, "position", by_depth)
        yield self._by("request_success", "Texts that ended.", "finished_reason", _sorted(self.finished))
        yield self._by("admission_rejections", "Requests that found no place.", "reason", _sorted(self.rejected))
        http = CounterMetricFamily("specbeam:http_requests", "Answers.", labels=["model_name", "path", "status"])
        for (path, status), number in sorted(self.http.items()):
            http.add_metric([self.name, path, str(status)], number)
        yield http

    def _by(self, name: str, what: str, label: str, counts: Mapping[str, float]) -> Metric:
        made = CounterMetricFamily(f"specbeam:{name}", what, labels=["model_name", label])
        for value, number in counts.items():
            made.add_metric([self.name, value], number)
        return made

    def _by_role(self, name: str, what: str, values: Mapping[str, float]) -> Metric:
        made = GaugeMetricFamily(f"specbeam:{name}", what, labels=["model_name", "role"])
        for role, value in values.items():
            made.add_metric([self.name, role], value)
        return made

    def _buckets(self, name: str, what: str, buckets: Buckets) -> Metric:
        made = HistogramMetricFamily(f"specbeam:{name}", what, labels=["model_name"])
        made.add_metric([self.name], buckets.cumulated, buckets.total)
        return made

    def _counter(self, name: str, what: str, value: float) -> Metric:
        made = CounterMetricFamily(f"specbeam:{name}", what, labels=["model_name", "engine"])
        made.add_metric([self.name, "0"], value)
        return made

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        made = GaugeMetricFamily(f"specbeam:{name}", what, labels=["model_name", "engine"])
        made.add_metric([self.name, "0"], value)
        return made

    def text(self) -> bytes:
        """Return all figures in the form that Prometheus reads."""
        return generate_latest(self.registry)


def _gauge(name: str, what: str, values: dict[tuple[tuple[str, str], ...], float]) -> Metric:
    labels = [label for label, _ in next(iter(values))]
    made = GaugeMetricFamily(f"specbeam:{name}", what, labels=labels)
    for named, value in values.items():
        made.add_metric([text for _, text in named], value)
    return made


def _sorted(counts: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(counts.items()))
