"""Sessions draft, or do not, as was faster for those before them."""

import json
from dataclasses import replace

import numpy as np
import pytest

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.compiling.forms import forms_made
from specbeam.core.control.cost import CostCurve
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.needs import NodesByNeed
from specbeam.core.control.pace import (
    FIRST_WAIT,
    LEAST_SESSIONS,
    LONGEST_WAIT,
    DraftsIfFaster,
    Pace,
    PaceMemory,
    Phase,
    side_by_side,
)
from specbeam.core.decode import decode
from specbeam.core.decoder import Decoder
from specbeam.core.draft.beams import NoDraft
from specbeam.core.measure import saved_figures
from specbeam.core.verify.walk import PathRule
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from tests.support.loops import pair

__all__ = ["pair"]  # a fixture


def phases(pace, seconds_of, count, noise=0.0):
    """Whether the sessions of each phase drafted, for sessions one after the other."""
    rng = np.random.default_rng(0)
    ways = []
    while len(ways) < count:
        ways.append(pace.drafts)
        number = pace.number
        while pace.number == number:
            phase = pace.enter()
            pace.leave(phase, seconds_of[phase.drafts] * (1 + noise * rng.normal()), 1, LEAST_SESSIONS)
    return ways


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_taken_and_the_other_tried_less_and_less_often(faster):
    pace = Pace()
    ways = phases(pace, {faster: 1.0, not faster: 1.2}, 300, noise=0.1)
    assert ways[:2] == [True, False]
    trials = [number for number, way in enumerate(ways) if way != faster and number > 1]
    gaps = np.diff(trials)
    assert (gaps[1:] >= gaps[:-1]).all()
    assert gaps[0] > FIRST_WAIT
    assert gaps[-1] == LONGEST_WAIT + 1


def test_a_change_is_noticed():
    """Drafts pay for a while, then no more: the texts have changed."""
    pace = Pace()
    assert phases(pace, {True: 1.0, False: 1.2}, 60)[-1]
    later = phases(pace, {True: 1.5, False: 1.2}, 20)
    assert later[-FIRST_WAIT:].count(False) >= FIRST_WAIT - 1


def test_a_trial_without_drafts_is_short_where_texts_are_long():
    for seconds, wanted in ((1.0, 3), (0.01, LEAST_SESSIONS)):
        pace = Pace()
        counts = dict.fromkeys((True, False), 0)
        while pace.number < 2:
            phase = pace.enter()
            counts[phase.drafts] += 1
            pace.leave(phase, seconds, 20, LEAST_SESSIONS)
        assert counts == {True: LEAST_SESSIONS, False: wanted}


def test_sessions_in_which_code_was_compiled_do_not_count():
    pace = Pace()
    pace.leave(pace.enter(), float("nan"), 5, 1)
    pace.leave(pace.enter(), 1.0, 0, 1)  # it has no layers
    assert (pace.number, list(pace.paces[True])) == (0, [])


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
def test_a_session_is_not_timed_while_code_is_compiled(pair, monkeypatch):
    made = iter(range(1000))
    monkeypatch.setattr("specbeam.core.decoder.forms_made", lambda: next(made))
    settings = Settings.given({"max_new_tokens": 3}, None)
    (session,) = Request.of(pair, [[3, 1, 4]], sb.sampling(), settings, seed=5).sessions
    list(decode(pair.target, [session]))
    assert np.isnan(session.count.seconds)
    monkeypatch.undo()
    before = forms_made()
    (session,) = Request.of(pair, [[3, 1, 4]], sb.sampling(), settings, seed=5).sessions
    list(decode(pair.target, [session]))
    assert forms_made() == before
    assert session.count.seconds > 0


def test_sessions_beside_those_of_another_phase_do_not_count():
    pace = Pace()
    early = pace.enter()
    for _ in range(LEAST_SESSIONS):
        pace.leave(pace.enter(), 1.0, 1, LEAST_SESSIONS)
    late = pace.enter()  # the first one is not over
    assert (late.number, late.drafts, late.is_pure) == (1, False, False)
    pace.leave(late, 99.0, 1, LEAST_SESSIONS)
    assert 99.0 not in pace.paces[False]
    pace.leave(early, 1.0, 1, LEAST_SESSIONS)
    assert pace.enter().is_pure


@pytest.mark.remembers
def test_paces_are_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path))
    memory = PaceMemory(["a pair"])
    for _ in range(2 * LEAST_SESSIONS):
        phase = memory.enter("x")
        memory.leave("x", phase, 0.02 if phase.drafts else 0.01, 1, 1)
    assert not memory.enter("x").drafts
    again = PaceMemory(["a pair"])
    assert not again.enter("x").drafts
    assert again._paces["x"].paces == memory._paces["x"].paces
    assert PaceMemory(["another"]).enter("x").drafts
    (file,) = saved_figures.folder().glob("pace-*.json")
    for broken in ("{", json.dumps({"drafted": 1}), json.dumps([])):
        file.write_text(broken)
        assert PaceMemory(["a pair"]).enter("x").drafts


