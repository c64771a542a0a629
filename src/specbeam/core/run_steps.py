"""The compiled loop: turns of one session, by the steps of `turn_steps`."""

from typing import Any, NamedTuple

from specbeam.core.beams import LENGTH, Beams, is_session_over
from specbeam.core.callbacks import call_back
from specbeam.core.compiling.copies import copy_numbers
from specbeam.core.control.planning import plan_depth
from specbeam.core.cycles import cycles
from specbeam.core.draft.turns import keep_tosses, nodes_of, tosses_of, uniforms_of
from specbeam.core.forest import Start, depths_of
from specbeam.core.laws.reduce import BROKEN, SOUND, UNDECIDED
from specbeam.core.passes import has_pending, has_room_for, rewind
from specbeam.core.ranked import no_lists
from specbeam.core.steps import Array, step
from specbeam.core.turn_steps import (
    DONE,
    LOOK,
    SETTLE,
    RunRoom,
    RunSpec,
    RunTurn,
    begin_task,
    count_turn,
    has_room,
    settle_run_turn,
    take_turn,
)

NO_TURN = -1  # in place of a depth: the plan or the buffers allow no further turn


@step
def next_depth(
    target: Any, draft: Any, spec: RunSpec, live: Beams, start: Start, room: RunRoom, turns: int, dice: Any
) -> int:
    """Return the depth of the next turn's draft; NO_TURN if the plan or the buffers allow no further turn.

    Args:
        turns: number of turns before the run.
    """
    roots = len(live.tokens)
    remaining = spec.stop.most - room.texts.sizes[LENGTH]
    depth = plan_depth(spec.plan, roots, turns + room.numbers[DONE], remaining)
    width = spec.plan.width
    if depth < 0:
        return NO_TURN
    fresh = nodes_of(spec.drafts, roots, depth, width)
    layers = 1 + max(depth, depths_of(start.parents).max())
    draws = fresh + spec.most_beams * layers
    uniforms = 2 * draws + uniforms_of(spec.drafts, roots, depth, width)
    if not has_room(room, draws, layers, uniforms, dice):
        return NO_TURN
    if not has_room_for(target, fresh, spec.most_beams) or not has_room_for(draft, fresh, spec.most_beams):
        return NO_TURN
    return depth


class Mark(NamedTuple):
    """The numbers that a turn changes before it is settled, as they were at its beginning."""

    uniforms: int  # number of used uniforms
    tosses: int  # number of used coins of the controller
    finished: int  # number of finished beams
    evidence: Array  # the numbers of the audit
    nodes: int  # number of nodes that the turn's forest starts with
    was_waiting: bool  # whether the first pass of the draft model runs its layers


@step
def mark_turn(draft: Any, spec: RunSpec, start: Start, room: RunRoom, dice: Any) -> Mark:
    """Return the numbers at the beginning of a turn."""
    evidence = room.evidence.numbers.copy()
    nodes = len(start.tokens)
    return Mark(dice.used[0], tosses_of(spec.drafts), room.finished.held[0], evidence, nodes, has_pending(draft))


@step
def undo_turn(target: Any, draft: Any, spec: RunSpec, mark: Mark, room: RunRoom, dice: Any) -> None:
    """Restore caches and numbers to the beginning of a turn."""
    rewind(target, mark.nodes)
    if spec.drafting:
        rewind(draft, mark.nodes)
    dice.used[0] = mark.uniforms
    keep_tosses(spec.drafts, mark.tosses)
    copy_numbers(room.evidence.numbers, mark.evidence)
    room.finished.held[0] = mark.finished


@step
def finish_turn(
    target: Any, draft: Any, spec: RunSpec, turn: RunTurn, room: RunRoom, mark: Mark
) -> tuple[Beams, Start, bool, bool]:
    """Settle and count a turn that was decided.

    Returns the live beams, the start of the next turn, whether the session is over, and whether the run is to end.
    """
    began = cycles()
    room.finished.held[0] = mark.finished  # settling adds the scores again, with their texts
    live, start = settle_run_turn(target, draft, spec, turn, room)
    count_turn(room, turn, mark.nodes, mark.was_waiting)
    over = is_session_over(room.finished, spec.stop, live.scores, room.texts.sizes[LENGTH])
    stops = room.asked[0] != 0
    if spec.moved != 0:
        failed = call_back(spec.moved, (live.tokens.ctypes.data, len(live.tokens), over, 0, 0, 0, 0, 0)) != 0
        stops = stops or failed
    turn.spans[SETTLE] = cycles() - began
    for part in range(len(turn.spans)):
        room.cycles[part] += turn.spans[part]
    return live, start, over, stops


@step
def run_turns(
    target: Any, draft: Any, spec: RunSpec, live: Beams, start: Start, room: RunRoom, turns: int, dice: Any
) -> tuple[Beams, Start, int]:
    """Run up to `spec.most_turns` turns, until the session is over or the next turn exceeds the buffers or has no law.

    Ends earlier if it is asked to (`RunRoom.asked`).

    Returns the live beams, the start of the next turn, and SOUND; or, if the last turn was undone because Python has to take
    it, BROKEN, or LOOK if Python only has to look for stop strings.

    Args:
        target, draft: the session's caches in its models; both are the target's if there is no draft model.
        turns: number of turns so far.
    """
    over = False
    while not over and room.numbers[DONE] < spec.most_turns:
        depth = next_depth(target, draft, spec, live, start, room, turns, dice)
        if depth == NO_TURN:
            break
        mark = mark_turn(draft, spec, start, room, dice)
        task = begin_task(target, spec, live, start, room, depth, spec.listing)
        turn = take_turn(target, draft, spec, task, start, room, dice)
        if turn.condition == UNDECIDED:  # only a draft can be; it is made again from whole rows
            undo_turn(target, draft, spec, mark, room, dice)
            task = begin_task(target, spec, live, start, room, depth, no_lists(spec.listing))
            turn = take_turn(target, draft, spec, task, start, room, dice)
        if turn.condition != SOUND:
            undo_turn(target, draft, spec, mark, room, dice)
            return live, start, LOOK if turn.condition == LOOK else BROKEN
        live, start, over, stops = finish_turn(target, draft, spec, turn, room, mark)
        if stops:
            break
    return live, start, SOUND
