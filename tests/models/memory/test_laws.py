"""Laws of texts of models with memory, enumerated: those of the model with memory as it is defined, whatever drafts there are.

Prompts and segments are such that beams part in one segment, cross the ends of one or two, and reject drafts beyond them.
"""

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.session import Session
from specbeam.doors.options.processors import TextFacts
from specbeam.doors.options.settings import Settings
from specbeam.errors import BadSetting
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.table import TableLM
from tests.support.exact import beam_sampling_law, distance, exact_law
from tests.support.programs import random_table, run, texts
from tests.support.remembered import ForwardLM, Naive, tiny_remembering

VOCAB = 3
PROMPT = [1, 0, 2, 2, 1]
BITS = [1, 0, 1, 1, 0]


def models_of(vocab):
    (target, recall), (draft, draft_recall) = (tiny_remembering(vocab, seed=seed) for seed in (1, 2))
    return ForwardLM(target), recall, ForwardLM(draft), draft_recall


@pytest.fixture(scope="module")
def models():
    return models_of(VOCAB)


@pytest.fixture(scope="module")
def bits():
    """Models of two tokens, of whose programs all outcomes are walked."""
    return models_of(2)


PLANS = {
    "previous tail": MemoryPlan(2, 1, 2, 0.5, "attention", "previous_tail"),
    "refresh": MemoryPlan(3, 1, 2, 0.7, "attention", "refresh"),
    "refresh by one token": MemoryPlan(2, 2, 3, 0.5, "attention", "refresh"),
    "previous memory": MemoryPlan(2, 0, 1, 0.5, "previous"),
}


def outcome_of(method, target, draft, steps, seen=None):
    def program(dice):
        session = Session(BITS, method.parts(None, draft), Warp(), Limits(steps, (), keep=99), 0)
        session.dice = dice
        run(session, target)
        if seen is not None:
            seen.append(session.count.target_passes)
        ended, live = texts(session)
        return ended, live

    return program


def law_after_prompt(naive):
    laws = {}

    def table(path):
        if path not in laws:
            laws[path] = naive.law([*BITS, *path])
        return laws[path]

    return table


DRAFTS = {
    "with memory": MemoryPlan(3, 1, 2, 0.5, "attention", "previous_tail"),
    "without": None,
}


@pytest.mark.parametrize("plan", PLANS)
def test_one_sequence_has_the_law_of_the_definition(bits, plan):
    """A tree of drafts two deep over segments of two or three tokens: each draft may be beyond an end."""
    target, recall, draft, draft_recall = bits
    remembering = MemoryLM(target, PLANS[plan], recall)
    drafting = MemoryLM(draft, DRAFTS["with memory"], draft_recall)
    seen = []
    law = {}
    outcomes = exact_law(outcome_of(sb.specinfer((2, 1)), remembering, drafting, 3, seen))
    for (ended, live), odds in outcomes.items():
        (text,) = ended or live
        law[text] = law.get(text, 0.0) + odds
    table = law_after_prompt(Naive(target.model, recall, PLANS[plan]))
    expected = {
        (a, b, c): float(table(())[a] * table((a,))[b] * table((a, b))[c])
        for a in range(2)
        for b in range(2)
        for c in range(2)
    }
    assert distance(law, expected) < 1e-12
    assert min(seen) < 3  # drafts were accepted
    assert max(seen) > 1
    assert not target.open
    assert not draft.open


@pytest.mark.parametrize("drafts", DRAFTS)
def test_beams_have_the_law_of_beam_sampling(bits, drafts):
    target, recall, draft, draft_recall = bits
    plan = PLANS["previous tail"]
    remembering = MemoryLM(target, plan, recall)
    drafting = MemoryLM(draft, MemoryPlan(2, 2, recall="initial"), None)
    if DRAFTS[drafts] is not None:
        drafting = MemoryLM(draft, DRAFTS[drafts], draft_recall)
    method = sb.dsbd(2, 2, 2, coupling="rejection")
    law = exact_law(outcome_of(method, remembering, drafting, 2))
    table = law_after_prompt(Naive(target.model, recall, plan))
    assert distance(law, beam_sampling_law(table, 2, 2, False)) < 1e-12
    assert not target.open
    forgetful = law_after_prompt(Naive(target.model, recall, MemoryPlan(2, 1, recall="initial")))
    assert distance(law, beam_sampling_law(forgetful, 2, 2, False)) > 0.01


def decoded(method, target, draft, seed, steps=9, warp=None):
    session = Session(PROMPT, method.parts(None, draft), warp or Warp(), Limits(steps, (), keep=99), seed)
    session.turns = run(session, target)
    return session


