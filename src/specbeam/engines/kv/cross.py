"""Stores of cross-attention keys and values, each source once for all beams and sessions that read it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from specbeam.core.records import ExtraInputs, Needs
from specbeam.engines.arrays import SourceStates
from specbeam.engines.kv.cross_pool import CrossPool
from specbeam.engines.kv.store import in_words, panel_buffers
from specbeam.engines.source import Source

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

NO_HEADS = (
    "its hidden states are not available: draft heads, exit layers and other parts that read them need a decoder-only "
    "model"
)


class SourceRows(ABC):
    """The rows of stored sources, which stay contiguous.

    Attributes:
        lengths: number of frames of each row in use.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def drop(self, row: int) -> int:
        """Free a row by moving the last row there. Returns the index of the moved row, which is `row` if none moves."""
        last = len(self.lengths) - 1
        if row != last:
            self._move(last, row)
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if last == 0:
            self.clear()
        return last

    @abstractmethod
    def clear(self) -> None:
        """Free all rows and their buffers."""

    @abstractmethod
    def _move(self, source: int, goal: int) -> None:
        """Copy row `source` to row `goal`."""


class CrossStore(SourceRows):
    """The keys and values of the sources of all sessions, in one buffer per layer.

    A row belongs to a source, not to a session: samples of one prompt read the same row. Rows in use stay contiguous, so
    that a pass over neighbouring sources reads them in place.

    Attributes:
        keys, values: by layer, [rows, heads, frames, size]; frames after the end of a source are masked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in (*self.keys, *self.values))

    @torch.inference_mode()
    def add(self, keys: Sequence[Float[Tensor, "1 heads frames size"]], values: Sequence[Tensor]) -> int:
        """Store the keys and values of one source, by layer, and return its row."""
        row = len(self.lengths)
        frames = int(keys[0].shape[2])
        self._reserve(row + 1, frames, keys, values)
        for buffers, given in ((self.keys, keys), (self.values, values)):
            for buffer, part in zip(buffers, given, strict=True):
                buffer[row, :, :frames] = part[0]
        self.lengths.append(frames)
        return row

    def _reserve(self, rows: int, frames: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Make room for `rows`, at least doubling them, and for exactly `frames`, because sources are long."""
        if not self.keys:
            self.keys = [one.new_zeros(rows, *one.shape[1:]) for one in keys]
            self.values = [one.new_zeros(rows, *one.shape[1:]) for one in values]
        known_rows, _, known_frames, _ = self.keys[0].shape
        if rows <= known_rows and frames <= known_frames:
            return
        rows = known_rows if rows <= known_rows else max(rows, 2 * known_rows)
        frames = max(frames, known_frames)
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):
                grown = buffer.new_zeros(rows, buffer.shape[1], frames, buffer.shape[3])
                grown[:known_rows, :, :known_frames] = buffer
                buffers[layer] = grown  # layer by layer, so that only one layer is in memory twice

    @torch.inference_mode()
    def _move(self, source: int, goal: int) -> None:
        frames = self.lengths[source]
        for buffer in (*self.keys, *self.values):
            buffer[goal, :, :frames] = buffer[source, :, :frames]

    def clear(self) -> None:
        self.keys = []
        self.values = []
        self.lengths = []

    def view(self, rows: Sequence[int]) -> "CrossView":
        """Return the keys and values of these rows, valid until a source is added or dropped."""
        from transformers.cache_utils import Cache

        from specbeam.engines.kv.cross_layer import CrossLayer

        lengths = [self.lengths[row] for row in rows]
        longest = max(lengths)
        which: Any = _as_index(rows)
        layers = []
        for keys, values in zip(self.keys, self.values, strict=True):
            seen = [buffer[which][:, :, :longest] for buffer in (keys, values)]
            if len(seen[0]) < len(rows):  # all sequences read one source
                seen = [one.expand(len(rows), -1, -1, -1) for one in seen]
            layers.append(CrossLayer(seen[0], seen[1]))
        device = self.keys[0].device
        frames = torch.arange(longest, device=device)
        mask = frames[None] < torch.tensor(lengths, device=device)[:, None]
        return CrossView(Cache(layers=layers), mask)


class CrossView(NamedTuple):
    """The cross-attention keys and values of one pass.

    Attributes:
        cache: the keys and values, as a transformers cache.
        mask: which frames belong to the source of each sequence.
    """

    cache: "Cache"
    mask: Bool[Tensor, "batch frames"]


def _as_index(rows: Sequence[int]) -> "slice | list[int]":
    """Return an index of these rows: a slice, without a copy, if they are one row or neighbours."""
    first = rows[0]
    if all(row == first for row in rows):
        return slice(first, first + 1)
    if list(rows) == [*range(first, first + len(rows))]:
        return slice(first, first + len(rows))
    return list(rows)


