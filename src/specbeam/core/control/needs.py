"""PLAN: the drafts that the target scores, chosen by the odds that their rows are needed and by the cost of a row.

With or without drafts, the target must score the row of every live beam that decides a layer. If rows are kept from turn to
turn, it scores each of them once, so the speed of decoding is the number of *needed* rows scored per second.
Wherever a draft is in the forest, scoring it pays if its odds of being needed exceed this speed times the seconds that
its row adds to the pass.
"""

import time
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from specbeam.core.beams import Beams, Layers, depth_of
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.control.cost import CostCurve, HostCost
from specbeam.core.control.pace import NO_DRAFTS, PaceMemory, enter_pace, has_drafts, leave_pace
from specbeam.core.control.planning import Plan, plan_of_shape
from specbeam.core.forest import Forest, depths_of, find_child, nodes_without, start_of, unknown_nodes
from specbeam.core.laws.ranking import sorted_places
from specbeam.core.measure.saved_figures import Figures, NumberField, RecordFields
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, step

# Borders between the cells of margins. Drafts on the edge itself, with a margin of 0, have their own cell.
EDGES = np.array([-3.0, -2.0, -1.0, -0.5, -1e-9, 0.0, 0.5, 1.0, 2.0, 3.0])
MARGINS = len(EDGES) + 1
STEPS = 4  # classes of the number of draft laws on a path: 0, 1, 2, more
# The first cell of drafts that the draft's truncation cuts; there is one cell per number of draft laws.
CUT = STEPS * MARGINS
CELLS = CUT + STEPS
UNSURE = MARGINS  # cell of beams with an unknown margin, in `Odds.needed`
HITS, TRIALS = range(2)
GROWTH = 0.75  # prior of the odds of a layer as a share of those of the layer above
DEPTHS = 4  # classes of depths for growth: 1, 2, 3, more
FORGET = 0.98  # weight of earlier turns in the growth after each turn
LEAST_GAIN = 1.05  # a layer is drafted if it multiplies the expected speed by at least this factor
MOST_TRIALS = 400.0  # maximum weight of a cell; older trials count less
KEEP_EVERY_S = 5.0  # minimum seconds between two writes to disk
FADE = 0.02  # weight of the prior of growth in a turn without a layer of this depth


@borrowed
class Odds(NamedTuple):
    """Odds of drafts, learned from past turns: hits and trials, float64[cells, 2]."""

    live: Array  # drafts that became live beams, given live parents; cells as in `live_cell`
    needed: Array  # live beams whose row decided a layer; cells as in `margin_cell`, or UNSURE
    growth: (
        Array  # sums of the odds of being needed of drafted layers, and of the layers above them, by depth from 1 on
    )


def _are_odds(record: dict[str, Any]) -> bool:
    """Return whether each cell has trials, and each counted cell at most as many hits."""
    cells = [cell for name in Odds._fields for cell in record[name]]
    counted = record["live"] + record["needed"]
    return all(cell[TRIALS] > 0 for cell in cells) and all(cell[HITS] <= cell[TRIALS] + 1e-6 for cell in counted)


_COUNTS = MOST_TRIALS * (1 + 1e-6)
_ODDS = Figures(
    "odds",
    RecordFields(
        {
            "live": NumberField((CELLS, 2), most=_COUNTS),
            "needed": NumberField((MARGINS + 1, 2), most=_COUNTS),
            "growth": NumberField((DEPTHS, 2), most=1e6),
        },
        _are_odds,
    ),
)


@borrowed
class Budget(NamedTuple):
    """The costs and odds by which drafts grow and are cut."""

    target_s: Array  # float64[rows + 1]: seconds of the target's pass by number of rows; empty: drafts are not cut
    draft_s: Array  # float64[rows + 1]: seconds of a draft layer by number of rows that the draft model scores
    turn_s: float  # seconds of a turn outside the models
    lazy: bool  # whether layers can be decided without the rows of beams that cannot win
    odds: Odds


