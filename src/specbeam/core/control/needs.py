"""PLAN: which drafts the target should score, by the odds that their rows are needed and by what a row costs here.

Whatever is drafted, the target has to score the row of every live beam that decides a layer, and if rows are kept from turn
to turn, it scores each of them once. So the speed of decoding is the number of *needed* rows that are scored per second. A
draft is worth scoring if its odds of being needed are above that speed times the seconds that its row adds to the pass;
where in the forest it is does not matter.
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
from specbeam.core.measure.kept_figures import Figures, NumberField, RecordFields
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, step

# Between the cells of margins. A draft on the edge itself, with a margin of 0, has a cell of its own.
EDGES = np.array([-3.0, -2.0, -1.0, -0.5, -1e-9, 0.0, 0.5, 1.0, 2.0, 3.0])
MARGINS = len(EDGES) + 1
STEPS = 4  # numbers of draft laws on a path that are told apart: 0, 1, 2, more
# The first of the cells for drafts that the draft's truncation cuts, one per number of draft laws.
CUT = STEPS * MARGINS
CELLS = CUT + STEPS
UNSURE = MARGINS  # the cell of beams whose margin is not known, in `Odds.needed`
HITS, TRIALS = range(2)
GROWTH = 0.75  # prior of the odds of a further layer, as a share of those of the layer above
DEPTHS = 4  # depths at which growth is told apart: 1, 2, 3, more
FORGET = 0.98  # weight of what is known of growth after a turn
LEAST_GAIN = 1.05  # expected speed with one more layer, relative to that without it, from which on the layer is drafted
MOST_TRIALS = 400.0  # of a cell: older ones count less
KEEP_EVERY_S = 5.0  # seconds between two times that what is learnt is kept on disk
FADE = 0.02  # weight of the prior of growth in a turn that has no layer of the depth


@borrowed
class Odds(NamedTuple):
    """What past turns have taught about the odds of drafts: hits and trials, float64[cells, 2]."""

    live: Array  # whether a draft became a live beam, given that its parent was one; cells as in `live_cell`
    needed: Array  # whether the row of a live beam decided a layer; cells as in `margin_cell`, or UNSURE
    growth: Array  # sums of the odds of being needed of drafted layers, and of the layers above, by depth from 1 on


def _are_odds(record: dict[str, Any]) -> bool:
    """Return whether there are trials in each cell, and where they were counted no more hits."""
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
    """By what a draft grows and is cut."""

    target_s: Array  # float64[rows + 1]: seconds of the target's pass by its number of rows; none: drafts are not cut
    draft_s: Array  # float64[rows + 1]: seconds of a draft layer by the number of rows that the draft model scores
    turn_s: float  # seconds of a turn outside the models
    lazy: bool  # whether layers are decided without the rows of beams that cannot win
    odds: Odds


class NodeOdds(NamedTuple):
    """The odds of the nodes of a forest that is drafted; nodes of which nothing is known have odds of 0."""

    live: Array  # float64[nodes]: that the node becomes a live beam
    needed: Array  # float64[nodes]: that its row decides a layer
    # int64[nodes], the cell in `Odds.live`; -1 for roots and for nodes that were not drafted in this turn
    live_cells: Array
    needed_cells: Array  # int64[nodes], the cell in `Odds.needed`
    steps: Array  # int64[nodes]: how many laws on the path were the draft's
    bounds: Array  # float64[nodes]: what no value of a pair that prolongs the node exceeds, see `laws.joint.bound_of`
    # int64[3, n]: of drafts that are no nodes, as they were not worth it: parent, token, cell in `Odds.live`
    dropped: Array
    draft_s: float  # seconds that the draft has taken so far


def prior_odds(weight: float = 8.0) -> Odds:
    """Return the odds before anything is learnt, fitted on the bundled pair; they weigh as much as `weight` trials."""
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
    """Return the cell of a margin: how far a value is above the last value that counts."""
    cell = 0
    while cell < len(EDGES) and EDGES[cell] < margin:
        cell += 1
    return cell


@step
def live_cell(margin: float, steps: int) -> int:
    """Return the cell of a draft in `Odds.live`.

    Args:
        margin: its value minus the last value of its layer that lives on; -inf if the draft's truncation cuts it.
        steps: how many laws on its path are the draft's.
    """
    steps = min(steps, STEPS - 1)
    if margin == -np.inf:
        return CUT + steps
    return steps * MARGINS + margin_cell(margin)


@step
def odds_in(cells: Array, cell: int) -> float:
    """Return the odds that a cell has learnt."""
    return cells[cell, HITS] / cells[cell, TRIALS]


@step
def edge_of(values: Array, weights: Array, beams: int) -> float:
    """Return the value that the last one of `beams` live beams is expected to have.

    Args:
        values: float64[n], of drafts; -inf for those that do not count.
        weights: float64[n], the odds that their parents are live beams.
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
    """Return the odds of a draft that is not cut: none."""
    none = np.zeros(0, dtype=np.int64)
    return NodeOdds(np.zeros(0), np.zeros(0), none, none, none, np.zeros(0), np.zeros((3, 0), dtype=np.int64), 0.0)


