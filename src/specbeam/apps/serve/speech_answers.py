"""Converts transcripts to answers in OpenAI's format."""

import math
from typing import Any

from specbeam.apps.serve.speech_orders import SpeechOrder
from specbeam.apps.speech.formats import formatted
from specbeam.apps.speech.records import Segment, Transcript

MEDIA = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}  # content types of formats other than JSON


def transcript_text(order: SpeechOrder, transcript: Transcript) -> str:
    """Return a transcript in a format other than JSON."""
    if order.body.response_format == "text":
        return f"{transcript.text}\n"
    return formatted(transcript, order.body.response_format)


def transcript_json(
    order: SpeechOrder, transcript: Transcript, seconds: float, knows_languages: bool
) -> dict[str, Any]:
    """Return a transcript as JSON, with all segments for "verbose_json".

    Args:
        seconds: duration of the request.
        knows_languages: whether the model detects languages.
    """
    found: dict[str, Any] = {}
    if order.body.response_format == "verbose_json":
        found = {
            "task": order.task,
            "language": language_name(transcript.language, knows_languages),
            "duration": transcript.duration,
            "segments": [_segment(number, one) for number, one in enumerate(transcript.segments)],
        }
    found |= {"text": transcript.text, "usage": {"type": "duration", "seconds": math.ceil(transcript.duration)}}
    return found | {"specbeam": _our_part(order, transcript, seconds)}


def language_name(code: str | None, knows_languages: bool) -> str:
    """Return the name of a language in OpenAI's format; "" if there was no speech to detect it from.

    A model that does not detect languages writes English.
    """
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    if code is None:
        return "" if knows_languages else "english"
    return str(LANGUAGES.get(code, code))


def _segment(number: int, segment: Segment) -> dict[str, Any]:
    """Return a segment as JSON; NaN becomes 0, because clients expect a number."""
    return {
        "id": number,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": _number(segment.avg_logprob),
        "compression_ratio": _number(segment.compression_ratio),
        "no_speech_prob": _number(segment.no_speech_prob),
    }


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _our_part(order: SpeechOrder, transcript: Transcript, seconds: float) -> dict[str, Any]:
    """Return the object `specbeam` of an answer; its law is the law of windows at the first temperature."""
    method = order.method
    found: dict[str, Any] = {"method": method.name, "law": transcript.law, "exact": method.exact}
    options = order.body.specbeam
    if options is None or options.report:
        found["report"] = {
            "target_passes": transcript.target_passes,
            "draft_passes": transcript.draft_passes,
            "seconds": round(seconds, 6),
        }
    return found
