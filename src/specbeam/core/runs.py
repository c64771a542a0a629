"""Runs: many turns of one session in one compiled loop, made of the same steps as single turns."""

import ctypes
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.answers import LOGITS
from specbeam.core.audit import Audit
from specbeam.core.beams import (
    FROM_BEFORE,
    FROM_PASS,
    LENGTH,
    TEXTS,
    UNSEEN,
    USED,
    Beams,
    EndedTexts,
    Finished,
    Layers,
    Stop,
    Texts,
    is_session_over,
    live_of,
    live_parents_of,
    no_layers,
    room_for_ended,
    room_for_texts,
    rooted_beams,
    settle_turn,
)
from specbeam.core.callbacks import Callback, array_at, call_back, integers_at
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.compiling.repeated import Repeated
from specbeam.core.compiling.threads import allowed_threads, torch_on_one_thread
from specbeam.core.control.needs import learn_odds
from specbeam.core.control.planning import Plan, deepest_of, learn_passed, plan_depth
from specbeam.core.control.stopping import learn_stop, stops_of
from specbeam.core.control.stops import NEVER
from specbeam.core.control.width import Widths, is_for_steps
from specbeam.core.cycles import cycles
from specbeam.core.dice import Uniforms
from specbeam.core.draft.batch import models_of
from specbeam.core.draft.beams import Cut, NoDraft, SearchedLayers, SharedLayers, cut, draft_layers, start_draft, uncut
from specbeam.core.draft.stems import StemSpec
from specbeam.core.draft.tree import TreeSpec, finish_growth, grow_tree, most_nodes, start_growth
from specbeam.core.errors import BrokenProcessor
from specbeam.core.forest import (
    MOST_KEPT,
    Forest,
    Fronts,
    KnownRows,
    Siblings,
    Start,
    TurnRows,
    depths_of,
    drafted_layers,
    find_child,
    kept_nodes,
    next_start,
    start_of,
    start_of_roots,
    turn_rows,
    unknown_nodes,
)
from specbeam.core.laws.edits import NO_EDITS, Edits, ban, edited_rows
from specbeam.core.laws.evidence import Evidence, no_evidence
from specbeam.core.laws.reduce import BROKEN, SOUND, log_probabilities
from specbeam.core.laws.warp import Warp, check_rows, processed_rows
from specbeam.core.limits import Limits
from specbeam.core.lm import LM
from specbeam.core.measure.profiler import apportion
from specbeam.core.records import RowCounts
from specbeam.core.session import Parts, Session, failing_together
from specbeam.core.steps import Array, borrowed, compiled_as, step
from specbeam.core.verify.beams import SearchSpec, judge
from specbeam.core.verify.traversal import ClimbSpec, climb
from specbeam.core.verify.walk import WalkSpec, walk_down
from specbeam.engines.cpu.cache_steps import has_unfinished, keep_given, settle_cache
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.kv.steps import KNOWN, SIZE, STORED
from specbeam.engines.pass_steps import SettledTurn, any_has_room, any_waits, rewind_any_cache, run_pass, settle_draft
from specbeam.models.heads.lm import HeadLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.skipping import SkippingLM

SPAN = 128  # most tokens of a run
READ_IN_PYTHONS_TIME = 2_000_000  # weights that a processor reads and multiplies while Python goes to the next session
TURNS = 32  # most turns of a run: between runs a user can interrupt
_LOOKED_AHEAD = (8, 4, 2, 1)  # turns of a run of several sessions, for which room is looked for at once
PATIENCE = 0.5  # seconds of a run of several sessions after which a user can interrupt
PARTS = ("draft", "draft/model", "score/model", "verify", "settle")  # where the time goes
DRAFT, DRAFT_MODEL, SCORE, VERIFY, SETTLE = range(5)
# of `RunRoom.numbers`; the last five are the counts of `RowCounts`
DONE, DRAFT_PASSES, SCORED, DRAFT_SCORED, DRAFTED, LAYERS, ROWS, SAVED, JUDGED, LAZY, FREE = range(11)


LOOK = 3  # a condition beside SOUND, DEAD and BROKEN: Python has to check whether a stop string ended a text
_NO_TOKENS = np.zeros(0, dtype=np.bool_)
_CHANGING = slice(3, 5)  # of the arguments of `run_turns`: the live beams and the start, which compiled turns return
_ONE_AT_A_TIME = threading.Lock()  # for what runs call in Python


RunLM = HuggingFaceLM | HeadLM | SkippingLM


@borrowed
class NoDraftSpec(NamedTuple):
    """Nothing is drafted."""

    vocab: int


@borrowed
class RunSpec(NamedTuple):
    """How the turns of a session go."""

    plan: Plan
    drafts: Any  # SharedLayers, SearchedLayers, DrawnLayers, TreeSpec, StemSpec or NoDraftSpec
    drafting: bool  # whether there is a draft model
    rule: Any  # SharedSpec, SearchSpec, TriedSpec, WalkSpec or ClimbSpec
    widths: Widths
    stop: Stop
    edits: Edits
    moved: int  # address of a `Callback` that gets the live beams after each turn; 0: none
    closing: Array  # bool[vocab]: tokens after which Python looks for stop strings; of no tokens: after none
    most_beams: int
    most_turns: int
    keeps_nodes: bool  # whether nodes that a turn scored below its surviving beams are kept for the next turn


@borrowed
class RunRoom(NamedTuple):
    """What a run writes into."""

    texts: Texts
    finished: Finished
    ended: EndedTexts
    widths: Array  # int64[SPAN]: draws of each layer
    evidence: Evidence  # for audits
    fronts: Array  # float32[rows, vocab]: rows that layers are drawn from
    # int64[11]: turns (DONE), passes as a session counts them and as the models do, draft nodes, layers with draws, and what
    # `RowCounts` holds
    numbers: Array
    passed: Array  # int64[SPAN]: of the turns, how often the layer of each depth passed
    cycles: Array  # int64[5], by `PARTS`


