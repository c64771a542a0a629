"""All chance. A session's dice are seeded by (seed, prompt, occurrence) and by nothing else, so that the batch it
happens to run in cannot change its text.

Two kinds: coins and picks, drawn one after the other (`Dice`), and noise that belongs to a *place* (`gumbel`): the
noise of a token after a path is a pure function of the request's key, the path and the token.
"""

import hashlib
import math
import secrets
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64, UInt32, UInt64

from specbeam import kernels

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
S27, S30, S31 = (np.uint64(n) for n in (27, 30, 31))
ODD, ROUND_1, ROUND_2, ROUND_3 = (np.uint32(n) for n in (0x9E3779B1, 0x21F0AAAD, 0xD35A2D97, 0x85EBCA6B))
S15, S16 = np.uint32(15), np.uint32(16)
AHEAD = 64  # uniforms that are taken from a stream together


def scramble(x: UInt64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """The finalizer of splitmix64: every output bit depends on every input bit."""
    x = (x ^ (x >> S30)) * FACTOR_1
    x = (x ^ (x >> S27)) * FACTOR_2
    return x ^ (x >> S31)


def request_key(seed: int, prompt: Sequence[int], occurrence: int) -> int:
    """The key of one request. `occurrence` tells equal prompts of one call (and return sequences) apart."""
    head = np.array([seed % 2**64, occurrence], dtype="<u8").tobytes()
    digest = hashlib.blake2b(head + np.asarray(prompt, dtype="<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def child_keys(keys: UInt64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """The keys of the paths that `keys` stand for, each prolonged by one token."""
    if kernels.AVAILABLE:
        return kernels.child_keys(keys, tokens)
    return scramble(scramble(keys ^ GOLDEN) + tokens.astype(np.uint64))


def path_keys(key: UInt64[np.ndarray, " 1"], tokens: Int64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n+1"]:
    """The key of a path, and those of the paths that grow out of it token by token."""
    if kernels.AVAILABLE:
        return kernels.path_keys(key[0], tokens)
    keys = [key]
    for place in range(len(tokens)):
        keys.append(child_keys(keys[-1], tokens[place : place + 1]))
    return np.concatenate(keys)


def coarse(keys: UInt64[np.ndarray, " paths"], vocab: int) -> UInt32[np.ndarray, "paths vocab"]:
    """The leading 32 bits of the uniform behind `gumbel` for every token after every path.

    Cheap, and enough to bound the noise from above: with u = coarse / 2^32, noise <= -log(u).
    """
    tokens = np.arange(vocab, dtype=np.uint32)
    return _mixed(keys[:, None], tokens)


def gumbel_at(keys: UInt64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Gumbel(0, 1) noise of one token after each path, from 64 bits. Equal keys give equal noise, on every machine."""
    leading = _mixed(keys, tokens.astype(np.uint32))
    trailing = scramble(keys + (tokens.astype(np.uint64) + np.uint64(1)) * GOLDEN) >> np.uint64(32)
    uniform = (leading + (trailing + 0.5) * 2.0**-32) * 2.0**-32
    return -np.log(-np.log1p(-np.minimum(uniform, 1 - 2.0**-53)))


def gumbel(keys: UInt64[np.ndarray, " paths"], vocab: int) -> Float64[np.ndarray, "paths vocab"]:
    """`gumbel_at` for every token after every path."""
    tokens = np.tile(np.arange(vocab), len(keys))
    return gumbel_at(np.repeat(keys, vocab), tokens).reshape(len(keys), vocab)


def _mixed(keys: UInt64[np.ndarray, "*rows"], tokens: UInt32[np.ndarray, "*tokens"]) -> UInt32[np.ndarray, "*shape"]:
    """32 bits of each (key, token): three multiply-and-shift rounds, the halves of the key enter one after the other."""
    first, second = keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    x: UInt32[np.ndarray, "*shape"] = first + (tokens + np.uint32(1)) * ODD
    x ^= x >> S16
    x *= ROUND_1
    x ^= x >> S15
    x += second
    x *= ROUND_2
    x ^= x >> S15
    x *= ROUND_3
    x ^= x >> S16
    return x


class Dice:
    """Coins and picks of one session. Tests replace it by dice that walk through every outcome."""

    def __init__(self, key: int | None = None) -> None:
        self.key = secrets.randbits(64) if key is None else key
        self._stream = np.random.Generator(np.random.Philox(key=self.key))
        self._drawn, self._used = np.zeros(0), 0  # what was taken from the stream, and how much of it was given out

    def ahead(self, count: int) -> Float64[np.ndarray, " count"]:
        """The next uniforms in [0, 1), for loops that say afterwards how many of them they used."""
        missing = self._used + count - len(self._drawn)
        if missing > 0:
            more = self._stream.random(max(missing, AHEAD))
            self._drawn, self._used = np.concatenate([self._drawn[self._used :], more]), 0
        return self._drawn[self._used : self._used + count]

    def use(self, count: int) -> None:
        """Give out so many of those that are ahead."""
        self._used += count

    def _next(self) -> float:
        if self._used == len(self._drawn):
            self._drawn, self._used = self._stream.random(AHEAD), 0
        self._used += 1
        return float(self._drawn[self._used - 1])

    def flip(self, odds: float) -> bool:
        """True with probability `odds` (1 and above: always; 0 and below: never)."""
        return bool(self._next() < odds)

    def uniform(self, shape: tuple[int, ...]) -> Float64[np.ndarray, "*shape"]:
        """Independent uniforms in (0, 1)."""
        count = math.prod(shape)
        uniforms = np.maximum(self.ahead(count), 2.0**-53).reshape(shape)
        self.use(count)
        return uniforms

    def pick(self, law: Float64[np.ndarray, " n"]) -> int:
        """An index with odds `law`, which need not be normalised and holds something."""
        if kernels.AVAILABLE and len(law) > kernels.LONG:
            return int(kernels.pick(law, self._next()))
        edges = law.cumsum()
        place = int(edges.searchsorted(self._next() * edges[-1], side="right"))
        return place if place < len(law) else int(np.flatnonzero(law)[-1])  # the product was rounded up
