"""Products of a few rows with a large matrix, in the time that reading the matrix takes.

Libraries' float32 products take twice the time of one row from two to eight rows on. Here a matrix is laid out once in
panels, a few columns wide, and a panel streams through registers in which the sums of up to `MOST` rows stay
(engines/cpu/sums.py).

Weights that fit bfloat16 exactly, as those of most checkpoints do, are kept and read in it: half the time, and the same
product. Where the processor has tile registers sixteen rows are multiplied at once (engines/cpu/tiles.py), which pays for
matrices that its caches do not hold. Rounded to 8 bits weights are read in a quarter of the time, and each row of x is
rounded too, by its own largest number: then a row takes a quarter of the arithmetic.
"""

import inspect
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32, Int8, Shaped

from specbeam import kernels
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.sums import MOST, STEP, WIDTH, sums
from specbeam.kernels.compiling import compiled

if kernels.AVAILABLE:
    from numba import prange, types
    from numba.extending import overload
else:
    prange = range

LINE = 64  # bytes of a cache line
_UNPACKED_FROM = 16  # parts: with more, a panel's bfloat16 are unpacked once rather than for each part
_SHARED_FROM = 300_000  # words of a matrix that is worth a second thread

Kind = Literal["float32", "bfloat16", "tiles", "int8"]
Scales = Float32[np.ndarray, " columns"]
Array = Any  # numba finds the types by itself


def laid_out(x: Array, panels: Array) -> Array:
    """x[rows, depth] as `panel_times` takes it: for tiles, or stood up."""
    raise NotImplementedError("compiled alone")


def begun(laid: Array, panels: Array) -> None:
    """Get ready for `panel_times`."""
    raise NotImplementedError("compiled alone")


def done(panels: Array) -> None:
    """Leave the processor as it was."""
    raise NotImplementedError("compiled alone")


def panel_times(panels: Array, panel: int, laid: Array, rows: int, depth: int, out: Array) -> None:
    """Into `out` the products of all rows with one panel."""
    raise NotImplementedError("compiled alone")


def stood_up(x: Array, start: int, rows: int, tall: Array) -> None:
    """Into `tall`: rows start, start + 1, ... of x[rows, depth], step by step of depth; what `sums` takes.

    Into int32: rounded to uint8 around 128, four steps in a word, and behind them the scale of each row.
    """
    raise NotImplementedError("compiled alone")


def room(panels: Array, rows: int, depth: int) -> Array:
    """For so many rows stood up, of the type that goes with the panels."""
    raise NotImplementedError("compiled alone")


def unpacked(panel: Array, depth: int) -> Array:
    """The numbers of one panel of float32 or bfloat16; int8 as they are."""
    raise NotImplementedError("compiled alone")


def _chosen(one: Any) -> Any:
    """As numba wants it: tests wrap functions into type checks."""
    return inspect.unwrap(one)


if kernels.AVAILABLE:

    @overload(laid_out, strict=False)
    def _laid_out(x: Any, panels: Any) -> Any:
        by = tiles.laid_out if panels.dtype == types.uint16 else _standing
        return _chosen(lambda x, panels: by(x, panels))

    @overload(begun, strict=False)
    def _begun(laid: Any, panels: Any) -> Any:
        return _chosen(_tiles_begun if panels.dtype == types.uint16 else _nothing_begun)

    @overload(done, strict=False)
    def _done(panels: Any) -> Any:
        return _chosen(_tiles_done if panels.dtype == types.uint16 else _nothing_done)

    @overload(panel_times, strict=False)
    def _panel_times(panels: Any, panel: Any, laid: Any, rows: Any, depth: Any, out: Any) -> Any:
        by = tiles.panel_times if panels.dtype == types.uint16 else _panel_times_standing
        return _chosen(lambda panels, panel, laid, rows, depth, out: by(panels, panel, laid, rows, depth, out))

    @overload(stood_up, strict=False)
    def _stood_up(x: Any, start: Any, rows: Any, tall: Any) -> Any:
        return _chosen(_stood_up_as_bytes if tall.dtype == types.int32 else _stood_up_as_floats)

    @overload(room, strict=False)
    def _room(panels: Any, rows: Any, depth: Any) -> Any:
        return _chosen(_room_for_bytes if panels.dtype == types.int32 else _room_for_floats)

    @overload(unpacked, strict=False)
    def _unpacked(panel: Any, depth: Any) -> Any:
        return _chosen(_as_it_is if panel.dtype == types.int32 else _as_float32)


