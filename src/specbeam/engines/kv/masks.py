"""Attention masks: the slots that each row of a pass attends to, in the form that each backend takes."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64

from specbeam.engines.arrays import WindowSizes
from specbeam.engines.kv.steps import WASTE
from specbeam.engines.kv.trie import Feed


@runtime_checkable
class SlotPositions(Protocol):
    """The position in the text of each slot's token, as in a KV trie."""

    @property
    def capacity(self) -> int: ...

    @property
    def slot_position(self) -> Int64[np.ndarray, " capacity"]: ...


_LOWEST = np.finfo(np.float32).min
Mask = torch.Tensor | dict[str, torch.Tensor]


def seen_slots(feed: Feed, extent: int) -> Bool[np.ndarray, "n extent"]:
    """Return which of the first `extent` slots each row of a feed attends to."""
    known = min(extent, feed.seen.shape[1])
    seen = np.zeros((len(feed), extent), dtype=bool)
    seen[:, :known] = feed.seen[:, :known]
    return seen


def slots_back(feed: Feed, table: SlotPositions, extent: int) -> Int32[np.ndarray, "n extent"]:
    """Return the distance in positions from each slot's token to each row of a feed."""
    known = min(extent, table.capacity)
    back = np.zeros((len(feed), extent), dtype=np.int32)
    back[:, :known] = feed.positions[:, None] - table.slot_position[None, :known]
    return back


def places_of_slots(tables: Sequence[SlotPositions], extent: int) -> Int64[np.ndarray, "tables extent"]:
    """Return the position in the text of each slot's token, for each table."""
    places = np.zeros((len(tables), extent), dtype=np.int64)
    for number, table in enumerate(tables):
        known = min(extent, table.capacity)
        places[number, :known] = table.slot_position[:known]
    return places


def visible_slots(feeds: list[Feed], width: int, extent: int) -> Bool[np.ndarray, "batch width extent"]:
    """Return which slots each row of a padded pass attends to; the rows of a session are aligned to the right.

    Padding rows attend to the waste slot, because rows without any slot become NaN in some backends.
    """
    seen = np.zeros((len(feeds), width, extent), dtype=bool)
    seen[:, :, WASTE] = True
    for rows, feed in zip(seen, feeds, strict=True):
        rows[width - len(feed) :] = seen_slots(feed, extent)
    return seen


def distances_back(
    feeds: list[Feed], tries: Sequence[SlotPositions], width: int, extent: int
) -> Int32[np.ndarray, "batch width extent"]:
    """Return the distance in positions from each slot's token to each row of a padded pass."""
    back = np.zeros((len(feeds), width, extent), dtype=np.int32)
    for rows, feed, trie in zip(back, feeds, tries, strict=True):
        rows[width - len(feed) :] = slots_back(feed, trie, extent)
    return back


def additive(seen: Bool[torch.Tensor, "*shape"], dtype: torch.dtype) -> torch.Tensor:
    """Return a mask to add to attention scores: 0 for slots that are seen, the lowest finite number for others."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


class Masks:
    """A builder of the mask argument of one model.

    SDPA takes booleans. Eager attention adds the mask to the scores, so its mask holds 0 and the lowest finite number:
    booleans would silently be added as 0 and 1, and -inf could produce NaN. A model with several layer types gets a
    dict by layer type.
    """

    def __init__(self, config: object, implementation: str, dtype: torch.dtype) -> None:
        self.implementation = implementation
        self.dtype = dtype
        kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
        window = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            window = None
        self.windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        self.window = window
        self.by_layer = len(self.windows) > 1 or "sliding_attention" in self.windows
        if kinds == ["full_attention"]:
            self.window = None

    def build(
        self,
        feeds: list[Feed],
        tries: Sequence[SlotPositions],
        width: int,
        extent: int,
        device: torch.device,
    ) -> Mask:
        """Return the mask of a padded pass, [batch, 1, width, extent], or a dict of masks by layer type.

        Args:
            feeds: one for each sequence of the batch.
            width: rows of each sequence, padding included.
            extent: number of slots that attention runs over.
        """
        seen = visible_slots(feeds, width, extent)
        back = distances_back(feeds, tries, width, extent) if self._windowed else None
        if self.by_layer:
            kinds = self.windows.items()
            return {kind: self._native(_within(window, seen, back), device) for kind, window in kinds}
        return self._native(_within(self.window, seen, back), device)

    def of_trees(
        self, seen: Bool[torch.Tensor, "rows length length"], positions: Int64[torch.Tensor, "rows length"]
    ) -> Mask:
        """Return the mask of whole trees without a cache, [rows, 1, length, length], or a dict of masks by layer type.

        Args:
            seen: the ancestors of each node, and the node itself.
            positions: of each node.
        """
        return self.of_rows(seen, positions, positions)

    def of_rows(
        self,
        seen: Bool[torch.Tensor, "rows length slots"],
        positions: Int64[torch.Tensor, "rows length"],
        slot_positions: Int64[torch.Tensor, "rows slots"],
    ) -> Mask:
        """Return the mask of rows over any keys, [rows, 1, length, slots], or a dict by layer type.

        Args:
            seen: which keys each row attends to.
            positions: the position of each row.
            slot_positions: the position of each key.
        """
        back = positions[:, :, None] - slot_positions[:, None, :]

        def added(window: int | None) -> torch.Tensor:
            within = seen if window is None else seen & (back < window)
            return additive(within, self.dtype)[:, None]

        if self.by_layer:
            return {kind: added(window) for kind, window in self.windows.items()}
        return added(self.window)

    def flat(
        self, feeds: list[Feed], tries: Sequence[SlotPositions], extent: int
    ) -> dict[str, Bool[np.ndarray, "rows extent"]]:
        """Return which slots each row attends to, by layer type, for the rows of all feeds in order, without padding."""
        if len(feeds) == 1 and not self._windowed and extent <= feeds[0].seen.shape[1]:
            return dict.fromkeys(self.windows or ["full_attention"], feeds[0].seen[:, :extent])
        seen = np.concatenate([seen_slots(feed, extent) for feed in feeds])
        back = None
        if self._windowed:
            back = np.concatenate([slots_back(feed, trie, extent) for feed, trie in zip(feeds, tries, strict=True)])
        kinds = self.windows if self.by_layer else dict.fromkeys(self.windows or ["full_attention"], self.window)
        return {kind: _within(window, seen, back) for kind, window in kinds.items()}

    def window_sizes(self, kinds: list[str]) -> WindowSizes:
        """Return the sliding window of each layer type in tokens, the row's own token included; 0: all tokens."""
        windows = self.windows if self.by_layer else dict.fromkeys(kinds, self.window)
        return np.array([windows[name] or 0 for name in kinds], dtype=np.int64)

    @property
    def _windowed(self) -> bool:
        return any(self.windows.values()) if self.by_layer else self.window is not None

    def _native(self, seen: Bool[np.ndarray, "batch width extent"], device: torch.device) -> torch.Tensor:
        """Return a mask [batch, 1, width, extent] on the device: booleans, or numbers to add to the scores."""
        if self.implementation != "eager":
            return torch.from_numpy(seen)[:, None].to(device)
        if self.dtype == torch.float32:
            return torch.from_numpy(np.where(seen, np.float32(0), _LOWEST))[:, None].to(device)
        return additive(torch.from_numpy(seen)[:, None].to(device), self.dtype)


def _within(window: int | None, seen: np.ndarray, back: np.ndarray | None) -> np.ndarray:
    """Return the mask limited to a sliding window of n tokens: a token and the n - 1 tokens before it."""
    return seen if window is None or back is None else seen & (back < window)