class NodeOdds(NamedTuple):
    """The odds of the nodes of a forest while it is drafted; 0 for nodes without information."""

    live: Array  # float64[nodes]: odds that the node becomes a live beam
    needed: Array  # float64[nodes]: odds that its row decides a layer
    live_cells: Array  # int64[nodes]: cell in `Odds.live`; -1 for roots and nodes that were not drafted in this turn
    needed_cells: Array  # int64[nodes]: cell in `Odds.needed`
    steps: Array  # int64[nodes]: number of draft laws on the path
    bounds: Array  # float64[nodes]: upper bound of the values of pairs that extend the node, see `laws.joint.bound_of`
    dropped: Array  # int64[3, n]: parent, token and cell in `Odds.live` of drafts that got no node
    draft_s: float  # seconds of drafting so far


class DraftedPairs(NamedTuple):
    """The (beam, token) pairs of a drafted layer."""

    parents: Array  # int64[pairs]: index of the beam that each pair extends
    values: Array  # float64[pairs]: values of the pairs; -inf for pairs that the draft's truncation cuts
    bounds: Array  # float64[pairs]: see `NodeOdds`
    nodes: Array  # int64[pairs]: forest nodes of the pairs; -1 for none


def prior_odds(weight: float = 3.0) -> Odds:
    """Return the odds before the first turn, fitted on the bundled pair, with the weight of `weight` trials."""
    middles = np.concatenate(([-4.0], (EDGES[1:] + EDGES[:-1]) / 2, [4.0]))
    live = np.zeros((CELLS, 2))
    for steps in range(STEPS):
        scale = 0.3 if steps == 0 else 0.9
        chances = 1 / (1 + np.exp(-(middles + 0.3 * (steps > 0)) / scale))
        live[steps * MARGINS : (steps + 1) * MARGINS, HITS] = weight * chances
        live[CUT + steps, HITS] = weight * (0.02, 0.04, 0.07, 0.1)[steps]
    live[:, TRIALS] = weight
    needed = np.zeros((MARGINS + 1, 2))
    needed[:MARGINS, HITS] = weight / (1 + np.exp(-middles / 0.7))
    needed[UNSURE, HITS] = 0.6 * weight
    needed[:, TRIALS] = weight
    growth = np.full((DEPTHS, 2), weight)
    growth[:, HITS] *= GROWTH
    return Odds(live, needed, growth)


_NONE = np.zeros((0, 2))
NO_BUDGET = Budget(np.zeros(0), np.zeros(0), 0.0, False, Odds(_NONE, _NONE, _NONE))


@step
def margin_cell(margin: float) -> int:
    """Return the cell of a margin: the difference of a value and the smallest value that survives."""
    cell = 0
    while cell < len(EDGES) and EDGES[cell] < margin:
        cell += 1
    return cell


@step
def live_cell(margin: float, steps: int) -> int:
    """Return the cell of a draft in `Odds.live`.

    Args:
        margin: its value minus the smallest surviving value of its layer; -inf if the draft's truncation cuts it.
        steps: number of draft laws on its path.
    """
    steps = min(steps, STEPS - 1)
    if margin == -np.inf:
        return CUT + steps
    return steps * MARGINS + margin_cell(margin)


@step
def odds_in(cells: Array, cell: int) -> float:
    """Return the learned odds of a cell."""
    return cells[cell, HITS] / cells[cell, TRIALS]


@step
def edge_of(values: Array, weights: Array, beams: int) -> float:
    """Return the expected value of the last of `beams` live beams.

    Args:
        values: float64[n], values of drafts; -inf for drafts that cannot survive.
        weights: float64[n], odds that their parents are live beams.
    """
    reached = 0.0
    edge = np.inf
    for place in sorted_places(values):
        if values[place] == -np.inf or reached >= beams - 1e-9:
            break
        edge = values[place]
        reached += weights[place]
    return edge


