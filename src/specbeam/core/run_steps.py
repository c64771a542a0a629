"""The compiled loop: turns of one session from plan to settle, by the steps that its parts and engines register."""

from typing import Any, NamedTuple

import numpy as np

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
    rooted_beams,
    settle_turn,
)
from specbeam.core.callbacks import call_back
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.control.planning import learn_passed, plan_depth
from specbeam.core.cycles import cycles
from specbeam.core.draft.turns import (
    Cut,
    DraftTask,
    draft_turn,
    keep_tosses,
    learn_from,
    nodes_of,
    tosses_of,
    uniforms_of,
)
from specbeam.core.forest import (
    LOST,
    Forest,
    FrontierRows,
    KnownRows,
    Start,
    TurnRows,
    depths_of,
    drafted_layers,
    find_child,
    groups_without_laws,
    kept_nodes,
    next_start,
    start_of,
    start_of_roots,
    turn_rows,
    unknown_nodes,
)
from specbeam.core.laws.edits import Edits, edited_rows
from specbeam.core.laws.evidence import Evidence
from specbeam.core.laws.reduce import BROKEN, SOUND
from specbeam.core.passes import (
    SettledTurn,
    has_pending,
    has_room_for,
    keep_only,
    rewind,
    run_pass,
    runs_layers,
    settle_draft,
    settle_target,
)
from specbeam.core.steps import Array, borrowed, step
from specbeam.core.verify.turns import ScoredTurn, verify_turn

PARTS = ("draft", "draft/model", "score/model", "verify", "settle")  # of the time of a turn
DRAFT, DRAFT_MODEL, SCORE, VERIFY, SETTLE = range(5)
# Indices of `RunRoom.numbers`; the last five are the counts of `RowCounts`.
DONE, DRAFT_PASSES, SCORED, DRAFT_SCORED, DRAFTED, LAYERS, ROWS, SAVED, JUDGED, LAZY, FREE = range(11)
LOOK = 3  # a condition like SOUND, DEAD and BROKEN: Python has to check whether a stop string ended a text


@borrowed
class RunSpec(NamedTuple):
    """The specs and settings with which compiled turns run the parts of a session."""

    plan: Any  # the numbers of the controller, which have a step `plan_depth`
    drafts: Any  # the spec of the drafter, which has a step `draft_turn`
    drafting: bool  # whether there is a draft model
    rule: Any  # the spec of the rule, which has a step `verify_turn`
    widths: Any  # numbers with a step `asked_width`
    stop: Stop
    edits: Edits
    moved: int  # address of a `Callback` that gets the live beams after each turn; 0: none
    closing: Array  # bool[vocab]: tokens after which Python looks for stop strings; empty: after none
    most_beams: int
    most_turns: int
    keeps_nodes: bool  # whether scored nodes below the surviving beams are kept for the next turn


@borrowed
class RunRoom(NamedTuple):
    """The buffers that a run writes to."""

    texts: Texts
    finished: Finished
    ended: EndedTexts
    widths: Array  # int64[SPAN]: draws of each layer
    evidence: Evidence  # for audits
    frontier_rows: Array  # float32[rows, vocab]: rows that layers are drawn from
    # int64[11]: turns (DONE), passes as a session counts them and as the models do, draft nodes, layers with draws, and the
    # fields of `RowCounts`
    numbers: Array
    passed: Array  # int64[SPAN]: how often the layer of each depth passed
    cycles: Array  # int64[5], by `PARTS`


@step
def begun_forest(start: Start, frontier_rows: Array) -> Forest:
    """Return the forest that a turn starts with, with the buffer of the rows that layers are drawn from."""
    none = np.empty(0, dtype=np.int64)
    groups = groups_without_laws(LOST, none, none, none, none)
    rows = FrontierRows(none, np.empty(0), none, none, frontier_rows)
    return Forest(start.tokens, start.parents, groups, np.empty(0), none, rows, start.known)


