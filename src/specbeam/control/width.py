"""PLAN, within a turn: the number of draws of the next layer, chosen before its drafts are read."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from specbeam.control.races import ENTRANTS, RACE_NOISE, odds_by_drafts, odds_of_rejection
from specbeam.control.values import NO_VALUES, Values, choose_most_valued
from specbeam.core.beams import Beams
from specbeam.core.forest import Forest, Fronts, start_of
from specbeam.core.steps import Array, compiled_as, step
from specbeam.laws.joint import HEAD, JointLaw, head_of, joint_law, likeliest_pairs, odds_at
from specbeam.laws.ranking import Truncation, cuts, sorted_places

DEEPEST = 8  # the most drafted layers that values are known for
GUESS = 0.6  # prior probability that a layer passes
WEIGHT = 3.0  # number of layers that a prior counts for
BY_THRESHOLD, BY_VALUE = range(2)


class FixedWidths(NamedTuple):
    """The numbers of a `FixedWidth`: every layer has `most` draws."""

    most: int


class ChosenWidths(NamedTuple):
    """How the width of a layer is chosen: the widest that is accepted with enough probability, or that of most value."""

    kind: int  # BY_THRESHOLD or BY_VALUE
    most: int
    least: int
    threshold: float
    by_noise: bool  # True: draft and target share noise; False: drafts are tried
    noise: Array  # float64[races, entrants], see `control.races`
    values: Values


@dataclass(frozen=True, eq=False)
class WidthContext:
    """What the width of a drafted layer may depend on: the laws of the layer, never its draws."""

    law: JointLaw  # of the target, over the live beams
    live: Beams
    forest: Forest
    number: int  # of the layer, from 0 on
    planned: int  # number of layers that the turn was to draft

    @property
    def drafted(self) -> int:
        """The number of drafts of the layer."""
        ends = self.forest.siblings.draw_ends
        return int(ends[self.number] - start_of(ends, self.number))

    @property
    def left(self) -> int:
        """The number of layers that were to be drafted from this one on, at least 1."""
        return max(self.planned - self.number, 1)

    def odds(self, most: int, by_noise: bool = True) -> Float64[np.ndarray, " widths"]:
        """Return the probabilities that 0, 1, 2, ... draws are all accepted drafts.

        Args:
            most: the most draws.
            by_noise: whether draft and target share noise; otherwise drafts are tried.
        """
        if by_noise:
            return self.by_drafts(self.drafted, most)[:, self.drafted]
        return odds_when_tried(self.law, self.live, self.forest, self.number)

    def by_drafts(self, drafts: int, most: int) -> Float64[np.ndarray, "widths drafts"]:
        """Return the probabilities that 0, 1, ... draws are all among 0, 1, ..., `drafts` drafts, under shared noise."""
        return odds_when_shared(self.law, self.live, self.forest, self.number, drafts, most, RACE_NOISE)


@runtime_checkable
class Width(Protocol):
    """A policy that chooses the width of drafted layers. A policy that steps do not know decides in Python, by `choose`."""

    @property
    def most(self) -> int:
        """The most draws of a layer."""
        ...

    def choose(self, layer: WidthContext) -> int:
        """Return the number of draws of a drafted layer."""
        ...


@dataclass(frozen=True)
class FixedWidth:
    """A policy that gives every layer the same number of draws."""

    most: int

    def choose(self, layer: WidthContext) -> int:
        """Return the number of draws of a drafted layer."""
        return self.most


@dataclass(frozen=True)
class SureWidth:
    """A policy that takes the widest layer that is accepted in full with a probability of at least `threshold`.

    Source: DSBD (arXiv 2409.16560, eq. 5).

    Args:
        most, least: number of draws.
    """

    most: int
    least: int = 1
    threshold: float = 0.7

    def choose(self, layer: WidthContext) -> int:
        """Return the number of draws of a drafted layer."""
        return int(widest(layer.odds(self.most), self.threshold, self.least, self.most))


@dataclass(frozen=True)
class ValuedWidth:
    """A policy that takes the width of most value: argmax over w of gain(w) + odds(w) V(k - 1).

    Here k is the number of layers that were to be drafted from this one on, gain(w) = 1 + `worth` log2(w) is the gain of a
    layer of w beams, in layers of one beam, and odds(w) is the probability that it is accepted in full. V(k - 1) is what the
    turn gains after the layer if it passes: V(0) is the gain of the layer after the draft, V(k) is the mean, over all layers
    judged so far, of the maximum above. A threshold narrows all layers alike; this policy narrows layers that have much to
    come after them, and those whose acceptance depends much on the width.

    Args:
        most, least: number of draws.
        worth: gain of doubling the number of beams, in layers of one beam.
        drafts: the most drafts of a layer that values are known for.
    """

    most: int
    least: int = 1
    worth: float = 2.0
    drafts: int = 8

    def choose(self, layer: WidthContext) -> int:
        """Return the number of draws by the prior alone, without what a session has learnt."""
        odds = layer.by_drafts(self.drafts, self.most)
        return int(choose_most_valued(self.values({}), odds, layer.drafted, layer.left, self.least))

    def values(self, memory: dict[Hashable, Any]) -> Values:
        """Return what a session has learnt so far; `memory` is the state of the session, in which it is stored."""
        if self not in memory:
            memory[self] = Values(self._prior.copy(), np.full(1, WEIGHT), float(self.worth))
        values: Values = memory[self]
        return values

    @cached_property
    def _prior(self) -> Float64[np.ndarray, "depths drafts"]:
        """The prior of `Values.sums`, fitted on the bundled pair.

        A layer is about sqrt(most) wide. Each further drafted layer adds less, and the less the fewer drafts it has.
        """
        drafts = np.arange(self.drafts + 1)
        few = self.most + 2
        first = np.where(drafts > 0, 1 - 0.4 / np.maximum(drafts, 1) ** 0.8, 0.0)
        more = 0.33 + 0.5 * np.minimum(drafts / few, 1.0)
        after = np.cumsum([np.zeros_like(first), *(first * more**depth for depth in range(DEEPEST))], axis=0)
        sums = (1 + self.worth * np.log2(self.most) / 2) * (1 + after)
        return WEIGHT * sums


def width_spec(width: Width, memory: dict[Hashable, Any], by_noise: bool) -> "FixedWidths | ChosenWidths | Width":
    """Return how steps choose the widths of a session; a policy that steps do not know is returned as it is.

    Args:
        memory: the state of the session.
        by_noise: whether draft and target share noise; otherwise drafts are tried.
    """
    if type(width) is FixedWidth:
        return FixedWidths(width.most)
    if type(width) is SureWidth:
        threshold = float(width.threshold)
        return ChosenWidths(BY_THRESHOLD, width.most, width.least, threshold, by_noise, RACE_NOISE, NO_VALUES)
    if type(width) is ValuedWidth:
        return ChosenWidths(BY_VALUE, width.most, width.least, 0.0, by_noise, RACE_NOISE, width.values(memory))
    return width


def asked_width(widths: Any, law: JointLaw, live: Beams, forest: Forest, number: int, planned: int) -> int:
    """Return the number of draws that drafted layer `number` gets.

    Args:
        widths: `FixedWidths`, `ChosenWidths`, or a policy that decides in Python.
        law: of the target, over the live beams.
        planned: number of layers that the turn was to draft. A width must not depend on how many it has drafted, because
            that depends on later draws.
    """
    if isinstance(widths, FixedWidths):
        return widths.most
    if isinstance(widths, ChosenWidths):
        return choose_width(widths, law, live, forest, number, planned)
    return widths.choose(WidthContext(law, live, forest, number, planned))


@compiled_as(asked_width)
def _compiled_asked_width(widths: Any, law: Any, live: Any, forest: Any, number: Any, planned: Any) -> Any:
    if widths.instance_class is FixedWidths:
        return lambda widths, law, live, forest, number, planned: widths.most
    return choose_width


class LearntWidths(NamedTuple):
    """A copy of what a session had learnt about widths before a turn."""

    sums: Array
    count: Array


def save_widths(widths: Any) -> LearntWidths:
    """Return a copy of what has been learnt about widths; empty arrays if nothing is learnt."""
    if isinstance(widths, ChosenWidths):
        return LearntWidths(widths.values.sums.copy(), widths.values.count.copy())
    return LearntWidths(np.zeros((0, 1)), np.ones(1))


def restore_widths(widths: Any, saved: LearntWidths) -> None:
    """Set what has been learnt about widths back to a copy that `save_widths` returned."""
    if isinstance(widths, ChosenWidths):
        widths.values.sums[:] = saved.sums
        widths.values.count[:] = saved.count


@step
def _restore_values(widths: ChosenWidths, saved: LearntWidths) -> None:
    """Set the learnt values back to a copy that `save_widths` returned."""
    widths.values.sums[:] = saved.sums
    widths.values.count[:] = saved.count


@compiled_as(save_widths)
def _compiled_save_widths(widths: Any) -> Any:
    if widths.instance_class is FixedWidths:
        return lambda widths: LearntWidths(np.zeros((0, 1)), np.ones(1))
    return lambda widths: LearntWidths(widths.values.sums.copy(), widths.values.count.copy())


@compiled_as(restore_widths)
def _compiled_restore_widths(widths: Any, saved: Any) -> Any:
    if widths.instance_class is FixedWidths:
        return lambda widths, saved: None
    return _restore_values


@step
def widest(odds: Array, threshold: float, least: int, most: int) -> int:
    """Return the largest width whose odds are at least `threshold`, but at least `least` and at most `most`."""
    sure = 0
    for width in range(len(odds)):
        if odds[width] >= threshold:
            sure = width
    return min(max(sure, least), most)


@step
def choose_width(spec: ChosenWidths, law: JointLaw, live: Beams, forest: Forest, number: int, planned: int) -> int:
    """Return the number of draws of drafted layer `number`, as `spec` chooses it; see `asked_width`."""
    ends = forest.siblings.draw_ends
    drafts = ends[number] - start_of(ends, number)
    left = max(planned - number, 1)
    if spec.kind == BY_VALUE:
        counted = spec.values.sums.shape[1] - 1
        odds = odds_when_shared(law, live, forest, number, counted, spec.most, spec.noise)
        return choose_most_valued(spec.values, odds, drafts, left, spec.least)
    if spec.by_noise:
        shared = odds_when_shared(law, live, forest, number, drafts, spec.most, spec.noise)
        return widest(shared[:, drafts], spec.threshold, spec.least, spec.most)
    return widest(odds_when_tried(law, live, forest, number), spec.threshold, spec.least, spec.most)


@step
def draft_law(fronts: Fronts, number: int, truncation: Truncation) -> JointLaw:
    """Return the draft law that layer `number` of a draft was chosen from, over the beams of its front."""
    start = start_of(fronts.row_ends, number)
    stop = fronts.row_ends[number]
    rows = fronts.logits[start:stop]
    return joint_law(rows, fronts.scores[start:stop], fronts.counts[start:stop], truncation)


@step
def _beams_of_rows(nodes: Array, live: Beams) -> tuple[Array, Array]:
    """Return the index in `nodes` of each live beam, and the live beam at each of `nodes`; -1 for none."""
    row_of = np.full(len(live.nodes), -1, dtype=np.int64)
    beam_of = np.full(len(nodes), -1, dtype=np.int64)
    for beam in range(len(live.nodes)):
        for row in range(len(nodes)):
            if nodes[row] == live.nodes[beam]:
                row_of[beam] = row
                beam_of[row] = beam
    return row_of, beam_of


@step
def _odds_at(pairs: Array, odds: Array, pair: int) -> float:
    """Return the entry of `odds` for a pair, where `pairs` ascend; 0 if the pair is not among them."""
    place = np.searchsorted(pairs, pair)
    if place < len(pairs) and pairs[place] == pair:
        return odds[place]
    return 0.0


@step
def odds_when_shared(
    law: JointLaw, live: Beams, forest: Forest, number: int, drafts: int, most: int, noise: Array
) -> Array:
    """Return the probabilities that 0, 1, ... draws are among 0, 1, ..., `drafts` drafts of a layer, under shared noise.

    Returns float64[widths, drafts + 1].
    """
    fronts = forest.fronts
    vocab = law.logits.shape[1]
    draft = draft_law(fronts, number, law.truncation)
    own_vocab = draft.logits.shape[1]
    nodes = fronts.nodes[start_of(fronts.row_ends, number) : fronts.row_ends[number]]
    row_of, beam_of = _beams_of_rows(nodes, live)
    if not cuts(law.truncation):
        return _odds_of_whole_laws(law, draft, row_of, drafts, most, noise)
    target_pairs, target_odds = head_of(law)
    draft_pairs, draft_odds = head_of(draft)
    # The most probable drafts come first: in this order the extra pairs of a layer are chosen.
    likeliest = likeliest_pairs(draft, drafts + most)
    pairs = np.empty(len(likeliest) + len(target_pairs), dtype=np.int64)
    count = 0
    for pair in likeliest:
        beam = beam_of[pair // own_vocab]
        if beam >= 0 and pair % own_vocab < vocab:
            pairs[count] = beam * vocab + pair % own_vocab
            count += 1
    from_draft = count
    for pair in target_pairs:
        if not (pairs[:from_draft] == pair).any():
            pairs[count] = pair
            count += 1
    p = np.zeros(count)
    q = np.zeros(count)
    for place in range(count):
        p[place] = _odds_at(target_pairs, target_odds, pairs[place])
        row = row_of[pairs[place] // vocab]
        token = pairs[place] % vocab
        if row >= 0 and token < own_vocab:
            q[place] = _odds_at(draft_pairs, draft_odds, row * own_vocab + token)
    if count > ENTRANTS:
        entrants = np.sort(sorted_places(p)[:ENTRANTS])
        p = p[entrants]
        q = q[entrants]
    return odds_by_drafts(p, q, drafts, most, 0.0, np.arange(len(p)), noise)


@step
def _odds_of_whole_laws(law: JointLaw, draft: JointLaw, row_of: Array, drafts: int, most: int, noise: Array) -> Array:
    """Return `odds_when_shared` for laws without truncation, from races of the most probable pairs of the target."""
    vocab = law.logits.shape[1]
    own_vocab = draft.logits.shape[1]
    pairs = likeliest_pairs(law, ENTRANTS)
    p = odds_at(law, pairs)
    near = np.sort(pairs[p >= p[0] * np.exp(-HEAD)])
    p = odds_at(law, near)
    q = np.zeros(len(near))
    known = np.full(len(near), -1, dtype=np.int64)
    for place in range(len(near)):
        row = row_of[near[place] // vocab]
        token = near[place] % vocab
        if row >= 0 and token < own_vocab:
            known[place] = row * own_vocab + token
    places = np.flatnonzero(known >= 0)
    q[places] = odds_at(draft, known[places])
    return odds_by_drafts(p, q, drafts, most, max(1.0 - q.sum(), 0.0), np.arange(0), noise)


@step
def odds_when_tried(law: JointLaw, live: Beams, forest: Forest, number: int) -> Array:
    """Return the probabilities that at least 0, 1, ... drafts of a layer are accepted if they are tried, float64[widths]."""
    groups = forest.siblings
    vocab = law.logits.shape[1]
    nodes = groups.parents[start_of(groups.parent_ends, number) : groups.parent_ends[number]]
    row_of, _ = _beams_of_rows(nodes, live)
    start = start_of(groups.law_ends, number)
    draft_pairs = groups.law_pairs[start : groups.law_ends[number]]
    draft_odds = groups.law_odds[start : groups.law_ends[number]]
    pairs, p = head_of(law)
    q = np.zeros(len(pairs))
    for place in range(len(pairs)):
        row = row_of[pairs[place] // vocab]
        token = pairs[place] % vocab
        if row >= 0 and token < groups.vocab:
            q[place] = _odds_at(draft_pairs, draft_odds, row * groups.vocab + token)
    drafts = groups.draw_ends[number] - start_of(groups.draw_ends, number)
    return odds_of_rejection(p, q, drafts)
