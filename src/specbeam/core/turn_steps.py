"""The steps of one compiled turn: draft, score, verify and settle, by the steps that its parts and engines register."""

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
    live_of,
    live_parents_of,
    no_layers,
    rooted_beams,
    settle_turn,
)
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.control.planning import learn_passed
from specbeam.core.cycles import cycles
from specbeam.core.draft.turns import (
    Cut,
    DraftTask,
    draft_turn,
    learn_from,
)
from specbeam.core.forest import (
    LOST,
    Forest,
    FrontierRows,
    KnownRows,
    Start,
    TurnRows,
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
from specbeam.core.laws.edits import Edits, edited_rows, edits_any
from specbeam.core.laws.evidence import Evidence
from specbeam.core.laws.reduce import BROKEN, SOUND, UNDECIDED
from specbeam.core.noise import child_key
from specbeam.core.passes import (
    Asked,
    SettledTurn,
    keep_only,
    run_ranked_pass,
    runs_layers,
    settle_draft,
    settle_target,
    whole_rows_again,
)
from specbeam.core.ranked import Listing, Ranked, are_whole, rows_between, whole_rows
from specbeam.core.steps import Array, borrowed, step
from specbeam.core.verify.turns import ScoredTurn, verify_turn

PARTS = ("draft", "draft/model", "score/model", "verify", "settle")  # of the time of a turn
DRAFT, DRAFT_MODEL, SCORE, VERIFY, SETTLE = range(5)
# Indices of `RunRoom.numbers`; the last six are the counts of `RowCounts`.
DONE, DRAFT_PASSES, SCORED, DRAFT_SCORED, DRAFTED, LAYERS, ROWS, SAVED, JUDGED, LAZY, FREE, FETCHED = range(12)
REFUSED = 5  # a condition: the model lacks a token or a position of the session
LOOK = 4  # a condition like SOUND, DEAD and BROKEN: Python has to check whether a stop string ended a text


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
    listing: Listing  # the lists by which layers are chosen and decided
    keeps_nodes: bool  # whether scored nodes below the surviving beams are kept for the next turn


@borrowed
class RunRoom(NamedTuple):
    """The buffers that a run writes to."""

    texts: Texts
    finished: Finished
    ended: EndedTexts
    widths: Array  # int64[SPAN]: draws of each layer
    evidence: Evidence  # for audits
    frontier_rows: Ranked  # rows that layers are drawn from
    # int64[12]: turns (DONE), passes as a session counts them and as the models do, draft nodes, layers with draws, and the
    # fields of `RowCounts`
    numbers: Array
    passed: Array  # int64[SPAN]: how often the layer of each depth passed
    cycles: Array  # int64[5], by `PARTS`
    asked: Array  # int64[1]: not 0 if the run is to end after its turn; see `EarlyEnd`


@step
def begun_forest(start: Start, frontier_rows: Ranked) -> Forest:
    """Return the forest that a turn starts with, with the buffer of the rows that layers are drawn from."""
    none = np.empty(0, dtype=np.int64)
    groups = groups_without_laws(LOST, none, none, none, none)
    rows = FrontierRows(none, np.empty(0), none, none, frontier_rows)
    return Forest(start.tokens, start.parents, groups, np.empty(0), none, rows, start.known)


@step
def has_room(room: RunRoom, draws: int, layers: int, uniforms: int, dice: Any) -> bool:
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
    spans: Array  # int64[5]: cycles, by `PARTS`; settling adds its own later


@step
def _may_close(tokens: Array, closing: Array) -> bool:
    """Return whether any of these tokens can complete a stop string."""
    if len(closing) > 0:
        for token in tokens:
            if closing[token]:
                return True
    return False


@step
def keys_in(forest: Forest, live: Beams) -> Array:
    """Return the noise key of the path to each forest node, uint64[nodes]; the live beams are the roots, in order."""
    keys = np.empty(len(forest.tokens), dtype=np.uint64)
    for node in range(len(keys)):
        above = forest.parents[node]
        keys[node] = live.keys[node] if above < 0 else child_key(keys[above], forest.tokens[node])
    return keys


@step
def _frontier_room(room: RunRoom, listing: Listing) -> Ranked:
    """Return the buffer of the rows that layers are drawn from; a new one if whole rows are wanted and it holds lists."""
    rows = room.frontier_rows
    if listing.length > 0 or are_whole(rows):
        return rows
    return whole_rows(np.empty((len(rows.logits), rows.vocab), dtype=rows.logits.dtype))


class DraftedTurn(NamedTuple):
    """A turn after its draft, before the target's pass."""

    task: DraftTask
    draft: Cut
    condition: int  # of the draft
    asked: Asked  # of the target
    layers_run: bool  # whether the pass of the target runs its layers
    passes: int  # of the draft model


@step
def begin_task(
    target: Any, spec: RunSpec, live: Beams, start: Start, room: RunRoom, depth: int, listing: Listing
) -> DraftTask:
    """Return the input of the drafter for a turn.

    Args:
        start: the beginning of the turn's forest.
        depth: of the draft.
        listing: the lists by which layers are chosen; WHOLE: whole rows.
    """
    known_rows = start.known.rows
    if listing.length == 0 and not are_whole(known_rows):
        known_rows = whole_rows_again(target, known_rows, start.known.nodes)
    known_rows = edited_rows(known_rows, start.known.nodes, start.tokens, start.parents, spec.edits)
    known = KnownRows(start.known.nodes, known_rows)
    begun = begun_forest(Start(start.tokens, start.parents, known), _frontier_room(room, listing))
    return DraftTask(begun, live, room.texts, depth, spec.plan.width, spec.edits, listing)


@step
def drafted_turn(target: Any, spec: RunSpec, task: DraftTask, drafted: Cut, condition: int, passes: int) -> DraftedTurn:
    """Return a turn after its draft.

    Args:
        condition: SOUND, DEAD, BROKEN or UNDECIDED, see `draft_turn`.
        passes: of the draft model.
    """
    forest = drafted.forest
    if spec.drafting:
        keep_only(target, drafted.node_map)
    layers_run = runs_layers(target, len(forest.tokens))
    wanted = unknown_nodes(0, len(forest.tokens), forest.known.nodes)
    if condition in (BROKEN, UNDECIDED):
        wanted = wanted[:0]
    asked = Asked(forest.tokens, forest.parents, wanted, keys_in(forest, task.live)[wanted])
    return DraftedTurn(task, drafted, condition, asked, layers_run, passes)


@step
def judged_turn(
    target: Any, spec: RunSpec, turn: DraftedTurn, start: Start, fresh: Ranked, room: RunRoom, dice: Any
) -> RunTurn:
    """Verify a turn whose rows the target has scored, by lists, or by whole rows if lists are not enough.

    Args:
        fresh: the rows of `turn.asked.wanted`; none if the engine refused the nodes.
    """
    forest = turn.draft.forest
    size = len(forest.tokens)
    spans = np.zeros(len(PARTS), dtype=np.int64)
    condition = REFUSED if len(fresh.logits) < len(turn.asked.wanted) else turn.condition
    if condition in (BROKEN, UNDECIDED, REFUSED):
        raw = turn_rows(rows_between(start.known.rows, 0, 0), 0, start.known)
        return RunTurn(turn.draft, raw, no_layers(0, 1), condition, turn.passes, turn.layers_run, spans)
    began = cycles()
    raw = turn_rows(fresh, size, start.known)
    rows = raw
    if edits_any(spec.edits):
        edited = edited_rows(fresh, turn.asked.wanted, forest.tokens, forest.parents, spec.edits)
        rows = turn_rows(edited, size, forest.known)
    held = room.finished.held[0]
    used = dice.used[0]
    evidence = room.evidence.numbers.copy()
    length = room.texts.sizes[LENGTH]
    scored = ScoredTurn(rows, forest, turn.task.live, spec.widths, length, room.finished)
    layers, condition = verify_turn(spec.rule, scored, dice, room.evidence, None)
    if condition == UNDECIDED:
        room.finished.held[0] = held
        dice.used[0] = used
        copy_numbers(room.evidence.numbers, evidence)
        known_again = whole_rows_again(target, start.known.rows, start.known.nodes)
        fresh_again = whole_rows_again(target, fresh, turn.asked.wanted)
        rows = turn_rows(fresh_again, size, KnownRows(start.known.nodes, known_again))
        room.numbers[FETCHED] += size
        scored = ScoredTurn(rows, forest, turn.task.live, spec.widths, length, room.finished)
        layers, condition = verify_turn(spec.rule, scored, dice, room.evidence, None)
    if condition == SOUND and _may_close(layers.beams.tokens, spec.closing):
        condition = LOOK
    spans[VERIFY] = cycles() - began
    return RunTurn(turn.draft, raw, layers, condition, turn.passes, turn.layers_run, spans)


@step
def take_turn(
    target: Any, draft: Any, spec: RunSpec, task: DraftTask, start: Start, room: RunRoom, dice: Any
) -> RunTurn:
    """Draft, score and verify one turn; `task` is that of `begin_task`."""
    began = cycles()
    spent = np.zeros(2, dtype=np.int64)
    drafted, draft_condition = draft_turn(spec.drafts, draft, task, dice, spent)
    turn = drafted_turn(target, spec, task, drafted, draft_condition, spent[0])
    in_draft_model = spent[1]
    scoring = cycles()
    asked = turn.asked
    fresh = rows_between(start.known.rows, 0, 0)
    if len(asked.wanted) > 0:
        fresh = run_ranked_pass(target, asked.tokens, asked.parents, asked.wanted, asked.keys, False, spent)
    scored = cycles()
    judged = judged_turn(target, spec, turn, start, fresh, room, dice)
    judged.spans[DRAFT_MODEL] = in_draft_model
    judged.spans[DRAFT] = scoring - began - in_draft_model
    judged.spans[SCORE] = scored - scoring
    return judged


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
    numbers[ROWS] += len(turn.rows.fresh.logits)
    numbers[JUDGED] += len(layers.draw_ends)
    numbers[DONE] += 1
    numbers[DRAFT_PASSES] += turn.passes
    numbers[SCORED] += turn.layers_run
    numbers[DRAFT_SCORED] += turn.passes - (turn.passes > 0 and not was_waiting)