def test_a_session_whose_drafts_are_traced_does_not_rest(pair, monkeypatch):
    settings = Settings.given({"max_new_tokens": 6}, None)
    for trace in (True, False):
        method = sb.dsbd(3, trace=trace).with_parts(
            controller=NodesByNeed(CostCurve((1,), (1.0,)), CostCurve((1,), (1e-3,)), 3, 5)
        )
        (session,) = Request.of(pair, [[3, 1, 4]], method, settings, seed=5).sessions
        monkeypatch.setattr(session.parts.controller.paces, "enter", lambda kind: Phase(0, False, True))
        list(decode(pair.target, [session]))
        assert (session.count.draft_passes > 0) == trace


@pytest.mark.remembers
@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix_match", "token_recycling"])
def test_drafts_of_beams_without_a_model_are_left_out_if_slower(drafter, pair, monkeypatch):
    """All calls share what earlier ones measured."""
    methods = [sb.speculative_beam_search(4, drafter=drafter) for _ in range(2)]
    paces, others = [method.parts(pair.target, None).controller.paces for method in methods]
    assert paces is others
    prompts = [[3, 1, 4, 3, 1, 4]]
    (drafted,) = Request.of(pair, prompts, methods[0], Settings.given({"max_new_tokens": 4})).sessions
    list(decode(pair.target, [drafted]))
    assert not isinstance(drafted.parts.drafter, NoDraft)
    monkeypatch.setattr(paces, "enter", lambda kind: Phase(0, False, True))
    monkeypatch.setattr(paces, "leave", lambda *arguments: None)
    (undrafted,) = Request.of(pair, prompts, methods[1], Settings.given({"max_new_tokens": 4})).sessions
    list(decode(pair.target, [undrafted]))
    assert isinstance(undrafted.parts.drafter, NoDraft)
    assert next(undrafted.hypotheses()).tokens == next(drafted.hypotheses()).tokens


@pytest.mark.remembers
@pytest.mark.parametrize("end", ["finished", "cancelled", "failed", "dropped"])
def test_sessions_leave_however_they_end(end, pair):
    """With a drafter that is not ours, too; and only whole texts count."""
    eager = NodesByNeed(CostCurve((1, 100), (1.0, 1.001)), CostCurve((1,), (1e-3,)), 4, 6)
    method = sb.speculative_beam_search(4, drafter="prompt_lookup").with_parts(controller=eager)
    settings = Settings.given({"max_new_tokens": 6}, None)
    (session,) = Request.of(pair, [[3, 1, 4]], method, settings, seed=5).sessions
    with Decoder(pair.target) as decoder:
        decoder.add(session)
        decoder.step()
        (pace,) = eager.paces._paces.values()
        assert sum(pace.live.values()) == 1
        if end == "cancelled":
            decoder.cancel(session)
        elif end == "failed":
            session.fail(ValueError("broken"), "")
        while decoder.busy and end != "dropped":
            decoder.step()
    assert pace.live == {}
    assert len(pace.paces[True]) == (end == "finished" and not np.isnan(session.count.seconds))


def test_sides_are_counted_by_powers_of_two():
    assert [side_by_side(count).split()[0] for count in (1, 2, 3, 4, 15, 16)] == [
        "2^0",
        "2^1",
        "2^1",
        "2^2",
        "2^3",
        "2^4",
    ]


@pytest.mark.remembers
@pytest.mark.parametrize("ahead", [0, 32])
@pytest.mark.parametrize("at_once", [1, 4])
def test_texts_do_not_depend_on_who_drafts(ahead, at_once, pair, monkeypatch):
    """Every other session drafts; those that rest have no pass of the draft model, and the beams are the same."""
    prompts = [[3, 1, 4, number] for number in range(8)]
    entered = []

    def enter(self, session, batch_size):
        entered.append(batch_size)
        return len(entered) % 2 == 0

    monkeypatch.setattr("specbeam.core.control.needs.NodesByNeed.enter", enter)
    settings = Settings.given({"max_new_tokens": 12}, None)
    texts = []
    eager = NodesByNeed(CostCurve((1, 100), (1.0, 1.001)), CostCurve((1,), (1e-3,)), 4, 6)  # drafts cost nothing
    for method in (sb.beam_sampling(4), sb.dsbd(4).with_parts(controller=eager)):
        request = Request.of(pair, prompts, method, settings, seed=5)
        for _ in decode(pair.target, request.sessions, at_once, ahead):
            pass
        assert [session.failure for session in request.sessions] == [None] * 8
        texts.append([[ended.tokens for ended in session.hypotheses()] for session in request.sessions])
    assert texts[0] == texts[1]
    assert set(entered[:at_once]) == {at_once}
    rested = [session.count.draft_passes == 0 for session in request.sessions]
    assert rested[0::2] == [True] * 4
    assert not all(rested)


