"""DRAFT: trees by stochastic beam search: in each layer the sequences of largest perturbed log-probability.

Siblings are in descending perturbed order, which is their draw order. Parents without kept children are leaves. The choice
of sequences depends on the perturbed values and never on the tokens, so each kept sibling has the draft law without its
earlier siblings.

Source: RSD-S (arXiv 2402.14160).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams
from specbeam.core.control.planning import NO_STOP, StopSpec
from specbeam.core.dice import next_uniforms
from specbeam.core.draft.tree import (
    ROOM,
    Complete,
    LayerDraws,
    StatedLaws,
    add_draws,
    condition_after,
    grow_one_layer,
    law_after,
    likeliest_places,
    most_draws,
    register_growth,
    room_for_laws,
    start_growth,
)
from specbeam.core.draft.turns import uniforms_of
from specbeam.core.forest import Forest
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.reduce import BROKEN, SOUND, UNDECIDED
from specbeam.core.laws.rows import is_law_decided
from specbeam.core.noise import with_largest
from specbeam.core.steps import Array, borrowed, step


@borrowed
class StochasticSpec(NamedTuple):
    """The growth of a tree by stochastic beam search."""

    greedy: bool  # whether the sequences of a layer are the likeliest ones, without noise
    truncation: Truncation
    eos: Array  # int64[ends]
    vocab: int = 0  # size of the draft model's vocabulary, which bounds the uniforms per node
    stops: StopSpec = NO_STOP  # how the controller may end a draft between layers


class StochasticDraft(NamedTuple):
    """A tree while it grows."""

    forest: Forest
    frontier: Array  # int64[frontier]: nodes whose children are drawn next
    paths: (
        Array  # float64[frontier]: log-likelihood of the path to each, with that of its beam, relative to the best beam
    )
    tops: Array  # float64[frontier]: perturbed log-likelihood of that path
    laws: StatedLaws
    surest: float  # largest draft probability of a draw of the newest layer; 1 if it has none
    width: int  # number of sequences per layer


class Sequences(NamedTuple):
    """The best sequences of a layer so far, by descending value; equal values are in the order of insertion."""

    values: Array  # float64[width]: perturbed log-likelihoods
    numbers: Array  # int64[width]: of the parent in the frontier
    places: Array  # int64[width]: of the token in the law of the parent
    held: Array  # int64[1]: number of sequences so far


@start_growth.of(StochasticSpec)
@step
def start_stochastic(roots: Forest, spec: StochasticSpec, live: Beams, depth: int, width: int) -> StochasticDraft:
    """Return a tree without layers; see `start_growth`."""
    scores = live.scores - live.scores.max()
    frontier = np.arange(len(roots.tokens))
    return StochasticDraft(roots, frontier, scores, scores, room_for_laws(ROOM), 1.0, width)


@step
def _offer(best: Sequences, value: float, number: int, place: int) -> None:
    """Insert a sequence if it is one of the best; sequences are offered by ascending number of the parent."""
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
    for number in range(len(draft.frontier)):
        condition = condition_after(rows, number)
        if condition == BROKEN:
            return draft, BROKEN
        if condition != SOUND:
            continue
        law = law_after(rows, number, spec.truncation)
        if not is_law_decided(law):
            return draft, UNDECIDED
        path = draft.paths[number]
        if spec.greedy:
            places = likeliest_places(law.logp, width)
            values = path + law.logp[places]
        else:
            u = next_uniforms(dice, len(law.logp))
            places, values = perturbed(law.logp, path, draft.tops[number], u, width)
        for one in range(len(places)):
            _offer(best, values[one], number, places[one])
    held = best.held[0]
    drawn = LayerDraws(best.numbers[:held], best.places[:held])
    layer = add_draws(draft.forest, draft.frontier, rows, drawn, spec, draft.laws)
    paths = draft.paths[drawn.numbers] + layer.logp
    return StochasticDraft(
        layer.forest, layer.frontier, paths[layer.draws], best.values[layer.draws], layer.laws, layer.surest, width
    ), SOUND


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
    """Return one uniform for each token after each node of the frontier; see `most_draws`."""
    return 0 if spec.greedy else len(draft.frontier) * spec.vocab


@uniforms_of.of(StochasticSpec)
def uniforms_of_sequences(drafts: StochasticSpec, roots: int, depth: int, width: int) -> int:
    """Return one uniform for each token after each node that is expanded; see `uniforms_of`."""
    return 0 if drafts.greedy or depth < 1 else (roots + (depth - 1) * width) * drafts.vocab


register_growth(StochasticSpec)


@dataclass(frozen=True)
class StochasticBeam(Complete):
    """A growth by stochastic beam search: the `shape.width` sequences of largest perturbed log-probability in each layer.

    Source: RSD-S (arXiv 2402.14160).
    """

    def spec(self, truncation: Truncation, eos: Array, greedy: bool, constrained: bool) -> StochasticSpec:
        """Return how steps grow such trees."""
        return StochasticSpec(greedy, truncation, eos)