@step
def no_node_odds() -> NodeOdds:
    """Return empty odds, for drafts that are not cut."""
    none = np.zeros(0, dtype=np.int64)
    return NodeOdds(np.zeros(0), np.zeros(0), none, none, none, np.zeros(0), np.zeros((3, 0), dtype=np.int64), 0.0)


@step
def root_odds(bounds: Array, nodes: int) -> NodeOdds:
    """Return the odds of a forest before its first layer is drafted. The roots are live beams.

    Args:
        bounds: float64[roots], see `NodeOdds`.
        nodes: number of nodes.
    """
    roots = len(bounds)
    live = np.zeros(nodes)
    live[:roots] = 1.0
    cells = np.full(nodes, -1, dtype=np.int64)
    every = np.full(nodes, -np.inf)
    copy_numbers(every, bounds)
    steps = np.zeros(nodes, dtype=np.int64)
    return NodeOdds(live, live.copy(), cells, cells.copy(), steps, every, np.zeros((3, 0), dtype=np.int64), 0.0)


@step
def with_layer_odds(
    known: NodeOdds, budget: Budget, forest: Forest, frontier: Beams, pairs: DraftedPairs, beams: int
) -> NodeOdds:
    """Return the odds of the nodes of a forest after a layer was added.

    Args:
        known: the odds before the layer.
        forest: the forest with the layer.
        frontier: the beams that the layer extends.
        pairs: the pairs of the layer.
        beams: number of surviving beams.
    """
    size = len(forest.tokens)
    fresh = size - len(known.live)
    no_odds = np.zeros(fresh)
    no_cells = np.full(fresh, -1, dtype=np.int64)
    live = np.concatenate((known.live, no_odds))
    needed = np.concatenate((known.needed, no_odds))
    live_cells = np.concatenate((known.live_cells, no_cells))
    needed_cells = np.concatenate((known.needed_cells, no_cells))
    steps = np.concatenate((known.steps, np.zeros(fresh, dtype=np.int64)))
    every_bound = np.concatenate((known.bounds, np.full(fresh, -np.inf)))
    weights = known.live[frontier.nodes[pairs.parents]]
    edge = edge_of(pairs.values, weights, beams)
    for node in frontier.nodes:
        if budget.lazy and edge < np.inf:
            needed_cells[node] = margin_cell(known.bounds[node] - edge)
            needed[node] = live[node] * odds_in(budget.odds.needed, needed_cells[node])
    drafted = nodes_without(frontier.nodes, forest.known.nodes)
    is_drafted = np.zeros(size, dtype=np.bool_)
    is_drafted[drafted] = True
    for place in range(len(pairs.nodes)):
        node = pairs.nodes[place]
        if node < 0:
            continue
        above = frontier.nodes[pairs.parents[place]]
        every_bound[node] = pairs.bounds[place]
        steps[node] = steps[above] + is_drafted[above]
        live_cells[node] = live_cell(pairs.values[place] - edge, steps[node])
        live[node] = live[above] * odds_in(budget.odds.live, live_cells[node])
        needed[node] = live[node]
        if budget.lazy:
            needed_cells[node] = UNSURE
            needed[node] *= odds_in(budget.odds.needed, UNSURE)
    rows = min(len(drafted), len(budget.draft_s) - 1)
    seconds = known.draft_s + budget.draft_s[rows]
    return NodeOdds(live, needed, live_cells, needed_cells, steps, every_bound, known.dropped, seconds)


@step
def best_count(needs: Array, sure: int, sure_needs: float, budget: Budget, other_s: float) -> tuple[int, float]:
    """Return the number of drafts to score for the most needed rows per second, and this speed.

    Args:
        needs: float64[n], odds of drafts of being needed, descending.
        sure: number of rows that are scored anyway.
        sure_needs: the sum of the odds of these rows.
        other_s: seconds of the turn without the target's pass.
    """
    most = len(budget.target_s) - 1
    total = sure_needs
    count = 0
    top = total / (budget.target_s[min(max(sure, 1), most)] + other_s)
    for place in range(len(needs)):
        total += needs[place]
        rows = sure + place + 1
        if rows > most:
            break
        speed = total / (budget.target_s[rows] + other_s)
        if speed > top:
            top = speed
            count = place + 1
    return count, top


