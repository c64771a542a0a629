"""Reference counts of steps: no atomic operations in machine code, and every array is freed, also in many threads."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from specbeam.core import compiling
from specbeam.core.steps import step

pytestmark = pytest.mark.skipif(not compiling.AVAILABLE, reason="needs compiled functions")
CALLS = 300


@step
def longest_row(rows: list, factors: np.ndarray) -> np.ndarray:
    """Return the last of the longest rows, times its factor; makes an array for each row."""
    kept = np.zeros(1)
    for number in range(len(rows)):
        row = rows[number] * factors[number]
        if len(row) >= len(kept):
            kept = row
    return kept


@step
def scaled_row(matrix: np.ndarray) -> np.ndarray:
    """Return one of the rows plus 1, times a factor, by way of a list of arrays that is passed on."""
    rows = []
    for number in range(len(matrix)):
        rows.append(matrix[number] + 1)
        rows.append(rows[number].copy())
    return longest_row(rows, np.arange(len(rows)))


def code_of(function):
    """The LLVM code of a step for linking, and the code of which machine code is made."""
    from numba import typeof
    from numba.core.registry import cpu_target

    from specbeam.core.compiling.counts import with_inlined_counts

    kinds = (typeof(np.ones((2, 2))),)
    function.compile(kinds)
    result = function.overloads[kinds]
    module = result.library._get_module_for_linking()
    return module, with_inlined_counts(module, cpu_target.target_context.codegen()._pass_builder())


def test_machine_code_counts_without_atomic_operations():
    assert scaled_row(np.arange(12.0).reshape(3, 4)).tolist() == [25.0, 30.0, 35.0, 40.0]
    module, inlined = code_of(scaled_row)
    assert "@NRT_incref" in str(module)
    assert "@NRT_decref" in str(module)
    assert "@NRT_incref" not in str(inlined)
    assert "@NRT_decref" not in str(inlined)
    assert "@specbeam_NRT" not in str(inlined)
    assert "atomicrmw" not in str(inlined)
    assert "@NRT_MemInfo_call_dtor" in str(inlined)


def test_code_for_linking_is_unchanged():
    """Callers inline it, and LLVM removes needless counts by the names of numba's functions."""
    module, _ = code_of(scaled_row)
    before = str(module)
    code_of(scaled_row)
    assert str(module) == before


def test_every_array_is_freed_in_many_threads(request):
    from numba.core.runtime import _nrt_python, rtsys

    if not _nrt_python.memsys_stats_enabled():
        _nrt_python.memsys_enable_stats()
        request.addfinalizer(_nrt_python.memsys_disable_stats)
    gc.collect()  # arrays of other tests
    matrix = np.arange(600.0).reshape(30, 20)
    expected = scaled_row(matrix)
    references = sys.getrefcount(matrix)
    before = rtsys.get_allocation_stats()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(scaled_row, [matrix] * CALLS))
    assert all((one == expected).all() for one in found)
    del found
    after = rtsys.get_allocation_stats()
    assert after.mi_alloc - before.mi_alloc >= CALLS
    assert after.mi_alloc - before.mi_alloc == after.mi_free - before.mi_free
    assert after.alloc - before.alloc == after.free - before.free
    assert sys.getrefcount(matrix) == references
