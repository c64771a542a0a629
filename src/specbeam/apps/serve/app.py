"""The HTTP server: OpenAI's API with beams, health, metrics, and a page."""

import asyncio
import contextlib
import hmac
import inspect
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from specbeam import (
    Catalogue,
    Generation,
    Method,
    Pair,
    __version__,
    beam_search,
    catalogue,
    decode,
    dsbd,
    sampling,
    speculative_beam_search,
)
from specbeam.apps.serve.answers import fingerprint, token_text
from specbeam.apps.serve.asking import BUSY, DONE, Asking, as_event, new_number, too_late
from specbeam.apps.serve.auth import Client, Keys
from specbeam.apps.serve.bodies import read_body, unless_gone
from specbeam.apps.serve.bounds import characters_per_token
from specbeam.apps.serve.config import MIB, ServerConfig
from specbeam.apps.serve.engine import COMPILE_S, Engine, EngineLimits, Job, length_of
from specbeam.apps.serve.guarding import Guarding
from specbeam.apps.serve.logs import compilation_text
from specbeam.apps.serve.mapping import (
    OBJECTS,
    RECIPE_OF,
    Order,
    Served,
    chat_ids,
    check_model,
    check_priority,
    number_of_texts,
    order_of,
    prompt_ids,
)
from specbeam.apps.serve.metrics import ServerMetrics
from specbeam.apps.serve.pacing import RefusalPace
from specbeam.apps.serve.pools import KeyedPool, Pools
from specbeam.apps.serve.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Strict,
    TokenizeBody,
    parse_body,
)
from specbeam.apps.serve.refusals import Refusal, invalid, refusal_of
from specbeam.apps.serve.responses import (
    ResponseForm,
    ResponsesBody,
    as_typed_event,
    response_request,
)
from specbeam.apps.serve.speech_desk import SpeechDesk
from specbeam.apps.serve.speech_orders import AudioBody
from specbeam.apps.speech.audio import RATE
from specbeam.apps.speech.transcribe import TEMPERATURES, SpeechSettings, Thresholds, ears_of, extractor_of, methods_of
from specbeam.core import TURNS, free_memory
from specbeam.doors import (
    BUNDLED_TEMPLATE,
    USUAL_BEAMS,
    Settings,
    chosen_by_speed,
    compilation_watch,
    hears,
    method_from,
    usual_method,
    viewer_parts,
)
from specbeam.doors import Request as SessionRequest
from specbeam.errors import (
    BadCheckpoint,
    BadHead,
    BadSetting,
    MissingFile,
    MissingPackage,
    NotSupported,
    SpecbeamError,
    UnsupportedModel,
    VocabularyMismatch,
)
from specbeam.recipes import HEAD_RECIPES, recipe_of

LOG = logging.getLogger("specbeam.serve")
PAGE = Path(__file__).parent / "page" / "index.html"
WARM_TOKENS = 8  # length of each text that is decoded before the server is ready
MOST_SHOWN = 2  # concurrent requests whose turns are shown or audited
CONSTRAINTS = 4  # constraints compiled at the same time
CONSTRAINTS_PER_KEY = 1
LARGE = 16_384  # bytes of a body from which it is read and tokenized apart from small ones
READERS = 8  # large bodies read at the same time
READERS_PER_KEY = 2
READ_S = 30.0  # seconds in which a large body must be read and tokenized
MOST_NEW = 30  # requests with new method settings per key within `NEW_S` seconds
NEW_S = 60.0
Result = TypeVar("Result")
CSP = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Paths of other servers that clients may try, and what to do instead.
_ELSEWHERE = {
    "/v1/embeddings": "it generates text and has no embeddings; ask a server with an embedding model",
    "/v1/rerank": "it generates text and ranks no documents; ask a server with a reranking model",
    "/v1/moderations": "it has no moderation model",
    "/v1/messages": "it does not speak Anthropic's API; use /v1/chat/completions or /v1/responses",
    "/v1/images/generations": "it generates text, not images",
    "/v1/audio/speech": "it does not synthesise speech",
    "/v1/files": "it stores no files; decode many prompts with `specbeam batch`",
    "/v1/batches": "it stores no jobs; decode many prompts with `specbeam batch`",
    "/v1/assistants": "it stores no assistants; send the whole conversation to /v1/chat/completions",
    "/v1/threads": "it stores no threads; send the whole conversation to /v1/chat/completions",
    "/v1/fine_tuning/jobs": "it does not train; see `specbeam train`",
    "/v1/realtime": "it has no realtime sessions; set stream to true in /v1/chat/completions",
    "/completions": "use /v1/completions, so the client's base URL must end in /v1",
    "/chat/completions": "use /v1/chat/completions, so the client's base URL must end in /v1",
    "/responses": "use /v1/responses, so the client's base URL must end in /v1",
    "/models": "use /v1/models, so the client's base URL must end in /v1",
    "/api/generate": "it speaks OpenAI's API, not Ollama's; use /v1/completions",
    "/api/chat": "it speaks OpenAI's API, not Ollama's; use /v1/chat/completions",
}


