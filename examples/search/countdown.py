"""The game of numbers: reach a target from four numbers by +, - and *, each number used once, a line for each step.

A state is what numbers are left, so whether the target can still be reached is known exactly: that is the value.

    numbers 3 5 8 9 to 31:
    8*5=40 left 3 9 40
    40-9=31 left 3 31   <- not done: 3 is left over
"""

import functools
import random
import re
from dataclasses import dataclass

from task import Task

MOST = 99  # the largest number that a step may make
STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+) left ([\d ]+)")
HEAD = re.compile(r"numbers ([\d ]+) to (\d+):")

State = tuple[int, ...]  # the numbers that are left, in ascending order


@dataclass(frozen=True)
class Game:
    """Four numbers, and the target."""

    numbers: State
    target: int

    @property
    def prompt(self) -> str:
        """The first line."""
        return f"numbers {' '.join(map(str, self.numbers))} to {self.target}:\n"


def moves(state: State) -> list[tuple[str, State]]:
    """Return each step that can be taken, as its line, with the numbers that are left after it."""
    found = []
    for i, first in enumerate(state):
        for j, second in enumerate(state):
            if i == j:
                continue
            rest = [number for place, number in enumerate(state) if place not in (i, j)]
            results = {"-": first - second}
            if i < j:
                results |= {"+": first + second, "*": first * second}
            for sign, result in results.items():
                if 0 < result <= MOST:
                    after = tuple(sorted([*rest, result]))
                    line = f"{first}{sign}{second}={result} left {' '.join(map(str, after))}\n"
                    found.append((line, after))
    return found


@functools.lru_cache(maxsize=1_000_000)
def reaches(state: State, target: int) -> bool:
    """Return whether some steps lead from the state to the target alone."""
    if len(state) == 1:
        return state[0] == target
    return any(reaches(after, target) for _, after in set(moves(state)))


def play(rng: random.Random) -> tuple[Game, str]:
    """Return a game, and a solution: random steps, whose result is the target."""
    start = tuple(sorted(rng.randint(1, 12) for _ in range(4)))
    state = list(start)
    lines = []
    while len(state) > 1:
        rng.shuffle(state)
        first, second, *rest = state
        sign = rng.choice("+-*")
        result = {"+": first + second, "-": first - second, "*": first * second}[sign]
        if not 0 < result <= MOST:
            if not moves(tuple(sorted(state))):
                return play(rng)  # such as 50 and 50
            continue
        if sign != "-":
            first, second = sorted((first, second))
        state = sorted([*rest, result])
        lines.append(f"{first}{sign}{second}={result} left {' '.join(map(str, state))}\n")
    return Game(start, state[0]), "".join(lines)


def value(text: str) -> float:
    """Return the value of a game that was played so far: 1 if the target can still be reached, 0 if not.

    A line that is no legal step loses the game.
    """
    first, *lines = text.strip().split("\n")
    head = HEAD.fullmatch(first)
    if head is None:
        return 0.0
    state = tuple(sorted(map(int, head[1].split())))
    target = int(head[2])
    for line in lines:
        step = STEP.fullmatch(line)
        after = tuple(map(int, step[5].split())) if step else ()
        if (f"{line}\n", after) not in moves(state):
            return 0.0
        state = after
    return float(reaches(state, target))


def is_solved(text: str) -> bool:
    """Return whether a game was played to its end, and reached the target."""
    last = text.strip().split("\n")[-1]
    step = STEP.fullmatch(last)
    return step is not None and " " not in step[5] and value(text) == 1.0


TASK = Task(lambda rng, _: play(rng)[0].prompt, value, is_solved, step_tokens=24, max_new_tokens=48, temperature=1.0)
