"""Products of a few rows with a large matrix, in the time of reading the matrix once.

In libraries a float32 product of a few rows (from two to eight, depending on the library) takes twice as long as that
of one row. Here a matrix is laid out once in panels of a few columns. A panel is streamed through registers, while the
sums of up to `MOST` rows stay in other registers (engines/cpu/sums.py).

Weights that bfloat16 represents exactly, as in most checkpoints, are stored in bfloat16: they are read in half the time,
and the products are the same. float16 checkpoints are stored in float16. With tile registers, sixteen rows are multiplied
at once (engines/cpu/tiles.py), which pays for matrices too large for the processor's caches. Weights rounded to 8 bits are
read in a quarter of the time; weights of 4 bits, in groups with a scale each, in a seventh. For both, each row of x is
rounded to 8 bits, relative to its own largest number, which takes a quarter of the arithmetic; so it is for weights of two
bits, as DB-LLM trains them (engines/cpu/binary_panels.py). 4-bit weights of quantised checkpoints, and the blocks of GGUF
files, are exact, and rows are not rounded (engines/cpu/nibbles.py, engines/cpu/block_panels.py).

The functions above `_source_of` are declarations only: numba chooses a compiled form by the dtype of the panels.
"""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Shaped

from specbeam.core import compiling
from specbeam.core.compiling.atomics import carray, pointer_to
from specbeam.core.compiling.compiler import compiled, compiled_only
from specbeam.core.compiling.uncounted import chosen_without_counts, compiled_without_counts
from specbeam.core.threads import allowed_threads
from specbeam.engines.arrays import AnyArray, Dense, Panels
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.binary_panels import WORDS_OF_GROUP, transpose_bits, write_binaries
from specbeam.engines.cpu.block_panels import blocks_as_float32, rounded_blocks, write_blocks
from specbeam.engines.cpu.cache_words import round_to_bfloat16
from specbeam.engines.cpu.embedding import widen_halves
from specbeam.engines.cpu.laying import lay_out_bytes, lay_out_groups, lay_out_words
from specbeam.engines.cpu.nibbles import nibbles_as_float32, rounded_nibbles, write_nibbles
from specbeam.engines.cpu.rounding import BYTES_PER_WORD, GROUP, ZERO, rounded_row
from specbeam.engines.cpu.shares import (
    COLUMNS,
    COUNT,
    DEPTH,
    LENGTH,
    OUT,
    PACKED,
    PANELS,
    ROWS,
    SIZE,
    THREADS,
    has_form,
    memory_of,
    part_of,
    share_out,
    shares_of,
)
from specbeam.engines.cpu.sums import DOT_OF_BYTES, MOST, STEP, WIDTH, PanelPlaces, write_sums
from specbeam.engines.dual_binary import BINARY_GROUP, rounded_binaries

if compiling.AVAILABLE:
    from numba import types

    from specbeam.core.compiling.compiler import chosen_for

LINE = 64  # bytes of a cache line
SIGN_OF_NIBBLES = 8  # offset of 4-bit numbers in panels, where they are unsigned
_UNPACKED_FROM = 16  # number of parts of rows from which a panel is unpacked to float32 once instead of for each part
_HELD_BYTES = 1 << 20  # bytes of panels that stay in a processor's cache while the pieces of many rows are multiplied
_TILES_FROM = 6  # number of rounded rows from which tiles are faster than vectors
_SHARED_FROM = 150_000  # size of the panels from which threads share a product

_LAID_OUT_TOGETHER = 1 << 22  # number of weights that are laid out at a time

Kind = Literal[
    "float32",
    "bfloat16",
    "float16",
    "bfloat16 pairs",
    "tiles",
    "int8",
    "int8 tiles",
    "int4",
    "nibbles",
    "blocks of 4 bits",
    "blocks of 8 bits",
    "dual binary",
]
BLOCK_KINDS: tuple[Kind, ...] = ("blocks of 4 bits", "blocks of 8 bits")  # their matrices are `BlockNumbers`
Array = Any  # numba infers the types


