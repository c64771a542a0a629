"""Laws by enumeration: replay a program once per random outcome and add up the exact odds."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable

import numpy as np

from specbeam.core.dice import Dice
from tests.support.steps import source_of_steps


class WalkingDice(Dice):
    """Dice that follow a script and then take the first way, noting which other ways there were. Steps and sessions take them
    in place of a session's own.
    """

    key = 1

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.ways, self.odds = script, [], [], 1.0

    def _choose(self, odds: list[float]) -> int:
        """One of several ways, by script; `odds` are theirs."""
        possible = [way for way, chance in enumerate(odds) if chance > 0]
        place = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append(place)
        self.ways.append(len(possible))
        self.odds *= odds[possible[place]]
        return possible[place]

    def ready(self, count: int) -> "WalkingDice":
        return self

    def flip(self, odds: float) -> bool:
        odds = min(1.0, max(0.0, float(odds)))
        return self._choose([1.0 - odds, odds]) == 1

    def pick(self, law) -> int:
        total = math.fsum(law)
        return self._choose([float(chance) / total for chance in law])


def exact_law(program: Callable[[WalkingDice], Hashable], most: int = 400_000) -> dict[Hashable, float]:
    """Odds of every outcome of `program(dice)`, in which steps run as the source that they are compiled from."""
    with source_of_steps():
        return _exact_law(program, most)


def _exact_law(program: Callable[[WalkingDice], Hashable], most: int) -> dict[Hashable, float]:
    law: dict[Hashable, list[float]] = defaultdict(list)
    script: list[int] | None = []
    runs = 0
    while script is not None:
        dice = WalkingDice(script)
        law[program(dice)].append(dice.odds)
        script = _next(dice.taken, dice.ways)
        runs += 1
        assert runs <= most, "too many outcomes to enumerate"
    return {outcome: math.fsum(odds) for outcome, odds in law.items()}


def _next(taken: list[int], ways: list[int]) -> list[int] | None:
    for place in range(len(taken) - 1, -1, -1):
        if taken[place] + 1 < ways[place]:
            return [*taken[:place], taken[place] + 1]
    return None


def distance(first: dict, second: dict) -> float:
    """Total variation between two laws."""
    return 0.5 * math.fsum(abs(first.get(x, 0.0) - second.get(x, 0.0)) for x in {*first, *second})


def successive(p, want: int, replacement: bool) -> dict[tuple[int, ...], float]:
    """The law D_want(p) of ordered draws: independent, or successive without replacement."""
    want = want if replacement else min(want, int(np.count_nonzero(p)))
    law = {(): 1.0}
    for _ in range(want):
        longer: dict[tuple[int, ...], float] = {}
        for drawn, odds in law.items():
            left = np.array(p, dtype=float)
            if not replacement:
                left[list(drawn)] = 0
            for token in np.flatnonzero(left):
                longer[(*drawn, int(token))] = odds * left[token] / left.sum()
        law = longer
    return law


def beam_sampling_law(
    table: Callable[[tuple[int, ...]], np.ndarray],
    beams: int,
    steps: int,
    replacement: bool,
    eos: tuple[int, ...] = (),
    warped: Callable[[np.ndarray], np.ndarray] = lambda joint: joint,
) -> dict[Hashable, float]:
    """Law of (ended texts, live texts) of plain beam sampling, straight from its definition.

    Ended texts in the order of their ending; without replacement the live ones in draw order, with it sorted. `warped` is
    what temperature and truncation make of the joint law of each step.
    """
    law: dict[Hashable, float] = {((), ((),)): 1.0}
    for _ in range(steps):
        longer: dict[Hashable, float] = defaultdict(float)
        for (ended, live), odds in law.items():
            if not live:
                longer[ended, live] += odds
                continue
            pairs = [(beam, token) for beam in live for token in range(len(table(())))]
            joint = np.array([_likelihood(table, (*beam, token)) for beam, token in pairs])
            for drawn, chance in successive(warped(joint / joint.sum()), beams, replacement).items():
                texts = [(*pairs[which][0], pairs[which][1]) for which in drawn]
                gone = tuple(text for text in texts if text[-1] in eos)
                going = [text for text in texts if text[-1] not in eos]
                going = sorted(going) if replacement else going
                gone = tuple(sorted(gone)) if replacement else gone
                longer[ended + gone, tuple(going)] += odds * chance
        law = dict(longer)
    return law


def _likelihood(table, path: tuple[int, ...]) -> float:
    return math.prod(float(table(path[:place])[token]) for place, token in enumerate(path))


def hf_beam_sampling_law(
    table: Callable[[tuple[int, ...]], np.ndarray], beams: int, steps: int, eos: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """Law of the best text of transformers' beam sampling (length penalty 1, early_stopping=False), from its definition."""
    final: dict[tuple[int, ...], float] = defaultdict(float)
    law: dict[Hashable, float] = {((), ((),)): 1.0}
    for step in range(1, steps + 1):
        longer: dict[Hashable, float] = defaultdict(float)
        for (finished, live), odds in law.items():
            pairs = [(*beam, token) for beam in live for token in range(len(table(())))]
            joint = np.array([_likelihood(table, text) for text in pairs])
            for drawn, chance in successive(joint / joint.sum(), max(2, 1 + len(eos)) * beams, False).items():
                texts = [pairs[which] for which in drawn]
                ends = [text[-1] in eos or step == steps for text in texts]
                done = finished + tuple(text for text, end in zip(texts[:beams], ends, strict=False) if end)
                done = tuple(sorted(done, key=lambda text: -_mean(table, text))[:beams])
                going = [text for text, end in zip(texts, ends, strict=True) if not end]
                going = tuple(sorted(going, key=lambda text: -_likelihood(table, text))[:beams])
                bound = math.log(_likelihood(table, going[0])) / step if going else -math.inf
                if not going or (len(done) == beams and bound <= _mean(table, done[-1])):
                    final[done[0]] += odds * chance
                else:
                    longer[done, going] += odds * chance
        law = dict(longer)
    return dict(final)


def _mean(table, text: tuple[int, ...]) -> float:
    return math.log(_likelihood(table, text)) / len(text)
