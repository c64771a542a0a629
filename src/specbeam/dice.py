"""All chance. A session's dice are seeded by (seed, prompt, occurrence) and by nothing else, so that the batch it
happens to run in cannot change its text.

Two kinds: coins and picks, drawn one after the other (`Dice`), and noise that belongs to a *place* (`gumbel`): the
noise of a token after a path is a pure function of the request's key, the path and the token.
"""

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64, UInt64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1, FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
S11, S27, S30, S31 = (np.uint64(n) for n in (11, 27, 30, 31))


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
    return scramble(scramble(keys ^ GOLDEN) + tokens.astype(np.uint64))


def gumbel(keys: UInt64[np.ndarray, " paths"], vocab: int) -> Float64[np.ndarray, "paths vocab"]:
    """Gumbel(0, 1) noise of every token after every path. Equal keys give equal noise, on every machine."""
    counters = np.arange(1, vocab + 1, dtype=np.uint64) * GOLDEN
    bits = scramble(keys[:, None] + counters) >> S11
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log1p(-uniform))


class Dice:
    """Coins and picks of one session. Tests replace it by dice that walk through every outcome."""

    def __init__(self, key: int | None = None) -> None:
        self.key = secrets.randbits(64) if key is None else key
        self._stream = np.random.Generator(np.random.Philox(key=self.key))

    def flip(self, odds: float) -> bool:
        """True with probability `odds` (1 and above: always; 0 and below: never)."""
        return bool(self._stream.random() < odds)

    def uniform(self, shape: tuple[int, ...]) -> Float64[np.ndarray, "*shape"]:
        """Independent uniforms in (0, 1)."""
        return np.maximum(self._stream.random(shape), 2.0**-53)

    def pick(self, law: Float64[np.ndarray, " n"]) -> int:
        """An index with odds `law`, which need not be normalised."""
        edges = np.cumsum(law)
        place = int(np.searchsorted(edges, self._stream.random() * edges[-1], side="right"))
        return min(place, int(np.flatnonzero(law)[-1]))