@step
def begun_forest(start: Start, fronts: Array) -> Forest:
    """Return the forest that a turn starts with, with room for the rows that layers are drawn from."""
    groups = Siblings(
        np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64),
        np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64),
        np.empty(0, dtype=np.int64), np.empty(0), 0,
    )  # fmt: skip
    none = np.empty(0, dtype=np.int64)
    rows = Fronts(none, np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), fronts)
    return Forest(start.tokens, start.parents, groups, np.empty(0), np.empty(0, dtype=np.int64), rows, start.known)


@step
def _draft_beams(
    drafts: Any, model: Any, roots: Forest, live: Beams, depth: int, width: int, edits: Edits, dice: Any, spent: Array
) -> tuple[Cut, int]:
    begun = start_draft(live, roots, drafts)
    drafted, condition = draft_layers(model, begun, depth, width, drafts, edits, dice, spent)
    return cut(drafts, drafted), condition


@step
def _draft_tree(
    drafts: Any, model: Any, roots: Forest, live: Beams, depth: int, width: int, edits: Edits, dice: Any, spent: Array
) -> tuple[Cut, int]:
    draft, condition = grow_tree(model, start_growth(roots, drafts), 0, depth, drafts, edits, dice, spent)
    return uncut(finish_growth(draft, drafts)), condition


@step
def _nodes_of_tree(drafts: Any, roots: int, depth: int, width: int) -> int:
    return most_nodes(drafts, roots, depth)


@step
def _nodes_of_layers(drafts: Any, roots: int, depth: int, width: int) -> int:
    return depth * width


@step
def _nodes_of_nothing(drafts: NoDraftSpec, roots: int, depth: int, width: int) -> int:
    return 0


@step
def _draft_nothing(
    drafts: Any, model: Any, roots: Forest, live: Beams, depth: int, width: int, edits: Edits, dice: Any, spent: Array
) -> tuple[Cut, int]:
    return uncut(roots), SOUND


# What does a verb for each kind of spec; where none is named, that of drafts and rules of layers.
_NODES_OF: dict[type, Any] = {TreeSpec: _nodes_of_tree, StemSpec: _nodes_of_tree, NoDraftSpec: _nodes_of_nothing}
_DRAFT_BY: dict[type, Any] = {TreeSpec: _draft_tree, StemSpec: _draft_tree, NoDraftSpec: _draft_nothing}
_VERIFY_BY: dict[type, Any] = {WalkSpec: walk_down, ClimbSpec: climb}


def nodes_of(drafts: Any, roots: int, depth: int, width: int) -> int:
    """Return the most nodes that a draft of this shape adds."""
    return _NODES_OF.get(type(drafts), _nodes_of_layers)(drafts, roots, depth, width)


@compiled_as(nodes_of)
def _compiled_nodes_of(drafts: Any, roots: Any, depth: Any, width: Any) -> Any:
    return _NODES_OF.get(drafts.instance_class, _nodes_of_layers)


def draft_turn(
    drafts: Any, model: Any, roots: Forest, live: Beams, depth: int, width: int, edits: Edits, dice: Any, spent: Array
) -> tuple[Cut, int]:
    """Return what is drafted below the roots, and SOUND, DEAD or BROKEN."""
    draft = _DRAFT_BY.get(type(drafts), _draft_beams)
    return draft(drafts, model, roots, live, depth, width, edits, dice, spent)


@compiled_as(draft_turn)
def _compiled_draft_turn(
    drafts: Any, model: Any, roots: Any, live: Any, depth: Any, width: Any, edits: Any, dice: Any, spent: Any
) -> Any:
    return _DRAFT_BY.get(drafts.instance_class, _draft_beams)


def verify_turn(
    rows: TurnRows, forest: Forest, live: Beams, rule: Any, widths: Any, length: int, finished: Finished,
    dice: Any, evidence: Evidence, eye: None,
) -> tuple[Layers, int]:  # fmt: skip
    """Return the layers that a turn decides, and SOUND, DEAD or BROKEN."""
    verify: Any = _VERIFY_BY.get(type(rule))
    if verify is None:
        return judge(rows, forest, live, rule, widths, length, finished, dice, evidence, eye)
    return verify(rows.fresh, forest, live, rule, widths, length, finished, dice, evidence, eye)


@compiled_as(verify_turn)
def _compiled_verify_turn(
    rows: Any, forest: Any, live: Any, rule: Any, widths: Any, length: Any, finished: Any, dice: Any,
    evidence: Any, eye: Any,
) -> Any:  # fmt: skip
    verify = _VERIFY_BY.get(rule.instance_class)
    if verify is None:
        return judge

    def run(
        rows: Any, forest: Any, live: Any, rule: Any, widths: Any, length: Any, finished: Any, dice: Any,
        evidence: Any, eye: Any,
    ) -> Any:  # fmt: skip
        return verify(rows.fresh, forest, live, rule, widths, length, finished, dice, evidence, eye)

    return run


@step
def runs_layers(model: Any, nodes: int) -> bool:
    """Return whether a pass over a forest of `nodes` nodes runs the layers of the model."""
    counts = model.trie.counts
    return counts[SIZE] > counts[STORED] or nodes > counts[KNOWN]


@step
def _has_room(room: RunRoom, draws: int, layers: int, uniforms: int, dice: Any) -> bool:
    """Return whether there is room for a turn that decides `layers` layers with `draws` draws in all."""
    length = room.texts.sizes[LENGTH] + layers
    ended = room.ended
    texts = ended.sizes[TEXTS] + draws
    tokens = ended.sizes[USED] + draws * length
    return (
        length <= room.texts.tokens.shape[1]
        and texts <= len(ended.ends)
        and tokens <= len(ended.tokens)
        and room.finished.held[0] + 2 * draws <= len(room.finished.scores)
        and room.numbers[LAYERS] + layers <= len(room.widths)
        and dice.used[0] + uniforms <= len(dice.values)
    )


