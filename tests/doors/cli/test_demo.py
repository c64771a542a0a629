"""The demo: an enlarged target writes the texts of the small one, and the table says what was measured."""

import io

import pytest
from rich.console import Console

import specbeam as sb
from specbeam.doors.cli import demo_grown
from specbeam.doors.cli.common import demo_sentences
from specbeam.doors.cli.demo_grown import GrownLine, Way, grown_target, measure, show_grown, ways_of
from specbeam.models.pair import BUNDLED

needs_bundled = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")
LINES = [
    GrownLine("one sequence", "transformers", 715_000_000, 3, 4.0, None),
    GrownLine("one sequence", "specbeam", 715_000_000, 3, 10.0, 1.0),
    GrownLine("4 beams", "transformers", 715_000_000, 3, 2.0, None),
    GrownLine("4 beams", "specbeam", 715_000_000, 3, 8.0, 1.0),
    GrownLine("4 beams with drafts", "specbeam", 715_000_000, 3, 16.0, 2.5),
]


@pytest.mark.parametrize("has_same_beams", [True, False])
def test_the_table_and_its_sentence_say_what_was_measured(has_same_beams):
    screen = io.StringIO()
    show_grown(Console(file=screen, width=200), LINES, has_same_beams)
    shown = screen.getvalue()
    assert "Tokens per second with 715 M weights; 3 sentences" in shown
    rows = {line[:20].strip(): line[20:].split() for line in shown.splitlines()}
    assert rows["one sequence"] == ["4.0", "10.0", "1.00"]
    assert rows["4 beams with drafts"] == ["-", "16.0", "0.40"]
    assert "4 beams with drafts: 2.0 times as fast as without" in shown
    assert "1.6 times as fast as one sequence, 8.0 times as fast as beams in transformers" in shown
    assert ("NOT the same beams" in shown) != has_same_beams


def test_figures_are_those_of_the_best_beams(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(demo_grown.time, "perf_counter", lambda: float(next(clock)))
    way = Way("2 beams", "specbeam", lambda sentence: ([[1, 2, 3], [1]], 2))
    way.measure("a")
    way.measure("b")
    assert way.line(9) == GrownLine("2 beams", "specbeam", 9, 2, 3.0, 1.5)
    silent = Way("2 beams", "transformers", lambda sentence: ([[1, 2, 3]], None))
    silent.measure("a")
    assert silent.line(9).tokens_per_pass is None


@needs_bundled
@pytest.mark.slow
def test_the_grown_target_writes_the_texts_of_the_small_one_with_drafts_and_without(monkeypatch):
    monkeypatch.setattr(demo_grown, "TIMED_S", 0)
    sentences = demo_sentences()[:4]
    law = {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
    small = sb.load("bundled", None)
    expected = [sb.generate(small, one, sb.beam_sampling(3), seed=5, **law)[0].text for one in sentences[:3]]
    with grown_target(20_000_000) as pair:
        assert pair.target_model.num_parameters() > 15_000_000
        ways = ways_of(pair, 3, 5, law)
        said: list[str] = []
        measure(ways, sentences, said.append)
        assert len(said) == len(ways) + 1
        found = [pair.tokenizer.decode(beams[0], skip_special_tokens=True) for beams in ways[-1].beams]
    assert found == expected
    assert [len(way.beams) for way in ways] == [3] * 5  # the least number, as there is no time
    assert ways[-1].beams == ways[-2].beams
    assert ways[-1].line(1).tokens_per_pass > ways[-2].line(1).tokens_per_pass
