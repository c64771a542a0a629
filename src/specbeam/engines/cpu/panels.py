"""Products of a few rows with a large matrix, in the time that it takes to read the matrix.

With libraries a float32 product of a few rows, from between two and eight rows on, takes twice as long as that of one row.
Here a matrix is laid out once in panels of a few columns. A panel is streamed through registers, while the sums of up to
`MOST` rows stay in other registers (engines/cpu/sums.py).

Weights that bfloat16 represents exactly, as those of most checkpoints, are kept in it: they are read in half the time, with
the same products. If the processor has tile registers, sixteen rows are multiplied at once (engines/cpu/tiles.py), which
pays for matrices that are too large for its caches. Weights rounded to 8 bits are read in a quarter of the time, those of
4 bits, in groups with a scale each, in less than a sixth. Then each row of x is rounded to 8 bits, relative to its own
largest number, so that a row takes a quarter of the arithmetic.

The functions above `_source_of` stand for several compiled forms: numba chooses one by the dtype of the panels.
"""

import inspect
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32, Int8, Shaped

from specbeam import kernels
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.rounding import GROUP, ZERO, Scales, rounded, rounded_groups, rounded_row
from specbeam.engines.cpu.sums import MOST, STEP, WIDTH, write_sums
from specbeam.kernels.compiling import compiled, compiled_only

if kernels.AVAILABLE:
    from numba import prange, types
    from numba.extending import overload
else:
    prange = range

LINE = 64  # bytes of a cache line
_UNPACKED_FROM = 16  # parts of rows; from here on the bfloat16 of a panel are unpacked once, not for each part
_TILES_FROM = 6  # rows of bytes; fewer are multiplied by vectors as soon, and no tile has to be filled
_SHARED_FROM = 300_000  # numbers of the dtype of the panels, from which on they are shared among threads

Kind = Literal["float32", "bfloat16", "tiles", "int8", "int8 tiles", "int4"]
Array = Any  # numba finds the types by itself


@compiled_only
def packed_rows(x: Array, panels: Array) -> Array:
    """Return x[rows, depth] in the layout that `multiply_panel` takes: that of tiles, or transposed part by part."""


@compiled_only
def begin_products(packed: Array, panels: Array) -> None:
    """Prepare the processor for `multiply_panel`, in the current thread."""


@compiled_only
def end_products(panels: Array) -> None:
    """Undo `begin_products`."""


@compiled_only
def multiply_panel(panels: Array, panel: int, packed: Array, rows: int, depth: int, out: Array) -> None:
    """Write the products of all rows with one panel to its columns of `out`."""


@compiled_only
def write_transposed(x: Array, start: int, rows: int, transposed: Array) -> None:
    """Write `rows` rows of x, float32[all rows, depth], from `start` on, to `transposed` as [depth, rows].

    If `transposed` is int32, numbers are rounded to uint8 around 128, four steps of depth in a word, and the scale of each
    row follows after all of them.
    """


@compiled_only
def scratch_for(panels: Array, rows: int, depth: int) -> Array:
    """Return room for this number of transposed rows, of the dtype that goes with the panels."""


@compiled_only
def for_few_rows(panels: Array) -> Array:
    """Return the panels as fewer rows than `_TILES_FROM` are multiplied soonest: those of bytes by vectors, not by tiles."""


@compiled_only
def unpacked(panel: Array, depth: int) -> Array:
    """Return the numbers of one panel as float32; a panel of rounded numbers is returned as it is."""


def _source_of(function: Any) -> Any:
    """Return the function without the type checks that tests wrap it into, as numba needs its source."""
    return inspect.unwrap(function)


