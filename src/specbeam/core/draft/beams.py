"""DRAFT: beams of a draft model, one layer per pass."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from specbeam.core.beams import Beams, Layers, is_end, picked_beams
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.compiling.held import held_at
from specbeam.core.control.needs import (
    NO_BUDGET,
    Budget,
    DraftedPairs,
    NodeOdds,
    learn_odds,
    no_node_odds,
    nodes_to_extend,
    nodes_to_score,
    odds_of_nodes,
    root_odds,
    with_layer_odds,
)
from specbeam.core.control.width import FixedWidths, Width, is_for_steps, width_by_draft, width_spec
from specbeam.core.dice import pick
from specbeam.core.draft.by_steps import drafted_by_steps
from specbeam.core.draft.turns import (
    Cut,
    DraftTask,
    NoDraftSpec,
    draft_all,
    draft_turn,
    learn_from,
    own_spec,
    rows_kept,
    uncut,
)
from specbeam.core.errors import BrokenProcessor, DeadEnd
from specbeam.core.forest import (
    DISTINCT,
    INDEPENDENT,
    SHARED,
    Forest,
    Siblings,
    TurnRows,
    add_frontier_rows,
    find_child,
    forest_of_nodes,
    no_frontier_rows,
    nodes_without,
    rows_with_known,
)
from specbeam.core.laws.edits import edited_rows
from specbeam.core.laws.joint import (
    Choice,
    JointLaw,
    all_pairs,
    bound_of,
    choice_of,
    choose,
    condition_of,
    core_and_extra,
    joint_law,
    likelihoods_at,
    named_pairs,
    odds_among,
    token_of,
)
from specbeam.core.laws.listing import as_listed, listing_for
from specbeam.core.laws.ranking import Truncation, sorted_places
from specbeam.core.laws.reduce import SOUND, UNDECIDED
from specbeam.core.laws.warp import Rows, law_of_beams, on_host, processed_rows
from specbeam.core.lm import LM, fill_prompts, takes_a_pass
from specbeam.core.passes import Asked, extend_all, run_ranked_pass
from specbeam.core.ranked import WHOLE, Listing, Ranked, rows_between, whole_rows
from specbeam.core.records import Scored, Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, step, verb


@borrowed
class LayersSpec(NamedTuple):
    """How layers of beams are drafted: the settings that all kinds of layers share, and the kind."""

    noisy: bool  # False: temperature 0, where there is no noise
    truncation: Truncation
    budget: Budget  # by which the draft grows and is cut; only if widths are independent of drafts
    keeps_rows: bool  # whether `Forest.frontier_rows` is stored, because widths depend on the laws of the draft
    layers: Any  # SharedLayers, SearchedLayers or DrawnLayers; a loop may know it only by its address


@borrowed
class SharedLayers(NamedTuple):
    """How layers are drafted for shared noise: the best pairs of the draft law under the noise of the target."""

    widths: Any  # the target's numbers for widths, by which the draft model would keep core pairs
    eos: Array  # int64[ends]
    # Whether pairs that the target has already scored come in addition to the width. Only if widths are independent of
    # drafts: which nodes are known depends on the noise of their layer, so the number of drafts would depend on it,
    # too.
    more_if_known: bool


@borrowed
class SearchedLayers(NamedTuple):
    """How layers are drafted for transformers' beam modes: core pairs would stay live; end tokens are not drafted."""

    core: int  # number of pairs that the draft model by itself would keep
    eos: Array


@borrowed
class DrawnLayers(NamedTuple):
    """How layers are drafted for rules that try drafts: by dice, from the stated draft law."""

    again: bool  # whether draws are independent, with replacement
    eos: Array


class Drafted(NamedTuple):
    """A draft of beams while it grows."""

    forest: Forest
    frontier: Beams  # the beams of the newest layer, without those that ended
    core: Array  # bool[frontier]: whether the draft model by itself would have kept the beam
    odds: NodeOdds  # none if the draft is not cut


class ChosenLayer(NamedTuple):
    """The drafts of a layer, before they become nodes."""

    choice: Choice
    draws: Array  # int64[draws], index of each draw among the pairs of the choice
    counts: Array  # int64[pairs], how often each pair was drawn
    kind: int  # of the new group, see `Siblings`; the next two as well
    law_pairs: Array
    law_odds: Array
    beams: int  # expected number of surviving beams


