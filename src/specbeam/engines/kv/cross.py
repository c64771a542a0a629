"""The stores of the keys and values that a decoder's cross-attention reads: each source once, however many beams read it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specbeam.core.records import ExtraInputs, Needs
from specbeam.engines.arrays import SourceStates
from specbeam.engines.kv.cross_pool import CrossPool
from specbeam.engines.kv.store import in_words, panel_buffers
from specbeam.engines.source import Source

NO_HEADS = (
    "its hidden states belong to one source and are not handed out: draft heads, exit layers and other parts that read them "
    "are for decoder-only models"
)


class CrossLayer(CacheLayerMixin):
    """The keys and values of one layer that the present pass reads, with the interface of a cache of transformers.

    Layers read them in place and never update them.
    """

    is_sliding = False
    is_initialized = True

    def __init__(self, keys: Float[Tensor, "batch heads frames size"], values: Tensor) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the keys and values are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("the keys and values of a source are never updated")

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.16


class SourceRows(ABC):
    """The rows of stored sources, which stay side by side.

    Attributes:
        lengths: number of frames of each row in use.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def drop(self, row: int) -> int:
        """Free a row: the last row moves there. Returns the former number of that, which is `row` itself if none moves."""
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
        """Copy a row to another one."""


class CrossStore(SourceRows):
    """The keys and values of the sources of all sessions, in one buffer per layer.

    A row belongs to a source, not to a session: samples of one prompt read the same row. Rows in use stay side by side,
    so that a pass over neighbouring sources reads them in place.

    Attributes:
        keys, values: by layer, [rows, heads, frames, size]; the frames beyond a source are zeros or old numbers,
            and masked.
        lengths: number of frames of each row in use.
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
        """Make room for `rows`, which at least double, and for exactly `frames`: sources are long."""
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
                buffers[layer] = grown  # one after the other, so that only one layer is held twice

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
        lengths = [self.lengths[row] for row in rows]
        longest = max(lengths)
        which: Any = _as_index(rows)
        layers = []
        for keys, values in zip(self.keys, self.values, strict=True):
            seen = [buffer[which][:, :, :longest] for buffer in (keys, values)]
            if len(seen[0]) < len(rows):  # all sequences look at one source
                seen = [one.expand(len(rows), -1, -1, -1) for one in seen]
            layers.append(CrossLayer(seen[0], seen[1]))
        device = self.keys[0].device
        frames = torch.arange(longest, device=device)
        mask = frames[None] < torch.tensor(lengths, device=device)[:, None]
        return CrossView(Cache(layers=layers), mask)


class CrossView:
    """The keys and values that the cross-attention of one pass reads.

    Attributes:
        cache: the keys and values, as a cache of transformers.
        mask: which frames belong to the source of each sequence.
    """

    def __init__(self, cache: Cache, mask: Bool[Tensor, "batch frames"]) -> None:
        self.cache = cache
        self.mask = mask


def _as_index(rows: Sequence[int]) -> "slice | list[int]":
    """Return an index that reads these rows: in place if they are one row or neighbours, and otherwise a copy."""
    first = rows[0]
    if all(row == first for row in rows):
        return slice(first, first + 1)
    if list(rows) == [*range(first, first + len(rows))]:
        return slice(first, first + len(rows))
    return list(rows)


class CrossPanels(SourceRows):
    """The keys and values of the sources of all sessions, as the compiled forward reads them; see `CrossStore`.

    Args:
        layers, heads, size: of the decoder.
        width: frames of a panel; the columns of values are padded with zeros to a multiple of it.
        words: dtype of the buffers: float32, or uint16 for the bits of bfloat16 numbers, to which all are then rounded.

    Attributes:
        keys: words[layers, rows, heads, panels, size, frames of a panel].
        values: words[layers, rows, heads, frames, padded size].
        lengths: number of frames of each row in use.
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
        # Whole panels are summed, with odds of zero behind the last frame, where NaN may have been.
        self.values[:, row, :, frames : panels * self.width] = 0
        self.lengths.append(frames)
        return row

    def _move(self, source: int, goal: int) -> None:
        for buffer in (self.keys, self.values):
            buffer[:, goal] = buffer[:, source]

    def _reserve(self, rows: int, frames: int) -> None:
        """Make room for `rows`, which at least double, and for just the panels of `frames`: sources are long."""
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
    """The sources of passes in all engines: each is stored once, for all sessions that read it.

    Attributes:
        model: that reads them.
        cross: the store of their keys and values.
        readers: of each row of `cross`, the source and the caches of the sessions that read it.
    """

    model: Any
    cross: CrossStore | CrossPanels | CrossPool
    readers: list[tuple[Source, list[Any]]]
    takes_vectors = False

    @abstractmethod
    def store_source(self, states: SourceStates) -> int:
        """Store the keys and values that the decoder makes of a source, and return their row."""

    def row_of(self, source: Source, encoder: Any) -> int:
        """Store the keys and values of a source, which the encoder has read or reads now, and return their row."""
        return self.store_source(source.states_of(encoder))

    def read_ahead(self, sources: Sequence[Source], encoder: Any) -> None:
        """Make keys and values of sources that sessions are about to look at, and of those read after them.

        Does nothing in engines that gain nothing by reading sources together.
        """
        return

    @property
    @abstractmethod
    def most_positions(self) -> int | None:
        """The number of positions of the decoder; None if there is no limit."""

    def misfit_of_encoder(self) -> str:
        """Return the reason why an engine that runs encoders leaves that of the model to transformers; "" if it does not."""
        return ""

    def own_encoder(self) -> Any:
        """Return the encoder of the model: a module that is called as transformers' encoder."""
        return self.model.get_encoder()

    @abstractmethod
    def plain_logits(self, states: SourceStates, path: list[int]) -> Float[Tensor, " vocab"]:
        """Return the logits after a path, as the model gives them by itself."""

    @torch.inference_mode()
    def hold(self, cache: Any, source: Source, encoder: Any) -> None:
        """Store the keys and values of a session's source, unless another session of the same source has done so."""
        for row, (known, readers) in enumerate(self.readers):
            if known is source:
                readers.append(cache)
                cache.source_row = row
                return
        cache.source_row = self.row_of(source, encoder)
        self.readers.append((source, [cache]))

    def let_go(self, cache: Any, encoder: Any) -> None:
        """Free the source of a session that is over, if no other session reads it."""
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
        """Free all sources, when no session is left that reads them."""
        self.readers.clear()
        self.cross.clear()

    def lacks(self, needs: Needs) -> str:
        """Return the reason why these passes cannot provide `needs`; "" if they can."""
        unread = needs.states or needs.exit_layer is not None
        return f"{type(self.model).__name__} reads sources, and {NO_HEADS}" if unread else ""

    def refuses_extra_rows(self, inputs: ExtraInputs) -> str:
        """Return the reason why these passes cannot take extra rows."""
        return f"{type(self.model).__name__} reads sources, and {NO_HEADS}"

    def refuses(self, context: object) -> str:
        """Return the reason why these passes cannot take a context; "" if it is a source."""
        if isinstance(context, Source):
            return ""
        return (
            f"{type(self.model).__name__} reads a source for each prompt, and the context is {type(context).__name__}"
        )
