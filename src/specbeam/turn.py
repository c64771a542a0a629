"""THE TURN: plan, draft, score, verify, settle, of many sessions in one pass of the target."""

from specbeam.core.forest import Forest
from specbeam.draft.batch import drafted, with_probes
from specbeam.engines.answers import LOGITS
from specbeam.lm.base import LM
from specbeam.measure.profiler import span
from specbeam.records import Scored, Shape, Turn, Verdict
from specbeam.session import Session

Turns = list[tuple[Session, Turn]]


def turns(target: LM, live: list[Session]) -> Turns:
    """Take one turn of each session that does not fail in it."""
    with span("plan"):
        shapes = [_planned(session, len(live)) for session in live]  # how deep, how wide
    with span("draft"):
        forests = drafted(live, shapes, target.vocab)  # guesses hung under the live beams
    with span("score"):
        scored = _scored(target, live, forests)  # one pass over every node
    done = []
    for session, shape, forest, found in zip(live, shapes, forests, scored, strict=True):
        session.count.target_passes += 1
        if session.failure is not None:
            continue
        with session.failing_alone():
            with span("verify"):
                verdict = _verdict(session, forest, found)  # what lives on
            turn = Turn(shape, forest, found, verdict)
            with span("settle"):
                for part in (target, session.parts.drafter, session.parts.controller):
                    part.settle(session, turn)  # caches and statistics catch up
                session.count.peak_kv_tokens = target.peak(session)
                session.advance(turn)
            done.append((session, turn))
    return done


def _planned(session: Session, beside: int) -> Shape:
    session.beside = beside
    session.shape = Shape(0, 0)  # if it fails: it is over after this pass
    with session.failing_alone():
        session.shape = session.parts.controller.plan(session)
    return session.shape


def _scored(target: LM, live: list[Session], forests: list[Forest]) -> list[Scored]:
    """Score every node, and what drafters want to be scored besides.

    A model of somebody's own that knows no `needs` serves parts that have none.
    """
    needs = [session.parts.needs for session in live]
    probed = [with_probes(session, forest) for session, forest in zip(live, forests, strict=True)]
    plain = all(one == LOGITS for one in needs)
    scored = target.extend(live, probed) if plain else target.extend(live, probed, needs)
    return [
        found if whole is forest else found.split(forest.size)
        for found, forest, whole in zip(scored, forests, probed, strict=True)
    ]


def _verdict(session: Session, forest: Forest, scored: Scored) -> Verdict:
    """Return what lives on. A rule that says what it needs is given that, others logits."""
    rule = session.parts.rule
    return rule.verify(session, forest, scored if hasattr(rule, "needs") else scored.logits)  # type: ignore[arg-type]
