"""What a width is chosen by, for laws that are cut: the twin of `verify.beam.Layer.accepted`."""

from typing import NamedTuple

import numpy as np

from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.races import odds_by_drafts
from specbeam.kernels.ranking import best
from specbeam.kernels.truncation import Cut, first_ones, shifts, whole
from specbeam.kernels.values import Values, most_valued


class Joint(NamedTuple):
    """A joint law as loops see it."""

    logits: Array
    scores: Array
    log_norm: Array
    log_counts: Array
    log_total: float  # see `truncation.first_ones`
    cut: Cut


@compiled
def _law(law: Joint, shift: Array) -> tuple[Array, Array, bool]:
    """The pairs that are left, their odds, and whether these could be told."""
    cut = law.cut
    pairs, known = first_ones(
        law.logits, shift, law.scores.max(), cut.temperature, cut.top_k, cut.top_p, cut.min_p, cut.least, law.log_total,
        cut.looked,
    )  # fmt: skip
    odds, vocab, top, total = np.empty(len(pairs)), law.logits.shape[1], -np.inf, 0.0
    for place in range(len(pairs)):
        beam = pairs[place] // vocab
        odds[place] = (law.logits[beam, pairs[place] % vocab] + shift[beam]) / cut.temperature + law.log_counts[beam]
        top = max(top, odds[place])
    for place in range(len(pairs)):
        odds[place] = np.exp(odds[place] - top)
        total += odds[place]
    return pairs, odds / total, known


@compiled
def _odds_at(pair: int, pairs: Array, odds: Array) -> float:
    for place in range(len(pairs)):
        if pairs[place] == pair:
            return odds[place]
    return 0.0


@compiled
def _entrants(
    target: Joint, draft: Joint, row_of: Array, beam_of: Array, most: int, wanted: int
) -> tuple[Array, Array, bool]:
    """Odds at target and draft of the pairs that run a race, the `wanted` likeliest drafts first; and whether these are all
    that matter, and not too many.
    """
    vocab, nobody = target.logits.shape[1], np.empty(0, dtype=np.uint64)
    shift, every = shifts(draft.scores, draft.log_norm), np.ones(len(draft.scores), dtype=np.bool_)
    left, p_left, known = _law(target, shifts(target.scores, target.log_norm))
    drawn, q_drawn, told = _law(draft, shift)
    if not known or not told:
        return p_left, q_drawn, False
    wanted = min(wanted, draft.logits.size)
    beyond = best(draft.logits, shift, draft.cut.temperature, draft.log_counts, nobody, every, wanted)
    pairs, count = np.empty(len(beyond) + len(left), dtype=np.int64), 0
    for pair in beyond:  # likeliest first, as the halo is chosen
        beam = beam_of[pair // vocab]
        if beam >= 0:
            pairs[count] = beam * vocab + pair % vocab
            count += 1
    named = count
    for pair in np.sort(left):
        if not (pairs[:named] == pair).any():
            pairs[count] = pair
            count += 1
    if count > most:
        return p_left, q_drawn, False
    p, q = np.zeros(count), np.zeros(count)
    for place in range(count):
        row = row_of[pairs[place] // vocab]
        p[place] = _odds_at(pairs[place], left, p_left)
        if row >= 0:
            q[place] = _odds_at(row * vocab + pairs[place] % vocab, drawn, q_drawn)
    return p, q, True


@compiled
def accepted_by_drafts(
    target: Joint, draft: Joint, row_of: Array, beam_of: Array, noise: Array, drafts: int, most: int
) -> Array:
    """float64[widths, drafts + 1]: odds that 0, 1, ... draws of the target are among 0, 1, ... drafts; empty where this does
    not tell.

    Args:
        row_of: row in the draft's law of each beam; beam_of: the other way round. -1 for none.
        noise: float64[races, entrants], see `control.accepted`.
    """
    p, q, told = _entrants(target, draft, row_of, beam_of, noise.shape[1], drafts + most)
    if not told:
        return np.empty((0, drafts + 1))
    return odds_by_drafts(noise[:, : len(p)], p, q, drafts, most, 0.0, np.arange(len(p)))


class Widths(NamedTuple):
    """How a layer's width is chosen: the most, the widest that is accepted with enough odds, or that of most value."""

    dynamic: bool
    most: int
    least: int
    threshold: float
    noise: Array  # float64[races, entrants], see `control.accepted`
    values: Values  # of no rows: go by the threshold


class Fronts(NamedTuple):
    """What the layers of a draft were drawn from: layer n from the rows row_ends[n - 1] .. row_ends[n]."""

    nodes: Array  # int64[rows]: forest nodes
    scores: Array
    counts: Array
    logits: Array  # float32[rows, vocab]
    norms: Array
    row_ends: Array
    draw_ends: Array  # the same of its draws
    cut: Cut


@compiled
def from_to(ends: Array, place: int) -> tuple[int, int]:
    """Where part `place` stands."""
    return (ends[place - 1] if place > 0 else 0), ends[place]


@compiled
def joint(logits: Array, scores: Array, norm: Array, counts: Array, cut: Cut) -> Joint:
    """A law as `JointLaw.for_loops` says it."""
    return Joint(logits, scores, norm, np.log(counts), whole(scores, norm, cut), cut)


@compiled
def chosen(widths: Widths, target: Joint, nodes: Array, fronts: Fronts, layer: int, planned: int) -> int:
    """The width of a drafted layer above which these forest nodes live, in a turn that was to draft `planned` layers; -1
    where the loop cannot tell.
    """
    start, stop = from_to(fronts.row_ends, layer)
    rows = slice(start, stop)
    first, last = from_to(fronts.draw_ends, layer)
    row_of, beam_of = np.full(len(nodes), -1, dtype=np.int64), np.full(stop - start, -1, dtype=np.int64)
    for beam in range(len(nodes)):
        for row in range(stop - start):
            if fronts.nodes[start + row] == nodes[beam]:
                row_of[beam], beam_of[row] = row, beam
    draft = joint(fronts.logits[rows], fronts.scores[rows], fronts.norms[rows], fronts.counts[rows], fronts.cut)
    drafts, left = last - first, max(planned - layer, 1)
    by_value = len(widths.values.sums) > 0
    counted = widths.values.sums.shape[1] - 1 if by_value else drafts
    odds = accepted_by_drafts(target, draft, row_of, beam_of, widths.noise, counted, widths.most)
    if len(odds) == 0:
        return -1
    if by_value:
        return most_valued(widths.values, odds, drafts, left, widths.least)
    sure = 0
    for width in range(len(odds)):
        if odds[width, drafts] >= widths.threshold:
            sure = width
    return min(max(sure, widths.least), widths.most)
