"""The engine: one thread that owns a pair and decodes jobs for other threads; jobs join and leave between turns."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Queue
from typing import Any, TypeVar

from specbeam import Generation, Method, Pair
from specbeam.apps.serve.buckets import SECONDS, Buckets
from specbeam.apps.serve.line import Line
from specbeam.apps.serve.scoring import TokenScore, score_texts
from specbeam.apps.serve.turn_shares import next_jobs
from specbeam.core import LM, TURNS, Decoder, Session, Turn, allowed_threads, close_search
from specbeam.core.draft import most_nodes
from specbeam.doors import CallPlan, Request, Settings, in_prompt_order, joules_now, resolved_method, settled_tokens
from specbeam.errors import Cancelled, SpecbeamError, TimedOut
from specbeam.models import EncoderDecoderLM

LOG = logging.getLogger("specbeam.serve")
ACTIVE_S = 5.0  # seconds after its last job in which a key keeps its part of the places
DELAY_S = 0.05  # seconds of decoding between two checks of the inbox
BEATS_S = 0.5  # seconds between two checks of the clock while idle
RESTARTS = 3  # faults within `RESTARTS_S` seconds after which the engine is dead
RESTARTS_S = 60.0
COMPILE_S = 300.0  # seconds in which a method must be compiled and timed before the engine counts as stuck
CUTS = {"request_timeout": "it reached the time limit", "draining": "the server shut down"}
MOST_KNOWN = 4096  # keys of methods that are remembered as compiled
CLOSE_S = 5.0  # seconds to wait for the thread of a dead engine
Result = TypeVar("Result")


class QueueFull(SpecbeamError):
    """The queue is full."""


class Draining(SpecbeamError):
    """The engine is shutting down and accepts no jobs."""


class EngineFailed(SpecbeamError, RuntimeError):
    """The engine failed, and all sessions that it was decoding are lost."""


class QueueTimeout(TimedOut):
    """A job reached its time limit in the queue."""


class NoRoom(SpecbeamError):
    """The KV cache of a request would exceed the server's total KV budget."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine.

    Args:
        max_running: maximum number of sessions decoded at the same time.
        max_waiting: maximum number of waiting sessions.
        max_running_per_key: maximum number of sessions of one key decoded at the same time. 0: all if there is one key; if
            there are several, the key's part by weight among those that have or just had jobs, and all but an eighth (at
            least one) without others.
        kv_bytes: memory for the KV caches of all sessions, target and draft together; None: no limit.
        chunk: number of prompt tokens stored per step, between the turns of other sessions.
        prefix_bytes: memory of the prefix cache, target and draft together; 0: no prefix cache.
    """

    max_running: int = 8
    max_waiting: int = 64
    max_running_per_key: int = 0
    kv_bytes: int | None = None
    chunk: int = 64
    prefix_bytes: int = 256 * 2**20


@dataclass(eq=False)
class Job:
    """A session in the engine, with its progress.

    Args:
        watch: called with the job in the engine's thread after each step with progress, and at its end. It must be quick;
            its exceptions are logged.
        key: the client that the job belongs to.
        priority: lower comes earlier.
        alone: whether the job is decoded without others, as after a fault that it may have caused.
        again_after: clock time of that fault, the `lost_at` of the job that this one repeats; None for a first attempt.
        streams: whether `settled` is kept up to date.
        see: called with the session and each of its turns; an exception fails the job. None is faster: turns are not shown.
        start_by: clock time (`time.monotonic`) by which decoding must start, or the job fails with `QueueTimeout`.
        end_by: clock time at which the job ends: with its text so far, or with `TimedOut` if it has no token.

    Attributes:
        settled: the new tokens that all possible answers share.
        cut: why the text was cut short, a key of `CUTS`; "" if it was not.
        is_lost: whether the job failed by a fault that another job may have caused.
        lost_at: clock time of that fault; None without one.
        is_over: whether the session has left the engine; `session.failure` holds its error, if any.
        arrived, started, first_token, ended: clock times; None: not yet.
        joules: the job's share of the energy of its steps; None without a counter.
        shared: whether other jobs took part in any of its steps.
        room: the KV cache that the job may need, by model.
        group: jobs of the same request, including this one; empty before it is submitted and after its end.
        is_queued: whether the job counts as waiting. Who is to be refused in favour of another key does not.
        rows, length, moved: rows and length of its session at the last step, and the time of its last progress.
        last_step: the number of the engine's last step in which it took turns.
    """

    session: Session
    watch: Callable[["Job"], None]
    key: str = ""
    priority: int = 0
    alone: bool = False
    again_after: float | None = None
    streams: bool = False
    see: Callable[[Session, Turn], None] | None = None
    start_by: float = float("inf")
    end_by: float = float("inf")
    settled: list[int] = field(default_factory=list)
    cut: str = ""
    is_lost: bool = False
    lost_at: float | None = None
    is_over: bool = False
    arrived: float = 0.0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    joules: float | None = None
    shared: bool = False
    room: dict[Any, "StoreRoom"] = field(default_factory=dict)
    group: Sequence["Job"] = ()
    is_queued: bool = False
    rows: int = 0
    length: int = 0
    moved: float = 0.0
    last_step: int = 0


@dataclass(frozen=True)
class StoreRoom:
    """Room in the KV store of a model, which is a rectangle."""

    rows: int
    slots: int  # tokens per row


@dataclass
class EngineCounts:
    """Counters since the engine started; written by its thread, read by others.

    Attributes:
        kv_tokens: number of tokens in the KV cache now, by model.
        turn_seconds: durations of turns.
        token_seconds: times between tokens.
    """

    steps: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    target_rows: int = 0
    cancelled: int = 0
    restarts: int = 0
    audit_failures: int = 0
    step_seconds: float = 0.0
    joules: float | None = None
    kv_tokens: dict[Any, int] = field(default_factory=dict)
    turn_seconds: Buckets = field(default_factory=lambda: Buckets(SECONDS))
    token_seconds: Buckets = field(default_factory=lambda: Buckets(SECONDS))


class Engine:
    """One thread that decodes with a pair for all other threads.

    Any thread may submit and cancel jobs at any time. A job that fails, is cancelled or times out does not affect other
    jobs, and the text of a job does not depend on the others. While the engine runs, other threads cannot decode with the
    pair (`NotSupported`).

        with Engine(pair) as engine:
            out = engine.generate("Ein Hund läuft.", sb.dsbd(beams=4), seed=7)

    Args:
        weights: relative share of the work by key; 1 for all others.
        most_running: maximum number of running sessions by key; `limits.max_running_per_key` for all others.
    """

    def __init__(
        self,
        pair: Pair,
        limits: EngineLimits | None = None,
        weights: Mapping[str, float] | None = None,
        most_running: Mapping[str, int] | None = None,
    ) -> None:
        self.pair = pair
        self.limits = limits or EngineLimits()
        self.counts = EngineCounts()
        self.state = "new"  # then "ready", "draining", "ended" or "dead"
        self.last_beat = time.monotonic()
        self.inside: list[Job] = []  # running jobs; changed by the engine's thread only
        self._line: Line[Job] = Line(weights)
        self._decoder = self._new_decoder()
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._queued = 0  # waiting jobs, including the inbox
        self._queue_of: dict[str, dict[Job, None]] = {}  # by key, its waiting jobs, oldest first
        self._most_running = dict(most_running or {})
        self._last_job: dict[str, float] = {}  # by key, when its last job ended; only of the last `ACTIVE_S` seconds
        self._tasks: deque[_Task] = deque()
        self._open: set[Future[Any]] = set()  # results that other threads wait for
        self._patience_s = 0.0  # additional seconds granted to the running task
        self._turn_s = 0.01  # moving average of the seconds per turn, of `_turn_jobs` jobs
        self._turn_jobs = 1
        self._restarted: deque[float] = deque(maxlen=RESTARTS)  # clock times of the engine's faults
        self._explained: set[float] = set()  # faults that were reproduced by one job alone
        self._known: set[str] = set()  # keys of methods whose parts were made before
        self._thread = threading.Thread(target=self._run, name="specbeam engine", daemon=True)

    # Called by other threads.

    def start(self) -> "Engine":
        """Start the thread. Raises `NotSupported` if another thread is decoding with the pair."""
        self._models_check()
        self.state = "ready"
        self._thread.start()
        return self

    def submit(self, jobs: Sequence[Job]) -> None:
        """Add jobs to the queue, all of them or none.

        Raises:
            QueueFull: the queue has no room for all of them.
            Draining, EngineFailed: the engine accepts no more jobs.
            NoRoom: a job needs more KV cache than the engine has.
        """
        for job in jobs:
            job.room = {lm: room_of(lm, job.session) for lm in self._models()}
            if not self._has_room([job]):
                raise NoRoom(
                    f"a prompt of {len(job.session.prompt)} tokens with {job.session.limits.max_new_tokens} new tokens and "
                    f"up to {most_nodes(job.session)} drafted or searched tokens at a time needs "
                    f"{self._bytes_of([job]) // 2**20} MiB of KV cache, but this server has "
                    f"{(self.limits.kv_bytes or 0) // 2**20} MiB; ask for fewer new tokens or beams, or for shorter drafts"
                )
        with self._condition:
            self._check_open()
            self._make_room(jobs)
            self._queued += len(jobs)
            now = time.monotonic()
            for job in jobs:
                job.arrived = now
                job.group = jobs
                job.is_queued = True
                self._queue_of.setdefault(job.key, {})[job] = None
            self._inbox.append(lambda: self._take(jobs))
            if len(self.inside) < self.limits.max_running:
                self._decoder.early_end.ask()
            self._condition.notify()

    def check_room(self, key: str, count: int) -> None:
        """Raise what `submit` would raise for this number of texts of a key, before there is any work for them.

        While nothing waits, nothing is raised for the size of a request: what is wrong with it is found first.
        """
        with self._condition:
            self._check_open()
            if self._queued:
                self._room_for(key, count)

    def _room_for(self, own: str, count: int) -> tuple[int, str, dict[str, float]]:
        """Return how many places texts lack in the queue, the key that gives way, and the load of the other keys.

        In a full queue the key with most waiting texts, by weight, gives way: its newest requests that have not started
        are refused. If all of them have started, the queue grows, at most to twice its size, because what is decoded is
        never thrown away. So a key that fills the queue delays itself, and refuses nobody else.

        Raises `QueueFull` if the texts must not have the places.
        """
        free = max(self.limits.max_running - len(self.inside), 0)
        excess = self._queued + count - self.limits.max_waiting - free
        if count == 0 or excess <= 0:
            return 0, own, {}
        weights = self._line.weights
        load_of = {key: len(queue) / weights.get(key, 1.0) for key, queue in self._queue_of.items() if key != own}
        load = (len(self._queue_of.get(own, ())) + count) / weights.get(own, 1.0)
        fullest = max(load_of, key=lambda key: load_of[key], default=own)
        if load_of.get(fullest, 0.0) <= load or excess > self.limits.max_waiting:
            raise QueueFull(
                f"the queue is full: {self._queued} texts are queued, and this request adds {count}; {free} places are "
                f"free, and at most {self.limits.max_waiting} texts may wait; try again later"
            )
        return excess, fullest, load_of | {own: load}

    def _make_room(self, jobs: Sequence[Job]) -> None:
        """Make room in the queue for jobs of one key; see `_room_for`."""
        own = jobs[0].key if jobs else ""
        excess, fullest, load_of = self._room_for(own, len(jobs))
        if excess == 0:
            return
        for job in reversed([*self._queue_of[fullest]]):
            if excess <= 0 or load_of[fullest] <= load_of[own]:
                return
            if not job.is_queued or _has_begun(job):
                continue
            for one in job.group:
                self._leave_queue(one)
            excess -= len(job.group)
            load_of[fullest] -= len(job.group) / self._line.weights.get(fullest, 1.0)
            self._inbox.append(partial(self._give_way, job.group))

    def _give_way(self, jobs: Sequence[Job]) -> None:
        """Refuse a request whose places go to another key, unless it has started."""
        if not _has_begun(jobs[0]):
            message = (
                "the queue is full, and this key has most texts in it for its weight; its newest request gave way: try "
                "again later"
            )
            self._each([*jobs], lambda job: self._end(job, QueueFull(message)))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancel jobs at the next turn, except for finished ones."""
        self._post(lambda: self._each(jobs, lambda job: self._end(job, Cancelled("it was cancelled"))))

    def share(self, weights: Mapping[str, float], most_running: Mapping[str, int]) -> None:
        """Replace the arguments `weights` and `most_running` of the engine from the next turn on."""

        def change() -> None:
            self._line.weights = dict(weights)
            self._most_running = dict(most_running)

        self._post(change)

    def call(self, function: Callable[[], Result], patience_s: float = 0.0) -> "Future[Result]":
        """Call a function in the engine's thread, between two turns; it may use the models.

        Args:
            patience_s: additional seconds that it may take before the engine counts as stuck.
        """

        def once() -> Generator[None, None, Result]:
            yield from ()
            return function()

        return self.run(once(), patience_s)

    def run(self, task: Generator[None, None, Result], patience_s: float = 0.0) -> "Future[Result]":
        """Run a generator in the engine's thread, one step between two turns; the future gets its return value.

        Cancelling the future closes the generator.
        """
        future: Future[Result] = Future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        one = _Task(task, future, patience_s)
        self._post(lambda: self._tasks.append(one), one.refuse)
        return future

    def score(
        self, prompt: Sequence[int], texts: Sequence[Sequence[int]], top: int, namespace: str = ""
    ) -> "Future[list[list[TokenScore]]]":
        """Return the log-probabilities of texts after a prompt; see `score_texts`."""
        return self.run(score_texts(self.pair.target, prompt, texts, top, namespace))

    def request(self, prompts: Any, method: Method, *others: Any, **further: Any) -> Request:
        """Return a request of the engine's pair; the arguments are those of `CallPlan.of`. Its sessions can be jobs.

        The parts of its method are compiled and timed in the engine's thread.
        """
        making = self.prepare(method, _name_of(method))
        if making is not None:
            making.result()
        return Request(CallPlan.of(self.pair, prompts, method, *others, **further))

    def prepare(self, method: Method, key: str) -> "Future[None] | None":
        """Make the parts of a method in the engine's thread, which may compile and time them; None if that was done before.

        Args:
            key: identifies the method and its settings.
        """
        if self.knows(key):
            return None

        def make() -> None:
            method.parts(self.pair.target, self.pair.draft)
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(key)

        return self.call(make, COMPILE_S)

    def knows(self, key: str) -> bool:
        """Return whether the parts of the method with this key were made before."""
        return key in self._known

    def generate(
        self,
        prompts: Any,
        method: Method | str | None = None,
        *,
        seed: int | None = None,
        audit: bool = False,
        generation_config: Any = None,
        **options: Any,
    ) -> list[Generation]:
        """Generate text for one or many prompts as `specbeam.generate` does; any number of threads may call this.

        Arguments, errors and, with the same seed, answers are those of `specbeam.generate`.
        """
        settings = Settings.given(options, generation_config)
        resolve = partial(resolved_method, self.pair, prompts, method, settings)
        chosen = self.call(resolve, COMPILE_S).result()
        request = self.request(prompts, chosen, settings, seed, audit)
        results: dict[int, list[Generation] | SpecbeamError] = {**request.refused}
        over: Queue[Job] = Queue()

        def put_if_over(job: Job) -> None:
            if job.is_over:
                over.put(job)

        jobs = deque(Job(session, put_if_over) for session in request.sessions)
        under_way = 0
        while jobs or under_way:
            try:
                while jobs:
                    self.submit([jobs[0]])
                    jobs.popleft()
                    under_way += 1
            except QueueFull:
                if not under_way:  # jobs of other threads fill the queue
                    time.sleep(DELAY_S)
                    continue
            session = over.get().session
            under_way -= 1
            results[session.place] = request.result(session)
        return in_prompt_order(request, results, None)

    @property
    def waiting(self) -> int:
        """The number of waiting sessions."""
        return self._queued

    @property
    def stalled_s(self) -> float:
        """Seconds since the last sign of life that exceed the patience of the running task; 0 if there is no work."""
        if not (self.inside or self._queued or self._open):
            return 0.0
        return max(time.monotonic() - self.last_beat - self._patience_s, 0.0)

    def drain(self, timeout: float) -> None:
        """Accept no more jobs, finish the requests that have started, and refuse the waiting ones.

        Jobs that remain after `timeout` seconds are left to `close`.
        """
        with self._condition:
            if self.state != "ready":
                return
            self.state = "draining"
            self._inbox.append(self._refuse_waiting)
            self._condition.notify()
        end = time.monotonic() + timeout
        while time.monotonic() < end and self._thread.is_alive():
            if not (self._queued or self.inside or self._tasks or self._inbox):
                return
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the thread, and end the remaining jobs."""
        with self._condition:
            if self.state in ("ready", "draining"):
                self.state = "ended"
            self._condition.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S if self.state == "dead" else None)

    def abandon(self, reason: str) -> None:
        """Declare the engine dead because its thread does not respond, and fail all waiting tasks.

        Jobs stay as they are: only the thread may end them.
        """
        with self._condition:
            self.state = "dead"
            self._condition.notify()
        for future in [*self._open]:
            _fail(future, EngineFailed(reason))

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    # Called by the engine's thread.

    def _post(self, order: Callable[[], Any], refuse: Callable[[Exception], None] | None = None) -> None:
        with self._condition:
            if self.state in ("ended", "dead", "new"):
                if refuse is not None:
                    ended = self.state == "ended"
                    refuse(
                        Draining("the server has shut down") if ended else EngineFailed(f"the engine is {self.state}")
                    )
                return
            self._inbox.append(order)
            self._condition.notify()

    def _check_open(self) -> None:
        if self.state in ("draining", "ended"):
            raise Draining("the server is shutting down and accepts no more requests; try another one")
        if self.state != "ready":
            raise EngineFailed(f"the engine is {self.state}")

    def _models(self) -> list[LM]:
        return [lm for lm in (self.pair.target, self.pair.draft) if lm is not None]

    def _models_check(self) -> None:
        for lm in self._models():
            if hasattr(lm, "guard"):
                lm.guard.check()

    def _new_decoder(self) -> Decoder:
        return Decoder(self.pair.target, at_once=self.limits.max_running, filling=1)

    def _run(self) -> None:
        """Decode until the engine is closed. A failing session does not end this thread."""
        try:
            for lm in self._models():
                if hasattr(lm, "guard"):
                    lm.guard.hold(self)
            remembering = [lm for lm in self._models() if hasattr(lm, "remember_prompts")]
            for lm in remembering:
                lm.remember_prompts(self.limits.chunk, self.limits.prefix_bytes // len(remembering))
            while self.state in ("ready", "draining"):
                try:
                    self._wait_for_work()
                    self._work()
                except Exception as error:  # not the fault of a single session: out of memory, or a bug
                    self._restart(error)
        finally:
            with self._condition:
                if self.state in ("ready", "draining"):  # the loop ended by an error: release all waiting callers
                    self.state = "dead"
            self._give_up()

    def _wait_for_work(self) -> None:
        with self._condition:
            self.last_beat = time.monotonic()
            while not (self._inbox or self._tasks or self.inside or len(self._line)) and self.state in (
                "ready",
                "draining",
            ):
                self._condition.wait(BEATS_S)
                self.last_beat = time.monotonic()
            orders = [*self._inbox]
            self._inbox.clear()
            self._decoder.early_end.forget()  # who asked for it is served now
        self._obey(orders)

    def _obey(self, orders: Sequence[Callable[[], Any]]) -> None:
        """Carry out orders; an error in one does not affect the others."""
        for order in orders:
            try:
                order()
            except Exception:
                LOG.exception("an order to the engine failed")

    def _each(self, jobs: Sequence[Job], do: Callable[[Job], None]) -> None:
        """Apply a function to each job; if it raises, only that job fails."""
        for job in jobs:
            try:
                do(job)
            except Exception as error:
                LOG.exception("a request failed in the engine")
                self._lose(job, error)

    def _lose(self, job: Job, error: Exception) -> None:
        """Fail a waiting or running job after an unexpected exception."""
        if job.is_over:
            return
        job.session.fail(_failure_by(error), "")
        if job in self.inside:
            with suppress(Exception):
                self._decoder.release(job.session)
            self._finish(job)
            return
        self._leave_line(job)
        self._tell_end(job)

    def _work(self) -> None:
        """Admit and end jobs, and take one decoding step."""
        now = time.monotonic()
        late = [job for job in self._line if now > job.end_by]
        self._each(late, self._end_late)
        waiting = [job for job in self._line if now > job.start_by and not _has_begun(job)]
        self._each(
            waiting, lambda job: self._end(job, QueueTimeout("the queue did not clear in time; try again later"))
        )
        self._each([job for job in self.inside if now > job.end_by], self._end_late)
        self._let_in(now)
        if self._tasks:
            self._step_task()
        if self._decoder.busy:
            self._step()
        self.counts.kv_tokens = {lm: self._stored_in(lm) for lm in self._models()}

    def _take(self, jobs: Sequence[Job]) -> None:
        """Move submitted jobs to the line, except for ended ones."""
        for job in jobs:
            if job.is_over:
                job.group = ()
                self._uncount(job)
        self._each([job for job in jobs if not job.is_over], self._line.add)

    def _let_in(self, now: float) -> None:
        while len(self.inside) < self.limits.max_running and not any(job.alone for job in self.inside):
            job = self._line.pop(
                now,
                lambda job: not (job.alone and self.inside) and self._has_room([*self.inside, job]),
                self._most_running_of,
            )
            if job is None:
                return
            with self._condition:
                self.inside.append(job)  # before it leaves the line, so that `drain` always sees it in one of the two
                self._leave_queue(job)
            job.started = now
            job.session.count.restart()
            try:
                self._decoder.add(job.session)
            except SpecbeamError as error:
                self._end(job, error)

    def _most_running_of(self, key: str) -> int:
        """Return the maximum number of running jobs of a key.

        Without a limit of its own it is the key's part, by weight, among the keys that have or just had jobs. All running
        jobs take their turns together, so each key's jobs slow down all other keys.
        """
        most = self.limits.max_running
        given = self._most_running.get(key, self.limits.max_running_per_key)
        if given:
            return given
        weights = self._line.weights
        if len(weights) < 2:
            return most
        active = self._recent_keys() | {*self._line.clocks, key}
        if len(active) == 1:
            return max(most - max(most // 8, 1), 1)
        whole = sum(weights.get(other, 1.0) for other in active)
        return max(math.ceil(most * weights.get(key, 1.0) / whole), 1)

    def _step(self) -> None:
        """Take a step of the decoder, and report the progress of each job."""
        decoder = self._decoder
        moving = self._moving()
        decoder.ahead = self._turns_ahead(len(moving))
        decoder.early_end.follows_ends = len({job.key for job in self.inside}) > 1
        before = [job.session.count.target_passes for job in self.inside]
        began = time.monotonic()
        joules = joules_now()
        shown = decoder.step([job.session for job in moving])
        seconds = time.monotonic() - began
        self.counts.steps += 1
        for job in moving:
            job.last_step = self.counts.steps
        self.counts.step_seconds += seconds
        self._share_energy(joules)
        turns = [job.session.count.target_passes - earlier for job, earlier in zip(self.inside, before, strict=True)]
        most = max(turns, default=0)
        if most > 0:
            self._turn_s = 0.5 * self._expected_turn_s(len(moving)) + 0.5 * seconds / most
            self._turn_jobs = len(moving)
            self.counts.turn_seconds.add(seconds / most, most)
        passes_of = dict(zip(self.inside, turns, strict=True))
        by_session = {job.session: job for job in self.inside}
        for session, turn in shown:
            self._each([by_session[session]], partial(_show, turn=turn))
        self._each([*self.inside], lambda job: self._look_at(job, passes_of[job]))

    def _moving(self) -> list[Job]:
        """Return the jobs that take turns in the next step, in order.

        Small models decode jobs side by side, so that the jobs of one key slow down the others. Passes of larger models,
        which all jobs share, cost little more for more of them, so all take part.
        """
        if not getattr(self.pair.target, "is_small", False):
            return [*self.inside]
        line = self._line
        return next_jobs(self.inside, line.clocks, line.weights, self._recent_keys(), allowed_threads())

    def _recent_keys(self) -> set[str]:
        """Return the keys whose last job ended a short time ago."""
        recent = time.monotonic() - ACTIVE_S
        return {key for key, last in self._last_job.items() if last > recent}

    def _stored_in(self, lm: Any) -> int:
        """Return the number of tokens in the KV cache of a model for the running jobs."""
        if not hasattr(lm, "held"):
            return 0
        return sum(lm.held(job.session) for job in self.inside if lm in job.session.state)

    def _turns_ahead(self, moving: int) -> int:
        """Return the number of turns of `moving` jobs to run per step, within `DELAY_S`; 0 if any job shows its turns."""
        if any(job.see is not None for job in self.inside):
            return 0
        return min(max(int(DELAY_S / max(self._expected_turn_s(moving), 1e-5)), 1), TURNS)

    def _expected_turn_s(self, jobs: int) -> float:
        """Return the expected seconds of a turn of `jobs` jobs, in proportion if there are more than in the last step."""
        return self._turn_s * max(jobs / self._turn_jobs, 1.0)

    def _look_at(self, job: Job, passes: int) -> None:
        """Count the work of a step for a job, and report its progress."""
        session = job.session
        rows = session.count.rows.scored
        self._line.charge(job.key, max(rows - job.rows, passes))
        self.counts.target_passes += passes
        self.counts.target_rows += rows - job.rows
        job.rows = rows
        has_moved = self._note_tokens(job)
        if session.over:
            self._finish(job)
            return
        if has_moved:
            if job.streams:
                job.settled = settled_tokens(session)
            self._tell(job)

    def _note_tokens(self, job: Job) -> bool:
        """Record the time of the new tokens of a job; return whether there are any."""
        length = length_of(job.session)
        fresh = length - job.length
        if fresh <= 0:
            return False
        job.length = length
        now = time.monotonic()
        if job.first_token is None:
            job.first_token = now
        else:
            self.counts.token_seconds.add((now - job.moved) / fresh, fresh)
        job.moved = now
        return True

    def _share_energy(self, before: float | None) -> None:
        """Add the energy of a step to the jobs that took part, in equal shares."""
        now = joules_now() if before is not None else None
        if before is None or now is None or now < before or not self.inside:
            return
        self.counts.joules = (self.counts.joules or 0.0) + now - before
        for job in self.inside:
            job.joules = (job.joules or 0.0) + (now - before) / len(self.inside)
            job.shared |= len(self.inside) > 1

    def _end_late(self, job: Job) -> None:
        """End a job at its time limit: with its text so far, if it has any."""
        late = TimedOut("the request timed out before its first token; raise request_timeout or ask for less")
        self._cut(job, "request_timeout", late)

    def _cut(self, job: Job, reason: str, error: SpecbeamError) -> None:
        """End a job with its text so far, or with an error if it has none. A search ends with the texts it has found."""
        session = job.session
        if job in self.inside and session.failure is None:
            close_search(session)
        if job not in self.inside or not (session.length or session.ended) or session.failure is not None:
            self._end(job, error)
            return
        job.cut = reason
        self._decoder.release(job.session)
        self._finish(job)

    def _end(self, job: Job, error: SpecbeamError) -> None:
        """End a waiting or running job with an error."""
        if job.is_over:
            return
        self.counts.cancelled += isinstance(error, Cancelled) and bool(job.group)
        if job in self.inside:
            if not self._decoder.cancel(job.session, error) and job.session.failure is None:
                job.session.fail(error, "")
            self._finish(job)
            return
        self._leave_line(job)
        job.session.fail(error, "")
        self._tell_end(job)

    def _leave_line(self, job: Job) -> None:
        """Remove a job from the line."""
        self._line.remove(job)
        self._uncount(job)

    def _uncount(self, job: Job) -> None:
        """Stop counting a job as waiting. Jobs that `submit` refused are not counted."""
        with self._condition:
            self._leave_queue(job)

    def _leave_queue(self, job: Job) -> None:
        """The same, for a caller that holds the condition."""
        if not job.is_queued:
            return
        job.is_queued = False
        self._queued -= 1
        own = self._queue_of[job.key]
        del own[job]
        if not own:
            del self._queue_of[job.key]

    def _finish(self, job: Job) -> None:
        """Remove a running job that is over, and report its end."""
        self.inside.remove(job)
        now = time.monotonic()
        self._last_job = {key: last for key, last in self._last_job.items() if last > now - ACTIVE_S} | {job.key: now}
        self._line.leave(job.key)
        self.counts.draft_passes += job.session.count.draft_passes
        self.counts.audit_failures += job.session.audit.suspicious
        self._note_tokens(job)
        self._tell_end(job)

    def _tell_end(self, job: Job) -> None:
        job.is_over = True
        job.group = ()  # releases the group
        job.ended = time.monotonic()
        self._tell(job)

    def _tell(self, job: Job) -> None:
        """Call the `watch` of a job, and log its exceptions."""
        try:
            job.watch(job)
        except Exception:
            LOG.exception("the progress of a request could not be reported")

    def _step_task(self) -> None:
        """Run one step of the task that has waited longest."""
        one = self._tasks.popleft()
        if one.future.done():  # cancelled, or failed by `abandon`
            one.close()
            return
        self._patience_s = one.patience_s
        try:
            next(one.task)
        except StopIteration as end:
            with suppress(InvalidStateError):  # cancelled or abandoned in the meantime
                one.future.set_result(end.value)
        except Exception as error:
            _fail(one.future, error)
        else:
            self._tasks.append(one)
        finally:
            self.last_beat = time.monotonic()
            self._patience_s = 0.0

    def _has_room(self, jobs: Sequence[Job]) -> bool:
        return self.limits.kv_bytes is None or self._bytes_of(jobs) <= self.limits.kv_bytes

    def _bytes_of(self, jobs: Sequence[Job]) -> int:
        """Return the bytes of KV cache that jobs may need together: each model has one rectangle for all.

        An encoder-decoder model also stores the keys and values of its cross-attention.
        """
        whole = 0
        for lm in self._models():
            rows = sum(job.room[lm].rows for job in jobs)
            slots = max(job.room[lm].slots for job in jobs)
            if isinstance(lm, EncoderDecoderLM):
                slots += max(lm.frames_of(job.session) for job in jobs)
            whole += rows * slots * getattr(lm, "slot_bytes", 0)
        return whole

    @property
    def kv_share(self) -> float | None:
        """The share of the KV budget that the running jobs may need; None without a limit."""
        inside = [*self.inside]
        if self.limits.kv_bytes is None:
            return None
        return self._bytes_of(inside) / self.limits.kv_bytes if inside else 0.0

    def _refuse_waiting(self) -> None:
        for job in [*self._line]:
            if not _has_begun(job):
                self._end(job, Draining("the server is shutting down; try another one"))

    def _restart(self, error: Exception) -> None:
        """Fail all running jobs, and continue with a new decoder."""
        self.counts.restarts += 1
        failure = _failure_by(error)
        had_others = len(self.inside) > 1
        now = time.monotonic()
        self._note_fault(now)
        for job in [*self.inside]:
            if job.session.failure is None:
                job.session.fail(failure, "")
                job.is_lost = had_others
                job.lost_at = now if had_others else None
            self._finish(job)
        with suppress(Exception):  # a broken model may fail again; its caches are cleared below
            self._decoder.close()
        for lm in self._models():
            for caches in [*getattr(lm, "caches", [])]:
                caches.clear()
            getattr(lm, "caches", []).clear()
            if isinstance(lm, EncoderDecoderLM):
                lm.drop_sources()
        self._decoder = self._new_decoder()
        self.counts.kv_tokens = {}
        if len(self._restarted) == RESTARTS and self._restarted[-1] - self._restarted[0] < RESTARTS_S:
            self.state = "dead"

    def _note_fault(self, now: float) -> None:
        """Record a fault of the engine unless one of the running jobs explains it.

        If a job fails again when it is repeated alone, it caused the earlier fault, which then does not count against the
        engine. If a second job of the same step fails alone, too, the fault counts again: it may be the engine's.
        """
        alone = [job for job in self.inside if job.alone]
        if not alone:
            self._restarted.append(now)
            self._explained = {fault for fault in self._explained if now - fault < RESTARTS_S}
            return
        for fault in {job.again_after for job in alone} - {None}:
            assert fault is not None
            if fault in self._explained:
                self._explained.discard(fault)
                self._restarted.append(now)
            elif fault in self._restarted:
                self._restarted.remove(fault)
                self._explained.add(fault)

    def _give_up(self) -> None:
        """End all jobs and tasks, and release the models, even if some of this fails."""
        with self._condition:
            orders = [*self._inbox]
            self._inbox.clear()
        self._obey(orders)
        is_dead = self.state == "dead"
        end = EngineFailed("the engine is dead") if is_dead else Draining("the server has shut down")
        leave = partial(self._end, error=end) if is_dead else partial(self._cut, reason="draining", error=end)
        self._each([*self._line, *self.inside], leave)
        for one in self._tasks:
            one.close()
        self._tasks.clear()
        stopped = EngineFailed("the engine has stopped") if is_dead else Draining("the server has shut down")
        for future in [*self._open]:
            _fail(future, stopped)
        with suppress(Exception):
            self._decoder.close()
        for lm in self._models():
            if hasattr(lm, "forget_prompts"):
                lm.forget_prompts()
            if hasattr(lm, "guard"):
                lm.guard.drop(self)


@dataclass(frozen=True, eq=False)
class _Task:
    """A generator for the engine's thread.

    Args:
        patience_s: additional seconds that a step may take before the engine counts as stuck.
    """

    task: Generator[None, None, Any]
    future: "Future[Any]"
    patience_s: float = 0.0

    def close(self) -> None:
        """Close the generator, and log its exceptions."""
        try:
            self.task.close()
        except Exception:
            LOG.exception("a task could not be closed")

    def refuse(self, error: Exception) -> None:
        _fail(self.future, error)


def _fail(future: "Future[Any]", error: Exception) -> None:
    """End a future with an error unless it is done: its caller may have cancelled it."""
    with suppress(InvalidStateError):
        future.set_exception(error)


def _has_begun(job: Job) -> bool:
    """Return whether a text of the job's request has started."""
    return any(other.started is not None for other in (*job.group, job))


