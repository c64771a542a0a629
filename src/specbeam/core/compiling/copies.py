"""Copies of arrays by loops, which compile to less code than numba's slice assignment with broadcasting."""

import inspect
from typing import Any

from specbeam.core.compiling.compiler import AVAILABLE, Array

if AVAILABLE:
    from specbeam.core.compiling.compiler import chosen_for


def copy_numbers(goal: Array, source: Array) -> None:
    """Copy `source` to the beginning of `goal`, which must be at least as long. Both have one axis.

    Compiled code does not check the lengths.
    """
    goal[: len(source)] = source


def copy_rows(goal: Array, source: Array) -> None:
    """Copy the rows of `source` to the first rows of `goal`, which must have at least as many, of the same length.

    Compiled code does not check the shapes.
    """
    goal[: len(source)] = source


if AVAILABLE:

    @chosen_for(copy_numbers)
    def _compiled_copy_numbers(goal: Any, source: Any) -> Any:
        def copy(goal: Any, source: Any) -> None:
            for place in range(len(source)):
                goal[place] = source[place]

        return inspect.unwrap(copy)  # tests wrap functions into type checks

    @chosen_for(copy_rows)
    def _compiled_copy_rows(goal: Any, source: Any) -> Any:
        def copy(goal: Any, source: Any) -> None:
            for row in range(len(source)):
                for place in range(source.shape[1]):
                    goal[row, place] = source[row, place]

        return inspect.unwrap(copy)  # tests wrap functions into type checks