@step
def candidate_count(beams: int, ends: int) -> int:
    """Return the number of candidates of transformers, at least 2 per beam.

    `beams` of them do not end, even if candidates end each beam by each of the `ends` end tokens.
    """
    return max(2, 1 + ends) * beams


@step
def going_on(scores: Array, ends: Array, beams: int) -> Array:
    """Return the indices of the candidates that stay live: up to `beams` of largest score that did not end, best first."""
    alive = np.flatnonzero(~ends)
    return alive[sorted_places(scores[alive])[:beams]]


@step
def _chosen_as_search_does(
    law: JointLaw, frontier: Beams, core: Array, width: int, spec: SearchedLayers, noisy: bool
) -> Choice:
    """Return up to `width` pairs without ends for transformers' beam modes; the core are the pairs that would stay live."""
    keys = frontier.keys if noisy else frontier.keys[:0]
    every = np.ones(len(core), dtype=np.bool_)
    candidate_pairs, own, _ = core_and_extra(law, keys, core, candidate_count(spec.core, len(spec.eos)), 0)
    candidates = choice_of(law, frontier.keys, candidate_pairs, own, 0, spec.eos)
    best = candidate_pairs[going_on(candidates.scores, candidates.ends, min(spec.core, width))]
    wider, _, _ = core_and_extra(law, keys, every, width + len(spec.eos) * len(core), 0)
    pairs = np.empty(max(width, len(best)), dtype=np.int64)
    held = len(best)
    copy_numbers(pairs, best)
    for pair in wider:
        if held < width and not is_end(token_of(law, pair), spec.eos) and not (best == pair).any():
            pairs[held] = pair
            held += 1
    values = likelihoods_at(law, pairs[:held])
    if noisy:  # pairs beyond the candidates, which the noise has chosen, have no value
        for place in range(held):
            if not (candidate_pairs == pairs[place]).any():
                values[place] = -np.inf
    return choice_of(law, frontier.keys, pairs[:held], values, len(best), spec.eos)


@step
def draw_pairs(odds: Array, count: int, again: bool, dice: Any) -> Array:
    """Return the indices of up to `count` draws from `odds`, int64[draws], without replacement unless `again`."""
    left = odds.copy()
    places = np.empty(count, dtype=np.int64)
    for draw in range(count):
        if not (left > 0).any():  # the remaining probabilities have rounded to 0
            return places[:draw]
        places[draw] = pick(dice, left)
        if not again:
            left[places[draw]] = 0.0
    return places


@step
def first_places(drawn: Array) -> tuple[Array, Array, Array]:
    """Return the distinct draws by first occurrence, the index in them of each draw, and how often each occurs."""
    distinct = np.empty(len(drawn), dtype=np.int64)
    which = np.empty(len(drawn), dtype=np.int64)
    counts = np.zeros(len(drawn), dtype=np.int64)
    held = 0
    for draw in range(len(drawn)):
        place = 0
        while place < held and distinct[place] != drawn[draw]:
            place += 1
        if place == held:
            distinct[held] = drawn[draw]
            held += 1
        which[draw] = place
        counts[place] += 1
    return distinct[:held], which, counts[:held]


