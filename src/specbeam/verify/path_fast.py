"""The fast twin of `PathRule` for trees with one group under each node: the whole walk as one loop."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from specbeam.dice import Dice
from specbeam.forest import Forest, Group, Row
from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.stopping import is_end
from specbeam.kernels.sums import log_norm, picked
from specbeam.kernels.truncation import Cut, dense, truncated
from specbeam.kernels.widths import from_to
from specbeam.probs import MOST, NOTHING, on_host
from specbeam.session import Session
from specbeam.verify.single import Walk


class Drawn(NamedTuple):
    """The groups of a tree, one behind the other: that under a node is group_of[node], -1 for none."""

    group_of: Array
    draw_ends: Array
    tokens: Array
    nodes: Array  # -1 where a draw is an end token
    distinct: bool  # each draw struck out once drawn
    law_ends: Array  # of no groups where the best tokens are drafted
    law_tokens: Array  # none where laws are on the whole vocabulary
    law_p: Array


class Laws(NamedTuple):
    """What makes laws of the target's logits."""

    greedy: bool
    cut: Cut  # `looked` is 0 where nothing is cut
    most: int  # tokens that a cut may leave
    eos: Array


@compiled
def _law(row: Array, by: Laws) -> tuple[Array, Array, bool]:
    """The tokens that a law keeps, ascending, and their odds, of float32[1, vocab]; and whether this tells them."""
    if by.greedy:
        return np.full(1, row[0].argmax()), np.ones(1), True
    if by.cut.looked == 0:
        logp = np.empty(row.shape[1])
        told = dense(row[0], by.cut.temperature, logp)
        return np.arange(row.shape[1]), np.exp(logp), told
    cut = by.cut
    tokens, logp, kept = truncated(row, cut.temperature, cut.top_k, cut.top_p, cut.min_p, cut.least, by.most)
    return tokens, np.exp(logp), kept[0] > 0


@compiled
def _on(tokens: Array, law_tokens: Array, law_p: Array) -> Array:
    """A law on other tokens; both ascend."""
    if len(law_tokens) == 0:
        return law_p[tokens]
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
    first, last = from_to(drawn.draw_ends, group)
    start, end = from_to(drawn.law_ends, group)
    names, left = drawn.law_tokens[start:end], drawn.law_p[start:end].copy()
    q = _on(tokens, names, left)
    for draw in range(first, last):
        place = np.searchsorted(tokens, drawn.tokens[draw])
        known = place < len(tokens) and tokens[place] == drawn.tokens[draw]
        mass = left.sum() if drawn.distinct else 1.0
        if known and rest[place] > 0:
            odds = min(1.0, rest[place] / (q[place] / mass)) if q[place] > 0 else 1.0
            used += 1
            if uniforms[used - 1] < odds:
                return draw, used
        missing = np.maximum(rest - q / mass, 0.0)
        total = missing.sum()
        if total > NOTHING:
            rest[:] = missing / total
        if drawn.distinct:
            left[np.searchsorted(names, drawn.tokens[draw]) if len(names) > 0 else drawn.tokens[draw]] = 0.0
            if known:
                q[place] = 0.0
    return -1, used


@compiled
def _drafted(drawn: Drawn, group: int, token: int) -> int:
    """The draw of a group that is this token; -1 if there is none."""
    if group >= 0:
        first, last = from_to(drawn.draw_ends, group)
        for draw in range(first, last):
            if drawn.tokens[draw] == token:
                return draw
    return -1