def texts_and_draft_passes(pair, method, sessions, seconds_of, monkeypatch, **settings):
    """Texts and draft passes of one session after the other, by a clock of which a session takes `seconds_of[drafts]`."""
    monkeypatch.setattr("specbeam.recipes.compose.is_dear", lambda draft, target: False)  # both models have one size
    leave = PaceMemory.leave
    monkeypatch.setattr(
        PaceMemory,
        "leave",
        lambda self, kind, phase, s, *rest: leave(self, kind, phase, seconds_of[phase.drafts], *rest),
    )
    parts = method.parts(pair.target, pair.draft)
    if isinstance(parts.controller, DraftsIfFaster):  # the same for all requests, and nothing kept on disk
        parts = replace(parts, controller=replace(parts.controller, paces=PaceMemory()))
    method = method.with_parts(controller=parts.controller)
    asked = Settings.given({"max_new_tokens": 3, **settings}, None)
    texts = []
    passes = []
    for number in range(sessions):
        (session,) = Request.of(pair, [[3, 1, 4, number % 5]], method, asked, seed=number).sessions
        list(decode(pair.target, [session], 1, 32))
        texts.append(next(iter(session.hypotheses())).tokens)
        passes.append(session.count.draft_passes)
    monkeypatch.undo()
    return texts, passes


@pytest.mark.remembers
@pytest.mark.parametrize("rule", ["path", "traversal", "match"])
@pytest.mark.parametrize("faster", [True, False])
def test_chains_are_left_out_where_they_are_slower_and_no_text_shows_it(rule, faster, pair, monkeypatch):
    count = 4 * LEAST_SESSIONS
    seconds_of = {faster: 0.01, not faster: 0.015}
    chain = sb.speculative_sampling(3, rule)
    texts, passes = texts_and_draft_passes(pair, chain, count, seconds_of, monkeypatch, temperature=0)
    assert all(passes[:LEAST_SESSIONS])
    assert not any(passes[LEAST_SESSIONS : 2 * LEAST_SESSIONS])
    assert [later > 0 for later in passes[2 * LEAST_SESSIONS :]] == [faster] * (2 * LEAST_SESSIONS)
    plain, _ = texts_and_draft_passes(pair, sb.greedy(), count, seconds_of, monkeypatch)
    assert texts == plain


@pytest.mark.remembers
@pytest.mark.parametrize("rule", ["path", "match"])
def test_no_clock_decides_what_a_seed_draws(rule, pair, monkeypatch):
    """Texts by rejection depend on the drafts, so every session has some; texts that match noise do not."""
    count = 3 * LEAST_SESSIONS
    chain = sb.speculative_sampling(3, rule)
    texts, passes = texts_and_draft_passes(pair, chain, count, {True: 9.0, False: 1.0}, monkeypatch)
    others, _ = texts_and_draft_passes(pair, chain, count, {True: 1.0, False: 9.0}, monkeypatch)
    assert texts == others
    assert (passes[-1] == 0) == (rule == "match")


def test_a_rule_that_judges_in_another_way_does_not_inherit_that_drafts_may_be_left_out(pair, monkeypatch):
    class Lenient(PathRule):
        def verify(self, session, forest, scored):
            return super().verify(session, forest, scored)

    class Named(PathRule):
        """The same rule."""

    controller = DraftsIfFaster(FixedShape(3, 1), "chains")
    monkeypatch.setattr(controller.paces, "enter", lambda kind: Phase(0, False, True))
    settings = Settings.given({"max_new_tokens": 3, "temperature": 0}, None)
    for rule, drafts in ((PathRule(), False), (Named(), False), (Lenient(), True)):
        method = sb.speculative_sampling(3, rule).with_parts(controller=controller)
        (session,) = Request.of(pair, [[3, 1, 4]], method, settings, seed=5).sessions
        assert controller.enter(session, 1) == drafts


@pytest.mark.parametrize("audit", [True, False])
def test_a_session_that_is_audited_drafts(audit, pair, monkeypatch):
    controller = DraftsIfFaster(FixedShape(3, 1), "chains")
    monkeypatch.setattr(controller.paces, "enter", lambda kind: Phase(0, False, True))
    method = sb.speculative_sampling(3).with_parts(controller=controller)
    settings = Settings.given({"max_new_tokens": 6, "temperature": 0}, None)
    (session,) = Request.of(pair, [[3, 1, 4]], method, settings, seed=5, audit=audit).sessions
    list(decode(pair.target, [session]))
    assert (session.count.draft_passes > 0) == audit
