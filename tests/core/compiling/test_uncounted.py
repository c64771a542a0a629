"""Compiled functions that count no references."""

import sys
from pathlib import Path

import numpy as np
import pytest

from specbeam.core.compiling.compiler import AVAILABLE, Array
from specbeam.core.compiling.uncounted import compiled_without_counts
from specbeam.core.steps import step

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is missing")
MEMORY = Path("/proc/self/statm")  # of Linux
PAGE = 4096


@step
def made(numbers: Array) -> Array:
    return numbers + 1


@step
def summed(numbers: Array) -> float:
    return made(numbers).sum()


@compiled_without_counts
def write_sums(rows: Array, out: Array) -> None:
    for row in range(len(rows)):
        out[row] = summed(rows[row])


@compiled_without_counts
def written(out: Array) -> None:
    out[:] = np.ones(3)


@pytest.mark.skipif(not MEMORY.exists(), reason="memory is asked of Linux")
def test_what_is_called_may_make_arrays_and_frees_them():
    """Even if it was compiled for this caller first: it counts, as it says itself."""
    rows, out = np.arange(3 * 200_000.0).reshape(3, -1), np.zeros(3)
    before = sys.getrefcount(rows), sys.getrefcount(out)
    write_sums(rows, out)
    assert out.tolist() == (rows + 1).sum(1).tolist()
    held = resident()
    for _ in range(50):
        write_sums(rows, out)
    assert resident() - held < 20 * rows[0].nbytes
    assert (sys.getrefcount(rows), sys.getrefcount(out)) == before


def resident():
    """The bytes of this process that are in memory."""
    return int(MEMORY.read_text().split()[1]) * PAGE


def test_a_function_that_makes_an_array_cannot_go_without_counts():
    with pytest.raises(Exception, match="Only accept returning of array passed into the function"):
        written(np.zeros(3))