@step
def _capped_needs(forest: Forest, odds: NodeOdds) -> Array:
    """Return the odds of each node of being needed, float64[nodes], at most those of its parent unless its row is known."""
    needs = odds.needed.copy()
    is_known = np.zeros(len(needs), dtype=np.bool_)
    is_known[forest.known.nodes] = True
    for node in range(len(needs)):
        above = forest.parents[node]
        if above >= 0 and not is_known[above]:
            needs[node] = min(needs[node], needs[above])
    return needs


@step
def _sure_and_open(forest: Forest) -> tuple[Array, Array]:
    """Return the nodes without rows: the roots, which the target always scores, and the others."""
    unknown = unknown_nodes(0, len(forest.tokens), forest.known.nodes)
    is_root = forest.parents[unknown] < 0
    return unknown[is_root], unknown[~is_root]


@step
def _chosen_nodes(
    budget: Budget, forest: Forest, needs: Array, sure: Array, others: Array, other_s: float
) -> tuple[Array, float]:
    """Return whether the target should score each node or knows its row, bool[nodes], and the needed rows per second.

    Args:
        needs: float64[nodes], from `_capped_needs`, so that no node is chosen without its parent.
        sure, others: from `_sure_and_open`.
        other_s: seconds of the turn without the target's pass.
    """
    order = sorted_places(needs[others])
    ranked = others[order]
    count, speed = best_count(needs[ranked], len(sure), needs[sure].sum(), budget, other_s)
    is_chosen = np.zeros(len(forest.tokens), dtype=np.bool_)
    is_chosen[forest.known.nodes] = True
    is_chosen[sure] = True
    is_chosen[ranked[:count]] = True
    return is_chosen, speed


@step
def nodes_to_extend(budget: Budget, forest: Forest, odds: NodeOdds, frontier: Array) -> Array:
    """Return whether each node of a draft's frontier gets another layer, bool[frontier]; all False: the draft should end.

    These are nodes that the target knows or would score, because it scores no draft without its parent. The expected need of
    the new rows is that of these nodes times the learned growth.
    """
    needs = _capped_needs(forest, odds)
    sure, others = _sure_and_open(forest)
    seconds = budget.turn_s + odds.draft_s
    is_chosen, speed = _chosen_nodes(budget, forest, needs, sure, others, seconds)
    is_extended = is_chosen[frontier]
    parents = frontier[is_extended]
    fresh = nodes_without(parents, forest.known.nodes)
    if len(fresh) == 0:  # the laws of the frontier are known, so drafting costs almost nothing
        return is_extended
    depth = min(depth_of(forest.parents, frontier[0]), DEPTHS - 1)
    future = np.concatenate((needs[others], odds_in(budget.odds.growth, depth) * needs[parents]))
    seconds += budget.draft_s[min(len(fresh), len(budget.draft_s) - 1)]
    _, faster = best_count(future[sorted_places(future)], len(sure), needs[sure].sum(), budget, seconds)
    if faster <= speed * LEAST_GAIN:
        is_extended[:] = False
    return is_extended


@step
def nodes_to_score(budget: Budget, forest: Forest, odds: NodeOdds) -> Array:
    """Return the nodes of a draft that the target should score or knows, int64[n], ascending, with their parents."""
    needs = _capped_needs(forest, odds)
    sure, others = _sure_and_open(forest)
    is_chosen, _ = _chosen_nodes(budget, forest, needs, sure, others, budget.turn_s + odds.draft_s)
    return np.flatnonzero(is_chosen)


