"""At temperature 0 every recipe for one sequence returns the text of transformers' greedy search on the bundled pair."""

import itertools

import pytest
import torch

import specbeam as sb
from specbeam.models.pair import BUNDLED
from specbeam.recipes.catalogue import RECIPES

pytestmark = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")

JOINT = ("mtjd", "mtad", "mjsd", "mmtad")  # which look for likely texts, not for likely tokens
METHODS = {
    make.__name__: make
    for make in RECIPES
    if make.__name__ not in ("beam_search", "speculative_beam_search", "beam_sampling", "dsbd", *JOINT)
} | {
    "dsbd, one beam": lambda: sb.dsbd(1, 3, 3, "fixed"),
    "a chain that stops": lambda: sb.speculative_sampling(6, controller="survival"),
    "a tree that stops": lambda: sb.rsd_c((2, 2, 1), "traversal", controller="confidence"),
    "a chain by cost": lambda: sb.speculative_sampling(6, controller="cost"),
}
NEW = 40


def prompts(count):
    """Sentences, parts of sentences, and pairs of sentences."""
    rows = (BUNDLED / "sentences.tsv").read_text(encoding="utf-8").splitlines()
    whole = [row.split("\t")[0] for row in rows]
    halves = [" ".join(one.split()[: len(one.split()) // 2]) for one in whole]
    cut = [one[:-1] for one in whole]
    pairs = [f"{one} {other}" for one, other in itertools.pairwise(whole)]
    found = [prompt for group in zip(pairs, halves, cut, whole, strict=False) for prompt in group]
    assert len(set(found)) >= 200
    return list(dict.fromkeys(found))[:count]


@pytest.fixture(scope="module")
def pair():
    return sb.load("bundled", dtype="float32")


@pytest.fixture(scope="module")
def expected(pair):
    """What transformers' greedy search says after a prompt."""
    known = {}

    def of(prompt):
        if prompt not in known:
            ids = torch.tensor([pair.tokenizer(prompt)["input_ids"]])
            mask = torch.ones_like(ids)
            out = pair.target_model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
            known[prompt] = out[0, ids.shape[1] :].tolist()
        return known[prompt]

    return of


def check(pair, expected, name, count, batch_size):
    asked = prompts(count)
    found = sb.generate(
        pair,
        asked,
        METHODS[name](),
        temperature=0,
        max_new_tokens=NEW,
        batch_size=batch_size,
    )
    different = [prompt for prompt, one in zip(asked, found, strict=True) if one.tokens != expected(prompt)]
    assert not different


@pytest.mark.parametrize("name", [name for name in METHODS if name != "auto"])
def test_some_greedy_texts_are_those_of_transformers(pair, expected, name):
    check(pair, expected, name, 6, 3)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("name", METHODS)
def test_two_hundred_greedy_texts_are_those_of_transformers(pair, expected, name, batch_size):
    check(pair, expected, name, 200, batch_size)
