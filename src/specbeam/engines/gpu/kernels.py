"""Triton kernels for all operations of a Llama-like layer but the matrix products.

The rows of all sessions follow each other; each has its position, its row of the store and its slot. Attention reads keys
and values in place, and a mask says which slots each row may look at. Numbers that change from pass to pass are read on the
device, so that a captured pass can be replayed; `Inputs` describes them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from specbeam.engines.gpu.staging import Inputs

WASTE = tl.constexpr(0)  # a slot that no row looks at, and where nothing is written here; see engines/kv/steps.py
UNSEEN = tl.constexpr(-1e30)
MOST_ROWS = 64  # rows times query heads per key-value head, in one program of `_attend`
MOST_SPLITS = 16  # parts of the slots, each for a program of `_attend`


def step(function: Callable[..., Any]) -> Any:
    """Return the function as a Triton kernel."""
    return triton.jit(inspect.unwrap(function))  # tests wrap functions into type checks


@step
def _norm(x, weight, out, width, eps, BLOCK: tl.constexpr):
    """Write the RMSNorm of one row of x, [rows, width], to `out`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(value * value) / width + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (value * factor * scale).to(out.dtype.element_ty), mask=inside)


@step
def _gate(both, out, width, BLOCK: tl.constexpr):
    """Write SiLU of the first half of one row of `both`, [rows, 2 * width], times the second half to `out`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=inside)


@step
def _rotate_and_store(
    qkv, q, keys, values, cos, sin, positions, caches, places, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply rotary positions to one head of one row; write a query to `q`, a key or a value to its slot."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + at
    lower = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + row) * HALF + at
    c = tl.load(cos + angle, mask=inside, other=1.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    rotated_lower = lower * c - upper * s
    rotated_upper = upper * c + lower * s
    slot = tl.load(places + row)
    kv_head = (head - HEADS) % KV_HEADS
    place = ((tl.load(caches + row).to(tl.int64) * KV_HEADS + kv_head) * slots + slot) * 2 * HALF + at
    stored = inside & (at * 0 + slot > WASTE)
    kind = q.dtype.element_ty
    if head < HEADS:
        goal = q + (row * HEADS + head) * 2 * HALF + at
        tl.store(goal, rotated_lower.to(kind), mask=inside)
        tl.store(goal + HALF, rotated_upper.to(kind), mask=inside)
    elif head < HEADS + KV_HEADS:
        tl.store(keys + place, rotated_lower.to(kind), mask=stored)
        tl.store(keys + place + HALF, rotated_upper.to(kind), mask=stored)
    else:
        tl.store(values + place, lower.to(kind), mask=stored)
        tl.store(values + place + HALF, upper.to(kind), mask=stored)


@step
def _attend(
    q, keys, values, seen, sessions, out, sums, tops, scale, slots, kind, session_room,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention for rows of one session and all query heads of one key-value head, over one part of the slots.

    If there are several parts, each writes unnormalised outputs, their sums and their maxima, which `_join` puts together.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) // SPLITS
    part = tl.program_id(0) % SPLITS
    session = sessions + tl.program_id(2)
    first = tl.load(session)
    count = tl.load(session + session_room)
    cache = tl.load(session + 2 * session_room).to(tl.int64)
    extent = tl.load(session + 3 * session_room)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) * ROWS < count * GROUP:
        row = place // GROUP
        real = place < count * GROUP
        head_at = (first + row) * HEADS + head * GROUP + place % GROUP
        at = tl.arange(0, BLOCK)
        inside = at < SIZE
        here = real[:, None] & inside[None, :]
        query = tl.load(q + head_at[:, None] * SIZE + at[None, :], mask=here, other=0.0)
        base = (cache * KV_HEADS + head) * slots * SIZE
        mask = seen + tl.load(session + 4 * session_room) + kind * tl.load(session + 5 * session_room)
        look = mask + row[:, None] * extent
        top = tl.full([ROWS], UNSEEN, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, BLOCK], tl.float32)
        blocks = tl.cdiv(extent, AT_ONCE)
        each = tl.cdiv(blocks, SPLITS)
        for block in range(part * each, tl.minimum(blocks, (part + 1) * each)):
            slot = block * AT_ONCE + tl.arange(0, AT_ONCE)
            known = slot < extent
            source = base + slot.to(tl.int64)[:, None] * SIZE + at[None, :]
            stored = known[:, None] & inside[None, :]
            key = tl.load(keys + source, mask=stored, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            open_ = tl.load(look + slot[None, :], mask=real[:, None] & known[None, :], other=0) != 0
            score = tl.where(open_, score, UNSEEN)
            higher = tl.maximum(top, tl.max(score, 1))
            weight = tl.where(open_, tl.exp(score - higher[:, None]), 0.0)
            shrunk = tl.exp(top - higher)
            value = tl.load(values + source, mask=stored, other=0.0)
            total = total * shrunk + tl.sum(weight, 1)
            mixed = mixed * shrunk[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
            top = higher
        if SPLITS == 1:
            mixed = mixed / tl.maximum(total, 1e-30)[:, None]
            tl.store(out + head_at[:, None] * SIZE + at[None, :], mixed.to(out.dtype.element_ty), mask=here)
        else:
            goal = head_at * SPLITS + part
            tl.store(out + goal[:, None] * SIZE + at[None, :], mixed, mask=here)
            tl.store(sums + goal, total, mask=real)
            tl.store(tops + goal, top, mask=real)


@step
def _join(parts, sums, tops, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Put the parts of attention together for one head of one row."""
    head_of_row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    part = tl.arange(0, SPLITS)
    top = tl.load(tops + head_of_row * SPLITS + part)
    weight = tl.exp(top - tl.max(top))
    total = tl.sum(weight * tl.load(sums + head_of_row * SPLITS + part))
    source = parts + (head_of_row * SPLITS + part)[:, None] * SIZE + at[None, :]
    mixed = tl.sum(tl.load(source, mask=(at < SIZE)[None, :], other=0.0) * weight[:, None], 0)
    value = (mixed / tl.maximum(total, 1e-30)).to(out.dtype.element_ty)
    tl.store(out + head_of_row * SIZE + at, value, mask=at < SIZE)