class RunTurn(NamedTuple):
    """A turn of a run that was decided and not yet settled."""

    draft: Cut
    rows: TurnRows  # before the edits
    layers: Layers
    condition: int  # SOUND, or the turn has to be taken in Python; LOOK if only for its text
    passes: int  # of the draft model
    layers_run: bool  # whether the pass of the target ran its layers
    spans: Array  # int64[5]: cycles, by `PARTS`; those of "settle" are added later


@step
def _may_close(tokens: Array, closing: Array) -> bool:
    """Return whether any of these tokens can complete a stop string."""
    if len(closing) > 0:
        for token in tokens:
            if closing[token]:
                return True
    return False


@step
def take_turn(
    target: Any, draft: Any, spec: RunSpec, live: Beams, start: Start, room: RunRoom, depth: int, width: int, dice: Any
) -> RunTurn:
    """Draft, score and verify one turn.

    Args:
        start: what its forest starts with.
        depth, width: of the draft.
    """
    spans = np.zeros(len(PARTS), dtype=np.int64)
    spent = np.zeros(2, dtype=np.int64)
    length = room.texts.sizes[LENGTH]
    known_rows = edited_rows(start.known.rows, start.known.nodes, start.tokens, start.parents, spec.edits)
    known = KnownRows(start.known.nodes, known_rows)
    begun = begun_forest(Start(start.tokens, start.parents, known), room.fronts)
    began = cycles()
    drafted, condition = draft_turn(spec.drafts, draft, begun, live, depth, width, spec.edits, dice, spent)
    forest = drafted.forest
    if spec.drafting:
        keep_given(target, drafted.names)
    passes = spent[0]
    spans[DRAFT_MODEL] = spent[1]
    spans[DRAFT] = cycles() - began - spent[1]
    layers_run = runs_layers(target, len(forest.tokens)) or has_unfinished(target)
    layers = no_layers(0, 1)
    raw = turn_rows(start.known.rows[:0], 0, start.known)
    if condition != BROKEN:
        began = cycles()
        wanted = unknown_nodes(0, len(forest.tokens), known.nodes)
        fresh = start.known.rows[:0]
        if len(wanted) > 0:
            fresh = run_pass(target, forest.tokens, forest.parents, wanted, spent)
        raw = turn_rows(fresh, len(forest.tokens), start.known)
        edited = edited_rows(fresh, wanted, forest.tokens, forest.parents, spec.edits)
        rows = turn_rows(edited, len(forest.tokens), known)
        spans[SCORE] = cycles() - began
        began = cycles()
        layers, condition = verify_turn(
            rows, forest, live, spec.rule, spec.widths, length, room.finished, dice, room.evidence, None
        )
        if condition == SOUND and _may_close(layers.beams.tokens, spec.closing):
            condition = LOOK
        spans[VERIFY] = cycles() - began
    return RunTurn(drafted, raw, layers, condition, passes, layers_run, spans)


def learn_from(drafts: Any, drafted: Cut, layers: Layers) -> None:
    """Learn from what became of drafts, if that decides how the next ones are cut, or where they end."""
    _LEARN_BY.get(type(drafts), _learn_nothing)(drafts, drafted, layers)


@step
def _learn_nothing(drafts: Any, drafted: Cut, layers: Layers) -> None:
    return


@step
def _learn_stop(drafts: Any, drafted: Cut, layers: Layers) -> None:
    learn_stop(drafts.stops, drafted_layers(drafted.forest), layers.passed.sum())


@step
def _learn_from(drafts: Any, drafted: Cut, layers: Layers) -> None:
    if len(drafted.odds.live) > 0:
        learn_odds(drafts.budget.odds, drafted.odds, drafted.whole, layers, drafted.names)


_LEARN_BY: dict[type, Any] = {
    SharedLayers: _learn_from,
    SearchedLayers: _learn_from,
    TreeSpec: _learn_stop,
    StemSpec: _learn_stop,
}
_STOPPING = (TreeSpec, StemSpec)  # drafts that may end between layers


@compiled_as(learn_from)
def _compiled_learn_from(drafts: Any, drafted: Any, layers: Any) -> Any:
    return _LEARN_BY.get(drafts.instance_class, _learn_nothing)


def tosses_of(drafts: Any) -> int:
    """Return how many coins of the controller are used that may end drafts between layers."""
    return int(drafts.stops.coins.used[0]) if isinstance(drafts, _STOPPING) else 0


@compiled_as(tosses_of)
def _compiled_tosses_of(drafts: Any) -> Any:
    if drafts.instance_class in _STOPPING:
        return lambda drafts: drafts.stops.coins.used[0]
    return lambda drafts: 0


def keep_tosses(drafts: Any, used: int) -> None:
    """Take back the coins after the first `used`."""
    if isinstance(drafts, _STOPPING):
        drafts.stops.coins.used[0] = used


@compiled_as(keep_tosses)
def _compiled_keep_tosses(drafts: Any, used: Any) -> Any:
    def keep(drafts: Any, used: Any) -> None:
        drafts.stops.coins.used[0] = used

    def keep_nothing(drafts: Any, used: Any) -> None:
        return

    return keep if drafts.instance_class in _STOPPING else keep_nothing


