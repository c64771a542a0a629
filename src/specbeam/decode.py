"""THE LOOP: one Turn per session and pass of the target."""

from collections.abc import Iterable, Iterator
from itertools import islice

from specbeam.clock import lap
from specbeam.draft.together import close_drafters, drafted
from specbeam.kernels.interrupts import interrupts_held
from specbeam.lm.base import LM
from specbeam.records import Shape, Turn
from specbeam.runs import run_ahead
from specbeam.session import Session

Turns = list[tuple[Session, Turn]]


def decode(target: LM, waiting: Iterable[Session], at_once: int = 32, ahead: int = 0) -> Iterator[Turns]:
    """Decode sessions until all are over; yield the turns of each pass.

    Sessions may differ in all but the target. One that fails keeps its error in `session.failure`, has no turn, and takes
    nothing from the others. When one is over its place goes to the next in line.

    Args:
        at_once: the most sessions side by side.
        ahead: the most turns that may be one compiled run, which are not shown.
    """
    line = iter(waiting)
    live: list[Session] = []
    try:
        while live := live + list(islice(line, at_once - len(live))):
            with interrupts_held():
                done = [] if ahead and len(live) == 1 and _ran(target, live[0], ahead) else turns(target, live)
            yield done
            _close(target, [session for session in live if session.over])
            live = [session for session in live if not session.over]
    finally:
        _close(target, live)


def turns(target: LM, live: list[Session]) -> Turns:
    """Take one turn of each session that does not fail in it."""
    with lap("plan"):
        shapes = [_planned(session, len(live)) for session in live]  # how deep, how wide
    with lap("draft"):
        forests = drafted(live, shapes, target.vocab)  # guesses hung under the live beams
    with lap("score"):
        scored = target.extend(live, forests)  # one pass over every node
    done = []
    for session, shape, forest, logits in zip(live, shapes, forests, scored, strict=True):
        session.count.target_passes += 1
        if session.failure is not None:
            continue
        with session.failing_alone():
            with lap("verify"):
                verdict = session.parts.rule.verify(session, forest, logits)  # what lives on
            turn = Turn(shape, forest, logits, verdict)
            with lap("settle"):
                for part in (target, session.parts.drafter, session.parts.controller):
                    part.settle(session, turn)  # caches and statistics catch up
                session.count.peak_kv_tokens = target.peak(session)
                session.advance(turn)
            done.append((session, turn))
    return done


def _ran(target: LM, session: Session, most_turns: int) -> bool:
    """Take several turns of the only session as one run. Returns False if there was none."""
    with lap("settle"), session.failing_alone():
        return run_ahead(target, session, most_turns)
    return True  # it has failed


def _planned(session: Session, beside: int) -> Shape:
    session.beside = beside
    session.shape = Shape(0, 0)  # if it fails: it is over after this pass
    with session.failing_alone():
        session.shape = session.parts.controller.plan(session)
    return session.shape


def _close(target: LM, sessions: list[Session]) -> None:
    for session in sessions:
        target.close(session)
    close_drafters(sessions)
