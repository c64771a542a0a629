"""A transcription in progress: its thread goes from window to window, and the engine decodes each among its other jobs."""

import threading
import time
from collections.abc import Callable
from queue import Queue
from typing import Any, TypeVar

from specbeam import Generation, Method, Pair
from specbeam.apps.serve.auth import Client
from specbeam.apps.serve.config import ServerConfig
from specbeam.apps.serve.engine import Engine, Job, QueueFull
from specbeam.apps.serve.speech_orders import SpeechOrder
from specbeam.apps.speech.audio import read_audio_bytes
from specbeam.apps.speech.records import Transcript
from specbeam.apps.speech.transcribe import Models, SpeechSettings, ears_of
from specbeam.core import Session
from specbeam.doors import Request, Settings, in_prompt_order
from specbeam.errors import Cancelled, TimedOut

DRAWS = "above temperature 0"  # key of the method used there, the same for all requests
AGAIN_S = 0.05  # seconds between two attempts to enter the queue
Result = TypeVar("Result")
Note = Callable[[list[Job], list[Generation]], None]


class Hearing:
    """A running audio request.

    All methods except `cancel` belong to one thread, which waits for the engine and never uses the models itself.

    Args:
        config: the operator's settings.
        number: id of the request, for the log.
        note: called after each window with its jobs and texts.
    """

    def __init__(
        self, order: SpeechOrder, config: ServerConfig, engine: Engine, client: Client, number: str, note: Note
    ) -> None:
        self.order = order
        self.config = config
        self.engine = engine
        self.client = client
        self.number = number
        self.jobs: list[Job] = []
        self.windows = 0
        self.duration = 0.0
        self.began = time.monotonic()
        self._note = note
        self._has_decoded = False  # whether any text of the request has been decoded
        self._end_by = self.began + config.request_timeout
        self._is_cancelled = threading.Event()

    @property
    def method_name(self) -> str:
        return self.order.method.name

    def cancel(self) -> None:
        """Cancel the current window and all later ones. Any thread may call this."""
        self._is_cancelled.set()
        left = [job for job in self.jobs if not job.is_over]
        if left:
            self.engine.cancel(left)

    def transcript(self, raw: bytes, extractor: Any) -> Transcript:
        """Return the transcript of a file's bytes.

        Args:
            extractor: the model's feature extractor.

        Raises:
            BadAudio, BadSetting, NotSupported: the order cannot be fulfilled.
            Cancelled, TimedOut: the request was cancelled or reached its time limit.
            QueueFull, Draining, EngineFailed: see `Engine.submit`.
        """
        body = self.order.body
        samples = read_audio_bytes(raw, self.config.max_audio_seconds)
        self._check_wanted()
        order = self.order
        settings = SpeechSettings(order.method, temperature=order.temperatures, seed=body.seed, options=order.options)
        ears = ears_of(self.engine.pair, settings, Models(self._generate, self._call))
        listening = ears.begin(extractor, samples, body.language, self.order.task, body.prompt)
        self.duration = listening.transcript.duration
        while not listening.over:
            self._check_wanted()
            ears.hear([listening])
            self.windows += 1
        return ears.finished(listening)

    def _check_wanted(self) -> None:
        """Raise `Cancelled` or `TimedOut` if the request was cancelled or reached its time limit."""
        if self._is_cancelled.is_set():
            raise Cancelled("it was cancelled")
        if time.monotonic() > self._end_by:
            raise self._late()

    def _late(self) -> TimedOut:
        return TimedOut(
            f"the transcription took more than {self.config.request_timeout:g} seconds; raise request_timeout, or send "
            "less audio"
        )

    def _call(self, function: Callable[[], Result]) -> Result:
        """Call a function that runs a model, between two turns of the engine."""
        return self.engine.call(function).result()

    def _generate(
        self, pair: Pair, sources: Any, method: Method, *, seed: int | None, **options: Any
    ) -> list[Generation]:
        """Decode a window as `specbeam.generate` does, among the engine's other jobs."""
        most = options.get("max_new_tokens")
        options["max_new_tokens"] = self.config.max_tokens if most is None else min(most, self.config.max_tokens)
        settings = Settings.given(options)
        making = self.engine.prepare(method, self.order.method_key if method is self.order.method else DRAWS)
        if making is not None:
            making.result()
        request = Request.of(pair, sources, method, settings, seed)
        over: Queue[Job] = Queue()
        self.jobs = [self._job(session, over) for session in request.sessions]
        self._decode(over)
        if any(job.is_lost for job in self.jobs) and self.engine.state == "ready":
            request = Request.of(pair, sources, method, settings, seed)
            over = Queue()
            self.jobs = [self._job(new, over, old) for new, old in zip(request.sessions, self.jobs, strict=True)]
            self._decode(over)
        if any(job.cut for job in self.jobs):
            raise self._late()
        results = {job.session.place: request.result(job.session) for job in self.jobs}
        texts = in_prompt_order(request, {**request.refused, **results}, None)
        self._note(self.jobs, texts)
        return texts

    def _job(self, session: Session, over: "Queue[Job]", before: Job | None = None) -> Job:
        """Return the job of a session.

        Args:
            over: receives the job at its end.
            before: the job that it repeats alone, after a fault that another request may have caused; None for a first
                attempt.
        """
        return Job(
            session,
            lambda job: over.put(job) if job.is_over else None,
            key=self.client.name,
            priority=max(0, self.client.least_priority),
            alone=before is not None,
            again_after=before.lost_at if before is not None else None,
            end_by=self._end_by,
        )

    def _decode(self, over: "Queue[Job]") -> None:
        """Submit the jobs as places become free, and return when all are over.

        A request that has not decoded anything is refused if the queue is full; later windows try again for
        `queue_timeout` seconds.

        Args:
            over: receives the jobs at their end.
        """
        waiting = [*self.jobs]
        left = len(self.jobs)
        patience = self._patience()
        while left:
            try:
                self._submit(waiting)
            except QueueFull:
                if left == len(waiting):  # jobs of other requests fill the queue
                    if time.monotonic() >= patience:
                        raise
                    time.sleep(AGAIN_S)
                    continue
            job = over.get()
            left -= 1
            self._has_decoded |= job.started is not None
            patience = self._patience()

    def _submit(self, waiting: list[Job]) -> None:
        """Submit jobs, all at once if they fit, else one by one, and remove them from `waiting`.

        Raises:
            QueueFull: there is no place for the remaining jobs.
            Cancelled, TimedOut: the request was cancelled or reached its time limit.
        """
        count = len(waiting)
        while waiting:
            self._check_wanted()
            some = waiting[:count]
            for job in some:
                job.start_by = min(time.monotonic() + self.config.queue_timeout, self._end_by)
            try:
                self.engine.submit(some)
                del waiting[:count]
            except QueueFull:
                if count == 1:
                    raise
                count = 1

    def _patience(self) -> float:
        """Return the clock time until which a window tries to enter the queue."""
        return time.monotonic() + (self.config.queue_timeout if self._has_decoded else 0.0)
