"""The fast twin of `PathRule` for trees of draws from cut laws, one group under each node: the whole walk as one loop."""

from typing import NamedTuple, cast

import numpy as np

from specbeam.dice import Dice
from specbeam.forest import Forest, Group, Row
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.sums import log_norm, picked
from specbeam.kernels.truncation import Cut, truncated
from specbeam.probs import MOST, NOTHING, on_host
from specbeam.session import Session
from specbeam.verify.single import Walk


class Drawn(NamedTuple):
    """The groups of a tree, one behind the other: that under a node is group_of[node], -1 for none."""

    group_of: Array
    draw_ends: Array
    tokens: Array
    nodes: Array  # -1 where a draw is an end token
    distinct: Array  # bool[groups]: each draw struck out once drawn
    law_ends: Array
    law_tokens: Array
    law_p: Array


@compiled
def _on(tokens: Array, law_tokens: Array, law_p: Array) -> Array:
    """A law on other tokens; both ascend."""
    p, place = np.zeros(len(tokens)), 0
    for wanted in range(len(tokens)):
        while place < len(law_tokens) and law_tokens[place] < tokens[wanted]:
            place += 1
        if place < len(law_tokens) and law_tokens[place] == tokens[wanted]:
            p[wanted] = law_p[place]
    return p


@compiled
def _tried(rest: Array, tokens: Array, drawn: Drawn, group: int, uniforms: Array, used: int) -> tuple[int, int]:
    """Try the draws of a group in order (`draws.draws`), with what is left of the target's law in `rest`. Gives the accepted
    one, or -1, and how many uniforms are used then.
    """
    first, last = drawn.draw_ends[group - 1] if group > 0 else 0, drawn.draw_ends[group]
    start, end = drawn.law_ends[group - 1] if group > 0 else 0, drawn.law_ends[group]
    q, left = _on(tokens, drawn.law_tokens[start:end], drawn.law_p[start:end]), drawn.law_p[start:end].copy()
    for draw in range(first, last):
        place = np.searchsorted(tokens, drawn.tokens[draw])
        known = place < len(tokens) and tokens[place] == drawn.tokens[draw]
        mass = left.sum() if drawn.distinct[group] else 1.0
        if known and rest[place] > 0:
            odds = min(1.0, rest[place] / (q[place] / mass)) if q[place] > 0 else 1.0
            used += 1
            if uniforms[used - 1] < odds:
                return draw, used
        missing = np.maximum(rest - q / mass, 0.0)
        total = missing.sum()
        if total > NOTHING:
            rest[:] = missing / total
        if drawn.distinct[group]:
            left[np.searchsorted(drawn.law_tokens[start:end], drawn.tokens[draw])] = 0.0
            if known:
                q[place] = 0.0
    return -1, used


@compiled
def walked(
    logits: Array, cut: Cut, most_kept: int, drawn: Drawn, eos: Array, most: int, uniforms: Array
) -> tuple[Array, Array, int, bool]:
    """Walk down from the root. Gives int64[2, steps]: node, or -1, and token of each step; its log-likelihood; how many
    uniforms were used; whether the walk is over, or stands where a law cannot be told.
    """
    steps, logp, node, count, used = np.empty((2, most), dtype=np.int64), np.empty(most), 0, 0, 0
    while node >= 0 and count < most:
        by = (cut.temperature, cut.top_k, cut.top_p, cut.min_p, cut.least)
        row = logits[node : node + 1]
        tokens, law, kept = truncated(row, *by, most_kept)
        if kept[0] < 1:
            return steps[:, :count], logp[:count], used, False
        rest, group, draw = np.exp(law), drawn.group_of[node], -1
        if group >= 0:
            draw, used = _tried(rest, tokens, drawn, group, uniforms, used)
        if draw >= 0:
            token, child = drawn.tokens[draw], drawn.nodes[draw]
        else:
            token, child = tokens[picked(rest, uniforms[used])], -1
            used += 1
        steps[0, count], steps[1, count] = child, token
        logp[count] = np.float64(logits[node, token]) - log_norm(row)[0]
        count += 1
        node = child
        for end in eos:
            if token == end:
                node = -1
    return steps[:, :count], logp[:count], used, True


def walk_at_once(session: Session, forest: Forest, walk: Walk) -> bool:
    """Emit what the loop can; whether the walk is over then."""
    warp, dice, limits = session.warp, session.dice, session.limits
    plain = warp.for_loops and not warp.greedy and on_host(walk.scored)
    if not plain or type(dice) is not Dice or session.audited or limits.stop_strings or warp.truncation.looked < 1:
        return False
    drawn = _drawn(forest)
    if drawn is None:
        return False
    cut, most = warp.truncation.for_loops, limits.max_new_tokens - session.length
    uniforms = dice.ahead(len(drawn.tokens) + len(forest) + 1)
    steps, logp, used, over = walked(
        np.ascontiguousarray(walk.scored.numpy()), cut, max(MOST, cut.least), drawn, limits.ending,
        min(most, len(forest)), uniforms,
    )  # fmt: skip
    dice.use(used)
    going = True
    for node, token, odds in zip(*steps.tolist(), logp.tolist(), strict=True):
        going = walk.took(node, token, odds)
    return over or not going


def _drawn(forest: Forest) -> Drawn | None:
    """The groups as arrays; None where one is not drawn from a cut law, or is not alone under its node."""
    groups = forest.groups
    group_of = np.full(len(forest), -1, dtype=np.int64)
    for number, group in enumerate(groups):
        if not _is_simple(group) or group_of[group.parents[0]] >= 0:
            return None
        group_of[group.parents[0]] = number
    if not groups:
        return None
    laws = [cast(Row, group.law) for group in groups]
    return Drawn(
        group_of,
        np.cumsum([len(group.draw_tokens) for group in groups]),
        np.concatenate([group.draw_tokens for group in groups]),
        np.concatenate([group.draw_nodes for group in groups]),
        np.array([not group.replacement for group in groups]),
        np.cumsum([len(law) for law in laws]),
        np.concatenate([law.tokens for law in laws if law.tokens is not None]),
        np.concatenate([law.p for law in laws]),
    )


def _is_simple(group: Group) -> bool:
    law = group.law
    return not group.sure and len(group.parents) == 1 and isinstance(law, Row) and law.tokens is not None
