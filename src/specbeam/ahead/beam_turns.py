"""`decode` for the beams of one session as one loop: plan, draft, score, verify, settle without Python between turns."""

from typing import NamedTuple

import numpy as np

from specbeam.ahead.books import (
    ACCEPTED,
    DRAFT_PASSES,
    GONE,
    PASSES,
    SCORE,
    SCORED,
    SETTLE,
    SPAN,
    SPANNED,
    STEPS,
    TURNS,
    VERIFY,
    Books,
    Live,
    drafted_so,
    opened,
    runs_layers,
)
from specbeam.ahead.texts import Texts, begun, moved_on, put_aside
from specbeam.draft.model_fast import Front, Layers, drafted
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.cycles import cycles
from specbeam.kernels.planning import Plan, learnt, planned
from specbeam.kernels.stopping import Stop, enough
from specbeam.kernels.truncation import Way
from specbeam.kernels.widths import Widths, from_to
from specbeam.lm.compiled.one_lane import OneLane, extended, has_room, rewound, settled
from specbeam.verify.beam_fast import Finished, Judged, judged


class BeamCourse(NamedTuple):
    """How the turns of a session go."""

    plan: Plan
    drafts: Way
    choice: Way
    widths: Widths
    stop: Stop
    drafting: bool  # False: there is no draft model, and another lane stands in its place


class BeamsRan(NamedTuple):
    """What came of a run."""

    live: Live
    texts: Texts
    widths: Array  # draws of each step
    books: Books
    told: bool  # False: the next turn is not for this loop


@compiled
def _guessed(
    draft: OneLane, course: BeamCourse, live: Live, shape: tuple[int, int], books: Books
) -> tuple[Layers, bool]:
    """A draft, and whether the loop could decide all of it."""
    began, waiting, size = cycles(), runs_layers(draft, 0), len(live.tokens)
    every = np.ones(size, dtype=np.bool_)
    front = Front(np.arange(size), live.tokens, live.scores, live.counts, live.keys, every)
    by = course.drafts
    way = Way(by.noisy, by.cut, min(by.core, shape[1]), shape[1], by.eos)
    layers, _, passes, share = drafted(draft, front, 0, shape[0], way)
    drafted_so(books, began, passes, share, waiting)
    return layers, passes == len(layers.fronts.row_ends)


@compiled
def _booked(
    found: Judged, tree: tuple[Array, Array], texts: Texts, drafts: int, widths: Array, numbers: Array
) -> Array:
    """Keep what the layers of a turn gave; which of the drafted ones passed."""
    layers = len(found.ends)
    passed, span = np.zeros(min(drafts, layers)), numbers[SPANNED]
    for number in range(layers):
        first, last = from_to(found.ends, number)
        widths[numbers[STEPS]] = last - first
        numbers[STEPS] += 1
        fine = True
        for place in range(first, last):
            fine &= found.ended[place] or found.nodes[place] >= 0
            if found.ended[place]:
                node, token = found.parents[place], found.tokens[place]
                put_aside(texts, numbers[GONE], span + number + 1, tree, node, token, found.scores[place])
                numbers[GONE] += 1
        if number < drafts:
            passed[number] = fine
            numbers[ACCEPTED] += fine
    return passed


@compiled
def _survivors(found: Judged) -> Array:
    """Places of the beams that live on."""
    first, last = from_to(found.ends, len(found.ends) - 1)
    return first + np.flatnonzero(~found.ended[first:last])


@compiled
def beam_turns(
    target: OneLane,
    draft: OneLane,
    course: BeamCourse,
    live: Live,
    finished: Array,
    ended: int,
    length: int,
    passes: int,
) -> BeamsRan:
    """Run until the session is over, or for a while, or until something is not for this loop.

    Args:
        draft: the target's own lane, if nothing is drafted.
        finished: normalised scores of the `ended` beams, with room behind.
        length: tokens so far.
        passes: turns so far.
    """
    most, drafting, stop, values = course.widths.most, course.drafting, course.stop, course.widths.values
    texts, widths = begun(len(live.tokens), most), np.empty(SPAN, dtype=np.int64)
    books, told, over = opened(), True, False
    numbers, time = books.numbers, books.time
    while told and not over and numbers[PASSES] < TURNS:
        roots, span, left = len(live.tokens), numbers[SPANNED], stop.most - length - numbers[SPANNED]
        depth, width = planned(course.plan, roots, passes + numbers[PASSES], left)
        before, fresh = (numbers.copy(), values.sums.copy(), values.count.copy()), depth * width
        if depth < 0 or span + depth + 1 > SPAN or not has_room(target, fresh, most):
            break
        if drafting and not has_room(draft, fresh, most):
            break
        layers, told = _guessed(draft, course, live, (depth, width), books)
        tree, drafts = layers.tree, len(layers.fronts.row_ends)
        if told:
            began = cycles()
            numbers[SCORED] += runs_layers(target, len(tree[0]))
            logits = extended(target, tree[0], tree[1], 0)
            numbers[PASSES] += 1
            scored = cycles()
            beams = (np.arange(roots), live.scores, live.counts, live.keys)
            so_far = Finished(stop, finished, ended + numbers[GONE], length + span)
            found = judged(
                logits, tree, beams, course.choice, course.widths, layers.fronts, depth, drafts, min(left, drafts + 1),
                so_far,
            )  # fmt: skip
            told = found.told
            time[SCORE] += scored - began
            time[VERIFY] += cycles() - scored
        if not told:
            numbers[PASSES], numbers[DRAFT_PASSES] = before[0][PASSES], before[0][DRAFT_PASSES]
            values.sums[:], values.count[:] = before[1], before[2]
            rewound(target, roots)
            if drafting:
                rewound(draft, roots)
            break
        began = cycles()
        learnt(course.plan, _booked(found, tree, texts, drafts, widths, numbers))
        going = _survivors(found)
        numbers[SPANNED] += len(found.ends)
        parents, tokens = found.parents[going], found.tokens[going]
        moved_on(texts, span, numbers[SPANNED], tree, parents, tokens)
        settled(target, tree, found.nodes[going], tokens, parents)
        if drafting:
            settled(draft, tree, found.nodes[going], tokens, parents)
        live = Live(tokens, found.scores[going], np.ones(len(going), dtype=np.int64), found.keys[going])
        over = enough(stop, finished[: ended + numbers[GONE]], live.scores, length + numbers[SPANNED])
        time[SETTLE] += cycles() - began
    return BeamsRan(live, texts, widths[: numbers[STEPS]], books, told)
