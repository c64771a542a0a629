"""THE LOOP: one Turn per session and pass of the target."""

from collections.abc import Iterable, Iterator
from itertools import islice

from specbeam.ahead.run import ran_ahead
from specbeam.clock import lap
from specbeam.draft.together import close_drafters, drafted
from specbeam.kernels.interrupts import interrupts_held
from specbeam.lm.base import LM
from specbeam.records import Shape, Turn
from specbeam.session import Session

Turns = list[tuple[Session, Turn]]


def decode(target: LM, waiting: Iterable[Session], at_once: int = 32, ahead: bool = False) -> Iterator[Turns]:
    """Decode sessions until all are over, at most `at_once` side by side; yield the turns of each pass. They may differ in
    all but the target. One that fails keeps its error in `session.failure`, has no turn, and takes nothing from the others.
    When one is over its place goes to the next in line. With `ahead` many turns may be one loop, and are not shown.
    """
    line, live = iter(waiting), list[Session]()
    try:
        while live := live + list(islice(line, at_once - len(live))):
            with interrupts_held():
                done = [] if ahead and ran_ahead(target, live) else turns(target, live)
            yield done
            _close(target, [session for session in live if session.over])
            live = [session for session in live if not session.over]
    finally:
        _close(target, live)


def turns(target: LM, live: list[Session]) -> Turns:
    """One turn of each session that does not fail in it."""
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


def _planned(session: Session, beside: int) -> Shape:
    session.beside, session.shape = beside, Shape(0, 0)  # if it fails: it is over after this pass
    with session.failing_alone():
        session.shape = session.parts.controller.plan(session)
    return session.shape


def _close(target: LM, sessions: list[Session]) -> None:
    for session in sessions:
        target.close(session)
    close_drafters(sessions)