@step
def settle_run_turn(target: Any, draft: Any, spec: RunSpec, turn: RunTurn, room: RunRoom) -> tuple[Beams, Start]:
    """Move texts, caches and what is learnt to the end of a turn. Returns the live beams, and the start of the next turn."""
    drafted = turn.draft
    forest = drafted.forest
    layers = turn.layers
    learn_passed(spec.plan, layers.passed[: min(drafted_layers(forest), len(layers.draw_ends))])
    survivors = live_of(layers)
    above = live_parents_of(layers)
    settle_turn(room.texts, room.finished, room.ended, forest, layers, survivors, above, spec.stop)
    tree = (forest.tokens, forest.parents)
    kept = np.empty(0, dtype=np.int64)
    if spec.keeps_nodes:
        kept = kept_nodes(forest.parents, survivors.nodes)
    if spec.drafting:
        learn_from(spec.drafts, drafted, layers)
        whole = (drafted.whole.tokens, drafted.whole.parents)
        whole_above = drafted.names[above]
        nodes = np.empty(len(above), dtype=np.int64)
        for beam in range(len(above)):
            nodes[beam] = find_child(whole[0], whole[1], whole_above[beam], survivors.tokens[beam])
        known = forest.known.nodes
        begun = (forest.parents < 0).sum() + (forest.parents[known] >= 0).sum()
        fresh = unknown_nodes(0, len(forest.tokens), known)
        settled = SettledTurn(
            whole[0], whole[1], begun, fresh, drafted.names, nodes, survivors.tokens, whole_above, drafted.names[kept]
        )
        settle_draft(draft, target, settled)
    settle_cache(target, tree, survivors.nodes, survivors.tokens, above, kept)
    if spec.keeps_nodes:
        start = next_start(forest.tokens, forest.parents, turn.rows, survivors.nodes, survivors.tokens, kept)
    else:
        start = start_of_roots(survivors.tokens, turn.rows.known)
    return rooted_beams(survivors), start


@step
def count_turn(room: RunRoom, turn: RunTurn, begun: int, was_waiting: bool) -> None:
    """Add a turn to the numbers of a run.

    Args:
        begun: number of nodes that its forest started with.
        was_waiting: whether the draft model had anything to run before its first pass.
    """
    numbers = room.numbers
    layers = turn.layers
    for number in range(len(layers.draw_ends)):
        counted = 0
        for draw in range(start_of(layers.draw_ends, number), layers.draw_ends[number]):
            counted += layers.beams.counts[draw]
        if counted > 0:
            room.widths[numbers[LAYERS]] = counted
            numbers[LAYERS] += 1
        room.passed[number] += layers.passed[number]
        sources = layers.sources[number]
        numbers[SAVED] += sources[FROM_BEFORE]
        numbers[LAZY] += sources[UNSEEN] > 0
        numbers[FREE] += sources[FROM_PASS] == 0 and sources[FROM_BEFORE] > 0
    numbers[DRAFTED] += len(turn.draft.forest.tokens) - begun
    numbers[ROWS] += len(turn.rows.fresh)
    numbers[JUDGED] += len(layers.draw_ends)
    numbers[DONE] += 1
    numbers[DRAFT_PASSES] += turn.passes
    numbers[SCORED] += turn.layers_run
    numbers[DRAFT_SCORED] += turn.passes - (turn.passes > 0 and not was_waiting)


@step
def run_turns(
    target: Any, draft: Any, spec: RunSpec, live: Beams, start: Start, room: RunRoom, turns: int, dice: Any
) -> tuple[Beams, Start, int]:
    """Run turns until the session is over, for a while, or until the next one does not fit or has no law.

    Returns the live beams, the start of the next turn, and SOUND; or BROKEN where the last turn was taken back and has to be
    taken in Python, or LOOK where that is so for its text alone.

    Args:
        target, draft: the session in its models; the target's own, if nothing is drafted.
        turns: number of turns so far.
    """
    stop = spec.stop
    numbers = room.numbers
    over = False
    while not over and numbers[DONE] < spec.most_turns:
        roots = len(live.tokens)
        remaining = stop.most - room.texts.sizes[LENGTH]
        depth = plan_depth(spec.plan, roots, turns + numbers[DONE], remaining)
        width = spec.plan.width
        if depth < 0:
            break
        fresh = nodes_of(spec.drafts, roots, depth, width)
        layers = 1 + max(depth, depths_of(start.parents).max())
        draws = fresh + spec.most_beams * layers
        if not _has_room(room, draws, layers, 2 * draws + fresh, dice):
            break
        if not any_has_room(target, fresh, spec.most_beams) or not any_has_room(draft, fresh, spec.most_beams):
            break
        used = dice.used[0]
        tosses = tosses_of(spec.drafts)
        held = room.finished.held[0]
        known = room.evidence.numbers.copy()
        was_waiting = any_waits(draft)
        turn = take_turn(target, draft, spec, live, start, room, depth, width, dice)
        room.finished.held[0] = held  # settling adds them again, with their texts
        if turn.condition != SOUND:
            dice.used[0] = used
            keep_tosses(spec.drafts, tosses)
            copy_numbers(room.evidence.numbers, known)
            rewind_any_cache(target, len(start.tokens))
            if spec.drafting:
                rewind_any_cache(draft, len(start.tokens))
            return live, start, LOOK if turn.condition == LOOK else BROKEN
        began = cycles()
        begun = len(start.tokens)
        live, start = settle_run_turn(target, draft, spec, turn, room)
        count_turn(room, turn, begun, was_waiting)
        over = is_session_over(room.finished, stop, live.scores, room.texts.sizes[LENGTH])
        if (
            spec.moved != 0
            and call_back(spec.moved, (live.tokens.ctypes.data, len(live.tokens), over, 0, 0, 0, 0, 0)) != 0
        ):
            break
        turn.spans[SETTLE] = cycles() - began
        for part in range(len(turn.spans)):
            room.cycles[part] += turn.spans[part]
    return live, start, SOUND


class _Refused:
    """A mark in the state of a session in which a turn was not for a run: the rest goes turn by turn."""


class _Looking:
    """A mark in the state of a session: before which turn a run stopped, so that Python looks at the text of that turn."""


def spec_of(part: object, verb: str, session: Session) -> Any:
    """Return the numbers by which steps do the verb of a part; None if it has none.

    A part that is derived from one of ours and does the verb in its own way does it in Python.
    """
    for kind in type(part).__mro__:
        if verb in vars(kind):
            return part.spec(session) if "spec" in vars(kind) else None  # type: ignore[attr-defined]
    return None


