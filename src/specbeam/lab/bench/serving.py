"""A load test of a server: many clients at once, some of which disconnect, and their waiting times."""

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbeam.errors import BadSetting, MissingPackage, ServerRefused


@dataclass(frozen=True)
class ServedOnce:
    """One request of a load.

    Args:
        status: HTTP status; 0: the client disconnected as planned.
        waited_s: seconds from the planned start to the end, including delays of the load test itself.
        first_s: seconds to the first piece of text; None if there was none.
        tokens: number of new tokens.
        number: number of the request, from 0.
        texts: texts of the answer; empty without an answer.
        refusal: what the server says if it does not answer.
    """

    status: int
    waited_s: float
    first_s: float | None = None
    tokens: int = 0
    number: int = 0
    texts: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class LoadReport:
    """The figures of a load; seconds are medians and 99th percentiles over answered requests.

    Attributes:
        first_s: seconds to the first text of a stream; None without streams.
        per_token_s: seconds per further token of streams; None without streams of at least two tokens.
    """

    clients: int
    requests: int
    seconds: float
    answered: int
    gone: int
    statuses: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    waited_s: tuple[float, float]
    first_s: tuple[float, float] | None
    per_token_s: tuple[float, float] | None
    passes_per_token: float | None
    once: list[ServedOnce] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Load:
    """A load on a server.

    Args:
        prompts: prompts, used in turn.
        body: fields of each request besides prompt and seed.
        clients: number of clients, each with one request at a time; with `rate` the maximum number of open requests.
        requests: maximum number of requests.
        rate: requests per second at random times (Poisson); None: each client asks again as soon as it has its answer.
        gone: share of the requests whose client disconnects before the end.
        stream: whether answers are streamed, which shows the time to the first text.
        key: API key.
        seed: seed of the times, and of the first request; further requests count up.
        seconds: time after which no further request is sent; None: no limit.
        kinds: additional fields, used in turn; empty: `body` only.
    """

    prompts: Sequence[str]
    body: dict[str, Any] = field(default_factory=dict)
    clients: int = 8
    requests: int = 100
    rate: float | None = None
    gone: float = 0.0
    stream: bool = True
    key: str = ""
    seed: int = 0
    seconds: float | None = None
    kinds: Sequence[dict[str, Any]] = ()

    def fields(self, number: int) -> dict[str, Any]:
        """Return the body of a request."""
        own = self.kinds[number % len(self.kinds)] if self.kinds else {}
        prompt = self.prompts[number % len(self.prompts)]
        return {"prompt": prompt, "seed": self.seed + number, **self.body, **own}

    def __post_init__(self) -> None:
        if not self.prompts:
            raise BadSetting("there is no prompt; give at least one")
        for name in ("clients", "requests"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.gone <= 1:
            raise BadSetting(f"gone is {self.gone}; it must be a share, in [0, 1]")
        for name in ("rate", "seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadSetting(f"{name} is {value}; it must be above 0")


def measure_load(url: str, load: Load) -> LoadReport:
    """Put a load on the server at this address, and return the figures."""
    try:
        import httpx2
    except ImportError as error:
        raise MissingPackage("load tests need the package httpx2: pip install httpx2") from error
    try:
        return asyncio.run(_measured(url.rstrip("/"), load))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServerRefused(f"the server at {url} does not answer or has disconnected: {error}") from error


async def _measured(url: str, load: Load) -> LoadReport:
    import httpx2

    headers = {"authorization": f"Bearer {load.key}"} if load.key else {}
    limits = httpx2.Limits(max_connections=load.clients + 4)
    async with httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=600) as http:
        before = await _figures(http)
        began = time.perf_counter()
        arrivals = _arrivals(load)
        once: list[ServedOnce] = []

        async def client() -> None:
            for number, due, leaves in arrivals:
                now = time.perf_counter() - began
                if load.seconds is not None and max(due, now) > load.seconds:
                    return
                if due > now:
                    await asyncio.sleep(due - now)
                since = began + due if load.rate is not None else time.perf_counter()
                once.append(await _ask(http, load, number, leaves, since))

        await asyncio.gather(*(client() for _ in range(load.clients)))
        seconds = time.perf_counter() - began
        after = await _figures(http)
    return _report(load, once, seconds, before, after)


def _arrivals(load: Load) -> Iterator[tuple[int, float, bool]]:
    """Yield for each request its number, its planned time in seconds, and whether its client disconnects."""
    chance = random.Random(load.seed)
    due = 0.0
    for number in range(load.requests):
        if load.rate is not None and number > 0:
            due += chance.expovariate(load.rate)
        yield number, due, chance.random() < load.gone


async def _ask(http: Any, load: Load, number: int, leaves: bool, since: float) -> ServedOnce:
    """Send one request, and return its outcome."""
    body = load.fields(number)
    if not load.stream:
        answer = await http.post("/v1/completions", json=body)
        waited = time.perf_counter() - since
        if answer.status_code != 200:
            return ServedOnce(answer.status_code, waited, None, 0, number, refusal=answer.text[:200])
        found = answer.json()
        texts = tuple(choice["text"] for choice in found["choices"])
        return ServedOnce(200, waited, None, found["usage"]["completion_tokens"], number, texts)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    first: float | None = None
    tokens = 0
    pieces: dict[int, str] = {}
    refusal = ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                refusal = refusal or line[:200]
                continue
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices", ()):
                piece = choice.get("text") or ""
                pieces[choice["index"]] = pieces.get(choice["index"], "") + piece
                if piece and first is None:
                    first = time.perf_counter() - since
            if leaves and first is not None:
                return ServedOnce(0, time.perf_counter() - since, first, 0, number)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            if "error" in chunk:
                return ServedOnce(500, time.perf_counter() - since, first, 0, number, refusal=line[6:206])
        waited = time.perf_counter() - since
        if answer.status_code != 200:
            return ServedOnce(answer.status_code, waited, first, 0, number, refusal=refusal)
        texts = tuple(pieces[index] for index in sorted(pieces))
        return ServedOnce(200, waited, first, tokens, number, texts)


async def _figures(http: Any) -> dict[str, float]:
    """Return the server's counters of passes and tokens; {} without metrics."""
    answer = await http.get("/metrics")
    found: dict[str, float] = {}
    lines = answer.text.splitlines() if answer.status_code == 200 else []
    for line in lines:
        for name in ("target_passes_total", "generation_tokens_total"):
            if line.startswith(f"specbeam:{name}{{"):
                found[name] = float(line.rsplit(" ", 1)[1])
    return found


def _report(
    load: Load, once: list[ServedOnce], seconds: float, before: dict[str, float], after: dict[str, float]
) -> LoadReport:
    answered = [one for one in once if one.status == 200]
    firsts = [one.first_s for one in answered if one.first_s is not None]
    paces = [
        (one.waited_s - one.first_s) / (one.tokens - 1)
        for one in answered
        if one.first_s is not None and one.tokens > 1
    ]
    statuses = Counter(one.status for one in once)
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    tokens = gained.get("generation_tokens_total", 0.0)
    return LoadReport(
        clients=load.clients,
        requests=len(once),
        seconds=seconds,
        answered=len(answered),
        gone=statuses[0],
        statuses={str(status): number for status, number in sorted(statuses.items())},
        requests_per_s=len(answered) / seconds,
        tokens_per_s=sum(one.tokens for one in answered) / seconds,
        waited_s=_middle_and_end([one.waited_s for one in answered]),
        first_s=_middle_and_end(firsts) if firsts else None,
        per_token_s=_middle_and_end(paces) if paces else None,
        passes_per_token=gained["target_passes_total"] / tokens if tokens else None,
        once=once,
    )


def _middle_and_end(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile; NaN if there are no values."""
    if not values:
        return float("nan"), float("nan")
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
