"""THE TURN: plan, draft, score, verify and settle many sessions with one pass of the target."""

from dataclasses import replace

import torch

from specbeam.core.answers import LOGITS
from specbeam.core.draft.batch import drafted, with_extra_rows
from specbeam.core.errors import naming
from specbeam.core.forest import Forest, kept_nodes
from specbeam.core.lm import LM
from specbeam.core.measure.profiler import span
from specbeam.core.records import RowCounts, Scored, Shape, Turn, Verdict
from specbeam.core.runs import take_whole_rows
from specbeam.core.session import Session
from specbeam.core.verify.checked import checked_shape, checked_verdict

Turns = list[tuple[Session, Turn]]


def turns(target: LM, live: list[Session]) -> Turns:
    """Take one turn of each session. Returns the turns of those that did not fail."""
    for session in live:
        with session.failing_alone():
            take_whole_rows(target, session)
    with span("plan"):
        shapes = [_planned(session, len(live)) for session in live]  # how deep, how wide
    with span("draft"):
        forests = drafted(live, shapes, target.vocab)  # token trees under the live beams
    with span("score"):
        scored = _scored(target, live, forests)  # one pass over every node
    done = []
    for session, shape, forest, found in zip(live, shapes, forests, scored, strict=True):
        session.count.target_passes += 1
        if session.failure is not None:
            continue
        with session.failing_alone():
            with span("verify"):
                verdict = _verdict(session, forest, found, target.vocab)  # the surviving beams
            turn = Turn(shape, forest, found, verdict)
            with span("settle"):
                for part in (target, session.parts.drafter, session.parts.controller):
                    with naming(part, "settle"):
                        part.settle(session, turn)  # update caches and statistics
                session.count.peak_kv_tokens = target.peak(session)
                session.advance(turn)
            done.append((session, turn))
    return done


def _planned(session: Session, batch_size: int) -> Shape:
    session.batch_size = batch_size
    session.shape = Shape(0, 0)  # stays if planning fails; the session then ends after this pass
    controller = session.parts.controller
    with session.failing_alone(), naming(controller, "plan"):
        session.shape = checked_shape(controller.plan(session), controller)
    return session.shape


def _scored(target: LM, live: list[Session], forests: list[Forest]) -> list[Scored]:
    """Score every node whose row is not known, and the extra rows of drafters.

    `needs` is passed only if a part needs more than logits, so `extend` of a user's own model may lack that argument.
    """
    with_extra = {session: with_extra_rows(session, forest) for session, forest in zip(live, forests, strict=True)}
    asking = [session for session in live if with_extra[session].size > len(with_extra[session].known.nodes)]
    needs = [session.parts.needs for session in asking]
    whole = [with_extra[session] for session in asking]
    plain = all(one == LOGITS for one in needs)
    scored: list[Scored] = []
    if asking:
        scored = target.extend(asking, whole) if plain else target.extend(asking, whole, needs)
    found = dict(zip(asking, scored, strict=True))
    answers = []
    for session, forest in zip(live, forests, strict=True):
        answer = found.get(session, Scored(torch.from_numpy(forest.known.rows.logits[:0])))
        session.count.rows += RowCounts(scored=len(answer.logits))
        drafts = forest.size - len(forest.known.nodes)
        answers.append(answer if with_extra[session] is forest else answer.split(drafts))
    return answers


def _verdict(session: Session, forest: Forest, scored: Scored, vocab: int) -> Verdict:
    """Return the verdict of the rule. A rule with `needs` gets the whole `Scored`, other rules get logits."""
    rule = session.parts.rule
    with naming(rule, "verify"):
        verdict = rule.verify(session, forest, scored if hasattr(rule, "needs") else scored.logits)
    checked = checked_verdict(verdict, forest, vocab, rule)
    if session.keeps_nodes and checked.searched is None:
        return replace(checked, kept=kept_nodes(forest.parents, checked.beams.nodes))
    return checked