@step
def add_drafted_layer(drafted: Drafted, layer: ChosenLayer, vocab: int) -> Drafted:
    """Return a draft with one more layer. End tokens get no node, and drafts that are nodes already no second one.

    Args:
        vocab: number of tokens of the law that the layer was chosen from.
    """
    choice = layer.choice
    draws = layer.draws
    forest = drafted.forest
    frontier = drafted.frontier
    groups = forest.siblings
    size = len(forest.tokens)
    nodes = np.full(len(choice.tokens), -1, dtype=np.int64)
    going = np.flatnonzero(~choice.ends)
    born = np.empty(len(going), dtype=np.int64)
    held = 0
    for place in going:
        node = find_child(forest.tokens, forest.parents, frontier.nodes[choice.parents[place]], choice.tokens[place])
        if node < 0:
            node = size + held
            born[held] = place
            held += 1
        nodes[place] = node
    born = born[:held]
    siblings = Siblings(
        np.append(groups.kinds, layer.kind),
        np.concatenate((groups.parents, frontier.nodes)),
        np.append(groups.parent_ends, len(groups.parents) + len(frontier.nodes)),
        np.append(groups.draw_ends, len(groups.tokens) + len(draws)),
        np.concatenate((groups.rows, choice.parents[draws])),
        np.concatenate((groups.tokens, choice.tokens[draws])),
        np.concatenate((groups.nodes, nodes[draws])),
        np.append(groups.law_ends, len(groups.law_odds) + len(layer.law_odds)),
        np.concatenate((groups.law_pairs, layer.law_pairs)),
        np.concatenate((groups.law_odds, layer.law_odds)),
        vocab,
    )
    grown = Forest(
        np.concatenate((forest.tokens, choice.tokens[born])),
        np.concatenate((forest.parents, frontier.nodes[choice.parents[born]])),
        siblings,
        forest.logq,
        forest.beams,
        forest.frontier_rows,
        forest.known,
    )
    newest = Beams(nodes[going], choice.tokens[going], choice.scores[going], layer.counts[going], choice.keys[going])
    return Drafted(grown, newest, going < choice.core, drafted.odds)


@verb(0, has_body=False, by_address=True)
def choose_layer(  # type: ignore[empty-body]
    layers: Any, drafted: Drafted, law: JointLaw, width: int, noisy: bool, dice: Any
) -> ChosenLayer:
    """Return the drafts of one more layer, chosen or drawn from the law of the frontier, which must be SOUND.

    Args:
        layers: a SharedLayers, SearchedLayers or DrawnLayers.
        width: number of draft beams in the layer.
        noisy: False at temperature 0, where there is no noise.
    """


@step
def draft_layer(spec: LayersSpec, drafted: Drafted, law: JointLaw, width: int, dice: Any) -> Drafted:
    """Return a draft with one more layer, by the law of its frontier, which must be SOUND.

    Args:
        width: number of draft beams in the layer.
    """
    layer = choose_layer(spec.layers, drafted, law, width, spec.noisy, dice)
    forest = drafted.forest
    frontier = drafted.frontier
    if spec.keeps_rows:
        rows = add_frontier_rows(forest.frontier_rows, frontier.nodes, frontier.scores, frontier.counts, law.rows)
        forest = Forest(forest.tokens, forest.parents, forest.siblings, forest.logq, forest.beams, rows, forest.known)
        drafted = Drafted(forest, frontier, drafted.core, drafted.odds)
    longer = add_drafted_layer(drafted, layer, law.rows.vocab)
    if len(spec.budget.target_s) == 0:
        return longer
    choice = layer.choice
    count = len(choice.tokens)
    bounds = np.empty(count)
    for place in range(count):
        bounds[place] = bound_of(spec.truncation, spec.noisy, choice.scores[place], 1, choice.keys[place])
    groups = longer.forest.siblings
    nodes = groups.nodes[len(groups.nodes) - count :]
    pairs = DraftedPairs(choice.parents, choice.values, bounds, nodes)
    odds = with_layer_odds(drafted.odds, spec.budget, longer.forest, frontier, pairs, layer.beams)
    return Drafted(longer.forest, longer.frontier, longer.core, odds)


@step
def _matched(choice: Choice, beams: int) -> ChosenLayer:
    """Return a layer of pairs whose draws are SHARED: they can be matched, not tried.

    Args:
        beams: expected number of surviving beams.
    """
    every = np.arange(len(choice.tokens))
    no_pairs = np.empty(0, dtype=np.int64)
    return ChosenLayer(choice, every, np.ones_like(every), SHARED, no_pairs, np.empty(0), beams)


@step
def count_children(forest: Forest, nodes: Array) -> int:
    """Return how many forest nodes have one of these nodes as their parent."""
    count = 0
    for parent in forest.parents:
        count += parent >= 0 and (nodes == parent).any()
    return count


@step
def with_fresh(choice: Choice, drafted: Drafted, fresh: int) -> Choice:
    """Return the first pairs of a choice, of which up to `fresh` are not yet nodes of the forest."""
    forest = drafted.forest
    nodes = drafted.frontier.nodes
    size = 0
    while size < len(choice.tokens):
        is_node = find_child(forest.tokens, forest.parents, nodes[choice.parents[size]], choice.tokens[size]) >= 0
        if not is_node:
            if fresh == 0:
                break
            fresh -= 1
        size += 1
    return Choice(
        choice.parents[:size],
        choice.tokens[:size],
        choice.values[:size],
        choice.scores[:size],
        choice.keys[:size],
        choice.ends[:size],
        min(choice.core, size),
    )