@step
def root_odds(bounds: Array, nodes: int) -> NodeOdds:
    """Return the odds of a forest before its first layer is drafted.

    Args:
        bounds: float64[roots], see `NodeOdds`.
        nodes: number of nodes, of which the roots are live beams.
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
    known: NodeOdds, budget: Budget, forest: Forest, front: Beams, parents: Array, values: Array, bounds: Array,
    nodes: Array, beams: int,
) -> NodeOdds:  # fmt: skip
    """Return the odds of the nodes of a forest to which a layer was added.

    Args:
        known: the odds before the layer.
        forest: with the layer.
        front: the beams that the layer prolongs.
        parents: int64[pairs], which beam of the front each drafted pair prolongs.
        values: float64[pairs], of the drafted pairs; -inf for those that the draft's truncation cuts.
        bounds: float64[pairs], see `NodeOdds`.
        nodes: int64[pairs], the forest nodes of the pairs; -1 for none.
        beams: number of beams that live on.
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
    weights = known.live[front.nodes[parents]]
    edge = edge_of(values, weights, beams)
    for place in range(len(front.nodes)):
        node = front.nodes[place]
        if budget.lazy and edge < np.inf:
            needed_cells[node] = margin_cell(known.bounds[node] - edge)
            needed[node] = live[node] * odds_in(budget.odds.needed, needed_cells[node])
    drafted = nodes_without(front.nodes, forest.known.nodes)
    is_drafted = np.zeros(size, dtype=np.bool_)
    is_drafted[drafted] = True
    for place in range(len(nodes)):
        node = nodes[place]
        if node < 0:
            continue
        above = front.nodes[parents[place]]
        every_bound[node] = bounds[place]
        steps[node] = steps[above] + is_drafted[above]
        live_cells[node] = live_cell(values[place] - edge, steps[node])
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
    """Return how many drafts to score for the most needed rows per second, and that speed.

    Args:
        needs: float64[n], the odds of drafts of being needed, descending.
        sure: number of rows that are scored anyway.
        sure_needs: the sum of their odds.
        other_s: seconds of the turn besides the target's pass.
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
    """Return the odds of each node of being needed, at most those of its parent unless that is known, float64[nodes]."""
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
    """Return the nodes that the target scores anyway, roots without rows, and the other nodes without rows."""
    unknown = unknown_nodes(0, len(forest.tokens), forest.known.nodes)
    is_root = forest.parents[unknown] < 0
    return unknown[is_root], unknown[~is_root]


@step
def _chosen_nodes(
    budget: Budget, forest: Forest, needs: Array, sure: Array, others: Array, other_s: float
) -> tuple[Array, float]:
    """Return which nodes the target should score or knows, bool[nodes], and the needed rows per second with them.

    Args:
        needs: float64[nodes], from `_capped_needs`, so that no node is chosen without its parent.
        sure, others: from `_sure_and_open`.
        other_s: seconds of the turn besides the target's pass.
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
def nodes_to_extend(budget: Budget, forest: Forest, odds: NodeOdds, front: Array) -> Array:
    """Return which nodes of the front of a draft are worth a further layer under them, bool[front]; none: it should end.

    These are nodes that the target knows or would be given to score, for no draft is scored without its parent. The rows of
    the layer are expected to be as much needed as theirs, times the growth that was learnt.
    """
    needs = _capped_needs(forest, odds)
    sure, others = _sure_and_open(forest)
    seconds = budget.turn_s + odds.draft_s
    is_chosen, speed = _chosen_nodes(budget, forest, needs, sure, others, seconds)
    is_extended = is_chosen[front]
    parents = front[is_extended]
    fresh = nodes_without(parents, forest.known.nodes)
    if len(fresh) == 0:  # the laws of the front are known, and drafting costs next to nothing
        return is_extended
    depth = min(depth_of(forest.parents, front[0]), DEPTHS - 1)
    future = np.concatenate((needs[others], odds_in(budget.odds.growth, depth) * needs[parents]))
    seconds += budget.draft_s[min(len(fresh), len(budget.draft_s) - 1)]
    _, faster = best_count(future[sorted_places(future)], len(sure), needs[sure].sum(), budget, seconds)
    if faster <= speed * LEAST_GAIN:
        is_extended[:] = False
    return is_extended


