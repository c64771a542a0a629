"""PLAN: draft one more token while its expected gain exceeds its cost."""

from dataclasses import dataclass

import numpy as np

from specbeam.core.control.planning import BY_SURVIVAL, PlansMostLayers, StopSpec, new_stop, note_score
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.steps import step

# Indices into `StopSpec.learnt` for BY_SURVIVAL: emitted tokens; their cost in target passes; the probability that all
# tokens drafted in this turn are accepted. The only entry of `settings` is the cost of a draft step.
TOKENS, COST, SURVIVAL = range(3)
BINS = 10  # of draft probabilities, in `StopSpec.hits` and `StopSpec.tries`
WEIGHT = 4.0  # weight of the prior in each bin, in tokens


def survival_prior(cost: float, most: int) -> StopSpec:
    """Return the state before the first turn: acceptance rates equal draft probabilities."""
    centres = (np.arange(BINS) + 0.5) / BINS
    stop = new_stop(BY_SURVIVAL, np.array([cost], dtype=np.float64), np.ones(3), most)
    return stop._replace(hits=WEIGHT * centres, tries=np.full(BINS, WEIGHT))


@step
def bin_of(stop: StopSpec, score: float) -> int:
    """Return the index of a draft probability in `hits` and `tries`."""
    return min(int(score * len(stop.hits)), len(stop.hits) - 1)


@step
def odds_of_score(stop: StopSpec, score: float) -> float:
    """Return the probability that a token of draft probability `score` is accepted."""
    place = bin_of(stop, score)
    return stop.hits[place] / stop.tries[place]


@step
def gains_by_drafting(stop: StopSpec, confidence: float) -> bool:
    """Note the draft probability of the newest token, and return whether the next one gains more than it costs."""
    note_score(stop, confidence)
    learnt = stop.learnt
    learnt[SURVIVAL] *= odds_of_score(stop, confidence)
    gained = learnt[SURVIVAL] * stop.hits.sum() / stop.tries.sum()
    return gained > stop.settings[0] * learnt[TOKENS] / learnt[COST]


@step
def learn_survival(stop: StopSpec, drafted: int, accepted: int) -> None:
    """Count a turn. Tokens after the first rejection were not judged."""
    for place in range(min(stop.counted[0], accepted + 1)):
        at = bin_of(stop, stop.scores[place])
        if place < accepted:
            stop.hits[at] += 1.0
        stop.tries[at] += 1.0
    stop.learnt[TOKENS] += accepted + 1
    stop.learnt[COST] += 1 + stop.settings[0] * drafted


@dataclass(frozen=True)
class Survival(PlansMostLayers):
    """A controller that continues a draft while the expected gain of the next token exceeds its cost.

    The condition is: P(all drafted tokens are accepted) x P(the next token is accepted) > cost x (tokens per cost so far).
    The right side is the number of tokens that the time of a draft step would otherwise yield. The controller reads
    past turns and tokens that are already drafted, so it does not change the law of the output.

    Args:
        cost: time of a draft step as a share of a target pass.
        most: maximum number of layers of a draft.
        width: number of draft nodes per layer.
    """

    cost: float = 0.1
    most: int = 12
    width: int = 1

    def plan(self, session: Session) -> Shape:
        stop = self.stops(session, 0)
        stop.counted[0] = 0
        stop.learnt[SURVIVAL] = 1.0
        return super().plan(session)

    numbers = PlansMostLayers.numbers  # steps plan only if the class that defines `plan` also defines `numbers`

    def stops(self, session: Session, tosses: int) -> StopSpec:
        """Return the learned acceptance for steps, which change it; see `control.stopping.stops_of`."""
        if self not in session.state:
            session.state[self] = survival_prior(self.cost, self.most)
        found: StopSpec = session.state[self]
        return found

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        return bool(gains_by_drafting(self.stops(session, 0), confidence))

    def settle(self, session: Session, turn: Turn) -> None:
        learn_survival(self.stops(session, 0), turn.forest.layers, turn.verdict.accepted)