@choose_layer.of(SharedLayers)
@step
def choose_shared(
    layers: SharedLayers, drafted: Drafted, law: JointLaw, width: int, noisy: bool, dice: Any
) -> ChosenLayer:
    """Return a layer of best pairs, under shared noise if there is any; see `choose_layer`."""
    frontier = drafted.frontier
    core = min(width_by_draft(layers.widths, law), width)
    more = 0
    if layers.more_if_known:
        more = count_children(drafted.forest, frontier.nodes)
    choice = choose(law, frontier.keys, noisy, drafted.core, core, width + more, layers.eos)
    if more > 0:
        choice = with_fresh(choice, drafted, width)
    return _matched(choice, core)


@choose_layer.of(SearchedLayers)
@step
def choose_searched(
    layers: SearchedLayers, drafted: Drafted, law: JointLaw, width: int, noisy: bool, dice: Any
) -> ChosenLayer:
    """Return a layer for transformers' beam modes; see `choose_layer`."""
    more = count_children(drafted.forest, drafted.frontier.nodes)
    choice = _chosen_as_search_does(law, drafted.frontier, drafted.core, width + more, layers, noisy)
    if more > 0:
        choice = with_fresh(choice, drafted, width)
    return _matched(choice, layers.core)


@choose_layer.of(DrawnLayers)
@step
def choose_drawn(
    layers: DrawnLayers, drafted: Drafted, law: JointLaw, width: int, noisy: bool, dice: Any
) -> ChosenLayer:
    """Return a layer that is drawn by dice, with its law; see `choose_layer`."""
    pairs = all_pairs(law)
    odds = odds_among(law, pairs)
    count = width if layers.again else min(width, len(pairs))
    distinct, draws, counts = first_places(draw_pairs(odds, count, layers.again, dice))
    values = np.full(len(distinct), np.nan)
    choice = choice_of(law, drafted.frontier.keys, pairs[distinct], values, len(distinct), layers.eos)
    kind = INDEPENDENT if layers.again else DISTINCT
    return ChosenLayer(choice, draws, counts, kind, named_pairs(law, pairs), odds, width)


@step
def odds_of_roots(spec: LayersSpec, live: Beams, nodes: int) -> NodeOdds:
    """Return the odds of the roots by the best pairs that they can have; none if the draft is not cut.

    Args:
        nodes: number of nodes of the forest before the first layer is drafted.
    """
    if len(spec.budget.target_s) == 0:
        return no_node_odds()
    bounds = np.empty(len(live.tokens))
    for beam in range(len(bounds)):
        bounds[beam] = bound_of(spec.truncation, spec.noisy, live.scores[beam], live.counts[beam], live.keys[beam])
    return root_odds(bounds, nodes)


@step
def thinned(budget: Budget, drafted: Drafted) -> Drafted:
    """Return a draft without the frontier nodes to which its budget allows no further layer; unchanged without a budget.

    If the draft should end, its nodes stay, and its frontier is empty.
    """
    frontier = drafted.frontier
    if len(budget.target_s) == 0 or len(frontier.nodes) == 0:
        return drafted
    forest = drafted.forest
    odds = drafted.odds
    is_extended = nodes_to_extend(budget, forest, odds, frontier.nodes)
    rest = picked_beams(frontier, is_extended)
    core = drafted.core[is_extended]
    not_extended = frontier.nodes[~is_extended]
    is_root = len(not_extended) > 0 and forest.parents[not_extended[0]] < 0
    if len(rest.nodes) == 0 or len(not_extended) == 0 or is_root:
        return Drafted(forest, rest, core, odds)
    is_kept = np.ones(len(forest.tokens), dtype=np.bool_)
    is_kept[not_extended] = False
    kept = np.flatnonzero(is_kept)
    node_map = np.cumsum(is_kept) - 1
    smaller = forest_of_nodes(forest, kept)
    renamed = Beams(node_map[rest.nodes], rest.tokens, rest.scores, rest.counts, rest.keys)
    return Drafted(smaller, renamed, core, odds_of_nodes(odds, forest, kept))


