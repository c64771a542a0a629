"""PLAN: draft one more token while it is worth more than it costs."""

from dataclasses import dataclass

import numpy as np

from specbeam.core.control.planning import Plan, plan_of_shape
from specbeam.core.control.stops import BY_SURVIVAL, StopSpec, new_stop, note_score
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import step

# Indices into `StopSpec.learnt` of kind BY_SURVIVAL: emitted tokens; their cost in target passes; the probability that all
# tokens drafted in this turn are accepted. Its one setting is the cost of a draft step.
TOKENS, COST, SURVIVAL = range(3)


@dataclass(frozen=True)
class Experience:
    """What one session has learnt. Draft probabilities go through a calibration map that starts as the identity.

    Args:
        numbers: as steps take and change it; `hits` are accepted and `tries` judged tokens by draft probability.
    """

    numbers: StopSpec

    @classmethod
    def none(cls, cost: float = 0.1, most: int = 12, bins: int = 10, weight: float = 4.0) -> "Experience":
        """Return the prior: in each of `bins` bins, `weight` tokens that were accepted as often as the draft model said."""
        centres = (np.arange(bins) + 0.5) / bins
        stop = new_stop(BY_SURVIVAL, np.array([cost], dtype=np.float64), np.ones(3), most)
        return cls(stop._replace(hits=weight * centres, tries=np.full(bins, weight)))

    @property
    def tokens(self) -> float:
        """The number of tokens emitted so far, and one."""
        return float(self.numbers.learnt[TOKENS])

    @property
    def cost(self) -> float:
        """The cost of these tokens, in target passes, and one."""
        return float(self.numbers.learnt[COST])

    def accepted_at(self, score: float) -> float:
        """Return the probability that a token with the draft probability `score` is accepted."""
        return float(odds_of_score(self.numbers, score))

    def next_accepted(self) -> float:
        """Return the probability that a token of unknown draft probability is accepted."""
        return float(self.numbers.hits.sum() / self.numbers.tries.sum())


@step
def bin_of(stop: StopSpec, score: float) -> int:
    """Return the place of a draft probability in `hits` and `tries`."""
    return min(int(score * len(stop.hits)), len(stop.hits) - 1)


@step
def odds_of_score(stop: StopSpec, score: float) -> float:
    """Return the probability that a token with the draft probability `score` is accepted."""
    place = bin_of(stop, score)
    return stop.hits[place] / stop.tries[place]


@step
def is_worth_more(stop: StopSpec, confidence: float) -> bool:
    """Note the draft probability of the newest token, and return whether the next one gains more than it costs."""
    note_score(stop, confidence)
    learnt = stop.learnt
    learnt[SURVIVAL] *= odds_of_score(stop, confidence)
    gained = learnt[SURVIVAL] * stop.hits.sum() / stop.tries.sum()
    return gained > stop.settings[0] * learnt[TOKENS] / learnt[COST]


@step
def learn_survival(stop: StopSpec, drafted: int, accepted: int) -> None:
    """Count a turn. Tokens after the first refusal were not judged."""
    for place in range(min(stop.counted[0], accepted + 1)):
        at = bin_of(stop, stop.scores[place])
        if place < accepted:
            stop.hits[at] += 1.0
        stop.tries[at] += 1.0
    stop.learnt[TOKENS] += accepted + 1
    stop.learnt[COST] += 1 + stop.settings[0] * drafted


@dataclass(frozen=True)
class Survival:
    """A controller that drafts on while the next token is expected to gain more than it costs.

    That is while (probability that all drafted tokens are accepted) x (that of the next token) > cost x (tokens emitted per
    cost so far). The right side is what the time of a draft step would gain elsewhere. It reads past turns and tokens that
    are already drafted, so it does not change the law of the output.

    Args:
        cost: time of a draft step as a share of a target pass.
        most: the most layers of a draft.
        width: number of draft nodes per layer.
    """

    cost: float = 0.1
    most: int = 12
    width: int = 1

    def plan(self, session: Session) -> Shape:
        numbers = self._experience(session).numbers
        numbers.counted[0] = 0
        numbers.learnt[SURVIVAL] = 1.0
        return Shape(min(self.most, session.remaining - 1), self.width)

    def numbers(self, session: Session) -> Plan:
        """Return the plan as numbers for steps."""
        return plan_of_shape(self.most, self.width)

    def stops(self, session: Session, tosses: int) -> StopSpec:
        """Return what it knows as numbers for steps, which change it; see `control.stopping.stops_of`."""
        return self._experience(session).numbers

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        return bool(is_worth_more(self.stops(session, 0), confidence))

    def settle(self, session: Session, turn: Turn) -> None:
        learn_survival(self.stops(session, 0), turn.forest.layers, turn.verdict.accepted)

    def _experience(self, session: Session) -> Experience:
        if self not in session.state:
            session.state[self] = Experience.none(self.cost, self.most)
        found: Experience = session.state[self]
        return found
