"""Embedding tables in the type of the checkpoint; lookups convert rows to float32."""

import inspect
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from specbeam.core import compiling
from specbeam.core.compiling.compiler import Array, compiled, compiled_only
from specbeam.core.compiling.copies import copy_numbers
from specbeam.engines.arrays import Integers, States
from specbeam.engines.cpu.sums import FLOAT16_SCALE

if compiling.AVAILABLE:
    from numba import types

    from specbeam.core.compiling.compiler import chosen_for

# Integer types of the same size, for types that numpy or numba lacks.
_BITS = {torch.bfloat16: np.uint16, torch.float16: np.int16}

Table = Shaped[np.ndarray, "vocab hidden"]


def table_of(weight: Tensor) -> Table:
    """Return an embedding table, without a copy if it is contiguous.

    It is float32; or uint16, the bits of bfloat16 numbers; or int16, the bits of float16 numbers.
    """
    rows = weight.detach().contiguous()
    if rows.dtype in _BITS:
        return rows.view(torch.int16).numpy().view(_BITS[rows.dtype])
    return rows.float().numpy()


@compiled_only
def look_up(table: Array, token: int, out: Array) -> None:
    """Write the embedding of a token, as float32, to out[hidden]."""


@compiled
def look_up_rows(table: Array, tokens: Array, out: Array) -> None:
    """Write the embeddings of tokens, as float32, to out[tokens, hidden]."""
    for row in range(len(tokens)):
        look_up(table, tokens[row], out[row])


def embedded_rows(table: Table, tokens: Integers) -> States:
    """Return the embeddings of tokens as float32; raise `IndexError` for tokens outside the table."""
    if table.dtype == np.float32:
        return table.take(tokens, 0)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(table):
        raise IndexError("a token is outside the model's vocabulary")
    out = np.empty((len(tokens), table.shape[1]), dtype=np.float32)
    look_up_rows(table, tokens, out)
    return out


def _copy_row(table: Array, token: int, out: Array) -> None:
    copy_numbers(out, table[token])


def _widen_bfloat16(table: Array, token: int, out: Array) -> None:
    row = table[token]
    bits = out.view(np.uint32)
    for place in range(len(row)):
        bits[place] = np.uint32(row[place]) << np.uint32(16)


def _widen_float16(table: Array, token: int, out: Array) -> None:
    widen_halves(table[token].view(np.uint16), out)


@compiled
def widen_halves(halves: Array, out: Array) -> None:
    """Write float16 numbers, given by their bits, uint16[n], to out, float32[n]: exactly, without float16 instructions."""
    bits = out.view(np.uint32)
    for place in range(len(halves)):
        bits[place] = (np.uint32(halves[place]) & np.uint32(0x7FFF)) << np.uint32(13)
    for place in range(len(halves)):
        out[place] *= FLOAT16_SCALE
    for place in range(len(halves)):
        bits[place] |= (np.uint32(halves[place]) & np.uint32(0x8000)) << np.uint32(16)


if compiling.AVAILABLE:
    _BY_TYPE = {types.uint16: _widen_bfloat16, types.int16: _widen_float16}

    @chosen_for(look_up)
    def _compiled_look_up(table: Any, token: Any, out: Any) -> Any:
        return inspect.unwrap(_BY_TYPE.get(table.dtype, _copy_row))