def run_spec(target: LM, session: Session, most_turns: int) -> tuple[RunSpec, list[RunLM], bool] | None:
    """Return how the turns of a session go, its models, and whether Python makes rows; None if a part decides in Python."""
    warp = session.warp
    if not isinstance(target, HuggingFaceLM) or not target.supports_runs or _Refused in session.state:
        return None
    closing = session.limits.closing if session.limits.stop_strings else _NO_TOKENS
    if not warp.is_for_runs or closing is None:
        return None
    if session.state.get(_Looking) == session.count.target_passes:
        return None
    parts = session.parts
    if parts.own_needs != LOGITS:
        return None
    rule = spec_of(parts.rule, "verify", session)
    plan = numbers_of(parts.controller, session)
    if rule is None or plan is None:
        return None
    if len(closing) > 0 and isinstance(rule, SearchSpec) and (rule.noisy or rule.by_dice):
        return None  # a candidate that ends may count though it makes no layer
    widths = parts.rule.widths(session)  # type: ignore[attr-defined]
    if not is_for_steps(widths):
        return None
    models: list[RunLM] = [target]
    if isinstance(parts.drafter, NoDraft):
        if plan.depth != 0:
            return None
        drafts: Any = NoDraftSpec(target.vocab)
    else:
        drafts = _drafts_of(parts.drafter, parts.controller, session, most_turns * deepest_of(plan))
        drafting = models_of(parts.drafter) or (None,)
        lm = drafting[0]
        if drafts is None or not isinstance(lm, RunLM):
            return None
        if not lm.supports_runs or lm.vocab != target.vocab:
            return None
        if isinstance(lm, HeadLM) and not lm.is_ready(session):
            return None
        if isinstance(lm, SkippingLM) and not lm.is_settled(session):
            return None
        models.append(lm)
    stop = session.limits.stop
    edits = warp.edits(session.prompt)
    spec = RunSpec(
        plan, drafts, len(models) > 1, rule, widths, stop, edits or NO_EDITS, 0, closing, widths.most, most_turns,
        session.keeps_nodes,
    )  # fmt: skip
    return spec, models, edits is None and not warp.takes_raw_rows


def _drafts_of(drafter: object, controller: object, session: Session, tosses: int) -> Any:
    """Return the numbers by which steps draft; None if a part does it in Python.

    Args:
        tosses: the most coins of a controller that a run tosses.
    """
    drafts = spec_of(drafter, "draft", session)
    stops = stops_of(controller, session, tosses)
    if stops is None or stops.kind == NEVER:
        return None if stops is None else drafts
    return drafts._replace(stops=stops) if isinstance(drafts, _STOPPING) else None


def numbers_of(controller: object, session: Session) -> Plan | None:
    """Return the numbers by which a controller plans; None if it plans in Python."""
    for kind in type(controller).__mro__:
        if "plan" in vars(kind):
            return controller.numbers(session) if "numbers" in vars(kind) else None  # type: ignore[attr-defined]
    return None


