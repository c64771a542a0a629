"""Turns ahead in one loop against the same turns one by one: texts, scores, reports, and what the models hold."""

from dataclasses import dataclass, replace

import pytest

import specbeam as sb
from specbeam import kernels
from specbeam.ahead import beams, run, trees
from specbeam.ahead.books import PASSES
from specbeam.control.fixed import FixedShape
from specbeam.decode import decode
from specbeam.errors import SomeFailed, TooFewAnswers
from specbeam.generation import turns_of
from specbeam.records import Shape
from specbeam.request import Request
from specbeam.settings import Settings
from specbeam.verify.walk import PathRule
from tests.support.loops import OPTIONS, PROMPTS, known, pair
from tests.support.tiny_models import tiny

if not kernels.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture
METHODS = {
    "fixed": sb.dsbd(3, 5, 4, "fixed"),
    "dynamic": sb.dsbd(4, 5, 3),
    "narrow": sb.dsbd(4, 4, 2, threshold=0.95, min_beams=2),
    "by cost": sb.dsbd(3, width="fixed"),
    "by value": sb.dsbd(3, width="auto"),
    "by value, of one shape": sb.dsbd(4, 4, 3, "auto", min_beams=2),
    "one beam": sb.dsbd(1, 3, 5, "fixed"),
    "no draft": sb.beam_sampling(4),
    "one sequence": sb.sampling(),
    "chain": sb.speculative_sampling(4),
    "chain by cost": sb.speculative_sampling(6, controller="cost"),
    "tree": sb.specinfer((3, 2, 1)),
    "tree of distinct draws": sb.rsd_c((2, 2, 1)),
}
TREES = ["chain", "chain by cost", "tree", "tree of distinct draws"]
ENDS = [
    {}, {"early_stopping": True}, {"early_stopping": "never", "length_penalty": 2.0}, {"num_return_sequences": 2},
    {"length_penalty": 0.0, "early_stopping": False},
]  # fmt: skip


@pytest.fixture
def runs(pair, monkeypatch):
    """What the loops were asked for, but to measure what they cost."""
    measured(pair)
    seen = []
    for module, name in ((beams, "beam_turns"), (trees, "tree_turns")):
        watch(monkeypatch, module, name, seen)
    return seen


def measured(pair):
    for method in METHODS.values():
        method.parts(pair.draft, pair.target)
    return pair


def watch(monkeypatch, module, name, seen):
    loop = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: seen.append(loop(*given)) or seen[-1])


def both(pair, prompt, method, monkeypatch, **options):
    """What comes of a generation with the loop and without it."""
    options = {"seed": 4, "max_new_tokens": 12, "eos_token_id": [9, 30], **options}
    found = answers(pair, prompt, method, **options)
    with monkeypatch.context() as patch:
        patch.setattr(run, "ahead_of", lambda target, session: None)
        expected = answers(pair, prompt, method, **options)
    return [known(one) for one in found], [known(one) for one in expected]


def answers(*given, **options):
    try:
        return sb.generate(*given, **options)
    except TooFewAnswers as error:  # a dynamic width may leave fewer beams than were asked for
        return error.generations


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_texts_and_reports_are_the_same(pair, runs, monkeypatch, name, options):
    for prompt in PROMPTS:
        found, expected = both(pair, prompt, METHODS[name], monkeypatch, **options)
        assert found == expected
    cut, greedy = "top_k" in options or "top_p" in options, options.get("temperature") == 0
    dynamic = name in ("dynamic", "narrow", "by value", "by value, of one shape")
    assert bool(runs) == (cut or greedy if dynamic else not (greedy and name.startswith("tree")))


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("name", ["fixed", "dynamic", "no draft", "chain", "tree"])
def test_ends_come_where_they_came(pair, runs, monkeypatch, name, ends):
    """Beams end often, and each of them may be enough."""
    options = {"top_k": 12, **ends, "eos_token_id": list(range(0, 60, 6))}
    for seed in range(4):
        found, expected = both(pair, PROMPTS[0], METHODS[name], monkeypatch, seed=seed, **options)
        assert found == expected
    assert runs


@pytest.mark.parametrize("name", ["fixed", "dynamic", "by cost", "by value", "one sequence", *TREES])
def test_long_texts_take_several_runs(pair, runs, monkeypatch, name):
    options = {"max_new_tokens": 250, "eos_token_id": [], "top_k": 8}
    found, expected = both(pair, PROMPTS[0], METHODS[name], monkeypatch, **options)
    assert found == expected
    assert len(runs) > 3
    assert sum(one.books.numbers[PASSES] for one in runs) == found[0][1]


def test_what_is_not_for_the_loop_goes_turn_by_turn(pair, runs, monkeypatch):
    """The support of a wide top-k is too long for the races behind a width."""
    found, expected = both(pair, PROMPTS[0], METHODS["dynamic"], monkeypatch, top_k=64, temperature=3.0)
    assert found == expected
    (one,) = runs
    assert not one.told


@pytest.mark.parametrize("name", TREES)
def test_a_law_that_the_loop_cannot_say_goes_turn_by_turn(runs, monkeypatch, name):
    """Behind a flat row, top-p keeps more than is ranked one by one."""
    flat, own = tiny("llama", seed=1, vocab_size=2048), tiny("llama", seed=2, vocab_size=2048)
    flat.lm_head.weight.data.mul_(0.01)
    for target, draft in ((flat, own), (own, flat)):
        pair = measured(sb.load(target, draft))
        runs.clear()
        found, expected = both(pair, PROMPTS[0], METHODS[name], monkeypatch, top_p=0.9)
        assert found == expected
        assert not runs[-1].told