@step
def cut(budget: Budget, drafted: Drafted) -> Cut:
    """Return the nodes of a draft that the target scores: those whose rows pay for their cost; all without a budget."""
    whole = drafted.forest
    if len(budget.target_s) == 0:
        return uncut(whole)
    node_map = nodes_to_score(budget, whole, drafted.odds)
    return Cut(forest_of_nodes(whole, node_map), whole, node_map, drafted.odds)


@step
def start_draft(live: Beams, roots: Forest, spec: LayersSpec) -> Drafted:
    """Return a draft without layers, whose frontier is the live beams, the roots of the forest `roots`."""
    odds = odds_of_roots(spec, live, len(roots.tokens))
    return Drafted(roots, live, np.ones(len(live.tokens), dtype=np.bool_), odds)


@step
def draft_layers(
    model: Any, drafted: Drafted, spec: LayersSpec, task: DraftTask, dice: Any, spent: Array
) -> tuple[Drafted, int]:
    """Return a draft with up to `task.depth` more layers of `task.width` beams, and SOUND.

    Beams whose target row is known draw from the target's law; only the others need the draft model. If a layer has no law
    to draw from, DEAD or BROKEN is returned in place of SOUND; UNDECIDED if a layer cannot be chosen from lists of tokens.

    Args:
        model: the cache of a session in a model that compiled steps can run, see `core.passes.run_ranked_pass`.
        drafted: a draft; the known rows of its forest are already edited.
        spent: int64[2], to which the number of passes and the processor's cycles in the model are added.
    """
    for _ in range(task.depth):
        drafted = thinned(spec.budget, drafted)
        if len(drafted.frontier.tokens) == 0:
            break
        asked = asked_by_layer(drafted)
        own = rows_between(drafted.forest.known.rows, 0, 0)
        if len(asked.wanted) > 0:
            whole = task.listing.length == 0
            own = run_ranked_pass(model, asked.tokens, asked.parents, asked.wanted, asked.keys, whole, spent)
        drafted, condition = with_next_layer(drafted, own, asked, spec, task, dice)
        if condition != SOUND:
            return drafted, condition
    return drafted, SOUND


@step
def asked_by_layer(drafted: Drafted) -> Asked:
    """Return the rows that the next layer of a draft needs of the draft model."""
    forest = drafted.forest
    wanted = nodes_without(drafted.frontier.nodes, forest.known.nodes)
    return Asked(forest.tokens, forest.parents, wanted, keys_of_nodes(drafted.frontier, wanted))


@step
def with_next_layer(
    drafted: Drafted, own: Ranked, asked: Asked, spec: LayersSpec, task: DraftTask, dice: Any
) -> tuple[Drafted, int]:
    """Return a draft with one more layer, and SOUND; or the draft itself and the reason, see `draft_layers`.

    Args:
        own: the rows of the draft model that `asked` names.
    """
    forest = drafted.forest
    frontier = drafted.frontier
    own = edited_rows(own, asked.wanted, forest.tokens, forest.parents, task.edits)
    own = as_listed(own, asked.keys, task.listing)
    rows = rows_with_known(frontier.nodes, forest.known, own)
    law = joint_law(rows, frontier.scores, frontier.counts, spec.truncation)
    condition = condition_of(law)
    if condition != SOUND:
        return drafted, condition
    longer = draft_layer(spec, drafted, law, task.width, dice)
    if law.undecided[0]:
        return drafted, UNDECIDED
    return longer, SOUND


@step
def keys_of_nodes(beams: Beams, nodes: Array) -> Array:
    """Return the noise key of the beam that ends at each node, uint64[n]; a beam must end at each of them."""
    keys = np.empty(len(nodes), dtype=np.uint64)
    beam = 0
    for place in range(len(nodes)):
        while beams.nodes[beam] != nodes[place]:
            beam = (beam + 1) % len(beams.nodes)
        keys[place] = beams.keys[beam]
    return keys