class RowsOfSession:
    """Callbacks through which a run processes a session's rows in Python: by logits processors and constraints.

    If a processor raises, the turn is taken back, and turn-by-turn decoding meets the same error and reports it. An error
    of the constraint between two turns ends the run, and `Run.keep` raises it.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        here = weakref.ref(self)  # a callback that held this object would keep the session until garbage is collected
        self.rows = Callback(lambda *numbers: _alive(here)._process(*numbers))
        self.moved = Callback(lambda *numbers: _alive(here)._move(*numbers))
        processors = session.warp.processors or []
        self.constraint = session.warp.constraint if len(processors) == 1 else None  # if it is all that changes rows

    def for_run(self, spec: RunSpec) -> RunSpec:
        """Return how the turns of a run go if it calls this object, which has to outlive it."""
        constrained = self.session.warp.constraint is not None
        edits = spec.edits._replace(callback=self.rows.address)
        return spec._replace(edits=edits, moved=self.moved.address if constrained else 0)

    def raise_what_remains(self) -> None:
        """Raise what the constraint raised, and interrupts; what else processors raised is met again turn by turn."""
        for failure in (self.moved.failure, self.rows.failure):
            if failure is not None and (failure is self.moved.failure or not isinstance(failure, Exception)):
                raise failure

    def _process(
        self, rows: int, count: int, vocab: int, wide: int, tokens: int, parents: int, nodes: int, wanted: int
    ) -> None:
        """Put rows through the processors, in place: `count` of them, of the forest nodes at the address `wanted`.

        One call at a time in the whole process: runs go side by side in threads, and the sessions of a request share
        processors, which may keep a state of their own.
        """
        with _ONE_AT_A_TIME:
            self._process_alone(rows, count, vocab, wide, tokens, parents, nodes, wanted)

    def _process_alone(
        self, rows: int, count: int, vocab: int, wide: int, tokens: int, parents: int, nodes: int, wanted: int
    ) -> None:
        kind = ctypes.c_double if wide == 8 else ctypes.c_float
        raw = array_at(rows, count * vocab, kind).reshape(count, vocab)
        forest_tokens = integers_at(tokens, nodes)
        forest_parents = integers_at(parents, nodes)
        wanted_nodes = integers_at(wanted, count).copy()
        if self.constraint is not None:
            check_rows(raw)
            if self.session.warp.search:
                raw[:] = log_probabilities(raw)
            ban(raw, self.constraint.allowed_below(forest_tokens, forest_parents, wanted_nodes, vocab))
            return
        forest = Forest.rooted(forest_tokens.copy())._replace(parents=forest_parents.copy())
        depths = forest.depths()[wanted_nodes]
        for depth in np.unique(depths):  # processors see texts of one length
            at = np.flatnonzero(depths == depth)
            there = raw[at]
            session = self.session
            changed = processed_rows(there, session.warp, partial(session.paths, forest, wanted_nodes[at]))
            if changed.dtype != raw.dtype:
                raise BrokenProcessor(f"a logits processor returned {changed.dtype} for {raw.dtype}")
            raw[at] = changed

    def _move(self, tokens: int, count: int, over: int, *_: int) -> None:
        """Let the constraint forget all paths but those of the live beams, which end with these tokens."""
        live = integers_at(tokens, count).copy() if count > 0 and not over else np.zeros(0, dtype=np.int64)
        with _ONE_AT_A_TIME:
            self.session.keep_constraint(live)


def _alive(reference: "weakref.ref[RowsOfSession]") -> RowsOfSession:
    """Return what a run refers to: it holds it until it is over."""
    found = reference()
    assert found is not None
    return found


@dataclass(eq=False)
class Run:
    """Turns of one session as one compiled loop: what it takes, and what came of it."""

    session: Session
    spec: RunSpec
    models: list[RunLM]
    room: RunRoom
    fresh: int  # most nodes that a turn drafts
    dice: Uniforms
    live: Beams
    start: Start
    python: "RowsOfSession | None" = None  # what the run calls
    condition: int = SOUND
    run_turns: Repeated = field(default_factory=lambda: Repeated(run_turns, _CHANGING))
    has_room: Repeated = field(default_factory=lambda: Repeated(any_has_room, slice(0)))
    target_cache: Any = None  # the session in the target, as `caches` returned it last

    @classmethod
    def of(cls, target: LM, session: Session, most_turns: int) -> "Run | None":
        """Return a run of at most `most_turns` turns; None if the session cannot be decoded in runs."""
        session.beside = 1
        paused: PausedRun | None = session.state.pop(PausedRun, None)
        if paused is not None and paused.fits(session, most_turns):
            return paused.run_of(session)
        found = run_spec(target, session, most_turns)
        if found is None:
            return None
        spec, models, makes_rows = found
        deepest = deepest_of(spec.plan)
        fresh = _most_nodes(spec, session, deepest)
        dice = session.dice.ready(_uniforms_of(spec, fresh, deepest))
        room = _room_for(spec, session)
        spec = spec._replace(edits=spec.edits._replace(texts=room.texts))
        python = None
        if makes_rows:
            python = RowsOfSession(session)
            spec = python.for_run(spec)
        start = session.start
        known = KnownRows(start.known.nodes, np.ascontiguousarray(start.known.rows, dtype=np.float32))
        return cls(session, spec, models, room, fresh, dice, session.beams, start._replace(known=known), python)

    def caches(self, stack: ExitStack) -> list[Any] | None:
        """Return the session in each of its models, with room for the run until the stack is left.

        None where it cannot run now: a long prompt goes in first, or others are stored beside it, of whom a run knows
        nothing. Valid until any session is given more room.
        """
        more = min(self.session.remaining, SPAN) + (MOST_KEPT if self.spec.keeps_nodes else 0)
        fresh = self.fresh + self.spec.most_beams
        needs = [self.session.parts.needs, *(LOGITS for _ in self.models[1:])]
        for lm in self.models:
            if isinstance(lm, SkippingLM):
                lm.store_before_roots(self.session)
        found: list[Any] = []
        for lm, need in zip(self.models, needs, strict=True):
            if isinstance(lm, SkippingLM):
                cache: Any = lm.cache_for_run(self.session, fresh, self.spec.most_beams)
            else:
                cache = lm.cache_for_steps(self.session, fresh, more, need)
            found.append(stack.enter_context(cache))
        caches = [cache.arrays for cache in found if cache is not None]
        if len(caches) < len(self.models) or any(lm.shares(self.session) for lm in self.models):
            return None
        self.target_cache = caches[0]
        return caches

    def held_target(self) -> Any:
        """Return the session in the target as its last run had it, if that is what `caches` would return; else None."""
        target = self.models[0]
        is_held = isinstance(target, HuggingFaceLM) and target.still_has(self.session, self.target_cache)
        return self.target_cache if is_held else None

    def take(self, caches: list[Any]) -> None:
        """Take the turns. Needs no interpreter: several runs go side by side in threads."""
        turns = self.session.count.target_passes
        self.live, self.start, self.condition = run_turns(
            caches[0], caches[-1], self.spec, self.session.beams, self.start, self.room, turns, self.dice
        )

    def take_one(self, cache: Any) -> bool:
        """Take one turn, of which a pass of several sessions has made the rows. Returns whether another can follow.

        Args:
            cache: the session in the target, as `extend_together` returns it.
        """
        done = int(self.room.numbers[DONE])
        turns = self.session.count.target_passes
        spec = self.spec._replace(most_turns=done + 1)
        self.live, self.start, self.condition = self.run_turns(
            cache, cache, spec, self.live, self.start, self.room, turns, self.dice
        )
        if self.room.numbers[DONE] == done or self.condition != SOUND:
            return False
        if self.python is not None and self.python.moved.failure is not None:
            return False
        return not is_session_over(
            self.room.finished, self.spec.stop, self.live.scores, int(self.room.texts.sizes[LENGTH])
        )

    def keep(self) -> bool:
        """Move the session to the end of the run. Returns True if any turn ran. Raises what its constraint raised."""
        _keep(self.session, self.models, self.room, self.live, self.start)
        if self.python is not None:
            self.python.raise_what_remains()
        if self.condition == LOOK:
            self.session.state[_Looking] = self.session.count.target_passes
        elif self.condition != SOUND:
            self.session.state[_Refused] = True
        done = bool(self.room.numbers[DONE])
        goes_on = done and self.condition == SOUND and not self.session.over
        if goes_on and self.python is None and not self.spec.drafting:
            self.session.state[PausedRun] = PausedRun.of(self)
        return done


@dataclass(frozen=True, eq=False)
class PausedRun:
    """What a run of a session leaves to its next run, where nothing drafts and Python makes no rows: itself.

    To find out anew how the turns of a session go, and to make room for its texts, takes as long as a turn of a small model.
    """

    run: Run
    parts: Parts
    limits: Limits
    warp: Warp

    @classmethod
    def of(cls, run: Run) -> "PausedRun":
        """Return what a run leaves that was kept, and what it was made of."""
        session = run.session
        return cls(run, session.parts, session.limits, session.warp)

    def fits(self, session: Session, most_turns: int) -> bool:
        """Return whether the session is as the run left it, and there is room for so many turns more."""
        run = self.run
        texts = run.room.texts
        is_as_before = session.beams is run.live and session.start is run.start
        goes_as_before = session.parts is self.parts and session.limits is self.limits and session.warp is self.warp
        if not is_as_before or not goes_as_before or session.texts is not texts or most_turns != run.spec.most_turns:
            return False
        draws = most_turns * run.spec.most_beams
        has_room = session.length + most_turns <= texts.tokens.shape[1]
        return has_room and session.finished_with_room(2 * draws) is run.room.finished

    def run_of(self, session: Session) -> Run:
        """Return the next run of the session."""
        run = self.run
        room = run.room
        if session.audited:
            room = room._replace(evidence=no_evidence(not session.warp.greedy))
        for written in (room.ended.sizes, room.numbers, room.passed, room.cycles):
            written[:] = 0
        dice = session.dice.ready(_uniforms_of(run.spec, run.fresh, deepest_of(run.spec.plan)))
        return replace(run, room=room, dice=dice)


def run_ahead(target: LM, session: Session, most_turns: int = TURNS) -> bool:
    """Advance the only live session by as many turns as a run supports, leaving the same state as turn-by-turn decoding.

    Returns True if any turn ran.
    """
    run = Run.of(target, session, most_turns)
    if run is None:
        return False
    with ExitStack() as stack:
        caches = run.caches(stack)
        if caches is None:
            return False
        began = time.perf_counter()
        run.take(caches)
    apportion(dict(zip(PARTS, run.room.cycles.tolist(), strict=True)), began)
    return run.keep()


def run_side_by_side(target: LM, sessions: Sequence[Session], most_turns: int = TURNS) -> list[Session]:
    """Advance several sessions, each by its own run, on as many threads as torch may use.

    Returns the sessions that took a turn or failed. For the others sharing passes is faster: sessions whose models exceed
    the processor's caches, as reading the weights once for all saves more than threads do; and, on a single thread, those
    that are not of `_gains_alone`. See `run_together`.
    """
    if not getattr(target, "is_small", False):
        return _failed(sessions)
    threads = allowed_threads()
    gaining = [session for session in sessions if threads > 1 or _gains_alone(target, session)]
    if not gaining:
        return _failed(sessions)
    with torch_on_one_thread(compiled_threads=1), ExitStack() as stack:  # each run stays on one thread
        every = [_small_run(target, session, most_turns) for session in gaining]
        runs = [run for run in every if run is not None]
        for run in runs:
            _caches_of(run, stack)  # first make room for all: growing the store moves the arrays of every session
        ready = [(run, caches) for run in runs if (caches := _caches_of(run, stack)) is not None]
        if not ready:
            return _failed(sessions)
        began = time.perf_counter()
        with ThreadPoolExecutor(min(threads, len(ready))) as pool:
            taken = [pool.submit(run.take, caches) for run, caches in ready]
    cycles_of_all = sum((run.room.cycles for run, _ in ready), np.zeros(len(PARTS), dtype=np.int64))
    apportion(dict(zip(PARTS, cycles_of_all.tolist(), strict=True)), began)
    moved = []
    for (run, _), one in zip(ready, taken, strict=True):
        with run.session.failing_alone():
            one.result()
            if run.keep():
                moved.append(run.session)
    return moved + _failed(sessions)


def run_together(target: LM, sessions: Sequence[Session], most_turns: int = TURNS) -> list[Session]:
    """Advance sessions that draft nothing, each by its own run, whose passes of the target are one for all of them.

    It ends when one of them cannot go on, so that another may take its place, or after a while. Returns the sessions that
    took a turn or failed.
    """
    if len(sessions) < 2 or not isinstance(target, HuggingFaceLM) or not target.supports_runs:
        return _failed(sessions)
    with ExitStack() as stack:
        every = [_run_without_drafts(target, session, most_turns) for session in sessions]
        runs = [run for run in every if run is not None]
        ready = _with_room(runs, stack)
        if len(ready) < 2:
            return _failed(sessions)
        fitting = _turns_with_room(ready)
        if fitting == 0:
            for run in runs:
                run.target_cache = None
            ready = _with_room(runs, stack)
        began = time.perf_counter()
        spent = np.zeros(len(PARTS), dtype=np.int64)
        going = True
        for _ in range(most_turns):
            fitting = fitting or _turns_with_room(ready)
            if fitting == 0:  # the next run makes room
                break
            fitting -= 1
            before = cycles()
            target.passes += any(runs_layers(cache, len(run.start.tokens)) for run, cache in ready)
            given = list[Any]()
            with failing_together([run.session for run, _ in ready]):
                given = target.extend_together([cache for _, cache in ready], [run.start for run, _ in ready])
            spent[SCORE] += cycles() - before
            for (run, _), cache in zip(ready, given, strict=False):
                can_go_on = False
                with run.session.failing_alone():
                    if isinstance(cache, Exception):
                        raise cache
                    can_go_on = run.take_one(cache)
                going = going and can_go_on
            going = going and len(given) > 0
            if not going or time.perf_counter() - began > PATIENCE:
                break
    for run, _ in ready:
        spent += run.room.cycles
    apportion(dict(zip(PARTS, spent.tolist(), strict=True)), began)
    moved = []
    for run, _ in ready:
        if run.session.failure is None:
            with run.session.failing_alone():
                if run.keep():
                    moved.append(run.session)
    return moved + _failed(sessions)


def _with_room(runs: Sequence[Run], stack: ExitStack) -> list[tuple[Run, Any]]:
    """Do `_targets_of`, after room was made for all runs."""
    ready = _targets_of(runs, stack)
    if any(_has_moved(cache, run.models[0]) for run, cache in ready):
        return _targets_of(runs, stack)
    return ready


def _targets_of(runs: Sequence[Run], stack: ExitStack) -> list[tuple[Run, Any]]:
    """Return those of the runs that can run now, each with its session in the target: as it was, or with room anew."""
    found = []
    for run in runs:
        cache = run.held_target()
        if cache is None:
            caches = _caches_of(run, stack)
            cache = None if caches is None else caches[0]
        if cache is not None:
            found.append((run, cache))
    return found


def _has_moved(cache: Any, target: RunLM) -> bool:
    """Return whether what a session's arrays are views of was moved when another session was given room."""
    runner: Any = getattr(target, "runner", None)
    if not isinstance(runner, PackedPasses):
        return False
    sources = getattr(runner, "cross", None)
    return cache.keys is not runner.store.keys_by_panel or (
        sources is not None and cache.sources.keys is not sources.keys
    )


