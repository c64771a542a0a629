"""VERIFY: beams, layer by layer. The survivors have the law of beam sampling with the width of each layer.

One loop and one joint law serve both couplings and transformers' beam modes, which differ only in how they draw.
"""

from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from specbeam.core.audit import Audit
from specbeam.core.beams import (
    FROM_BEFORE,
    FROM_PASS,
    UNSEEN,
    Beams,
    Layers,
    Stop,
    add_finished,
    add_layer,
    first_layers,
    is_session_over,
    live_of,
    no_layers,
    picked_beams,
)
from specbeam.core.control.width import (
    UNKNOWN_WIDTH,
    FixedWidth,
    FixedWidths,
    Width,
    asked_width,
    draft_law,
    ignores_drafts,
    is_for_steps,
    width_of_known,
    width_spec,
)
from specbeam.core.draft.beams import candidate_count, draw_pairs, first_places, going_on
from specbeam.core.errors import DeadEnd
from specbeam.core.forest import (
    CHOSEN,
    DISTINCT,
    SHARED,
    Forest,
    TurnRows,
    find_child,
    most_layers,
    nodes_without,
    rows_in_place,
    rows_of_nodes,
    scored_rows_of,
    start_of,
)
from specbeam.core.laws.edits import follows_text, rows_with_bans
from specbeam.core.laws.evidence import Evidence, gathers, no_evidence, note_draw
from specbeam.core.laws.joint import (
    Choice,
    JointLaw,
    all_pairs,
    bound_of,
    choice_of,
    choose,
    condition_of,
    core_and_extra,
    drawn_pairs,
    joint_law,
    log_odds_among,
    named_pairs,
    odds_among,
    place_of_pair,
)
from specbeam.core.laws.listing import listing_for
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.reduce import SOUND, UNDECIDED
from specbeam.core.laws.warp import Warp, check_condition, law_of_processed, left_by_others, on_host, processed_rows
from specbeam.core.ranked import WHOLE, Listing, whole_rows
from specbeam.core.records import Trial, Verdict
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, step, verb
from specbeam.core.verify.trials import Drafts, take_draws
from specbeam.core.verify.turns import ScoredTurn, ends_between_layers, verify_turn

ROUNDING = 1e-5  # exceeds the rounding error of a value


@borrowed
class SharedSpec(NamedTuple):
    """Layers are the target's own best pairs under noise that drafts share, or its best pairs at temperature 0."""

    noisy: bool  # False: nothing is drawn
    beams: int  # maximum number of draws of a layer
    truncation: Truncation
    stop: Stop
    lazy: bool  # whether a layer is decided without the rows of live beams that cannot win, see `most_value`


@borrowed
class TriedSpec(NamedTuple):
    """Layers are draws by dice, in place of which draft draws are tried."""

    again: bool  # independent draws, with replacement
    beams: int
    truncation: Truncation
    stop: Stop


@borrowed
class SearchSpec(NamedTuple):
    """Layers are those of transformers' beam modes: candidates, some of which stay live."""

    noisy: bool  # False: nothing is drawn, unless by dice
    by_dice: bool
    beams: int
    truncation: Truncation
    stop: Stop
    lazy: bool  # see `SharedSpec`


JudgeSpec = SharedSpec | TriedSpec | SearchSpec


@verb(0)
def law_at(rows: Any, live: Beams, spec: JudgeSpec) -> JointLaw:
    """Return the target's law of the pairs that extend live beams, each at a forest node.

    Args:
        rows: the logits of all forest nodes; or an object that makes laws in Python.
    """
    found: JointLaw = rows.law(live)
    return found


@law_at.of(TurnRows)
@step
def law_of_rows(rows: TurnRows, live: Beams, spec: JudgeSpec) -> JointLaw:
    """Return the law of these logits; see `law_at`."""
    return joint_law(rows_in_place(rows, live.nodes), live.scores, live.counts, spec.truncation)


@verb(0)
def look_at(observer: Any, law: JointLaw, live: Beams, choice: Choice, looked: int) -> None:
    """Show the draws of a layer to an observer, which marks texts that ended; do nothing if it is None.

    Args:
        looked: number of drafts that were tried.
    """
    observer.look(law, live, choice, looked)


