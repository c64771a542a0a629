"""LLVM code for numba: products by the tile registers of processors that have them (Intel's AMX), sixteen rows at a time.

A tile holds 16 rows of 64 bytes. One instruction adds to 16 x 16 sums the products of 16 rows of x with 16 columns of the
matrix over 32 steps of depth, all in bfloat16: sixteen times what a vector instruction does. A float32 is exactly the sum of
three bfloat16, so three of them multiply it with a matrix of bfloat16, and nothing is lost but the order of the sums, and
what is below 1e-33: tiles take denormals as zero. An infinity becomes NaN. Panels are laid out as tiles want them already:
a word holds the two steps of a column that are multiplied together.
"""

import ctypes
import os
import platform
from functools import cache
from typing import Any

import numpy as np

from specbeam import kernels
from specbeam.engines.cpu.sums import WIDTH
from specbeam.kernels.compiling import Array, compiled

# of a tile
ROWS = 16
BYTES = 64
_WORDS = BYTES // 4
PARTS = 3  # of a float32: three bfloat16 hold all of its 24 bits
_SHAPE = 16  # words that say what the tiles look like
_ARCH_PRCTL = 158
_ASK_FOR_STATE = 0x1023
_TILE_DATA = 18

if kernels.AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    from specbeam.kernels.processor import features

    _FEATURES = features()
    _INDEX = ir.IntType(64)
else:
    _FEATURES = frozenset()
    tile_sums: Any = None  # nothing here is called
    tiles_begun: Any = None
    tiles_done: Any = None


def _permitted() -> bool:
    """Linux lets a process use tiles once it has asked for the room that they take."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0


@cache
def available() -> bool:
    """Whether this process may use tiles. `SPECBEAM_TILES=off` leaves them alone."""
    if os.environ.get("SPECBEAM_TILES") == "off":
        return False
    return WIDTH == 2 * _WORDS and {"amx-tile", "amx-bf16"} <= _FEATURES and _permitted()


class _Tiles:
    """Instructions on tiles, in the block where the builder stands."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.byte = ir.IntType(8)
        self.pointer = self.byte.as_pointer()

    def call(self, name: str, *arguments: Any) -> None:
        full = f"llvm.x86.{name}"
        kinds = [one.type for one in arguments]
        known = self.builder.module.globals.get(full)
        function = known or ir.Function(self.builder.module, ir.FunctionType(ir.VoidType(), kinds), full)
        self.builder.call(function, arguments)

    def tile(self, number: int) -> Any:
        return ir.Constant(self.byte, number)

    def zero(self, number: int) -> None:
        self.call("tilezero", self.tile(number))

    def load(self, number: int, array: Any, word: Any, pitch: Any) -> None:
        """From `word` of an array of words on, rows `pitch` bytes apart."""
        place = self.builder.bitcast(self.builder.gep(array, [word]), self.pointer)
        self.call("tileloadd64", self.tile(number), place, pitch)

    def add_product(self, sums: int, x: int, columns: int) -> None:
        self.call("tdpbf16ps", *(self.tile(number) for number in (sums, x, columns)))

    def store(self, number: int, array: Any, word: Any, pitch: Any) -> None:
        place = self.builder.bitcast(self.builder.gep(array, [word]), self.pointer)
        self.call("tilestored64", self.tile(number), place, pitch)


def _number(n: int) -> Any:
    return ir.Constant(_INDEX, n)


