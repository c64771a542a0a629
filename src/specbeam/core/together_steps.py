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
from specbeam.core.run_steps import NO_TURN, finish_turn, mark_turn, next_depth, undo_turn
from specbeam.core.steps import Array, borrowed, step
from specbeam.core.turn_steps import (
    DRAFT,
    DRAFT_MODEL,
    LOOK,
    REFUSED,
    SCORE,
    RunRoom,
    RunSpec,
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
def run_turns_together(
    jobs: Array, like: RunInputs, standings: Array, stands_like: Standing, most_turns: int
) -> tuple[list[Beams], list[Start], Array]:
    """Run up to `most_turns` turns of each session, until a session is over or cannot take the next turn.

    Returns for each session the live beams, the start of the next turn and the condition: SOUND; or, if its last turn was
    undone because Python has to take it, BROKEN or LOOK; or REFUSED if the model lacks one of its tokens or positions.

    Args:
        jobs: int64[sessions], the addresses of their `RunInputs` (see `compiling.held`).
        like: the job of any of them; all jobs have the same type.
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
    for _ in range(most_turns):
        depths = np.empty(count, dtype=np.int64)
        for number in every:
            job = held_at(jobs[number], like)
            depths[number] = next_depth(
                job.target, job.draft, job.spec, lives[number], starts[number], job.room, job.turns, job.dice
            )
        if (depths == NO_TURN).any():
            break
        began = cycles()
        marks = []
        tasks = []
        for number in every:
            job = held_at(jobs[number], like)
            listing = job.spec.listing
            marks.append(mark_turn(job.draft, job.spec, starts[number], job.room, job.dice))
            tasks.append(
                begin_task(job.target, job.spec, lives[number], starts[number], job.room, depths[number], listing)
            )
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
        going = True
        for number in every:
            job = held_at(jobs[number], like)
            mark = marks[number]
            judged = judged_turn(job.target, job.spec, turns[number], starts[number], rows[number], job.room, job.dice)
            if judged.condition == UNDECIDED:
                undo_turn(job.target, job.draft, job.spec, mark, job.room, job.dice)
                whole = no_lists(job.spec.listing)
                task = begin_task(job.target, job.spec, lives[number], starts[number], job.room, depths[number], whole)
                judged = take_turn(job.target, job.draft, job.spec, task, starts[number], job.room, job.dice)
            if judged.condition != SOUND:
                undo_turn(job.target, job.draft, job.spec, mark, job.room, job.dice)
                conditions[number] = judged.condition if judged.condition in (LOOK, REFUSED) else BROKEN
                going = False
                continue
            judged.spans[DRAFT_MODEL] += in_draft_models // count
            judged.spans[DRAFT] += (scoring - began - in_draft_models) // count
            judged.spans[SCORE] += (scored - scoring) // count
            live, start, over, stops = finish_turn(job.target, job.draft, job.spec, judged, job.room, mark)
            lives[number] = live
            starts[number] = start
            going = going and not over and not stops
        if not going:
            break
    return lives, starts, conditions
