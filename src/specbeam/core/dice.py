"""The random numbers of a session: its dice, and the uniform numbers that steps consume.

A session's dice are seeded by (seed, prompt, occurrence) alone, so the other prompts of a batch cannot change its text.
"""

import math
import secrets
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from specbeam.core.compiling.sums import picked as place_of
from specbeam.core.errors import BrokenLaw
from specbeam.core.steps import Array, borrowed, verb

TAKEN_TOGETHER = 64  # minimum number of uniforms drawn from a stream at once
SMALLEST = 2.0**-53  # in place of a uniform that is 0


@borrowed
class Uniforms(NamedTuple):
    """A buffer of uniform random numbers of one session, consumed in order."""

    values: Array  # float64[n] in [0, 1)
    used: Array  # int64[1]: number of values consumed so far


@verb(0)
def flip(dice: Any, odds: float) -> bool:
    """Return True with probability `odds` (1 and above: always; 0 and below: never)."""
    return bool(dice.flip(odds))


@flip.of(Uniforms)
def flip_uniform(dice: Uniforms, odds: float) -> bool:
    """Compare the next uniform with `odds`; see `flip`."""
    dice.used[0] += 1
    return dice.values[dice.used[0] - 1] < odds


@verb(0)
def pick(dice: Any, law: Array) -> int:
    """Return an index drawn with probability proportional to `law`, float64[n], which must have a positive entry."""
    return int(dice.pick(law))


@pick.of(Uniforms)
def pick_by_uniform(dice: Uniforms, law: Array) -> int:
    """Return the index at which the cumulative sum of `law` passes the next uniform times its total; see `pick`."""
    dice.used[0] += 1
    return place_of(law, dice.values[dice.used[0] - 1])


@verb(0)
def next_uniforms(dice: Any, count: int) -> Array:
    """Return the next `count` uniforms, float64[count] in (0, 1)."""
    found: Array = dice.uniform((count,))
    return found


@next_uniforms.of(Uniforms)
def next_of_uniforms(dice: Uniforms, count: int) -> Array:
    """Return uniforms of the buffer; see `next_uniforms`."""
    start = dice.used[0]
    dice.used[0] = start + count
    return np.maximum(dice.values[start : start + count], SMALLEST)


class Dice:
    """The dice of one session: an endless stream of uniforms. Tests use dice that enumerate all outcomes."""

    def __init__(self, key: int | None = None) -> None:
        self.key = secrets.randbits(64) if key is None else key
        self._stream = np.random.Generator(np.random.Philox(key=self.key))
        self._uniforms = Uniforms(np.zeros(0), np.zeros(1, dtype=np.int64))

    def ready(self, count: int) -> Uniforms:
        """Return a buffer with at least `count` unused uniforms, valid until the next call of any method."""
        values, used = self._uniforms
        missing = int(used[0]) + count - len(values)
        if missing > 0:
            more = self._stream.random(max(missing, TAKEN_TOGETHER))
            left = np.concatenate([values[used[0] :], more])
            self._uniforms = Uniforms(left, np.zeros(1, dtype=np.int64))
        return self._uniforms

    def flip(self, odds: float) -> bool:
        """Return True with probability `odds` (1 and above: always; 0 and below: never)."""
        return bool(flip(self.ready(1), odds))

    def pick(self, law: Float64[np.ndarray, " n"]) -> int:
        """Return an index drawn with probability proportional to `law`; it need not sum to 1.

        Raises `BrokenLaw` if it has no positive entry, or a negative or infinite one, or NaN.
        """
        total = law.sum()
        if not 0 < total < math.inf or law.min() < 0:
            raise BrokenLaw(f"dice.pick was given a law that sums to {total:g}, its least number is {law.min():g}")
        return int(pick(self.ready(1), law))

    def uniform(self, shape: tuple[int, ...]) -> Float64[np.ndarray, "*shape"]:
        """Return independent uniforms in (0, 1)."""
        count = math.prod(shape)
        values, used = self.ready(count)
        uniforms = values[used[0] : used[0] + count]
        used[0] += count
        return np.maximum(uniforms, SMALLEST).reshape(shape)
