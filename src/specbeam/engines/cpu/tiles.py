"""LLVM code for numba: products of sixteen rows at a time with the tile registers of Intel's AMX.

A tile holds 16 rows of 64 bytes. One instruction adds the products of 16 rows of x with 16 columns of the matrix, over 32
steps of depth in bfloat16, to 16 x 16 sums: sixteen times the work of a vector instruction. A float32 is exactly the sum of
three bfloat16, so three such instructions multiply float32 rows with a bfloat16 matrix. The result differs from that of
vector instructions only by the order of the sums, by terms below 1e-33, because tiles treat denormals as zero, and by
infinities, which become NaN. Panels of bfloat16 already have the layout of tiles: a word holds the two steps of a
column that are multiplied together.

Another instruction multiplies bytes over 64 steps of depth and adds up integers, so the products of a matrix rounded to 8
bits are the same with and without tiles.
"""

import ctypes
import os
import platform
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from specbeam.core import compiling
from specbeam.core.compiling.compiler import Array, compiled
from specbeam.core.compiling.uncounted import compiled_without_counts
from specbeam.engines.cpu.llvm import TO_FIRST_CACHE, CodeWriter, Value, numbers_in, places_in, spread_out
from specbeam.engines.cpu.rounding import BYTES_PER_WORD, rounded_row
from specbeam.engines.cpu.sums import WIDTH

# of a tile
ROWS = 16
BYTES = 64
_WORDS = BYTES // 4
_TILE_WORDS = ROWS * _WORDS
PARTS = 3  # of a float32: three bfloat16 hold all of its 24 bits
_SHAPE = 16  # words of the configuration of tile shapes
# Linux: the number of the system call arch_prctl, its ARCH_REQ_XCOMP_PERM, and the state component of tiles
_ARCH_PRCTL = 158
_ASK_FOR_STATE = 0x1023
_TILE_DATA = 18

if compiling.AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    from specbeam.core.compiling.processor import features
    from specbeam.engines.cpu.llvm import FLOAT, WORD

    _FEATURES = features()
    _FLOATS = ir.VectorType(FLOAT, _WORDS)
    _INTEGERS = ir.VectorType(WORD, _WORDS)
else:
    _FEATURES = frozenset()
    write_tile_sums: Any = None  # never called without numba
    begin_tiles: Any = None
    release_tiles: Any = None


class BlockPlaces(NamedTuple):
    """The places of the numbers of `write_tile_sums` in flat arrays: indices of first words, and sizes."""

    weights: Any  # index of the panel
    words: Any  # of a column
    x: Any  # index of the block
    rows: Any  # of a block
    scales: Any  # index, in x, of the scales of these rows, if they are bytes
    out: Any  # index of the result
    columns: Any  # of the result