@step
def learn_growth(odds: Odds, node_odds: NodeOdds, forest: Forest, depths: Array) -> None:
    """Count how much the layers of a draft are needed. The counts of layers that were not drafted decay to the prior."""
    is_known = np.zeros(len(depths), dtype=np.bool_)
    is_known[forest.known.nodes] = True
    fresh = np.zeros(depths.max() + 2)
    every = np.zeros(len(fresh))
    for node in range(len(depths)):
        if node_odds.live_cells[node] >= 0 or depths[node] == 0:
            every[depths[node]] += node_odds.needed[node]
            if not is_known[node]:
                fresh[depths[node]] += node_odds.needed[node]
    for depth in range(DEPTHS):
        odds.growth[depth, HITS] *= FORGET
        odds.growth[depth, TRIALS] *= FORGET
        if depth + 1 < len(fresh) and every[depth + 1] > 0:
            odds.growth[depth, HITS] += fresh[depth + 1]
            odds.growth[depth, TRIALS] += every[depth]
        else:
            odds.growth[depth, HITS] += FADE * GROWTH
            odds.growth[depth, TRIALS] += FADE


@step
def _is_drawn(layers: Layers, number: int, node_map: Array, parent: int, token: int) -> bool:
    """Return whether a layer drew a token under a node of the whole draft, as a surviving beam."""
    for draw in range(start_of(layers.draw_ends, number), layers.draw_ends[number]):
        is_it = node_map[layers.parents[draw]] == parent and layers.beams.tokens[draw] == token
        if is_it and not layers.ended[draw]:
            return True
    return False


@step
def odds_of_nodes(odds: NodeOdds, forest: Forest, nodes: Array) -> NodeOdds:
    """Return the odds of some nodes of a forest, ascending. The others must have no children; they become dropped drafts."""
    node_map = np.full(len(forest.tokens), -1, dtype=np.int64)
    for place in range(len(nodes)):
        node_map[nodes[place]] = place
    others = np.flatnonzero(node_map < 0)
    before = odds.dropped.shape[1]
    dropped = np.empty((3, before + len(others)), dtype=np.int64)
    for place in range(before):
        dropped[0, place] = node_map[odds.dropped[0, place]]
        dropped[1, place] = odds.dropped[1, place]
        dropped[2, place] = odds.dropped[2, place]
    for place in range(len(others)):
        node = others[place]
        dropped[0, before + place] = node_map[forest.parents[node]]
        dropped[1, before + place] = forest.tokens[node]
        dropped[2, before + place] = odds.live_cells[node]
    return NodeOdds(
        odds.live[nodes],
        odds.needed[nodes],
        odds.live_cells[nodes],
        odds.needed_cells[nodes],
        odds.steps[nodes],
        odds.bounds[nodes],
        dropped,
        odds.draft_s,
    )


@step
def learn_odds(odds: Odds, node_odds: NodeOdds, forest: Forest, layers: Layers, node_map: Array) -> None:
    """Count the outcomes of the drafts of a turn.

    Args:
        node_odds, forest: the whole draft.
        layers: the decisions of the turn, on the forest that the target scored.
        node_map: int64[n], the node of the whole draft for each node of the scored forest.
    """
    depths = depths_of(forest.parents)
    learn_growth(odds, node_odds, forest, depths)
    is_live = forest.parents < 0
    for number in range(len(layers.draw_ends)):
        edge = layers.edges[number]
        for node in range(len(depths)):
            cell = node_odds.needed_cells[node]
            if depths[node] == number and is_live[node] and cell >= 0 and not np.isnan(edge):
                odds.needed[cell, TRIALS] += 1
                odds.needed[cell, HITS] += node_odds.bounds[node] >= edge
        for draw in range(start_of(layers.draw_ends, number), layers.draw_ends[number]):
            if not layers.ended[draw]:
                above = node_map[layers.parents[draw]]
                node = find_child(forest.tokens, forest.parents, above, layers.beams.tokens[draw])
                if node >= 0:
                    is_live[node] = True
        for node in range(len(depths)):
            cell = node_odds.live_cells[node]
            if depths[node] == number + 1 and cell >= 0 and is_live[forest.parents[node]]:
                odds.live[cell, TRIALS] += 1
                odds.live[cell, HITS] += is_live[node]
        for place in range(node_odds.dropped.shape[1]):
            above = node_odds.dropped[0, place]
            if depths[above] == number and is_live[above]:
                cell = node_odds.dropped[2, place]
                odds.live[cell, TRIALS] += 1
                odds.live[cell, HITS] += _is_drawn(layers, number, node_map, above, node_odds.dropped[1, place])


