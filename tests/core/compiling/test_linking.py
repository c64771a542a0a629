"""The linking of compiled functions, and copies that they make."""

import os
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import numpy as np
import pytest

from specbeam.core.compiling import compiler as compiling
from specbeam.core.compiling.compiler import AVAILABLE, Array, compiled
from specbeam.core.compiling.copies import copy_numbers, copy_rows
from specbeam.core.compiling.linking import LONG, is_long
from specbeam.core.steps import step

if AVAILABLE:
    from numba import njit, typeof

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
def _set_first(x: Array, number: int) -> None:
    if number > 100:
        raise ValueError("too many")
    x[0] = number


@step
def _set_first_by_name(x: Array, number: int) -> None:
    _set_first(x, number)


@step
def _set_first_by_address(address: int, x: Array, number: int) -> None:
    compiling.call_at(address, (x, number))


@step
def _sorted_copy(x: Array) -> Array:
    return np.sort(x)


def form_of(function, *arguments):
    """The form of a step for arguments of these types."""
    kinds = tuple(typeof(argument) for argument in arguments)
    function.compile(kinds)
    return function.overloads[kinds]


def test_constants_do_not_make_forms_of_their_own():
    assert _added_often(np.arange(3), 5).tolist() == [19, 20, 21]
    added = compiled(_added.py_func)
    added._cache.disable()  # what is kept is compiled in without it

    @compiled
    def added_often(x: Array, number: int) -> Array:
        return added(added(added(x, 1, True), 7, False), number, number > 3)

    assert added_often(np.arange(3), 5).tolist() == [19, 20, 21]
    assert len(added.overloads) == 1


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


def test_a_step_that_is_only_compiled_into_others_has_machine_code_once_somebody_asks_for_its_address():
    x = np.zeros(1, dtype=np.int64)
    _set_first_by_name(x, 3)
    form = form_of(_set_first, x, 3)
    assert not form.library._has_machine_code
    assert form_of(_set_first_by_name.python_entry, x, 3).library._has_machine_code
    assert x.tolist() == [3]
    address = compiling.address_of(_set_first, x, 3)
    assert form.library._has_machine_code
    _set_first_by_address(address, x, 7)
    assert x.tolist() == [7]
    for run in (_set_first_by_name, partial(_set_first_by_address, address)):
        with pytest.raises(ValueError, match="too many"):
            run(x, 101)


@pytest.mark.parametrize("run", [lambda *these: _copied(*these), _copied.py_func if AVAILABLE else None])
def test_copies_change_the_places_that_they_are_of_and_no_others(run):
    goal = np.zeros((4, 2), dtype=np.float32)
    numbers = np.zeros(5, dtype=np.int64)
    run(goal, np.ones((2, 2), dtype=np.float32), numbers, np.array([8, 9]))
    assert goal.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]
    assert numbers.tolist() == [0, 0, 8, 9, 0]


def test_functions_are_long_by_the_code_that_was_compiled_into_them():
    assert not is_long(form_of(_added, np.arange(3), 5, True).library)
    assert is_long(form_of(_sorted_copy, np.arange(3.0)).library)
    assert LONG == 400


_Two = namedtuple("_Two", "a b")


@step
def _printed(x: int) -> int:
    print(_Two(x, 2.5))  # noqa: T201
    return x + 1


def test_functions_of_others_may_call_steps_that_need_an_environment(capfd):
    """What a step prints, or a record that it makes of constants, is found by an environment of numba's."""

    @njit
    def theirs(x):
        return _printed(x)

    assert theirs(5) == 6
    assert "5" in capfd.readouterr().out


def test_numba_that_is_told_not_to_compile_leaves_steps_to_python():
    program = (
        "from specbeam.core.compiling.compiler import AVAILABLE; import specbeam.core.laws.ranking; print(AVAILABLE)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True
    )
    assert found.stdout.strip() == "False", found.stderr