def _permitted() -> bool:
    """Ask Linux for permission to use tiles, which enlarge the state of a thread; return whether it is granted."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0


@cache
def available() -> bool:
    """Return whether this process may use tiles. The environment variable `SPECBEAM_TILES=off` forbids them."""
    if os.environ.get("SPECBEAM_TILES") == "off":
        return False
    return WIDTH == 2 * _WORDS and {"amx-tile", "amx-bf16", "amx-int8"} <= _FEATURES and _permitted()


class _Tiles(CodeWriter):
    """A writer of instructions on tiles."""

    def on_tiles(self, name: str, *given: Any) -> None:
        """Write an instruction; integer operands are numbers of tiles."""
        operands = [ir.Constant(ir.IntType(8), one) if isinstance(one, int) else one for one in given]
        self.call(f"llvm.x86.{name}", ir.VoidType(), *operands)

    def load_tile(self, number: int, array: Any, word: Value, pitch: Value) -> None:
        """Load a tile from an array of words, starting at index `word`, with rows `pitch` bytes apart."""
        self.on_tiles("tileloadd64", number, self.place(array, word, ir.IntType(8)), pitch.register)

    def store_tile(self, number: int, array: Any, word: Value, pitch: Value) -> None:
        self.on_tiles("tilestored64", number, self.place(array, word, ir.IntType(8)), pitch.register)


class _Panel(_Tiles):
    """A writer of the code for the products of a panel with one block of rows of x, or with two; see `write_tile_sums`.

    If the depth is a multiple of a tile's, tiles 0 to 3 hold sums (two for each block), 4 and 5 x, 6 and 7 columns.
    Otherwise 0 and 1 hold sums, 2 x, 3 and 4 columns; 5 holds x, 6 and 7 columns for the rest of the depth.
    """

    parts = PARTS  # of a row of x
    product = "tdpbf16ps"  # the instruction that adds the products of two tiles to a third

    def __init__(self, builder: Any, arrays: tuple[Any, Any, Any, Any], sizes: tuple[Any, Any]) -> None:
        super().__init__(builder)
        self.weights, self.x, self.scales, self.out = arrays
        self.words, self.rows = (Value(builder, size) for size in sizes)
        self.deep = self.words * 4
        self.part = self.words * self.rows

    def write(self, blocks: int, x: tuple[int, ...], columns: int, rest: tuple[int, int] | None, pitch: Any) -> None:
        """Write the code at the builder's position: all sums, from zero to their places in `out`.

        Args:
            x: numbers of the tiles of x, one for each block.
            columns: number of the first of two tiles of columns.
            rest: the tile of x and the first tile of columns for the depth beyond whole tiles; None: there is none.
            pitch: bytes of a row of `out`.
        """
        b = self.builder
        for tile in range(2 * blocks):
            self.on_tiles("tilezero", tile)
        whole = self.words // _WORDS * _WORDS
        with b.if_then(self.index(0) < whole), self.rounds(whole, _WORDS) as loop:
            self._prefetch_columns(loop.at)
            self._step(loop.at, x, columns)
        if rest is not None:
            with b.if_then(whole < self.words):
                self._step(whole, rest[:1], rest[1])
        self._finish(blocks, Value(b, pitch))

    def _finish(self, blocks: int, pitch: Value) -> None:
        """Write the code that stores the sums in `out`."""
        for tile in range(2 * blocks):
            block, side = divmod(tile, 2)
            row = self.rows * block * (pitch // 4)
            self.store_tile(tile, self.out, row + side * _WORDS, pitch)

    def _step(self, at: Value, x: tuple[int, ...], columns: int) -> None:
        """Write the code that adds the products of one tile's depth, from word `at` on, to the sums."""
        column = at * WIDTH
        for side in (0, 1):
            self.load_tile(columns + side, self.weights, column + side * _WORDS, self.index(4 * WIDTH))
        for part in range(self.parts):
            for block, tile in enumerate(x):
                self.load_tile(tile, self.x, at + self.part * (block * self.parts + part), self.deep)
                for side in (0, 1):
                    self.on_tiles(self.product, 2 * block + side, tile, columns + side)

    def _prefetch_columns(self, at: Value) -> None:
        start = (at + 4 * _WORDS) * WIDTH
        for line in range(_WORDS * WIDTH * 4 // BYTES):
            self.prefetch(self.weights, start + line * _WORDS, TO_FIRST_CACHE)


class _PanelOfBytes(_Panel):
    """A `_Panel` of int8, for rows of uint8: the sums are integers, converted to float32 at the end.

    The columns are followed by their scales, and by the contribution of the offset of x to their sums.
    """

    parts = 1
    product = "tdpbusd"

    def _finish(self, blocks: int, pitch: Value) -> None:
        """Write the code that converts the sums to results, in a contiguous buffer.

        With some strides, all rows of `out` would map to the same few sets of the first-level cache.
        """
        b = self.builder
        columns = self.words * WIDTH
        scales = [self.loaded(self.weights, columns + side * _WORDS, _FLOATS) for side in (0, 1)]
        columns = columns + WIDTH
        offsets = [self.loaded(self.weights, columns + side * _WORDS, _INTEGERS) for side in (0, 1)]
        width = pitch // 4
        with b.goto_entry_block():
            sums = b.alloca(WORD, 2 * blocks * _TILE_WORDS)
            sums.align = BYTES
        for tile in range(2 * blocks):
            self.store_tile(tile, sums, self.index(tile * _TILE_WORDS), self.index(BYTES))
        for block in range(blocks):
            with self.rounds(self.rows, 1) as loop:
                row = self.rows * block + loop.at
                scale = spread_out(b, self.loaded(self.scales, row, FLOAT), _WORDS)
                for side in (0, 1):
                    place = loop.at * _WORDS + (2 * block + side) * _TILE_WORDS
                    whole = self.loaded(sums, place, _INTEGERS) - offsets[side]
                    result = whole.in_floats(_FLOATS) * scales[side] * scale
                    self.store(result, self.out, row * width + side * _WORDS)


if compiling.AVAILABLE:

    @intrinsic
    def write_tile_sums(typing: Any, weights: Any, x: Any, out: Any, both: Any, places: Any) -> Any:
        """Write the products of a block of rows of x with one panel to `out`; if `both`, of the next block too.

        out[out + row * columns + column] = sum over depth of x times the panel that begins at weights[weights], with the
        numbers in `places`, see `BlockPlaces`.

        Args:
            weights: uint32, two bfloat16 in each; or int32, four int8 in each, with the scales and offsets of the columns.
            x: float32 in three parts of bfloat16, [blocks, parts, rows, words of the depth]; or uint8 in one.
        """

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kinds = signature.args
            where = BlockPlaces(*numbers_in(context, builder, kinds[4], args[4]))
            starts = ((0, where.weights), (1, where.x), (1, where.scales), (2, where.out))
            weights, x, scales, out = places_in(context, builder, signature, args, starts)
            kind = _PanelOfBytes if kinds[0].dtype == types.int32 else _Panel
            panel = kind(builder, (weights, x, scales, out), (where.words, where.rows))
            pitch = (Value(builder, where.columns) * 4).register
            left = Value(builder, where.words) % _WORDS
            with builder.if_else(left < 1) as (fills, leaves):
                with fills, builder.if_else(args[3]) as (two, one):
                    with two:
                        panel.write(2, (4, 5), 6, None, pitch)
                    with one:
                        panel.write(1, (4,), 6, None, pitch)
                with leaves:
                    panel.write(1, (2,), 3, (5, 6), pitch)
            return context.get_dummy_value()

        return types.void(weights, x, out, types.boolean, places), code

    @intrinsic
    def begin_tiles(typing: Any, shape: Any) -> Any:
        """Configure the shapes of the tiles with the first 64 bytes of the array `shape`."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            _Tiles(builder).on_tiles("ldtilecfg", builder.bitcast(data, ir.IntType(8).as_pointer()))
            return context.get_dummy_value()

        return types.void(shape), code

    @intrinsic
    def release_tiles(typing: Any) -> Any:
        """Release the tiles, so that the operating system does not save them when it switches threads."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _Tiles(builder).on_tiles("tilerelease")
            return context.get_dummy_value()

        return types.void(), code


@compiled_without_counts
def blocks(rows: int) -> tuple[int, int]:
    """Return the number of blocks of rows, and the number of rows of each.

    The last block may overlap the block before it.
    """
    count = (rows + ROWS - 1) // ROWS
    return count, (rows + count - 1) // count


@compiled
def piece_count(rows: int) -> int:
    """Return the number of pieces of rows: two blocks each, which are multiplied together."""
    count, _ = blocks(rows)
    return (count + 1) // 2


@compiled_without_counts
def _start(block: int, each: int, rows: int) -> int:
    return min(block * each, rows - each)


@compiled
def _room(rows: int, words: int, row_words: int) -> Array:
    """Return a buffer for rows packed for tiles, after the configuration of the tiles (see `_Panel`).

    Args:
        words: of the depth.
        row_words: words of a packed row, including its scale.
    """
    count, each = blocks(rows)
    size = _SHAPE + count * each * row_words
    room = np.empty(size + BYTES // 4, dtype=np.uint32)
    start = -room.ctypes.data % BYTES // 4
    packed = room[start : start + size]
    packed[:_SHAPE] = 0
    shape = packed[:_SHAPE].view(np.uint8)
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
    return packed


@compiled
def packed_rows(x: Array, panels: Array) -> Array:
    """Return float32 rows split exactly into three bfloat16 parts, in the layout of `write_tile_sums`."""
    rows, depth = x.shape
    words = depth // 2
    (count, each) = blocks(rows)
    packed = _room(rows, words, words * PARTS)
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
                goal = packed[at + (part * each + row) * words : at + (part * each + row + 1) * words]
                for step in range(depth):
                    cut[step] = bits[step] & high
                for word in range(words):
                    goal[word] = (cut[2 * word] >> np.uint32(16)) | cut[2 * word + 1]
                for step in range(depth):
                    rest[step] -= known[step]
    return packed


@compiled_without_counts
def _multiply_blocks(
    weights: Array, panel: int, words: int, parts: int, packed: Array, rows: int, out: Array, piece: int
) -> None:
    """Write the products of a piece of the rows, block by block, with one panel to its columns of `out`.

    Args:
        weights: [panels, words], all of them.
        panel: its number.
        words: of the depth.
        parts: of a row of x, see `_Panel`.
    """
    (count, each) = blocks(rows)
    columns = out.shape[1]
    result = out.reshape(-1)
    block_words = parts * each * words
    scales_at = _SHAPE + count * block_words
    block = 2 * piece
    stop = min(block + 2, count)
    while block < stop:
        start = _start(block, each, rows)
        both = words % _WORDS == 0 and block + 1 < stop and _start(block + 1, each, rows) == start + each
        first = _SHAPE + block * block_words
        goal = start * columns + panel * WIDTH
        scales = scales_at + block * each
        places = BlockPlaces(panel * weights.shape[1], words, first, each, scales, goal, columns)
        write_tile_sums(weights.reshape(-1), packed, result, both, places)
        block += 2 if both else 1


@compiled_without_counts
def multiply_panel(panels: Array, panel: int, packed: Array, rows: int, depth: int, out: Array, piece: int) -> None:
    """Write the products of a piece of the rows with one panel to its columns of `out`; call `begin_tiles` before."""
    _multiply_blocks(panels.view(np.uint32), panel, depth // 2, PARTS, packed, rows, out, piece)


@compiled
def packed_bytes(x: Array, panels: Array) -> Array:
    """Return float32 rows rounded to uint8 around 128, four steps of depth in a word, in the layout of `write_tile_sums`.

    The scales of the rows follow after all blocks. For the numbers see `rounded_row`.
    """
    rows, depth = x.shape
    words = depth // BYTES_PER_WORD
    packed = _room(rows, words, words + 1)
    _pack_bytes(x, packed)
    return packed


@compiled_without_counts
def _pack_bytes(x: Array, packed: Array) -> None:
    """Write the rows and scales of `packed_bytes` after the configuration of the tiles."""
    rows, depth = x.shape
    words = depth // BYTES_PER_WORD
    (count, each) = blocks(rows)
    scales = packed[_SHAPE + count * each * words :].view(np.float32)
    numbers = packed[_SHAPE : _SHAPE + count * each * words].view(np.uint8)
    for block in range(count):
        start = _start(block, each, rows)
        for row in range(each):
            place = block * each + row
            scales[place] = rounded_row(x[start + row], numbers[place * depth : (place + 1) * depth])


@compiled_without_counts
def multiply_panel_of_bytes(
    panels: Array, panel: int, packed: Array, rows: int, depth: int, out: Array, piece: int
) -> None:
    """Write the products of a piece of the rows with one panel to its columns of `out`; call `begin_tiles` before."""
    _multiply_blocks(panels.view(np.int32), panel, depth // BYTES_PER_WORD, 1, packed, rows, out, piece)
