"""The noise of `dice`, bit for bit."""

import numpy as np

from specbeam.kernels.compiling import Array, compiled

_ODD, _ROUND_1, _ROUND_2, _ROUND_3 = (np.uint32(n) for n in (0x9E3779B1, 0x21F0AAAD, 0xD35A2D97, 0x85EBCA6B))
_S15, _S16, _ONE = np.uint32(15), np.uint32(16), np.uint32(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_L1, _L27, _L30, _L31, _L32 = (np.uint64(n) for n in (1, 27, 30, 31, 32))
_LN2 = np.float32(0.6931472)
_PER_OCTAVE = np.float32(_LN2 / 2**23)  # the bits of a float32, read as a number, grow by 2^23 per doubling
_TOP = np.float32((31 + 127) * _LN2 + 1e-5)


@compiled
def mixed(key: Array, token: Array) -> Array:
    """`dice._mixed` of one place."""
    u32 = np.uint32  # numba widens every sum and product to 64 bits
    x = u32(u32(key) + u32(u32(u32(token) + _ONE) * _ODD))
    x = u32(u32(x ^ u32(x >> _S16)) * _ROUND_1)
    x = u32(u32(x ^ u32(x >> _S15)) + u32(key >> _L32))
    x = u32(x * _ROUND_2)
    x = u32(u32(x ^ u32(x >> _S15)) * _ROUND_3)
    return u32(x ^ u32(x >> _S16))


@compiled
def gumbel(key: Array, token: Array) -> Array:
    """`dice.gumbel_at` of one place."""
    x = key + (np.uint64(token) + _L1) * _GOLDEN
    x = (x ^ (x >> _L30)) * _FACTOR_1
    x = (x ^ (x >> _L27)) * _FACTOR_2
    trailing = (x ^ (x >> _L31)) >> _L32
    uniform = (np.float64(mixed(key, token)) + (np.float64(trailing) + 0.5) * 2.0**-32) * 2.0**-32
    return -np.log(-np.log1p(-min(uniform, 1 - 2.0**-53)))


@compiled
def _child_key(key: Array, token: Array) -> Array:
    x = key ^ _GOLDEN
    x = (x ^ (x >> _L30)) * _FACTOR_1
    x = (x ^ (x >> _L27)) * _FACTOR_2
    x = (x ^ (x >> _L31)) + np.uint64(token)
    x = (x ^ (x >> _L30)) * _FACTOR_1
    x = (x ^ (x >> _L27)) * _FACTOR_2
    return x ^ (x >> _L31)


@compiled
def child_keys(keys: Array, tokens: Array) -> Array:
    """`dice.child_keys`."""
    out = np.empty_like(keys)
    for place in range(len(keys)):
        out[place] = _child_key(keys[place], tokens[place])
    return out


@compiled
def path_keys(key: Array, tokens: Array) -> Array:
    """`dice.path_keys`."""
    out = np.empty(len(tokens) + 1, dtype=np.uint64)
    out[0] = key
    for place in range(len(tokens)):
        out[place + 1] = _child_key(out[place], tokens[place])
    return out


@compiled
def noise_bounds(key: Array, bound: Array) -> None:
    """Not below the noise of each token: noise <= -log(u) where u begins with the bits of `mixed`, and log2 of a float32
    is at least its bits, read as a number.
    """
    u32, bits = np.uint32, bound.view(np.int32)
    low, high = u32(key), u32(key >> _L32)
    for token in range(len(bound)):  # `mixed`, written out: loops over plain arithmetic become vector instructions
        x = u32(low + u32(u32(u32(token) + _ONE) * _ODD))
        x = u32(u32(x ^ u32(x >> _S16)) * _ROUND_1)
        x = u32(u32(x ^ u32(x >> _S15)) + high)
        x = u32(x * _ROUND_2)
        x = u32(u32(x ^ u32(x >> _S15)) * _ROUND_3)
        x = u32(x ^ u32(x >> _S16))
        bound[token] = np.float32(np.int32(x >> _ONE))
    for token in range(len(bound)):
        bound[token] = _TOP - np.float32(bits[token]) * _PER_OCTAVE
