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
from specbeam.core.laws.ranked import Listing, Ranked, are_whole, no_lists, rows_between, whole_rows
from specbeam.core.laws.reduce import BROKEN, SOUND, UNDECIDED
from specbeam.core.noise import child_key
from specbeam.core.passes import (
    SettledTurn,
    has_pending,
    has_room_for,
    keep_only,
    rewind,
    run_ranked_pass,
    runs_layers,
    settle_draft,
    settle_target,
    whole_rows_again,
)
from specbeam.core.steps import Array, borrowed, step
from specbeam.core.verify.turns import ScoredTurn, verify_turn

PARTS = ("draft", "draft/model", "score/model", "verify", "settle")  # of the time of a turn
DRAFT, DRAFT_MODEL, SCORE, VERIFY, SETTLE = range(5)
# Indices of `RunRoom.numbers`; the last six are the counts of `RowCounts`.
DONE, DRAFT_PASSES, SCORED, DRAFT_SCORED, DRAFTED, LAYERS, ROWS, SAVED, JUDGED, LAZY, FREE, FETCHED = range(12)
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


@step
def begun_forest(start: Start, frontier_rows: Ranked) -> Forest:
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
def keys_in(forest: Forest, live: Beams) -> Array:
    """Return the noise key of the path to each forest node, uint64[nodes]; the live beams are the roots, in order."""
    keys = np.empty(len(forest.tokens), dtype=np.uint64)
    for node in range(len(keys)):
        above = forest.parents[node]
        keys[node] = live.keys[node] if above < 0 else child_key(keys[above], forest.tokens[node])
    return keys


@step
def _frontier_room(room: RunRoom, vocab: int, listing: Listing) -> Ranked:
    """Return the buffer of the rows that layers are drawn from; a new one if whole rows are wanted and it holds lists."""
    rows = room.frontier_rows
    if listing.count > 0 or are_whole(rows):
        return rows
    return whole_rows(np.empty((len(rows.logits), vocab), dtype=rows.logits.dtype))


@step
def take_turn(
    target: Any,
    draft: Any,
    spec: RunSpec,
    live: Beams,
    start: Start,
    room: RunRoom,
    depth: int,
    dice: Any,
    listing: Listing,
) -> RunTurn:
    """Draft, score and verify one turn.

    Args:
        start: the beginning of its forest.
        depth: of the draft.
        listing: the lists by which layers are chosen; WHOLE: whole rows. The verdict is by the lists of the spec first.
    """
    width = spec.plan.width
    spans = np.zeros(len(PARTS), dtype=np.int64)
    spent = np.zeros(2, dtype=np.int64)
    length = room.texts.sizes[LENGTH]
    known_rows = start.known.rows
    whole = listing.count == 0 and not are_whole(known_rows)
    if whole:
        known_rows = whole_rows_again(target, known_rows, start.known.nodes)
    known_rows = edited_rows(known_rows, start.known.nodes, start.tokens, start.parents, spec.edits)
    known = KnownRows(start.known.nodes, known_rows)
    begun = begun_forest(Start(start.tokens, start.parents, known), _frontier_room(room, known_rows.vocab, listing))
    began = cycles()
    task = DraftTask(begun, live, room.texts, depth, width, spec.edits, listing)
    drafted, condition = draft_turn(spec.drafts, draft, task, dice, spent)
    forest = drafted.forest
    if spec.drafting:
        keep_only(target, drafted.node_map)
    passes = spent[0]
    spans[DRAFT_MODEL] = spent[1]
    spans[DRAFT] = cycles() - began - spent[1]
    layers_run = runs_layers(target, len(forest.tokens))
    layers = no_layers(0, 1)
    none = rows_between(start.known.rows, 0, 0)
    raw = turn_rows(none, 0, start.known)
    if condition != BROKEN and condition != UNDECIDED:
        began = cycles()
        wanted = unknown_nodes(0, len(forest.tokens), known.nodes)
        fresh = none
        if len(wanted) > 0:
            keys = keys_in(forest, live)[wanted]
            fresh = run_ranked_pass(target, forest.tokens, forest.parents, wanted, keys, False, spent)
        raw = turn_rows(fresh, len(forest.tokens), start.known)
        edited = edited_rows(fresh, wanted, forest.tokens, forest.parents, spec.edits)
        rows = turn_rows(edited, len(forest.tokens), known)
        if whole:  # lists are never edited
            rows = raw
        spans[SCORE] = cycles() - began
        began = cycles()
        held = room.finished.held[0]
        used = dice.used[0]
        evidence = room.evidence.numbers.copy()
        scored = ScoredTurn(rows, forest, live, spec.widths, length, room.finished)
        layers, condition = verify_turn(spec.rule, scored, dice, room.evidence, None)
        if condition == UNDECIDED:
            room.finished.held[0] = held
            dice.used[0] = used
            copy_numbers(room.evidence.numbers, evidence)
            known_again = whole_rows_again(target, start.known.rows, start.known.nodes)
            fresh_again = whole_rows_again(target, fresh, wanted)
            rows = turn_rows(fresh_again, len(forest.tokens), KnownRows(known.nodes, known_again))
            room.numbers[FETCHED] += len(forest.tokens)
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
    numbers[ROWS] += len(turn.rows.fresh.logits)
    numbers[JUDGED] += len(layers.draw_ends)
    numbers[DONE] += 1
    numbers[DRAFT_PASSES] += turn.passes
    numbers[SCORED] += turn.layers_run
    numbers[DRAFT_SCORED] += turn.passes - (turn.passes > 0 and not was_waiting)


@step
def undo_turn(target: Any, draft: Any, spec: RunSpec, nodes: int) -> None:
    """Restore the caches to the beginning of a turn whose forest started with `nodes` nodes."""
    rewind(target, nodes)
    if spec.drafting:
        rewind(draft, nodes)


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
        turn = take_turn(target, draft, spec, live, start, room, depth, dice, spec.listing)
        room.finished.held[0] = held  # settling adds the scores again, with their texts
        if turn.condition == UNDECIDED:  # only a draft can be; it is made again from whole rows
            undo_turn(target, draft, spec, len(start.tokens))
            dice.used[0] = used
            keep_tosses(spec.drafts, tosses)
            turn = take_turn(target, draft, spec, live, start, room, depth, dice, no_lists(spec.listing))
            room.finished.held[0] = held
        if turn.condition != SOUND:
            undo_turn(target, draft, spec, len(start.tokens))
            dice.used[0] = used
            keep_tosses(spec.drafts, tosses)
            copy_numbers(room.evidence.numbers, known)
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