class CrossPanels(SourceRows):
    """The keys and values of the sources of all sessions, in the layout of the compiled forward; see `CrossStore`.

    Args:
        layers, heads, size: the decoder's layers, heads and head size.
        width: frames of a panel; the columns of values are padded with zeros to a multiple of it.
        words: dtype of the buffers: float32, or uint16 for the bits of numbers rounded to bfloat16.

    Attributes:
        keys: words[layers, rows, heads, panels, size, frames of a panel].
        values: words[layers, rows, heads, frames, padded size].
    """

    def __init__(self, layers: int, heads: int, size: int, width: int, words: Any = np.float32) -> None:
        self.shape = layers, heads, size
        self.width = width
        self.words = np.dtype(words)
        self.clear()

    def clear(self) -> None:
        self.lengths = []
        self._allocate(0, 0)

    @property
    def bytes(self) -> int:
        """The bytes of all buffers."""
        return self.keys.nbytes + self.values.nbytes

    def add(self, both: Float32[np.ndarray, "frames layers 2 heads size"]) -> int:
        """Store the keys and values of one source, and return its row."""
        row = len(self.lengths)
        frames = len(both)
        self._reserve(row + 1, frames)
        panels = -(-frames // self.width)
        both = in_words(torch.from_numpy(both), self.words)
        keys = np.zeros((panels * self.width, *both.shape[1:2], *both.shape[3:]), dtype=self.words)
        keys[:frames] = both[:, :, 0]
        by_panel = keys.reshape(panels, self.width, *keys.shape[1:])
        self.keys[:, row, :, :panels] = by_panel.transpose(2, 3, 0, 4, 1)
        self.values[:, row, :, :frames, : both.shape[4]] = both[:, :, 1].transpose(1, 2, 0, 3)
        # Sums run over whole panels, with weight 0 after the last frame, so old NaN there must be overwritten.
        self.values[:, row, :, frames : panels * self.width] = 0
        self.lengths.append(frames)
        return row

    def _move(self, source: int, goal: int) -> None:
        for buffer in (self.keys, self.values):
            buffer[:, goal] = buffer[:, source]

    def _reserve(self, rows: int, frames: int) -> None:
        """Make room for `rows`, at least doubling them, and for exactly the panels of `frames`, because sources are long."""
        known_rows = self.keys.shape[1]
        known_panels = self.keys.shape[3]
        panels = -(-frames // self.width)
        if rows <= known_rows and panels <= known_panels:
            return
        before = self.keys, self.values
        rows = known_rows if rows <= known_rows else max(rows, 2 * known_rows)
        self._allocate(rows, max(panels, known_panels))
        for old, new in zip(before, (self.keys, self.values), strict=True):
            new[:, : old.shape[1], :, : old.shape[3]] = old

    def _allocate(self, rows: int, panels: int) -> None:
        layers, heads, size = self.shape
        buffers = panel_buffers((layers, rows, heads), panels * self.width, size, self.width, self.words)
        self.keys, self.values = buffers


class ReadsSources(ABC):
    """A mixin for the passes of encoder-decoder models: stores each source once, for all sessions that read it.

    Attributes:
        model: the model that reads the sources.
        cross: the store of their keys and values.
        readers: for each row of `cross`, its source and the caches of the sessions that read it.
    """

    model: Any
    cross: CrossStore | CrossPanels | CrossPool
    readers: list[tuple[Source, list[Any]]]
    takes_vectors = False

    @abstractmethod
    def store_source(self, states: SourceStates) -> int:
        """Compute and store a source's cross-attention keys and values, and return their row."""

    def row_of(self, source: Source, encoder: Any) -> int:
        """Encode a source unless its states are known, store its keys and values, and return their row."""
        return self.store_source(source.states_of(encoder))

    def read_ahead(self, sources: Sequence[Source], encoder: Any) -> None:
        """Compute the keys and values of these sources, and of sources linked after them, together.

        Engines that gain nothing from this do nothing.
        """
        return

    @property
    @abstractmethod
    def most_positions(self) -> int | None:
        """The number of positions of the decoder; None if there is no limit."""

    def misfit_of_encoder(self) -> str:
        """Return the reason why transformers runs this encoder although the engine can run encoders; "" otherwise."""
        return ""

    def own_encoder(self) -> Any:
        """Return the model's encoder, with the call interface of transformers' encoder."""
        return self.model.get_encoder()

    @abstractmethod
    def plain_logits(self, states: SourceStates, path: list[int]) -> Float[Tensor, " vocab"]:
        """Return the logits after a path by transformers' forward without a tree."""

    @torch.inference_mode()
    def hold(self, cache: Any, source: Source, encoder: Any) -> None:
        """Assign the row of its source to a session; store the source if no earlier session has."""
        for row, (known, readers) in enumerate(self.readers):
            if known is source:
                readers.append(cache)
                cache.source_row = row
                return
        cache.source_row = self.row_of(source, encoder)
        self.readers.append((source, [cache]))

    def let_go(self, cache: Any, encoder: Any) -> None:
        """Free the source of a closed session if no other session reads it."""
        if cache.source_row < 0:
            return
        row = cache.source_row
        source, readers = self.readers[row]
        readers.remove(cache)
        cache.source_row = -1
        if readers:
            return
        source.forget(encoder)
        self.cross.drop(row)
        last = self.readers.pop()
        if row < len(self.readers):
            self.readers[row] = last
            for other in last[1]:
                other.source_row = row

    def drop_sources(self) -> None:
        """Free all sources. No session may still read them."""
        self.readers.clear()
        self.cross.clear()

    def lacks(self, needs: Needs) -> str:
        """Return the reason why these passes cannot provide `needs`; "" if they can."""
        unread = needs.states or needs.exit_layer is not None
        return f"{type(self.model).__name__} reads sources, so {NO_HEADS}" if unread else ""

    def refuses_extra_rows(self, inputs: ExtraInputs) -> str:
        """Return the reason why these passes cannot take extra rows."""
        return f"{type(self.model).__name__} reads sources, so {NO_HEADS}"

    def refuses(self, context: object) -> str:
        """Return the reason why these passes cannot take a context; "" if it is a source."""
        if isinstance(context, Source):
            return ""
        return (
            f"{type(self.model).__name__} needs a source for each prompt, but the context is {type(context).__name__}"
        )
