"""Compilation of steps, and compiled sums over the vocabulary."""

from specbeam.core.compiling.compiler import AVAILABLE, most_threads

__all__ = ["AVAILABLE", "most_threads"]
