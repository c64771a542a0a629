"""The linking of compiled functions, and copies that they make."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from specbeam.core.steps import step
from specbeam.kernels.compiling import AVAILABLE, Array, compiled
from specbeam.kernels.copies import copy_numbers, copy_rows
from specbeam.kernels.linking import LONG, is_long

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is missing")


@step
def _added(x: Array, number: int, is_twice: bool) -> Array:
    return x + (2 * number if is_twice else number)


@step
def _added_often(x: Array, number: int) -> Array:
    return _added(_added(_added(x, 1, True), 7, False), number, number > 3)


@step
def _copied(goal: Array, source: Array, rows: Array, row: Array) -> None:
    copy_rows(goal[1:], source)
    copy_numbers(rows[2:], row)


@step
def _sorted_copy(x: Array) -> Array:
    return np.sort(x)


def test_constants_do_not_make_forms_of_their_own():
    assert _added_often(np.arange(3), 5).tolist() == [19, 20, 21]
    assert len(_added.overloads) == 1


def test_threads_may_call_a_step_for_the_first_time_together():
    """It has one entry for Python, and each of its forms is there once."""
    together = Barrier(3)
    sources = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x + 3,
        lambda x: x + 4,
    ]

    def first_call(function):
        together.wait()
        return function(1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            for source in sources:
                function = compiled(source)
                assert list(threads.map(first_call, [function] * 3)) == [source(1)] * 3
                assert len(function.python_entry.overloads) == 1
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("run", [lambda *these: _copied(*these), _copied.py_func if AVAILABLE else None])
def test_copies_change_the_places_that_they_are_of_and_no_others(run):
    goal = np.zeros((4, 2), dtype=np.float32)
    numbers = np.zeros(5, dtype=np.int64)
    run(goal, np.ones((2, 2), dtype=np.float32), numbers, np.array([8, 9]))
    assert goal.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
    assert numbers.tolist() == [0, 0, 8, 9, 0]


def test_functions_are_long_by_the_code_that_was_compiled_into_them():
    _added_often(np.arange(3), 5)
    _sorted_copy(np.arange(3.0))
    (short,) = _added.overloads.values()
    (with_sorting,) = _sorted_copy.overloads.values()
    assert not is_long(short.library)
    assert is_long(with_sorting.library)
    assert LONG == 400
