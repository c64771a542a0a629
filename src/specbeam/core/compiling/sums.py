"""Compiled sums over the vocabulary: the logsumexp of logits, and the index that a uniform number draws."""

import math
from typing import Any

import numpy as np

from specbeam.core.compiling.compiler import BLOCK, Array, compiled, compiled_loosely
from specbeam.core.compiling.fused import fused, fused_doubles

CHUNK = 4096  # number of values between two sweeps over a row; their buffers stay in the processor's nearest cache
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.6931471805599453)
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720))
_F1 = np.float32(1)
_HALF = np.float32(0.5)
_LEAST = np.float32(-126)
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_BIAS = np.int32(127)
_FRACTION = np.int32(23)
_WIDE_LOG2E = 1.4426950408889634
_WIDE_LN2_HIGH = 0.693147180369123816490  # the leading bits of log(2), whose product with a whole number is exact
_WIDE_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = 1.5 * 2.0**52  # added to a number, it leaves the nearest whole number in the last bits
_WIDE_BIAS = np.int64(1023)
_WIDE_FRACTION = np.int64(52)
_WIDE_LEAST = -708.0
_D = tuple(1 / math.factorial(n) for n in range(2, 14))
LONG = 512  # longer laws are summed in blocks
INF_RANK = int(np.float32(np.inf).view(np.int32))
MINUS_INF_RANK = -INF_RANK - 1


@compiled_loosely
def _sum(block: Array) -> Array:
    """Return the sum of a block."""
    total = 0.0
    for place in range(BLOCK):
        total += block[place]
    return total


@compiled
def picked_by_blocks(law: Array, uniform: float) -> int:
    """Return the index that a uniform in [0, 1) draws from a long law, float64[n], which need not sum to 1.

    Sums whole blocks first, then single tokens in the chosen block only.
    """
    blocks = (len(law) + BLOCK - 1) // BLOCK
    sums = np.zeros(blocks)
    for number in range(len(law) // BLOCK):
        sums[number] = _sum(law[number * BLOCK : (number + 1) * BLOCK])
    for place in range(len(law) // BLOCK * BLOCK, len(law)):
        sums[blocks - 1] += law[place]
    left = uniform * sums.sum()
    number = 0
    while number < blocks - 1 and left >= sums[number]:
        left -= sums[number]
        number += 1
    last = -1
    for place in range(number * BLOCK, min((number + 1) * BLOCK, len(law))):
        if law[place] > 0:
            last = place
            left -= law[place]
            if left < 0:
                break
    place = len(law)
    while last < 0 and place > 0:  # `uniform` times the sum was rounded up, and all odds of the last block are 0
        place -= 1
        last = place if law[place] > 0 else -1
    return last


@compiled
def picked(p: Array, uniform: float) -> int:
    """Return the index that a uniform in [0, 1) draws from a law, float64[n], as `Dice.pick` does; it need not sum to 1."""
    if len(p) > LONG:
        return picked_by_blocks(p, uniform)
    total = 0.0
    for place in range(len(p)):
        total += p[place]
    edge = uniform * total
    reached = 0.0
    last = -1
    for place in range(len(p)):
        reached += p[place]
        if p[place] > 0:
            last = place
        if reached > edge:
            return place
    return last


@compiled_loosely
def rank_of(bits: Array) -> Array:
    """Return an int32 that sorts like the float32 with these bits; NaN lies outside of [-inf, +inf].

    The function is its own inverse.
    """
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN) & _MAGNITUDE))


@compiled_loosely
def extremes(bits: Array) -> tuple[Array, Array]:
    """Return the smallest and largest `rank_of` of numbers, given by their bits, because the arithmetic must not see NaN."""
    low = high = rank_of(bits[0])
    for place in range(len(bits)):
        low = min(low, rank_of(bits[place]))
        high = max(high, rank_of(bits[place]))
    return low, high