class Words(NamedTuple):
    """The memory layout of a kind of panels."""

    stored: Any  # dtype of the words that are written, of 2 or 4 bytes
    read_as: Any  # dtype of the panels, by which numba chooses the compiled form of a product
    steps: int  # steps of depth that are written together
    words: int  # words of a column for these steps
    after: int = 0  # further words of a column, after all steps
    halves: int = 0  # 16-bit numbers of a column after these steps, two columns in a word

    def of_panel(self, depth: int) -> int:
        """Return the number of words that are written for a panel."""
        together = self.words * WIDTH + self.halves * WIDTH // 2
        return depth // self.steps * together + self.after * WIDTH


_WORDS: dict[Kind, Words] = {
    "float32": Words(np.float32, np.float32, 1, 1),
    "bfloat16": Words(np.uint32, np.uint32, 2, 1),
    "float16": Words(np.uint16, np.uint8, 1, 1),
    "bfloat16 pairs": Words(np.uint32, np.complex64, 2, 1),
    "tiles": Words(np.uint32, np.uint16, 2, 1),
    "int8": Words(np.int32, np.int32, BYTES_PER_WORD, 1, after=2),
    "int8 tiles": Words(np.int32, np.int8, BYTES_PER_WORD, 1, after=2),
    "int4": Words(np.int32, np.int16, GROUP, GROUP // 8, halves=1),
    "nibbles": Words(np.int32, np.uint64, GROUP, GROUP // 8 + 1),
    "blocks of 4 bits": Words(np.int32, np.int64, GROUP, GROUP // 8 + 2),
    "blocks of 8 bits": Words(np.int32, np.float64, GROUP, GROUP // BYTES_PER_WORD + 2),
    "dual binary": Words(np.int32, np.complex128, BINARY_GROUP, WORDS_OF_GROUP),
}


@compiled_only
def packed_rows(x: Array, panels: Array) -> Array:
    """Return x[rows, depth] in the layout that `multiply_panel` takes: for tiles, or transposed part by part."""


@compiled_only
def begin_products(packed: Array, panels: Array) -> None:
    """Prepare the processor for `multiply_panel`, in the current thread."""


@compiled_only
def end_products(panels: Array) -> None:
    """Undo `begin_products`."""


@compiled_only
def piece_count(panels: Array, rows: int) -> Any:
    """Return the number of pieces of rows; a piece fits the processor's cache along with some panels."""


@compiled_only
def multiply_panel(panels: Array, panel: int, packed: Array, rows: int, depth: int, out: Array, piece: int) -> None:
    """Write the products of a piece of the rows with one panel to its columns of `out`; see `piece_count`."""


@compiled_only
def write_transposed(x: Array, start: int, rows: int, transposed: Array) -> None:
    """Write `rows` rows of x, float32[all rows, depth], from `start` on, to `transposed` as [depth, rows].

    If `transposed` is uint16, numbers are rounded to bfloat16, two steps of depth side by side, the earlier one first.
    If it is int32, numbers are rounded to uint8 around 128, four steps of depth in a word, followed by the scale
    of each row. If it is uint32, they are int8, and after the scales comes -8 times the sum of the numbers for each group
    and row. If it is int16, they are split into their bits; see `binary_panels.transpose_bits`.
    """


@compiled_only
def scratch_for(panels: Array, rows: int, depth: int) -> Array:
    """Return a buffer for this number of transposed rows, in the dtype required by the panels."""


@compiled_only
def for_few_rows(panels: Array) -> Array:
    """Return the panels for products of fewer rows than `_TILES_FROM`, in which vectors multiply bytes instead of tiles."""


@compiled_only
def unpacked(panel: Array, depth: int) -> Array:
    """Return the numbers of one panel as float32; a panel of rounded numbers is returned unchanged."""


@compiled_only
def form_of(panels: Array) -> Any:
    """Return the number of the form of products with these panels; see `FORM_OF`."""


def _source_of(function: Any) -> Any:
    """Return the source of a function for numba, because tests wrap functions into type checks."""
    return inspect.unwrap(function)


if compiling.AVAILABLE:
    # How rows are packed and multiplied by tiles, by the dtype of the panels.
    _BY_TILES = {
        types.uint16: (tiles.packed_rows, tiles.multiply_panel),
        types.int8: (tiles.packed_bytes, tiles.multiply_panel_of_bytes),
    }

    # Panels that vectors multiply with rounded rows.
    _ROUNDED = (types.int32, types.int16, types.complex64, types.complex128)

    @chosen_for(packed_rows)
    def _compiled_packed_rows(x: Any, panels: Any) -> Any:
        pack, _ = _BY_TILES.get(panels.dtype, (_transposed_parts, None))
        return _source_of(lambda x, panels: pack(x, panels))

    @chosen_for(begin_products)
    def _compiled_begin_products(packed: Any, panels: Any) -> Any:
        return _source_of(_begin_tiles if panels.dtype in _BY_TILES else _begin_nothing)

    @chosen_for(end_products)
    def _compiled_end_products(panels: Any) -> Any:
        return _source_of(_release_tiles if panels.dtype in _BY_TILES else _end_nothing)

    @chosen_for(piece_count)
    def _compiled_piece_count(panels: Any, rows: Any) -> Any:
        count = tiles.piece_count if panels.dtype in _BY_TILES else _one_piece
        return _source_of(lambda panels, rows: count(rows))

    @chosen_without_counts(multiply_panel)
    def _compiled_multiply_panel(
        panels: Any, panel: Any, packed: Any, rows: Any, depth: Any, out: Any, piece: Any
    ) -> Any:
        _, by = _BY_TILES.get(panels.dtype, (None, _multiply_panel_in_parts))
        return _source_of(
            lambda panels, panel, packed, rows, depth, out, piece: by(panels, panel, packed, rows, depth, out, piece)
        )

    @chosen_for(write_transposed)
    def _compiled_write_transposed(x: Any, start: Any, rows: Any, transposed: Any) -> Any:
        by_kind = {
            types.int32: _write_transposed_bytes,
            types.uint32: _write_transposed_signed,
            types.uint16: _write_transposed_pairs,
            types.int16: _write_transposed_bits,
        }
        return _source_of(by_kind.get(transposed.dtype, _write_transposed_floats))

    @chosen_for(scratch_for)
    def _compiled_scratch_for(panels: Any, rows: Any, depth: Any) -> Any:
        of_bits = _scratch_for_signed if DOT_OF_BYTES else _scratch_for_bits
        by_kind = {
            types.int32: _scratch_for_bytes,
            types.int16: _scratch_for_signed,
            types.complex64: _scratch_for_pairs,
            types.complex128: of_bits,
        }
        return _source_of(by_kind.get(panels.dtype, _scratch_for_floats))

    @chosen_for(for_few_rows)
    def _compiled_for_few_rows(panels: Any) -> Any:
        return _source_of(_in_words if panels.dtype == types.int8 else _as_they_are)

    @chosen_for(form_of)
    def _compiled_form_of(panels: Any) -> Any:
        number = FORM_OF[panels.dtype.name]
        return _source_of(lambda panels: number)

    @chosen_for(unpacked)
    def _compiled_unpacked(panel: Any, depth: Any) -> Any:
        if panel.dtype == types.uint8:
            return _source_of(_halves_as_float32)
        if panel.dtype == types.uint64:
            return _source_of(lambda panel, depth: nibbles_as_float32(panel, depth))
        if panel.dtype in (types.int64, types.float64):
            return _source_of(lambda panel, depth: blocks_as_float32(panel, depth))
        return _source_of(_unchanged if panel.dtype in _ROUNDED else _as_float32)


def _scratch_for_floats(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * depth, dtype=np.float32)


def _scratch_for_bytes(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * (depth // STEP + 1), dtype=np.int32)


def _scratch_for_signed(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * (depth // STEP + 1 + depth // GROUP), dtype=np.uint32)


def _scratch_for_pairs(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * depth, dtype=np.uint16)


def _scratch_for_bits(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * (depth // STEP + 1), dtype=np.uint32).view(np.int16)


def _write_transposed_bits(x: Array, start: int, rows: int, transposed: Array) -> None:
    transpose_bits(x, start, rows, transposed.view(np.uint32), np.empty(x.shape[1], dtype=np.uint8))


def _unchanged(panel: Array, depth: int) -> Array:
    return panel


def _as_they_are(panels: Array) -> Array:
    return panels


def _in_words(panels: Array) -> Array:
    return panels.view(np.int32)


def _write_transposed_floats(x: Array, start: int, rows: int, transposed: Array) -> None:
    _transpose_floats(x, start, rows, transposed)


@compiled_without_counts
def _transpose_floats(x: Array, start: int, rows: int, transposed: Array) -> None:
    """Write transposed float32 rows; see `write_transposed`."""
    steps = transposed[: rows * x.shape[1]].reshape(x.shape[1], rows)
    for row in range(rows):
        column = steps[:, row]
        source = x[start + row]
        for step in range(len(column)):
            column[step] = source[step]


def _write_transposed_bytes(x: Array, start: int, rows: int, transposed: Array) -> None:
    _transpose_bytes(x, start, rows, transposed, np.empty(x.shape[1], dtype=np.uint8))


@compiled_without_counts
def _transpose_bytes(x: Array, start: int, rows: int, transposed: Array, numbers: Array) -> None:
    """Write transposed rows as uint8; see `write_transposed`. `numbers`, uint8[depth], is overwritten."""
    words = x.shape[1] // STEP
    scales = transposed[rows * words : rows * (words + 1)].view(np.float32)
    in_words = numbers.view(np.int32)
    for row in range(rows):
        scales[row] = rounded_row(x[start + row], numbers)
        for word in range(words):
            transposed[word * rows + row] = in_words[word]


def _write_transposed_signed(x: Array, start: int, rows: int, transposed: Array) -> None:
    depth = x.shape[1]
    words = depth // STEP
    scales = transposed[rows * words : rows * (words + 1)].view(np.float32)
    sums = transposed[rows * (words + 1) :].view(np.int32)
    numbers = np.empty(depth, dtype=np.uint8)
    in_words = numbers.view(np.uint32)
    for row in range(rows):
        scales[row] = rounded_row(x[start + row], numbers)
        for group in range(depth // GROUP):
            total = np.int64(0)
            for place in range(group * GROUP, (group + 1) * GROUP):
                total += np.int64(numbers[place]) - ZERO
            sums[group * rows + row] = -SIGN_OF_NIBBLES * total
        for word in range(words):
            transposed[word * rows + row] = in_words[word] ^ np.uint32(0x80808080)


def _write_transposed_pairs(x: Array, start: int, rows: int, transposed: Array) -> None:
    _transpose_pairs(x, start, rows, transposed, np.empty(x.shape[1], dtype=np.uint16))


@compiled_without_counts
def _transpose_pairs(x: Array, start: int, rows: int, transposed: Array, numbers: Array) -> None:
    """Write transposed rows as bfloat16; see `write_transposed`. `numbers`, uint16[depth], is overwritten."""
    words = x.shape[1] // 2
    pairs = transposed.view(np.uint32)
    in_words = numbers.view(np.uint32)
    for row in range(rows):
        round_to_bfloat16(x[start + row], numbers)
        for word in range(words):
            pairs[word * rows + row] = in_words[word]


def _as_float32(panel: Array, depth: int) -> Array:
    if len(panel) == depth * WIDTH:
        return panel.view(np.float32)
    packed = panel.view(np.uint32).reshape(depth // 2, WIDTH)
    words = np.empty((depth, WIDTH), dtype=np.uint32)
    for pair in range(depth // 2):
        for column in range(WIDTH):
            words[2 * pair, column] = packed[pair, column] << np.uint32(16)
            words[2 * pair + 1, column] = packed[pair, column] & np.uint32(0xFFFF0000)
    return words.reshape(-1).view(np.float32)


def _halves_as_float32(panel: Array, depth: int) -> Array:
    halves = panel.view(np.uint16)
    found = np.empty(len(halves), dtype=np.float32)
    widen_halves(halves, found)
    return found


@compiled
def part_count(rows: int) -> int:
    """Return the number of parts of rows: parts are of nearly equal size, at most `MOST` rows."""
    return (rows + MOST - 1) // MOST


@compiled
def part_of_rows(part: int, parts: int, rows: int) -> tuple[int, int]:
    """Return the first row of a part, and its number of rows; see `part_count`."""
    start = part * rows // parts
    return start, (part + 1) * rows // parts - start


@compiled
def _transposed_parts(x: Array, panels: Array) -> Array:
    """Return all rows, transposed part by part."""
    rows, depth = x.shape
    count = part_count(rows)
    transposed = scratch_for(panels, rows, depth)
    each = len(transposed) // rows  # words of a row
    for part in range(count):
        start, here = part_of_rows(part, count, rows)
        write_transposed(x, start, here, transposed[start * each :])
    return transposed


@compiled
def _one_piece(rows: int) -> int:
    """Return 1: transposed rows are not cut into pieces."""
    return 1


@compiled_without_counts
def _multiply_panel_in_parts(
    panels: Array, panel: int, transposed: Array, rows: int, depth: int, out: Array, piece: int
) -> None:
    """Multiply all rows, transposed part by part; see `multiply_panel`.

    While a part is multiplied, a share of the next panel is prefetched.
    """
    count = part_count(rows)
    if count >= _UNPACKED_FROM:
        _multiply_unpacked(panels, panel, transposed, rows, depth, out)
        return
    words = panels.shape[1]
    columns = out.shape[1]
    each = len(transposed) // rows
    flat = panels.reshape(-1)
    result = out.reshape(-1)
    later_stride = (WIDTH + count - 1) // count if count > 1 else 0
    for part in range(count):
        start, here = part_of_rows(part, count, rows)
        goal = start * columns + panel * WIDTH
        later = (panel + 1) * words + part * words // count
        places = PanelPlaces(panel * words, WIDTH, start * each, 0, goal, columns, depth, later, later_stride)
        write_sums(here, flat, transposed, result, places)


@compiled
def _multiply_unpacked(panels: Array, panel: int, transposed: Array, rows: int, depth: int, out: Array) -> None:
    """Multiply many rows after unpacking the panel; see `_multiply_panel_in_parts`."""
    columns = out.shape[1]
    count = part_count(rows)
    each = len(transposed) // rows
    result = out.reshape(-1)
    numbers = unpacked(panels[panel], depth)
    for part in range(count):
        start, here = part_of_rows(part, count, rows)
        goal = start * columns + panel * WIDTH
        places = PanelPlaces(0, WIDTH, start * each, 0, goal, columns, depth, 0, 0)
        write_sums(here, numbers, transposed, result, places)


def _begin_nothing(packed: Array, panels: Array) -> None:
    pass


def _begin_tiles(packed: Array, panels: Array) -> None:
    tiles.begin_tiles(packed)


def _end_nothing(panels: Array) -> None:
    pass


def _release_tiles(panels: Array) -> None:
    tiles.release_tiles()


@compiled
def _multiply_alone(x: Array, panels: Array, out: Array) -> None:
    rows, depth = x.shape
    packed = packed_rows(x, panels)
    _multiply_some(panels, 0, len(panels), packed, rows, depth, out)


@compiled_without_counts
def _multiply_some(panels: Array, first: int, stop: int, packed: Array, rows: int, depth: int, out: Array) -> None:
    """Write the products of all rows with the panels first .. stop."""
    begin_products(packed, panels)
    pieces = piece_count(panels, rows)
    together = max(_HELD_BYTES // (panels.itemsize * panels.shape[1]), 1)
    for start in range(first, stop, together):
        for piece in range(pieces):
            for panel in range(start, min(start + together, stop)):
                multiply_panel(panels, panel, packed, rows, depth, out, piece)
    end_products(panels)


@compiled
def _multiply_with_team(x: Array, panels: Array, out: Array, address: int) -> None:
    """Run `multiply` with the team whose memory is at this address."""
    team = memory_of(address)
    rows, depth = x.shape
    packed = packed_rows(x, panels)
    team[PANELS] = panels.ctypes.data
    team[COUNT] = panels.shape[0]
    team[SIZE] = panels.shape[1]
    team[PACKED] = packed.ctypes.data
    team[LENGTH] = len(packed)
    team[ROWS] = rows
    team[DEPTH] = depth
    team[OUT] = out.ctypes.data
    team[COLUMNS] = out.shape[1]
    shares = shares_of(len(panels), panels.itemsize * panels.shape[1], team[THREADS])
    share_out(address, form_of(panels), shares, packed)


def _share_function(kind: Any, of_rows: Any) -> Any:
    """Return the compiled function for a share of the product that the memory of a team describes.

    Args:
        kind: dtype of the panels.
        of_rows: dtype of the packed rows.
    """

    def do_share(address: int, share: int) -> None:
        team = memory_of(address)
        panels = carray(pointer_to(team[PANELS]), (team[COUNT], team[SIZE]), kind)
        packed = carray(pointer_to(team[PACKED]), (team[LENGTH],), of_rows)
        out = carray(pointer_to(team[OUT]), (team[ROWS], team[COLUMNS]), np.float32)
        first, stop = part_of(team, share)
        _multiply_some(panels, first, stop, packed, team[ROWS], team[DEPTH], out)

    source = _source_of(do_share)
    source.__name__ = f"do_share_{np.dtype(kind).name}"  # the name under which numba caches its code
    source.__qualname__ = source.__name__
    return compiled(source)


# The dtype of packed rows for each dtype of panels.
_ROWS_FOR = {
    np.float32: np.float32,
    np.uint32: np.float32,
    np.complex64: np.uint16,
    np.uint8: np.float32,
    np.uint64: np.float32,
    np.int64: np.float32,
    np.float64: np.float32,
    np.int32: np.int32,
    np.int16: np.uint32,
    np.uint16: np.uint32,
    np.int8: np.uint32,
    np.complex128: np.uint32 if DOT_OF_BYTES else np.int16,
}
FORM_OF = {np.dtype(kind).name: number for number, kind in enumerate(_ROWS_FOR)}
share_functions = {np.dtype(kind).name: _share_function(kind, rows) for kind, rows in _ROWS_FOR.items()}


@compiled
def _multiply(x: Array, panels: Array, out: Array, threads: int) -> None:
    """Run `multiply` in the compiled form for these panels."""
    if threads > 1 and panels.size >= _SHARED_FROM and has_form(threads, form_of(panels)):
        _multiply_with_team(x, panels, out, threads)
    else:
        _multiply_alone(x, panels, out)


@compiled
def multiply(x: Array, panels: Array, out: Array, threads: int) -> None:
    """Write x[rows, depth] @ matrix to the first columns of `out`, given the `panels` of the matrix.

    `out` has `WIDTH` columns for each panel; further columns are left unchanged.

    Args:
        threads: 1, or the address of the memory of a team (engines/cpu/team.py), which then helps.
    """
    if len(x) < _TILES_FROM:
        _multiply(x, for_few_rows(panels), out, threads)
    else:
        _multiply(x, panels, out, threads)


def fits_bfloat16(matrix: Dense) -> bool:
    """Return whether bfloat16 represents all numbers exactly, and the depth is even (two steps share a word)."""
    columns, depth = matrix.shape
    if depth % 2:
        return False
    each = max(_LAID_OUT_TOGETHER // depth, 1)
    parts = (matrix[first : first + each] for first in range(0, columns, each))
    return not any((np.ascontiguousarray(part).view(np.uint32) & 0xFFFF).any() for part in parts)


def in_panels(matrix: Dense, kind: Kind = "float32") -> Panels:
    """Return a matrix in panels for `multiply`, padded with columns of zeros to a multiple of `WIDTH`.

    Args:
        kind: "float32"; "bfloat16", two steps of depth in each uint32, for numbers that bfloat16 represents exactly;
            "float16", two bytes for each step, as uint8, for numbers that float16 represents exactly;
            "bfloat16 pairs", the same as "bfloat16" as complex64, for rows rounded to bfloat16, too;
            "tiles", the same as "bfloat16" as uint16, for processors with tile registers (engines/cpu/tiles.py); "int8", a
            rounded matrix (`round_column`), four steps of depth in each int32, followed by the scales and 128 times the sums
            of the columns; "int8 tiles", the same as int8, for tile registers; "int4", a matrix rounded in groups
            (`rounded_groups`), eight steps of depth in a word, as int16, see `lay_out_groups`; "nibbles", the same
            numbers and scales as uint64, for products with unrounded rows; "blocks of 4 bits" and "blocks of 8 bits",
            rounded in groups (`block_panels.rounded_blocks`), as int64 and float64, also for unrounded rows; "dual
            binary", two binary matrices with scales (`rounded_binaries`), as complex128.

    Raises `ValueError` if the depth is not a multiple of `steps_in(kind)`.
    """
    columns, depth = matrix.shape
    (panels,) = empty_panels(1, columns, depth, kind)
    write_panels(panels, lambda first, stop: matrix[first:stop], columns, depth, kind)
    return panels


def empty_panels(matrices: int, columns: int, depth: int, kind: Kind) -> Shaped[np.ndarray, "matrices panels words"]:
    """Return a buffer for the panels of matrices of one shape, aligned to cache lines; see `in_panels`."""
    unit = steps_in(kind)
    if depth % unit:
        raise ValueError(f"the depth of a matrix in panels must be a multiple of {unit}, found {depth}")
    count = -(-columns // WIDTH)
    words = _WORDS[kind]
    room = empty_in_lines((matrices, count, words.of_panel(depth)), words.stored)
    return room.view(words.read_as)


def write_panels(
    panels: Panels,
    columns_of: Callable[[int, int], Shaped[np.ndarray, "some depth"]],
    columns: int,
    depth: int,
    kind: Kind,
    done: Callable[[int, int], None] = lambda first, stop: None,
) -> None:
    """Lay out a matrix in its panels, some columns at a time to save memory.

    As many threads as compiled code may use lay out a large matrix; they call `columns_of` and `done`.

    Args:
        panels: written; see `empty_panels`.
        columns_of: returns the columns first .. stop of the matrix: float32; for two-byte kinds also uint16, their bits;
            for rounded kinds also uint16, the bits of bfloat16 numbers.
        done: called with first and stop when these columns are laid out.
    """
    each = max(_LAID_OUT_TOGETHER // (depth * WIDTH * allowed_threads()), 1)

    def write(first: int) -> None:
        goal = panels[first : first + each]
        stop = min((first + len(goal)) * WIDTH, columns)
        some = np.ascontiguousarray(columns_of(first * WIDTH, stop))
        if some.dtype != np.uint16:
            some = some.astype(np.float32, copy=False)
        _lay_out(goal.view(_WORDS[kind].stored), some, kind)
        done(first * WIDTH, stop)

    pieces = range(0, len(panels), each)
    threads = min(allowed_threads(), len(pieces))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(write, pieces):
                pass  # raises the error of a piece, if any
        return
    for first in pieces:
        write(first)


def _lay_out(panels: Panels, matrix: Shaped[np.ndarray, "columns depth"], kind: Kind) -> None:
    """Write whole panels; see `write_panels`. Missing columns become zeros."""
    if kind == "int4":
        lay_out_groups(matrix, panels)
        return
    if kind in ("int8", "int8 tiles"):
        lay_out_bytes(matrix, panels)
        return
    if kind == "nibbles":
        write_nibbles(panels, rounded_nibbles(matrix))
        return
    if kind in BLOCK_KINDS:
        size = 4 if kind == "blocks of 4 bits" else 8
        write_blocks(panels, rounded_blocks(matrix, size), size)
        return
    if kind == "dual binary":
        write_binaries(panels, rounded_binaries(matrix))
        return
    if kind == "float16":
        _lay_out_halves(panels, matrix if matrix.dtype == np.uint16 else matrix.astype(np.float16).view(np.uint16))
        return
    if kind in ("bfloat16", "bfloat16 pairs", "tiles"):
        bits = matrix if matrix.dtype == np.uint16 else (matrix.view(np.uint32) >> 16).astype(np.uint16)
        matrix = bits.view(np.uint32)  # the earlier of two steps is in the lower half
    lay_out_words(matrix.view(np.int32), panels.view(np.int32))  # one compiled form for all words of four bytes


def _lay_out_halves(panels: Panels, matrix: Shaped[np.ndarray, "columns depth"]) -> None:
    """Write whole panels of words of two bytes; see `_lay_out`."""
    missing = len(panels) * WIDTH - len(matrix)
    if missing:
        matrix = np.concatenate([matrix, np.zeros((missing, matrix.shape[1]), dtype=matrix.dtype)])
    by_column = matrix.reshape(len(panels), WIDTH, -1)
    panels.reshape(len(panels), -1, WIDTH)[...] = by_column.transpose(0, 2, 1)


def steps_in(kind: Kind) -> int:
    """Return the divisor of the depths of matrices in panels of a kind."""
    if kind == "dual binary":
        return BINARY_GROUP
    return GROUP if kind in ("int4", "nibbles", *BLOCK_KINDS) else STEP


def empty_in_lines(shape: tuple[int, ...], dtype: Any) -> AnyArray:
    """Return a buffer aligned to cache lines: otherwise loading a register would read two lines."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(size + LINE, dtype=np.uint8)
    start = -room.ctypes.data % LINE
    return room[start : start + size].view(dtype).reshape(shape)