class UnderWay(Protocol):
    """A request in progress as the server sees it."""

    client: Client
    jobs: list[Job]
    began: float  # clock time

    @property
    def method_name(self) -> str: ...

    def cancel(self) -> None: ...


# Causes of a failed start that a restart does not mend; files, memory and the hub may be there a moment later.
LASTING = (BadCheckpoint, BadHead, BadSetting, MissingPackage, NotSupported, UnsupportedModel, VocabularyMismatch)


class BeamServer:
    """The state of a server: its models, its engine, and the requests in progress.

    Args:
        config: the operator's settings.
        load: returns the pair; called in a thread after the server listens.
    """

    def __init__(self, config: ServerConfig, load: Callable[[], Pair]) -> None:
        self.config = config
        self.keys = Keys.of(config)
        self.metrics = ServerMetrics(config.name or str(config.model))
        self.state = "loading"  # then "ready", "draining" or "failed"
        self.failure = ""
        self.exit_code = 0  # of a start that failed: 2 if a restart cannot mend the cause
        self.phase = "loading the models"  # while the state is "loading"
        self.asking: dict[str, UnderWay] = {}
        self.engine: Engine | None = None
        self.fingerprint = ""
        self.schema = b""  # the OpenAPI description of the routes
        self.pool = ThreadPoolExecutor(4, thread_name_prefix="specbeam request")
        self.speech = SpeechDesk(self)
        self._load = load
        self._served: Served | None = None
        patience = config.queue_timeout
        self._pools = Pools(
            KeyedPool(READERS, "specbeam reader", READERS_PER_KEY, READ_S, patience),
            KeyedPool(READERS, "specbeam large reader", READERS_PER_KEY, READ_S, patience),
            KeyedPool(CONSTRAINTS, "specbeam constraint", CONSTRAINTS_PER_KEY, config.compile_timeout, patience),
        )
        compilation_watch()  # counts from now on
        self._shown: set[Asking] = set()  # requests whose turns are shown or audited
        self.pace = RefusalPace(time.monotonic)
        self._new: dict[str, deque[float]] = {}  # by key, the times of its latest requests with new method settings
        self._service_s = 1.0  # moving average of the seconds per text

    @property
    def served(self) -> Served:
        """The served models. Raises `Refusal` before they are loaded and after the engine has stopped."""
        if self._served is None or self.state != "ready":
            code = "engine_dead" if self.state == "failed" else self.state
            message = f"the server is not ready (state: {self.state}); try again later"
            raise Refusal(503, "overloaded_error", code, message, None, 5)
        return self._served

    @property
    def has_started(self) -> bool:
        """Whether the server was ready to answer once."""
        return self.metrics.engine is not None

    def start(self) -> None:
        """Load the pair and start the engine, which may take minutes. Raises `BadSetting` if there is too little memory."""
        try:
            pair = self._load()
            self._served = served_of(self.config, pair)
            self.fingerprint = fingerprint(pair, self.config.chunk)
            limits = _engine_limits(self.config, pair)
            self.engine = Engine(pair, limits, self.keys.weights, self.keys.most_running).start()
            unfit = self.engine.call(lambda: _unfit(pair)).result()
            served = replace(self._served, unfit=unfit)
            self._served = served
            if served.hears:
                self.speech.open(pair)
            self.phase = "warming up"
            self.engine.call(lambda: _warm_up(pair, served), COMPILE_S).result()
        except Exception as error:
            self.failure = str(error)
            self.exit_code = 2 if isinstance(error, LASTING) else 1
            self.state = "failed"
            if isinstance(error, MemoryError):
                running = self.config.max_running
                raise BadSetting(
                    f"not enough memory to decode max_running={running} texts at the same time; lower it ({error})"
                ) from error
            raise
        self.metrics.engine = self.engine
        if self.state == "loading":
            self.state = "ready"

    def drain(self) -> None:
        """Refuse new requests, finish the running ones, and stop the engine."""
        self.state = "draining"
        end = time.monotonic() + self.config.drain_timeout
        while self.speech.under_way and time.monotonic() < end:  # each window is a separate text for the engine
            time.sleep(0.05)
        if self.engine is not None:
            self.engine.drain(max(end - time.monotonic(), 0.0))
            self.engine.close()

    def close_pools(self) -> None:
        """Stop the threads that work for requests after their current work."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._pools.close()
        self.speech.close()

    def give_up(self, reason: str) -> None:
        """Fail all requests because the engine does not respond."""
        self.failure = reason
        self.state = "failed"
        if self.engine is not None:
            self.engine.abandon(reason)

    def read_keys(self) -> None:
        """Reload the key file. Raises `SpecbeamError` if it is invalid; the old keys then stay in use."""
        self.keys = Keys.of(self.config)
        if self.engine is not None:
            self.engine.share(self.keys.weights, self.keys.most_running)

    def client(self, http: Request) -> Client:
        """Return the client of a request. Raises `Refusal` if it has no valid key."""
        return self.keys.client(http.headers.get("authorization"))

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and JSON of a health check."""
        engine = self.engine
        state = self.state
        if engine is not None and state in ("ready", "draining"):
            is_dead = engine.state == "dead" or engine.stalled_s > self.config.stall_timeout
            state = "engine_dead" if is_dead else state
        if state == "ready":
            return 200, {"status": "ok", "model": self.metrics.name}
        message = self.failure
        if state == "loading":
            message = compilation_text() or self.phase
        return 503, {"status": "engine_dead" if state == "failed" else state, "message": message}

    def cause_of_death(self) -> str:
        """Return the reason why the engine is dead or stuck; "" if it works, or has not started."""
        _, found = self.health()
        if found["status"] != "engine_dead":
            return ""
        return found["message"] or "the engine has made no progress for longer than stall_timeout"

    async def answer(self, http: Request, read: Callable[[bytes], tuple[Body, ResponseForm | None]]) -> Response:
        """Answer a request for texts.

        Args:
            read: returns the body of a completion or a chat, and the form of the answer if it is none of these.
        """
        client = self.client(http)
        served = self.served
        engine = self.engine
        assert engine is not None
        raw = await read_body(http, self.config.max_body)
        note = http.scope["state"]["note"]
        note["key"] = client.name

        def named(error: Exception, form: ResponseForm | None) -> Refusal:
            refusal = self.refusal(error)
            return refusal if form is None else form.names.refusal(refusal)

        def ordered() -> tuple[Order, ResponseForm | None]:
            body, form = read(raw)
            try:
                check_priority(body, client)
                engine.check_room(client.name, number_of_texts(body))
                return order_of(body, served), form
            except (Refusal, SpecbeamError) as error:
                raise named(error, form) from error

        pool_key = self.pool_key(http, client)
        order, form = await self._read(raw, pool_key, ordered)
        note |= {"method": order.method.name, "prompts": len(order.prompts), "n": order.count}
        if self.config.log_texts:
            note["texts"] = order.texts
        asking = Asking(order, served, engine, client, self.pool, self.free_number(http))
        asking.fingerprint = self.fingerprint
        asking.pool_key = pool_key
        self.check_new(order.method_key, client)
        self._take(asking)
        try:
            await asking.begin(self._pools)
        except (Refusal, SpecbeamError) as error:
            self._let_go(asking)
            raise named(error, form) from error
        except BaseException:
            self._let_go(asking)
            raise
        if order.streams:
            return _Stream(self._events(asking, note, form), lambda: self._forget(asking, note))
        try:
            found = await unless_gone(http, asking.answer())
        except (Refusal, SpecbeamError) as error:
            refusal = named(error, form)
            note["error"] = refusal.code
            raise refusal from error
        except Exception:
            note["error"] = "engine_error"
            raise
        finally:
            self._forget(asking, note)
        return JSONResponse(found if form is None else form.whole(found))

    def free_number(self, http: Request) -> str:
        """Return the id of a request: the one that its client chose, unless a running request has it."""
        number = str(http.scope["state"]["number"])
        return f"{number}-{new_number()}" if number in self.asking else number

    def check_new(self, method_key: str, client: Client) -> None:
        """Raise `Refusal` if a key uses too many new method settings: each may have to be compiled."""
        assert self.engine is not None
        if self.engine.knows(method_key):
            return
        now = time.monotonic()
        times = self._new.setdefault(client.name, deque(maxlen=MOST_NEW))
        if len(times) == MOST_NEW and now - times[0] < NEW_S:
            raise self.refuse_full(
                "key_limit",
                f"this key used {MOST_NEW} new method settings within {NEW_S:g} seconds, the limit; try again later",
            )
        times.append(now)

    def _take(self, asking: Asking) -> None:
        """Register a request. Raises `Refusal` if its turns are to be shown and too many such requests are running."""
        options = asking.order.options
        if options.trace or options.audit or options.stream == "live":
            if len(self._shown) >= MOST_SHOWN:
                raise self.refuse_full(
                    "key_limit",
                    f"{MOST_SHOWN} requests with trace, audit or live beams are already running, the limit; try again later",
                )
            self._shown.add(asking)
        self.asking[asking.number] = asking

    def _let_go(self, asking: Asking) -> None:
        """Cancel a request and forget it."""
        asking.cancel()
        self._shown.discard(asking)
        self.asking.pop(asking.number, None)

    async def _events(self, asking: Asking, note: dict[str, Any], form: ResponseForm | None) -> AsyncIterator[bytes]:
        """Yield the events of a stream. The request is cancelled if its client stops reading."""
        reader = _Reader(asking, self.config.reader_timeout)

        async def all_events() -> AsyncIterator[bytes]:
            try:
                if form is None:
                    async for chunk in asking.stream():
                        yield as_event(chunk)
                else:
                    async for event in form.events(asking.stream()):
                        yield as_typed_event(event)
            except (Refusal, SpecbeamError) as error:
                refusal = self.refusal(error)
                note["error"] = refusal.code
                yield as_event(refusal.body) if form is None else as_typed_event(form.failure(refusal))
            except Exception as error:  # the status was sent already: only an event can report the failure
                LOG.exception("request %s failed", asking.number)
                note["error"] = "engine_error"
                refusal = refusal_of(error)
                yield as_event(refusal.body) if form is None else as_typed_event(form.failure(refusal))
            if form is None:
                yield DONE

        try:
            async for event in all_events():
                reader.sends()
                yield event
                reader.has_sent()
        finally:
            reader.has_sent()

    def _forget(self, asking: Asking, note: dict[str, Any]) -> None:
        """Forget a registered request, and count its outcome."""
        self._let_go(asking)
        jobs = asking.jobs
        outcome = asking.outcome
        if outcome is None or note.get("error") is not None:
            is_gone = note.setdefault("error", "abort") in ("abort", "cancelled")
            self.metrics.finished["abort" if is_gone else "error"] += 1
            return
        tokens = sum(len(choice.tokens) for choice in outcome.choices)
        prompt_tokens = sum(map(len, asking.order.prompts))
        reasons = [choice.finish_reason for choice in outcome.choices]
        self.metrics.note(jobs, prompt_tokens, tokens, asking.order.count, asking.order.method.beams, reasons)
        note |= {"prompt_tokens": prompt_tokens, "tokens": tokens}
        cut = Counter(job.cut for job in jobs if job.cut)
        self.metrics.cut += cut
        if cut:
            note["cut"] = ", ".join(sorted(cut))
        if self.config.log_texts:
            note["answers"] = [choice.text for choice in outcome.choices]
        for job in jobs:
            if job.started is not None and job.ended is not None:
                self._service_s = 0.9 * self._service_s + 0.1 * (job.ended - job.started)

    def note_window(self, jobs: list[Job], texts: list[Generation]) -> None:
        """Count a window of audio with the texts decoded for it."""
        prompt_tokens = sum(len(job.session.prompt) for job in jobs)
        tokens = sum(len(text.tokens) for text in texts)
        beams = max(job.session.limits.keep for job in jobs)
        self.metrics.note(jobs, prompt_tokens, tokens, len(texts), beams, ["stop"] * len(texts))

    def refusal(self, error: Exception) -> Refusal:
        """Return the refusal for an error. A rejection for lack of capacity is counted, and gets a time to retry after."""
        refusal = refusal_of(error)
        if refusal.status in (429, 503):
            refusal.retry_after = self._retry_after()
            self.metrics.rejected[refusal.code] += 1
        return refusal

    def _retry_after(self) -> int:
        """Return the seconds after which the queue may have a free place."""
        waiting = self.engine.waiting if self.engine is not None else 1
        return int(min(max(waiting * self._service_s / self.config.max_running, 1), 60))

    def refuse_full(self, code: str, message: str) -> Refusal:
        self.metrics.rejected[code] += 1
        return Refusal(429, "rate_limit_error", code, message, None, self._retry_after())

    async def in_pool(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)

    async def convert(self, http: Request, converted: Callable[[bytes, Served], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a function of the body, such as the tokens of a text."""
        client = self.client(http)
        served = self.served
        raw = await read_body(http, self.config.max_body)
        return await self._read(raw, self.pool_key(http, client), lambda: converted(raw, served))

    def pool_key(self, http: Request, client: Client) -> str:
        """Return the key by which requests share threads: that of the client, or its address if no keys are needed."""
        return client.name if self.keys.needed or http.client is None else http.client.host

    async def _read(self, raw: bytes, pool_key: str, function: Callable[[], Result]) -> Result:
        """Return the result of a function that reads a body, in threads of which each key has a part.

        Large bodies take seconds to tokenize, so small ones do not wait for them.
        """
        pool = self._pools.small if len(raw) < LARGE else self._pools.large
        return await pool.make(pool_key, function, BUSY, too_late())

    def methods(self) -> list[dict[str, Any]]:
        """Return the methods that requests may use, with their laws and settings."""
        allowed = self.config.methods or tuple(RECIPE_OF)
        found = []
        for name, make in RECIPE_OF.items():
            if name in allowed:
                recipe = recipe_of(make)
                meanings = recipe.settings
                settings = {
                    key: {"default": _plain(one.default), "type": str(one.annotation), "about": meanings.get(key, "")}
                    for key, one in inspect.signature(make).parameters.items()
                    if key not in OBJECTS
                }
                found.append(
                    {"name": name, "about": recipe.about, "law": recipe.law, "paper": recipe.paper, "exact": recipe.exact,
                     "needs": recipe.needs, "lossless": recipe.lossless, "settings": settings,
                     "available": name not in self.served.unfit}
                )  # fmt: skip
        return found

    def requests(self, client: Client) -> list[dict[str, Any]]:
        """Return the requests of a client that are in progress."""
        now = time.monotonic()
        return [
            {
                "id": number,
                "method": asking.method_name,
                "tokens": sum(length_of(job.session) for job in asking.jobs),
                "running": sum(job.started is not None and not job.is_over for job in asking.jobs),
                "waiting": sum(job.started is None and not job.is_over for job in asking.jobs),
                "seconds": round(now - asking.began, 3),
            }
            for number, asking in self.asking.items()
            if asking.client.name == client.name
        ]


class _Stream(StreamingResponse):
    """A stream of events that always calls `end`, even if the client disconnects before the first event.

    Args:
        end: called once the stream is over.
    """

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # the `finally` of a generator does not run if it was never started
            self._end()


def _tokenized(raw: bytes, served: Served) -> dict[str, Any]:
    """Return the answer to a body of /tokenize."""
    body = parse_body(TokenizeBody, raw)
    check_model(body.model, served)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if body.messages is not None:
        ids = chat_ids(body, served)
    else:
        ids = prompt_ids(body.prompt or "", served, body.add_special_tokens is not False)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": served.room, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [token_text(served.pair, token)[0] for token in ids]
    return found


def _detokenized(raw: bytes, served: Served) -> dict[str, Any]:
    """Return the answer to a body of /detokenize."""
    body = parse_body(DetokenizeBody, raw)
    check_model(body.model, served)
    tokenizer = served.pair.tokenizer
    if tokenizer is None:
        raise invalid("this server has no tokenizer", "tokens", "not_supported")
    if max(body.tokens) >= served.pair.target.vocab:
        raise invalid(
            f"tokens has {max(body.tokens)}; the model's tokens are 0 to {served.pair.target.vocab - 1}", "tokens"
        )
    return {"prompt": str(tokenizer.decode(body.tokens))}


class _Reader:
    """Cancels a request if its client does not read the stream for some seconds."""

    def __init__(self, asking: Asking, seconds: float) -> None:
        self._asking = asking
        self._seconds = seconds
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None

    def sends(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._cut)

    def has_sent(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        self._asking.cancel()
        if self._task is not None:
            self._task.cancel()


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def _engine_limits(config: ServerConfig, pair: Pair) -> EngineLimits:
    return EngineLimits(
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        max_running_per_key=config.max_running_per_key,
        kv_bytes=_kv_bytes(config, pair.target.device.type == "cpu"),
        chunk=config.chunk,
        prefix_bytes=config.prefix_cache_mb * MIB,
    )


def _kv_bytes(config: ServerConfig, is_on_cpu: bool) -> int | None:
    """Return the memory for KV caches in bytes; None: unlimited. Raises `BadSetting` if it is more than there is."""
    if not config.kv_gb:
        return half_of_free_memory()
    free = free_memory()
    asked = int(config.kv_gb * 1e9)
    if is_on_cpu and asked > free:
        raise BadSetting(
            f"kv_gb is {config.kv_gb:g}, but only {free / 1e9:.1f} GB of memory are free; give less, or leave it out"
        )
    return asked


def half_of_free_memory() -> int | None:
    """Return half of the memory in bytes that this process may still take; None if it is unknown."""
    free = free_memory()
    return int(free / 2) if math.isfinite(free) else None


def served_of(config: ServerConfig, pair: Pair) -> Served:
    """Return the models, method and chat template that answer requests."""
    template: str | None = None
    if config.chat_template:
        try:
            template = Path(config.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MissingFile(f"chat_template {config.chat_template!r} cannot be read: {error}") from error
    elif config.model == "bundled":
        template = BUNDLED_TEMPLATE
    name = config.name or str(config.model)
    longest = characters_per_token(pair.tokenizer)
    catalogues: dict[str, Catalogue] = {}
    for of_request, file in _catalogue_files(config).items():
        catalogues[of_request] = catalogue(file)
        catalogues[of_request].longest(pair.tokenizer, pair.eos)  # makes the trie before the first request
    return Served(pair, name, default_method(config, pair), config, template, longest, catalogues)


def _catalogue_files(config: ServerConfig) -> dict[str, Path]:
    """Return the file of each catalogue by its name in requests. Raises `BadSetting` if two files have the same name."""
    found: dict[str, Path] = {}
    for given in config.catalogues:
        file = Path(given).expanduser()
        if file.stem in found:
            raise BadSetting(
                f"the catalogues {found[file.stem]} and {file} both have the name {file.stem!r} in requests; rename one of "
                "the files"
            )
        found[file.stem] = file
    return found


def default_method(config: ServerConfig, pair: Pair) -> Method:
    """Return the method of requests that do not choose one."""
    if hears(pair):
        if config.method == "auto":
            raise NotSupported(
                "method 'auto' is measured on texts, but this model reads audio; choose a method by name"
            )
        return methods_of(pair, None if config.method == "" else method_from(config.method, list(config.settings)))[0]
    if config.method == "":
        own = [*config.settings]
        if config.max_beams < USUAL_BEAMS and not any(one.startswith("beams=") for one in own):
            own.append(f"beams={config.max_beams}")
        return usual_method(pair, own)
    if config.method == "auto":
        return chosen_by_speed(pair, ["Ein Hund läuft."] if pair.tokenizer is not None else [[1, 2, 3]], Settings())[0]
    return method_from(config.method, list(config.settings))


def _warm_ears(pair: Pair, served: Served) -> None:
    """Transcribe a second of noise at two temperatures, to compile usual passes. Runs in the engine's thread."""
    noise = np.random.default_rng(0).normal(scale=0.1, size=RATE).astype(np.float32)
    thresholds = Thresholds(compression_ratio=None, log_prob=math.inf, no_speech=None)  # each text fails
    options = {"max_new_tokens": WARM_TOKENS, "eos_token_id": []}
    ears = ears_of(pair, SpeechSettings(served.method, thresholds, TEMPERATURES[:2], seed=0, options=options))
    ears.hear([ears.begin(extractor_of(pair), noise, None, "transcribe", None)])


def _warm_up(pair: Pair, served: Served) -> None:
    """Reserve memory for the largest batch, and compile and time the usual methods before the first request.

    Runs in the engine's thread.
    """
    config = served.config
    for lm in (pair.target, pair.draft):
        if lm is not None and hasattr(lm, "reserve"):
            lm.reserve(config.max_running + 1, min(served.room or 512, 512))
    if not served.hears:
        with contextlib.suppress(SpecbeamError):  # the first constraint would wait for the spellings of all tokens
            SessionRequest.of(pair, [], sampling(), Settings(regex="a+"), 0)
    if not config.warm_up:
        return
    if served.hears:
        _warm_ears(pair, served)
        return
    beams = min(config.default_beams, config.max_beams)
    usual = [served.method, beam_search(beams)]
    if pair.draft is not None:
        usual += [speculative_beam_search(beams), dsbd(beams)]
    for method in usual:
        settings = Settings(max_new_tokens=WARM_TOKENS, eos_token_id=[])
        for prompts, ahead in (([[1, 2]], 0), ([[1, 2]], TURNS), ([[1, 2], [1, 3]], 1)):
            request = SessionRequest.of(pair, prompts, method, settings, 0)
            for _ in decode(pair.target, request.sessions, ahead=ahead):
                pass


def _unfit(pair: Pair) -> frozenset[str]:
    """Return the names of the recipes that cannot run with a pair, whatever their settings.

    Recipes for heads need a head of their kind, and raise before their parts are made; others need a draft model at most.
    """
    names = {name for name, make in RECIPE_OF.items() if pair.draft is None and make().needs_draft}
    for make in HEAD_RECIPES:
        try:
            make().parts(pair.target, pair.draft)
        except NotSupported:
            names.add(make.__name__)
    return frozenset(names)


def make_app(server: BeamServer) -> Any:
    """Return the routes of a server, as an ASGI application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if server.engine is None:  # a replica of Ray has started it already
            loading = asyncio.get_running_loop().run_in_executor(None, server.start)
            loading.add_done_callback(_log_failure)
        yield
        await asyncio.get_running_loop().run_in_executor(None, server.drain)
        server.close_pools()

    app = FastAPI(
        title="specbeam", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )

    async def refused(http: Request, error: Exception) -> JSONResponse:
        refusal = refusal_of(error)
        if refusal.status >= 500 and not isinstance(error, Refusal):
            LOG.error("request %s failed", http.scope["state"]["number"], exc_info=error)
        note = http.scope["state"]["note"]
        note["error"] = refusal.code
        if refusal.status in (401, 429):
            address = "" if http.client is None else http.client.host
            await asyncio.sleep(server.pace.delay(note.get("key") or address))
        return refusal.response()

    def strange(http: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        known = {404: "unknown_url", 405: "method_not_allowed"}
        code = known.get(error.status_code, "bad_setting")
        elsewhere = _ELSEWHERE.get(http.url.path.rstrip("/")) if error.status_code == 404 else None
        allowed = (error.headers or {}).get("Allow") if error.status_code == 405 else None
        advice = elsewhere or (f"use {allowed}" if allowed else error.detail)
        message = f"this server does not answer {http.method} {http.url.path[:200]}: {advice}"
        kind = "not_found_error" if error.status_code in known else "invalid_request_error"
        return JSONResponse(
            Refusal(error.status_code, kind, code, message).body, error.status_code, headers=error.headers
        )

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(SpecbeamError, refused)
    app.add_exception_handler(RequestValidationError, refused)
    app.add_exception_handler(Exception, refused)
    app.add_exception_handler(HTTPException, strange)
    _add_decoding(app, server)
    _add_looking(app, server)
    _add_operating(app, server)
    schema = _schema(app)
    server.schema = JSONResponse(schema).body
    paths = frozenset(path for path in schema["paths"] if "{" not in path)
    return Guarding(app, server.config, server.metrics, paths)


def _log_failure(loading: "asyncio.Future[None]") -> None:
    error = None if loading.cancelled() else loading.exception()
    if error is not None:
        has_traceback = not isinstance(error, SpecbeamError)
        LOG.error("the server could not start: %s", error, exc_info=error if has_traceback else None)


def _body(kind: type[Strict], media: str = "application/json") -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {media: {"schema": reference}}}}


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": what, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, what in {
        400: "invalid request", 401: "missing or unknown API key", 404: "not found", 408: "timed out",
        413: "body too large", 415: "wrong content type", 422: "no answer under these constraints",
        429: "rate or queue limit reached", 500: "internal error", 503: "not ready",
    }.items()
}  # fmt: skip


_ANSWERED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, or with stream: true its events",
        "content": {"application/json": {}, "text/event-stream": {}},  # a schema would be read as that of one event
    },
    **_ERRORS,
}


def _add_decoding(app: FastAPI, server: BeamServer) -> None:
    audio = _body(AudioBody, "multipart/form-data")

    @app.post("/v1/completions", responses=_ANSWERED, openapi_extra=_body(CompletionBody), response_model=None)
    async def completions(http: Request) -> Response:
        """Complete prompts."""
        return await server.answer(http, lambda raw: (parse_body(CompletionBody, raw), None))

    @app.post("/v1/chat/completions", responses=_ANSWERED, openapi_extra=_body(ChatBody), response_model=None)
    async def chat(http: Request) -> Response:
        """Answer a chat."""
        return await server.answer(http, lambda raw: (parse_body(ChatBody, raw), None))

    @app.post("/v1/responses", responses=_ANSWERED, openapi_extra=_body(ResponsesBody), response_model=None)
    async def responses(http: Request) -> Response:
        """Answer a conversation in the form of OpenAI's Responses API, without storing it."""
        return await server.answer(http, response_request)

    @app.post("/v1/audio/transcriptions", responses=_ERRORS, openapi_extra=audio, response_model=None)
    async def transcriptions(http: Request) -> Response:
        """Transcribe audio."""
        return await server.speech.answer(http, "transcribe")

    @app.post("/v1/audio/translations", responses=_ERRORS, openapi_extra=audio, response_model=None)
    async def translations(http: Request) -> Response:
        """Transcribe audio in English."""
        return await server.speech.answer(http, "translate")

    @app.post("/tokenize", responses=_ERRORS, openapi_extra=_body(TokenizeBody))
    async def tokenize(http: Request) -> dict[str, Any]:
        """Return the token ids of a text or a chat."""
        return await server.convert(http, _tokenized)

    @app.post("/detokenize", responses=_ERRORS, openapi_extra=_body(DetokenizeBody))
    async def detokenize(http: Request) -> dict[str, Any]:
        """Return the text of tokens."""
        return await server.convert(http, _detokenized)


def _add_looking(app: FastAPI, server: BeamServer) -> None:
    @app.get("/v1/models", responses=_ERRORS)
    async def models(http: Request) -> dict[str, Any]:
        """Return the served model."""
        server.client(http)
        return {"object": "list", "data": [_model(server)]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(http: Request, name: str) -> dict[str, Any]:
        """Return the model of this name."""
        server.client(http)
        check_model(name, server.served)
        return _model(server)

    @app.get("/v1/specbeam/methods", responses=_ERRORS)
    async def methods(http: Request) -> dict[str, Any]:
        """List the methods that a request may use."""
        server.client(http)
        default = server.served.method.name
        return {"object": "list", "default": default, "data": server.methods()}

    @app.get("/v1/specbeam/requests", responses=_ERRORS)
    async def requests(http: Request) -> dict[str, Any]:
        """List the client's requests in progress."""
        return {"object": "list", "data": server.requests(server.client(http))}

    @app.delete("/v1/specbeam/requests/{number}", responses=_ERRORS)
    async def cancel(http: Request, number: str) -> dict[str, Any]:
        """Cancel a request of the client."""
        client = server.client(http)
        names = [number, *(number.removeprefix(prefix) for prefix in ("chatcmpl-", "cmpl-", "resp_"))]  # ids of answers
        asking = next((server.asking[name] for name in names if name in server.asking), None)
        if asking is None or asking.client.name != client.name:
            raise invalid(f"there is no request {number[:64]!r} in progress", None, "unknown_url", 404)
        asking.cancel()
        return {"id": number, "cancelled": True}

    @app.get("/version", responses=_ERRORS)
    async def version(http: Request) -> dict[str, str]:
        """Return the version of the server."""
        server.client(http)
        return {"version": __version__}

    @app.get("/props", responses=_ERRORS)
    async def props(http: Request) -> dict[str, Any]:
        """Return the capabilities and limits of the server."""
        server.client(http)
        served = server.served
        config = server.config
        limits = ["max_running", "max_waiting", "max_tokens", "max_beams", "max_n", "max_prompts", "max_body"]
        if served.hears:
            limits += ["max_audio_body", "max_audio_seconds", "max_audio_at_once"]
        return {
            "model": served.name,
            "engine": served.pair.target.engine,
            "has_draft": served.pair.draft is not None,
            "has_speech": served.hears,
            "has_chat": not served.hears and bool(served.chat_template),
            "holds_conversation": served.template != BUNDLED_TEMPLATE,
            "max_model_len": served.room,
            "default_method": served.method.name,
            "law": served.method.law,
            "limits": {name: getattr(config, name) for name in limits},
            "fingerprint": server.fingerprint,
        }


def _model(server: BeamServer) -> dict[str, Any]:
    served = server.served
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "specbeam",
        "max_model_len": served.room,
    }


def _add_operating(app: FastAPI, server: BeamServer) -> None:
    @app.get("/live")
    async def live() -> dict[str, str]:
        """Report that the process is alive."""
        return {"status": "ok"}

    async def health() -> JSONResponse:
        """Report whether the server can answer requests."""
        status, found = server.health()
        return JSONResponse(found, status, headers={"retry-after": "5"} if status == 503 else None)

    app.get("/health", responses={503: {"description": "not ready"}}, response_model=None)(health)
    app.get("/ready", responses={503: {"description": "not ready"}}, response_model=None)(health)
    for path, check in {"/live": live, "/health": health, "/ready": health}.items():
        app.head(path, include_in_schema=False, response_model=None)(check)  # many checkers ask for the header alone

    @app.get("/metrics", responses=_ERRORS, response_model=None)
    async def metrics(http: Request) -> Response:
        """Return metrics for Prometheus."""
        _check_metrics(server, http)
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", response_class=HTMLResponse, response_model=None)
    async def page() -> Response:
        """Return the web page that shows forests."""
        nonce = secrets.token_urlsafe(16)
        return HTMLResponse(page_text(nonce), headers={"content-security-policy": CSP.format(nonce=nonce)})

    @app.get("/openapi.json", response_model=None)
    async def schema() -> Response:
        """Return the OpenAPI description of the server."""
        return Response(server.schema, media_type="application/json")


def page_text(nonce: str) -> str:
    """Return the web page, with the viewer of forests that it shares with notebooks."""
    style, script = viewer_parts()
    text = PAGE.read_text(encoding="utf-8")
    return text.replace("/* VIEWER STYLE */", style).replace("/* VIEWER SCRIPT */", script).replace("NONCE", nonce)


def _check_metrics(server: BeamServer, http: Request) -> None:
    """Raise `Refusal` unless the client may read the metrics.

    Open metrics are for everybody: they hold neither texts nor names of keys. Others need the metrics key, if there is one,
    or else an API key, except from this machine.
    """
    if server.config.open_metrics:
        return
    given = http.headers.get("authorization", "").removeprefix("Bearer ")
    wanted = server.config.metrics_key
    if wanted:
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            message = "metrics need the metrics_key of this server; send the header 'Authorization: Bearer METRICS_KEY'"
            raise Refusal(401, "authentication_error", "invalid_api_key", message)
        return
    here = http.client is None or http.client.host in ("127.0.0.1", "::1", "testclient")
    if here:
        return
    if not server.keys.needed:
        message = "metrics are served to this machine only; start the server with a metrics_key or open_metrics"
        raise Refusal(403, "permission_error", "forbidden", message)
    server.client(http)


def _schema(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of the routes, with the schemas of their bodies."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for kind in (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, DetokenizeBody):
        made = kind.model_json_schema(ref_template="#/components/schemas/{model}", by_alias=True)
        schemas |= made.pop("$defs", {})
        schemas[kind.__name__] = made
    schemas["AudioBody"] = _audio_schema(schemas)
    names = ("message", "type", "param", "code")
    schemas["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": list(names),
                "properties": {name: {"type": ["string", "null"] if name == "param" else "string"} for name in names},
            }
        },
    }
    return found


def _audio_schema(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an audio form; the schemas that it refers to are added to `schemas`."""
    made = AudioBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= made.pop("$defs", {})
    made["properties"] = {"file": {"type": "string", "format": "binary"}, **made["properties"]}
    made["required"] = ["file"]
    return made


def with_pair(config: ServerConfig, pair: Pair) -> Any:
    """Return the application that serves a loaded pair."""
    return make_app(BeamServer(config, lambda: pair))
