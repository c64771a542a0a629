"""What a language model needs of a session, and turns that move it on at random."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from specbeam.core.beams import Beams, Layers
from specbeam.core.forest import Forest, next_start, nodes_below, rows_of_nodes, turn_rows
from specbeam.core.ranked import whole_rows
from specbeam.core.records import Scored, Shape, Turn, Verdict


def seat(prompt, keeps=False, context=None, model=None):
    """What a model needs of a session; if it `keeps` nodes, forests start with nodes of earlier turns.

    Args:
        context: see `Session.context`.
        model: what its rows are those of, if that is not the model of all seats.
    """
    context = {} if context is None else context
    return SimpleNamespace(
        prompt=list(prompt), state={}, texts=[list(prompt)], keeps=keeps, start=None, context=context, model=model
    )


def plain_logits(model, paths):
    """Return the logits behind each path, as the model gives them by itself: float32[paths, vocab]."""
    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([path], device=model.device)).logits[0, -1] for path in paths]
    return torch.stack(rows).float().cpu()


def node_paths(texts, forest):
    """Return the tokens from the beginning of the text to each node of a forest."""
    roots = forest.root_of(np.arange(forest.size))
    return [texts[root] + forest.path(node) for node, root in enumerate(roots)]


def check_rows_and_settle(lm, model, rng, seats, nodes, tolerance):
    """Let a model score random forests of some sessions, compare each row with that of its path alone, and settle.

    Args:
        nodes: of each forest.
    """
    forests = [
        random_forest(rng, [text[-1] for text in one.texts], lm.vocab, count, one.start)
        for one, count in zip(seats, nodes, strict=True)
    ]
    asking = [forest.size > len(forest.known.nodes) for forest in forests]
    scored = iter(
        lm.extend(
            [one for one, asks in zip(seats, asking, strict=True) if asks],
            [forest for forest, asks in zip(forests, asking, strict=True) if asks],
        )
    )
    for one, forest, asks in zip(seats, forests, asking, strict=True):
        fresh = next(scored).logits.float().cpu().numpy() if asks else forest.known.rows.logits[:0]
        rows = turn_rows(whole_rows(fresh), forest.size, forest.known)
        found = torch.from_numpy(rows_of_nodes(rows, np.arange(forest.size)).logits)
        expected = plain_logits(one.model or model, node_paths(one.texts, forest))
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        turn = random_turn(rng, forest, lm.vocab)
        if one.keeps:
            turn = keeping(rng, turn)
        lm.settle(one, turn)
        one.texts = moved(one.texts, forest, turn)
        if one.keeps:
            last = turn.verdict.beams
            one.start = next_start(forest.tokens, forest.parents, rows, last.nodes, last.tokens, turn.verdict.kept)


def keeping(rng, turn):
    """The same turn, after which some nodes below the survivors are kept."""
    parents = turn.forest.parents
    kept = []
    for node in nodes_below(parents, turn.verdict.beams.nodes).tolist():
        is_first = parents[node] in turn.verdict.beams.nodes
        if (is_first or parents[node] in kept) and rng.random() < 0.8:
            kept.append(node)
    return replace(turn, verdict=replace(turn.verdict, kept=np.array(kept, dtype=np.int64)))


def random_forest(rng, roots, vocab, nodes, start=None):
    """A forest with that many more nodes, grown at random places but layer by layer.

    Args:
        start: what it starts with; None: the roots.
    """
    forest = Forest.rooted(roots)
    if start is not None:
        forest = Forest(start.tokens, start.parents, known=start.known)
    front = np.arange(forest.size)
    while nodes > 0:
        count = int(rng.integers(1, nodes + 1))
        pairs = rng.choice(len(front) * vocab, size=min(count, len(front) * vocab), replace=False)
        parents, tokens = front[pairs // vocab], pairs % vocab
        is_new = forest.find(parents, tokens) < 0
        parents = parents[is_new]
        tokens = tokens[is_new]
        start = forest.size
        forest = forest.grown(tokens, parents)
        front = np.arange(start, forest.size)
        nodes -= len(pairs)
    return forest


def random_turn(rng, forest, vocab, most=3):
    """A turn whose survivors are some nodes of one layer, or new tokens under some nodes, or both."""
    depths = forest.depths()
    depth = int(rng.integers(0, depths.max() + 1))
    parents = rng.choice(np.flatnonzero(depths == depth), size=most)
    tokens = rng.integers(0, vocab, size=most)
    for beam in range(most):  # prefer drafted tokens, as real verdicts do
        children = np.flatnonzero(forest.parents == parents[beam])
        if len(children) and rng.random() < 0.6:
            tokens[beam] = forest.tokens[rng.choice(children)]
    pairs = np.unique(parents * vocab + tokens)
    parents, tokens = pairs // vocab, pairs % vocab
    count = len(pairs)
    beams = Beams(
        nodes=forest.find(parents, tokens),
        tokens=tokens,
        scores=np.zeros(count),
        counts=np.ones(count, dtype=np.int64),
        keys=np.arange(count, dtype=np.uint64),
    )
    one_layer = Layers(
        parents=parents,
        beams=beams,
        ended=np.zeros(count, dtype=bool),
        draw_ends=np.array([count]),
        widths=np.array([count]),
        passed=np.array([False]),
        sources=np.zeros((1, 3), dtype=np.int64),
        edges=np.full(1, np.nan),
    )
    return Turn(Shape(depth, most), forest, Scored(), Verdict(one_layer))


def moved(texts, forest, turn):
    """The texts of the surviving beams."""
    roots = forest.root_of(turn.verdict.parents)
    return [
        texts[root] + forest.path(parent) + [int(token)]
        for root, parent, token in zip(roots, turn.verdict.parents, turn.verdict.beams.tokens, strict=True)
    ]
