"""Trees that a target drew, batches of them, and what a model makes of them."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.generation import turns_of
from specbeam.lab.train.batches import batches_of, tree_batch
from specbeam.lab.train.draft import tree_logits
from specbeam.lab.train.drawing import DrawPlan, add_turns, drawn_trees
from specbeam.lab.train.losses import draft_loss, overlap
from specbeam.lab.train.trees import TreeBeingDrawn, Trees, trees_of
from specbeam.models.heads.trees import lineage
from tests.support.tiny_models import tiny

PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5]]


@pytest.fixture(scope="module")
def pair():
    return sb.load(tiny("llama"))


@pytest.fixture(scope="module")
def trees(pair):
    return drawn_trees(pair, PROMPTS, DrawPlan(beams=3, max_new_tokens=6, seed=1))


def paths_of(trees, tree):
    """The tokens from the first one to each node of a tree."""
    here = slice(trees.starts[tree], trees.starts[tree + 1])
    paths = []
    for token, parent in zip(trees.tokens[here].tolist(), trees.parents[here].tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def test_a_tree_holds_what_the_beams_drew(pair, trees):
    """Nodes with children are the live beams that the turns went on from; weights are the numbers of their children."""
    for number, prompt in enumerate(PROMPTS):
        children = {}
        above = [prompt]
        for turn in turns_of(pair, prompt, sb.beam_sampling(3), max_new_tokens=6, temperature=1.0, seed=1):
            (layer,) = turn.verdict.steps
            for parent in layer.parents.tolist():
                children[tuple(above[parent])] = children.get(tuple(above[parent]), 0) + 1
            live = zip(layer.parents[~layer.ended].tolist(), layer.live.tokens.tolist(), strict=True)
            above = [[*above[parent], token] for parent, token in live]
        here = slice(trees.starts[number], trees.starts[number + 1])
        weights = trees.weights[here].tolist()
        found = {tuple(path): weight for path, weight in zip(paths_of(trees, number), weights, strict=True) if weight}
        assert found == children


def test_laws_are_those_of_the_target_on_each_path(pair, trees):
    model = pair.target_model
    for number in range(trees.size):
        first = trees.starts[number]
        for node, path in enumerate(paths_of(trees, number)):
            row = trees.law_of[first + node]
            assert (row >= 0) == (trees.weights[first + node] > 0)
            if row >= 0:
                with torch.no_grad():
                    logp = model(torch.tensor([path])).logits[0, -1].log_softmax(-1)
                np.testing.assert_allclose(trees.logp[row], logp[trees.ids[row].astype(np.int64)], atol=1e-4)
                assert (np.diff(trees.logp[row]) <= 0).all()


def test_a_file_of_trees_is_read_as_it_was_written(trees, tmp_path):
    trees.save(tmp_path / "trees.npz")
    again = Trees.read(tmp_path / "trees.npz")
    for one, other in zip(trees, again, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert [path.name for path in tmp_path.iterdir()] == ["trees.npz"]


def test_nodes_see_themselves_and_their_ancestors():
    depth, sees = lineage(np.array([[-1, 0, 1, 1, 3, -1]]))
    assert depth.tolist() == [[0, 1, 2, 2, 3, 0]]
    assert [np.flatnonzero(row).tolist() for row in sees[0]] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [5]]


def test_a_batch_gives_the_logits_of_plain_forwards(pair, trees):
    """Rows are padded to one length, and all nodes of a tree share a row: no node sees what is not above it."""
    batch = tree_batch(trees, np.arange(trees.size))
    model = pair.target_model
    with torch.no_grad():
        found = tree_logits(model, batch)
    row = 0
    for number in range(trees.size):
        first = trees.starts[number]
        for node, path in enumerate(paths_of(trees, number)):
            if trees.law_of[first + node] >= 0:
                with torch.no_grad():
                    expected = model(torch.tensor([path])).logits[0, -1]
                torch.testing.assert_close(found[row], expected, atol=1e-4, rtol=1e-4)
                row += 1
    assert row == len(found)


@pytest.mark.parametrize("most_tokens", [1, 20, 1000])
def test_an_epoch_has_each_tree_once(trees, most_tokens):
    batches = list(batches_of(trees, most_tokens, np.random.default_rng(0)))
    assert sum(len(batch.tokens) for batch in batches) == trees.size
    assert sum(len(batch.weights) for batch in batches) == len(trees.logp)
    assert all(batch.tokens.numel() <= most_tokens or len(batch.tokens) == 1 for batch in batches)


def test_a_tree_without_an_answer_is_its_prompt():
    tree = TreeBeingDrawn([1, 2])
    flat = trees_of([tree])
    assert flat.tokens.tolist() == [1, 2]
    assert flat.weights.tolist() == [0, 0]
    add_turns([])


def test_the_overlap_is_the_odds_of_acceptance():
    """Of a law that is known whole it is 1 - total variation; of one that is known in part it is at least that."""
    torch.manual_seed(0)
    logits, target = torch.randn(5, 9), torch.randn(5, 9).log_softmax(-1)
    p, q = target.exp(), logits.softmax(-1)
    accepted, surprise = overlap(logits, torch.arange(9).expand(5, 9), target)
    torch.testing.assert_close(accepted, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(surprise, -(p * q.log()).sum(-1), atol=1e-5, rtol=1e-5)
    best, ids = target.topk(4)
    bound, less = overlap(logits, ids, best)
    rest = 1 - best.exp().sum(-1)
    assert (bound >= accepted - 1e-6).all()
    assert (bound <= accepted + rest + 1e-6).all()
    assert (less <= surprise + 1e-5).all()


def test_the_loss_is_least_where_the_laws_are_equal():
    target = torch.randn(3, 7).log_softmax(-1)
    ids = torch.arange(7).expand(3, 7)
    weights = torch.tensor([1.0, 2.0, 3.0])
    for variation in (0.0, 0.5, 1.0):
        best = draft_loss(*overlap(target, ids, target), weights, variation)
        other = draft_loss(*overlap(target + torch.randn(3, 7), ids, target), weights, variation)
        assert best < other
    torch.testing.assert_close(draft_loss(*overlap(target, ids, target), weights, 1.0), torch.tensor(0.0))
