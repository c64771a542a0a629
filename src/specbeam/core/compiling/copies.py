"""Copies of arrays into others: numba compiles an assignment to a slice with broadcasting and the text of its error."""

import inspect
from typing import Any

from specbeam.core.compiling.compiler import AVAILABLE, Array

if AVAILABLE:
    from specbeam.core.compiling.compiler import chosen_for


def copy_numbers(goal: Array, source: Array) -> None:
    """Write all of `source` to the first places of `goal`, which has as many or more; both have one axis.

    Compiled code does not check that.
    """
    goal[: len(source)] = source


def copy_rows(goal: Array, source: Array) -> None:
    """Write all rows of `source` to the first rows of `goal`, which has as many or more, each of the same length.

    Compiled code does not check that.
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
