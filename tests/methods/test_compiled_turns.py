"""Recipes whose turns are compiled runs: the same texts, passes and drafts as turn by turn, whatever the seed."""

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.decode import decode
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.runs import planned_run
from specbeam.core.session import Session
from specbeam.recipes.catalogue import RECIPES as RECIPES_OF_TWO_MODELS
from tests.support.steps import needs_numba
from tests.support.tiny_models import tiny

WARPS = {"sampled": Warp(), "top-k": Warp(truncation=Truncation(top_k=6)), "greedy": Warp(greedy=True)}
PROMPTS = [[1, 7, 3], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [2]]
PAIR = {}


def pair():
    """A target, and a draft model whose weights are near those of the target."""
    if not PAIR:
        near = tiny("llama", seed=1)
        for number, weight in enumerate(near.parameters()):
            noise = np.random.default_rng(number).normal(size=tuple(weight.shape))
            weight.data += 0.02 * weight.new_tensor(noise)
        PAIR[0] = sb.load(tiny("llama", seed=1), near)
    return PAIR[0]


RECIPES = {
    "prompt_lookup": lambda: sb.prompt_lookup(4),
    "suffix_match": lambda: sb.suffix_match(5),
    "token_recycling": lambda: sb.token_recycling(3, nodes=20),
    "rsd_s": lambda: sb.rsd_s(3, 3, controller="fixed"),
    "dyspec": lambda: sb.dyspec(8, 3, controller="fixed"),
    "opt_tree": lambda: sb.opt_tree(8, 4, 3, controller="fixed"),
}
RARE = {
    "prompt_lookup, first": lambda: sb.prompt_lookup(4, match="first"),
    "prompt_lookup, beams": lambda: sb.speculative_beam_search(3, depth=3, drafter="prompt_lookup"),
    "suffix_match, beams": lambda: sb.speculative_beam_search(3, depth=3, drafter="suffix_match"),
    "token_recycling, beams": lambda: sb.speculative_beam_search(3, 5, 3, drafter="token_recycling"),
    "rsd_s, traversal": lambda: sb.rsd_s(3, 3, "traversal", controller="fixed"),
    "rsd_s, matched": lambda: sb.rsd_s(3, 3, "match", controller="fixed"),
    "rsd_s, confidence": lambda: sb.rsd_s(3, 3, controller="confidence"),
    "dyspec, traversal": lambda: sb.dyspec(8, 3, rule="traversal", controller="fixed"),
    "dyspec, confidence": lambda: sb.dyspec(8, 3, rule="match", controller="confidence"),
    "opt_tree, traversal": lambda: sb.opt_tree(8, 4, 3, rule="traversal", controller="fixed"),
    "opt_tree, path": lambda: sb.opt_tree(8, 4, 3, rule="path", controller="confidence"),
    "opt_tree, within a layer": lambda: sb.opt_tree(8, 4, 3, within_layer=True, controller="fixed"),
}
CASES = [*RECIPES, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)]


def decoded(name, prompt, warp, key, ahead):
    """The texts, what was counted, and the turns that were taken in Python."""
    models = pair()
    method = {**RECIPES, **RARE}[name]()
    session = Session(prompt, method.parts(models.target, models.draft), warp, Limits(30, (9, 30), keep=4), key)
    singles = 0
    for turns in decode(models.target, [session], ahead=ahead):
        singles += len(turns)
    if session.failure:
        raise session.failure
    count = session.count
    texts = [(one.tokens, one.finished) for one in session.hypotheses()]
    return texts, (count.target_passes, count.draft_passes, count.drafted, count.accepted), singles


@needs_numba
@pytest.mark.parametrize("name", CASES)
def test_turns_are_compiled_runs_with_the_texts_of_single_turns(name):
    drafted = 0
    for warp in WARPS.values():
        if name.endswith("beams") and not warp.greedy:
            continue
        for key, prompt in enumerate(PROMPTS):
            texts, counts, singles = decoded(name, prompt, warp, key, ahead=5)
            assert singles == 0, "a turn was taken in Python"
            expected, of_singles, all_singles = decoded(name, prompt, warp, key, ahead=0)
            assert all_singles == of_singles[0]
            assert (texts, counts) == (expected, of_singles)
            drafted += counts[2]
    assert drafted > 0


@needs_numba
@pytest.mark.parametrize("name", CASES)
def test_single_turns_and_runs_take_over_from_each_other(name):
    models = pair()
    for key, prompt in enumerate(PROMPTS):
        expected, counts, _ = decoded(name, prompt, WARPS["greedy"], key, ahead=0)
        parts = {**RECIPES, **RARE}[name]().parts(models.target, models.draft)
        session = Session(prompt, parts, WARPS["greedy"], Limits(30, (9, 30), keep=4), key)
        with sb.core.decode.Decoder(models.target) as decoder:
            decoder.add(session)
            while decoder.busy:
                decoder.ahead = 2 - decoder.ahead
                decoder.step()
        assert [(one.tokens, one.finished) for one in session.hypotheses()] == expected
        assert session.count.target_passes == counts[0]


IN_PYTHON = {"multi_draft", "gsd", "propd", "mtad", "mjsd", "mmtad"}  # each page in docs/methods gives the reason
NEED_MORE = {"auto", "mtjd", "swift"}  # measurements of the others, a small vocabulary, a target of several layers


@needs_numba
def test_a_turn_is_a_run_of_length_one():
    """Every recipe for two models has specs whose steps are registered, so the loop in Python is for others alone."""
    models = pair()
    in_python = set()
    for make in RECIPES_OF_TWO_MODELS:
        if make.__name__ in NEED_MORE:
            continue
        parts = make().parts(models.target, models.draft)
        session = Session(PROMPTS[0], parts, Warp(), Limits(8, (9,), keep=1), 1)
        if planned_run(models.target, session, 1) is None:
            in_python.add(make.__name__)
    assert in_python == IN_PYTHON


@pytest.mark.parametrize(
    "make",
    [
        lambda: sb.opt_tree(6, 3, 3, controller="fixed"),
        pytest.param(lambda: sb.rsd_s(3, 3, "match", controller="fixed"), marks=pytest.mark.slow),
        pytest.param(lambda: sb.dyspec(6, 3, rule="match", controller="fixed"), marks=pytest.mark.slow),
    ],
)
def test_trees_grow_by_laws_that_python_makes(make):
    """Matched by noise, drafts do not change the text."""
    models = pair()
    drafted = 0
    for seed in range(3):
        options = {"seed": seed, "typical_p": 0.8, "max_new_tokens": 12}
        plain = sb.generate(models, [1, 7, 3], sb.sampling(), **options)[0]
        found = sb.generate(models, [1, 7, 3], make(), **options)[0]
        assert found.tokens == plain.tokens
        drafted += found.report.accepted
    assert drafted > 0