@draft_turn.of(LayersSpec)
@step
def draft_beams(drafts: LayersSpec, model: Any, task: DraftTask, dice: Any, spent: Array) -> tuple[Cut, int]:
    """Draft layers of beams; see `draft_turn`."""
    begun = start_draft(task.live, task.roots, drafts)
    drafted, condition = draft_layers(model, begun, drafts, task, dice, spent)
    return cut(drafts.budget, drafted), condition


@draft_all.of(LayersSpec)
@step
def draft_beams_of_all(
    drafts: LayersSpec, like: Any, jobs: Array, models: list[Any], tasks: list[DraftTask], spent: Array
) -> list[tuple[Cut, int]]:
    """Draft layers of beams of many sessions, with a pass of the draft model for each layer of all; see `draft_all`."""
    count = len(tasks)
    growing = []
    deepest = 0
    for number in range(count):
        job = held_at(jobs[number], like)
        task = tasks[number]
        growing.append(start_draft(task.live, task.roots, own_spec(job.spec.drafts, drafts)))
        deepest = max(deepest, task.depth)
    conditions = np.full(count, SOUND)
    is_growing = np.ones(count, dtype=np.bool_)
    for layer in range(deepest):
        asked = []
        for number in range(count):
            job = held_at(jobs[number], like)
            if is_growing[number] and layer < tasks[number].depth:
                growing[number] = thinned(own_spec(job.spec.drafts, drafts).budget, growing[number])
                is_growing[number] = len(growing[number].frontier.tokens) > 0
            else:
                is_growing[number] = False
            one = asked_by_layer(growing[number])
            asked.append(one if is_growing[number] else Asked(one.tokens, one.parents, one.wanted[:0], one.keys[:0]))
        if not is_growing.any():
            break
        rows = extend_all(like.draft, models, asked, like.spec.listing.length == 0, spent)
        for number in range(count):
            if not is_growing[number]:
                continue
            job = held_at(jobs[number], like)
            longer, condition = with_next_layer(
                growing[number],
                rows[number],
                asked[number],
                own_spec(job.spec.drafts, drafts),
                tasks[number],
                job.dice,
            )
            growing[number] = longer
            conditions[number] = condition
            is_growing[number] = condition == SOUND
    found = []
    for number in range(count):
        job = held_at(jobs[number], like)
        found.append((cut(own_spec(job.spec.drafts, drafts).budget, growing[number]), conditions[number]))
    return found


@rows_kept.of(LayersSpec)
def rows_of_layers(drafts: LayersSpec, beams: int, depth: int, width: int) -> int:
    """Return the number of rows that the layers of a draft are drawn from; see `rows_kept`."""
    return beams + depth * width if drafts.keeps_rows else 0


@learn_from.of(LayersSpec)
@step
def learn_from_layers(drafts: LayersSpec, drafted: Cut, layers: Layers, rows: TurnRows) -> None:
    """Learn the odds of drafts from a turn; see `learn_from`."""
    if len(drafted.odds.live) > 0:
        learn_odds(drafts.budget.odds, drafted.odds, drafted.whole, layers, drafted.node_map)


@dataclass(frozen=True)
class NoDraft:
    """A drafter without drafts, for plain decoding."""

    models: ClassVar[tuple[LM, ...]] = ()

    def spec(self, session: Session) -> NoDraftSpec:
        """Return the spec of an empty draft."""
        return NoDraftSpec(0)

    def listing(self, session: Session, width: int) -> None:
        """Return None: nothing is drafted from rows."""
        return

    def most_nodes(self, beams: int, shape: Shape) -> int:
        """Return 0."""
        return 0

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return a forest of roots for each session."""
        return [Forest.rooted(session.beams.tokens) for session in sessions]

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing."""


