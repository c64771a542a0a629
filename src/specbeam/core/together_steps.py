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
def depths_of_all(jobs: Array, like: RunInputs, lives: list[Beams], starts: list[Start]) -> Array:
    """Return the depth of each session's next draft, int64[sessions]; see `next_depth`."""
    depths = np.empty(len(jobs), dtype=np.int64)
    for number in range(len(jobs)):
        job = held_at(jobs[number], like)
        live = lives[number]
        start = starts[number]
        depths[number] = next_depth(job.target, job.draft, job.spec, live, start, job.room, job.turns, job.dice)
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
    jobs: Array, like: RunInputs, standings: Array, stands_like: Standing, most_turns: int
) -> tuple[list[Beams], list[Start], Array]:
    """Run up to `most_turns` turns of each session, until a session is over or cannot take the next turn.

    Returns for each session the live beams, the start of the next turn and the condition: SOUND; BROKEN or LOOK if its last
    turn was undone because Python has to take it; REFUSED if the model lacks one of its tokens or positions.

    Args:
        jobs: int64[sessions], the addresses of their `RunInputs` (see `compiling.held`).
        like: the inputs of any of them; all have the same type.
        standings, stands_like: the same for the `Standing` of each session.
    """
    # No comprehensions, see `compiling.held`.
    count = len(jobs)
    every = range(count)
    lives = []
    starts = []
    targets = []
    drafts = []
    for number in every:
        standing = held_at(standings[number], stands_like)
        lives.append(own_beams(standing.live))
        starts.append(own_start(standing.start))
        job = held_at(jobs[number], like)
        targets.append(address_of_record(job.target))
        drafts.append(address_of_record(job.draft))
    conditions = np.full(count, SOUND)
    going = True
    for _ in range(most_turns):
        if not going:
            break
        depths = depths_of_all(jobs, like, lives, starts)
        if (depths == NO_TURN).any():
            break
        began = cycles()
        marks = []
        tasks = []
        for number in every:
            job = held_at(jobs[number], like)
            live = lives[number]
            start = starts[number]
            marks.append(mark_turn(job.draft, job.spec, start, job.room, job.dice))
            tasks.append(begin_task(job.target, job.spec, live, start, job.room, depths[number], job.spec.listing))
        spent = np.zeros((count, 2), dtype=np.int64)
        drafted = draft_all(like.spec.drafts, like, jobs, drafts, tasks, spent)
        turns = []
        asked = []
        for number in every:
            job = held_at(jobs[number], like)
            cut, condition = drafted[number]
            turn = drafted_turn(job.target, job.spec, tasks[number], cut, condition, spent[number, 0])
            turns.append(turn)
            asked.append(turn.asked)
        in_draft_models = spent[:, CYCLES].sum()
        scoring = cycles()
        rows = extend_all(like.target, targets, asked, False, spent)
        scored = cycles()
        for number in every:
            job = held_at(jobs[number], like)
            mark = marks[number]
            start = starts[number]
            judged = judged_turn(job.target, job.spec, turns[number], start, rows[number], job.room, job.dice)
            if judged.condition == UNDECIDED:
                judged = judged_by_whole_rows(job, mark, lives[number], start, depths[number])
            if judged.condition != SOUND:
                undo_turn(job.target, job.draft, job.spec, mark, job.room, job.dice)
                conditions[number] = judged.condition if judged.condition in (LOOK, REFUSED) else BROKEN
                going = False
                continue
            add_shared_spans(judged, in_draft_models // count, (scoring - began) // count, (scored - scoring) // count)
            live, start, over, stops = finish_turn(job.target, job.draft, job.spec, judged, job.room, mark)
            lives[number] = live
            starts[number] = start
            going = going and not over and not stops
    return lives, starts, conditions