@compiled
def exp_near_0(x: Array) -> Array:
    """Return exp(x), float32, with a relative error below 2e-7 for |x| < 0.35, by a polynomial of degree 6.

    After extracting powers of two, all exponents are in this range.
    """
    value = fused(x, _C6, _C5)
    value = fused(x, value, _C4)
    value = fused(x, value, _C3)
    value = fused(x, value, _C2)
    value = fused(x, value, _F1)
    return fused(x, value, _F1)


@compiled
def exponentials(x: Array) -> Array:
    """Return exp(x) of float64 numbers up to 700, with a relative error below 1e-15; 0 for numbers below -708.

    Unlike the function of the C library, it compiles to vector instructions.
    """
    found = np.empty(len(x))
    powers = np.empty(len(x))
    for place in range(len(x)):
        y = max(x[place], _WIDE_LEAST)
        shifted = y * _WIDE_LOG2E + _ROUNDING
        whole = shifted - _ROUNDING
        f = fused_doubles(whole, -_WIDE_LN2_HIGH, y)
        f = fused_doubles(whole, -_WIDE_LN2_LOW, f)
        value = fused_doubles(f, _D[11], _D[10])
        value = fused_doubles(f, value, _D[9])
        value = fused_doubles(f, value, _D[8])
        value = fused_doubles(f, value, _D[7])
        value = fused_doubles(f, value, _D[6])
        value = fused_doubles(f, value, _D[5])
        value = fused_doubles(f, value, _D[4])
        value = fused_doubles(f, value, _D[3])
        value = fused_doubles(f, value, _D[2])
        value = fused_doubles(f, value, _D[1])
        value = fused_doubles(f, value, _D[0])
        value = fused_doubles(f, value, 1.0)
        found[place] = fused_doubles(f, value, 1.0)
        powers[place] = shifted
    bits = powers.view(np.int64)
    for place in range(len(x)):
        bits[place] = (bits[place] + _WIDE_BIAS) << _WIDE_FRACTION
    for place in range(len(x)):
        found[place] = found[place] * powers[place] if x[place] >= _WIDE_LEAST else 0.0
    return found


@compiled_loosely
def _write_exponentials(row: Array, top: float, part: Array, powers: Array) -> None:
    """Write exp(row - top) as `part` times a power of two, whose float32 bits go to `powers`."""
    for token in range(len(row)):
        y = max((row[token] - top) * _LOG2E, _LEAST)
        whole = np.floor(y + _HALF)
        f = (y - whole) * _LN2_HIGH
        part[token] = exp_near_0(f)
        powers[token] = (np.int32(whole) + _BIAS) << _FRACTION


@compiled_loosely
def _product(block: Array, other: Array) -> Array:
    """Return the inner product of two blocks."""
    total: Any = np.float32(0)
    for place in range(BLOCK):
        total += block[place] * other[place]
    return total


@compiled_loosely
def log_norm(logits: Array) -> Array:
    """Return log(sum(exp(row))) of each row of logits, float32[rows, vocab] -> float64[rows]; see `laws.reduce.log_norm`.

    Rows with NaN or +inf get NaN; rows of -inf get -inf. The exponential compiles to vector instructions.
    """
    rows, vocab = logits.shape
    out = np.empty(rows)
    part = np.zeros(CHUNK, dtype=np.float32)
    powers = np.zeros(len(part), dtype=np.int32)
    scale = powers.view(np.float32)
    for number in range(rows):
        bits = logits[number].view(np.int32)
        low, high = extremes(bits)
        if low < MINUS_INF_RANK or high >= INF_RANK:
            out[number] = np.nan
            continue
        if high == MINUS_INF_RANK:
            out[number] = -np.inf
            continue
        powers[0] = rank_of(high)
        top = scale[0]
        total = 0.0
        for first in range(0, vocab, CHUNK):
            count = min(CHUNK, vocab - first)
            _write_exponentials(logits[number, first : first + count], top, part, powers)
            whole = (count + BLOCK - 1) // BLOCK * BLOCK
            part[count:whole] = 0.0
            for start in range(0, whole, BLOCK):
                total += _product(part[start : start + BLOCK], scale[start : start + BLOCK])
        out[number] = top + np.log(total)
    return out
