"""A rule, a drafter, a controller and an engine of one's own, each in one file, run in the compiled loop."""

from typing import NamedTuple

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.beams import Stop
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.width import FixedWidth
from specbeam.core.decode import decode
from specbeam.core.draft.beams import BeamDrafter, NoDraft
from specbeam.core.draft.children import Independent
from specbeam.core.draft.tree import Branching, TreeDrafter
from specbeam.core.laws.named import EXACT
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.session import Parts, Session
from specbeam.core.steps import AVAILABLE
from specbeam.core.verify.beams import BeamRule
from specbeam.core.verify.turns import verify_turn
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.errors import BrokenPart, UnknownKind
from tests.plugins.bigram_drafter import BigramDrafter
from tests.plugins.bigram_engine import BigramLM
from tests.plugins.lenient_rule import LenientRule, verify_leniently
from tests.plugins.sawtooth_controller import Sawtooth
from tests.support.checking import refused
from tests.support.tiny_models import tiny

VOCAB = 61
RNG = np.random.default_rng(5)
LOGITS = RNG.normal(size=(VOCAB, VOCAB)) * 2
FOLLOWER = LOGITS.argmax(1)
PAIR = {}


def pair():
    if not PAIR:
        PAIR[0] = sb.load(tiny("llama", seed=1), tiny("llama", seed=2))
    return PAIR[0]


def bigrams():
    return BigramLM(LOGITS)


def near():
    return BigramLM(LOGITS + np.random.default_rng(6).normal(size=LOGITS.shape) * 0.5)


def chain(lm):
    return TreeDrafter(lm, Branching((1,), Independent()))


def with_rule():
    models = pair()
    return models.target, Parts(chain(models.draft), LenientRule(1.5), FixedShape(3, 1), LenientRule.law)


def with_drafter():
    models = pair()
    follower = np.arange(1, models.target.vocab + 1) % models.target.vocab
    return models.target, Parts(BigramDrafter(follower), MatchRule(), FixedShape(3, 1), EXACT)


def with_controller():
    models = pair()
    return models.target, Parts(chain(models.draft), PathRule(), Sawtooth(4), EXACT)


def with_controller_of_beams():
    models = pair()
    rule = BeamRule(FixedWidth(3))
    return models.target, Parts(BeamDrafter(models.draft, 3), rule, Sawtooth(4, width=5), EXACT)


def with_engine():
    return bigrams(), Parts(NoDraft(), MatchRule(), FixedShape(0, 0), EXACT)


def with_engine_that_drafts():
    return bigrams(), Parts(chain(near()), PathRule(), FixedShape(3, 1), EXACT)


def with_engine_for_beams():
    return bigrams(), Parts(BeamDrafter(near(), 3), BeamRule(FixedWidth(3)), FixedShape(3, 5), EXACT)


def with_everything():
    target = bigrams()
    return target, Parts(BigramDrafter(FOLLOWER), LenientRule(0.5), Sawtooth(3), LenientRule.law)


RARE = [
    with_drafter,
    with_controller,
    with_controller_of_beams,
    with_engine,
    with_engine_that_drafts,
    with_engine_for_beams,
]
CASES = [with_rule, with_everything, *(pytest.param(case, marks=pytest.mark.slow) for case in RARE)]  # fmt: skip


def decoded(case, ahead, warp=None):
    target, parts = case()
    session = Session([1, 7, 3], parts, warp or Warp(), Limits(24, (5,), keep=9), 11)
    passes = 0
    for turns in decode(target, [session], ahead=ahead):
        passes += len(turns)
    if session.failure:
        raise session.failure
    texts = [tuple(one.tokens) for one in session.hypotheses()]
    return texts, session.count.target_passes, passes


@pytest.mark.skipif(not AVAILABLE, reason="needs numba")
@pytest.mark.parametrize("case", CASES)
def test_parts_and_engines_of_ones_own_run_compiled_and_give_the_texts_of_single_turns(case):
    texts, count, single = decoded(case, ahead=8)
    assert single == 0, "a turn was taken in Python"
    expected, passes, singles = decoded(case, ahead=0)
    assert singles == passes
    assert (texts, count) == (expected, passes)


def test_a_lenient_rule_accepts_what_greedy_decoding_refuses():
    strict = decoded(lambda: (bigrams(), Parts(chain(near()), LenientRule(0.0), FixedShape(3, 1), "")), 8)
    lenient = decoded(lambda: (bigrams(), Parts(chain(near()), LenientRule(9.0), FixedShape(3, 1), "")), 8)
    token = 3
    greedy = []
    while len(greedy) < 24 and (not greedy or greedy[-1] != 5):
        token = int(LOGITS[token].argmax())
        greedy.append(token)
    assert list(strict[0][0]) == greedy
    assert lenient[1] < strict[1]