def _failure_by(error: Exception) -> EngineFailed:
    failure = EngineFailed(f"the engine failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _show(job: Job, turn: Turn) -> None:
    if job.see is not None:
        job.see(job.session, turn)


def length_of(session: Session) -> int:
    """Return the number of tokens of the longest text of a session, live or ended.

    `Session.length` counts the live texts only, and stays at 0 if all texts end in the first turn.
    """
    return max([session.length, *(len(one.tokens) for one in session.ended)])


def room_of(lm: Any, session: Session) -> StoreRoom:
    """Return an estimate of the room that a session needs in the KV store of a model.

    Beams share their past: each has only a few tokens of its own, and the drafts of a turn. A best-first search keeps its
    prefixes. A model that reads in segments has a row per window, whose length does not grow with the text.
    """
    beams = max(session.limits.keep, 1)
    apart = 16 * beams + max(most_nodes(session), 64)
    if hasattr(lm, "windows_of"):
        return StoreRoom(lm.windows_of(beams), lm.window_slots + apart)
    new = session.limits.max_new_tokens
    return StoreRoom(1, len(session.prompt) + new + new // 7 + apart)


def _name_of(method: Method) -> str:
    """Return a key that identifies a method with its settings."""
    return repr((method.name, method.law, method.beams, _settings_of(method)))


def _settings_of(method: Any) -> Any:
    """Return the values in the closure of a method's `build`, which distinguish methods of one name."""
    cells = getattr(method.build, "__closure__", None) or ()
    return [repr(cell.cell_contents) for cell in cells if not callable(cell.cell_contents)]
