"""PLAN, within a turn: the number of draws of the next layer, chosen before its drafts are judged."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from specbeam.core.beams import Beams
from specbeam.core.control.races import ENTRANTS, RACE_NOISE, odds_by_drafts, odds_of_rejection
from specbeam.core.forest import Forest, FrontierRows, start_of
from specbeam.core.laws.joint import (
    HEAD,
    JointLaw,
    head_of,
    joint_law,
    likeliest_pairs,
    log_masses,
    log_weights_at,
    named_pairs,
    odds_among,
    odds_at,
    support_of,
    token_of,
)
from specbeam.core.laws.ranking import Truncation, ascending, cuts, sorted_places
from specbeam.core.laws.rows import place_in
from specbeam.core.ranked import are_whole, rows_between
from specbeam.core.steps import Array, step, verb

UNKNOWN_WIDTH = -1  # in place of a width that depends on missing rows
MARGIN = 1e-4  # exceeds the rounding error of a share of a law


class FixedWidths(NamedTuple):
    """A `FixedWidth` for steps: every layer has `most` draws."""

    most: int


class NucleusWidths(NamedTuple):
    """A `NucleusWidth` for steps."""

    most: int
    least: int
    mass: float


class SureWidths(NamedTuple):
    """A `SureWidth` for steps."""

    most: int
    least: int
    threshold: float
    by_noise: bool  # True: draft and target share noise; False: drafts are tried
    noise: Array  # float64[races, entrants], see `control.races`


@dataclass(frozen=True, eq=False)
class WidthContext:
    """The information on which a layer's width may depend: the laws of the layer, never its draws."""

    law: JointLaw  # law of the target over the live beams
    live: Beams
    forest: Forest
    number: int  # number of the layer, from 0

    @property
    def drafted(self) -> int:
        """The number of drafts of the layer; 0 for a layer after the drafts."""
        ends = self.forest.siblings.draw_ends
        if self.number >= len(ends):
            return 0
        return int(ends[self.number] - start_of(ends, self.number))

    def odds(self, most: int, by_noise: bool = True) -> Float64[np.ndarray, " widths"]:
        """Return the probabilities that 0, 1, 2, ... draws are all accepted drafts.

        Args:
            most: maximum number of draws.
            by_noise: whether draft and target share noise; otherwise drafts are tried.
        """
        if by_noise:
            drafts = self.drafted
            return odds_when_shared(self.law, self.live, self.forest, self.number, drafts, most, RACE_NOISE)[:, drafts]
        return odds_when_tried(self.law, self.live, self.forest, self.number)


@runtime_checkable
class Width(Protocol):
    """A policy that chooses the width of drafted layers. Policies without compiled steps decide in Python, by `choose`.

    Optional attribute: `ignores_drafts`, whether widths are a function of the target's law alone. Such a policy chooses the
    width of every layer, drafted or not, so texts do not depend on the drafts.
    """

    @property
    def most(self) -> int:
        """The maximum number of draws of a layer."""
        ...

    def choose(self, layer: WidthContext) -> int:
        """Return the number of draws of a drafted layer."""
        ...


@dataclass(frozen=True)
class FixedWidth:
    """A policy that gives every layer the same number of draws."""

    most: int

    ignores_drafts: ClassVar[bool] = True

    def choose(self, layer: WidthContext) -> int:
        """Return the number of draws of a drafted layer."""
        return self.most

    def spec(self, by_noise: bool) -> FixedWidths:
        """Return the policy for steps; see `width_spec`."""
        return FixedWidths(self.most)


@dataclass(frozen=True)
class SureWidth:
    """A policy that chooses the widest layer that is accepted in full with a probability of at least `threshold`.

    Source: DSBD (arXiv 2409.16560, eq. 5).

    Args:
        most, least: maximum and minimum number of draws.
    """

    most: int
    least: int = 1
    threshold: float = 0.7

    def choose(self, layer: WidthContext) -> int:
        """Return the number of draws of a drafted layer."""
        return int(widest(layer.odds(self.most), self.threshold, self.least, self.most))

    def spec(self, by_noise: bool) -> SureWidths:
        """Return the policy for steps; see `width_spec`."""
        return SureWidths(self.most, self.least, float(self.threshold), by_noise, RACE_NOISE)


