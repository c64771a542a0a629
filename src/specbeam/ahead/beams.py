"""Turns ahead of beams: drafted and judged by shared noise, or not drafted at all."""

from dataclasses import dataclass, field

import numpy as np

from specbeam.ahead.beam_turns import BeamCourse, BeamsRan, beam_turns
from specbeam.ahead.books import GONE, SPAN, SPANNED, Books, Live
from specbeam.ahead.plans import deepest_of, plan_of
from specbeam.choice import way as way_of
from specbeam.draft.model import BeamDrafter, NoDraft
from specbeam.limits import Ended
from specbeam.lm.compiled.one_lane import OneLane
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Beams
from specbeam.session import Session
from specbeam.verify.beam import BeamRule


@dataclass(eq=False)
class BeamsAhead:
    """See `run.Ahead`."""

    session: Session
    models: list[HuggingFaceLM]
    course: BeamCourse
    ran: BeamsRan = field(init=False)

    @property
    def fresh(self) -> int:
        return deepest_of(self.course.plan) * self.course.drafts.width + self.course.widths.most

    def run(self, target: OneLane, draft: OneLane) -> tuple[Books, bool]:
        session, beams = self.session, self.session.beams
        before = [session.limits.normalised(one.loglik, len(one.tokens)) for one in session.ended]
        finished = np.append(before, np.zeros(self.course.widths.most * SPAN))
        live = Live(beams.tokens, beams.scores, beams.counts, beams.keys)
        self.ran = beam_turns(
            target, draft, self.course, live, finished, len(before), session.length, session.count.target_passes
        )
        return self.ran.books, self.ran.told

    def keep(self) -> None:
        session, ran = self.session, self.ran
        session.count.widths += ran.widths.tolist()
        texts, span = ran.texts, int(ran.books.numbers[SPANNED])
        ended = [self._ended(number) for number in range(int(ran.books.numbers[GONE]))]
        live = Beams(np.arange(len(ran.live.tokens)), *ran.live)
        session.leap(live, texts.origins[: len(live)], texts.live[: len(live), :span], ended)

    def _ended(self, number: int) -> Ended:
        session, texts = self.session, self.ran.texts
        tokens = texts.gone[number, : texts.lengths[number]].tolist()
        before = session.tails[texts.gone_origins[number]].tolist()
        return Ended([*session.settled, *before, *tokens], float(texts.logliks[number]))


def beams_ahead(target: HuggingFaceLM, session: Session) -> BeamsAhead | None:
    """None unless its parts are for loops."""
    drafter, rule, plan = session.parts.drafter, session.parts.rule, plan_of(session)
    if type(rule) is not BeamRule or plan is None:
        return None
    widths = rule.for_loops(session)
    if widths is None:
        return None
    models, core = [target], 0
    if type(drafter) is BeamDrafter:
        if not isinstance(drafter.lm, HuggingFaceLM) or not drafter.by_loops(session):
            return None
        models, core = [target, drafter.lm], drafter.beams
    elif type(drafter) is not NoDraft or plan.depth != 0:
        return None
    warp, limits = session.warp, session.limits
    drafts, choice = way_of(warp, limits, core, int(plan.widths.max())), way_of(warp, limits, widths.most, 0)
    return BeamsAhead(session, models, BeamCourse(plan, drafts, choice, widths, limits.for_loops, core > 0))
