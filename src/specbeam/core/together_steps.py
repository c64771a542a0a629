"""The compiled loop over many sessions: their turns side by side, with passes that all of them share."""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams
from specbeam.core.compiling.held import address_of_record, held_at
from specbeam.core.cycles import cycles
from specbeam.core.draft.turns import draft_all
from specbeam.core.forest import KnownRows, Start
from specbeam.core.laws.reduce import BROKEN, SOUND, UNDECIDED
from specbeam.core.passes import CYCLES, extend_all
from specbeam.core.ranked import copied_rows, no_lists
from specbeam.core.run_steps import NO_TURN, Mark, finish_turn, mark_turn, next_depth, undo_turn
from specbeam.core.steps import Array, borrowed, step
from specbeam.core.turn_steps import (
    DRAFT,
    DRAFT_MODEL,
    LOOK,
    REFUSED,
    SCORE,
    RunRoom,
    RunSpec,
    RunTurn,
    begin_task,
    drafted_turn,
    judged_turn,
    take_turn,
)


@borrowed
class RunInputs(NamedTuple):
    """One session in a loop over many: the arguments of `run_steps.run_turns`."""

    target: Any
    draft: Any
    spec: RunSpec
    room: RunRoom
    dice: Any
    turns: int  # number of turns so far


@borrowed
class Standing(NamedTuple):
    """Where a session stands: its live beams, and the beginning of its next turn."""

    live: Beams
    start: Start


@step
def own_beams(beams: Beams) -> Beams:
    """Return a copy of live beams."""
    return Beams(beams.nodes.copy(), beams.tokens.copy(), beams.scores.copy(), beams.counts.copy(), beams.keys.copy())


@step
def own_start(start: Start) -> Start:
    """Return a copy of the beginning of a turn."""
    known = KnownRows(start.known.nodes.copy(), copied_rows(start.known.rows))
    return Start(start.tokens.copy(), start.parents.copy(), known)


@step
def depths_of_all(jobs: Array, like: RunInputs, running: Array, lives: list[Beams], starts: list[Start]) -> Array:
    """Return the depth of each running session's next draft, int64[n]; see `next_depth` and `turn_of_all`."""
    depths = np.empty(len(running), dtype=np.int64)
    for place in range(len(running)):
        number = running[place]
        job = held_at(jobs[number], like)
        live = lives[number]
        start = starts[number]
        depths[place] = next_depth(job.target, job.draft, job.spec, live, start, job.room, job.turns, job.dice)
    return depths


@step
def judged_by_whole_rows(job: RunInputs, mark: Mark, live: Beams, start: Start, depth: int) -> RunTurn:
    """Undo a turn whose draft lists could not decide, and take it by itself with whole rows."""
    undo_turn(job.target, job.draft, job.spec, mark, job.room, job.dice)
    task = begin_task(job.target, job.spec, live, start, job.room, depth, no_lists(job.spec.listing))
    return take_turn(job.target, job.draft, job.spec, task, start, job.room, job.dice)


@step
def add_shared_spans(turn: RunTurn, in_model: int, drafting: int, scoring: int) -> None:
    """Add a session's shares of the cycles of the passes and drafts of all."""
    turn.spans[DRAFT_MODEL] += in_model
    turn.spans[DRAFT] += drafting - in_model
    turn.spans[SCORE] += scoring


@step
def run_turns_together(
    jobs: Array, like: RunInputs, standings: Array, stands_like: Standing, most_turns: int, to_the_end: bool
) -> tuple[list[Beams], list[Start], Array]:
    """Run up to `most_turns` turns of each session, until a session cannot take the next turn.

    Returns for each session the live beams, the start of the next turn and the condition: SOUND; BROKEN or LOOK if its last
    turn was undone because Python has to take it; REFUSED if the model lacks one of its tokens or positions.

    Args:
        jobs: int64[sessions], the addresses of their `RunInputs` (see `compiling.held`).
        like: the inputs of any of them; all have the same type.
        standings, stands_like: the same for the `Standing` of each session.
        to_the_end: whether the others go on when a session is over.
    """
    # No comprehensions, see `compiling.held`.
    count = len(jobs)
    lives = []
    starts = []
    for number in range(count):
        standing = held_at(standings[number], stands_like)
        lives.append(own_beams(standing.live))
        starts.append(own_start(standing.start))
    conditions = np.full(count, SOUND)
    running = np.arange(count)
    going = True
    for _ in range(most_turns):
        if not going or len(running) == 0:
            break
        is_over = np.zeros(len(running), dtype=np.bool_)
        going = turn_of_all(jobs, like, running, lives, starts, conditions, is_over)
        if is_over.any():
            running = running[~is_over]
            going = going and to_the_end
    return lives, starts, conditions


@step
def turn_of_all(
    jobs: Array,
    like: RunInputs,
    running: Array,
    lives: list[Beams],
    starts: list[Start],
    conditions: Array,
    is_over: Array,
) -> bool:
    """Take a turn of each running session, and return whether all of them can take the next one, unless they are over.

    Args:
        running: int64[n], the numbers of the running sessions in `jobs`.
        lives, starts, conditions: of all sessions, replaced for the running ones; see `run_turns_together`.
        is_over: bool[n], set for the running sessions that are over.
    """
    depths = depths_of_all(jobs, like, running, lives, starts)
    if (depths == NO_TURN).any():
        return False
    began = cycles()
    count = len(running)
    targets = []
    drafts = []
    marks = []
    tasks = []
    for place in range(count):
        number = running[place]
        job = held_at(jobs[number], like)
        live = lives[number]
        start = starts[number]
        targets.append(address_of_record(job.target))
        drafts.append(address_of_record(job.draft))
        marks.append(mark_turn(job.draft, job.spec, start, job.room, job.dice))
        tasks.append(begin_task(job.target, job.spec, live, start, job.room, depths[place], job.spec.listing))
    spent = np.zeros((count, 2), dtype=np.int64)
    drafted = draft_all(like.spec.drafts, like, jobs[running], drafts, tasks, spent)
    turns = []
    asked = []
    for place in range(count):
        job = held_at(jobs[running[place]], like)
        cut, condition = drafted[place]
        turn = drafted_turn(job.target, job.spec, tasks[place], cut, condition, spent[place, 0])
        turns.append(turn)
        asked.append(turn.asked)
    in_draft_models = spent[:, CYCLES].sum()
    scoring = cycles()
    rows = extend_all(like.target, targets, asked, False, spent)
    scored = cycles()
    going = True
    for place in range(count):
        number = running[place]
        job = held_at(jobs[number], like)
        mark = marks[place]
        start = starts[number]
        judged = judged_turn(job.target, job.spec, turns[place], start, rows[place], job.room, job.dice)
        if judged.condition == UNDECIDED:
            judged = judged_by_whole_rows(job, mark, lives[number], start, depths[place])
        if judged.condition != SOUND:
            undo_turn(job.target, job.draft, job.spec, mark, job.room, job.dice)
            conditions[number] = judged.condition if judged.condition in (LOOK, REFUSED) else BROKEN
            going = False
            continue
        add_shared_spans(judged, in_draft_models // count, (scoring - began) // count, (scored - scoring) // count)
        live, start, over, stops = finish_turn(job.target, job.draft, job.spec, judged, job.room, mark)
        lives[number] = live
        starts[number] = start
        is_over[place] = over
        going = going and not stops
    return going
