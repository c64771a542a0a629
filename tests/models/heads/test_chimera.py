"""Chimera heads: codes of three tokens, one layer over features and codes, read-outs by depth; rows in trees are those of chains."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.lab.train.chimera import new_chimera
from specbeam.lab.train.plan import planned
from specbeam.models.heads.lm import ChimeraLM
from specbeam.models.heads.trees import ScoredTrees, chain_of, lineage
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.recipes.tuning.costs import curve_of
from tests.support.heads import VOCAB, Comparing, chimera_logits, chimera_of
from tests.support.tiny_models import tiny

PROMPTS = [[5, 6, 7, 8, 9, 3], [9], [3, 4]]
OPTIONS = {"max_new_tokens": 10, "eos_token_id": [11], "seed": 3}
METHODS = {
    "beams": sb.dsbd(3, 5, 3),
    "deeper than its read-outs": sb.dsbd(2, 3, 5),
    "beams by rejection": sb.dsbd(3, 5, 3, coupling="rejection"),
    "chain": sb.speculative_sampling(3),
    "tree": sb.specinfer((2, 2), controller="fixed"),
    "search": sb.speculative_beam_search(3, 5, depth=3),
}


@pytest.fixture(scope="module")
def model():
    return tiny("llama", seed=1, vocab_size=VOCAB)


def pair_of(model, head):
    return replace(sb.load(model), target=HuggingFaceLM(model, chunk=3, engine="plain"), draft=head)


class Checked(Comparing, ChimeraLM):
    """A Chimera head whose rows are compared with those of two halves of one sequence."""

    def expected(self, tokens, features, is_scored):
        return chimera_logits(
            self.head, tokens, [features[at] if is_scored[at] else None for at in range(len(tokens) - 1)]
        )


@pytest.mark.parametrize(("name", "read_out"), [*((name, "shared") for name in METHODS), ("beams", "own")])
def test_rows_of_the_tree_are_those_of_chains(name, read_out, model):
    """Over several turns, so no row of a draft survives; with beams that end, and prompts of one token."""
    head = Checked(chimera_of(model, read_out), VOCAB).of(model)
    sb.generate(pair_of(model, head), PROMPTS, METHODS[name], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def test_long_prompts_are_taken_in_pieces(model, monkeypatch):
    monkeypatch.setattr("specbeam.models.heads.cache.CHUNK", 2)
    head = Checked(chimera_of(model), VOCAB).of(model)
    sb.generate(pair_of(model, head), PROMPTS, METHODS["beams"], batch_size=3, **OPTIONS)
    assert head.compared > 20
    assert head.largest < 2e-5


def test_the_code_of_a_row_depends_on_its_last_three_tokens_alone(model):
    """CH-1, by the gradients of the code with respect to the embeddings of the text."""
    head = chimera_of(model)
    embedded = torch.randn(7, model.config.hidden_size, requires_grad=True)
    places = torch.stack([torch.arange(7).sub(back).clamp_min(0) for back in (2, 1, 0)], -1)
    codes = head.trigrams(embedded[places])
    for place in range(7):
        (slope,) = torch.autograd.grad(codes[place].sum(), embedded, retain_graph=True)
        reached = slope.abs().sum(-1).nonzero()[:, 0].tolist()
        assert reached == list(range(max(place - 2, 0), place + 1))


def test_a_head_learns_in_trees_what_it_would_draft_in_chains(model):
    """Each node of a tree as a draft one, two and three deep, against the two halves of one sequence."""
    head = chimera_of(model)
    parents = np.array([[-1, 0, 1, 1, 2, 3, 3, 4]])
    depths, sees = lineage(parents)
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
    states = torch.randn(1, 8, model.config.hidden_size)
    trees = ScoredTrees(tokens, *map(torch.from_numpy, (parents, depths, sees)), {-1: states})
    with torch.no_grad():
        drafts = head.drafts(trees, 3, torch.ones_like(tokens, dtype=torch.bool))
    compared = 0
    for deep, rows in enumerate(drafts, 1):
        for node, found in zip(rows.nodes.tolist(), rows.logits, strict=True):
            path = [node]
            while parents[0, path[0]] >= 0:
                path.insert(0, int(parents[0, path[0]]))
            given = [*states[0, path[: len(path) - deep]], *[None] * (deep - 1)]
            expected = chimera_logits(head, tokens[0, path].tolist(), given)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
            compared += 1
    assert compared == 7 + 6 + 4


def test_a_draft_reads_the_state_of_the_draft_above_as_its_feature(model):
    """CH-2: what stands for the missing feature in the second step is the state of the first."""
    head = chimera_of(model)
    tokens = torch.tensor([3, 4, 5, 6, 7])
    states = torch.randn(5, model.config.hidden_size)
    given = []

    def note(module, args):
        given.append(args[1].detach().clone())

    handle = head.layer.register_forward_pre_hook(note)
    with torch.no_grad():
        drafts = head.drafts(chain_of(tokens, {-1: states}), 3, torch.ones(1, 5, dtype=torch.bool))
    handle.remove()
    assert len(given) == 3
    torch.testing.assert_close(given[0][0, 1:], states[:-1])
    for step in (1, 2):
        own = drafts[step - 1]
        for node, estimate in zip(own.nodes.tolist()[:-1], own.estimates, strict=False):
            torch.testing.assert_close(given[step][0, node + 1], estimate)


@pytest.mark.parametrize("read_out", ["shared", "own"])
def test_read_outs_begin_as_twice_the_targets_matrix(read_out, model):
    """CH-3: of a state that is the feature, at any depth."""
    head = new_chimera(model, planned(model, {"depth": 3}, {"read_out": read_out}), None)
    features = torch.randn(4, model.config.hidden_size)
    with torch.no_grad():
        for far in (1, 2, 3, 9):
            torch.testing.assert_close(
                head.logits(far, features, features), 2 * model.lm_head(features), atol=1e-5, rtol=1e-5
            )


def test_each_depth_has_a_read_out_of_its_own(model):
    head = chimera_of(model)
    one, other = torch.randn(2, 4, model.config.hidden_size)
    with torch.no_grad():
        found = [head.logits(far, one, other) for far in (1, 2, 3, 4)]
    assert not torch.allclose(found[0], found[1])
    assert not torch.allclose(found[1], found[2])
    assert torch.equal(found[2], found[3])


@pytest.mark.parametrize("draft_vocab", [None, 20])
def test_beams_are_those_without_a_draft(draft_vocab, model):
    """CH-4: the same beams with the same seed, one prompt at a time and sixteen; texts at temperature 0 are greedy."""
    head = chimera_of(model, draft_vocab=draft_vocab)
    if draft_vocab:
        head.tokens = torch.arange(draft_vocab) * 3
    pair = pair_of(model, ChimeraLM(head, VOCAB))
    prompts = [[number, number + 5, 7][: 1 + number % 3] for number in range(1, 17)]
    options = {**OPTIONS, "max_new_tokens": 5}
    plain = sb.generate(pair, prompts, sb.beam_sampling(2), **options)
    for batch_size in (1, 16):
        found = sb.generate(pair, prompts, sb.dsbd(2, 3, 2), batch_size=batch_size, **options)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
    greedy = sb.generate(pair, prompts[:3], sb.greedy(), max_new_tokens=5, eos_token_id=[11])
    for method in (sb.chimera(8, 3, 3, controller="fixed"), sb.speculative_sampling(3)):
        found = sb.generate(pair, prompts[:3], method, temperature=0.0, batch_size=3, **options)
        assert [one.tokens for one in found] == [one.tokens for one in greedy]
        assert sum(one.report.draft_passes for one in found) > 0


def test_passes_are_timed(model):
    assert 0 < curve_of(ChimeraLM(chimera_of(model), VOCAB)).seconds[0] < 1
