"""Noise of places: Gumbel, independent between paths and tokens, and the same on every machine."""

import numpy as np
import pytest
from scipy import stats

from specbeam.core.noise import bound_noise, child_key, child_keys, gumbel, leading_bits, path_keys
from tests.oracles import noise as plain
from tests.support.steps import source_of_steps

FROZEN = [[2993088481, 3451807066], [3682614598, 992318866], [3669821167, 1021858111]]
EDGES = np.array([0, 1, 2**64 - 1], dtype=np.uint64)


def some_keys(seed, count):
    return np.random.default_rng(seed).integers(0, 2**63, count, dtype=np.uint64)


def noise_of(keys, tokens):
    """Noise of so many tokens after each path, by the step."""
    return np.array([[gumbel(key, token) for token in range(tokens)] for key in keys])


def test_noise_is_gumbel_and_independent_between_paths_and_tokens():
    noise = noise_of(some_keys(1, 300), 200)
    assert stats.kstest(noise.ravel(), stats.gumbel_r.cdf).pvalue > 1e-3
    uniform = np.exp(-np.exp(-noise))
    for other in (np.roll(uniform, 1, 0), np.roll(uniform, 1, 1)):
        assert abs(np.corrcoef(uniform.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(uniform.size)
    neighbours = noise_of(np.arange(300, dtype=np.uint64), 200)  # keys that differ in their last bits only
    assert stats.kstest(neighbours.ravel(), stats.gumbel_r.cdf).pvalue > 1e-3
    assert abs(np.corrcoef(neighbours[:-1].ravel(), neighbours[1:].ravel())[0, 1]) < 4 / np.sqrt(uniform.size)
    cells, _, _ = np.histogram2d(uniform[:, :-1].ravel(), uniform[:, 1:].ravel(), bins=16, range=[[0, 1], [0, 1]])
    assert stats.chisquare(cells.ravel()).pvalue > 1e-3


def test_the_same_noise_on_every_machine():
    for key, bits in zip(EDGES, FROZEN, strict=True):
        assert [int(leading_bits(key, token)) for token in range(2)] == bits
    assert plain.leading_bits(EDGES[:, None], np.arange(2)[None]).tolist() == FROZEN


@pytest.mark.parametrize("way", ["compiled", "source"])
def test_noise_is_that_of_array_code(way):
    keys = np.concatenate([EDGES, some_keys(3, 50)])
    if way == "compiled":
        check_noise(keys)
    else:
        with source_of_steps():
            check_noise(keys[:6])


def check_noise(keys):
    expected = plain.gumbel_of_all(keys, 100)
    assert noise_of(keys, 100) == pytest.approx(expected, rel=1e-14)
    for key, mine in zip(keys, expected, strict=True):
        bounds = np.empty(100, dtype=np.float32)
        bound_noise(key, 0, bounds)
        assert (bounds >= mine).all()
        assert (bounds <= mine + 40).all()
    tokens = np.arange(len(keys))
    longer = plain.child_keys(keys, tokens)
    assert child_keys(keys, tokens).tolist() == longer.tolist()
    assert [int(child_key(key, token)) for key, token in zip(keys, tokens, strict=True)] == longer.tolist()


def test_the_leading_bits_bound_the_noise():
    keys = some_keys(2, 100)[:, None]
    tokens = np.arange(1000)[None]
    with np.errstate(divide="ignore"):
        bounds = -np.log(plain.leading_bits(keys, tokens) * 2.0**-32)
    assert (plain.gumbel(keys, tokens) <= bounds).all()


def test_keys_of_a_path_are_those_of_its_beginnings():
    key = np.uint64(77)
    tokens = np.array([5, 0, 5, 31])
    keys = path_keys(key, tokens)
    assert keys[0] == key
    assert keys[1:].tolist() == plain.child_keys(keys[:-1], tokens).tolist()
    assert len(set(keys.tolist())) == 5