class OddsMemory:
    """The odds of drafts that the sessions of a pair have learned; a new session starts with them.

    With a key they are saved on disk for later processes. They change the speed, never the texts.

    Args:
        key: JSON values that identify the pair; None: save nothing on disk.
    """

    def __init__(self, key: Any = None) -> None:
        self.key = key
        self._odds: dict[str, Odds] = {}
        self._lock = Lock()
        self._kept_s = -KEEP_EVERY_S
        self._changed: set[str] = set()  # kinds that are not saved yet

    def begin(self, kind: str) -> Odds:
        """Return a copy of the odds for sessions of this kind."""
        with self._lock:
            if kind not in self._odds:
                self._odds[kind] = self._load(kind)
            return Odds(*(cells.copy() for cells in self._odds[kind]))

    def add(self, kind: str, begun: Odds, ended: Odds) -> None:
        """Add the counts that a session learned between two states."""
        with self._lock:
            known = self._odds[kind]
            for cells, before, after in (
                (known.live, begun.live, ended.live),
                (known.needed, begun.needed, ended.needed),
            ):
                cells += after - before
                weights = np.minimum(1.0, MOST_TRIALS / cells[:, TRIALS])  # to adapt to new texts
                cells *= weights[:, None]
            known.growth[:] = ended.growth
            self._changed.add(kind)
            if time.monotonic() - self._kept_s > KEEP_EVERY_S:
                self._keep()

    def _keep(self) -> None:
        """Save changed odds on disk."""
        self._kept_s = time.monotonic()
        for kind in self._changed:
            if self.key is not None:
                cells = self._odds[kind]._asdict()
                _ODDS.keep([self.key, kind], {name: counts.tolist() for name, counts in cells.items()})
        self._changed.clear()

    def _load(self, kind: str) -> Odds:
        """Return the odds on disk, or the prior."""
        prior = prior_odds()
        record = None if self.key is None else _ODDS.load([self.key, kind])
        if record is None:
            return prior
        return Odds(*(np.array(record[name], dtype=float) for name in Odds._fields))


@dataclass(eq=False)
class Learning:
    """The odds that a session learns."""

    kind: str
    begun: Odds
    odds: Odds


