"""Pair trunks as draft models: the rows of a tree of pairs are those of separate chains, turn after turn."""

from dataclasses import replace

import pytest

import specbeam as sb
from specbeam.heads.lm import TrunkLM
from specbeam.lm.huggingface import HuggingFaceLM
from tests.support.heads import KINDS, VOCAB, Comparing, chain_logits, trunk_of
from tests.support.tiny_models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": [11], "seed": 3}


@pytest.fixture(scope="module")
def model():
    return tiny("llama", seed=1, vocab_size=VOCAB)


def pair_of(model, head, engine="auto"):
    return replace(sb.load(model), target=HuggingFaceLM(model, chunk=3, engine=engine), draft=head)


class Checked(Comparing, TrunkLM):
    """A pair trunk whose rows are compared with those of chains."""

    def expected(self, tokens, features, is_scored):
        given = [features[place] if is_scored[place] else None for place in range(len(tokens) - 1)]
        return chain_logits(self.head, tokens, given)


METHODS = {
    "beams": sb.dsbd(3, 5, 3),
    "beams by rejection": sb.dsbd(3, 5, 3, coupling="rejection"),
    "chain": sb.speculative_sampling(3),
    "tree": sb.specinfer((2, 2)),
    "search": sb.speculative_beam_search(3, 5, depth=3),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "beams") for kind in KINDS), *(("eagle3, all norms", name) for name in METHODS)]
)
def test_rows_of_the_tree_are_those_of_chains(kind, name, model):
    """Also in later turns, so no row of a draft survives; with beams that end, and prompts of one token."""
    head = Checked(trunk_of(model, kind, layers=2), VOCAB).of(model)
    pair = pair_of(model, head, "plain")
    sb.generate(pair, PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def test_long_prompts_are_taken_in_pieces(model, monkeypatch):
    monkeypatch.setattr("specbeam.heads.cache.CHUNK", 2)
    head = Checked(trunk_of(model, "eagle3", layers=2), VOCAB).of(model)
    sb.generate(pair_of(model, head, "plain"), PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5
