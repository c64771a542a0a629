"""The paged KV store on a GPU: pages of slots, and a table on the device of the pages of each row.

A growing store adds pages without moving or copying others. Captured graphs read the table, so they remain valid. Each
row takes only the pages that its own session needs.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from specbeam.engines.arrays import Integers, IntegerTensor, PrefixRows
from specbeam.engines.kv.torch_store import KVStore

PAGE = 64  # slots of a page, a multiple of the blocks of slots that kernels read
FIRST_PAGES = 8
MOST_CHUNK_BYTES = 2**28  # maximum memory allocated in advance
TABLE_ROWS = 256  # initial number of sessions, and of pages of each, in the small table
TABLE_PAGES = 512


class LayerPages(NamedTuple):
    """The keys and values of one layer for kernels."""

    pool: Tensor  # places in the store are offsets from the first element of `pool`
    table: Int64[Tensor, "rows pages"]  # the place of each page of a row of the store
    first: int  # offset in a page of the layer's keys, which its values follow


class PagedStore(KVStore):
    """A store for GPUs, of pages of `PAGE` slots that hold keys and values of all layers.

    Args:
        heads: number of KV heads.
        size: size of a head.
        like: a tensor with the dtype and device of the pages.

    Attributes:
        pool: the first pages, [pages, layers, 2, heads, slots, size]; places of all pages are offsets from its first
            element.
        table: int64[rows, pages] on the device: the place of each page of a row.
        part: number of elements of one layer's keys, or values, in a page.
        more: stores of one layer each, whose rows have the same slots; see `add_layer`.
    """

    def __init__(self, layers: int, heads: int, size: int, like: Tensor) -> None:
        self._pages: list[Tensor] = []  # each [layers, 2, heads, slots, size]
        self._places: list[int] = []  # the place of each page
        self._free: list[int] = []
        self._by_row: list[list[int]] = [[]]
        self._shape = (layers, 2, heads, PAGE, size)
        self.part = heads * PAGE * size
        self.more: list[PagedStore] = []
        self.table = torch.zeros(TABLE_ROWS, TABLE_PAGES, dtype=torch.int64, device=like.device)
        self.pool = self._new_chunk(FIRST_PAGES, like)
        super().__init__(layers)
        self.caches = 1
        self.slots = 0

    def layer(self, number: int) -> LayerPages:
        """Return the keys and values of a layer; they stay valid until its table is replaced."""
        own = self._shape[0]
        if number >= own:
            return self.more[number - own].layer(0)
        return LayerPages(self.pool, self.table, 2 * self.part * number)

    @property
    def tables(self) -> list[Tensor]:
        """The tables of this store and of all further layers."""
        return [self.table, *(store.table for store in self.more)]

    def add_layer(self) -> int:
        """Add a layer with the same heads, such as an exit layer, in pages of its own; return its number."""
        _, _, heads, _, size = self._shape
        store = PagedStore(1, heads, size, self.pool)
        self.more.append(store)
        for row, pages in enumerate(self._by_row):
            store.reserve_row(row, PAGE * len(pages))
        return self._shape[0] + len(self.more) - 1

    @torch.inference_mode()
    def write_prefix(self, layer: int, cache: int, keys: PrefixRows, values: PrefixRows) -> None:
        """Write keys and values of a layer into the slots after the waste slot of one row, which has pages for them."""
        slots = np.arange(1, 1 + keys.shape[1])
        for page, inside, which in self._pages_of(cache, slots):
            for part, numbers in enumerate((keys, values)):
                page[layer, part][:, inside] = numbers.to(page)[:, which]

    def reserve(self, caches: int, slots: int) -> None:
        """Assign pages for `slots` slots to each of the first `caches` rows that has fewer."""
        for row in range(caches):
            self.reserve_row(row, slots)

    @torch.inference_mode()
    def reserve_row(self, row: int, slots: int) -> None:
        """Assign pages for `slots` slots to a row if it has fewer. An out-of-memory error leaves it as it was."""
        for store in self.more:
            store.reserve_row(row, slots)
        self._by_row.extend([] for _ in range(row + 1 - len(self._by_row)))
        self.caches = len(self._by_row)
        own = self._by_row[row]
        needed = -(-slots // PAGE)
        missing = needed - len(own)
        if missing <= 0:
            return
        if missing > len(self._free):
            self._new_chunk(missing - len(self._free), self.pool)
        self._widen_table(row + 1, needed)
        own.extend(self._free.pop() for _ in range(missing))
        self.slots = max(self.slots, PAGE * needed)
        self._write_table(row)

    def release_from(self, row: int) -> None:
        """Free the pages of this row and all later rows, which have no sessions."""
        for store in self.more:
            store.release_from(row)
        for pages in self._by_row[row:]:
            self._take_back(pages)
            pages.clear()

    @torch.inference_mode()
    def take(self, cache: int, slots: Integers) -> list[Any]:
        layers, both, heads, _, size = self._shape
        taken = self.pool.new_empty(layers, both, heads, len(slots), size)
        for page, inside, which in self._pages_of(cache, slots):
            taken[:, :, :, which] = page[:, :, :, inside]
        return [taken]

    @torch.inference_mode()
    def put(self, cache: int, slots: Integers, taken: list[Any]) -> None:
        (numbers,) = taken
        for page, inside, which in self._pages_of(cache, slots):
            page[:, :, :, inside] = numbers[:, :, :, which]

    def move_cache(self, source: int, goal: int, extent: int) -> None:
        """Move the pages of one row to another row, whose own pages are freed; nothing is copied."""
        for store in self.more:
            store.move_cache(source, goal, extent)
        self._take_back(self._by_row[goal])
        self._by_row[goal] = self._by_row[source]
        self._by_row[source] = []
        self._write_table(goal)

    @torch.inference_mode()
    def clear_cache(self, cache: int) -> None:
        for store in self.more:
            store.clear_cache(cache)
        for page in self._by_row[cache]:
            self._pages[page].zero_()

    def copy_slots(self, source: int, slots: Integers, goal: int, goal_slots: Integers) -> None:
        for store in (self, *self.more):
            store.put(goal, goal_slots, store.take(source, slots))

    @torch.inference_mode()
    def _take_back(self, pages: list[int]) -> None:
        """Free pages and fill them with zeros, because masked slots enter products and a NaN in them would spread."""
        for page in pages:
            self._pages[page].zero_()
        self._free.extend(pages)

    def _new_chunk(self, pages: int, like: Tensor) -> Tensor:
        """Add at least `pages` free pages, doubling the store while it is small; return them."""
        page_bytes = 2 * self._shape[0] * self.part * like.element_size()
        ahead = min(len(self._pages), MOST_CHUNK_BYTES // page_bytes)
        chunk = like.new_zeros(max(pages, ahead), *self._shape)
        base = self.pool.data_ptr() if self._pages else chunk.data_ptr()
        for page in chunk:
            self._free.append(len(self._pages))
            self._pages.append(page)
            self._places.append((page.data_ptr() - base) // page.element_size())
        return chunk

    def _pages_of(self, row: int, slots: Integers) -> Iterator[tuple[Tensor, Int64[Tensor, " k"], Int64[Tensor, " k"]]]:
        """Yield each page that holds some of these slots, the slots in the page, and their indices in `slots`."""
        numbers, inside = divmod(slots, PAGE)
        for number in np.unique(numbers):
            which = np.flatnonzero(numbers == number)
            page = self._pages[self._by_row[row][number]]
            yield page, self._on_device(inside[which]), self._on_device(which)

    def _on_device(self, numbers: Integers) -> IntegerTensor:
        return torch.from_numpy(numbers).to(self.table.device)

    def _widen_table(self, rows: int, pages: int) -> None:
        """Make room in the table; a dimension that is too small at least doubles."""
        known_rows, known_pages = self.table.shape
        if rows <= known_rows and pages <= known_pages:
            return
        rows = known_rows if rows <= known_rows else max(rows, 2 * known_rows)
        pages = known_pages if pages <= known_pages else max(pages, 2 * known_pages)
        wider = self.table.new_zeros(rows, pages)
        wider[:known_rows, :known_pages] = self.table
        self.table = wider

    @torch.inference_mode()
    def _write_table(self, row: int) -> None:
        places = torch.tensor([self._places[page] for page in self._by_row[row]], dtype=torch.int64)
        self.table[row, : len(places)] = places.to(self.table.device)