@dataclass(eq=False)
class GrowingBeams:
    """One session's draft while it grows layer by layer."""

    session: Session
    shape: Shape
    spec: LayersSpec
    drafted: Drafted
    layers: int = 0  # number of layers drafted so far

    @property
    def wants_layer(self) -> bool:
        """Whether another layer is to be drafted."""
        may_grow = self.layers < self.shape.depth and self.session.failure is None
        if may_grow:
            self.drafted = thinned(self.spec.budget, self.drafted)
        return may_grow and self.drafted.frontier.size > 0

    @property
    def wants_rows(self) -> bool:
        """Whether the draft model has to score any beam of the newest layer, because its target row is not known."""
        drafted = self.drafted
        return bool(len(nodes_without(drafted.frontier.nodes, drafted.forest.known.nodes)))

    def make_room(self, vocab: int, dtype: Any) -> None:
        """Allocate the rows that layers are drawn from, before the first layer, if the spec keeps them."""
        if self.spec.keeps_rows and self.layers == 0:
            rows = self.drafted.forest.roots + (self.shape.depth - 1) * self.shape.width
            forest = self.drafted.forest._replace(frontier_rows=no_frontier_rows(rows, vocab, dtype))
            self.drafted = self.drafted._replace(forest=forest)

    def grow(self, own: Rows) -> None:
        """Add a layer. If the rows of the frontier give no law to draw from, the draft ends.

        Args:
            own: the draft model's logits of the frontier beams whose target rows are not known.
        """
        session = self.session
        frontier = self.drafted.frontier
        known = self.drafted.forest.known
        rows = own
        if len(own) < len(frontier.nodes):
            others = whole_rows(own.astype(known.rows.logits.dtype, copy=False))
            rows = rows_with_known(frontier.nodes, known, others).logits
        self.make_room(rows.shape[1], rows.dtype)
        self.layers += 1
        try:
            forest = self.drafted.forest
            rows = processed_rows(rows, session.warp, lambda: session.paths(forest, frontier.nodes))
            law = law_of_beams(rows, frontier, session.warp)
        except (DeadEnd, BrokenProcessor):  # on a drafted path, which the target may never take
            self.end()
            return
        width = self.shape.width
        self.drafted = draft_layer(self.spec, self.drafted, law, width, session.dice.ready(width))

    def end(self) -> None:
        """Draft no more layers."""
        self.drafted = self.drafted._replace(frontier=self.drafted.frontier.pick(np.zeros(0, dtype=np.int64)))


class _Cut:
    """The key of the current turn's draft in the state of a session."""


def budget_of(session: Session) -> Budget:
    """Return the budget by which the controller of a session cuts drafts; NO_BUDGET if it has none."""
    asked = getattr(session.parts.controller, "budget", None)
    found: Budget = NO_BUDGET if asked is None else asked(session)
    return found


def _rows_of_vocab(rows: Rows, vocab: int) -> Rows:
    """Return the target's rows in the vocabulary of a draft model: cut, or with -inf at tokens that the target lacks."""
    if rows.shape[1] >= vocab or len(rows) == 0:
        return np.ascontiguousarray(rows[:, :vocab])
    wider = np.full((len(rows), vocab), -np.inf, dtype=rows.dtype)
    wider[:, : rows.shape[1]] = rows
    return wider


