"""The Triton kernel of cross-attention.

There is no mask: all rows of a session attend to all frames of its source. The place of the frames in the pool is read on
the device, so that a captured pass can be replayed for sources of any length; see `Inputs.sessions`.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from specbeam.engines.arrays import HeadRows, JoinedRows
from specbeam.engines.gpu.kernels import MOST_ROWS, UNSEEN, _join, _write_part, room_for_parts, splits_for, step
from specbeam.engines.gpu.staging import Inputs


@step
def _look_at_source(
    q, keys, values, sessions, out, sums, tops, scale, room, session_room,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the attention of rows of one session, for one head, over one part of the frames of its source.

    If there are several parts, each writes unnormalised outputs, their sums and their maxima, which `_join` combines.
    """
    head = tl.program_id(0) // SPLITS
    part = tl.program_id(0) % SPLITS
    session = sessions + tl.program_id(2)
    first = tl.load(session)
    count = tl.load(session + session_room)
    start = tl.load(session + 6 * session_room).to(tl.int64)
    frames = tl.load(session + 7 * session_room)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) * ROWS < count:
        real = row < count
        head_at = (first + row) * HEADS + head
        at = tl.arange(0, BLOCK)
        inside = at < SIZE
        here = real[:, None] & inside[None, :]
        query = tl.load(q + head_at[:, None] * SIZE + at[None, :], mask=here, other=0.0)
        base = start + head.to(tl.int64) * room  # the pool has this many frames for each head
        top = tl.full([ROWS], UNSEEN, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, BLOCK], tl.float32)
        blocks = tl.cdiv(frames, AT_ONCE)
        each = tl.cdiv(blocks, SPLITS)
        for block in range(part * each, tl.minimum(blocks, (part + 1) * each)):
            frame = block * AT_ONCE + tl.arange(0, AT_ONCE)
            known = frame < frames
            source = (base + frame.to(tl.int64))[:, None] * SIZE + at[None, :]
            stored = known[:, None] & inside[None, :]
            key = tl.load(keys + source, mask=stored, other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            score = tl.where(known[None, :], score, UNSEEN)
            higher = tl.maximum(top, tl.max(score, 1))  # every block has at least one valid frame
            weight = tl.exp(score - higher[:, None])
            shrunk = tl.exp(top - higher)
            value = tl.load(values + source, mask=stored, other=0.0)
            total = total * shrunk + tl.sum(weight, 1)
            mixed = mixed * shrunk[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
            top = higher
        _write_part(out, sums, tops, mixed, total, top, head_at, part, real, SIZE, BLOCK, SPLITS)


def looked_at_sources(
    q: HeadRows,
    keys: Float[Tensor, "heads frames size"],
    values: Float[Tensor, "heads frames size"],
    inputs: Inputs,
    sessions: int,
    most: int,
    processors: int,
    scale: float,
) -> JoinedRows:
    """Return the attention of every row over all frames of its session's source.

    Args:
        keys, values: keys and values of all sources in one layer.
        sessions: number of sessions in the pass.
        most: maximum number of rows of one session.
        processors: number of multiprocessors of the device; the frames are split so that all multiprocessors have work.
        scale: factor of scores.
    """
    rows, heads, size = q.shape
    block = max(16, triton.next_power_of_2(size))
    frames_at_once = max(16, min(64, 64 * 256 // (block * q.element_size())))  # to fit in a multiprocessor's memory
    at_once = min(MOST_ROWS, max(16, triton.next_power_of_2(most)))
    programs = heads * triton.cdiv(most, at_once) * sessions
    splits = splits_for(programs, processors)
    out = torch.empty_like(q)
    parts, sums, tops = room_for_parts(out, splits)
    _look_at_source[(heads * splits, triton.cdiv(most, at_once), sessions)](
        q, keys, values, inputs.sessions, parts, sums, tops, scale, keys.shape[1], inputs.sessions.shape[1],
        heads, size, block, at_once, frames_at_once, splits, "ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](parts, sums, tops, out, size, block, splits, num_warps=1)
    return out.view(rows, heads * size)
