"""The compilation of steps, and compiled sums over the vocabulary."""

from specbeam.kernels.compiling import AVAILABLE, start_threads, use_threads

__all__ = ["AVAILABLE", "start_threads", "use_threads"]