@dataclass(frozen=True)
class NucleusWidth:
    """A policy that chooses the smallest number of most probable pairs that hold `mass` of the joint law.

    Layers are narrow where the target's law is concentrated. The width depends on the target's law alone, so the beams are
    the same with and without drafts.

    Args:
        most, least: maximum and minimum number of draws.
        mass: a probability.
    """

    most: int
    least: int = 1
    mass: float = 0.9

    ignores_drafts: ClassVar[bool] = True

    def choose(self, layer: WidthContext) -> int:
        """Return the number of draws of a layer."""
        return int(nucleus_width(NucleusWidths(self.most, self.least, self.mass), layer.law))

    def spec(self, by_noise: bool) -> NucleusWidths:
        """Return the policy for steps; see `width_spec`."""
        return NucleusWidths(self.most, self.least, float(self.mass))


def is_for_steps(widths: object) -> bool:
    """Return whether steps choose these widths."""
    return asked_width.has_step(type(widths))


def ignores_drafts(width: Width) -> bool:
    """Return whether the widths of a policy are functions of the target's law alone.

    A subclass of a policy may choose differently, so it must define `ignores_drafts` itself.
    """
    says = "ignores_drafts" in vars(type(width)) or "ignores_drafts" in getattr(width, "__dict__", {})
    return says and bool(getattr(width, "ignores_drafts", False))


def width_spec(width: Width, by_noise: bool) -> Any:
    """Return the record with which steps choose widths, or the policy itself if it chooses in Python.

    A policy for steps has a method `spec(by_noise)`. A subclass that overrides `choose` without `spec` chooses in Python.

    Args:
        by_noise: whether draft and target share noise; otherwise drafts are tried.
    """
    for kind in type(width).__mro__:
        if "choose" in vars(kind):
            return width.spec(by_noise) if "spec" in vars(kind) else width  # type: ignore[attr-defined]
    return width


@verb(0)
def asked_width(widths: Any, law: JointLaw, live: Beams, forest: Forest, number: int) -> int:
    """Return the number of draws of layer `number`, which may come after the drafts.

    Args:
        widths: the record of a policy for steps, or a policy that decides in Python.
        law: law of the target over the live beams.
    """
    is_drafted = number < forest.siblings.size
    if not is_drafted and not ignores_drafts(widths):
        return int(widths.most)
    return int(widths.choose(WidthContext(law, live, forest, number)))


@asked_width.of(FixedWidths)
def fixed_width(widths: FixedWidths, law: JointLaw, live: Beams, forest: Forest, number: int) -> int:
    """Return the same width for every layer; see `asked_width`."""
    return widths.most


@asked_width.of(NucleusWidths)
def width_by_nucleus(widths: NucleusWidths, law: JointLaw, live: Beams, forest: Forest, number: int) -> int:
    """Return the width of the nucleus of the law; see `asked_width`."""
    return nucleus_width(widths, law)


@asked_width.of(SureWidths)
def width_if_drafted(widths: SureWidths, law: JointLaw, live: Beams, forest: Forest, number: int) -> int:
    """Return the width by acceptance odds, or the maximum width after the drafts; see `asked_width`."""
    if number < len(forest.siblings.kinds):
        return sure_width(widths, law, live, forest, number)
    return widths.most


@verb(0)
def width_of_known(widths: Any, law: JointLaw, unknown: Beams) -> int:
    """Return the number of draws of a layer without the rows of some live beams; UNKNOWN_WIDTH if it depends on these rows.

    Args:
        law: law of the other live beams, without truncation, at a temperature of at most 1.
        unknown: the live beams without rows.
    """
    return UNKNOWN_WIDTH


@width_of_known.of(FixedWidths)
def fixed_width_of_known(widths: FixedWidths, law: JointLaw, unknown: Beams) -> int:
    """Return the same width for every layer; see `width_of_known`."""
    return widths.most


@verb(0)
def width_by_draft(widths: Any, law: JointLaw) -> int:
    """Return the expected number of draws of a layer, estimated from the draft model's law."""
    return widths.most


@step
def _fewest(weights: Array, total: float, widths: NucleusWidths) -> int:
    """Return the number of largest weights that hold `widths.mass` of a total, between `least` and `most`."""
    held = 0.0
    count = 0
    while count < min(widths.most, len(weights)) and held < widths.mass * total:
        held += weights[count]
        count += 1
    return max(count, widths.least)


