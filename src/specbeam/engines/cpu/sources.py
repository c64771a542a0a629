"""Sources as compiled layers read them: keys and values, stored once for all rows that look at them."""

from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled


class Sources(NamedTuple):
    """The keys and values of sources, laid out as `attention.attend` reads, and which each session of a pass reads."""

    keys: Array  # float32 or uint16[layers, sources, heads, panels, size, WIDTH], see engines/cpu/cache_words.py
    values: Array  # the same numbers[layers, sources, heads, frames, width]
    lengths: Array  # int64[sources]: frames of each; those behind them are not looked at
    rows: Array  # int64[sessions]: the source of each session of a pass


@compiled
def no_sources() -> Sources:
    """Return the sources of a model that reads none."""
    nothing = np.zeros((0, 0, 0, 0, 0, 0), dtype=np.float32)
    numbers = np.zeros(0, dtype=np.int64)
    return Sources(nothing, np.zeros((0, 0, 0, 0, 0), dtype=np.float32), numbers, numbers)


@compiled
def no_distances() -> Array:
    """Return how far back slots are for a model whose attention does not ask for it."""
    return np.zeros((0, 0), dtype=np.int32)


@compiled
def layers_of_sources(sources: Sources, first: int, stop: int) -> Sources:
    """Return the sources as the layers first .. stop read them, as views."""
    return Sources(sources.keys[first:stop], sources.values[first:stop], sources.lengths, sources.rows)