def _turns_with_room(ready: Sequence[tuple[Run, Any]]) -> int:
    """Return a number of turns that the caches of all of these runs have room for; 0 if one of them may have none.

    A turn adds a node for each live beam, so several turns add no more than one with so many drafts more.
    """
    for turns in _LOOKED_AHEAD:
        if all(run.has_room(cache, (turns - 1) * run.spec.most_beams, run.spec.most_beams) for run, cache in ready):
            return turns
    return 0


def _run_without_drafts(target: LM, session: Session, most_turns: int) -> Run | None:
    """Return a run of a session that drafts nothing; None if it is of another kind. One that fails keeps its error."""
    if not isinstance(session.parts.drafter, NoDraft):
        return None
    with session.failing_alone():
        return Run.of(target, session, most_turns)
    return None


def _failed(sessions: Sequence[Session]) -> list[Session]:
    return [session for session in sessions if session.failure is not None]


def _gains_alone(target: LM, session: Session) -> bool:
    """Return whether a run of a session is faster than its share of passes of many sessions, on a single thread.

    A shared pass reads the weights once for all, and Python goes from session to session. So those of the smallest models
    gain, and those with drafts, whose turns Python takes.
    """
    is_drafting = not isinstance(session.parts.drafter, NoDraft)
    return is_drafting or getattr(target, "weights", 0) < READ_IN_PYTHONS_TIME