if kernels.AVAILABLE:
    # How rows are packed and multiplied by tiles, by the dtype of the panels.
    _BY_TILES = {
        types.uint16: (tiles.packed_rows, tiles.multiply_panel),
        types.int8: (tiles.packed_bytes, tiles.multiply_panel_of_bytes),
    }

    _ROUNDED = (types.int32, types.int16)  # whose rows are rounded too, and multiplied by vectors

    @overload(packed_rows, strict=False)
    def _compiled_packed_rows(x: Any, panels: Any) -> Any:
        pack, _ = _BY_TILES.get(panels.dtype, (_transposed_parts, None))
        return _source_of(lambda x, panels: pack(x, panels))

    @overload(begin_products, strict=False)
    def _compiled_begin_products(packed: Any, panels: Any) -> Any:
        return _source_of(_begin_tiles if panels.dtype in _BY_TILES else _begin_nothing)

    @overload(end_products, strict=False)
    def _compiled_end_products(panels: Any) -> Any:
        return _source_of(_release_tiles if panels.dtype in _BY_TILES else _end_nothing)

    @overload(multiply_panel, strict=False)
    def _compiled_multiply_panel(panels: Any, panel: Any, packed: Any, rows: Any, depth: Any, out: Any) -> Any:
        _, by = _BY_TILES.get(panels.dtype, (None, _multiply_panel_in_parts))
        return _source_of(lambda panels, panel, packed, rows, depth, out: by(panels, panel, packed, rows, depth, out))

    @overload(write_transposed, strict=False)
    def _compiled_write_transposed(x: Any, start: Any, rows: Any, transposed: Any) -> Any:
        return _source_of(_write_transposed_bytes if transposed.dtype == types.int32 else _write_transposed_floats)

    @overload(scratch_for, strict=False)
    def _compiled_scratch_for(panels: Any, rows: Any, depth: Any) -> Any:
        return _source_of(_scratch_for_bytes if panels.dtype in _ROUNDED else _scratch_for_floats)

    @overload(for_few_rows, strict=False)
    def _compiled_for_few_rows(panels: Any) -> Any:
        return _source_of(_in_words if panels.dtype == types.int8 else _as_they_are)

    @overload(unpacked, strict=False)
    def _compiled_unpacked(panel: Any, depth: Any) -> Any:
        return _source_of(_unchanged if panel.dtype in _ROUNDED else _as_float32)


def _scratch_for_floats(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * depth, dtype=np.float32)


