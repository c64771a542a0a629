"""DRAFT: chains whose tokens have siblings that are leaves, as steps (SWIFT, arXiv 2410.06916); see `draft.caterpillar`.

The siblings of a token are drawn with it, and become nodes after the last layer: the draft model never scores them.
"""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams, is_end
from specbeam.core.control.needs import no_node_odds
from specbeam.core.control.planning import NO_STOP, StopSpec
from specbeam.core.dice import pick
from specbeam.core.draft.tree import (
    draft_tree,
    finish_growth,
    grow_one_layer,
    keep_tosses_of_tree,
    learn_stop_of_tree,
    most_draws,
    start_growth,
    tosses_of_tree,
)
from specbeam.core.draft.turns import Cut, draft_turn, keep_tosses, learn_from, nodes_of, tosses_of
from specbeam.core.forest import CHOSEN, DISTINCT, Forest, Siblings
from specbeam.core.laws.ranking import Truncation, largest
from specbeam.core.laws.reduce import BROKEN, SOUND, condition_of_row, exponentials
from specbeam.core.laws.rows import row_law
from specbeam.core.steps import Array, borrowed, step


@borrowed
class StemSpec(NamedTuple):
    """How many children nodes get by the odds of the first, as numbers for steps."""

    odds: (
        Array  # float64[classes], descending: a first draw of larger odds is of this class; of smaller ones of the last
    )
    counts: Array  # int64[classes]: number of children, the first included
    greedy: bool  # whether children are the likeliest tokens; if not, they are drawn without replacement
    truncation: Truncation
    eos: Array  # int64[ends]
    stops: StopSpec = NO_STOP  # by what a draft may end between layers


class Stems(NamedTuple):
    """Chains while they grow, with their siblings to be."""

    forest: Forest  # of the first draws alone
    front: Array  # int64[front]: nodes whose children are drawn next
    parents: Array  # int64[groups]: the node above each group of siblings
    stems: Array  # int64[groups]: node of its first draw; -1 if that is an end
    draw_ends: Array  # int64[groups]
    tokens: Array  # int64[draws]
    logp: Array  # float64[draws]: draft log-probabilities
    law_ends: Array  # int64[groups]
    law_tokens: Array  # int64[pairs], see `Siblings.law_pairs`
    law_odds: Array  # float64[pairs]
    vocab: int
    surest: float  # largest draft probability of a first draw of the newest layer that goes on; 1 if there is none


@step
def start_stems(roots: Forest) -> Stems:
    """Return chains without layers."""
    none = np.empty(0, dtype=np.int64)
    return Stems(
        roots, np.arange(len(roots.tokens)), none, none, none, none, np.empty(0), none, none, np.empty(0), 0, 1.0
    )


@step
def children_for(spec: StemSpec, odds: float) -> int:
    """Return the number of children of a node, given the odds of the first."""
    for place in range(len(spec.odds)):
        if odds > spec.odds[place]:
            return spec.counts[place]
    return spec.counts[len(spec.counts) - 1]


@step
def draw_family(logp: Array, odds: Array, spec: StemSpec, dice: Any) -> Array:
    """Return the children of a node by their places in its law, int64[children], the one that goes on first."""
    if spec.greedy:
        count = children_for(spec, odds.max())
        return largest(logp.reshape(1, len(logp)), np.zeros(1), count)[:count]
    left = odds.copy()
    first = pick(dice, left)
    count = children_for(spec, odds[first])
    places = np.empty(count, dtype=np.int64)
    places[0] = first
    left[first] = 0.0
    drawn = 1
    while drawn < count and (left > 0).any():
        places[drawn] = pick(dice, left)
        left[places[drawn]] = 0.0
        drawn += 1
    return places[:drawn]


@step
def grow_stems(draft: Stems, rows: Array, spec: StemSpec, dice: Any) -> tuple[Stems, int]:
    """Return chains with one more layer, and SOUND; or the same chains, and BROKEN if a row holds NaN or +inf.

    A node after which everything is banned is a leaf.

    Args:
        rows: float[front, vocab], logits of the front, after the processors.
    """
    grown = _on(draft, np.empty(0, dtype=np.int64), rows.shape[1], -1.0)
    for number in range(len(draft.front)):
        condition = condition_of_row(rows[number])
        if condition == BROKEN:
            return draft, BROKEN
        if condition == SOUND:
            grown = _with_family(grown, draft.front[number], rows[number], spec, dice)
    surest = grown.surest if grown.surest >= 0 else 1.0
    return _on(grown, grown.front, grown.vocab, surest), SOUND


@step
def _on(draft: Stems, front: Array, vocab: int, surest: float) -> Stems:
    """Return the same chains with another front."""
    return Stems(
        draft.forest, front, draft.parents, draft.stems, draft.draw_ends, draft.tokens, draft.logp, draft.law_ends,
        draft.law_tokens, draft.law_odds, vocab, surest,
    )  # fmt: skip