@step
def _has_room(room: RunRoom, draws: int, layers: int, uniforms: int, dice: Any) -> bool:
    """Return whether the buffers have capacity for a turn of `layers` layers with `draws` draws in all."""
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
    """A turn of a run after its verdict, before it is settled."""

    draft: Cut
    rows: TurnRows  # before the edits
    layers: Layers
    condition: int  # SOUND; otherwise the turn has to be taken in Python; LOOK: only to look for stop strings
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
    target: Any, draft: Any, spec: RunSpec, live: Beams, start: Start, room: RunRoom, depth: int, dice: Any
) -> RunTurn:
    """Draft, score and verify one turn.

    Args:
        start: the beginning of its forest.
        depth: of the draft.
    """
    width = spec.plan.width
    spans = np.zeros(len(PARTS), dtype=np.int64)
    spent = np.zeros(2, dtype=np.int64)
    length = room.texts.sizes[LENGTH]
    known_rows = edited_rows(start.known.rows, start.known.nodes, start.tokens, start.parents, spec.edits)
    known = KnownRows(start.known.nodes, known_rows)
    begun = begun_forest(Start(start.tokens, start.parents, known), room.frontier_rows)
    began = cycles()
    task = DraftTask(begun, live, room.texts, depth, width, spec.edits)
    drafted, condition = draft_turn(spec.drafts, draft, task, dice, spent)
    forest = drafted.forest
    if spec.drafting:
        keep_only(target, drafted.node_map)
    passes = spent[0]
    spans[DRAFT_MODEL] = spent[1]
    spans[DRAFT] = cycles() - began - spent[1]
    layers_run = runs_layers(target, len(forest.tokens))
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
        scored = ScoredTurn(rows, forest, live, spec.widths, length, room.finished)
        layers, condition = verify_turn(spec.rule, scored, dice, room.evidence, None)
        if condition == SOUND and _may_close(layers.beams.tokens, spec.closing):
            condition = LOOK
        spans[VERIFY] = cycles() - began
    return RunTurn(drafted, raw, layers, condition, passes, layers_run, spans)


@step
def settle_run_turn(target: Any, draft: Any, spec: RunSpec, turn: RunTurn, room: RunRoom) -> tuple[Beams, Start]:
    """Apply a turn to texts and caches, and let its parts learn. Returns the live beams, and the start of the next turn."""
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
    learn_from(spec.drafts, drafted, layers, turn.rows)
    if spec.drafting:
        whole = (drafted.whole.tokens, drafted.whole.parents)
        whole_above = drafted.node_map[above]
        nodes = np.empty(len(above), dtype=np.int64)
        for beam in range(len(above)):
            nodes[beam] = find_child(whole[0], whole[1], whole_above[beam], survivors.tokens[beam])
        known = forest.known.nodes
        begun = (forest.parents < 0).sum() + (forest.parents[known] >= 0).sum()
        fresh = unknown_nodes(0, len(forest.tokens), known)
        settled = SettledTurn(
            whole[0],
            whole[1],
            begun,
            fresh,
            drafted.node_map,
            nodes,
            survivors.tokens,
            whole_above,
            drafted.node_map[kept],
        )
        settle_draft(draft, target, settled)
    settle_target(target, tree, survivors.nodes, survivors.tokens, above, kept)
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
        was_waiting: whether the first pass of the draft model ran its layers (`has_pending`).
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
    """Run up to `spec.most_turns` turns, until the session is over or the next turn exceeds the buffers or has no law.

    Returns the live beams, the start of the next turn, and SOUND; or, if the last turn was undone because Python has to take
    it, BROKEN, or LOOK if Python only has to look for stop strings.

    Args:
        target, draft: the session's caches in its models; both are the target's if there is no draft model.
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
        uniforms = 2 * draws + uniforms_of(spec.drafts, roots, depth, width)
        if not _has_room(room, draws, layers, uniforms, dice):
            break
        if not has_room_for(target, fresh, spec.most_beams) or not has_room_for(draft, fresh, spec.most_beams):
            break
        used = dice.used[0]
        tosses = tosses_of(spec.drafts)
        held = room.finished.held[0]
        known = room.evidence.numbers.copy()
        was_waiting = has_pending(draft)
        turn = take_turn(target, draft, spec, live, start, room, depth, dice)
        room.finished.held[0] = held  # settling adds the scores again, with their texts
        if turn.condition != SOUND:
            dice.used[0] = used
            keep_tosses(spec.drafts, tosses)
            copy_numbers(room.evidence.numbers, known)
            rewind(target, len(start.tokens))
            if spec.drafting:
                rewind(draft, len(start.tokens))
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
