"""Traces: each node has the fate that the verdict gave it, the turns hang together, and notebooks show them."""

import json
import re
from html import unescape

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.decode import decode
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.doors.trace import Trace, fates, words_of
from specbeam.generation import turns_of
from tests.support.loops import PROMPTS, pair

__all__ = ["pair"]  # a fixture
METHODS = [sb.dsbd(3, 4, 2), sb.beam_search(3), sb.speculative_beam_search(3, depth=2), sb.rsd_s(2, 2), sb.sampling()]


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.name)
def test_each_node_of_a_turn_has_the_fate_that_the_verdict_gave_it(pair, method):
    count = 0
    for turn in turns_of(pair, PROMPTS[0], method, seed=3, max_new_tokens=12, eos_token_id=[]):
        leaves = fates(turn, str)
        nodes = leaves[: turn.forest.size]
        assert [leaf.parent for leaf in nodes] == turn.forest.parents.tolist()
        taken = {int(node) for step in turn.verdict.steps for node in step.beams.nodes if node >= 0}
        fresh = sum(int((step.beams.nodes < 0).sum()) for step in turn.verdict.steps)
        assert {place for place, leaf in enumerate(nodes) if leaf.fate == "accepted"} == taken
        assert [leaf.fate for leaf in leaves[turn.forest.size :]] == ["resampled"] * fresh
        reached = np.concatenate([step.parents for step in turn.verdict.steps])
        for leaf in nodes:
            assert (leaf.fate == "root") == (leaf.parent < 0)
            assert leaf.fate != "rejected" or leaf.parent in reached
            assert leaf.fate != "unused" or leaf.parent not in reached
        count += 1
    assert count > 0


TRACED = [
    *METHODS,
    sb.dsbd(3, 5, 3, trace=True),
    sb.dsbd(3, 4, 3, width="dynamic", trace=True),
    sb.dsbd(3, 4, 2, coupling="rejection", replacement=True, trace=True),
    sb.dsbd(3, 4, 3, width="dynamic", collapse=True, trace=True),
    sb.traversal(),
    sb.prompt_lookup(),
]


def trace_of(pair, method, eos):
    """The trace of a text, and its session."""
    warping = {} if method.search else {"temperature": 1.5}
    settings = Settings.given({"max_new_tokens": 16, "eos_token_id": eos, **warping}, None)
    request = Request.of(pair, [PROMPTS[1]], method, settings, 3)
    trace = Trace()
    for turns in decode(pair.target, request.sessions):
        for session, turn in turns:
            trace.add(session, turn, lambda token: f" {token}")
    return trace, request.sessions[0]


@pytest.mark.parametrize("method", TRACED, ids=lambda one: f"{one.name}: {one.law}")
@pytest.mark.parametrize("eos", [[], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_each_turn_begins_at_the_nodes_at_which_the_turn_before_left_its_beams(pair, method, eos):
    """The path to a node is the text of the beam that it ends."""
    trace, session = trace_of(pair, method, eos)
    assert session.failure is None
    assert trace.turns
    live = [""]
    ended = []
    for number, turn in enumerate(trace.turns, start=1):
        assert turn["n"] == number
        paths = []
        roots = 0
        for parent, text, _, _, _ in turn["nodes"]:
            paths.append(live[roots] if parent < 0 else paths[parent] + text)
            roots += parent < 0
        assert roots == len(live)
        live = [paths[node] for node in turn["live"]]
        assert live == [turn["settled"] + tail for tail, _ in turn["beams"]]
        ended += [(paths[node], pytest.approx(score)) for node, score in turn["ends"]]
        latest = [(text, score) for text, score, _ in turn["ended"]]
        assert all(any(text == path and score == value for path, value in ended) for text, score in latest)
    assert len(session.ended) == 0 or ended


def test_an_answer_has_its_turns_if_the_method_records_them(pair):
    answers = sb.generate(pair, PROMPTS, sb.dsbd(3, 4, 2, trace=True), max_new_tokens=6, seed=1)
    plain = sb.generate(pair, PROMPTS, sb.dsbd(3, 4, 2), max_new_tokens=6, seed=1)
    for answer, other in zip(answers, plain, strict=True):
        assert answer.tokens == other.tokens
        assert len(answer.trace.turns) == answer.report.target_passes
        assert repr(answer.trace) == f"<Trace of {len(answer.trace.turns)} turns>"
        assert json.loads(json.dumps(answer.to_dict()))["trace"]["turns"] == json.loads(json.dumps(answer.trace.turns))
        assert other.trace is None
        assert "trace" not in other.to_dict()
        assert "<iframe" not in other._repr_html_()


def test_a_notebook_shows_the_forest_and_no_text_can_leave_its_frame(tmp_path):
    turn = {"n": 1, "nodes": [[-1, '</script><b>"', "root", None, None]], "settled": "é"}
    trace = Trace([turn])
    frame = trace._repr_html_()
    assert re.fullmatch(r'<iframe [^<>]* srcdoc="[^<>"]*"></iframe>', frame)
    page = unescape(re.search(r'srcdoc="([^"]*)"', frame).group(1))
    assert page == trace.to_html()
    assert page.count("</script>") == 1
    turns = re.search(r"\nalone\((.*)\);</script>", page).group(1)
    assert json.loads(turns) == [turn]
    trace.save(tmp_path / "forest.html")
    assert (tmp_path / "forest.html").read_text(encoding="utf-8") == page


def test_the_words_of_a_picture_keep_their_spaces():
    words = words_of(sb.load("bundled", None).tokenizer)
    tokenizer = sb.load("bundled", None).tokenizer
    ids = tokenizer("Ein Hund läuft durch den Wald.", add_special_tokens=False).input_ids
    assert "".join(map(words, ids)).strip() == "Ein Hund läuft durch den Wald."
    assert words(tokenizer.eos_token_id) == tokenizer.eos_token
    assert words_of(None)(17) == "17"
