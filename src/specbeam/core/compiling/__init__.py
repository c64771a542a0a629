"""The compilation of steps, and compiled sums over the vocabulary."""

from specbeam.kernels.compiling import AVAILABLE, most_threads

__all__ = ["AVAILABLE", "most_threads"]