class PlainSpec(NamedTuple):
    """As `LenientSpec`, but not borrowed: it has no address."""

    margin: float
    stop: Stop


verify_turn.of(PlainSpec)(verify_leniently)


class PlainRule(LenientRule):
    def spec(self, session):
        return PlainSpec(self.margin, session.limits.stop)


@pytest.mark.skipif(not AVAILABLE, reason="needs numba")
def test_a_record_that_is_not_borrowed_runs_compiled_too():
    texts, passes, single = decoded(lambda: with_draft(PlainRule(0.5)), ahead=8)
    assert single == 0, "a turn was taken in Python"
    assert (texts, passes) == decoded(lambda: with_draft(LenientRule(0.5)), ahead=8)[:2]


def with_draft(rule):
    return bigrams(), Parts(chain(near()), rule, FixedShape(3, 1), LenientRule.law)


class Unregistered(tuple):
    stop = None


class Strange(LenientRule):
    def spec(self, session):
        return Unregistered()

    def verify(self, session, forest, scored):
        raise AssertionError


@pytest.mark.skipif(not AVAILABLE, reason="needs numba")
def test_a_spec_without_a_step_is_refused_by_a_sentence():
    case = (bigrams(), Parts(NoDraft(), Strange(1.0), FixedShape(0, 0), ""))
    with pytest.raises(UnknownKind, match=r"verify_turn has no step for .*Unregistered, only for .*@verify_turn.of"):
        decoded(lambda: case, 8)


class Narrow(NamedTuple):
    most: int


class WithoutWidth(Sawtooth):
    def plan(self, session):
        raise AssertionError

    def numbers(self, session):
        return Narrow(self.most)


@pytest.mark.skipif(not AVAILABLE, reason="needs numba")
def test_a_plan_without_a_width_is_refused_by_a_sentence():
    case = (bigrams(), Parts(NoDraft(), MatchRule(), WithoutWidth(3), EXACT))
    with pytest.raises(UnknownKind, match=r"Narrow has no field width; the record of a plan holds the draft nodes"):
        decoded(lambda: case, 8)


class InPythonAlone(AssertionError):
    pass


class ShyController(Sawtooth):
    def plan(self, session):
        raise InPythonAlone

    def numbers(self, session):
        return super().numbers(session)


class ShyRule(LenientRule):
    def verify(self, session, forest, scored):
        raise InPythonAlone

    def spec(self, session):
        return super().spec(session)


class ShyDrafter(BigramDrafter):
    def draft(self, sessions, shapes):
        raise InPythonAlone

    def spec(self, session):
        return super().spec(session)


@pytest.mark.skipif(not AVAILABLE, reason="needs numba")
def test_functions_of_parts_that_run_compiled_are_not_called():
    """So a `print` in them shows whether a method runs in Python."""
    shy = Parts(ShyDrafter(FOLLOWER), ShyRule(0.5), ShyController(3), LenientRule.law)
    assert decoded(lambda: (bigrams(), shy), ahead=8)[:2] == decoded(with_everything, ahead=8)[:2]
    with pytest.raises(BrokenPart, match="InPythonAlone"):
        decoded(lambda: (bigrams(), shy), ahead=0)


def test_a_target_of_ones_own_is_loaded_as_a_pair():
    near = BigramLM(LOGITS + RNG.normal(size=LOGITS.shape) / 2)
    own = sb.load(BigramLM(LOGITS), near)
    prompts = [[1, 7, 3], [4, 4]]
    drafted = sb.generate(own, prompts, sb.dsbd(3), seed=1, max_new_tokens=12)
    plain = sb.generate(own, prompts, sb.beam_sampling(3), seed=1, max_new_tokens=12)
    assert [[beam.tokens for beam in one.beams] for one in drafted] == [
        [beam.tokens for beam in one.beams] for one in plain
    ]
    assert sum(one.report.target_passes for one in drafted) < sum(one.report.target_passes for one in plain)
    assert "BigramLM" in repr(own)
    for given, message in (
        ({"draft": near, "quantize": "int8"}, r"quantize of load\(\) is for models of transformers"),
        ({"draft": "bundled"}, "the target is your own; give a model of your own, or none"),
    ):
        with refused(message):
            sb.load(BigramLM(LOGITS), **given)
    with refused("draft is .* of type BigramLM"):
        sb.load("bundled", near)