@width_by_draft.of(NucleusWidths)
@step
def nucleus_width(widths: NucleusWidths, law: JointLaw) -> int:
    """Return the number of the most probable pairs that hold `mass` of a joint law, between `least` and `most`."""
    if cuts(law.truncation):
        kept = odds_among(law, support_of(law))
        return _fewest(np.sort(kept)[::-1], 1.0, widths)
    return _fewest(odds_at(law, likeliest_pairs(law, widths.most)), 1.0, widths)


@step
def _sums(weights: Array) -> Array:
    """Return the sums of the first 0, 1, 2, ... weights, float64[weights + 1]."""
    sums = np.zeros(len(weights) + 1)
    for place in range(len(weights)):
        sums[place + 1] = sums[place] + weights[place]
    return sums


@step
def _largest_share(known: Array, total: float, unknown: Array, width: int) -> float:
    """Return the largest share of a law that its `width` most probable pairs can hold.

    Args:
        known: sums of the most probable pairs of the known beams, from `_sums`.
        total: weight of all pairs of the known beams.
        unknown: sums of the largest bounds of the other beams, from `_sums`.
    """
    share = 0.0
    for others in range(min(width, len(unknown) - 1) + 1):
        held = unknown[others] + known[min(width - others, len(known) - 1)]
        share = max(share, held / (total + unknown[others]))
    return share


@width_of_known.of(NucleusWidths)
@step
def nucleus_width_of_known(widths: NucleusWidths, law: JointLaw, unknown: Beams) -> int:
    """Return `nucleus_width` for the law of all live beams; UNKNOWN_WIDTH if it depends on the unknown beams.

    For each unknown beam only an upper bound of the weight of its pairs is known. The share of the most probable pairs is
    smallest if each unknown beam has this weight, spread over many pairs. It is largest if some of them have all of it
    on a single pair, and the others have weight 0.
    """
    temperature = law.truncation.temperature
    pairs = likeliest_pairs(law, widths.most)
    best = log_weights_at(law, pairs)
    masses = log_masses(law)
    bounds = unknown.scores / temperature + np.log(unknown.counts)
    top = max(masses.max(), bounds.max())
    known = np.exp(best - top)
    in_known = np.exp(masses - top).sum()
    in_unknown = np.sort(np.exp(bounds - top))[::-1]
    above = NucleusWidths(widths.most, widths.least, widths.mass + MARGIN)
    total = in_known + in_unknown.sum()
    widest_of_all = _fewest(known, total, above)
    if len(known) < widths.most and known.sum() < above.mass * total:  # unknown beams may have more pairs
        widest_of_all = widths.most
    sums_of_known = _sums(known)
    sums_of_unknown = _sums(in_unknown)
    for width in range(widths.least, widest_of_all):
        if _largest_share(sums_of_known, in_known, sums_of_unknown, width) >= widths.mass - MARGIN:
            return UNKNOWN_WIDTH
    return widest_of_all


@step
def widest(odds: Array, threshold: float, least: int, most: int) -> int:
    """Return the largest width with odds of at least `threshold`, between `least` and `most`."""
    sure = 0
    for width in range(len(odds)):
        if odds[width] >= threshold:
            sure = width
    return min(max(sure, least), most)


@step
def sure_width(widths: SureWidths, law: JointLaw, live: Beams, forest: Forest, number: int) -> int:
    """Return the widest drafted layer that is accepted in full with the required probability."""
    if widths.by_noise:
        ends = forest.siblings.draw_ends
        drafts = ends[number] - start_of(ends, number)
        shared = odds_when_shared(law, live, forest, number, drafts, widths.most, widths.noise)
        return widest(shared[:, drafts], widths.threshold, widths.least, widths.most)
    return widest(odds_when_tried(law, live, forest, number), widths.threshold, widths.least, widths.most)


