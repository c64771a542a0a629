"""The pages of keys and values of the forward for GPUs."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from specbeam.engines.gpu import pages
from specbeam.engines.gpu.pages import PAGE, PagedStore


@pytest.fixture
def store():
    return PagedStore(2, 3, 4, torch.empty(0))


def numbers(slots):
    return [torch.randn(2, 2, 3, slots, 4)]


def in_table(store, row, slot):
    """Return the numbers of a slot where kernels find them: at its page's place, counted from the first number of the pool."""
    place = int(store.table[row, slot // PAGE])
    first = store._pages[store._places.index(place)]
    assert first.data_ptr() == store.pool.data_ptr() + 4 * place
    return first[:, :, :, slot % PAGE]


def test_what_is_put_is_taken_again_and_found_through_the_table(store):
    store.reserve_row(1, 200)
    slots = np.array([3, 199, 64, 5])
    written = numbers(4)
    store.put(1, slots, written)
    assert torch.equal(store.take(1, slots)[0], written[0])
    for place, slot in enumerate(slots):
        assert torch.equal(in_table(store, 1, int(slot)), written[0][:, :, :, place])
    assert store.layer(1).first == 2 * 3 * PAGE * 4


def test_a_row_that_grows_keeps_its_pages_and_its_table(store):
    store.reserve_row(0, 100)
    written = numbers(2)
    store.put(0, np.array([1, 99]), written)
    table, pool, before = store.table, store.pool, store.table[0, :2].clone()
    store.reserve_row(0, 64 * 40)
    store.reserve(3, 300)
    assert store.table is table
    assert store.pool is pool
    assert torch.equal(store.table[0, :2], before)
    assert torch.equal(store.take(0, np.array([1, 99]))[0], written[0])
    assert len(set(store.table[0, :40].tolist() + store.table[1, :5].tolist() + store.table[2, :5].tolist())) == 50


def test_a_row_that_moves_is_not_copied(store):
    store.reserve(3, 64)
    store.put(2, np.array([7]), written := numbers(1))
    place = int(store.table[2, 0])
    store.move_cache(2, 0, 64)
    assert int(store.table[0, 0]) == place
    assert torch.equal(store.take(0, np.array([7]))[0], written[0])


def test_pages_of_rows_without_sessions_are_used_again(store):
    store.reserve(4, 200)
    size = len(store._pages)
    store.put(3, np.array([2]), [torch.full((2, 2, 3, 1, 4), torch.nan)])
    for _ in range(5):
        store.release_from(1)
        store.reserve_row(3, 600)
        store.reserve_row(1, 100)
    assert len(store._pages) == size
    assert all(bool(page.isfinite().all()) for page in store._pages), "masked slots enter products"
    held = [page for row in store._by_row for page in row]
    assert len(held) == len(set(held)) == 4 + 10 + 2
    assert not set(held) & set(store._free)


def test_slots_move_within_a_row(store):
    store.reserve_row(0, 130)
    store.put(0, np.array([5, 129]), written := numbers(2))
    store.copy_slots(0, np.array([5, 129]), 0, np.array([129, 1]))
    assert torch.equal(store.take(0, np.array([129, 1]))[0], written[0])


def test_the_table_widens_and_keeps_its_places(store, monkeypatch):
    monkeypatch.setattr(pages, "TABLE_ROWS", 2)
    monkeypatch.setattr(pages, "TABLE_PAGES", 2)
    small = PagedStore(2, 3, 4, torch.empty(0))
    small.reserve(2, 128)
    before = small.table.clone()
    small.reserve_row(4, 64 * 3)
    assert small.table.shape == (5, 4)
    assert torch.equal(small.table[:2, :2], before)


def test_memory_is_taken_ahead_up_to_a_limit(monkeypatch):
    sizes = []
    store = PagedStore(2, 3, 4, torch.empty(0))
    for count in range(1, 60):
        store.reserve_row(0, count * PAGE)
        sizes.append(len(store._pages))
    assert sorted(set(sizes)) == [8, 16, 32, 64]
    monkeypatch.setattr(pages, "MOST_CHUNK_BYTES", 4 * store._pages[0].nbytes)
    store.reserve_row(0, 65 * PAGE)
    assert len(store._pages) == 68
