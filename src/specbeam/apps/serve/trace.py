"""Turns as JSON for the web page: the forest, the fate of each node, and the live beams."""

from typing import Any

import numpy as np

from specbeam.core import Session, Turn
from specbeam.doors import Leaf, Words, picture


def turn_record(session: Session, turn: Turn, words: Words, number: int, milliseconds: float) -> dict[str, Any]:
    """Return a turn as JSON: nodes as [parent, text, fate, p, q], parents first.

    Args:
        session: the session after the turn.
        words: returns the text of a token.
        number: number of the turn, from 1.
        milliseconds: duration of the turn.
    """

    def text_of(tokens: list[int]) -> str:
        return "".join(map(words, tokens))

    leaves = picture(turn, words) if turn.verdict.trials else fates(turn, words)
    limits = session.limits
    length = session.length
    beams: list[tuple[list[int], float]] = [
        (tail.tolist(), limits.normalised(float(score), length))
        for tail, score in zip(session.tails, session.beams.scores, strict=True)
    ]
    ended: list[tuple[list[int], float, bool]] = [
        (one.tokens, limits.normalised(one.loglik, len(one.tokens)), one.finished) for one in session.ended[-16:]
    ]
    return {
        "n": number,
        "ms": round(milliseconds, 3),
        "depth": turn.shape.depth,
        "width": turn.shape.width,
        "nodes": [[leaf.parent, leaf.text, leaf.fate, leaf.p, leaf.q] for leaf in leaves],
        "widths": [int(step.width) for step in turn.verdict.steps],
        "accepted": turn.verdict.accepted,
        "beams": [[text_of(tail), score] for tail, score in beams],
        "ended": [[text_of(tokens), score, finished] for tokens, score, finished in ended],
        "settled": text_of(session.settled),
    }


def fates(turn: Turn, words: Words) -> list[Leaf]:
    """Return the nodes of a turn's forest with their fates, for methods that record no trials.

    Nodes that became beams are accepted, other children of live parents are rejected, and deeper nodes are unused. Tokens
    that the target chose without a draft are resampled.
    """
    forest = turn.forest
    parents = np.asarray(forest.parents)
    fate = ["root" if parent < 0 else "unused" for parent in parents.tolist()]
    fresh: list[Leaf] = []
    for step in turn.verdict.steps:
        reached = set(step.parents.tolist())
        for node, parent in enumerate(parents.tolist()):
            if parent in reached and fate[node] == "unused":
                fate[node] = "rejected"
        for parent, node, token in zip(step.parents, step.beams.nodes, step.beams.tokens, strict=True):
            if node >= 0:
                fate[int(node)] = "accepted"
            else:
                fresh.append(Leaf(int(parent), words(int(token)), "resampled"))
    nodes = [
        Leaf(int(parent), words(int(token)), what)
        for parent, token, what in zip(parents, forest.tokens, fate, strict=True)
    ]
    return nodes + fresh
