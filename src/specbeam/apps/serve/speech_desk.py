"""The audio endpoints: limits, uploads, waiting and answers."""

import asyncio
import time
from collections import Counter
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
from specbeam.apps.serve.pools import LimitedPool
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

UPLOAD_S = 120.0  # seconds in which an upload must arrive
ROOM = 4  # accepted requests (uploading, waiting or transcribed) per transcription thread


@dataclass
class _Place:
    """A request at the desk."""

    working: "asyncio.Future[Transcript] | None" = None  # the running transcription, once it has begun


class SpeechDesk:
    """Accepts audio requests up to a limit, and answers them.

    Args:
        server: the server whose engine decodes.
    """

    def __init__(self, server: "BeamServer") -> None:
        at_once = server.config.max_audio_at_once
        self._server = server
        self._pool = LimitedPool(at_once, "specbeam speech", server.config.queue_timeout)
        self._most = ROOM * at_once
        self.extractor: Any = None  # the feature extractor; set when the models are loaded
        self.knows_languages = False  # whether the model detects languages; set with the extractor
        self.under_way = 0  # accepted requests, from the upload to the end of all work for them
        self._here: Counter[str] = Counter()  # the same, by client

    def open(self, pair: Pair) -> None:
        """Read the feature extractor and the languages of the loaded models.

        Raises `MissingPackage` without the packages that read audio and write subtitles, and `NotSupported` if the model's
        generation config has an unsupported threshold.
        """
        check_readable()
        check_subtitles()
        thresholds_of(pair.known("target_model").generation_config)
        self.extractor = extractor_of(pair)
        self.knows_languages = bool(speech_tokens_of(pair).languages)

    def close(self) -> None:
        """Stop the threads after their current work."""
        self._pool.close()

    async def answer(self, http: Request, task: str) -> Response:
        """Answer an audio request.

        Args:
            task: "transcribe", or "translate" for English text.
        """
        server = self._server
        client = server.client(http)
        served = server.served
        if not served.hears:
            raise invalid(
                f"{served.name} does not read audio; start the server with a speech model", "model", "not_supported"
            )
        self._come(client)
        place = _Place()
        try:
            return await self._answer(http, task, client, place)
        finally:
            if place.working is None:
                self._leave(client)
            else:  # its thread may still work, although the client has disconnected
                place.working.add_done_callback(lambda working: self._leave(client))

    def _come(self, client: Client) -> None:
        """Count a request. Raises `Refusal` if there are too many, or too many of its key while there are other keys."""
        server = self._server
        if self.under_way >= self._most:
            raise server.refuse_full(
                "queue_full", f"the limit of {self._most} audio requests is reached; try again later"
            )
        share = max(self._most // 2, 1)
        if len(server.keys.weights) > 1 and self._here[client.name] >= share:
            raise server.refuse_full(
                "key_limit", f"the limit of {share} audio requests per key is reached; try again later"
            )
        self._here[client.name] += 1
        self.under_way += 1

    def _leave(self, client: Client) -> None:
        self._here[client.name] -= 1
        self._here += Counter()  # drops clients without requests
        self.under_way -= 1

    async def _read(self, http: Request, task: str, served: Served) -> tuple[SpeechOrder, bytes]:
        """Return the order in a request, and its audio."""
        raw = await read_bytes(http, served.config.max_audio_body, UPLOAD_S)
        content_type = http.headers.get("content-type", "")
        return await self._server.in_pool(lambda: speech_order_of(parse_form(content_type, raw), task, served))

    async def _answer(self, http: Request, task: str, client: Client, place: "_Place") -> Response:
        server = self._server
        config = server.config
        assert server.engine is not None
        order, audio = await self._read(http, task, server.served)
        _ = server.served  # raises if the server began to shut down during the upload
        note = http.scope["state"]["note"]
        note |= {"key": client.name, "method": order.method.name}
        if order.method_key:  # not the server's default method
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
        """Wait for a thread, and return the transcript. Raises `Refusal` if none becomes free in time."""

        def transcribed() -> Transcript:
            _ = self._server.served  # raises if the server began to shut down while the request waited
            return hearing.transcript(audio, self.extractor)

        message = "the audio request waited too long for a free thread; try again later"
        place.working = await self._pool.start(transcribed, message)
        return await asyncio.shield(place.working)  # the thread keeps working if the client disconnects
