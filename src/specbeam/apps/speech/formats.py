"""The formats of transcripts: text, JSON, and the subtitles SRT and WebVTT, which pysubs2 writes."""

import dataclasses
import json
import math
import unicodedata
from typing import Any

from specbeam.apps.speech.records import Segment, Transcript
from specbeam.doors import is_integer, require
from specbeam.errors import BadSetting, MissingPackage

SUBTITLES = ("srt", "vtt")
FORMATS = ("text", "json", "verbose_json", *SUBTITLES)
# Languages written without spaces between words, whose lines may break between any two characters.
_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue")
_BACKSLASH = "\ufdd0"  # replaces backslashes inside pysubs2, which reads \N, \n and \h as breaks and spaces


def as_text(transcript: Transcript) -> str:
    """Return a line per segment that has a text."""
    return "".join(f"{segment.text.strip()}\n" for segment in spoken(transcript))


def as_record(transcript: Transcript) -> dict[str, Any]:
    """Return a transcript as a dictionary for JSON; NaN becomes None."""
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


def spoken(transcript: Transcript) -> list[Segment]:
    """Return the segments whose text is more than white space."""
    return [segment for segment in transcript.segments if segment.text.strip()]


def as_subtitles(
    transcript: Transcript, name: str, max_line_width: int | None = None, max_line_count: int | None = None
) -> str:
    """Return subtitles in a format, "srt" or "vtt"; the other arguments are those of `formatted`."""
    pysubs2 = check_subtitles()
    subtitles = pysubs2.SSAFile()
    for segment in spoken(transcript):
        for start, end, text in _cues(segment, transcript.language, max_line_width, max_line_count):
            cue = pysubs2.SSAEvent(start=round(1000 * start), end=round(1000 * end))
            cue.plaintext = _cue_text(text, name).replace("\\", _BACKSLASH)
            subtitles.append(cue)
    # keep_ssa_tags leaves texts in braces unchanged.
    made: str = subtitles.to_string(name, keep_ssa_tags=True)
    return made.replace(_BACKSLASH, "\\")


def check_subtitles() -> Any:
    """Return the package that writes subtitles. Raises `MissingPackage` if it is not installed."""
    try:
        import pysubs2
    except ImportError as error:
        raise MissingPackage(f"subtitles need the package pysubs2: pip install 'specbeam[speech]' ({error})") from error
    return pysubs2


def _cue_text(text: str, name: str) -> str:
    """Return the text of a cue with its arrows, and in WebVTT "&" and "<", escaped."""
    arrowless = text.replace("-->", "->")
    return arrowless.replace("&", "&amp;").replace("<", "&lt;") if name == "vtt" else arrowless


def _cues(
    segment: Segment, language: str | None, width: int | None, most: int | None
) -> list[tuple[float, float, str]]:
    """Return start, end and text of each cue of a segment: one, or as many as its lines need."""
    lines = [" ".join(segment.text.split())] if width is None else wrapped(segment.text, width, language)
    most = most or len(lines)
    parts = [lines[first : first + most] for first in range(0, len(lines), most)]
    sizes = [sum(map(len, part)) for part in parts]
    seconds = segment.end - segment.start
    cues = []
    for number, part in enumerate(parts):
        start = segment.start + seconds * sum(sizes[:number]) / sum(sizes)
        end = segment.start + seconds * sum(sizes[: number + 1]) / sum(sizes)
        cues.append((start, end, "\n".join(part)))
    return cues


def wrapped(text: str, width: int, language: str | None) -> list[str]:
    """Return a text in lines of at most `width` characters, broken between words; a longer word gets a separate line.

    Texts of languages without spaces between words are broken between characters.
    """
    is_dense = language in _WITHOUT_SPACES
    lines: list[str] = []
    for word in text.split():
        for number, unit in enumerate(_characters(word) if is_dense else [word]):
            joint = " " if number == 0 else ""
            if lines and len(lines[-1]) + len(joint) + len(unit) <= width:
                lines[-1] += joint + unit
            else:
                lines.append(unit)
    return lines


def _characters(word: str) -> list[str]:
    """Return the characters of a word, each with its combining marks."""
    found: list[str] = []
    for letter in word:
        if found and unicodedata.category(letter).startswith("M"):
            found[-1] += letter
        else:
            found.append(letter)
    return found


def check_format(name: str, max_line_width: int | None = None, max_line_count: int | None = None) -> None:
    """Raise an error if `formatted` would refuse these arguments, or lacks a package for them."""
    require(name in FORMATS, "format", name, ", ".join(FORMATS))
    for limit, value in (("max_line_width", max_line_width), ("max_line_count", max_line_count)):
        if value is None:
            continue
        require(is_integer(value) and value >= 1, limit, value, "an integer of at least 1, or None")
        if name not in SUBTITLES:
            raise BadSetting(
                f"{limit} is for subtitles ({' and '.join(SUBTITLES)}), but the format is {name!r}; leave it out"
            )
    if max_line_count is not None and max_line_width is None:
        raise BadSetting(f"max_line_count is {max_line_count}, but lines are not broken; give max_line_width, too")
    if name in SUBTITLES:
        check_subtitles()


def formatted(
    transcript: Transcript, name: str, max_line_width: int | None = None, max_line_count: int | None = None
) -> str:
    """Return a transcript in the format of that name.

    Segments without a text are left out of texts and subtitles.

    Args:
        name: "text", "json", "verbose_json", "srt" or "vtt".
        max_line_width: maximum number of characters in a line of subtitles; lines break between words.
        max_line_count: maximum number of lines of a cue. A segment with more lines becomes several cues, which share its
            time by their numbers of characters, because there are no times of words.

    Raises:
        BadSetting: the format is unknown, or has no lines to limit.
        MissingPackage: pysubs2 is needed and not installed.
    """
    check_format(name, max_line_width, max_line_count)
    if name in SUBTITLES:
        return as_subtitles(transcript, name, max_line_width, max_line_count)
    return {"text": as_text, "json": as_json, "verbose_json": as_verbose_json}[name](transcript)
