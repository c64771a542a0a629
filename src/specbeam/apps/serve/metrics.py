"""Metrics for Prometheus, under vLLM's names where it has them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from specbeam import __version__
from specbeam.apps.serve.answers import drafting_passes
from specbeam.apps.serve.buckets import SECONDS, Buckets
from specbeam.apps.serve.engine import CUTS, Engine, Job, length_of
from specbeam.core import LM

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
REJECTIONS = ("draining", "key_limit", "queue_full", "queue_timeout")  # for lack of capacity
OF_ENGINE = ("model_name", "engine")  # labels of all metrics but the version, as in vLLM
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class ServerMetrics:
    """The metrics of one server, in its own registry. No label value comes from a request.

    The event loop updates them when a request ends. The engine keeps plain counters, which `collect` reads.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine = (name, "0")  # the values of `OF_ENGINE`
        self.registry = CollectorRegistry()
        self.engine: Engine | None = None
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.http: Counter[tuple[str, int]] = Counter()
        self.totals: Counter[str] = Counter()
        self.audio_seconds = 0.0  # seconds of transcribed audio
        self.passed: Counter[int] = Counter()  # draft layers, by their depth
        self.first_token = self._histogram("time_to_first_token_seconds", "Seconds to the first token.", SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "Seconds from arrival to the end.", SECONDS)
        self.queue = self._histogram("request_queue_time_seconds", "Seconds from arrival to decoding.", SECONDS)
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
        made = Histogram(f"specbeam:{name}", what, [*OF_ENGINE], buckets=buckets, registry=self.registry)
        return made.labels(*self._engine)

    def note(
        self, jobs: Sequence[Job], prompt_tokens: int, tokens: int, n: int, beams: int, reasons: Iterable[str]
    ) -> None:
        """Count an answered request."""
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
            length = length_of(job.session)
            if job.ended is not None and job.first_token is not None and length > 1:
                self.per_token.observe((job.ended - job.first_token) / (length - 1))

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that are plain numbers; called by the registry."""
        version = GaugeMetricFamily("specbeam:build_info", "Version.", labels=["version"])
        version.add_metric([__version__], 1)
        yield version
        yield from self._server_counters()
        engine = self.engine
        if engine is None:
            return
        yield self._gauge("num_requests_running", "Texts being decoded.", len(engine.inside))
        yield self._gauge("num_requests_waiting", "Waiting texts.", engine.waiting)
        yield from self._engine_counters(engine)
        yield from self._store(engine)

    def _engine_counters(self, engine: Engine) -> Iterable[Metric]:
        """Yield the counters of the engine."""
        counts = engine.counts
        yield self._counter("target_passes", "Target passes, summed over texts.", counts.target_passes)
        yield self._counter("draft_passes", "Draft passes, summed over texts.", counts.draft_passes)
        yield self._counter("target_rows", "Rows scored by the target.", counts.target_rows)
        yield self._counter("cancelled", "Cancelled texts.", counts.cancelled)
        yield self._counter("engine_restarts", "Restarts of the engine after a fault.", counts.restarts)
        yield self._counter("audit_failures", "Texts whose audit rejects their law.", counts.audit_failures)
        yield self._counter("step_seconds", "Seconds of decoding.", counts.step_seconds)
        if counts.joules is not None:
            yield self._counters(
                "energy_joules", "Energy used for decoding.", "source", {"cpu_packages": counts.joules}
            )
        yield self._buckets(
            "pass_seconds", "Seconds of a turn: drafting, target pass, verification.", counts.turn_seconds
        )
        yield self._buckets("inter_token_latency_seconds", "Seconds between two tokens.", counts.token_seconds)

    def _store(self, engine: Engine) -> Iterable[Metric]:
        """Yield the metrics of the prefix cache and the KV cache."""
        known = getattr(engine.pair.target, "known_prompts", None)
        if known is not None:
            yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", known.asked)
            yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", known.found)
            yield self._counter("prefix_cache_evictions", "Chunks evicted from the prefix cache.", known.dropped)
            yield self._gauge("prefix_cache_bytes", "Memory of the prefix cache.", known.size)
        if engine.kv_share is not None:
            yield self._gauge(
                "kv_cache_usage_perc", "Share of the KV budget reserved for running texts, 0 to 1.", engine.kv_share
            )
        models: dict[str, LM] = {"target": engine.pair.target}
        if engine.pair.draft is not None:
            models["draft"] = engine.pair.draft
        lanes = {role: len(getattr(lm, "caches", ())) for role, lm in models.items()}
        tokens = {role: engine.counts.kv_tokens.get(lm, 0) for role, lm in models.items()}
        yield self._family(GaugeMetricFamily, "lanes", "KV cache rows in use.", "role", lanes)
        yield self._family(GaugeMetricFamily, "kv_tokens", "Tokens in the KV cache.", "role", tokens)

    def _server_counters(self) -> Iterable[Metric]:
        yield self._counter("prompt_tokens", "Tokens of prompts.", self.totals["prompt_tokens"])
        yield self._counter("generation_tokens", "Tokens of returned texts.", self.totals["generation_tokens"])
        yield self._counter("audio_seconds", "Seconds of transcribed audio.", self.audio_seconds)
        yield self._counter("spec_decode_num_drafts", "Turns of methods that draft.", self.totals["drafts"])
        yield self._counter("spec_decode_num_draft_tokens", "Draft nodes.", self.totals["drafted"])
        yield self._counter("spec_decode_num_accepted_tokens", "Accepted draft layers.", self.totals["accepted"])
        by_depth = {str(depth): number for depth, number in sorted(self.passed.items())}
        what = "Accepted draft layers, by depth."
        yield self._counters("spec_decode_num_accepted_tokens_per_pos", what, "position", by_depth)
        finished = dict(sorted(self.finished.items()))
        yield self._counters("request_success", "Finished texts.", "finished_reason", finished)
        rejected = {code: self.rejected[code] for code in sorted({*REJECTIONS, *self.rejected})}
        yield self._counters("admission_rejections", "Requests rejected for lack of capacity.", "reason", rejected)
        cut = {reason: self.cut[reason] for reason in CUTS}
        yield self._counters("texts_cut", "Texts that the server cut off.", "reason", cut)
        http = CounterMetricFamily("specbeam:http_requests", "Answers.", labels=[*OF_ENGINE, "path", "status"])
        for (path, status), number in sorted(self.http.items()):
            http.add_metric([*self._engine, path, str(status)], number)
        yield http

    def _family(self, kind: Any, name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
        """Return a metric of a kind with a value for each value of a label."""
        made: Metric = kind(f"specbeam:{name}", what, labels=[*OF_ENGINE, label])
        for of_label, value in values.items():
            made.add_metric([*self._engine, of_label], value)
        return made

    def _single(self, kind: Any, name: str, what: str, value: float) -> Metric:
        """Return a metric of a kind with one value."""
        made: Metric = kind(f"specbeam:{name}", what, labels=OF_ENGINE)
        made.add_metric(self._engine, value)
        return made

    def _counters(self, name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._family(CounterMetricFamily, name, what, label, values)

    def _buckets(self, name: str, what: str, buckets: Buckets) -> Metric:
        made = HistogramMetricFamily(f"specbeam:{name}", what, labels=OF_ENGINE)
        made.add_metric(self._engine, buckets.cumulated, buckets.total)
        return made

    def _counter(self, name: str, what: str, value: float) -> Metric:
        return self._single(CounterMetricFamily, name, what, value)

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        return self._single(GaugeMetricFamily, name, what, value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