@dataclass(frozen=True)
class NodesByNeed:
    """A controller that grows and cuts drafts by the cost of rows and the odds that rows are needed.

    It chooses no shape: of the drafts of all layers, the target scores those with the most needed rows per second (see the
    docstring of this module). It is for rules whose text does not depend on the drafts. The odds are learned from past
    turns of the session.

    Args:
        target, draft: seconds of a pass by number of scored nodes; see `specbeam tune`.
        beams: number of surviving beams.
        width: maximum number of new drafts per layer.
        most: maximum number of layers.
        host: seconds of a turn outside the models.
        memory: the odds that earlier sessions learned.
        paces: the speeds of earlier sessions with and without drafts.
    """

    target: CostCurve
    draft: CostCurve
    beams: int
    width: int
    most: int = 8
    host: HostCost = field(default_factory=HostCost)
    memory: OddsMemory = field(default_factory=OddsMemory, compare=False)
    paces: PaceMemory = field(default_factory=PaceMemory, compare=False)

    def enter(self, session: Session, batch_size: int) -> bool:
        """Return whether a new session drafts. A session whose drafts are traced always does."""
        rule = session.parts.rule
        if not _says(rule, "ignores_drafts", session) or getattr(rule, "trace", False):
            return True
        shape = f"{self.most} layers of {self.width} by {type(session.parts.drafter).__name__}"
        return enter_pace(self, session, f"{self._kind(session)}, {shape}", batch_size)

    @property
    def largest(self) -> Shape:
        """The largest shape that it plans."""
        return Shape(self.most, self.width)

    def plan(self, session: Session) -> Shape:
        if not has_drafts(self, session):
            return Shape(0, 0)
        return Shape(min(self.most, session.remaining - 1), self.width)

    def numbers(self, session: Session) -> Plan:
        """Return the plan for steps."""
        return self._plan if has_drafts(self, session) else NO_DRAFTS

    @cached_property
    def _plan(self) -> Plan:
        return plan_of_shape(self.most, self.width)

    def _kind(self, session: Session) -> str:
        """Return the name of a session's kind; sessions of one kind share learned odds."""
        is_lazy = _says(session.parts.rule, "is_lazy", session)
        warp = session.warp
        width = getattr(session.parts.rule, "width", None)
        beams = f"{self.beams} beams" if width is None else repr(width)
        return f"{beams}, {is_lazy=}, {warp.search=}, {warp.greedy=}, cuts={warp.cut.cuts}"

    def budget(self, session: Session) -> Budget:
        """Return the budget of the drafts of a session; NO_BUDGET if the rule's text depends on the drafts.

        Layers are cut by the noise with which the target draws. If a width depended on the number of drafts, or a rule on
        their law, they would depend on this noise, too, and the law of the output would change.
        """
        rule = session.parts.rule
        if not _says(rule, "ignores_drafts", session):
            return NO_BUDGET
        is_lazy = _says(rule, "is_lazy", session)
        if self not in session.state:
            kind = self._kind(session)
            session.state[self] = Learning(kind, self.memory.begin(kind), self.memory.begin(kind))
        learning: Learning = session.state[self]
        target_s, draft_s = self._seconds(session.batch_size)
        return Budget(target_s, draft_s, self.host.turn_s, is_lazy, learning.odds)

    def thresholds(self) -> list[tuple[int, float, float]]:
        """Return numbers of rows, the seconds of a pass over as many, and the odds at which one more row pays.

        The numbers start with the number of beams, as if the rows of all beams were needed.
        """
        target_s, _ = self._seconds(1)
        speed = self.beams / (target_s[self.beams] + self.host.turn_s)
        every = range(self.beams, len(target_s) - 1)
        return [(rows, target_s[rows], speed * (target_s[rows + 1] - target_s[rows])) for rows in every]

    def remember(self, session: Session) -> None:
        """Add the odds and the pace of a finished session to the memories."""
        leave_pace(self, session)
        learning = session.state.pop(self, None)
        if learning is not None:
            self.memory.add(learning.kind, learning.begun, learning.odds)

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the drafter, which knows the whole draft, counts its outcomes."""

    def _seconds(self, batch_size: int) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
        """Return the seconds of a target pass and of a draft layer by number of rows, as shared by the batch."""
        rows = self.beams + self.most * self.width + 1
        return _seconds_by_rows(self.target, self.draft, self.host.draft_s, rows, batch_size)


def _says(rule: object, what: str, session: Session) -> bool:
    """Return the answer of a rule's method about a session; False if the rule does not have the method."""
    return bool(getattr(rule, what, lambda session: False)(session))


@lru_cache(maxsize=256)
def _seconds_by_rows(
    target: CostCurve, draft: CostCurve, draft_host_s: float, rows: int, batch_size: int
) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
    counts = range(rows)
    target_s = np.array([target.pass_s(batch_size * max(count, 1)) / batch_size for count in counts])
    shares = [draft.pass_s(batch_size * count) / batch_size for count in counts[1:]]
    draft_s = draft_host_s + np.array([0.0, *shares])
    return target_s, draft_s
