"""Triton kernels for all operations of a layer except matrix products; parts that a family lacks are not compiled.

The rows of all sessions are concatenated; each has its position, its row of the store and its slot. Attention reads keys and
values in place, with a mask of the slots of each row. Numbers that change between passes are read on the device, so that a
captured pass can be replayed; `Inputs` describes them.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from specbeam.engines.arrays import HeadRows, JoinedRows, RowTensor
from specbeam.engines.families import Activation
from specbeam.engines.gpu.pages import PAGE, LayerPages
from specbeam.engines.gpu.staging import Inputs

WASTE = tl.constexpr(0)  # the slot for padding, to which these kernels do not write; see engines/kv/steps.py
UNSEEN = tl.constexpr(-1e30)
MOST_ROWS = 64  # rows times query heads per KV head, in one program of `_attend`
MOST_SPLITS = 16  # maximum number of programs of `_attend` that share the slots


def step(function: Callable[..., Any]) -> Any:
    """Return the function as a Triton kernel."""
    return triton.jit(inspect.unwrap(function))  # tests wrap functions into type checks


@step
def _norm(
    x, more, weight, out, width, eps, residual, BLOCK: tl.constexpr, CENTRED: tl.constexpr, OF_SUM: tl.constexpr
):  # fmt: skip
    """Write the norm of one row of x, [rows, width], to `out`: an RMSNorm, or, centred, a LayerNorm with a bias.

    With `more`, it is the norm of the sum of x and `residual` times `more`, rounded to the type of x; `out` may be x.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if OF_SUM:
        value += tl.load(more + row * width + at, mask=inside, other=0.0).to(tl.float32) * residual
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value) / width, 0.0)
    factor = 1 / tl.sqrt(tl.sum(value * value) / width + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    value = value * factor * scale
    if CENTRED:
        value += tl.load(weight + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=inside)


@step
def _norm_part(x, weight, pitch, groups, width, eps, BLOCK: tl.constexpr):
    """Replace a group of `width` columns of one row of x, [rows, pitch], by its RMSNorm.

    Groups below `groups` have the first weight, the others the second one.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    place = x + row * pitch + group * width + at
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    factor = 1 / tl.sqrt(tl.sum(value * value) / width + eps)
    scale = tl.load(weight + tl.where(group < groups, 0, width) + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (value * factor * scale).to(x.dtype.element_ty), mask=inside)


@step
def _activate(both, out, width, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """Write the activation of the first `width` numbers of one row of `both` to `out`; gated, times the next `width`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    source = both + row * (2 * width if GATED else width) + at
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        value = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu tanh":
        value = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        value = tl.maximum(x, 0.0)
    else:
        value = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if GATED:
        value = value * tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=inside)


