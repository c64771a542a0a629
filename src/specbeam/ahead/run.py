"""Turns ahead: where one session is decoded by compiled loops alone, they run many turns at a time."""

import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from specbeam.ahead.texts import SPAN
from specbeam.ahead.turns import (
    ACCEPTED,
    DRAFT_PASSES,
    DRAFT_SCORED,
    GONE,
    PASSES,
    SCORED,
    SPANNED,
    Course,
    Live,
    Ran,
    turns,
)
from specbeam.choice import way
from specbeam.clock import apportion, lap
from specbeam.draft.model import BeamDrafter, NoDraft
from specbeam.limits import Ended
from specbeam.lm.base import LM
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Beams
from specbeam.session import Session
from specbeam.verify.beam import BeamRule

PARTS = ("draft", "draft/model", "score/model", "verify", "settle")


def ran_ahead(target: LM, live: list[Session]) -> bool:
    """Move a session that is alone on by as many turns as a loop can decide, to the very state that turn by turn leads to.
    Whether there were any.
    """
    if len(live) != 1:
        return False
    (session,) = live
    with lap("settle"), session.failing_alone():
        return _moved_on(target, session)
    return True  # it has failed


def _moved_on(target: LM, session: Session) -> bool:
    session.beside = 1
    found = _course(target, session)
    if found is None:
        return False
    models, course = found
    ran = _ran(models, session, course)
    if ran is None:
        return False
    _keep(session, models, ran)
    return bool(ran.numbers[PASSES])


class _Refused:
    """Left in the state of a session in which a turn was not for the loop: the rest goes turn by turn."""


def _course(target: LM, session: Session) -> tuple[list[HuggingFaceLM], Course] | None:
    """How its turns go, and by which models, if loops can run them."""
    drafter, rule, controller = session.parts.drafter, session.parts.rule, session.parts.controller
    models = [target, drafter.lm] if isinstance(drafter, BeamDrafter) else [target]
    able = [lm for lm in models if isinstance(lm, HuggingFaceLM) and lm.loops and lm.vocab <= target.vocab]
    if len(set(able)) < len(models) or not isinstance(rule, BeamRule) or _Refused in session.state:
        return None
    widths, plan = rule.for_loops(session), getattr(controller, "for_loops", None)
    if widths is None or plan is None:
        return None
    shape = plan(session)
    if isinstance(drafter, BeamDrafter):
        if not drafter.by_loops(session):
            return None
        core = drafter.beams
    elif isinstance(drafter, NoDraft) and shape.depth == 0:
        core = 0
    else:
        return None
    warp, limits = session.warp, session.limits
    drafts, choice = way(warp, limits, core, int(shape.widths.max())), way(warp, limits, widths.most, 0)
    return able, Course(shape, drafts, choice, widths, limits.for_loops, core > 0)


def _ran(models: list[HuggingFaceLM], session: Session, course: Course) -> Ran | None:
    beams, limits = session.beams, session.limits
    deepest = course.plan.depth if course.plan.depth >= 0 else course.plan.seconds.shape[1] - 1
    fresh, more = deepest * course.drafts.width + course.widths.most, min(session.remaining, SPAN)
    before = [limits.normalised(one.loglik, len(one.tokens)) for one in session.ended]
    finished = np.append(before, np.zeros(course.widths.most * SPAN))
    live = Live(beams.tokens, beams.scores, beams.counts, beams.keys)
    with ExitStack() as stack:
        lanes = [stack.enter_context(lm.alone(session, fresh, more)) for lm in models]
        arrays = [lane.arrays for lane in lanes if lane is not None]
        if len(arrays) < len(models):  # a long prompt goes in first
            return None
        began = time.perf_counter()
        count = session.count.target_passes
        ran = turns(arrays[0], arrays[-1], course, live, finished, len(before), session.length, count)
    apportion(dict(zip(PARTS, ran.time.tolist(), strict=True)), began)
    return ran


def _keep(session: Session, models: list[HuggingFaceLM], ran: Ran) -> None:
    """Let everybody know."""
    numbers, count = ran.numbers, session.count
    for lm, passes in zip(models, (numbers[SCORED], numbers[DRAFT_SCORED]), strict=False):
        lm.ran(session, int(passes))
    if not ran.told:
        session.state[_Refused] = True
    count.target_passes += int(numbers[PASSES])
    count.draft_passes += int(numbers[DRAFT_PASSES])
    count.accepted += int(numbers[ACCEPTED])
    count.widths += ran.widths.tolist()
    count.peak_kv_tokens = models[0].peak(session)
    texts, span, gone = ran.texts, int(numbers[SPANNED]), int(numbers[GONE])
    ended = [_ended(session, texts, number) for number in range(gone)]
    live = Beams(np.arange(len(ran.live.tokens)), *ran.live)
    size = len(live)
    session.leap(live, texts.origins[:size], texts.live[:size, :span], ended)


def _ended(session: Session, texts: Any, number: int) -> Ended:
    tokens = texts.gone[number, : texts.lengths[number]].tolist()
    before = session.tails[texts.gone_origins[number]].tolist()
    return Ended([*session.settled, *before, *tokens], float(texts.logliks[number]))