@look_at.of(NoneType)
def look_at_nothing(observer: None, law: JointLaw, live: Beams, choice: Choice, looked: int) -> None:
    """Do nothing: there is no observer."""
    return


@step
def rows_of_beams(forest: Forest, number: int, live: Beams) -> tuple[Array, Array]:
    """Return the row of each live beam in layer `number` of the draft, and the beam of each row; -1 for none."""
    groups = forest.siblings
    start = start_of(groups.parent_ends, number)
    stop = groups.parent_ends[number]
    row_of = np.full(len(live.nodes), -1, dtype=np.int64)
    beam_of = np.full(stop - start, -1, dtype=np.int64)
    for beam in range(len(live.nodes)):
        for row in range(stop - start):
            if groups.parents[start + row] == live.nodes[beam]:
                row_of[beam] = row
                beam_of[row] = beam
    return row_of, beam_of


@step
def drafts_on(forest: Forest, number: int, live: Beams, pairs: Array, vocab: int) -> Drafts:
    """Return the drafts of layer `number` on trial against a law over these pairs of live beams, ascending.

    The pairs are numbers beam * vocabulary size + token.

    The draft law's mass under dead parents is left out, so its sum may be below 1: a draft there is rejected, and the
    residual accounts for the rejection (docs/exactness.md).
    """
    groups = forest.siblings
    row_of, beam_of = rows_of_beams(forest, number, live)
    law_start = start_of(groups.law_ends, number)
    own = groups.law_odds[law_start : groups.law_ends[number]].copy()
    named = groups.law_pairs[law_start : groups.law_ends[number]] if len(groups.law_pairs) > 0 else groups.law_pairs
    first = start_of(groups.draw_ends, number)
    count = groups.draw_ends[number] - first
    places = np.full(count, -1, dtype=np.int64)
    own_places = np.full(count, -1, dtype=np.int64)
    for draw in range(count):
        row = groups.rows[first + draw]
        token = groups.tokens[first + draw]
        own_places[draw] = np.searchsorted(named, row * groups.vocab + token)
        if beam_of[row] >= 0:
            pair = beam_of[row] * vocab + token
            place = np.searchsorted(pairs, pair)
            if place < len(pairs) and pairs[place] == pair:
                places[draw] = place
    on_wanted = odds_on_pairs(pairs, vocab, row_of, named, own, groups.vocab)
    kind = groups.kinds[number]
    return Drafts(places, own_places, own, on_wanted, kind == DISTINCT, kind == CHOSEN)


