"""DRAFT: trees by stochastic beam search: in each layer the sequences of largest perturbed log-probability.

Siblings are in descending perturbed order, which is their draw order. Parents of which no child is kept are leaves. Which
sequences are kept depends on the perturbed values and never on the tokens, so each sibling that is kept still has the draft
law without its earlier siblings.

Source: RSD-S (arXiv 2402.14160).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams
from specbeam.core.control.planning import NO_STOP, StopSpec
from specbeam.core.dice import next_uniforms
from specbeam.core.draft.tree import (
    NODES,
    ROOM,
    Complete,
    bear,
    close_group,
    condition_after,
    draft_tree,
    grow_one_layer,
    keep_tosses_of_tree,
    law_after,
    learn_stop_of_tree,
    likeliest_places,
    logq_of,
    most_draws,
    room_for_children,
    start_growth,
    state_law,
    surest_of,
    tosses_of_tree,
    with_layer,
    with_room_for_laws,
)
from specbeam.core.draft.turns import draft_turn, keep_tosses, learn_from, tosses_of, uniforms_of
from specbeam.core.forest import CHOSEN, DISTINCT, Forest
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.reduce import BROKEN, SOUND, exponentials
from specbeam.core.noise import with_largest
from specbeam.core.steps import Array, borrowed, open_step, step


@borrowed
class StochasticSpec(NamedTuple):
    """How the sequences of a layer are chosen."""

    greedy: bool  # whether they are the likeliest ones, without noise
    truncation: Truncation
    eos: Array  # int64[ends]
    vocab: int = 0  # number of tokens of the draft model: of so many at most a node may take a uniform for each
    stops: StopSpec = NO_STOP  # by what a draft may end between layers


class StochasticDraft(NamedTuple):
    """A tree while it grows."""

    forest: Forest
    front: Array  # int64[front]: nodes whose children are drawn next
    paths: Array  # float64[front]: log-likelihood of the path to each, with that of its beam, relative to the best beam
    tops: Array  # float64[front]: perturbed log-likelihood of that path
    law_tokens: Array  # int64[capacity]: buffer whose used part is `Siblings.law_pairs`
    law_odds: Array  # float64[capacity]
    surest: float  # largest draft probability of a draw of the newest layer; 1 if it has none
    width: int  # number of sequences per layer


class Sequences(NamedTuple):
    """The best sequences of a layer so far, by descending value; of equal values the first comes first."""

    values: Array  # float64[width]: perturbed log-likelihoods
    numbers: Array  # int64[width]: of the parent in the front
    places: Array  # int64[width]: of the token in the law of the parent
    held: Array  # int64[1]: how many there are


@start_growth.of(StochasticSpec)
@step
def start_stochastic(roots: Forest, spec: StochasticSpec, live: Beams, depth: int, width: int) -> StochasticDraft:
    """Return a tree without layers; see `start_growth`."""
    scores = live.scores - live.scores.max()
    front = np.arange(len(roots.tokens))
    return StochasticDraft(roots, front, scores, scores, np.empty(ROOM, dtype=np.int64), np.empty(ROOM), 1.0, width)


@step
def _offer(best: Sequences, value: float, number: int, place: int) -> None:
    """Let a sequence take its rank among the best ones, if it has one; sequences come by ascending number of the parent."""
    held = best.held[0]
    rank = held
    while rank > 0:
        before = best.values[rank - 1]
        is_behind = before == value and best.numbers[rank - 1] == number and best.places[rank - 1] > place
        if not (before < value or is_behind):
            break
        rank -= 1
    if rank == len(best.values):
        return
    last = min(held, len(best.values) - 1)
    for goal in range(last, rank, -1):
        best.values[goal] = best.values[goal - 1]
        best.numbers[goal] = best.numbers[goal - 1]
        best.places[goal] = best.places[goal - 1]
    best.values[rank] = value
    best.numbers[rank] = number
    best.places[rank] = place
    best.held[0] = last + 1


@grow_one_layer.of(StochasticSpec)
@step
def grow_stochastic(draft: StochasticDraft, rows: Any, spec: StochasticSpec, dice: Any) -> tuple[StochasticDraft, int]:
    """Return a tree with the best sequences of one more layer; see `grow_one_layer`."""
    width = draft.width
    best = Sequences(
        np.empty(width), np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64), np.zeros(1, dtype=np.int64)
    )
    for number in range(len(draft.front)):
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return draft, BROKEN
        if condition != SOUND:
            continue
        law = law_after(rows, number, spec.truncation)
        path = draft.paths[number]
        if spec.greedy:
            places = likeliest_places(law.logp, width)
            values = path + law.logp[places]
        else:
            u = next_uniforms(dice, len(law.logp))
            places, values = perturbed(law.logp, path, draft.tops[number], u, width)
        for one in range(len(places)):
            _offer(best, values[one], number, places[one])
    return _with_sequences(draft, rows, best, spec), SOUND


@open_step
def _with_sequences(draft: StochasticDraft, rows: Any, best: Sequences, spec: StochasticSpec) -> StochasticDraft:
    """Return a tree with one more layer, the chosen sequences, in the order of their parents."""
    forest = draft.forest
    size = len(forest.tokens)
    used = len(forest.siblings.law_odds)
    law_tokens = draft.law_tokens
    law_odds = draft.law_odds
    held = best.held[0]
    born = room_for_children(held, held)
    paths = np.empty(held)
    for number in range(len(draft.front)):
        if not (best.numbers[:held] == number).any():
            continue
        node = draft.front[number]
        law = law_after(rows, number, spec.truncation)
        before = born.sizes[NODES]
        for rank in range(held):
            if best.numbers[rank] != number:
                continue
            place = best.places[rank]
            token = law.tokens[place] if len(law.tokens) > 0 else place
            logp = law.logp[place]
            paths[rank] = draft.paths[number] + logp
            born.surest[0] = max(born.surest[0], np.exp(logp))
            bear(born, before, size, node, token, logq_of(forest, node) + logp, rank, spec.eos)
        if spec.greedy:
            close_group(born, CHOSEN, node, used)
        else:
            law_tokens, law_odds = with_room_for_laws(law_tokens, law_odds, used + 2 * len(law.logp))
            used = state_law(law, exponentials(law.logp), law_tokens, law_odds, used)
            close_group(born, DISTINCT, node, used)
    grown = with_layer(forest, born, law_tokens, law_odds, used, rows.shape[1])
    nodes = born.sizes[NODES]
    ranks = born.places[:nodes]
    front = size + np.arange(nodes)
    return StochasticDraft(
        grown, front, paths[ranks], best.values[ranks], law_tokens, law_odds, surest_of(born), draft.width
    )


@step
def perturbed(logp: Array, path: float, top: float, u: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` indices of largest perturbed log-probability, ascending, and their values, of maximum `top`.

    Perturbed log-probabilities are path + log p - log(-log u), conditioned on their maximum by a monotonic map (Kool et al.
    2019, app. B.3). The largest are the first to arrive in a race in which index i arrives at -log(u_i) / p_i. As
    -log(u) >= 1 - u, few logarithms are needed to find them.

    Args:
        logp: float64[n], log p.
        path: log-likelihood of the path so far.
        top: the value that the largest perturbed log-probability is known to have.
        u: float64[n] in (0, 1).
    """
    count = min(count, len(logp))
    arrivals = np.full(count, np.inf)
    places = np.full(count, -1, dtype=np.int64)
    held = 0
    for place in range(len(logp)):
        if logp[place] == -np.inf:
            continue
        p = np.exp(logp[place])
        if held == count and (1 - u[place]) / p > arrivals[count - 1] * (1 + 1e-9):
            continue
        arrival = -np.log(u[place]) / p
        if held == count and arrival >= arrivals[count - 1]:
            continue
        rank = held if held < count else count - 1
        held = min(held + 1, count)
        while rank > 0 and arrivals[rank - 1] > arrival:
            arrivals[rank] = arrivals[rank - 1]
            places[rank] = places[rank - 1]
            rank -= 1
        arrivals[rank] = arrival
        places[rank] = place
    chosen = np.sort(places[:held])
    values = np.empty(held)
    for number in range(held):
        place = chosen[number]
        values[number] = path + logp[place] - np.log(-np.log(u[place]))
    largest_value = values.max() if held > 0 else 0.0
    for number in range(held):
        values[number] = with_largest(values[number], largest_value, top)
    return chosen, values


@most_draws.of(StochasticSpec)
def most_draws_of_sequences(draft: StochasticDraft, spec: StochasticSpec) -> int:
    """Return one uniform for each token after each node of the front; see `most_draws`."""
    return 0 if spec.greedy else len(draft.front) * spec.vocab


@uniforms_of.of(StochasticSpec)
def uniforms_of_sequences(drafts: StochasticSpec, roots: int, depth: int, width: int) -> int:
    """Return one uniform for each token after each node that is expanded; see `uniforms_of`."""
    return 0 if drafts.greedy or depth < 1 else (roots + (depth - 1) * width) * drafts.vocab


draft_turn.of(StochasticSpec)(draft_tree)
learn_from.of(StochasticSpec)(learn_stop_of_tree)
tosses_of.of(StochasticSpec)(tosses_of_tree)
keep_tosses.of(StochasticSpec)(keep_tosses_of_tree)


@dataclass(frozen=True)
class StochasticBeam(Complete):
    """A growth by stochastic beam search: the `shape.width` sequences of largest perturbed log-probability in each layer.

    Source: RSD-S (arXiv 2402.14160).
    """

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> StochasticSpec:
        """Return how steps grow such trees."""
        return StochasticSpec(greedy, truncation, eos)
