"""Subtitles: cues, their lines, and characters that mean something to a format."""

import math
import sys

import pytest

from specbeam import errors
from specbeam.apps.speech.formats import FORMATS, formatted, wrapped
from specbeam.apps.speech.records import Segment, Transcript

pysubs2 = pytest.importorskip("pysubs2")


def transcript(*segments, language="en"):
    """A transcript of segments, each of (start, end, text)."""
    made = [Segment(start, end, text, [1], 0.0, -0.5, 1.0, math.nan) for start, end, text in segments]
    return Transcript("", language, 4000.0, made)


def cues(text, name):
    return [(cue.start, cue.end, cue.text) for cue in pysubs2.SSAFile.from_string(text, name, keep_html_tags=True)]


BLANK = ["", " ", "\n", "\t \r\n", "\u3000", "\u00a0\u2003"]


@pytest.mark.parametrize("name", ["srt", "vtt"])
def test_a_segment_without_a_text_has_no_cue_and_no_number(name):
    made = [(float(place), place + 1.0, text) for place, text in enumerate([*BLANK, " One", *BLANK, " Two", *BLANK])]
    found = formatted(transcript(*made), name)
    assert [text for _, _, text in cues(found, name)] == ["One", "Two"]
    assert [line for line in found.splitlines() if line.isdigit()] == ["1", "2"]
    assert cues(formatted(transcript(*made[: len(BLANK)]), name), name) == []


def test_a_segment_without_a_text_has_no_line_in_a_text():
    assert formatted(transcript((0, 1, " "), (1, 2, " One"), (2, 3, "")), "text") == "One\n"


def test_subtitles_are_those_that_players_read():
    made = transcript((0.0, 2.5, " Hello --> you"), (3661.5, 3662.25, " Bye"))
    assert formatted(made, "srt") == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello -> you\n\n2\n01:01:01,500 --> 01:01:02,250\nBye\n\n"
    )
    assert formatted(made, "vtt") == (
        "WEBVTT\n\n1\n00:00:00.000 --> 00:00:02.500\nHello -> you\n\n2\n01:01:01.500 --> 01:01:02.250\nBye\n\n"
    )


@pytest.mark.parametrize("text", ["{a} {\\p1}b", "C:\\new\\Notes \\h", "<i>so</i>", "a{b"])
def test_what_looks_like_a_tag_stays_in_srt(text):
    assert formatted(transcript((0, 1, text)), "srt").splitlines()[2] == text


def test_signs_of_webvtt_are_escaped():
    found = formatted(transcript((0, 1, "AT&T <b> 1 > 0 {x} \\N")), "vtt")
    assert found.splitlines()[4] == "AT&amp;T &lt;b> 1 > 0 {x} \\N"


@pytest.mark.parametrize("name", ["srt", "vtt"])
def test_lines_have_at_most_their_width(name):
    text = " The quick brown fox jumps over the lazy Donaudampfschiff"
    found = formatted(transcript((0, 1, text)), name, max_line_width=12)
    ((_, _, cue),) = cues(found, name)
    assert cue.split("\\N") == ["The quick", "brown fox", "jumps over", "the lazy", "Donaudampfschiff"]


def test_a_cue_has_at_most_its_lines_and_shares_the_time_of_its_segment():
    made = transcript((1, 5, " aaaa bbbb cccc dddd"), (5, 6, " e"))
    found = cues(formatted(made, "srt", max_line_width=4, max_line_count=2), "srt")
    assert found == [(1000, 3000, "aaaa\\Nbbbb"), (3000, 5000, "cccc\\Ndddd"), (5000, 6000, "e")]
    assert "\n3\n" in formatted(made, "srt", max_line_width=4, max_line_count=2)


def test_languages_without_spaces_break_between_characters():
    assert wrapped("こんにちは世界", 3, "ja") == ["こんに", "ちは世", "界"]
    assert wrapped("ab cd", 4, "ja") == ["ab c", "d"]
    assert wrapped("ที่นี่", 2, "th") == ["ที่", "นี่"]
    assert wrapped("こんにちは世界", 3, "en") == ["こんにちは世界"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text", {"max_line_width": 40}, r"max_line_width is for subtitles \(srt and vtt\), but the format is 'text'"),
        ("verbose_json", {"max_line_count": 2}, "max_line_count is for subtitles"),
        ("srt", {"max_line_count": 2}, "give max_line_width, too"),
        ("srt", {"max_line_width": 0}, "max_line_width is 0"),
        ("doc", {}, "format is 'doc'; it must be text, json, verbose_json, srt, vtt"),
    ],
)
def test_limits_of_lines_that_say_nothing_are_refused(name, options, message):
    with pytest.raises(errors.BadSetting, match=message):
        formatted(transcript((0, 1, "a")), name, **options)


def test_subtitles_alone_need_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pysubs2", None)
    for name in FORMATS:
        if name in ("srt", "vtt"):
            with pytest.raises(errors.MissingPackage, match="pysubs2"):
                formatted(transcript((0, 1, "a")), name)
        else:
            assert formatted(transcript((0, 1, "a")), name)