@step
def _with_family(draft: Stems, parent: int, row: Array, spec: StemSpec, dice: Any) -> Stems:
    """Return chains with the children of one node: the first as a node, unless it is an end, the others to be."""
    law = row_law(row, spec.truncation)
    odds = exponentials(law.logp)
    places = draw_family(law.logp, odds, spec, dice)
    tokens = law.tokens[places] if len(law.tokens) > 0 else places
    stem = -1
    forest = draft.forest
    front = draft.front
    surest = draft.surest
    if not is_end(tokens[0], spec.eos):
        stem = len(forest.tokens)
        forest = _with_nodes(forest, tokens[:1], np.full(1, parent), law.logp[places[:1]])
        front = np.append(front, stem)
        surest = max(surest, odds[places[0]])
    pairs = np.arange(len(odds)) if len(law.tokens) == 0 else law.tokens
    if spec.greedy:
        pairs = pairs[:0]
        odds = odds[:0]
    return Stems(
        forest,
        front,
        np.append(draft.parents, parent),
        np.append(draft.stems, stem),
        np.append(draft.draw_ends, len(draft.tokens) + len(tokens)),
        np.concatenate((draft.tokens, tokens)),
        np.concatenate((draft.logp, law.logp[places])),
        np.append(draft.law_ends, len(draft.law_odds) + len(odds)),
        np.concatenate((draft.law_tokens, pairs)),
        np.concatenate((draft.law_odds, odds)),
        draft.vocab,
        surest,
    )


@step
def _with_nodes(forest: Forest, tokens: Array, parents: Array, logp: Array) -> Forest:
    """Return a forest with more nodes, which have these draft log-probabilities after their parents."""
    before = forest.logq if len(forest.logq) > 0 else np.zeros(len(forest.tokens))
    return Forest(
        np.concatenate((forest.tokens, tokens)),
        np.concatenate((forest.parents, parents)),
        forest.siblings,
        np.concatenate((before, before[parents] + logp)),
        forest.beams,
        forest.fronts,
        forest.known,
    )


@step
def with_siblings(draft: Stems, spec: StemSpec) -> Forest:
    """Return the chains with all siblings, which come after all of them; ends get no node."""
    forest = draft.forest
    groups = len(draft.parents)
    draws = len(draft.tokens)
    size = len(forest.tokens)
    nodes = np.full(draws, -1)
    tokens = np.empty(draws, dtype=np.int64)
    parents = np.empty(draws, dtype=np.int64)
    logp = np.empty(draws)
    count = 0
    start = 0
    for group in range(groups):
        nodes[start] = draft.stems[group]
        for draw in range(start + 1, draft.draw_ends[group]):
            if not is_end(draft.tokens[draw], spec.eos):
                nodes[draw] = size + count
                tokens[count] = draft.tokens[draw]
                parents[count] = draft.parents[group]
                logp[count] = draft.logp[draw]
                count += 1
        start = draft.draw_ends[group]
    if groups == 0:
        return forest
    whole = _with_nodes(forest, tokens[:count], parents[:count], logp[:count])
    before = forest.siblings
    kind = CHOSEN if spec.greedy else DISTINCT
    families = Siblings(
        np.concatenate((before.kinds, np.full(groups, kind))),
        np.concatenate((before.parents, draft.parents)),
        np.concatenate((before.parent_ends, len(before.parents) + 1 + np.arange(groups))),
        np.concatenate((before.draw_ends, len(before.tokens) + draft.draw_ends)),
        np.concatenate((before.rows, np.zeros(draws, dtype=np.int64))),
        np.concatenate((before.tokens, draft.tokens)),
        np.concatenate((before.nodes, nodes)),
        np.concatenate((before.law_ends, len(before.law_odds) + draft.law_ends)),
        np.concatenate((before.law_pairs, draft.law_tokens)),
        np.concatenate((before.law_odds, draft.law_odds)),
        draft.vocab,
    )
    return Forest(whole.tokens, whole.parents, families, whole.logq, whole.beams, whole.fronts, whole.known)


@start_growth.of(StemSpec)
@step
def start_stems_of_spec(roots: Forest, spec: StemSpec, live: Beams, depth: int, width: int) -> Stems:
    """Return chains without layers; see `start_growth`."""
    return start_stems(roots)


@most_draws.of(StemSpec)
def most_draws_of_stems(draft: Stems, spec: StemSpec) -> int:
    """Return the most draws of a layer: as many children as there may be of each node; see `most_draws`."""
    return len(draft.front) * int(spec.counts.max())


@nodes_of.of(StemSpec)
@step
def most_nodes_of_stems(spec: StemSpec, roots: int, depth: int, width: int) -> int:
    """Return the most nodes of chains with siblings: as many children as there may be at every node; see `nodes_of`."""
    return roots * depth * spec.counts.max()


@finish_growth.of(StemSpec)
def finish_stems(draft: Stems, spec: StemSpec) -> Cut:
    """Return the chains with all siblings; see `finish_growth`."""
    forest = with_siblings(draft, spec)
    return Cut(forest, forest, np.arange(len(forest.tokens)), no_node_odds())


grow_one_layer.of(StemSpec)(grow_stems)
draft_turn.of(StemSpec)(draft_tree)
learn_from.of(StemSpec)(learn_stop_of_tree)
tosses_of.of(StemSpec)(tosses_of_tree)
keep_tosses.of(StemSpec)(keep_tosses_of_tree)
