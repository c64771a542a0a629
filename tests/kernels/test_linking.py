"""The linking of compiled functions, and copies that they make."""

import numpy as np
import pytest

from specbeam.core.steps import step
from specbeam.kernels.compiling import AVAILABLE, Array
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
