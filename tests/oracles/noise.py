"""Noise of places on whole arrays: 64 bits of each (key, token) by multiplications and shifts, then a Gumbel quantile."""

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def scramble(x):
    """The finalizer of splitmix64, of uint64 of any shape."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def child_keys(keys, tokens):
    """Keys of paths that are prolonged by one token each."""
    return scramble(scramble(keys ^ GOLDEN) + tokens.astype(np.uint64))


def leading_bits(keys, tokens):
    """The leading 32 bits of the uniform of each (key, token): the halves of the key enter one after the other."""
    low = keys.astype(np.uint32)
    high = (keys >> np.uint64(32)).astype(np.uint32)
    x = low + (tokens.astype(np.uint32) + np.uint32(1)) * np.uint32(0x9E3779B1)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) + high
    x = x * np.uint32(0xD35A2D97)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    return x ^ (x >> np.uint32(16))


def gumbel(keys, tokens):
    """Gumbel(0, 1) noise of each (key, token)."""
    trailing = scramble(keys + (tokens.astype(np.uint64) + np.uint64(1)) * GOLDEN) >> np.uint64(32)
    uniform = (leading_bits(keys, tokens) + (trailing + 0.5) * 2.0**-32) * 2.0**-32
    return -np.log(-np.log1p(-np.minimum(uniform, 1 - 2.0**-53)))


ALL_TOKENS = 2**32 - 1


def from_the_top(logp, keys):
    """Values of all pairs, by the definition: the largest one of each path from its whole weight, the others below it.

    Args:
        logp: log weights, float64[paths, vocab], -inf for no weight.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        free = logp + gumbel_of_all(keys, logp.shape[1])
        largest = free.max(1, keepdims=True)
        heaviest = logp.max(1, keepdims=True)
        weight = heaviest + np.log(np.exp(logp - heaviest).sum(1, keepdims=True))
        wanted = weight + gumbel(keys[:, None], np.full((1, 1), ALL_TOKENS))
        values = largest - np.log(np.expm1(largest - free) + np.exp(largest - wanted))
    return np.where(np.isfinite(logp), values, -np.inf)


def gumbel_of_all(keys, vocab):
    """Noise of every token after every path, float64[paths, vocab]."""
    return gumbel(keys[:, None], np.arange(vocab)[None, :])