@step
def nodes_to_score(budget: Budget, forest: Forest, odds: NodeOdds) -> Array:
    """Return the nodes of a draft that the target should score or knows, int64[n], ascending: no node without its parent."""
    needs = _capped_needs(forest, odds)
    sure, others = _sure_and_open(forest)
    is_chosen, _ = _chosen_nodes(budget, forest, needs, sure, others, budget.turn_s + odds.draft_s)
    return np.flatnonzero(is_chosen)


@step
def learn_growth(odds: Odds, node_odds: NodeOdds, forest: Forest, depths: Array) -> None:
    """Count how much the layers of a draft are needed. What is known of layers that were not drafted fades to the prior."""
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
def _is_drawn(layers: Layers, number: int, names: Array, parent: int, token: int) -> bool:
    """Return whether a layer drew a token under a node of the whole draft, as a beam that lives on."""
    for draw in range(start_of(layers.draw_ends, number), layers.draw_ends[number]):
        is_it = names[layers.parents[draw]] == parent and layers.beams.tokens[draw] == token
        if is_it and not layers.ended[draw]:
            return True
    return False


@step
def odds_of_nodes(odds: NodeOdds, forest: Forest, nodes: Array) -> NodeOdds:
    """Return the odds of some nodes of a forest, ascending; the others have no children, and become dropped drafts."""
    names = np.full(len(forest.tokens), -1, dtype=np.int64)
    for place in range(len(nodes)):
        names[nodes[place]] = place
    others = np.flatnonzero(names < 0)
    before = odds.dropped.shape[1]
    dropped = np.empty((3, before + len(others)), dtype=np.int64)
    for place in range(before):
        dropped[0, place] = names[odds.dropped[0, place]]
        dropped[1, place] = odds.dropped[1, place]
        dropped[2, place] = odds.dropped[2, place]
    for place in range(len(others)):
        node = others[place]
        dropped[0, before + place] = names[forest.parents[node]]
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
def learn_odds(odds: Odds, node_odds: NodeOdds, forest: Forest, layers: Layers, names: Array) -> None:
    """Count what became of the drafts of a turn.

    Args:
        node_odds, forest: of the whole draft.
        layers: what the turn decided, on the forest that the target scored.
        names: int64[n], the node of the whole draft that each node of that forest is.
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
                above = names[layers.parents[draw]]
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
                odds.live[cell, HITS] += _is_drawn(layers, number, names, above, node_odds.dropped[1, place])


class OddsMemory:
    """What the sessions of a pair have learnt of its drafts: each one begins with what those before it have left.

    It is kept on disk for later processes, if there is a key. It changes how fast texts come, never which texts.

    Args:
        key: JSON values that name the pair; None: keep nothing on disk.
    """

    def __init__(self, key: Any = None) -> None:
        self.key = key
        self._odds: dict[str, Odds] = {}
        self._lock = Lock()
        self._kept_s = -KEEP_EVERY_S
        self._changed: set[str] = set()  # kinds that have not been kept since

    def begin(self, kind: str) -> Odds:
        """Return a copy of what is known for sessions of this kind."""
        with self._lock:
            if kind not in self._odds:
                self._odds[kind] = self._load(kind)
            return Odds(*(cells.copy() for cells in self._odds[kind]))

    def add(self, kind: str, begun: Odds, ended: Odds) -> None:
        """Add what a session has learnt between two states."""
        with self._lock:
            known = self._odds[kind]
            for cells, before, after in (
                (known.live, begun.live, ended.live),
                (known.needed, begun.needed, ended.needed),
            ):
                cells += after - before
                cells *= np.minimum(1.0, MOST_TRIALS / cells[:, TRIALS])[
                    :, None
                ]  # so that a change of texts is noticed
            known.growth[:] = ended.growth
            self._changed.add(kind)
            if time.monotonic() - self._kept_s > KEEP_EVERY_S:
                self._keep()

    def _keep(self) -> None:
        """Keep on disk what is not kept yet."""
        self._kept_s = time.monotonic()
        for kind in self._changed:
            if self.key is not None:
                cells = self._odds[kind]._asdict()
                _ODDS.keep([self.key, kind], {name: counts.tolist() for name, counts in cells.items()})
        self._changed.clear()

    def _load(self, kind: str) -> Odds:
        """Return what is kept on disk, or the prior."""
        prior = prior_odds()
        record = None if self.key is None else _ODDS.load([self.key, kind])
        if record is None:
            return prior
        return Odds(*(np.array(record[name], dtype=float) for name in Odds._fields))


@dataclass(eq=False)
class Learning:
    """What a session learns of its drafts."""

    kind: str
    begun: Odds
    odds: Odds


@dataclass(frozen=True)
class NodesByNeed:
    """A controller that lets drafts grow and cuts them by what rows cost, and by the odds that they are needed.

    It chooses no shape: of the drafts of all layers the target scores those of most needed rows per second (see the top of
    this file). For rules whose text does not depend on the drafts. The odds are learnt from past turns of the session.

    Args:
        target, draft: seconds of a pass by number of scored nodes; see `specbeam tune`.
        beams: number of beams that live on.
        width: maximum number of new drafts per layer.
        most: maximum number of layers.
        host: seconds of a turn outside the models.
        memory: what earlier sessions have learnt.
        paces: how fast earlier sessions were with drafts and without.
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
        """Return whether a new session drafts, in a batch of `batch_size`. One whose drafts are traced always does."""
        rule = session.parts.rule
        if not _says(rule, "ignores_drafts", session) or getattr(rule, "trace", False):
            return True
        shape = f"{self.most} layers of {self.width} by {type(session.parts.drafter).__name__}"
        return enter_pace(self, session, f"{self._kind(session)}, {shape}", batch_size)

    def plan(self, session: Session) -> Shape:
        if not has_drafts(self, session):
            return Shape(0, 0)
        return Shape(min(self.most, session.remaining - 1), self.width)

    def numbers(self, session: Session) -> Plan:
        """Return the plan as numbers for steps."""
        return self._plan if has_drafts(self, session) else NO_DRAFTS

    @cached_property
    def _plan(self) -> Plan:
        return plan_of_shape(self.most, self.width)

    def _kind(self, session: Session) -> str:
        """Return which sessions are like this one."""
        is_lazy = _says(session.parts.rule, "is_lazy", session)
        warp = session.warp
        width = getattr(session.parts.rule, "width", None)
        beams = f"{self.beams} beams" if width is None else repr(width)
        return f"{beams}, {is_lazy=}, {warp.search=}, {warp.greedy=}, cuts={warp.cut.cuts}"

    def budget(self, session: Session) -> Budget:
        """Return by what the drafts of a session grow and are cut; NO_BUDGET if the rule's text depends on the drafts.

        A layer is cut by the noise that the target draws by: if a width looked at how many drafts a layer has, or a rule at
        the law that they were drawn from, it would look at that noise, too.
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
        """Return numbers of rows, the seconds of a pass over so many, and the odds from which one more row pays.

        They start with the number of beams, as if the rows of all beams were needed.
        """
        target_s, _ = self._seconds(1)
        speed = self.beams / (target_s[self.beams] + self.host.turn_s)
        every = range(self.beams, len(target_s) - 1)
        return [(rows, target_s[rows], speed * (target_s[rows + 1] - target_s[rows])) for rows in every]

    def remember(self, session: Session) -> None:
        """Add what a session has learnt, which is over, to the memory, and how fast it was."""
        leave_pace(self, session)
        learning = session.state.pop(self, None)
        if learning is not None:
            self.memory.add(learning.kind, learning.begun, learning.odds)

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the drafter knows the whole draft, and counts what became of it."""

    def _seconds(self, batch_size: int) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
        """Return the seconds of a target pass and of a draft layer by number of rows, as shared by the batch."""
        rows = self.beams + self.most * self.width + 1
        return _seconds_by_rows(self.target, self.draft, self.host.draft_s, rows, batch_size)


def _says(rule: object, what: str, session: Session) -> bool:
    """Return what a method of a rule says of a session; False if the rule does not have it."""
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
