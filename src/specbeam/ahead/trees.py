"""Turns ahead of one sequence: chains and trees of draws, tried down from the root."""

from dataclasses import dataclass, field

import numpy as np

from specbeam.ahead.books import SPANNED, TURNS, Books, Live
from specbeam.ahead.plans import deepest_of, plan_of
from specbeam.ahead.tree_turns import TreeCourse, TreesRan, tree_turns
from specbeam.draft.tree import TreeDrafter
from specbeam.draft.tree_fast import draws_of, room_for
from specbeam.limits import Ended
from specbeam.lm.compiled.one_lane import OneLane
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Beams
from specbeam.session import Session
from specbeam.verify.path import PathRule


@dataclass(eq=False)
class TreesAhead:
    """See `run.Ahead`."""

    session: Session
    models: list[HuggingFaceLM]
    course: TreeCourse
    ran: TreesRan = field(init=False)

    @property
    def fresh(self) -> int:
        return self.course.room.draws + 1

    def run(self, target: OneLane, draft: OneLane) -> tuple[Books, bool]:
        session, beams, count = self.session, self.session.beams, self.session.count
        live = Live(beams.tokens, beams.scores, beams.counts, beams.keys)
        self.ran = tree_turns(target, draft, self.course, live, session.length, count.target_passes)
        return self.ran.books, self.ran.told

    def keep(self) -> None:
        session, ran, span = self.session, self.ran, int(self.ran.books.numbers[SPANNED])
        session.dice.use(ran.used)
        session.count.widths += [1] * span
        live, ended = Beams(np.arange(len(ran.live.tokens)), *ran.live), list[Ended]()
        if not len(live):
            ended = [Ended([*session.settled, *session.tails[0].tolist(), *ran.tokens.tolist()], float(ran.score))]
        session.leap(live, np.zeros(len(live), dtype=np.int64), ran.tokens[None][: len(live)], ended)


def trees_ahead(target: HuggingFaceLM, session: Session) -> TreesAhead | None:
    """None unless its parts are for loops."""
    drafter, rule, plan = session.parts.drafter, session.parts.rule, plan_of(session)
    if type(rule) is not PathRule or type(drafter) is not TreeDrafter or plan is None or not drafter.books:
        return None
    laws, lm, deepest = rule.for_loops(session), drafter.lm, deepest_of(plan)
    children = drafter.by_loops(session, deepest) if deepest > 0 else None
    if laws is None or children is None or not isinstance(lm, HuggingFaceLM):
        return None
    counts, distinct = children
    draws, room = draws_of(session, counts, distinct), room_for(lm, session, counts)
    if draws is None or room is None:
        return None
    uniforms = session.dice.ahead(TURNS * (2 * room.draws + 2))  # a turn's draws, trials, and the last draw
    course = TreeCourse(plan, draws._replace(uniforms=uniforms), room, laws, session.limits.max_new_tokens)
    return TreesAhead(session, [target, lm], course)