@pytest.mark.parametrize("name", ["fixed", "dynamic", "by cost", "by value", *TREES])
def test_single_turns_may_follow(pair, monkeypatch, name):
    """A run leaves behind what single turns would have."""
    states = []
    for loop in (True, False):
        request = Request(pair, [PROMPTS[0]], METHODS[name], Settings(max_new_tokens=60, top_k=6, eos_token_id=[]), 3)
        (session,) = request.sessions
        for _ in decode(pair.target, [session], ahead=loop):
            monkeypatch.setattr(run, "ahead_of", lambda target, session: None)
        texts = [(one.tokens, one.loglik) for one in session.hypotheses()]
        states.append((texts, session.count.target_passes, session.count.widths, session.count.peak_kv_tokens))
        monkeypatch.undo()
    assert states[0] == states[1]


def test_a_pass_is_counted_once(pair, monkeypatch):
    """By the models too, which know passes that ran no layer."""
    counts = []
    for loop in (True, False):
        if not loop:
            monkeypatch.setattr(run, "ahead_of", lambda target, session: None)
        before = pair.target.passes, pair.draft.passes
        sb.generate(pair, PROMPTS[0], METHODS["fixed"], seed=1, max_new_tokens=24, top_k=6)
        counts.append((pair.target.passes - before[0], pair.draft.passes - before[1]))
    assert counts[0] == counts[1]


def test_streams_and_single_turns_do_not_run_ahead(pair, runs):
    seen = [*turns_of(pair, PROMPTS[0], METHODS["fixed"], max_new_tokens=6, seed=1)]
    assert len(seen) > 0
    assert not runs


def test_prompts_one_after_the_other(pair, runs):
    """A batch of one is a loop; the last of a batch is one as soon as it is alone."""
    alone = sb.generate(pair, PROMPTS, METHODS["fixed"], seed=2, max_new_tokens=20, top_k=5, batch_size=1)
    assert len(runs) >= len(PROMPTS)
    together = sb.generate(pair, PROMPTS, METHODS["fixed"], seed=2, max_new_tokens=20, top_k=5, batch_size=3)
    assert [one.tokens for one in alone] == [one.tokens for one in together]


def test_a_model_with_more_words_than_the_target_drafts_turn_by_turn(runs):
    own = sb.load(tiny("llama", seed=1, vocab_size=64), tiny("llama", seed=2, vocab_size=64))
    own.draft.vocab = 65
    sb.generate(own, PROMPTS[0], METHODS["fixed"], seed=2, max_new_tokens=4, top_k=5)
    assert not runs


@dataclass(frozen=True)
class Shallower(FixedShape):
    """Somebody's own: it decides otherwise than the part that it is derived from."""

    def plan(self, session):
        return Shape(min(2, session.remaining - 1), 1)


class Counting(PathRule):
    def verify(self, session, forest, scored):
        verdicts.append(verdict := super().verify(session, forest, scored))
        return verdict


verdicts = []


def test_parts_that_are_derived_are_obeyed(pair, runs):
    verdicts.clear()
    own = sb.speculative_sampling(4, controller=Shallower(4, 1))
    (found,) = sb.generate(pair, PROMPTS[0], own, seed=3, max_new_tokens=12, top_k=6, eos_token_id=[])
    assert found.report.draft_passes <= 2 * found.report.target_passes
    plain = sb.speculative_sampling(4)
    parts = replace(plain.parts(pair.draft, pair.target), rule=Counting())
    method = replace(plain, build=lambda target, draft: parts)
    (found,) = sb.generate(pair, PROMPTS[0], method, seed=3, max_new_tokens=12, top_k=6)
    assert len(verdicts) == found.report.target_passes
    assert not runs


@pytest.mark.parametrize("name", METHODS)
def test_one_new_token_and_no_draft_at_all(pair, monkeypatch, name):
    for options in ({"max_new_tokens": 1}, {"max_new_tokens": 2, "eos_token_id": []}):
        found, expected = both(pair, PROMPTS[1], METHODS[name], monkeypatch, top_k=6, **options)
        assert found == expected
    shape = sb.speculative_sampling(3, controller=FixedShape(0, 1))
    found, expected = both(pair, PROMPTS[0], shape, monkeypatch, top_k=6)
    assert found == expected


@pytest.mark.parametrize("name", ["fixed", "dynamic", "chain", "tree"])
def test_long_prompts_go_in_by_chunks(runs, monkeypatch, name):
    own = sb.load(tiny("llama", seed=1, vocab_size=64), tiny("llama", seed=2, vocab_size=64))
    own.target.chunk = own.draft.chunk = 24
    for length in (10, 23, 24, 40, 100):
        prompt = [*range(3, 60), *range(3, 60)][:length]
        found, expected = both(measured(own), prompt, METHODS[name], monkeypatch, top_k=6)
        assert found == expected
    assert runs


def test_what_goes_wrong_costs_one_prompt(pair, monkeypatch):
    loop, calls = beams.beam_turns, []

    def broken(*given):
        calls.append(given)
        if len(calls) == 1:
            raise IndexError("a token is beyond those of the model")
        return loop(*given)

    monkeypatch.setattr(beams, "beam_turns", broken)
    with pytest.raises(SomeFailed, match=r"prompt 0.*IndexError: a token is beyond") as failed:
        sb.generate(pair, [PROMPTS[0]] * 2, METHODS["fixed"], max_new_tokens=4, batch_size=1)
    assert len(failed.value.generations[1].tokens) > 0