@pytest.mark.parametrize("plan", PLANS)
def test_the_same_seed_gives_the_beams_of_beam_sampling_each_with_its_own_memory(models, plan):
    """And each log-likelihood is that of the definition on this beam alone: forks close and recall for themselves."""
    target, recall, draft, draft_recall = models
    remembering = MemoryLM(target, PLANS[plan], recall)
    drafting = MemoryLM(draft, DRAFTS["with memory"], draft_recall)
    naive = Naive(target.model, recall, PLANS[plan])
    for seed in range(2):
        plain = decoded(sb.beam_sampling(3), remembering, None, seed)
        drafted = decoded(sb.dsbd(3, 4, 3), remembering, drafting, seed)
        beams = [beam.tokens for beam in plain.hypotheses()]
        assert [beam.tokens for beam in drafted.hypotheses()] == beams
        assert drafted.count.target_passes < plain.count.target_passes
        for beam in drafted.hypotheses():
            each = [
                np.log(naive.law([*PROMPT, *beam.tokens[:place]])[token]) for place, token in enumerate(beam.tokens)
            ]
            assert beam.loglik == pytest.approx(sum(each), abs=1e-9)
        assert not target.open
        assert not draft.open


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("depth", [1, 5])
def test_at_temperature_zero_the_text_is_that_of_greedy_decoding(models, plan, depth):
    """For drafts that end before, at and after the ends of one or two segments."""
    target, recall, draft, draft_recall = models
    remembering = MemoryLM(target, PLANS[plan], recall)
    expected = Naive(target.model, recall, PLANS[plan]).greedy(PROMPT, 9)
    warp = Settings(temperature=0.0).warp(TextFacts((), len(PROMPT)), greedy=True)
    for drafting in (MemoryLM(draft, DRAFTS["with memory"], draft_recall), TableLM(random_table(5, VOCAB))):
        session = decoded(sb.speculative_sampling(depth), remembering, drafting, 0, warp=warp)
        assert next(session.hypotheses()).tokens == expected
        assert session.count.target_passes <= 9


def test_rejected_drafts_leave_nothing(models):
    """Between turns there are the windows of live beams alone, and what they hold is what reading their texts anew gives."""
    target, recall, *_ = models
    plan = PLANS["previous tail"]
    remembering = MemoryLM(target, plan, recall)
    method = sb.dsbd(2, 3, 3)
    session = Session(PROMPT, method.parts(None, TableLM(random_table(5, VOCAB))), Warp(), Limits(8, (), keep=99), 3)
    settle = remembering.settle
    naive = Naive(target.model, recall, plan)
    seen = []

    def watched(session, turn):
        settle(session, turn)
        tree = session.state[remembering]
        live = turn.verdict.beams
        assert tree.nodes == []
        assert len(target.open) <= len(tree.beams)
        for anchor, parent, token in zip(tree.beams, turn.verdict.parents, live.tokens, strict=True):
            above = [*PROMPT, *session.new_tokens(turn.forest, np.array([parent]))[0].tolist()]
            text = [*above, int(token)]
            known = text[: len(text) - len(anchor.pending)]
            start = len(known) - len(anchor.place.tokens)
            assert known[start:] == [*anchor.place.tokens]
            assert start % plan.segment == 0
            assert [*anchor.place.window.past.tail] == known[max(start - 1, 0) : start]
            expected = naive.memories_before(known, start // plan.segment)[-plan.memories :]
            assert len(expected) == len(anchor.place.window.past.memories)
            for memory, committed in zip(anchor.place.window.past.memories, expected, strict=True):
                assert float((memory - committed).abs().max()) < 1e-10
            seen.append(start)

    remembering.settle = watched
    run(session, remembering)
    assert len(set(seen)) > 3  # segments were closed
    assert not target.open


def test_a_query_of_the_first_half_is_no_law_to_decode_with(models):
    target, recall, *_ = models
    with pytest.raises(BadSetting, match="no text can be drawn"):
        MemoryLM(target, MemoryPlan(4, 2, query="first_half"), recall)


def test_what_is_kept_does_not_grow_with_the_text(models):
    """One window in all passes, whatever the length of prompt and text; memories up to their number."""
    target, recall, *_ = models
    plan = MemoryPlan(4, 2, 3)
    peaks = []
    for length in (9, 60):
        remembering = MemoryLM(ForwardLM(target.model), plan, recall)
        prompt = np.random.default_rng(length).integers(VOCAB, size=length).tolist()
        session = Session(prompt, sb.greedy().parts(None, None), Warp(), Limits(length, (), keep=99), 0)
        run(session, remembering)
        assert remembering.lm.most_rows <= plan.window
        peaks.append(remembering.lm.most_rows)
    assert peaks[0] == peaks[1] == plan.window


@pytest.mark.parametrize(
    ("segment", "sensory", "memories", "share"),
    [(4, 0, 3, 0.5), (4, 4, 3, 0.5), (4, 2, 1, 0.5), (4, 2, 3, 0.1), (1, 1, 2, 1.0)],
)
@pytest.mark.parametrize("query", ["previous_tail", "refresh"])
def test_prompts_around_the_length_of_a_segment_and_extreme_plans(models, segment, sensory, memories, share, query):
    target, recall, *_ = models
    plan = MemoryPlan(segment, sensory, memories, share, "attention", query)
    naive = Naive(target.model, recall, plan)
    remembering = MemoryLM(target, plan, recall)
    warp = Settings(temperature=0.0).warp(TextFacts((), 1), greedy=True)
    for length in (1, 3, 4, 5):
        prompt = PROMPT[:length]
        drafting = TableLM(random_table(5, VOCAB))
        session = Session(prompt, sb.speculative_sampling(2).parts(None, drafting), warp, Limits(6, (), keep=99), 0)
        run(session, remembering)
        assert next(session.hypotheses()).tokens == naive.greedy(prompt, 6)
    assert not target.open