@dataclass(frozen=True)
class BeamDrafter:
    """A drafter that runs beam sampling on a draft model, from the scores of the live beams and with the session's warp.

    Args:
        lm: the draft model.
        beams: number of beams that the target keeps. With shared noise, this many draft pairs per layer are core: the
            pairs that the draft model alone would keep. The rest of a layer are the most probable other pairs, even if its
            truncation cuts them.
        coupling: "noise": draft under the noise of the target; "rejection": draw by dice and state the law.
        replacement: draw with replacement, independently, instead of without (coupling "rejection" only).
        search: draft for transformers' beam modes, in which an ended beam frees its place, so end tokens are not
            drafted.
        keeps_rows: pass on the laws that layers were drawn from, for rules that choose widths by them.
        width: how the target chooses the widths of layers; None: they all have `beams` draws.
    """

    lm: LM
    beams: int
    coupling: str = "noise"
    replacement: bool = False
    search: bool = False
    keeps_rows: bool = True
    width: Width | None = None

    @property
    def models(self) -> tuple[LM, ...]:
        """The models that it runs."""
        return (self.lm,)

    @property
    def keeps_nodes(self) -> bool:
        """Whether its forests start with `session.start`."""
        return getattr(self.lm, "keeps_nodes", False)

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return a forest per session, of up to `shape.depth` layers of `shape.width` draft beams."""
        if len(sessions) == 1:
            drafted = self._drafted_by_steps(sessions[0], shapes[0])
            if drafted is not None:
                return [self._passed_on(sessions[0], drafted)]
        drafts = [self._start(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        while active := [draft for draft in drafts if draft.wants_layer]:
            asking = [draft for draft in active if draft.wants_rows]
            answers: list[Scored] = []
            if asking:
                answers = self.lm.extend(
                    [draft.session for draft in asking], [draft.drafted.forest for draft in asking]
                )
            own = dict(zip(asking, answers, strict=True))
            for draft in active:
                draft.session.count.draft_passes += draft in own and takes_a_pass(self.lm, draft.layers)
                with draft.session.failing_alone("draft model: "):
                    draft.grow(
                        on_host(own[draft].logits) if draft in own else draft.drafted.forest.known.rows.logits[:0]
                    )
        return [self._passed_on(draft.session, cut(draft.spec.budget, draft.drafted)) for draft in drafts]

    def _drafted_by_steps(self, session: Session, shape: Shape) -> Cut | None:
        """Return the draft of one compiled call; None if Python has to see rows, or nothing is drafted."""
        begun = self._start(session, shape)
        if not begun.wants_layer:
            return None
        return drafted_by_steps(self.lm, session, shape, begun.spec, self._roots(session))

    def _passed_on(self, session: Session, drafted: Cut) -> Forest:
        """Return the forest that the target scores; store the whole draft until the turn is settled."""
        session.state[_Cut, self] = drafted
        return drafted.forest._replace(known=session.start.known)

    def _roots(self, session: Session) -> Forest:
        """Return the forest that a draft starts with, with known rows in the draft model's vocabulary."""
        start = session.start
        known = start.known._replace(rows=whole_rows(_rows_of_vocab(start.known.rows.logits, self.lm.vocab)))
        return Forest(start.tokens, start.parents, known=known)

    def spec(self, session: Session) -> LayersSpec:
        """Return the spec of a session's layers."""
        warp = session.warp
        noisy = not warp.greedy
        ends = session.limits.ending
        budget = budget_of(session)
        if self.search:
            searched = SearchedLayers(self.beams, ends)
            return LayersSpec(noisy, warp.cut, budget, False, searched)
        if self.coupling == "rejection" and noisy:
            return LayersSpec(noisy, warp.cut, NO_BUDGET, False, DrawnLayers(self.replacement, ends))
        keeps_rows = self.keeps_rows and noisy
        fixed = FixedWidths(self.beams)
        widths = fixed if self.width is None or warp.greedy else width_spec(self.width, by_noise=True)
        if not is_for_steps(widths):
            widths = fixed
        shared = SharedLayers(widths, ends, not keeps_rows)
        return LayersSpec(noisy, warp.cut, budget, keeps_rows, shared)

    def listing(self, session: Session, width: int) -> Listing:
        """Return the lists of tokens by which layers of `width` beams are chosen; see `Drafter`."""
        spec = self.spec(session)
        layers = spec.layers
        pairs = 2 * width  # drafts that are nodes already come in addition
        if isinstance(layers, SearchedLayers):
            ends = len(layers.eos)
            pairs = max(candidate_count(self.beams, ends), (1 + ends) * pairs)
            return listing_for(spec.truncation, spec.noisy, pairs)
        needs_laws = isinstance(layers, DrawnLayers) or spec.keeps_rows
        if needs_laws and not spec.truncation.cuts:
            return WHOLE
        return listing_for(spec.truncation, spec.noisy, pairs + self.beams)

    def _start(self, session: Session, shape: Shape) -> GrowingBeams:
        """Return a draft without layers."""
        spec = self.spec(session)
        return GrowingBeams(session, shape, spec, start_draft(session.beams, self._roots(session), spec))

    def fill(self, sessions: list[Session], most: int) -> list[bool]:
        """Store the next chunk of up to `most` long prompts; return whether each session may take a turn."""
        return fill_prompts(self.lm, sessions, None, most)

    def settle(self, session: Session, turn: Turn) -> None:
        """Settle the draft model's cache, and learn the odds of drafts."""
        done = session.state.pop((_Cut, self), None)
        if done is not None and len(done.odds.live):
            learn_odds(budget_of(session).odds, done.odds, done.whole, turn.verdict.layers, done.node_map)
            turn = turn.on(done.whole, done.node_map)
        self.lm.settle(session, turn)

    def close(self, session: Session) -> None:
        """Free the draft model's state for the session."""
        self.lm.close(session)