@step
def draft_law(frontier_rows: FrontierRows, number: int, truncation: Truncation) -> JointLaw:
    """Return the draft law that layer `number` of a draft was chosen from, over the beams of its frontier."""
    start = start_of(frontier_rows.row_ends, number)
    stop = frontier_rows.row_ends[number]
    rows = rows_between(frontier_rows.rows, start, stop)
    return joint_law(rows, frontier_rows.scores[start:stop], frontier_rows.counts[start:stop], truncation)


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
def named_head_of(law: JointLaw) -> tuple[Array, Array]:
    """Return `head_of`, with pairs as numbers beam * vocabulary size + token."""
    pairs, odds = head_of(law)
    return named_pairs(law, pairs), odds


@step
def odds_when_shared(
    law: JointLaw, live: Beams, forest: Forest, number: int, drafts: int, most: int, noise: Array
) -> Array:
    """Return the probabilities that 0, 1, ... draws are among 0, 1, ..., `drafts` drafts of a layer, under shared noise.

    Returns float64[widths, drafts + 1].
    """
    frontier_rows = forest.frontier_rows
    vocab = law.rows.vocab
    draft = draft_law(frontier_rows, number, law.truncation)
    own_vocab = draft.rows.vocab
    nodes = frontier_rows.nodes[start_of(frontier_rows.row_ends, number) : frontier_rows.row_ends[number]]
    row_of, beam_of = _beams_of_rows(nodes, live)
    if not cuts(law.truncation):
        return _odds_of_whole_laws(law, draft, row_of, drafts, most, noise)
    target_pairs, target_odds = named_head_of(law)
    draft_pairs, draft_odds = named_head_of(draft)
    # Most probable drafts first: the order in which the extra pairs of a layer are chosen.
    likeliest = named_pairs(draft, likeliest_pairs(draft, drafts + most))
    law.undecided[0] |= draft.undecided[0]
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
        entrants = ascending(sorted_places(p)[:ENTRANTS])
        p = p[entrants]
        q = q[entrants]
    return odds_by_drafts(p, q, drafts, most, 0.0, np.arange(len(p)), noise)


@step
def _odds_of_whole_laws(law: JointLaw, draft: JointLaw, row_of: Array, drafts: int, most: int, noise: Array) -> Array:
    """Return `odds_when_shared` for laws without truncation, from races of the most probable pairs of the target."""
    columns = law.rows.logits.shape[1]
    own_columns = draft.rows.logits.shape[1]
    pairs = likeliest_pairs(law, ENTRANTS)
    p = odds_at(law, pairs)
    near = ascending(pairs[p >= p[0] * np.exp(-HEAD)])
    p = odds_at(law, near)
    q = np.zeros(len(near))
    known = np.full(len(near), -1, dtype=np.int64)
    for place in range(len(near)):
        row = row_of[near[place] // columns]
        token = token_of(law, near[place])
        if row >= 0 and token < draft.rows.vocab:
            own_place = place_in(draft.rows.tokens[row], token) if not are_whole(draft.rows) else token
            draft.undecided[0] |= own_place < 0
            known[place] = row * own_columns + own_place if own_place >= 0 else -1
    places = np.flatnonzero(known >= 0)
    q[places] = odds_at(draft, known[places])
    law.undecided[0] |= draft.undecided[0]
    return odds_by_drafts(p, q, drafts, most, max(1.0 - q.sum(), 0.0), np.arange(0), noise)


@step
def odds_when_tried(law: JointLaw, live: Beams, forest: Forest, number: int) -> Array:
    """Return the probabilities that at least 0, 1, ... drafts of a layer are accepted if they are tried, float64[widths]."""
    groups = forest.siblings
    vocab = law.rows.vocab
    nodes = groups.parents[start_of(groups.parent_ends, number) : groups.parent_ends[number]]
    row_of, _ = _beams_of_rows(nodes, live)
    start = start_of(groups.law_ends, number)
    draft_pairs = groups.law_pairs[start : groups.law_ends[number]]
    draft_odds = groups.law_odds[start : groups.law_ends[number]]
    pairs, p = named_head_of(law)
    q = np.zeros(len(pairs))
    for place in range(len(pairs)):
        row = row_of[pairs[place] // vocab]
        token = pairs[place] % vocab
        if row >= 0 and token < groups.vocab:
            q[place] = _odds_at(draft_pairs, draft_odds, row * groups.vocab + token)
    drafts = groups.draw_ends[number] - start_of(groups.draw_ends, number)
    return odds_of_rejection(p, q, drafts)
