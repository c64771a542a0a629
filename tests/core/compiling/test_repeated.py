"""Calls at whose types numba looks once."""

import numpy as np
import pytest

from specbeam.core.compiling.compiler import AVAILABLE, Array
from specbeam.core.compiling.repeated import Repeated
from specbeam.core.steps import step
from tests.core.compiling.test_borrowed import Inner, Outer

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="numba is missing")


@step
def weighed(outer: Outer, first: Array, numbers: Array) -> Array:
    return (outer.rows[0] + first[0]) * numbers * outer.inner.factor


def outer_of(rows):
    return Outer(Inner(np.arange(3.0), 2.0, True), rows, (1, 2.0))


def test_a_repeated_call_is_the_call_itself(monkeypatch):
    repeated = Repeated(weighed, slice(1, 3))
    numbers = np.arange(6.0).reshape(2, 3)
    looked_at = []
    known = type(weighed).typeof_pyval
    monkeypatch.setattr(
        type(weighed), "typeof_pyval", lambda self, value: looked_at.append(value) or known(self, value)
    )
    for rows in (np.ones(3), np.full(3, 7.0)):
        outer = outer_of(rows)
        for first in (np.zeros(1), np.ones(1), np.array([3])):  # of another type
            for given in (numbers[0], numbers[:, 1]):  # of another layout
                expected = (rows[0] + first[0]) * given * 2.0
                assert repeated(outer, first, given).tolist() == expected.tolist()
    assert len(repeated.forms) == 4
    found = len(looked_at)
    again = Repeated(weighed, slice(1, 3))
    again(outer_of(np.ones(3)), np.zeros(1), numbers[0])
    assert len(looked_at) == found  # what one caller found out serves others


def test_what_python_runs_is_called():
    repeated = Repeated(weighed.py_func, slice(0))
    assert repeated(outer_of(np.ones(3)), np.zeros(1), np.ones(2)).tolist() == [2.0, 2.0]
    assert repeated.forms == {}


def test_errors_come_through():
    @step
    def broken(number: int) -> int:
        if number > 1:
            raise IndexError("a token is outside the model's vocabulary")
        return number

    repeated = Repeated(broken, slice(0))
    assert repeated(1) == 1
    with pytest.raises(IndexError, match="a token is outside"):
        repeated(2)
    assert repeated(0) == 0
