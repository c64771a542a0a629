"""Noise as a pure function of the request's key, the path and the token.

The key of a path is computed from the key of the path that is one token shorter; that of the empty path is the request's.
Equal keys give equal noise on every machine.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from specbeam.core.steps import Array, step

ALL_TOKENS = 2**32 - 1  # in place of a token: for the joint noise of all extensions of a path
_ODD = np.uint32(0x9E3779B1)
_ROUND_1 = np.uint32(0x21F0AAAD)
_ROUND_2 = np.uint32(0xD35A2D97)
_ROUND_3 = np.uint32(0x85EBCA6B)
_S15 = np.uint32(15)
_S16 = np.uint32(16)
_ONE = np.uint32(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_L1 = np.uint64(1)
_L27 = np.uint64(27)
_L30 = np.uint64(30)
_L31 = np.uint64(31)
_L32 = np.uint64(32)
_LN2 = np.float32(0.6931472)
_PER_OCTAVE = np.float32(_LN2 / 2**23)  # the bits of a float32, read as a number, grow by 2^23 per doubling
_TOP = np.float32((31 + 127) * _LN2 + 1e-5)


def request_key(seed: int, prompt: Sequence[int], occurrence: int) -> int:
    """Return the 64-bit key of a request. `occurrence` distinguishes equal prompts of one call."""
    head = np.array([seed % 2**64, occurrence], dtype="<u8").tobytes()
    text = np.asarray(prompt, dtype="<i8").tobytes()
    digest = hashlib.blake2b(head + text, digest_size=8).digest()
    return int.from_bytes(digest, "little")


@step
def scramble(x: Array) -> Array:
    """Return a uint64 whose bits all depend on all bits of `x`: the finalizer of splitmix64."""
    x = (x ^ (x >> _L30)) * _FACTOR_1
    x = (x ^ (x >> _L27)) * _FACTOR_2
    return x ^ (x >> _L31)


@step
def child_key(key: Array, token: int) -> Array:
    """Return the key of the path of `key` extended by `token`."""
    return scramble(scramble(key ^ _GOLDEN) + np.uint64(token))


@step
def child_keys(keys: Array, tokens: Array) -> Array:
    """Return the keys, uint64[n], of the paths of `keys`, each extended by its token of `tokens`, int64[n]."""
    longer = np.empty_like(keys)
    for place in range(len(keys)):
        longer[place] = child_key(keys[place], tokens[place])
    return longer


@step
def path_keys(key: Array, tokens: Array) -> Array:
    """Return the keys, uint64[n + 1], of a path and of its extensions by the first 1, 2, ..., n of the tokens."""
    keys = np.empty(len(tokens) + 1, dtype=np.uint64)
    keys[0] = key
    for place in range(len(tokens)):
        keys[place + 1] = child_key(keys[place], tokens[place])
    return keys


@step
def leading_bits(key: Array, token: int) -> Array:
    """Return the leading 32 bits of the uniform in `gumbel`: three multiply-and-shift rounds of key and token."""
    # Every product is cut to 32 bits at once, because numba widens it to 64.
    u32 = np.uint32
    low = u32(key & np.uint64(0xFFFFFFFF))
    high = u32(key >> _L32)
    x = u32(low + u32(u32(u32(token) + _ONE) * _ODD))
    x = u32(u32(x ^ u32(x >> _S16)) * _ROUND_1)
    x = u32(u32(x ^ u32(x >> _S15)) + high)
    x = u32(x * _ROUND_2)
    x = u32(u32(x ^ u32(x >> _S15)) * _ROUND_3)
    return u32(x ^ u32(x >> _S16))


@step
def gumbel(key: Array, token: int) -> float:
    """Return the Gumbel(0, 1) noise of a token after a path, computed from 64 bits."""
    trailing = scramble(key + (np.uint64(token) + _L1) * _GOLDEN) >> _L32
    leading = np.float64(leading_bits(key, token))
    uniform = (leading + (np.float64(trailing) + 0.5) * 2.0**-32) * 2.0**-32
    return -np.log(-np.log1p(-min(uniform, 1 - 2.0**-53)))


@step
def bound_noise(key: Array, first: int, bounds: Array) -> None:
    """Write an upper bound of the noise of tokens after a path into `bounds`, float32[n], from token `first` on.

    The noise is at most -log(u), where u is the uniform that begins with `leading_bits`. And log2 of a float32 is at least
    its bits, read as a number and scaled by 2^-23.
    """
    # `leading_bits` is written out here: loops over plain arithmetic become vector instructions.
    u32 = np.uint32
    low = u32(key & np.uint64(0xFFFFFFFF))
    high = u32(key >> _L32)
    start = u32(first)
    for token in range(len(bounds)):
        x = u32(low + u32(u32(u32(start + u32(token)) + _ONE) * _ODD))
        x = u32(u32(x ^ u32(x >> _S16)) * _ROUND_1)
        x = u32(u32(x ^ u32(x >> _S15)) + high)
        x = u32(x * _ROUND_2)
        x = u32(u32(x ^ u32(x >> _S15)) * _ROUND_3)
        x = u32(x ^ u32(x >> _S16))
        bounds[token] = np.float32(np.int32(x >> _ONE))
    bits = bounds.view(np.int32)
    for token in range(len(bounds)):
        bounds[token] = _TOP - np.float32(bits[token]) * _PER_OCTAVE


@step
def with_largest(value: float, largest: float, wanted: float) -> float:
    """Return one of several independent Gumbel values, transformed so that the largest of them becomes `wanted`.

    The result -log(exp(-wanted) - exp(-largest) + exp(-value)) keeps the order of values. If `wanted` has the law of the
    largest value and is independent of these values, the results have the law of the values. Source: Kool et al. 2019,
    app. B.3.
    """
    gap = value - largest
    if gap == 0:
        return wanted
    log_rest = np.log(-np.expm1(gap)) if gap > -0.693 else np.log1p(-np.exp(gap))  # log(1 - exp(gap)), at both ends
    w = wanted - value + log_rest
    return wanted - max(0.0, w) - np.log1p(np.exp(-abs(w)))
