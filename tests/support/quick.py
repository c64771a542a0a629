"""Which cases of a test are among the quick ones."""

import itertools

import pytest


def first_quick(cases, count=1):
    """All cases, of which those after the first `count` are slow. A case is a tuple of arguments, or the only argument."""
    return [case if place < count else _slow(case) for place, case in enumerate(cases)]


def once_each(*axes):
    """All combinations of a value from each axis, of which the quick ones have each value at least once."""
    axes = [list(axis) for axis in axes]
    longest = max(map(len, axes))
    quick = {tuple(number % len(axis) for axis in axes) for number in range(longest)}
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        case = tuple(axis[place] for axis, place in zip(axes, places, strict=True))
        found.append(case if places in quick else _slow(case))
    return found


def _slow(case):
    arguments = case if type(case) is tuple else (case,)  # a named tuple is one argument
    return pytest.param(*arguments, marks=pytest.mark.slow)
