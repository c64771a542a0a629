"""Pair trunks as draft models: the rows of a tree of pairs are those of separate chains, turn after turn; mask rows, too."""

from dataclasses import replace

import pytest
import torch

import specbeam as sb
from specbeam.models.heads.lm import MaskLM, TrunkLM
from specbeam.models.heads.trees import chain_of
from specbeam.models.huggingface import HuggingFaceLM
from tests.support.heads import KINDS, MASKED, VOCAB, Comparing, chain_logits, masked_logits, masked_of, trunk_of
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
    ("kind", "name", "engine"),
    [
        *((kind, "beams", "torch") for kind in KINDS),
        *((kind, "beams", "compiled") for kind in KINDS if kind not in ("fspad", "eagle3, windows")),
        *(
            ("eagle3, all norms", name, engine)
            for name in METHODS
            if name != "beams"
            for engine in ("torch", "compiled")
        ),
    ],
)
def test_rows_of_the_tree_are_those_of_chains(kind, name, engine, model):
    """Also in later turns, so no row of a draft survives; with beams that end, and prompts of one token."""
    head = Checked(trunk_of(model, kind, layers=2), VOCAB, engine).of(model)
    pair = pair_of(model, head, "plain")
    sb.generate(pair, PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def test_long_prompts_are_taken_in_pieces(model, monkeypatch):
    monkeypatch.setattr("specbeam.models.heads.cache.CHUNK", 2)
    head = Checked(trunk_of(model, "eagle3", layers=2), VOCAB, "torch").of(model)
    sb.generate(pair_of(model, head, "plain"), PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


class CheckedMasks(Comparing, MaskLM):
    """A pair trunk with mask rows, whose rows are compared with those of chains."""

    def expected(self, tokens, features, is_scored):
        return masked_logits(self.head, tokens, features, is_scored.index(False))


MASK_METHODS = {
    "beams by rejection": sb.dsbd(3, 5, 3, coupling="rejection"),
    "deeper than a block": sb.dsbd(2, 3, 5),
    "tree": sb.specinfer((2, 2), controller="fixed"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "beams") for kind in MASKED), *(("windows", name) for name in MASK_METHODS)]
)
def test_mask_rows_of_the_tree_are_those_of_chains(kind, name, model):
    """Over several turns: a node has the law of its depth below the nearest scored node, and of its root."""
    head = CheckedMasks(masked_of(model, kind), VOCAB).of(model)
    method = (METHODS | MASK_METHODS)[name]
    sb.generate(pair_of(model, head, "plain"), PROMPTS, method, batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def test_mask_rows_after_long_prompts(model, monkeypatch):
    """Prompts are taken in pieces, and only the last piece shares its pass with the blocks."""
    monkeypatch.setattr("specbeam.models.heads.cache.CHUNK", 2)
    head = CheckedMasks(masked_of(model, "windows"), VOCAB).of(model)
    sb.generate(pair_of(model, head, "plain"), PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def test_mask_rows_take_one_pass_a_turn(model):
    """A chain of three drafts below one root: the rows of accepted nodes, of the root, and of its masks together."""
    head = MaskLM(masked_of(model), VOCAB)
    (found,) = sb.generate(
        pair_of(model, head, "plain"),
        [[5, 6, 7]],
        sb.speculative_sampling(3, controller="fixed"),
        max_new_tokens=12,
        seed=1,
        eos_token_id=[],
    )
    assert found.report.target_passes > 2
    assert head.passes == found.report.target_passes - 1  # nothing is drafted in the first turn


def test_nodes_that_are_equally_far_below_a_root_have_one_law(model):
    """Whatever their tokens are: a product law. Rows of another root differ."""
    head = masked_of(model)
    trees = probed_trees(model, [3, 4, 5, 6, 7, 8])
    other = trees._replace(tokens=trees.tokens.clone())
    other.tokens[0, 4:] = 9
    everywhere = torch.ones_like(trees.tokens, dtype=torch.bool)
    with torch.inference_mode():
        first, second, third = head.drafts(trees, 3, everywhere)
        _, changed, deeper = head.drafts(other, 3, everywhere)
    at = second.nodes.tolist().index(4)  # below the root 3
    torch.testing.assert_close(changed.logits[at], second.logits[at])
    at = third.nodes.tolist().index(5)
    torch.testing.assert_close(deeper.logits[at], third.logits[at])
    assert not torch.allclose(first.logits[-1], second.logits[-1])


def probed_trees(model, tokens):
    """A text with the target's hidden states at all its taps."""
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return chain_of(torch.tensor(tokens), {0: states[0][0], 1: states[1][0], 2: states[2][0]})