def _room_for_floats(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * depth, dtype=np.float32)


def _room_for_bytes(panels: Array, rows: int, depth: int) -> Array:
    return np.empty(rows * (depth // STEP + 1), dtype=np.int32)


def _as_it_is(panel: Array, depth: int) -> Array:
    return panel


def _stood_up_as_floats(x: Array, start: int, rows: int, tall: Array) -> None:
    steps = tall[: rows * x.shape[1]].reshape(x.shape[1], rows)
    for row in range(rows):
        one = steps[:, row]
        here = x[start + row]
        for step in range(len(one)):
            one[step] = here[step]


def _stood_up_as_bytes(x: Array, start: int, rows: int, tall: Array) -> None:
    words = x.shape[1] // STEP
    scales = tall[rows * words : rows * (words + 1)].view(np.float32)
    for row in range(rows):
        here = x[start + row]
        largest = np.float32(1e-30)
        for step in range(len(here)):
            largest = max(largest, abs(here[step]))
        scales[row] = largest / np.float32(127)
        factor = np.float32(127) / largest
        for word in range(words):
            held = np.uint32(0)
            for place in range(STEP):
                byte = np.int32(np.rint(here[STEP * word + place] * factor)) + np.int32(128)
                held |= np.uint32(byte) << np.uint32(8 * place)
            tall[word * rows + row] = np.int32(held)


def _as_float32(panel: Array, depth: int) -> Array:
    if len(panel) == depth * WIDTH:
        return panel.view(np.float32)
    packed = panel.view(np.uint32).reshape(depth // 2, WIDTH)
    words = np.empty((depth, WIDTH), dtype=np.uint32)
    for two in range(depth // 2):
        for column in range(WIDTH):
            words[2 * two, column] = packed[two, column] << np.uint32(16)
            words[2 * two + 1, column] = packed[two, column] & np.uint32(0xFFFF0000)
    return words.reshape(-1).view(np.float32)


@compiled
def parts(rows: int) -> int:
    """Into how many parts, of nearly equal size, that many rows are cut."""
    return (rows + MOST - 1) // MOST


@compiled
def _standing(x: Array, panels: Array) -> Array:
    """All rows stood up, part by part."""
    rows, depth = x.shape
    count = parts(rows)
    tall = room(panels, rows, depth)
    each = len(tall) // rows  # words of a row
    for part in range(count):
        start = part * rows // count
        stood_up(x, start, (part + 1) * rows // count - start, tall[start * each :])
    return tall


@compiled
def _panel_times_standing(panels: Array, panel: int, tall: Array, rows: int, depth: int, out: Array) -> None:
    words = panels.shape[1]
    columns = out.shape[1]
    count = parts(rows)
    each = len(tall) // rows
    flat = panels.reshape(-1)
    result = out.reshape(-1)
    if count < _UNPACKED_FROM:
        for part in range(count):
            start = part * rows // count
            sums(
                (part + 1) * rows // count - start, flat, panel * words, WIDTH, tall, start * each, result,
                start * columns + panel * WIDTH, columns, depth,
            )  # fmt: skip
    else:
        numbers = unpacked(panels[panel], depth)
        for part in range(count):
            start = part * rows // count
            sums(
                (part + 1) * rows // count - start, numbers, 0, WIDTH, tall, start * each, result,
                start * columns + panel * WIDTH, columns, depth,
            )  # fmt: skip


def _nothing_begun(laid: Array, panels: Array) -> None:
    pass


def _tiles_begun(laid: Array, panels: Array) -> None:
    tiles.tiles_begun(laid)


def _nothing_done(panels: Array) -> None:
    pass


def _tiles_done(panels: Array) -> None:
    tiles.tiles_done()


def _multiplier(name: str, over: Any, **options: Any) -> Any:
    """`multiply` with a loop `over` the panels; numba knows what it has compiled, here and on disk, by its name."""

    alone = over is range  # a thread of several says for every panel what its tiles look like

    def _multiply(x: Array, panels: Array, out: Array) -> None:
        rows, depth = x.shape
        laid = laid_out(x, panels)
        if alone:
            begun(laid, panels)
        for panel in over(len(panels)):
            if not alone:
                begun(laid, panels)
            panel_times(panels, panel, laid, rows, depth, out)
            if not alone:
                done(panels)
        if alone:
            done(panels)

    _multiply.__name__ = _multiply.__qualname__ = name
    return compiled(_multiply, **options)


_alone = _multiplier("multiply_alone", range)
_on_threads = _multiplier("multiply_on_threads", prange, parallel=True)


@compiled
def multiply(x: Array, panels: Array, out: Array, threads: int) -> None:
    """out[rows, columns] = x[rows, depth] @ matrix, from the `panels` of a matrix; columns are a multiple of `WIDTH`."""
    if threads > 1 and panels.size >= _SHARED_FROM:
        _on_threads(x, panels, out)
    else:
        _alone(x, panels, out)


def fits_bfloat16(matrix: Float[np.ndarray, "columns depth"]) -> bool:
    """Whether every number is one of bfloat16, and two of a column can share a word."""
    return matrix.shape[1] % 2 == 0 and not (np.ascontiguousarray(matrix).view(np.uint32) & 0xFFFF).any()


def rounded(matrix: Float[np.ndarray, "columns depth"]) -> tuple[Int8[np.ndarray, "columns depth"], Scales]:
    """A matrix as int8 and a scale per column: the nearest multiples of a 127th of the column's largest number."""
    scales = np.maximum(np.abs(matrix).max(1), 1e-30).astype(np.float32) / np.float32(127)
    return np.rint(matrix / scales[:, None]).astype(np.int8), scales


def in_panels(matrix: Float[np.ndarray, "columns depth"], kind: Kind = "float32") -> Shaped[np.ndarray, "panels words"]:
    """A matrix for `multiply`, with columns of zeros up to a multiple of `WIDTH`.

    Args:
        kind: "float32"; "bfloat16", two steps of depth in each uint32, for numbers that fit; "tiles", the same as uint16,
            for processors that have them (engines/cpu/tiles.py); "int8", another matrix (`rounded`), four steps in each
            int32, and behind them the scales and 128 times the sums of the columns.

    Raises `ValueError` if the depth is no multiple of `STEP`.
    """
    columns, depth = matrix.shape
    if depth % STEP:
        raise ValueError(f"the depth of a matrix in panels must be a multiple of {STEP}, found {depth}")
    count = -(-columns // WIDTH)
    padded = np.zeros((count * WIDTH, depth), dtype=np.float32)
    padded[:columns] = matrix
    if kind == "int8":
        return in_lines(_panels_of_bytes(*rounded(padded)))
    panels = np.ascontiguousarray(padded.reshape(count, WIDTH, depth).transpose(0, 2, 1))
    if kind == "float32":
        return in_lines(panels.reshape(count, -1))
    bits = panels.view(np.uint32)
    words = in_lines(((bits[:, 0::2] >> 16) | bits[:, 1::2]).reshape(count, -1))
    return words.view(np.uint16) if kind == "tiles" else words


def in_lines(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """A copy that begins where a line of the processor's cache does: otherwise each register is read from two of them."""
    room = np.empty(array.nbytes + LINE, dtype=np.uint8)
    start = -room.ctypes.data % LINE
    lines = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    lines[...] = array
    return lines


def _panels_of_bytes(numbers: Int8[np.ndarray, "columns depth"], scales: Scales) -> Shaped[np.ndarray, "panels words"]:
    count = len(numbers) // WIDTH
    words = np.ascontiguousarray(numbers).view(np.int32).reshape(count, WIDTH, -1).transpose(0, 2, 1)
    offsets = 128 * numbers.sum(1, dtype=np.int32)
    behind = [one.reshape(count, WIDTH) for one in (scales.view(np.int32), offsets)]
    return np.concatenate([words.reshape(count, -1), *behind], 1)
