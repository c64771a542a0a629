"""Records that people read: short representations, dictionaries, tables for notebooks and pandas."""

import inspect
import json
import math
import sys
from dataclasses import replace

import pytest

import specbeam as sb
from specbeam.core.records import Beam, Generation, Report
from specbeam.errors import BadSetting, MissingPackage, SomeFailed
from tests.support.loops import PROMPTS, pair

__all__ = ["pair"]  # a fixture


@pytest.fixture
def answer():
    report = Report(
        "exact: a law", tokens=6, target_passes=3, draft_passes=4, accepted=2, widths=[2, 2, 2, 1], seconds=0.5
    )
    beams = [Beam([4, 5], -0.25, "one <b> & two"), Beam([4, 6], -1.5, "other", finished=False)]
    return Generation("one <b> & two", [4, 5], beams, report, [1, 2])


def test_figures_are_made_of_the_report(answer):
    assert answer.report.tokens_per_pass == 2.0
    assert answer.report.acceptance == 0.5
    empty = Report("exact: a law")
    assert math.isnan(empty.tokens_per_pass)
    assert math.isnan(empty.acceptance)


def test_dictionaries_go_through_json(answer):
    found = json.loads(json.dumps(answer.to_dict()))
    second = {"tokens": [4, 6], "score": -1.5, "text": "other", "finished": False, "bound": None, "item": None}
    assert found["beams"][1] == second
    assert found["report"]["tokens_per_pass"] == 2.0
    assert found["report"]["rows"]["scored"] == 0


def test_representations_are_short(answer, pair):
    assert (
        repr(replace(answer, text=""))
        == "<Generation '' of tokens [4, 5], 2 beams, 6 tokens in 3 passes; exact: a law>"
    )
    assert repr(answer) == "<Generation 'one <b> & two', 2 beams, 6 tokens in 3 passes; exact: a law>"
    cut = replace(answer, text="other", tokens=[4, 6])
    assert repr(cut).startswith("<Generation 'other' (cut off), 2 beams, ")
    assert len(repr(pair)) < 300
    assert repr(pair.target) == f"<HuggingFaceLM of {type(pair.target_model).__name__}, engine {pair.target.engine!r}>"
    texts = sb.best(pair, PROMPTS[0], 2, max_new_tokens=4)
    assert repr(texts) == f"<BestTexts, 0 texts so far; {texts.report.law}>"
    rounded = sb.load(pair.target_model, quantize="int8", tokenizer=False)
    assert ", int8, engine " in repr(rounded)
    assert "ForCausalLM" in repr(pair)
    assert "no draft" in repr(sb.load(pair.target_model, tokenizer=False))


def test_one_is_followed_by_the_singular(answer):
    single = replace(answer.report, tokens=1, target_passes=1)
    assert repr(replace(answer, report=single)).endswith("1 token in 1 pass; exact: a law>")
    assert "(1 result in .generations)" in str(SomeFailed([BadSetting("wrong")], [answer, None]))
    assert "(0 results in .generations)" in str(SomeFailed([BadSetting("wrong")], [None]))


def test_a_printed_report_is_a_short_line(answer):
    assert str(answer.report) == "6 tokens in 3 passes, 0.50 s; exact: a law"
    assert "widths=[2, 2, 2, 1]" in repr(answer.report)


def test_a_notebook_shows_beams_as_text(answer):
    page = answer._repr_html_()
    assert "<td>one &lt;b&gt; &amp; two</td>" in page
    assert "<td>-1.500</td>" in page
    assert "6 tokens in 3 passes" in page


def test_answers_become_tables(answer, pair):
    pytest.importorskip("pandas")
    rows = sb.to_pandas([answer, answer])
    assert rows["prompt"].tolist() == [0, 1]
    assert rows.loc[0, "text"] == "one <b> & two"
    assert rows.loc[0, "acceptance"] == 0.5
    assert sb.to_pandas(answer, beams=True)["beam"].tolist() == [0, 1]
    assert list(sb.to_pandas([]).columns)[:3] == ["prompt", "text", "tokens"]
    outs = sb.generate(pair, PROMPTS, sb.dsbd(3, 4, 2), max_new_tokens=6, seed=1)
    assert sb.to_pandas(outs)["tokens"].tolist() == [len(out.beams[0].tokens) for out in outs]


@pytest.mark.parametrize("method", [sb.beam_search(3), sb.dsbd(3, 4, 2), sb.sampling()], ids=lambda one: one.name)
def test_a_table_has_a_row_of_its_own_for_each_return_sequence(pair, method):
    pytest.importorskip("pandas")
    outs = sb.generate(pair, PROMPTS, method, num_return_sequences=2, max_new_tokens=6, seed=1)
    rows = sb.to_pandas(outs)
    assert rows["prompt"].tolist() == [0, 0, 1, 1, 2, 2]
    assert rows["text"].tolist() == [out.text for out in outs]
    assert rows["tokens"].tolist() == [len(out.tokens) for out in outs]
    assert [out.sequence for out in outs] == [0, 1] * 3
    beams = sb.to_pandas(outs, beams=True)
    listed = outs if method.beams == 1 else outs[::2]
    assert beams["score"].tolist() == [beam.score for out in listed for beam in out.beams]
    if method.name == "beam_search":
        assert rows["score"].tolist() == [out.beams[out.sequence].score for out in outs]


def test_a_table_of_something_else_says_what_it_takes(answer):
    pytest.importorskip("pandas")
    to_pandas = inspect.unwrap(sb.to_pandas)  # without the tests' own check of types
    with pytest.raises(BadSetting, match=r"element 1 is a Beam; pandas.DataFrame\(beams\) makes a table of beams"):
        to_pandas([answer, answer.beams[0]])
    with pytest.raises(BadSetting, match="element 0 is None; this prompt failed; leave it out"):
        to_pandas([None, answer])
    with pytest.raises(BadSetting, match="element 0 is a str; give the list that generate returned"):
        to_pandas("text")


def test_without_pandas_a_sentence_says_what_to_install(answer, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match=r"to_pandas needs pandas: pip install 'specbeam\[pandas\]'"):
        sb.to_pandas(answer)