@step
def _rotate_and_store(
    qkv, q, pool, table, pitch, first, cos, sin, positions, caches, places,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, BY_HEAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply rotary positions to one head of one row; write a query to `q`, a key or a value to its slot.

    The page of the slot is in `table`, [rows of the store, pitch]; the first `first` numbers of a page belong to
    earlier layers.

    The first HALF numbers of a head rotate with the next HALF; the others are unchanged. If the rows are laid out by
    head, the key and the value of a KV head follow its queries.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    column = head
    if BY_HEAD:
        is_query = head < HEADS
        kv_of_head = tl.where(is_query, head // GROUP, (head - HEADS) % KV_HEADS)
        column = kv_of_head * (GROUP + 2) + tl.where(is_query, head % GROUP, GROUP + (head - HEADS) // KV_HEADS)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + column) * SIZE
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    turned = value
    if HALF > 0:
        turns = at < 2 * HALF
        other = tl.where(at < HALF, at + HALF, at - HALF)
        partner = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
        angle = tl.load(positions + row) * HALF + at % HALF
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        turned = value * c + tl.where(at < HALF, -partner, partner) * s
    slot = tl.load(places + row)
    kv_head = (head - HEADS) % KV_HEADS
    page = tl.load(table + tl.load(caches + row).to(tl.int64) * pitch + slot // PAGE) + first
    value_head = tl.where(head < HEADS + KV_HEADS, 0, KV_HEADS) + kv_head  # the values follow the keys
    place = page + (value_head * PAGE + slot % PAGE) * SIZE + at
    stored = inside & (at * 0 + slot > WASTE)
    kind = q.dtype.element_ty
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * SIZE + at, turned.to(kind), mask=inside)
    elif head < HEADS + KV_HEADS:
        tl.store(pool + place, turned.to(kind), mask=stored)
    else:
        tl.store(pool + place, value.to(kind), mask=stored)


@step
def _write_part(
    out, sums, tops, mixed, total, top, head_at, part, real, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Write the attention of some rows as one program has computed it: the result, or a part for `_join`.

    Args:
        mixed, total, top: unnormalised outputs, float32[rows, BLOCK], their sums and the maxima of the scores.
        head_at: number of the head of each row, among the heads of all rows.
        real: which rows exist.
    """
    at = tl.arange(0, BLOCK)
    here = real[:, None] & (at < SIZE)[None, :]
    if SPLITS == 1:
        mixed = mixed / tl.maximum(total, 1e-30)[:, None]
        tl.store(out + head_at[:, None] * SIZE + at[None, :], mixed.to(out.dtype.element_ty), mask=here)
    else:
        goal = head_at * SPLITS + part
        tl.store(out + goal[:, None] * SIZE + at[None, :], mixed, mask=here)
        tl.store(sums + goal, total, mask=real)
        tl.store(tops + goal, top, mask=real)


@step
def _attend(
    q, pool, table, pitch, first_number, seen, sessions, biases, out, sums, tops, scale, cap, kind, session_room, ranges,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, AT_ONCE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
    BIASED: tl.constexpr, BY_PLACE: tl.constexpr,
):  # fmt: skip
    """Compute attention for rows of one session and all query heads of one key-value head, over one part of the slots.

    If there are several parts, each writes unnormalised outputs, their sums and their maxima, which `_join` combines.
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
        pages = table + cache * pitch
        base = first_number + head * PAGE * SIZE
        mask = seen + tl.load(session + 4 * session_room) + kind * tl.load(session + 5 * session_room)
        look = mask + row[:, None] * extent
        places = (mask + tl.load(session + 5 * session_room)).to(tl.pointer_type(tl.int32))  # read with BY_PLACE only
        bias = biases + (head * GROUP + place % GROUP)[:, None] * ranges
        if not BY_PLACE:
            bias -= 1  # the first range has number 1
        top = tl.full([ROWS], UNSEEN, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, BLOCK], tl.float32)
        blocks = tl.cdiv(extent, AT_ONCE)
        each = tl.cdiv(blocks, SPLITS)
        for block in range(part * each, tl.minimum(blocks, (part + 1) * each)):
            slot = block * AT_ONCE + tl.arange(0, AT_ONCE)
            known = slot < extent
            page = tl.multiple_of(tl.load(pages + block * AT_ONCE // PAGE), 16)  # all slots of a block are in one page
            source = page + base + (slot % PAGE)[:, None] * SIZE + at[None, :]
            stored = known[:, None] & inside[None, :]
            key = tl.load(pool + source, mask=stored, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            found = tl.load(look + slot[None, :], mask=real[:, None] & known[None, :], other=0).to(tl.int32)
            open_ = found != 0
            if BY_PLACE:
                place_of_slot = tl.load(places + slot, mask=known, other=0)
                score += tl.load(bias + place_of_slot[None, :], mask=open_, other=0.0)
            elif BIASED:
                score += tl.load(bias + found, mask=open_, other=0.0)
            if CAPPED:
                score = cap * (1 - 2 / (tl.exp(2 * score / cap) + 1))
            score = tl.where(open_, score, UNSEEN)
            higher = tl.maximum(top, tl.max(score, 1))
            weight = tl.where(open_, tl.exp(score - higher[:, None]), 0.0)
            shrunk = tl.exp(top - higher)
            value = tl.load(pool + source + KV_HEADS * PAGE * SIZE, mask=stored, other=0.0)
            total = total * shrunk + tl.sum(weight, 1)
            mixed = mixed * shrunk[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
            top = higher
        _write_part(out, sums, tops, mixed, total, top, head_at, part, real, SIZE, BLOCK, SPLITS)


@step
def _join(parts, sums, tops, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the parts of attention for one head of one row."""
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


def normed(x: RowTensor, weight: Float[Tensor, " any"], eps: float) -> RowTensor:
    """Return the norm of each row, computed in float32; x itself without a weight.

    Args:
        weight: see `families.LayerParts`.
    """
    if not weight.numel():
        return x
    out = torch.empty_like(x)
    _write_norm(x, x, weight, out, eps, 0.0, of_sum=False)
    return out


def norm_sum(
    x: RowTensor,
    more: RowTensor,
    weight: Float[Tensor, " any"],
    eps: float,
    residual: float = 1.0,
) -> None:
    """Replace each row of x by the norm of its sum with `residual` times that of `more`; see `normed`."""
    _write_norm(x, more, weight, x, eps, residual, of_sum=True)


def _write_norm(
    x: RowTensor,
    more: RowTensor,
    weight: Float[Tensor, " any"],
    out: RowTensor,
    eps: float,
    residual: float,
    of_sum: bool,
) -> None:
    """Launch the kernel of norms."""
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    warps = 8 if width > 2048 else 4
    _norm[(len(x),)](x, more, weight, out, width, eps, residual, block, weight.numel() > width, of_sum, num_warps=warps)


def norm_heads(qkv: JoinedRows, weight: Float[Tensor, "2 size"], heads: tuple[int, int], eps: float) -> None:
    """Replace the queries and keys of each head by their RMSNorm."""
    rows, pitch = qkv.shape
    size = weight.shape[1]
    block = triton.next_power_of_2(size)
    _norm_part[(rows, sum(heads))](qkv, weight, pitch, heads[0], size, eps, block, num_warps=1)


def activated(both: JoinedRows, activation: Activation = "silu", gated: bool = True) -> RowTensor:
    """Return the activation of each row; if gated, the activation of its first half times the second half."""
    rows, columns = both.shape
    width = columns // 2 if gated else columns
    out = both.new_empty(rows, width)
    _activate[(rows, triton.cdiv(width, 1024))](both, out, width, 1024, activation, gated)
    return out


def rotate_and_store(
    qkv: JoinedRows,
    heads: tuple[int, int],
    angles: Float[Tensor, "2 positions half"],
    inputs: Inputs,
    layer: LayerPages,
    by_head: bool = False,
) -> HeadRows:
    """Store keys, with rotary positions, and values in their slots; return the queries with rotary positions.

    Args:
        angles: angles of the rotated pairs; there may be none.
        by_head: see `ModelFamily.by_head`.
    """
    rows = len(qkv)
    half = angles.shape[2]
    size = qkv.shape[1] // (heads[0] + 2 * heads[1])
    q = qkv.new_empty(rows, heads[0], size)
    _rotate_and_store[(rows, heads[0] + 2 * heads[1])](
        qkv, q, layer.pool, layer.table, layer.table.shape[1], layer.first, angles[0], angles[1], inputs.positions,
        inputs.caches, inputs.slots, *heads, size, half, by_head, PAGE, triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return q


class Scores(NamedTuple):
    """The settings of a layer's attention scores."""

    kind: int  # kind of the layer, which selects the mask
    scale: float  # factor of scores
    cap: float = 0.0  # see `families.Numbers.attention_cap`
    # float32, biases of scores for each range of distances, see `ModelLimits.ranges`, or for each position of a key
    biases: Float[Tensor, "heads ranges"] | None = None
    by_place: bool = False  # whether biases are by position


def attended(
    q: HeadRows,
    kv_heads: int,
    layer: LayerPages,
    inputs: Inputs,
    sessions: int,
    most: int,
    processors: int,
    scores: Scores,
) -> JoinedRows:
    """Return the attention of every row over its unmasked slots.

    Args:
        sessions: number of sessions in the pass.
        most: maximum number of rows of one session.
        processors: number of multiprocessors of the device; the slots are split so that all multiprocessors have work.
    """
    biases = scores.biases
    rows, heads, size = q.shape
    block = max(16, triton.next_power_of_2(size))
    places = most * heads // kv_heads
    slots_at_once = max(16, min(64, 64 * 256 // (block * q.element_size())))  # to fit in a multiprocessor's memory
    at_once = min(MOST_ROWS, max(16, triton.next_power_of_2(places)))
    programs = kv_heads * triton.cdiv(places, at_once) * sessions
    splits = splits_for(programs, processors)
    out = torch.empty_like(q)
    parts, sums, tops = room_for_parts(out, splits)
    _attend[(kv_heads * splits, triton.cdiv(places, at_once), sessions)](
        q, layer.pool, layer.table, layer.table.shape[1], layer.first, inputs.seen, inputs.sessions,
        q if biases is None else biases, parts, sums, tops,
        scores.scale, scores.cap or 1.0, scores.kind, inputs.sessions.shape[1],
        0 if biases is None else biases.shape[1], heads, kv_heads, size, block, at_once, PAGE, slots_at_once, splits,
        "ieee" if q.dtype == torch.float32 else "tf32", scores.cap > 0, biases is not None,
        scores.by_place, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](parts, sums, tops, out, size, block, splits, num_warps=1)
    return out.view(rows, heads * size)


def room_for_parts(out: HeadRows, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return buffers for the parts of attention, their sums and their maxima; without parts, three times `out`."""
    if splits == 1:
        return out, out, out
    rows, heads, size = out.shape
    parts = out.new_empty(rows, heads, splits, size, dtype=torch.float32)
    sums, tops = out.new_empty(2, rows, heads, splits, dtype=torch.float32)
    return parts, sums, tops


def splits_for(programs: int, processors: int) -> int:
    """Return the number of parts into which attention is split, so that all processors have work.

    Args:
        programs: number of programs without parts.
        processors: number of multiprocessors of the device.
    """
    if programs >= processors:
        return 1
    return min(MOST_SPLITS, triton.next_power_of_2(triton.cdiv(2 * processors, programs)))
