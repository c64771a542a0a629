"""Passes that the compiled runs of many sessions share: all rows of all sessions in one reading of the weights."""

from typing import Any

import numpy as np

from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.copies import copy_numbers, copy_rows
from specbeam.core.compiling.held import held_at
from specbeam.core.cycles import cycles
from specbeam.core.laws.listing import listed_rows
from specbeam.core.passes import CYCLES, PASSES, Asked, extend_all, extend_one_by_one
from specbeam.core.ranked import Ranked, whole_rows
from specbeam.engines.cpu.cache_steps import (
    ALL,
    CacheArrays,
    fed_rows,
    first_inputs,
    is_feedable,
    run_layers,
    shaped_logits,
)
from specbeam.engines.cpu.rows import KeyValues, LayerRows
from specbeam.engines.cpu.sources import Sources
from specbeam.engines.kv.steps import SIZE, STORED, enter


@extend_all.of(CacheArrays)
@compiled
def extend_caches(like: CacheArrays, caches: list[Any], asked: list[Asked], whole: bool, spent: Array) -> list[Ranked]:
    """Implement `extend_all` by one pass of all layers, unless the first layers run ahead of the others.

    A session with a token or a position outside of the model's range gets no rows.
    """
    if like.part != ALL:
        return extend_one_by_one(like, caches, asked, whole, spent)
    began = cycles()
    count = len(asked)
    is_in = np.zeros(count, dtype=np.bool_)
    fresh = np.zeros(count, dtype=np.int64)  # rows of each session that run through the layers
    for number in range(count):
        one = asked[number]
        if len(one.wanted) == 0:
            continue
        cache = held_at(caches[number], like)
        enter(cache.trie, one.tokens, one.parents)
        is_in[number] = is_feedable(cache)
        if is_in[number]:
            fresh[number] = cache.trie.counts[SIZE] - cache.trie.counts[STORED]
            spent[number, PASSES] += 1
    if fresh.sum() > 0:
        _run_together(like, caches, fresh)
    logits = _logits_together(like, caches, asked, is_in)
    found = []
    first = 0
    for number in range(count):
        stop = first
        if is_in[number]:
            stop += len(asked[number].wanted)
        rows = logits[first:stop]
        first = stop
        cache = held_at(caches[number], like)
        if whole or cache.listing.length == 0 or len(rows) == 0:
            found.append(whole_rows(rows))
        else:
            found.append(listed_rows(rows, asked[number].keys, cache.listing))
    share = (cycles() - began) // max(is_in.sum(), 1)
    for number in range(count):
        spent[number, CYCLES] += share * is_in[number]
    return found


@compiled
def _run_together(like: CacheArrays, caches: list[Any], fresh: Array) -> None:
    """Run all layers on the pending nodes of these sessions, and store keys, values and outputs.

    Args:
        fresh: int64[sessions], the number of pending nodes of each; sessions without any take no part.
    """
    total = fresh.sum()
    ends = np.cumsum(fresh)
    taking_part = np.flatnonzero(fresh)
    each = []
    for number in taking_part:
        each.append(_opened(held_at(caches[number], like)))  # noqa: PERF401  # see `compiling.held`
    x = np.empty((total, like.outputs.shape[1]), dtype=np.float32)
    extent = 0
    for own in each:
        extent = max(extent, own[1].seen.shape[2])
    kinds = len(like.windows)
    positions = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    sessions = np.empty((len(each), 3), dtype=np.int64)
    seen = np.zeros((kinds, total, extent), dtype=np.bool_)
    places = np.zeros((len(each), extent), dtype=np.int64)
    of_sources = np.empty(len(each) if len(like.sources.rows) > 0 else 0, dtype=np.int64)
    for place in range(len(each)):
        number = taking_part[place]
        states, rows = each[place]
        stop = ends[number]
        start = stop - fresh[number]
        cache = held_at(caches[number], like)
        copy_rows(x[start:stop], states)
        copy_numbers(positions[start:stop], rows.positions)
        copy_numbers(slots[start:stop], rows.slots)
        for kind in range(kinds):
            copy_rows(seen[kind, start:stop], rows.seen[kind])
        copy_rows(places[place : place + 1], rows.places)
        sessions[place, 0] = cache.store_row
        sessions[place, 1] = start
        sessions[place, 2] = stop
        if len(of_sources) > 0:
            of_sources[place] = cache.sources.rows[0]
    sources = Sources(like.sources.keys, like.sources.values, like.sources.lengths, of_sources)
    joined = LayerRows(positions, slots, sessions, seen, places, sources)
    tapped = np.empty((total, like.tapped.shape[1]), dtype=np.float32)
    model = like.model
    run_layers(like, x, joined, model.weights, model.kinds, KeyValues(like.keys, like.values), tapped)
    for number in taking_part:
        cache = held_at(caches[number], like)
        stored = cache.trie.counts[STORED]
        start = ends[number] - fresh[number]
        copy_rows(cache.outputs[stored - fresh[number] : stored], x[start : ends[number]])
        copy_rows(cache.tapped[stored - fresh[number] : stored], tapped[start : ends[number]])


@compiled
def _opened(cache: CacheArrays) -> tuple[Array, LayerRows]:
    """Return the first layer's input of all pending nodes of a session, and these nodes as rows of a pass."""
    rows = fed_rows(cache, cache.sources)
    return first_inputs(cache, len(rows.slots)), rows


@compiled
def _logits_together(like: CacheArrays, caches: list[Any], asked: list[Asked], is_in: Array) -> Array:
    """Return the logits of the nodes that sessions ask for, float32[rows, vocab], one session after the other."""
    total = 0
    for number in range(len(asked)):
        total += len(asked[number].wanted) * is_in[number]
    x = np.empty((total, like.outputs.shape[1]), dtype=np.float32)
    row = 0
    for number in range(len(asked)):
        if is_in[number]:
            cache = held_at(caches[number], like)
            for node in asked[number].wanted:
                copy_numbers(x[row], cache.outputs[cache.trie.local[node]])
                row += 1
    return shaped_logits(like, x, like.model.last_norm)
