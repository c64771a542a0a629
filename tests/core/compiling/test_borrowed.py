"""Records that compiled functions only look at."""

import sys
from typing import NamedTuple

import numpy as np
import pytest

from specbeam.core.compiling.compiler import AVAILABLE, Array, borrowed, borrowed_views
from specbeam.core.steps import open_step, step

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is missing")


@borrowed
class Inner(NamedTuple):
    numbers: Array
    factor: float
    is_on: bool


@borrowed
class Outer(NamedTuple):
    inner: Inner
    rows: Array
    sizes: tuple[int, float]


class Counted(NamedTuple):
    total: float
    part: Array
    whole: Array


_inner = borrowed_views(Inner)
_outer = borrowed_views(Outer)


@open_step
def some(outer: Outer, first: int, stop: int) -> Outer:
    inner = outer.inner
    return _outer(_inner(inner.numbers[first:stop], inner.factor, inner.is_on), outer.rows[first:stop], outer.sizes)


@step
def looked_at(outer: Outer, first: int, stop: int) -> Counted:
    part = some(outer, first, stop)
    total = 0.0
    for number in part.inner.numbers:
        total += number * part.inner.factor
    if part.inner.is_on:
        total += part.rows.sum() + part.sizes[0] + part.sizes[1]
    return Counted(total, part.rows, outer.rows)


@step
def looked_at_from_afar(outer: Outer, first: int, stop: int) -> Counted:
    return looked_at(outer, first, stop)


@step
def write(outer: Outer, place: int, number: int) -> None:
    outer.inner.numbers[place] = number


@step
def handed_back(outer: Outer) -> Outer:
    return outer


def example() -> Outer:
    return Outer(Inner(np.arange(6), 0.5, True), np.arange(12.0).reshape(6, 2), (3, 0.25))


def test_a_borrowed_record_and_views_of_it_are_read_as_python_reads_them():
    outer = example()
    expected = looked_at.py_func(outer, 1, 4)
    for found in (looked_at(outer, 1, 4), looked_at_from_afar(outer, 1, 4)):
        assert found.total == expected.total == 3 + 27 + 3.25
        assert found.part.tolist() == expected.part.tolist() == [[2, 3], [4, 5], [6, 7]]


def test_what_compiled_functions_write_into_a_borrowed_record_is_there_for_python():
    outer = example()
    write(outer, 2, 70)
    assert outer.inner.numbers.tolist() == [0, 1, 70, 3, 4, 5]


def test_arrays_outlive_the_borrowed_record_that_they_were_taken_from():
    outer = example()
    kept = looked_at(outer, 0, 6)
    del outer
    others = [np.full((6, 2), -1.0) for _ in range(100)]
    assert kept.part.tolist() == kept.whole.tolist() == np.arange(12.0).reshape(6, 2).tolist()
    assert len(others) == 100


def test_calls_hold_no_array_of_a_borrowed_record_any_longer():
    outer = example()
    looked_at_from_afar(outer, 1, 4)
    before = [sys.getrefcount(array) for array in (outer.rows, outer.inner.numbers)]
    for _ in range(50):
        looked_at_from_afar(outer, 1, 4)
    assert [sys.getrefcount(array) for array in (outer.rows, outer.inner.numbers)] == before


def test_a_borrowed_record_cannot_be_returned_to_python():
    with pytest.raises(NotImplementedError, match="a borrowed Outer cannot be returned"):
        handed_back(example())


def test_records_of_other_fields_have_other_forms():
    outer = example()
    narrow = outer._replace(rows=outer.rows.astype(np.float32))
    assert looked_at(narrow, 1, 4).part.dtype == np.float32
    assert looked_at(outer, 1, 4).part.dtype == np.float64
