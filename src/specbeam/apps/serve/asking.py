"""A running request: from its order to its answer, whole or streamed."""

import asyncio
import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from specbeam import Generation
from specbeam.apps.serve.answers import (
    AnsweredRequest,
    ReturnedText,
    best_of_mean,
    cached_tokens,
    chat_logprobs,
    choice_json,
    choices_of,
    completion_logprobs,
    extras_of,
    generations_of,
    metrics_json,
    sendable,
    shows_special,
    specbeam_json,
    text_offsets,
    usage_of,
    visible_tokens,
)
from specbeam.apps.serve.auth import Client
from specbeam.apps.serve.engine import Engine, Job
from specbeam.apps.serve.mapping import Order, Served
from specbeam.apps.serve.pools import Pools
from specbeam.apps.serve.refusals import Refusal, invalid, refusal_of
from specbeam.apps.serve.scoring import TokenScore
from specbeam.core import Session, Turn
from specbeam.doors import GrowingText, Request, compilation_watch, turn_record, unsent, words_of
from specbeam.errors import Cancelled, SpecbeamError

PING_S = 15.0  # seconds without an event after which a stream sends a ping
COMPILING_S = 1.0  # seconds between two notes that steps are compiled
MOST_EVENTS = 256  # records of turns kept for a slow reader
LIVE_S = 0.05  # seconds between two records of live beams
ENDED_ECHO = {"finish_reason": "length", "stop_reason": None}  # how a prompt without new tokens ends
BUSY = "too many requests of this key are being read; try again later"
Result = TypeVar("Result")


@dataclass
class _ShownRun:
    """A session of a request whose turns are shown.

    Attributes:
        text: the settled part of its text.
        last_turn, last_live: clock times of its latest turn, and of the latest record of its live beams.
        turns: number of turns so far.
    """

    text: GrowingText
    last_turn: float
    last_live: float = 0.0
    turns: int = 0


