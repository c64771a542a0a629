"""`decode` for one sequence as one loop: plan, draft a tree, score it, walk down, settle without Python between turns."""

from typing import NamedTuple

import numpy as np

from specbeam.ahead.books import (
    ACCEPTED,
    DRAFT_PASSES,
    PASSES,
    SCORE,
    SCORED,
    SETTLE,
    SPAN,
    SPANNED,
    TURNS,
    VERIFY,
    Books,
    Live,
    drafted_so,
    opened,
    runs_layers,
)
from specbeam.draft.tree_fast import Draws, Grown, Room, drafted
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.cycles import cycles
from specbeam.kernels.noise import path_keys
from specbeam.kernels.planning import Plan, learnt, planned
from specbeam.kernels.stopping import is_end
from specbeam.lm.compiled.one_lane import OneLane, extended, has_room, rewound, settled
from specbeam.verify.path_fast import Drawn, Laws, walked


class TreeCourse(NamedTuple):
    """How the turns of a session go."""

    plan: Plan
    draws: Draws  # of the deepest tree; uniforms for the whole run
    room: Room  # of such a tree
    laws: Laws
    most: int  # tokens of the session


class TreesRan(NamedTuple):
    """What came of a run."""

    live: Live  # the sequence; none if it ended
    tokens: Array
    score: float
    used: int  # uniforms
    books: Books
    told: bool  # False: the next turn is not for this loop


@compiled
def _guessed(
    draft: OneLane, course: TreeCourse, token: int, depth: int, uniforms: Array, books: Books
) -> tuple[Grown, int, int, bool]:
    """A tree, its layers, how many uniforms it took, and whether the loop could decide all of it."""
    began, waiting, by = cycles(), runs_layers(draft, 0), course.draws
    way = Draws(by.counts[:depth], by.distinct, by.greedy, by.cut, by.eos, uniforms)
    grown, passes, used, share = drafted(draft, np.full(1, token), 0, way, course.room)
    drafted_so(books, began, passes, share, waiting)
    return grown, passes, used, len(grown.undecided) == 0


@compiled
def _candidates(grown: Grown, by: Draws) -> Drawn:
    """The groups of a tree as a walk tries them."""
    group_of = np.full(grown.tree.shape[1], -1, dtype=np.int64)
    for group in range(len(grown.parents)):
        group_of[grown.parents[group]] = group
    size = grown.law_ends[-1] if len(grown.law_ends) > 0 and not by.greedy else 0
    return Drawn(
        group_of, grown.draw_ends, grown.draws[0], grown.draws[1], by.distinct, grown.law_ends, grown.law_tokens[:size],
        np.exp(grown.law_logp[:size]),
    )  # fmt: skip


@compiled
def _settled(one: OneLane, grown: Grown, steps: Array, alive: bool) -> None:
    """Keep the path of the walk, or nothing."""
    tree, last = (grown.tree[0], grown.tree[1]), steps.shape[1] - 1
    parent = steps[0, last - 1] if last > 0 else 0
    node, token, above = np.full(1, steps[0, last]), np.full(1, steps[1, last]), np.full(1, parent)
    size = 1 if alive else 0
    settled(one, tree, node[:size], token[:size], above[:size])


@compiled
def tree_turns(target: OneLane, draft: OneLane, course: TreeCourse, live: Live, length: int, passes: int) -> TreesRan:
    """Run until the session is over, or for a while, or until something is not for this loop.

    Args:
        length: tokens so far.
        passes: turns so far.
    """
    tokens, used, uniforms = np.empty(SPAN, dtype=np.int64), 0, course.draws.uniforms
    books, told, over, alive, by = opened(), True, False, True, course.laws
    numbers, time, token, score, key = books.numbers, books.time, live.tokens[0], live.scores[0], live.keys[0]
    while told and not over and numbers[PASSES] < TURNS:
        span, left = numbers[SPANNED], course.most - length - numbers[SPANNED]
        depth, _ = planned(course.plan, 1, passes + numbers[PASSES], left)
        fresh, before = course.room.draws, numbers.copy()
        if depth < 0 or span + depth + 1 > SPAN or not (has_room(target, fresh, 1) and has_room(draft, fresh, 1)):
            break
        grown, layers, given, told = _guessed(draft, course, token, depth, uniforms[used:], books)
        steps, logp, taken = np.empty((3, 0), dtype=np.int64), np.empty(0), 0
        if told:
            began = cycles()
            numbers[SCORED] += runs_layers(target, grown.tree.shape[1])
            logits = extended(target, grown.tree[0], grown.tree[1], 0)
            numbers[PASSES] += 1
            scored = cycles()
            drawn = _candidates(grown, course.draws)
            steps, logp, taken, told = walked(
                logits, by, drawn, min(left, grown.tree.shape[1]), uniforms[used + given :]
            )
            time[SCORE] += scored - began
            time[VERIFY] += cycles() - scored
        if not told:
            numbers[PASSES], numbers[DRAFT_PASSES] = before[PASSES], before[DRAFT_PASSES]
            rewound(target, 1)
            rewound(draft, 1)
            break
        began, count = cycles(), steps.shape[1]
        used += given + taken
        learnt(course.plan, steps[2, : min(count, layers)].astype(np.float64))
        tokens[span : span + count] = steps[1]
        for place in range(count):
            score += logp[place]
        numbers[ACCEPTED] += steps[2].sum()
        numbers[SPANNED] += count
        token, key = steps[1, count - 1], path_keys(key, steps[1])[count]
        alive = not is_end(token, by.eos)
        _settled(target, grown, steps, alive)
        _settled(draft, grown, steps, alive)
        over = not alive or numbers[SPANNED] + length >= course.most
        time[SETTLE] += cycles() - began
    size = 1 if alive else 0
    found = Live(np.full(size, token), np.full(size, score), np.ones(size, dtype=np.int64), np.full(size, key))
    return TreesRan(found, tokens[: numbers[SPANNED]], score, used, books, told)