class _Panel:
    """The sums of a panel with one block of rows of x, or with two at a time; see `tile_sums`.

    Tiles, if the depth fills whole ones: 0 to 3 sums (two of each block), 4, 5 x, 6, 7 columns. Otherwise 0, 1 sums, 2 x,
    3, 4 columns, and 5, 6, 7 x and columns of what depth is left.
    """

    def __init__(self, builder: Any, arrays: tuple[Any, Any, Any], sizes: tuple[Any, Any]) -> None:
        self.builder = builder
        self.tiles = _Tiles(builder)
        self.weights, self.x, self.out = arrays
        self.words, self.rows = sizes
        self.deep = builder.mul(self.words, _number(4))
        self.part = builder.mul(self.words, self.rows)

    def write(self, blocks: int, x: tuple[int, ...], columns: int, rest: tuple[int, int] | None, pitch: Any) -> None:
        """Into the block where the builder stands: the sums, from zero to their places in `out`.

        Args:
            x: tiles of x, one for each block. columns: the first of two tiles. rest: the same for what depth is left.
            pitch: bytes of a row of `out`.
        """
        b = self.builder
        each = _number(_WORDS)
        for tile in range(2 * blocks):
            self.tiles.zero(tile)
        whole = b.mul(b.udiv(self.words, each), each)
        before, head, body, behind = b.block, *(b.append_basic_block(name) for name in ("head", "body", "behind"))
        b.branch(head)
        b.position_at_end(head)
        at = b.phi(_INDEX)
        at.add_incoming(_number(0), before)
        b.cbranch(b.icmp_signed("<", at, whole), body, behind)
        b.position_at_end(body)
        self._call_ahead(at)
        self._step(at, x, columns)
        at.add_incoming(b.add(at, each), b.block)
        b.branch(head)
        b.position_at_end(behind)
        if rest is not None:
            with b.if_then(b.icmp_signed("<", whole, self.words)):
                self._step(whole, rest[:1], rest[1])
        for tile in range(2 * blocks):
            block, side = divmod(tile, 2)
            row = b.mul(b.mul(self.rows, _number(block)), b.udiv(pitch, _number(4)))
            self.tiles.store(tile, self.out, b.add(row, _number(side * _WORDS)), pitch)

    def _step(self, at: Any, x: tuple[int, ...], columns: int) -> None:
        b = self.builder
        column = self.builder.mul(at, _number(WIDTH))
        for side in (0, 1):
            self.tiles.load(columns + side, self.weights, b.add(column, _number(side * _WORDS)), _number(4 * WIDTH))
        for part in range(PARTS):
            for block, tile in enumerate(x):
                behind = b.mul(self.part, _number(block * PARTS + part))
                self.tiles.load(tile, self.x, b.add(at, behind), self.deep)
                for side in (0, 1):
                    self.tiles.add_product(2 * block + side, tile, columns + side)

    def _call_ahead(self, at: Any) -> None:
        """Call from memory what comes four steps later."""
        b = self.builder
        word = ir.IntType(32)
        name = "llvm.prefetch.p0"
        kinds = [self.tiles.pointer, word, word, word]
        known = b.module.globals.get(name)
        called = known or ir.Function(b.module, ir.FunctionType(ir.VoidType(), kinds), name)
        start = b.mul(b.add(at, _number(4 * _WORDS)), _number(WIDTH))
        for line in range(_WORDS * WIDTH * 4 // BYTES):
            place = b.gep(self.weights, [b.add(start, _number(line * _WORDS))])
            b.call(called, [b.bitcast(place, self.tiles.pointer), *(ir.Constant(word, n) for n in (0, 3, 1))])


if kernels.AVAILABLE:

    @intrinsic
    def tile_sums(
        typing: Any, weights: Any, at: Any, words: Any, x: Any, x_at: Any, rows: Any, both: Any, out: Any, out_at: Any,
        columns: Any,
    ) -> Any:  # fmt: skip
        """out[out_at + row * columns + column] = sum over depth of x times the panel that begins at weights[at], for a block
        of so many rows, or for `both` it and the next one.

        Args:
            weights: uint32, two bfloat16 in each. words: of a column.
            x: float32 in three parts of bfloat16: words of the depth of each row, one row behind the other, part behind
                part, block behind block; from x_at on.
        """

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            weights, x, out = (
                builder.gep(context.make_array(kinds[one])(context, builder, args[one]).data, [args[start]])
                for one, start in ((0, 1), (3, 4), (7, 8))
            )
            panel = _Panel(builder, (weights, x, out), (args[2], args[5]))
            pitch = builder.mul(args[9], _number(4))
            whole = builder.icmp_signed("==", builder.urem(args[2], _number(_WORDS)), _number(0))
            with builder.if_else(whole) as (fills, leaves):
                with fills, builder.if_else(args[6]) as (two, one):
                    with two:
                        panel.write(2, (4, 5), 6, None, pitch)
                    with one:
                        panel.write(1, (4,), 6, None, pitch)
                with leaves:
                    panel.write(1, (2,), 3, (5, 6), pitch)
            return context.get_dummy_value()

        sizes = types.int64
        return types.void(weights, sizes, sizes, x, sizes, sizes, types.boolean, out, sizes, sizes), code

    @intrinsic
    def tiles_begun(typing: Any, shape: Any) -> Any:
        """Tell the processor what tiles look like: `shape` begins with 64 bytes that say so."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            tiles = _Tiles(builder)
            tiles.call("ldtilecfg", builder.bitcast(data, tiles.pointer))
            return context.get_dummy_value()

        return types.void(shape), code

    @intrinsic
    def tiles_done(typing: Any) -> Any:
        """Give the room of the tiles back, so that nobody has to keep it."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Tiles(builder).call("tilerelease")
            return context.get_dummy_value()

        return types.void(), code


@compiled
def blocks(rows: int) -> tuple[int, int]:
    """Into how many blocks, of how many rows each, rows are cut. The last one may begin before the one ahead of it ends."""
    count = (rows + ROWS - 1) // ROWS
    return count, (rows + count - 1) // count


@compiled
def _start(block: int, each: int, rows: int) -> int:
    return min(block * each, rows - each)


@compiled
def _room(rows: int, words: int) -> Array:
    """For rows laid out for tiles. In front stands what tiles look like (`_Panel`)."""
    count, each = blocks(rows)
    size = _SHAPE + count * each * words * PARTS
    room = np.empty(size + BYTES // 4, dtype=np.uint32)
    start = -room.ctypes.data % BYTES // 4
    laid = room[start : start + size]
    laid[:_SHAPE] = 0
    shape = laid[:_SHAPE].view(np.uint8)
    left = words % _WORDS
    shape[0] = 1
    for tile in range(8):
        wide = BYTES
        high = each
        if tile >= 6 or (left > 0 and tile in (3, 4)):
            high = left if left > 0 and tile >= 6 else _WORDS
        if left > 0 and tile == 5:
            wide = 4 * left
        shape[16 + 2 * tile] = wide
        shape[48 + tile] = high
    return laid


@compiled
def laid_out(x: Array, panels: Array) -> Array:
    """Rows of float32 as the sum of three bfloat16, which is exact; see `tile_sums`."""
    rows, depth = x.shape
    words = depth // 2
    (count, each) = blocks(rows)
    laid = _room(rows, words)
    high = np.uint32(0xFFFF0000)
    rest = np.empty(depth, dtype=np.float32)
    cut = np.empty(depth, dtype=np.uint32)
    bits = rest.view(np.uint32)
    known = cut.view(np.float32)
    for block in range(count):
        start = _start(block, each, rows)
        at = _SHAPE + block * each * words * PARTS
        for row in range(each):
            rest[:] = x[start + row]
            for part in range(PARTS):
                goal = laid[at + (part * each + row) * words : at + (part * each + row + 1) * words]
                for step in range(depth):
                    cut[step] = bits[step] & high
                for word in range(words):
                    goal[word] = (cut[2 * word] >> np.uint32(16)) | cut[2 * word + 1]
                for step in range(depth):
                    rest[step] -= known[step]
    return laid


@compiled
def panel_times(panels: Array, panel: int, laid: Array, rows: int, depth: int, out: Array) -> None:
    """Into `out` the products of all rows with one panel, for processors that know what tiles look like."""
    words = depth // 2
    (count, each) = blocks(rows)
    columns = out.shape[1]
    block = 0
    flat = panels.reshape(-1).view(np.uint32)
    result = out.reshape(-1)
    while block < count:
        start = _start(block, each, rows)
        both = words % _WORDS == 0 and block + 1 < count and _start(block + 1, each, rows) == start + each
        tile_sums(
            flat, panel * words * WIDTH, words, laid, _SHAPE + block * each * words * PARTS, each, both, result,
            start * columns + panel * WIDTH, columns,
        )  # fmt: skip
        block += 2 if both else 1
