"""The formats that transcripts are written in: text, JSON, and two kinds of subtitles."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from specbeam.errors import BadSetting
from specbeam.speech.records import Segment, Transcript


def as_text(transcript: Transcript) -> str:
    """Return a segment per line."""
    return "".join(f"{segment.text.strip()}\n" for segment in transcript.segments)


def as_record(transcript: Transcript) -> dict[str, Any]:
    """Return all that is known of a transcript, as JSON takes it: what is not a number is None."""
    record = dataclasses.asdict(transcript)
    for segment in record["segments"]:
        for name, value in segment.items():
            if isinstance(value, float) and math.isnan(value):
                segment[name] = None
    return record


def as_verbose_json(transcript: Transcript) -> str:
    """Return a line of JSON with all segments."""
    return json.dumps(as_record(transcript), ensure_ascii=False) + "\n"


def as_json(transcript: Transcript) -> str:
    """Return a line of JSON with the text alone."""
    return json.dumps({"text": transcript.text}, ensure_ascii=False) + "\n"


def as_srt(transcript: Transcript) -> str:
    """Return SubRip subtitles."""
    blocks = []
    for number, segment in enumerate(transcript.segments, 1):
        times = f"{_clock(segment.start, ',', True)} --> {_clock(segment.end, ',', True)}"
        blocks.append(f"{number}\n{times}\n{_line(segment)}\n")
    return "\n".join(blocks)


def as_vtt(transcript: Transcript) -> str:
    """Return WebVTT subtitles."""
    blocks = ["WEBVTT\n"]
    for segment in transcript.segments:
        times = f"{_clock(segment.start, '.', False)} --> {_clock(segment.end, '.', False)}"
        blocks.append(f"{times}\n{_line(segment)}\n")
    return "\n".join(blocks)


def _line(segment: Segment) -> str:
    """Return the text of a subtitle, which must hold neither an arrow nor an empty line."""
    return " ".join(segment.text.replace("-->", "->").split())


def _clock(seconds: float, mark: str, hours_always: bool) -> str:
    """Return a time as hours, minutes, seconds and, behind `mark`, thousandths."""
    milliseconds = round(seconds * 1000)
    whole, thousandths = divmod(milliseconds, 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    front = f"{hours:02d}:" if hours_always or hours else ""
    return f"{front}{minute:02d}:{second:02d}{mark}{thousandths:03d}"


FORMATS: dict[str, Callable[[Transcript], str]] = {
    "text": as_text,
    "json": as_json,
    "verbose_json": as_verbose_json,
    "srt": as_srt,
    "vtt": as_vtt,
}


def formatted(transcript: Transcript, name: str) -> str:
    """Return a transcript in the format of that name. Raises `BadSetting` if there is none."""
    if name not in FORMATS:
        raise BadSetting(f"format is {name!r}; it must be {', '.join(FORMATS)}")
    return FORMATS[name](transcript)