def _small_run(target: LM, session: Session, most_turns: int) -> Run | None:
    """Return a run of a session, if a processor's caches hold its models. A session that fails keeps its error."""
    run = None
    with session.failing_alone():
        run = Run.of(target, session, most_turns)
    return run if run is not None and all(lm.is_small for lm in run.models) else None


def _caches_of(run: Run, stack: ExitStack) -> list[Any] | None:
    """Return `run.caches`; None if the session has failed, which keeps its error."""
    with run.session.failing_alone():
        return run.caches(stack)
    return None


def _most_nodes(spec: RunSpec, session: Session, deepest: int) -> int:
    """Return the most nodes that a turn drafts."""
    return int(nodes_of(spec.drafts, session.beams.size, deepest, spec.plan.width))


def _uniforms_of(spec: RunSpec, fresh: int, deepest: int) -> int:
    """Return how many uniforms the turns of a run may take; none where everything is drawn by noise."""
    draws = fresh + spec.most_beams * (deepest + 1)
    return spec.most_turns * (2 * draws + fresh)


def _room_for(spec: RunSpec, session: Session) -> RunRoom:
    length = session.length + SPAN
    session.texts = room_for_texts(session.texts, max(spec.most_beams, session.beams.size), length)
    draws = spec.most_beams * SPAN
    ended = 2 * spec.most_beams * (deepest_of(spec.plan) + 2) + 64
    rows = 0
    drafts = spec.drafts
    if isinstance(drafts, SharedLayers) and drafts.keeps_rows:
        rows = spec.most_beams + deepest_of(spec.plan) * spec.plan.width
    vocab = session.parts.drafter.lm.vocab if rows else 0  # type: ignore[attr-defined]
    return RunRoom(
        texts=session.texts,
        finished=session.finished_with_room(2 * draws + 2 * ended),
        ended=room_for_ended(ended, length),
        widths=np.empty(SPAN, dtype=np.int64),
        evidence=no_evidence(session.audited and not session.warp.greedy),
        fronts=np.empty((rows, vocab), dtype=np.float32),
        numbers=np.zeros(11, dtype=np.int64),
        passed=np.zeros(SPAN, dtype=np.int64),
        cycles=np.zeros(5, dtype=np.int64),
    )


def _keep(session: Session, models: list[RunLM], room: RunRoom, live: Beams, start: Start) -> None:
    """Move the session and its models to the end of a run, and add up its counters."""
    numbers = room.numbers
    count = session.count
    for lm, passes in zip(models, (numbers[SCORED], numbers[DRAFT_SCORED]), strict=False):
        lm.finish_run(session, int(passes), live.size)
    count.target_passes += int(numbers[DONE])
    count.draft_passes += int(numbers[DRAFT_PASSES])
    count.drafted += int(numbers[DRAFTED])
    count.add_passed(room.passed)
    count.widths += room.widths[: numbers[LAYERS]].tolist()
    count.peak_kv_tokens = models[0].peak(session)
    if session.audited:
        session.audit += Audit.of(room.evidence)
    count.rows += RowCounts(*numbers[ROWS:].tolist())
    session.put_aside(room.ended)
    session.beams = live
    session.start = start