def normed(x: Float[Tensor, "rows width"], weight: Float[Tensor, " width"], eps: float) -> Float[Tensor, "rows width"]:
    """Return the RMSNorm of each row, computed in float32."""
    out = torch.empty_like(x)
    width = x.shape[1]
    _norm[(len(x),)](x, weight, out, width, eps, triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4)
    return out


def gated(both: Float[Tensor, "rows twice"]) -> Float[Tensor, "rows width"]:
    """Return SiLU of the first half of each row times the second half."""
    rows = both.shape[0]
    width = both.shape[1] // 2
    out = both.new_empty(rows, width)
    _gate[(rows, triton.cdiv(width, 1024))](both, out, width, 1024)
    return out


def rotate_and_store(
    qkv: Float[Tensor, "rows all"],
    heads: tuple[int, int],
    angles: Float[Tensor, "2 positions half"],
    inputs: Inputs,
    keys: Float[Tensor, "caches kv_heads slots size"],
    values: Float[Tensor, "caches kv_heads slots size"],
) -> Float[Tensor, "rows heads size"]:
    """Store keys, with rotary positions, and values in their slots; return the queries with rotary positions."""
    rows = len(qkv)
    half = angles.shape[2]
    q = qkv.new_empty(rows, heads[0], 2 * half)
    _rotate_and_store[(rows, heads[0] + 2 * heads[1])](
        qkv, q, keys, values, angles[0], angles[1], inputs.positions, inputs.caches, inputs.slots, keys.shape[2],
        *heads, half, triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return q


def attended(
    q: Float[Tensor, "rows heads size"],
    keys: Float[Tensor, "caches kv_heads slots size"],
    values: Float[Tensor, "caches kv_heads slots size"],
    inputs: Inputs,
    kind: int,
    sessions: int,
    most: int,
    processors: int,
) -> Float[Tensor, "rows all"]:
    """Return the attention of every row over the slots that it may look at.

    Args:
        kind: kind of the layer, which selects the mask.
        sessions: number of sessions in the pass.
        most: the most rows of one session.
        processors: number of multiprocessors of the device; the slots are split so that all of them have work.
    """
    rows, heads, size = q.shape
    kv_heads = keys.shape[1]
    block = max(16, triton.next_power_of_2(size))
    places = most * heads // kv_heads
    slots_at_once = max(16, min(64, 64 * 256 // (block * q.element_size())))  # to fit in a multiprocessor's memory
    at_once = min(MOST_ROWS, max(16, triton.next_power_of_2(places)))
    programs = kv_heads * triton.cdiv(places, at_once) * sessions
    splits = (
        min(MOST_SPLITS, triton.next_power_of_2(triton.cdiv(2 * processors, programs))) if programs < processors else 1
    )
    parts = q if splits == 1 else q.new_empty(rows, heads, splits, size, dtype=torch.float32)
    out = torch.empty_like(q)
    sums = tops = out
    if splits > 1:
        sums, tops = q.new_empty(2, rows, heads, splits, dtype=torch.float32)
    _attend[(kv_heads * splits, triton.cdiv(places, at_once), sessions)](
        q, keys, values, inputs.seen, inputs.sessions, out if splits == 1 else parts, sums, tops,
        size**-0.5, keys.shape[2], kind, inputs.sessions.shape[1], heads, kv_heads, size, block, at_once, slots_at_once,
        splits, "ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](parts, sums, tops, out, size, block, splits, num_warps=1)
    return out.view(rows, heads * size)