@step
def odds_on_pairs(pairs: Array, vocab: int, row_of: Array, named: Array, odds: Array, own_vocab: int) -> Array:
    """Return the draft odds of pairs of live beams, float64[pairs]; 0 where the draft has none."""
    found = np.zeros(len(pairs))
    for place in range(len(pairs)):
        row = row_of[pairs[place] // vocab]
        token = pairs[place] % vocab
        if row < 0 or token >= own_vocab:
            continue
        pair = row * own_vocab + token
        at = np.searchsorted(named, pair)
        if at < len(named) and named[at] == pair:
            found[place] = odds[at]
    return found


@step
def no_drafts(size: int) -> Drafts:
    """Return an empty set of drafts against a law over `size` pairs."""
    none = np.empty(0, dtype=np.int64)
    return Drafts(none, none, np.empty(0), np.zeros(size), False, False)


@verb(0, has_body=False)
def draw_layer(  # type: ignore[empty-body]
    spec: Any, law: JointLaw, live: Beams, forest: Forest, number: int, width: int, dice: Any, evidence: Evidence
) -> tuple[Choice, Array, int]:
    """Return the pairs that a layer drew, how often each was drawn, and how many drafts were tried.

    For transformers' beam modes the pairs are candidates, some of which stay live (`which_settle`).
    """


@step
def _drafts_of(forest: Forest, number: int) -> int:
    """Return the number of drafts of a layer."""
    ends = forest.siblings.draw_ends
    return ends[number] - start_of(ends, number) if number < len(ends) else 0


@draw_layer.of(SharedSpec)
@step
def draw_shared(
    spec: SharedSpec, law: JointLaw, live: Beams, forest: Forest, number: int, width: int, dice: Any, evidence: Evidence
) -> tuple[Choice, Array, int]:
    """Return the best pairs under shared noise; see `draw_layer`."""
    every = np.ones(len(live.tokens), dtype=np.bool_)
    choice = choose(law, live.keys, spec.noisy, every, width, 0, spec.stop.eos)
    return choice, np.ones_like(choice.tokens), _drafts_of(forest, number)


@draw_layer.of(SearchSpec)
@step
def draw_candidates(
    spec: SearchSpec, law: JointLaw, live: Beams, forest: Forest, number: int, width: int, dice: Any, evidence: Evidence
) -> tuple[Choice, Array, int]:
    """Return the candidates of a layer of transformers' beam modes; see `draw_layer`."""
    eos = spec.stop.eos
    count = candidate_count(spec.beams, len(eos))
    if spec.by_dice:
        pairs = all_pairs(law)
        pairs = pairs[draw_pairs(odds_among(law, pairs), min(count, len(pairs)), False, dice)]
        values = np.full(len(pairs), np.nan)
    else:
        every = np.ones(len(live.tokens), dtype=np.bool_)
        keys = live.keys if spec.noisy else live.keys[:0]
        pairs, values, _ = core_and_extra(law, keys, every, count, 0)
    choice = choice_of(law, live.keys, pairs, values, len(pairs), eos)
    return choice, np.ones_like(choice.tokens), _drafts_of(forest, number)


@draw_layer.of(TriedSpec)
@step
def draw_tried(
    spec: TriedSpec, law: JointLaw, live: Beams, forest: Forest, number: int, width: int, dice: Any, evidence: Evidence
) -> tuple[Choice, Array, int]:
    """Return draws by dice, in place of which draft draws were tried; see `draw_layer`."""
    pairs = all_pairs(law)
    drafts = no_drafts(len(pairs))
    if number < len(forest.siblings.kinds):
        drafts = drafts_on(forest, number, live, named_pairs(law, pairs), law.rows.vocab)
    taken, looked = take_draws(odds_among(law, pairs), drafts, width, spec.again, dice, evidence)
    distinct, _, counts = first_places(taken)
    values = np.full(len(distinct), np.nan)
    return choice_of(law, live.keys, pairs[distinct], values, len(distinct), spec.stop.eos), counts, looked


@verb(0)
def is_lazy(spec: Any) -> bool:
    """Return whether a layer may be decided without the rows of live beams that cannot win."""
    return False


@is_lazy.of(SharedSpec, SearchSpec)
def is_spec_lazy(spec: Any) -> bool:
    """Return the setting of the rule; see `is_lazy`."""
    return spec.lazy


@step
def most_value(spec: Any, beams: Beams) -> float:
    """Return an upper bound of the values of these beams' pairs, computed without their rows; see `bound_of`."""
    most = -np.inf
    for beam in range(len(beams.tokens)):
        bound = bound_of(spec.truncation, spec.noisy, beams.scores[beam], beams.counts[beam], beams.keys[beam])
        most = max(most, bound)
    return most + ROUNDING


@verb(0)
@step
def draw_among_known(spec: Any, law: JointLaw, known: Beams, width: int) -> Choice:
    """Return the pairs that a layer draws from the live beams with rows, best first.

    Rules that draw by dice need the law of all live beams, so they get no pairs.

    Args:
        law: the law of the pairs of `known` alone.
    """
    return choice_of(law, known.keys, np.empty(0, dtype=np.int64), np.empty(0), 0, spec.stop.eos)


@step
def _best_of_known(spec: Any, law: JointLaw, known: Beams, count: int) -> Choice:
    every = np.ones(len(known.tokens), dtype=np.bool_)
    keys = known.keys if spec.noisy else known.keys[:0]
    pairs, values = drawn_pairs(law, keys, every, count)
    return choice_of(law, known.keys, pairs, values, len(pairs), spec.stop.eos)


@draw_among_known.of(SharedSpec)
@step
def draw_shared_among_known(spec: SharedSpec, law: JointLaw, known: Beams, width: int) -> Choice:
    """Return the best pairs; see `draw_among_known`."""
    return _best_of_known(spec, law, known, width)


@draw_among_known.of(SearchSpec)
@step
def draw_candidates_among_known(spec: SearchSpec, law: JointLaw, known: Beams, width: int) -> Choice:
    """Return the candidates; see `draw_among_known`."""
    return _best_of_known(spec, law, known, candidate_count(spec.beams, len(spec.stop.eos)))


@verb(0)
def pairs_needed(spec: Any, choice: Choice, width: int, is_last: bool) -> int:
    """Return how many of the best pairs a layer depends on.

    Args:
        is_last: whether the layer is the last one of the text.
    """
    return width


@pairs_needed.of(SearchSpec)
@step
def candidates_needed(spec: SearchSpec, choice: Choice, width: int, is_last: bool) -> int:
    """Return how many candidates matter: all if they are drawn, otherwise those down to the last one that stays live.

    The first `beams` always matter, because they may finish; in the last layer of a text no others do.
    """
    if is_last:
        return spec.beams
    if not spec.noisy:
        going = 0
        for place in range(len(choice.ends)):
            going += not choice.ends[place]
            if going == spec.beams:
                return place + 1
    return candidate_count(spec.beams, len(spec.stop.eos))


@verb(0)
def is_decided(spec: Any, choice: Choice, unknown: Beams, width: int, is_last: bool) -> bool:
    """Return whether a layer draws the same from all live beams as from those with rows.

    Args:
        choice: the result of `draw_among_known`.
        unknown: the live beams without rows.
    """
    return False


@is_decided.of(SharedSpec, SearchSpec)
@step
def is_above(spec: Any, choice: Choice, unknown: Beams, width: int, is_last: bool) -> bool:
    """Return whether every pair that a layer depends on is better than any possible pair of the other beams."""
    needed = pairs_needed(spec, choice, width, is_last)
    return len(choice.values) >= needed and most_value(spec, unknown) < choice.values[needed - 1]


@step
def edge_of_layer(spec: Any, choice: Choice, width: int, is_last: bool) -> float:
    """Return the value of the last pair that a layer depends on; NaN if dice drew the pairs, or there are none."""
    if len(choice.values) == 0:
        return np.nan
    needed = pairs_needed(spec, choice, width, is_last)
    return choice.values[min(needed, len(choice.values)) - 1]


@verb(0)
def which_settle(spec: Any, choice: Choice, is_last: bool) -> Array:
    """Return which drawn pairs make the layer, int64[pairs].

    In transformers' beam modes the best-scored candidates that did not end stay live, and the first ones may finish; in
    the last layer of a text all beams come from the first candidates.
    """
    return np.arange(len(choice.tokens))


@which_settle.of(SearchSpec)
@step
def which_go_on_or_finish(spec: SearchSpec, choice: Choice, is_last: bool) -> Array:
    """Return the candidates that stay live or may finish; see `which_settle`."""
    first = min(spec.beams, len(choice.tokens))
    looked = first if is_last else len(choice.tokens)
    going = going_on(choice.scores[:looked], choice.ends[:looked], spec.beams)
    return np.concatenate((going, np.flatnonzero(choice.ends[:first])))


@ends_between_layers.of(SearchSpec)
def candidates_end(rule: SearchSpec) -> bool:
    """Return whether candidates are drawn: one that ends may count outside of the layer; see `ends_between_layers`."""
    return rule.noisy or rule.by_dice


@step
def settle_layer(choice: Choice, counts: Array, which: Array, live: Beams, forest: Forest) -> Layers:
    """Return the single layer of the drawn pairs `which`."""
    found = no_layers(len(which), 1)
    beams = found.beams
    for place in range(len(which)):
        drawn = which[place]
        parent = live.nodes[choice.parents[drawn]]
        token = choice.tokens[drawn]
        found.parents[place] = parent
        found.ended[place] = choice.ends[drawn]
        beams.nodes[place] = find_child(forest.tokens, forest.parents, parent, token)
        beams.tokens[place] = token
        beams.scores[place] = choice.scores[drawn]
        beams.counts[place] = counts[drawn]
        beams.keys[place] = choice.keys[drawn]
    found.draw_ends[0] = len(which)
    found.widths[0] = len(which)
    return found


@step
def are_drafts(layer: Layers) -> bool:
    """Return whether every draw of a layer that did not end is a draft node."""
    goes_on_as_draft = layer.beams.nodes >= 0
    return bool((layer.ended | goes_on_as_draft).all())


@step
def note_first_draw(evidence: Evidence, law: JointLaw, choice: Choice) -> None:
    """Note the first pair of a layer for an audit: it has the joint law in both couplings."""
    pairs = all_pairs(law)
    logp, odds = log_odds_among(law, pairs)
    note_draw(evidence, logp, odds, place_of_pair(law, pairs, choice.parents[0], choice.tokens[0]))


@step
def live_with_rows(live: Beams) -> Beams:
    """Return the beams at forest nodes, which have rows."""
    return picked_beams(live, live.nodes >= 0)


@step
def live_without_rows(live: Beams) -> Beams:
    """Return the beams that were not drafted, which have no rows."""
    return picked_beams(live, live.nodes < 0)


@step
def count_sources(live: Beams, unknown: Beams, known: Array, sources: Array) -> None:
    """Count the live beams of a layer by the source of their rows; see `Layers.sources`.

    Args:
        live, unknown: the live beams with rows, and without.
        known: int64[n], the forest nodes whose rows earlier turns computed.
    """
    fresh = len(nodes_without(live.nodes, known))
    sources[FROM_PASS] = fresh
    sources[FROM_BEFORE] = len(live.nodes) - fresh
    sources[UNSEEN] = len(unknown.tokens)


@verify_turn.of(SharedSpec, TriedSpec, SearchSpec)
@step
def judge(spec: Any, turn: ScoredTurn, dice: Any, evidence: Evidence, observer: Any) -> tuple[Layers, int]:
    """Judge the drafted layers up to the first one with a beam that is not a draft, or to one layer after the last draft.

    A lazy turn continues past such a layer while the next one can be decided without the rows of these beams: while
    none of their pairs can be drawn, whatever their rows contain. So laziness changes when a turn ends, and never what
    is drawn.

    Returns the layers, and SOUND; or DEAD or BROKEN if the target had no law to draw the next layer from; or UNDECIDED if a
    layer cannot be decided from lists of tokens, and has to be judged by whole rows.

    Args:
        evidence: trials and first draws are noted in it, for audits.
        observer: see `look_at`.
    """
    forest = turn.forest
    live = turn.live
    drafted = most_layers(forest)
    most = candidate_count(spec.beams, len(spec.stop.eos))
    room = no_layers(most * (drafted + 1), drafted + 1)
    # Audits need all rows of every layer: the layers that cannot be decided lazily are selected for noise that favours
    # the beams without rows.
    lazy = is_lazy(spec) and not gathers(evidence)
    unknown = live_without_rows(live)
    number = 0
    going = True
    while going:
        law = law_at(turn.rows, live, spec)
        condition = condition_of(law)
        is_whole = len(unknown.tokens) == 0
        if condition != SOUND:
            return first_layers(room, number), condition if is_whole else SOUND
        longer = turn.length + number + 1
        is_last = longer >= spec.stop.most
        if is_whole:
            width = asked_width(turn.widths, law, live, forest, number)
            choice, counts, looked = draw_layer(spec, law, live, forest, number, width, dice, evidence)
            if law.undecided[0]:
                return first_layers(room, number), UNDECIDED
            if gathers(evidence):
                note_first_draw(evidence, law, choice)
            look_at(observer, law, live, choice, looked)
        else:
            width = width_of_known(turn.widths, law, unknown)
            if width == UNKNOWN_WIDTH:
                return first_layers(room, number), UNDECIDED if law.undecided[0] else SOUND
            choice = draw_among_known(spec, law, live, width)
            if law.undecided[0]:
                return first_layers(room, number), UNDECIDED
            look_at(observer, law, live, choice, 0)
            if not is_decided(spec, choice, unknown, width, is_last):
                return first_layers(room, number), SOUND
            counts = np.ones_like(choice.tokens)
            room.passed[number - 1] = True
        which = which_settle(spec, choice, is_last)
        layer = settle_layer(choice, counts, which, live, forest)
        passed = number < drafted and are_drafts(layer)
        add_layer(room, number, layer, width, passed)
        room.edges[number] = edge_of_layer(spec, choice, width, is_last)
        count_sources(live, unknown, forest.known.nodes, room.sources[number])
        add_finished(turn.finished, spec.stop, layer, longer)
        every = live_of(layer)
        unknown = live_without_rows(every)
        live = live_with_rows(every)
        may_pass = passed or (lazy and number < drafted and len(live.tokens) > 0)
        number += 1
        going = may_pass and not is_session_over(turn.finished, spec.stop, every.scores, longer)
    return first_layers(room, number), SOUND


@dataclass(eq=False)
class LawsInPython:
    """The laws of a turn where Python has to see the rows, for logits processors and custom warpers."""

    session: Session
    forest: Forest
    rows: TurnRows

    def law(self, live: Beams) -> JointLaw:
        """Return the law of the pairs that extend live beams. Raises `BrokenProcessor`."""
        warp = self.session.warp
        rows = rows_of_nodes(self.rows, live.nodes).logits
        rows = processed_rows(rows, warp, lambda: self.session.paths(self.forest, live.nodes))
        counts = np.ones_like(live.counts) if warp.greedy else live.counts
        law = law_of_processed(whole_rows(rows), live.scores, counts, warp)
        if warp.others and not warp.greedy and condition_of(law) == SOUND:
            return left_by_others(law, warp)
        return law


@dataclass(eq=False)
class LayerObserver:
    """An observer of a turn's layers, which marks texts ended by a stop string and records laws for visualisations."""

    session: Session
    forest: Forest
    trace: bool
    seen: "list[tuple[JointLaw, Beams, int]]"

    def look(self, law: JointLaw, live: Beams, choice: Choice, looked: int) -> None:
        """Observe the draws of the next layer, for which `looked` drafts were tried."""
        limits = self.session.limits
        if limits.stop_strings:
            nodes = live.nodes[choice.parents]
            before = self.session.new_tokens(self.forest, nodes)
            for place, path in enumerate(before.tolist()):
                text = [*path, int(choice.tokens[place])]
                choice.ends[place] |= limits.stopped_by(text) is not None
        if self.trace:
            self.seen.append((law, live, looked))


def can_be_lazy(warp: Warp) -> bool:
    """Return whether the weight of all pairs of a beam is bounded by the beam's score, see `most_value`.

    Custom warpers may change any score. Transformers' beam modes do not normalise scores after processors, so no
    processor may raise a score there.
    """
    is_bounded = warp.is_bounded and warp.cut.temperature <= 1
    return is_bounded and (warp.greedy or not warp.others)


@dataclass(frozen=True)
class BeamRule:
    """Judge the drafts of each layer, up to the first layer with a drawn beam that is not a draft.

    Args:
        width: the number of draws of each layer, decided before its drafts are tried.
        coupling: "noise": the target takes its own best pairs under the noise of (seed, path, token), and the layer
            passes if they are drafts. "rejection": draft draws are accepted or rejected one by one.
        replacement: draws with replacement (coupling "rejection" only).
        collapse: keep only the live beam of highest likelihood after each turn (arXiv 2409.16560, sec. 3.4).
        trace: record every trial in the verdict, for visualisations.

    Law: given the widths, every layer is `width` draws from the target's joint law over (live beam, token) pairs
    (docs/exactness.md, trajectory theorem). With a fixed width this is beam sampling.
    """

    width: Width
    coupling: str = "noise"
    replacement: bool = False
    collapse: bool = False
    trace: bool = False

    keeps_nodes: ClassVar[bool] = True

    @property
    def tries(self) -> bool:
        """Whether drafts are tried against their law."""
        return self.coupling == "rejection"

    def spec(self, session: Session) -> JudgeSpec | None:
        """Return the spec by which compiled turns are judged; None if Python collapses or traces after each turn."""
        return None if self.collapse or self.trace else self.judge_spec(session)

    def judge_spec(self, session: Session) -> JudgeSpec:
        """Return the spec by which steps judge layers for a session; nothing is drawn at temperature 0."""
        warp = session.warp
        stop = session.limits.stop
        if self.coupling == "rejection" and not warp.greedy:
            return TriedSpec(self.replacement, self.width.most, warp.cut, stop)
        is_of_target = ignores_drafts(self.width) or warp.greedy
        lazy = is_of_target and not warp.cut.cuts and can_be_lazy(warp)
        return SharedSpec(not warp.greedy, self.width.most, warp.cut, stop, lazy)

    def ignores_drafts(self, session: Session) -> bool:
        """Return whether texts are independent of the drafts, so that drafts may be cut by their content."""
        is_of_target = ignores_drafts(self.width) or session.warp.greedy
        return is_of_target and not self.collapse and (not self.tries or session.warp.greedy)

    def is_lazy(self, session: Session) -> bool:
        """Return whether layers are decided without the rows of beams that cannot win."""
        return bool(is_lazy(self.judge_spec(session)))

    def listing(self, session: Session) -> Listing:
        """Return the lists of tokens by which layers are decided; see `Rule`."""
        spec = self.judge_spec(session)
        noisy = not session.warp.greedy
        is_fixed = isinstance(self.widths(session), FixedWidths) and isinstance(spec, SharedSpec)
        if not spec.truncation.cuts and not is_fixed:
            return WHOLE
        return listing_for(spec.truncation, noisy, spec.beams)

    def widths(self, session: Session) -> Any:
        """Return the spec by which steps choose widths, or a user's own policy."""
        width = FixedWidth(self.width.most) if session.warp.greedy else self.width
        return width_spec(width, self.coupling == "noise")

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        """Return the verdict on a forest."""
        found = judged_beams(session, forest, scored, self.judge_spec(session), self.widths(session), self.trace)
        collapsed = None
        if self.collapse and found.beams.size:
            collapsed = int(np.argmax(found.beams.scores))
        return Verdict(found.layers, found.trials, found.audit, collapsed)


def judged_beams(
    session: Session,
    forest: Forest,
    scored: Float[torch.Tensor, "nodes vocab"],
    spec: JudgeSpec,
    widths: Any,
    trace: bool,
) -> Verdict:
    """Return the verdict of `judge`: compiled, or from source if Python has to see rows or layers.

    Raises `BrokenLaw`; `DeadEnd` if no live beam has an allowed token and none ended before. If layers were decided before
    the dead end, they are returned, and the next turn raises.
    """
    rows = scored_rows_of(forest, on_host(scored))
    most = max(candidate_count(spec.beams, len(spec.stop.eos)), spec.beams)
    layers_at_most = most_layers(forest) + 1
    finished = session.finished_with_room(most * layers_at_most)
    before = int(finished.held[0])
    draws = len(forest.siblings.tokens) + most * layers_at_most
    dice = session.dice.ready(2 * draws + spec.beams)
    evidence = no_evidence(session.audited and not session.warp.greedy)
    observer = None
    makes_laws = not session.warp.takes_raw_rows
    if makes_laws and session.warp.is_for_runs and not trace and not session.limits.stop_strings:
        edits = session.warp.edits(session.prompt)
        if edits is not None and not follows_text(edits):  # Python does not have to see the rows
            rows = rows._replace(fresh=rows_with_bans(rows.fresh, edits), known=rows_with_bans(rows.known, edits))
            makes_laws = False
    is_custom = not is_for_steps(widths)
    if trace or session.limits.stop_strings:
        observer = LayerObserver(session, forest, trace, [])
    laws = LawsInPython(session, forest, rows) if makes_laws else rows
    turn = ScoredTurn(laws, forest, session.beams, widths, session.length, finished)
    needs_python = observer is not None or makes_laws or is_custom
    judging = getattr(judge, "py_func", judge) if needs_python else judge
    layers, condition = judging(spec, turn, dice, evidence, observer)
    finished.held[0] = before  # the session adds them when it advances
    if condition != SOUND and layers.size == 0:
        try:
            check_condition(condition, rows_of_nodes(rows, session.beams.nodes).logits, session.warp)
        except DeadEnd:
            if not session.ended:
                raise
            layers = dead_end()
    audit = Audit.of(evidence) if session.audited else None
    trials = trials_of(observer.seen, forest, layers) if observer is not None and trace else ()
    return Verdict(layers, trials, audit)


def dead_end() -> Layers:
    """Return one layer without draws, for live beams without an allowed token."""
    found = no_layers(0, 1)
    found.draw_ends[0] = 0
    found.widths[0] = 0
    return found


def trials_of(seen: "list[tuple[JointLaw, Beams, int]]", forest: Forest, layers: Layers) -> tuple[Trial, ...]:
    """Return all drafts of the judged layers, and all pairs that were drawn in their place."""
    trials: list[Trial] = []
    for number, (law, live, looked) in enumerate(seen[: layers.size]):
        trials += _trials_of_layer(law, live, looked, forest, layers, number)
    return tuple(trials)


def _trials_of_layer(
    law: JointLaw, live: Beams, looked: int, forest: Forest, layers: Layers, number: int
) -> list[Trial]:
    layer = layers.layer(number)
    drawn = set(zip(layer.parents.tolist(), layer.beams.tokens.tolist(), strict=True))
    vocab = law.rows.vocab
    target = _odds_by_pair(law)
    beam_of = {int(node): beam for beam, node in enumerate(live.nodes)}
    draft, row_of, own_vocab = _draft_odds(forest, number, law.truncation)

    def trial(parent: int, token: int, node: int, fate: str) -> Trial:
        p = target.get(beam_of[parent] * vocab + token, 0.0) if parent in beam_of else 0.0
        q = draft.get(row_of[parent] * own_vocab + token, 0.0) if parent in row_of else 0.0
        return Trial(number + 1, parent, token, node, p, q, fate)

    trials: list[Trial] = []
    drafts: set[tuple[int, int]] = set()
    if number < forest.siblings.size:
        group = forest.siblings.group(number)
        above = group.draw_parents.tolist()
        for place, (parent, token) in enumerate(zip(above, group.tokens.tolist(), strict=True)):
            fate = "rejected" if place < looked else "unused"
            if (parent, token) in drawn:
                fate = "accepted"
            drafts.add((parent, token))
            trials.append(trial(parent, token, int(group.nodes[place]), fate))
    return trials + [trial(parent, token, -1, "resampled") for parent, token in sorted(drawn - drafts)]


def _odds_by_pair(law: JointLaw) -> dict[int, float]:
    pairs = all_pairs(law)
    return dict(zip(named_pairs(law, pairs).tolist(), odds_among(law, pairs).tolist(), strict=True))


def _draft_odds(forest: Forest, number: int, truncation: Truncation) -> tuple[dict[int, float], dict[int, int], int]:
    """Return the known draft odds of a layer's pairs, the row of each parent, and the size of the vocabulary."""
    if number >= forest.siblings.size:
        return {}, {}, 0
    group = forest.siblings.group(number)
    row_of = {int(node): row for row, node in enumerate(group.parents)}
    if group.kinds[0] != SHARED:
        named = group.law_pairs if len(group.law_pairs) else np.arange(len(group.law_odds))
        return dict(zip(named.tolist(), group.law_odds.tolist(), strict=True)), row_of, group.vocab
    if number >= len(forest.frontier_rows.row_ends):
        return {}, row_of, group.vocab
    return _odds_by_pair(draft_law(forest.frontier_rows, number, truncation)), row_of, group.vocab
