"""Sources in the form of the compiled layers: keys and values, stored once for all rows that attend to them."""

from typing import NamedTuple

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled


class Sources(NamedTuple):
    """The keys and values of sources, in the layout of `attention.attend`, and the source of each session of a pass."""

    keys: Array  # float32 or uint16[layers, sources, heads, panels, size, WIDTH], see engines/cpu/cache_words.py
    values: Array  # the same numbers[layers, sources, heads, frames, width]
    lengths: Array  # int64[sources]: number of frames of each; later frames are padding
    rows: Array  # int64[sessions]: the source of each session of a pass


@compiled
def no_sources() -> Sources:
    """Return the sources of a model without cross-attention."""
    nothing = np.zeros((0, 0, 0, 0, 0, 0), dtype=np.float32)
    numbers = np.zeros(0, dtype=np.int64)
    return Sources(nothing, np.zeros((0, 0, 0, 0, 0), dtype=np.float32), numbers, numbers)


@compiled
def layers_of_sources(sources: Sources, first: int, stop: int) -> Sources:
    """Return the keys and values of sources in the layers first .. stop, as views."""
    return Sources(sources.keys[first:stop], sources.values[first:stop], sources.lengths, sources.rows)