class Asking:
    """A running request for texts.

    Args:
        pool: threads for work that would block the event loop.
        number: id of the request, for the log and the answer.
    """

    def __init__(
        self, order: Order, served: Served, engine: Engine, client: Client, pool: ThreadPoolExecutor, number: str
    ) -> None:
        self.order = order
        self.served = served
        self.engine = engine
        self.client = client
        self.number = number
        self.created = int(time.time())
        self.began = time.monotonic()
        self.jobs: list[Job] = []
        self.outcome: AnsweredRequest | None = None
        self.fingerprint = ""
        self.pool_key = client.name  # the part of a pool of threads that the request may use
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._request: Request | None = None
        self._submitting: asyncio.Task[None] | None = None
        self._last_sent = time.monotonic()  # when a stream last sent something
        self._make: Callable[[], Request] | None = None
        self._began_again = False
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._words = words_of(served.pair.tokenizer)
        self._shown: dict[int, _ShownRun] = {}  # by the place of its session
        self._texts: dict[int, GrowingText] = {}  # text streamed so far, by the place of its session

    @property
    def request(self) -> Request:
        assert self._request is not None
        return self._request

    @property
    def method_name(self) -> str:
        return self.order.method.name

    @property
    def name(self) -> str:
        """The id of the answer."""
        return f"{'chatcmpl' if self.order.is_chat else 'cmpl'}-{self.number}"

    async def submit(self, pools: Pools) -> None:
        """Submit the request to the engine. Raises `Refusal` if it cannot be accepted."""
        order = self.order
        making = self.engine.prepare(order.method, order.method_key)
        if making is not None:
            await asyncio.wrap_future(making)

        def make() -> Request:
            return Request.of(
                self.engine.pair, order.prompts, order.method, order.settings, order.seed, order.options.audit
            )

        self._make = make
        try:
            if order.constraint_field is None:
                self._request = await pools.small.make(self.pool_key, make, BUSY, too_late())
            else:
                late = invalid(
                    f"the constraint took more than {self.served.config.compile_timeout:g} seconds to compile; simplify it",
                    order.constraint_field,
                    "bad_grammar",
                )
                busy = "too many constraints are being compiled; try again later"
                self._request = await pools.constraints.make(self.pool_key, make, busy, late)
        except (Refusal, SpecbeamError) as error:
            refusal = refusal_of(error)
            if order.constraint_field is not None:
                _name_constraint(refusal, order.constraint_field)
            raise refusal from error
        for refused in self.request.refused.values():
            raise refusal_of(refused)
        if order.body.max_tokens == 0:
            return
        self.jobs = [self._job(session) for session in self.request.sessions]
        self.engine.submit(self.jobs)

    async def begin(self, pools: Pools) -> None:
        """Submit the request; a stream may begin before that is done, because new methods are compiled first.

        Arguments and errors are those of `submit`; later errors are raised in the stream.
        """
        self._submitting = asyncio.ensure_future(self.submit(pools))
        done, _ = await asyncio.wait([self._submitting], timeout=COMPILING_S if self.order.streams else None)
        if done:
            await self._submitted()

    async def _submitted(self) -> None:
        """Wait until the request is submitted. Raises `Refusal` if it is not accepted, or cancelled before."""
        assert self._submitting is not None
        try:
            await asyncio.wait([self._submitting])
        finally:
            self._submitting.cancel()
        if self._submitting.cancelled():
            raise refusal_of(Cancelled("it was cancelled"))
        self._submitting.result()

    async def _begins_again(self, sent: Iterable[str] = ()) -> bool:
        """Repeat the request, once, if its texts were lost by a fault of another request; return True if it is repeated.

        Each text is then decoded alone, so that a faulty one fails by itself. If text was sent already, the request needs a
        seed, which makes the same text come again.

        Args:
            sent: the texts sent so far.
        """
        is_lost = any(job.is_lost for job in self.jobs)
        options = self.order.options
        was_shown = options.trace or options.stream == "live"
        comes_again = self.order.seed is not None or not any(sent)
        if not is_lost or was_shown or not comes_again or self._began_again or self.engine.state != "ready":
            return False
        assert self._make is not None
        self._began_again = True
        self._texts.clear()
        self._request = await self._in_pool(self._make)
        self.jobs = [
            self._job(session, before) for session, before in zip(self.request.sessions, self.jobs, strict=True)
        ]
        try:
            self.engine.submit(self.jobs)
        except SpecbeamError as error:
            raise refusal_of(error) from error
        return True

    def _job(self, session: Session, before: Job | None = None) -> Job:
        """Return the job of a session.

        Args:
            before: the job that it repeats alone, with the same time limit; None for a first attempt.
        """
        config = self.served.config
        order = self.order
        session.namespace = self._namespace
        now = time.monotonic()
        start_by = now + config.queue_timeout
        end_by = now + config.request_timeout
        if before is not None:
            end_by = before.end_by
            start_by = min(start_by, end_by)
        shows = order.options.trace or order.options.stream == "live"
        return Job(
            session,
            self._watch,
            key=self.client.name,
            priority=max(order.body.priority or 0, self.client.least_priority),
            alone=before is not None,
            again_after=None if before is None else before.lost_at,
            streams=order.streams,
            see=self._see if shows else None,
            start_by=start_by,
            end_by=end_by,
        )

    @property
    def _namespace(self) -> str:
        """The namespace of the prefix cache: the key and the salt, as JSON so that no salt can imitate another key."""
        own = None if self.served.config.prefix_cache_shared else self.client.name
        return json.dumps([own, self.order.body.cache_salt])

    def _watch(self, job: Job) -> None:
        """Wake up the coroutine that waits for the job; called in the engine's thread.

        Without a stream it waits for the end only: each waking is a system call between two steps.
        """
        if not (job.is_over or self.order.streams):
            return
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._moved.set)

    def _see(self, session: Session, turn: Turn) -> None:
        """Store the record of a turn; called in the engine's thread."""
        now = time.monotonic()
        if session.place not in self._shown:
            self._shown[session.place] = _ShownRun(self.request.growing_text(), self.began)
        run = self._shown[session.place]
        run.turns += 1
        if self.order.options.trace:
            record = turn_record(session, turn, self._words, run.turns, 1000 * (now - run.last_turn))
            self._events.append({"run": session.place, "turn": record})
        elif now - run.last_live >= LIVE_S:
            run.last_live = now
            self._events.append({"run": session.place, "live": self._live(session, run)})
        run.last_turn = now

    def _live(self, session: Session, run: "_ShownRun") -> dict[str, Any]:
        settled = session.settled
        length = session.length
        beams: list[tuple[str, float, bool]] = [
            (self.request.text_of([*settled, *tail.tolist()]), session.limits.normalised(float(score), length), False)
            for tail, score in zip(session.tails, session.beams.scores, strict=True)
        ]
        beams += [
            (self.request.text_of(one.tokens), session.limits.normalised(one.loglik, len(one.tokens)), True)
            for one in session.ended
        ]
        beams.sort(key=lambda beam: -beam[1])
        best = beams[0] if beams else ("", 0.0, False)
        return {"text": best[0], "score": best[1], "beams": beams[:32], "settled": run.text.settled(settled)}

    def cancel(self) -> None:
        """Cancel the unfinished texts."""
        if self._submitting is not None:
            self._submitting.cancel()
        left = [job for job in self.jobs if not job.is_over]
        if left:
            self.engine.cancel(left)

    @property
    def is_over(self) -> bool:
        return all(job.is_over for job in self.jobs)

    async def wait(self) -> None:
        """Return when all texts have ended."""
        while not self.is_over:
            self._moved.clear()
            if not self.is_over:
                await self._moved.wait()

    def _in_pool(self, function: Callable[[], Result]) -> "asyncio.Future[Result]":
        return self._loop.run_in_executor(self._pool, function)

    # The end.

    async def finish(self) -> AnsweredRequest:
        """Return the outcome of the request after all texts have ended. Raises `Refusal` if there is no answer."""
        order = self.order
        if not self.jobs:
            generations: list[list[Generation]] = [[] for _ in order.prompts]
            warnings = [*order.warnings]
        else:
            generations, warnings, failure = await self._in_pool(lambda: generations_of(self.request, self.jobs, order))
            if failure is not None:
                raise refusal_of(failure)
        scores: list[list[TokenScore]] | None = None
        generations = [answers * order.copies for answers in generations]
        chooses = order.method.beams == 1 and order.drawn > order.count
        if chooses or order.top is not None:
            scores = await self._scores(generations)
        if chooses:
            assert scores is not None
            generations, scores = best_of_mean(generations, scores, order.count)
        if order.top is None:
            scores = None
        choices = await self._in_pool(lambda: choices_of(self.request, order, generations, scores))
        if order.options.min_logp is not None:
            choices = [choice for choice in choices if self._is_sure(choice.index) or self._is_likely(choice)]
        self.outcome = AnsweredRequest(choices, generations, warnings)
        return self.outcome

    def _is_sure(self, index: int) -> bool:
        """Return True if `min_logp` cannot drop a choice: without `min_logp`, or for the first choice of a prompt."""
        return self.order.options.min_logp is None or index % self.order.count == 0

    def _is_likely(self, choice: ReturnedText) -> bool:
        """Return whether the mean log-probability of a choice's tokens is at least `min_logp`."""
        penalty = self.request.sessions[0].limits.length_penalty  # the same for all sessions of a request
        length = max(len(choice.beam.tokens), 1)
        loglik = choice.beam.score * length**penalty
        return loglik / length >= (self.order.options.min_logp or 0.0)

    async def _scores(self, generations: list[list[Generation]]) -> list[list[TokenScore]]:
        """Return the log-probabilities of all texts, prompt by prompt."""
        found: list[list[TokenScore]] = []
        for prompt, answers in zip(self.order.prompts, generations, strict=True):
            if answers:
                texts = [answer.tokens for answer in answers]
                found += await self._score(prompt, texts)
        return found

    async def _score(self, prompt: list[int], texts: list[list[int]]) -> list[list[TokenScore]]:
        scoring = self.engine.score(prompt, texts, self.order.top or 0, self._namespace)
        try:
            return await asyncio.wrap_future(scoring)
        except SpecbeamError as error:
            raise refusal_of(error) from error

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer. Raises `Refusal` if there is none."""
        await self.wait()
        if await self._begins_again():
            await self.wait()
        outcome = await self.finish()
        order = self.order
        echoes = [await self._echo(number) for number in range(len(order.prompts))] if order.echo else []
        return await self._in_pool(lambda: self._whole(outcome, echoes))

    def _whole(self, outcome: AnsweredRequest, echoes: list[tuple[str, list[TokenScore | None]]]) -> dict[str, Any]:
        """Return the answer as JSON.

        Args:
            echoes: text and scores of each prompt if the request asks for an echo, else empty.
        """
        order = self.order
        choices = []
        for choice in outcome.choices:
            one = choice_json(self.served.pair, order, choice)
            if order.echo:
                text, scores = echoes[choice.prompt]
                one["text"] = text + choice.text
                if order.top is not None:
                    one["logprobs"] = self._echoed(choice, scores)
            choices.append(one)
        if not self.jobs:
            choices = [
                echo | ENDED_ECHO
                for number in range(len(order.prompts))
                for echo in self._only_echoes(number, *echoes[number])
            ]
        usage = usage_of(order, outcome.choices, cached_tokens(self.request, self.jobs))
        return self._head("chat.completion" if order.is_chat else "text_completion") | {
            "choices": choices,
            "usage": usage,
            "metrics": metrics_json(self.jobs, usage["completion_tokens"]),
            "specbeam": specbeam_json(self.request, order, self.jobs, outcome),
        }

    async def _echo(self, number: int) -> tuple[str, list[TokenScore | None]]:
        """Return the text of a prompt, and the scores of its tokens if the request asks for log-probabilities."""
        ids = self.order.prompts[number]
        text = await self._in_pool(lambda: self._prompt_text(number))
        if self.order.top is None:
            return text, []
        rest = await self._score(ids[:1], [ids[1:]]) if len(ids) > 1 else [[]]
        return text, [None, *rest[0]]

    def _prompt_text(self, number: int) -> str:
        order = self.order
        return order.texts[number] or self.request.text_of(order.prompts[number], shows_special(order))

    def _echoed(self, choice: ReturnedText, before: list[TokenScore | None]) -> dict[str, Any]:
        tokens = [*self.order.prompts[choice.prompt], *choice.tokens]
        text = self._prompt_text(choice.prompt) + choice.text
        return completion_logprobs(self.served.pair, self.order, [*before, *(choice.scores or [])], tokens, text)

    def _only_echoes(self, number: int, text: str, scores: list[TokenScore | None]) -> list[dict[str, Any]]:
        """Return the echo of a prompt for each of its choices."""
        order = self.order
        logprobs = None
        if order.top is not None:
            logprobs = completion_logprobs(self.served.pair, order, scores, order.prompts[number], text)
        indices = range(number * order.count, (number + 1) * order.count)
        return [{"index": index, "text": text, "logprobs": logprobs} for index in indices]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.fingerprint,
        }

    # Streams.

    async def stream(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the chunks of a stream, and None for a ping.

        A delta has only text that all possible answers share, so it is never retracted. The last delta of a choice has
        the rest of its text. A choice that `min_logp` may drop is sent as a whole at the end.
        """
        async for chunk in self._chunks():
            self._last_sent = time.monotonic()
            yield chunk

    async def _chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield what `stream` does."""
        order = self.order
        sent: dict[int, str] = {}
        assert self._submitting is not None
        async for note in self._notes_until(self._submitting):
            yield note
        await self._submitted()
        indices = self._indices()
        for number in sorted(index for each in indices.values() for index in each):
            sent[number] = ""
            if order.is_chat:
                yield self._opening(number)
        if order.echo:
            for number in range(len(order.prompts)):
                echoing = asyncio.ensure_future(self._echo(number))
                async for note in self._notes_until(echoing):
                    yield note
                text, scores = echoing.result()
                end: dict[str, Any] = {"finish_reason": None} if self.jobs else ENDED_ECHO
                for echo in await self._in_pool(partial(self._only_echoes, number, text, scores)):
                    yield self._chunk([echo | end])
        async for chunk in self._growing(indices, sent):
            yield chunk
        if await self._begins_again(sent.values()):
            async for chunk in self._growing(indices, sent):
                yield chunk
        for event in self._take_events():
            yield event
        finishing = asyncio.ensure_future(self.finish())
        async for note in self._notes_until(finishing):
            yield note
        outcome = finishing.result()
        for choice in outcome.choices:
            if order.is_chat and choice.index not in sent:
                yield self._opening(choice.index)
            before = sent.get(choice.index, "")
            yield self._chunk([await self._in_pool(partial(self._last_delta, choice, before))])
        async for chunk in self._end(outcome):
            yield chunk

    async def _growing(
        self, indices: dict[int, list[int]], sent: dict[int, str]
    ) -> AsyncIterator[dict[str, Any] | None]:
        """Yield chunks until all texts have ended, and store the text sent for each choice."""
        order = self.order
        is_forced = order.tools is not None and order.tools.how != "auto"
        waits_for_all = is_forced or (order.method.beams == 1 and order.drawn > order.count)
        while not self.is_over:
            self._moved.clear()
            for event in self._take_events():
                yield event
            if not waits_for_all:
                for job in self.jobs:
                    text = await self._settled_text(job) if indices[job.session.place] else ""
                    for delta in self._new_deltas(text, indices[job.session.place], sent):
                        yield self._chunk([delta])
            if self.is_over:
                return
            has_moved = True
            try:
                await asyncio.wait_for(self._moved.wait(), COMPILING_S)
            except TimeoutError:
                has_moved = False
            for note in self._notes(has_moved):
                yield note

    async def _notes_until(self, work: "asyncio.Future[Any]") -> AsyncIterator[dict[str, Any] | None]:
        """Yield what a stream sends until some work is done; the work is cancelled if the stream ends before."""
        try:
            while not work.done():
                await asyncio.wait([work], timeout=COMPILING_S)
                for note in self._notes():
                    yield note
        finally:
            if not work.done():
                work.cancel()

    def _notes(self, has_moved: bool = False) -> list[dict[str, Any] | None]:
        """Return what a stream sends while there is no text: that steps are compiled, or a ping from time to time.

        Only clients that know the object `specbeam` get events without choices; to others a ping is sent.

        Args:
            has_moved: whether the request takes steps, which may give no text for long; then nothing is compiled for it.
        """
        compiling = None if has_moved else compilation_watch().progress
        now = time.monotonic()
        if compiling is None and now - self._last_sent < PING_S:
            return []
        if compiling is None or self.order.body.specbeam is None:
            return [None]
        return [self._head(self._kind) | {"choices": [], "specbeam": {"compiling": compiling}}]

    def _indices(self) -> dict[int, list[int]]:
        """Return the indices of the choices of each session, by its place, without choices that `min_logp` may drop."""
        order = self.order
        found: dict[int, list[int]] = {}
        if order.method.beams > 1:
            for session in self.request.sessions:
                first = self.request.prompt_of[session.place] * order.count
                found[session.place] = [number for number in range(first, first + order.count) if self._is_sure(number)]
            return found
        if order.copies > 1:
            return {
                session.place: [*range(first, first + order.count)]
                for session in self.request.sessions
                for first in [self.request.prompt_of[session.place] * order.count]
            }
        seen: dict[int, int] = {}
        for session in self.request.sessions:
            prompt = self.request.prompt_of[session.place]
            number = seen.get(prompt, 0)
            seen[prompt] = number + 1
            index = prompt * order.count + number
            found[session.place] = [index] if number < order.count and self._is_sure(index) else []
        return found

    def _take_events(self) -> list[dict[str, Any]]:
        taken = []
        while self._events:
            taken.append(self._head(self._kind) | {"choices": [], "specbeam": self._events.popleft()})
        return taken

    async def _settled_text(self, job: Job) -> str:
        """Return the settled part of a text that can be sent, without a partial stop string or character at its end."""
        tokens = job.settled
        if self.order.tools is not None:
            tokens = visible_tokens(self.request, tokens)
        if not tokens:
            return ""
        place = job.session.place
        if place not in self._texts:
            self._texts[place] = self.request.growing_text(shows_special(self.order))
        growing = self._texts[place]
        return await self._in_pool(lambda: sendable(self.order, growing.settled(tokens)))

    def _new_deltas(self, text: str, indices: list[int], sent: dict[int, str]) -> list[dict[str, Any]]:
        """Return deltas with the unsent part of a text for its choices, and mark it as sent."""
        if not indices or not text:
            return []
        before = sent[indices[0]]
        if len(text) <= len(before):
            return []
        for index in indices:
            sent[index] = text
        return [self._delta(index, unsent(text, before)) for index in indices]

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.order.is_chat else "text_completion"

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head(self._kind) | {"choices": choices}
        options = self.order.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = None
        return chunk

    def _opening(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a choice of a chat, which has its role."""
        return self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        if self.order.is_chat:
            return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _last_delta(self, choice: ReturnedText, sent: str) -> dict[str, Any]:
        """Return the last delta of a choice, with the rest of its text."""
        order = self.order
        last = self._delta(choice.index, unsent(choice.text, sent))
        if choice.calls:
            last["delta"]["tool_calls"] = [{"index": place, **call.json} for place, call in enumerate(choice.calls)]
            if not last["delta"]["content"]:
                del last["delta"]["content"]
        if choice.scores is not None:
            pair = self.served.pair
            if order.is_chat:
                last["logprobs"] = chat_logprobs(pair, order, choice.scores)
            else:
                before = 0
                if order.echo:
                    prompt = order.prompts[choice.prompt]
                    before = text_offsets(pair, prompt, self._prompt_text(choice.prompt))[-1]
                last["logprobs"] = completion_logprobs(pair, order, choice.scores, choice.tokens, choice.text, before)
        last["finish_reason"] = choice.finish_reason
        return last | extras_of(order, choice)

    async def _end(self, outcome: AnsweredRequest) -> AsyncIterator[dict[str, Any]]:
        """Yield the last chunk, without choices, if the request asks for usage or has the object `specbeam`."""
        order = self.order
        options = order.body.stream_options
        usage = usage_of(order, outcome.choices, cached_tokens(self.request, self.jobs))
        chunk = self._head(self._kind) | {
            "choices": [],
            "metrics": metrics_json(self.jobs, usage["completion_tokens"]),
            "specbeam": specbeam_json(self.request, order, self.jobs, outcome),
        }
        if options is not None and options.include_usage:
            chunk["usage"] = usage
        if order.body.specbeam is not None or "usage" in chunk:
            yield chunk


# sse-starlette would add pings, which a stream already has between its waits, and a task per stream that watches for the end
# of the server, which drains itself. What is left is this line of format.
def as_event(chunk: dict[str, Any] | None) -> bytes:
    """Return a chunk as a server-sent event; None as a comment, which clients ignore."""
    if chunk is None:
        return b": ping\n\n"
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _name_constraint(refusal: Refusal, field: str) -> None:
    """Name the field that constrains the texts in a refusal by the option of the library."""
    option, _, rest = refusal.message.partition(" ")
    if option in ("json_schema", "regex", "grammar") and refusal.code in ("not_supported", "bad_grammar"):
        refusal.message = f"{field} {rest}"
        refusal.param = field
    elif refusal.code == "bad_grammar":
        refusal.param = field


DONE = b"data: [DONE]\n\n"


def new_number() -> str:
    """Return a random id for a request."""
    return secrets.token_hex(12)


def too_late() -> Refusal:
    """Return the refusal of a request whose reading takes too long."""
    return Refusal(408, "timeout_error", "request_timeout", "reading the request took too long; send less text")