def _scratch_for_bytes(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * (depth // STEP + 1), dtype=np.int32)


def _unchanged(panel: Array, depth: int) -> Array:
    return panel


def _as_they_are(panels: Array) -> Array:
    return panels


def _in_words(panels: Array) -> Array:
    return panels.view(np.int32)


def _write_transposed_floats(x: Array, start: int, rows: int, transposed: Array) -> None:
    steps = transposed[: rows * x.shape[1]].reshape(x.shape[1], rows)
    for row in range(rows):
        column = steps[:, row]
        source = x[start + row]
        for step in range(len(column)):
            column[step] = source[step]


def _write_transposed_bytes(x: Array, start: int, rows: int, transposed: Array) -> None:
    words = x.shape[1] // STEP
    scales = transposed[rows * words : rows * (words + 1)].view(np.float32)
    numbers = np.empty(x.shape[1], dtype=np.uint8)
    in_words = numbers.view(np.int32)
    for row in range(rows):
        scales[row] = rounded_row(x[start + row], numbers)
        for word in range(words):
            transposed[word * rows + row] = in_words[word]


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


@compiled
def part_count(rows: int) -> int:
    """Return the number of parts, of nearly equal size and at most `MOST` rows, into which rows are cut."""
    return (rows + MOST - 1) // MOST


@compiled
def _transposed_parts(x: Array, panels: Array) -> Array:
    """Return all rows, transposed part by part."""
    rows, depth = x.shape
    count = part_count(rows)
    transposed = scratch_for(panels, rows, depth)
    each = len(transposed) // rows  # words of a row
    for part in range(count):
        start = part * rows // count
        write_transposed(x, start, (part + 1) * rows // count - start, transposed[start * each :])
    return transposed


@compiled
def _multiply_panel_in_parts(panels: Array, panel: int, transposed: Array, rows: int, depth: int, out: Array) -> None:
    """Do `multiply_panel` for rows that were transposed part by part."""
    words = panels.shape[1]
    columns = out.shape[1]
    count = part_count(rows)
    each = len(transposed) // rows
    flat = panels.reshape(-1)
    result = out.reshape(-1)
    if count < _UNPACKED_FROM:
        for part in range(count):
            start = part * rows // count
            write_sums(
                (part + 1) * rows // count - start, flat, panel * words, WIDTH, transposed, start * each, result,
                start * columns + panel * WIDTH, columns, depth,
            )  # fmt: skip
    else:
        numbers = unpacked(panels[panel], depth)
        for part in range(count):
            start = part * rows // count
            write_sums(
                (part + 1) * rows // count - start, numbers, 0, WIDTH, transposed, start * each, result,
                start * columns + panel * WIDTH, columns, depth,
            )  # fmt: skip


def _begin_nothing(packed: Array, panels: Array) -> None:
    pass


def _begin_tiles(packed: Array, panels: Array) -> None:
    tiles.begin_tiles(packed)


def _end_nothing(panels: Array) -> None:
    pass


def _release_tiles(panels: Array) -> None:
    tiles.release_tiles()


def _multiplier(name: str, panel_range: Any, **options: Any) -> Any:
    """Return `multiply` with a loop over `panel_range` of the panels, `range` or numba's `prange`.

    Args:
        name: of the compiled function, by which numba finds its code in memory and on disk.
    """
    serial = panel_range is range  # with several threads, each has to configure its tiles anew for every panel

    def _multiply(x: Array, panels: Array, out: Array) -> None:
        rows, depth = x.shape
        packed = packed_rows(x, panels)
        if serial:
            begin_products(packed, panels)
        for panel in panel_range(len(panels)):
            if not serial:
                begin_products(packed, panels)
            multiply_panel(panels, panel, packed, rows, depth, out)
            if not serial:
                end_products(panels)
        if serial:
            end_products(panels)

    _multiply.__name__ = _multiply.__qualname__ = name
    return compiled(_multiply, **options)


_multiply_on_one_thread = _multiplier("multiply_on_one_thread", range)
_multiply_on_threads = _multiplier("multiply_on_threads", prange, parallel=True)


@compiled
def _multiply(x: Array, panels: Array, out: Array, threads: int) -> None:
    """Do `multiply` by the products of these panels, on one thread or several."""
    if threads > 1 and panels.size >= _SHARED_FROM:
        _multiply_on_threads(x, panels, out)
    else:
        _multiply_on_one_thread(x, panels, out)


@compiled
def multiply(x: Array, panels: Array, out: Array, threads: int) -> None:
    """Write x[rows, depth] @ matrix to out[rows, columns], given the `panels` of the matrix; `WIDTH` divides columns."""
    if len(x) < _TILES_FROM:
        _multiply(x, for_few_rows(panels), out, threads)
    else:
        _multiply(x, panels, out, threads)


def fits_bfloat16(matrix: Float[np.ndarray, "columns depth"]) -> bool:
    """Return whether bfloat16 represents every number exactly, and the depth is even, so that two steps share a word."""
    return matrix.shape[1] % 2 == 0 and not (np.ascontiguousarray(matrix).view(np.uint32) & 0xFFFF).any()


def in_panels(matrix: Float[np.ndarray, "columns depth"], kind: Kind = "float32") -> Shaped[np.ndarray, "panels words"]:
    """Return a matrix as the panels that `multiply` takes, with columns of zeros up to a multiple of `WIDTH`.

    Args:
        kind: "float32"; "bfloat16", two steps of depth in each uint32, for numbers that bfloat16 represents exactly;
            "tiles", the same as uint16, for processors with tile registers (engines/cpu/tiles.py); "int8", a rounded matrix
            (`rounded`), four steps of depth in each int32, followed by the scales and 128 times the sums of the columns;
            "int8 tiles", the same as int8, for tile registers; "int4", a matrix rounded in groups (`rounded_groups`), eight
            steps of depth in a word, as int16, see `_panels_of_nibbles`.

    Raises `ValueError` if the depth is no multiple of `STEP`, for int4 of `GROUP`.
    """
    columns, depth = matrix.shape
    unit = steps_in(kind)
    if depth % unit:
        raise ValueError(f"the depth of a matrix in panels must be a multiple of {unit}, found {depth}")
    count = -(-columns // WIDTH)
    padded = np.zeros((count * WIDTH, depth), dtype=np.float32)
    padded[:columns] = matrix
    if kind == "int4":
        return in_lines(_panels_of_nibbles(*rounded_groups(padded))).view(np.int16)
    if kind in ("int8", "int8 tiles"):
        rounded_panels = in_lines(_panels_of_bytes(*rounded(padded)))
        return rounded_panels if kind == "int8" else rounded_panels.view(np.int8)
    panels = np.ascontiguousarray(padded.reshape(count, WIDTH, depth).transpose(0, 2, 1))
    if kind == "float32":
        return in_lines(panels.reshape(count, -1))
    bits = panels.view(np.uint32)
    words = in_lines(((bits[:, 0::2] >> 16) | bits[:, 1::2]).reshape(count, -1))
    return words.view(np.uint16) if kind == "tiles" else words


def steps_in(kind: Kind) -> int:
    """Return of what number the depth of a matrix must be a multiple to be laid out as panels of a kind."""
    return GROUP if kind == "int4" else STEP


def in_lines(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Return a copy that begins at a line of the processor's cache: otherwise each register is read from two lines."""
    room = np.empty(array.nbytes + LINE, dtype=np.uint8)
    start = -room.ctypes.data % LINE
    lines = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    lines[...] = array
    return lines


def _panels_of_bytes(numbers: Int8[np.ndarray, "columns depth"], scales: Scales) -> Shaped[np.ndarray, "panels words"]:
    """Return the panels of a matrix rounded to int8, each followed by its columns' scales and 128 times their sums."""
    count = len(numbers) // WIDTH
    words = np.ascontiguousarray(numbers).view(np.int32).reshape(count, WIDTH, -1).transpose(0, 2, 1)
    offsets = ZERO * numbers.sum(1, dtype=np.int32)
    after = [values.reshape(count, WIDTH) for values in (scales.view(np.int32), offsets)]
    return np.concatenate([words.reshape(count, -1), *after], 1)


def _panels_of_nibbles(
    numbers: Int8[np.ndarray, "columns depth"], scales: Float32[np.ndarray, "columns groups"]
) -> Shaped[np.ndarray, "panels words"]:
    """Return the panels of a matrix rounded to 4 bits: for each group its words, and then a word for each column.

    Of the eight steps in a word, the first four are in the lower halves of its bytes. The word of a column and group has the
    scale in its upper half, and in the lower one minus the sum of the numbers.
    """
    count = len(numbers) // WIDTH
    groups = scales.shape[1]
    halves = numbers.reshape(count, WIDTH, groups, -1, 2, STEP)
    lower = halves[..., 0, :] & 0x0F
    both = (lower | (halves[..., 1, :] << 4)).astype(np.int8)
    words = np.ascontiguousarray(both).view(np.int32)[..., 0]
    sums = -numbers.reshape(count, WIDTH, groups, GROUP).sum(3, dtype=np.int32)
    bits = np.ascontiguousarray(scales).view(np.int32).reshape(count, WIDTH, groups)
    last = (bits & np.int32(-65536)) | (sums & 0xFFFF)
    panels = np.concatenate([words, last[..., None]], 3)  # panel, column, group, word
    return np.ascontiguousarray(panels.transpose(0, 2, 3, 1)).reshape(count, -1)