@compiled
def walked(logits: Array, by: Laws, drawn: Drawn, most: int, uniforms: Array) -> tuple[Array, Array, int, bool]:
    """Walk down from the root, up to `most` steps. Gives int64[3, steps]: node, or -1, and token of each step, and whether
    it was drafted; its log-likelihood; how many uniforms were used; False if the walk stands where a law cannot be told.
    """
    steps, logp, node, count, used = np.empty((3, most), dtype=np.int64), np.empty(most), 0, 0, 0
    while node >= 0 and count < most:
        row = logits[node : node + 1]
        tokens, rest, told = _law(row, by)
        norm = log_norm(row)[0]
        if not told or not -np.inf < norm < np.inf:
            return steps[:, :count], logp[:count], used, False
        group, draw = drawn.group_of[node], -1
        if by.greedy:
            draw = _drafted(drawn, group, tokens[0])
        elif group >= 0:
            draw, used = _tried(rest, tokens, drawn, group, uniforms, used)
        if draw >= 0:
            token, child = drawn.tokens[draw], drawn.nodes[draw]
        else:
            token, child = tokens[0], -1
            if not by.greedy:
                token = tokens[picked(rest, uniforms[used])]
                used += 1
        logp[count] = np.float64(logits[node, token]) - norm
        node, ended = child, is_end(token, by.eos)
        steps[0, count], steps[1, count] = child, token
        steps[2, count] = child >= 0 or (ended and _drafted(drawn, group, token) >= 0)
        count += 1
        if ended:
            node = -1
    return steps[:, :count], logp[:count], used, True


def laws(session: Session) -> Laws | None:
    """What makes laws for a session, if nothing else looks at single tokens."""
    warp, limits = session.warp, session.limits
    plain = warp.for_loops and type(session.dice) is Dice and not session.audited and not limits.stop_strings
    if not plain or warp.cut.looked < 0:
        return None
    return Laws(warp.greedy, warp.cut.for_loops, max(MOST, warp.cut.least), limits.ending)


def walk_at_once(session: Session, forest: Forest, walk: Walk) -> bool:
    """Emit what the loop can; whether the walk is over then."""
    by = laws(session)
    if by is None or not on_host(walk.scored):
        return False
    drawn = _drawn(forest, walk.scored.shape[1], by.greedy)
    if drawn is None:
        return False
    most = min(session.remaining, len(forest))
    uniforms = session.dice.ahead(len(drawn.tokens) + len(forest) + 1)
    steps, logp, used, over = walked(np.ascontiguousarray(walk.scored.numpy()), by, drawn, most, uniforms)
    session.dice.use(used)
    going = True
    for node, token, drafted, odds in zip(*steps.tolist(), logp.tolist(), strict=True):
        going = walk.took(node, token, odds, bool(drafted))
    return over or not going


def _drawn(forest: Forest, vocab: int, greedy: bool = False) -> Drawn | None:
    """The groups as arrays; None where one of them states no law on this vocabulary, or is not alone under its node."""
    groups = forest.groups
    group_of = np.full(len(forest), -1, dtype=np.int64)
    for number, group in enumerate(groups):
        if len(group.parents) != 1 or group_of[group.parents[0]] >= 0:
            return None
        group_of[group.parents[0]] = number
    rows = _stated(groups, vocab, greedy)
    if not groups or rows is None:
        return None
    tokens = [row.tokens for row in rows if row.tokens is not None]
    none = np.zeros(0, dtype=np.int64)
    return Drawn(
        group_of,
        np.cumsum([len(group.draw_tokens) for group in groups]),
        np.concatenate([group.draw_tokens for group in groups]),
        np.concatenate([group.draw_nodes for group in groups]),
        not groups[0].replacement,
        np.cumsum([len(row) for row in rows], dtype=np.int64),
        np.concatenate([none, *tokens]),
        np.concatenate([none.astype(float), *(row.p for row in rows)]),
    )


def _stated(groups: Sequence[Group], vocab: int, greedy: bool) -> list[Row] | None:
    """The laws of all groups, none of the best tokens; None unless they are of one kind."""
    if greedy:
        return [] if all(group.sure for group in groups) else None
    if any(group.sure or not isinstance(group.law, Row) for group in groups):
        return None
    rows = [cast(Row, group.law) for group in groups]
    kinds = {(group.replacement, row.tokens is None) for group, row in zip(groups, rows, strict=True)}
    return rows if len(kinds) == 1 and all(row.vocab == vocab for row in rows) else None
