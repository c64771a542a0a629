"""Where requests about audio come in: how many, how large, and what becomes of them."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from specbeam import Generation, Pair
from specbeam.apps.serve.auth import Client
from specbeam.apps.serve.bodies import read_bytes, unless_gone
from specbeam.apps.serve.engine import Job
from specbeam.apps.serve.hearing import Hearing
from specbeam.apps.serve.mapping import Served
from specbeam.apps.serve.multipart import parse_form
from specbeam.apps.serve.refusals import Refusal, invalid
from specbeam.apps.serve.speech_answers import MEDIA, transcript_json, transcript_text
from specbeam.apps.serve.speech_orders import SpeechOrder, speech_order_of
from specbeam.apps.speech.audio import check_readable
from specbeam.apps.speech.formats import check_subtitles
from specbeam.apps.speech.records import Transcript
from specbeam.apps.speech.transcribe import extractor_of, thresholds_of
from specbeam.doors import speech_tokens_of
from specbeam.errors import BadAudio, SpecbeamError

if TYPE_CHECKING:
    from specbeam.apps.serve.app import BeamServer

UPLOAD_S = 120.0  # seconds for which audio may take to arrive
ROOM = 4  # requests that send, wait or are transcribed, for each that may be transcribed side by side


@dataclass
class _Place:
    """The place of a request at the desk: the work of its thread, once it has begun."""

    working: "asyncio.Future[Transcript] | None" = None


class SpeechDesk:
    """Takes requests about audio up to a limit, and answers them.

    Args:
        server: whose engine decodes.
    """

    def __init__(self, server: "BeamServer") -> None:
        at_once = server.config.max_audio_at_once
        self._server = server
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="specbeam speech")
        self._free = asyncio.Semaphore(at_once)
        self._most = ROOM * at_once
        self.extractor: Any = None  # makes the features that the model reads; set when the models are there
        self.knows_languages = False  # whether the model detects languages; set with the extractor
        self.under_way = 0  # requests that are here, from their upload on until nothing works on them any more
        self._here: Counter[str] = Counter()  # the same by client

    def open(self, pair: Pair) -> None:
        """Store the feature extractor and the languages of the models once they are loaded.

        Raises `MissingPackage` if audio could not be read or subtitles not be written, and `NotSupported` if the model has
        settings of its own that are not honoured.
        """
        check_readable()
        check_subtitles()
        thresholds_of(pair.target_model.generation_config)
        self.extractor = extractor_of(pair)
        self.knows_languages = bool(speech_tokens_of(pair).languages)

    def close(self) -> None:
        """Let the threads end after their current work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, http: Request, task: str) -> Response:
        """Answer a request about audio.

        Args:
            task: "transcribe", or "translate" for English text.
        """
        server = self._server
        client = server.client(http)
        served = server.served
        if not served.hears:
            raise invalid(
                f"{served.name} reads no audio; start the server with a speech model", "model", "not_supported"
            )
        self._come(client)
        place = _Place()
        try:
            return await self._answer(http, task, client, place)
        finally:
            if place.working is None:
                self._leave(client)
            else:  # its thread may still be at work, although the client is gone
                place.working.add_done_callback(lambda working: self._leave(client))

    def _come(self, client: Client) -> None:
        """Count a request. Raises `Refusal` if too many are here, or too many of its key where there are others."""
        server = self._server
        if self.under_way >= self._most:
            raise server.refuse_full("queue_full", f"{self._most} requests about audio are the limit; try again later")
        share = max(self._most // 2, 1)
        if len(server.keys.weights) > 1 and self._here[client.name] >= share:
            raise server.refuse_full(
                "key_limit", f"{share} requests about audio are the limit of a key; try again later"
            )
        self._here[client.name] += 1
        self.under_way += 1

    def _leave(self, client: Client) -> None:
        self._here[client.name] -= 1
        self._here += Counter()  # drops clients without requests
        self.under_way -= 1

    async def _read(self, http: Request, task: str, served: Served) -> tuple[SpeechOrder, bytes]:
        """Return the order of a request, and its audio. The body itself is not kept."""
        raw = await read_bytes(http, served.config.max_audio_body, UPLOAD_S)
        content_type = http.headers.get("content-type", "")
        return await self._server.in_pool(lambda: speech_order_of(parse_form(content_type, raw), task, served))

    async def _answer(self, http: Request, task: str, client: Client, place: "_Place") -> Response:
        server = self._server
        config = server.config
        assert server.engine is not None
        order, audio = await self._read(http, task, server.served)
        _ = server.served  # the server may have begun to end while the audio came
        note = http.scope["state"]["note"]
        note |= {"key": client.name, "method": order.method.name}
        if order.method_key:  # not the server's own
            server.check_new(order.method_key, client)
        loop = asyncio.get_running_loop()

        def count(jobs: list[Job], texts: list[Generation]) -> None:
            loop.call_soon_threadsafe(server.note_window, jobs, texts)

        hearing = Hearing(order, config, server.engine, client, server.free_number(http), count)
        server.asking[hearing.number] = hearing
        began = time.monotonic()
        outcome = "error"
        try:
            transcript = await unless_gone(http, self._transcript(hearing, audio, place))
            outcome = "stop"
        except (Refusal, SpecbeamError) as error:
            refusal = server.refusal(error)
            if isinstance(error, BadAudio):
                refusal.param = "file"
            note["error"] = refusal.code
            outcome = "abort" if refusal.code == "cancelled" else "error"
            raise refusal from error
        except asyncio.CancelledError:
            outcome = "abort"
            raise
        finally:
            hearing.cancel()
            server.asking.pop(hearing.number, None)
            if outcome != "stop":
                server.metrics.finished[outcome] += 1
        seconds = time.monotonic() - began
        server.metrics.audio_seconds += transcript.duration
        note |= {"audio_seconds": round(transcript.duration, 3), "windows": hearing.windows}
        if config.log_texts:
            note["answers"] = [transcript.text]
        if order.body.response_format in MEDIA:
            text = transcript_text(order, transcript)
            return Response(text, media_type=f"{MEDIA[order.body.response_format]}; charset=utf-8")
        return JSONResponse(transcript_json(order, transcript, seconds, self.knows_languages))

    async def _transcript(self, hearing: Hearing, audio: bytes, place: "_Place") -> Transcript:
        """Wait for a place, and return the transcript. Raises `Refusal` if no place becomes free in time."""
        config = self._server.config
        try:
            await asyncio.wait_for(self._free.acquire(), config.queue_timeout)
        except TimeoutError as error:
            message = "no place became free for audio in time; try again later"
            raise Refusal(429, "rate_limit_error", "queue_timeout", message, None, 1) from error
        try:
            _ = self._server.served  # it may have begun to end meanwhile
            working = asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: hearing.transcript(audio, self.extractor)
            )
        except BaseException:
            self._free.release()
            raise
        place.working = working
        working.add_done_callback(self._is_over)
        return await asyncio.shield(working)  # its thread ends by itself, and only then is its place free

    def _is_over(self, working: "asyncio.Future[Transcript]") -> None:
        self._free.release()
        if not working.cancelled():
            working.exception()  # retrieved, as the client may be gone
