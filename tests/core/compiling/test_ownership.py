"""Variables of steps own references only where they must, and every array lives as long as it is used."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

from specbeam.core import compiling
from specbeam.core.compiling.compiler import compiled
from specbeam.core.steps import borrowed, step

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from numba.core.runtime import _nrt_python, rtsys
from numba.core.runtime.context import NRTContext


class Pair(NamedTuple):
    """Two arrays and a number."""

    left: np.ndarray
    right: np.ndarray
    number: int


class Nested(NamedTuple):
    """Two pairs."""

    first: Pair
    second: Pair


@borrowed
class Lent(NamedTuple):
    """A pair that the caller lends."""

    pair: Pair


@step
def pair_of(size: int) -> Pair:
    """Return two new arrays."""
    return Pair(np.full(size, 1.0), np.full(size, 2.0), size)


@step
def use_memory(size: int) -> float:
    """Overwrite arrays that were freed too early."""
    total = 0.0
    for _ in range(8):
        total += np.full(size, -1000.0).sum()
    return total


@step
def sum_of_arguments(pair: Pair, nested: Nested, lent: Lent) -> float:
    """Read arguments, and parts of their parts, as rows, too."""
    second = nested.second
    left, right, _ = lent.pair
    total = 0.0
    for number in range(pair.number):
        part = second.left[number:]
        total += part[0] + pair.right[number] + left[number] + right[number]
    return total


@step
def argument_back(nested: Nested) -> Pair:
    """Return a part of an argument."""
    found = nested.first
    return found  # noqa: RET504  # the part is a variable of its own


@step
def argument_or_new(nested: Nested, is_new: bool) -> Pair:
    """Return a part of an argument, or a new record, through one variable."""
    found = nested.second
    if is_new:
        found = pair_of(3)
    for _ in range(2):
        found = Pair(found.right, found.left, found.number)
    return found


@step
def moved(size: int) -> float:
    """Move new arrays through records, tuples and variables."""
    made = pair_of(size)
    first = made
    both = (first, pair_of(size))
    one, other = both
    nested = Nested(other, one)
    use_memory(size)
    return nested.first.left.sum() + nested.second.right.sum()


@step
def taken_apart(size: int) -> float:
    """Keep one part of a record beyond the record; the other one ends with it."""
    kept = pair_of(size).right
    use_memory(size)
    _, right, number = pair_of(size)
    use_memory(size)
    return kept.sum() + right.sum() + number


@step
def twice(size: int) -> float:
    """Use a variable twice in a record that outlives it."""
    row = np.full(size, 3.0)
    doubled = Pair(row, row, size)
    use_memory(size)
    return doubled.left.sum() + doubled.right.sum()


@step
def views(size: int) -> float:
    """Read rows of a new matrix that ends before and after them."""
    matrix = np.full((size, size), 4.0)
    first = matrix[0]
    total = first.sum()
    last = matrix[size - 1]
    part = last[1:]
    use_memory(size)
    return total + part.sum()


@step
def carried(turns: int, size: int) -> float:
    """Carry records from turn to turn of a loop, and swap them."""
    older = pair_of(size)
    newer = pair_of(size)
    for number in range(turns):
        if number % 3 == 2:
            continue
        left, right = newer.right, older.left
        older = newer
        newer = Pair(left, right + number, size)
        use_memory(size)
    return newer.right.sum() + older.left.sum()


@step
def listed(turns: int, size: int) -> float:
    """Keep records in a list."""
    kept = []
    for number in range(turns):
        made = pair_of(size)
        kept.append(Pair(made.left + number, made.right, size))
    use_memory(size)
    total = 0.0
    for one in kept:
        total += one.left.sum()
    return total


@step
def failing(size: int) -> Pair:
    """Raise an error while records are alive."""
    made = pair_of(size)
    taken = made.left
    if size > 1:
        raise ValueError("too long")
    return Pair(taken, made.right, size)


def arguments():
    pair = Pair(np.arange(3.0), np.arange(3.0) + 10, 3)
    other = Pair(np.arange(3.0) + 20, np.arange(3.0) + 30, 3)
    return pair, Nested(pair, other), Lent(other)


CASES = {
    "arguments": (lambda: sum_of_arguments(*arguments()), 252.0),
    "moved": (lambda: moved(5), 15.0),
    "taken apart": (lambda: taken_apart(5), 25.0),
    "twice": (lambda: twice(5), 30.0),
    "views": (lambda: views(5), 36.0),
    "carried": (lambda: carried(7, 5), 65.0),
    "listed": (lambda: listed(4, 5), 50.0),
}


@pytest.fixture
def counted_memory():
    """Let numba count what it allocates and frees."""
    was_counting = _nrt_python.memsys_stats_enabled()
    _nrt_python.memsys_enable_stats()
    yield
    if not was_counting:
        _nrt_python.memsys_disable_stats()


@pytest.mark.usefixtures("counted_memory")
@pytest.mark.parametrize("case", CASES)
def test_arrays_live_as_long_as_they_are_used_and_are_freed(case):
    run, expected = CASES[case]
    assert run() == expected  # compiles it
    before = rtsys.get_allocation_stats()
    for _ in range(20):
        assert run() == expected
    after = rtsys.get_allocation_stats()
    assert after.mi_alloc - before.mi_alloc == after.mi_free - before.mi_free > 0


def test_parts_of_arguments_can_be_returned():
    (_, nested, _) = arguments()
    for _ in range(3):
        found = [argument_back(nested), argument_or_new(nested, is_new=False), argument_or_new(nested, is_new=True)]
        use_memory(3)
        assert [one.left.tolist() for one in found] == [[0, 1, 2], [20, 21, 22], [1, 1, 1]]
        assert [one.right.tolist() for one in found] == [[10, 11, 12], [30, 31, 32], [2, 2, 2]]
    assert nested.first.left.tolist() == [0, 1, 2]
    assert nested.second.right.tolist() == [30, 31, 32]


def test_arguments_outlive_a_step_that_fails():
    for _ in range(3):
        with pytest.raises(ValueError, match="too long"):
            failing(2)
    assert failing(1).left.tolist() == [1.0]


def counts_in(function, *values, monkeypatch):
    """How often the code of a function counts a reference up and down, before LLVM optimises it."""
    from numba import typeof

    found = Counter()
    for name in ("incref", "decref"):
        count = getattr(NRTContext, name)

        def counting(self: Any, builder: Any, kind: Any, value: Any, name: str = name, count: Any = count) -> None:
            is_own = self._context.fndesc.unique_name.startswith(f"{function.__module__}.{function.__qualname__}")
            if is_own and self._context.data_model_manager[kind].contains_nrt_meminfo():
                found[name] += 1
            count(self, builder, kind, value)

        monkeypatch.setattr(NRTContext, name, counting)
    made = compiled(function)
    made._cache.disable()
    made.compile(tuple(typeof(value) for value in values))
    return found


def test_reading_arguments_counts_nothing(monkeypatch):
    assert not counts_in(sum_of_arguments.py_func, *arguments(), monkeypatch=monkeypatch)


def test_a_variable_that_ends_passes_its_references_on(monkeypatch):
    found = counts_in(moved.py_func, 5, monkeypatch=monkeypatch)
    assert not found["incref"]


def test_the_parts_of_a_record_take_over_its_references(monkeypatch):
    found = counts_in(taken_apart.py_func, 5, monkeypatch=monkeypatch)
    assert not found["incref"]
