"""Products of a few rows with a large matrix, in the time that reading the matrix takes.

Libraries' float32 products take twice the time of one row from two to eight rows on. Here a matrix is laid out once in
panels, a few columns wide, and a panel streams through registers in which the sums of up to `MOST` rows stay. Every sum runs
over the depth in order, so that a row's result does not depend on which rows stand beside it.

The inner loop is LLVM code for numba. Weights that fit bfloat16 exactly, as those of most checkpoints do, are kept and read
in it: half the time, and the same product.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from specbeam import kernels
from specbeam.kernels.compiling import compiled

if kernels.AVAILABLE:
    from llvmlite import binding, ir
    from numba import prange, types
    from numba.extending import intrinsic

    _FEATURES = binding.get_host_cpu_features()
    LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4  # float32 numbers in a register
    MOST = 6 if LANES == 8 else 12  # rows at a time: so many sums fit the registers
else:
    prange, LANES, MOST = range, 16, 12
    sums: Any = None  # nothing here is called

_ACROSS = 2  # registers across a panel
WIDTH = _ACROSS * LANES  # columns of a panel
STEP = 4  # depth per round of the loop: every depth is a multiple of it
_UNPACKED_FROM = 16  # parts: with more, a panel's bfloat16 are unpacked once rather than for each part
_SHARED_FROM = 300_000  # words of a matrix that is worth a second thread
_AHEAD = 32  # steps of depth between what is called from memory and what is summed

Array = Any  # numba finds the types by itself


class _Loop:
    """LLVM code of the sums of one panel with a fixed number of rows."""

    def __init__(self, builder: Any, rows: int) -> None:
        self.builder, self.rows = builder, rows
        self.index, self.word = ir.IntType(64), ir.IntType(32)
        self.vector = ir.VectorType(ir.FloatType(), LANES)
        self.words = ir.VectorType(self.word, LANES)

    def write(self, weights: Any, stride: Any, x: Any, out: Any, out_stride: Any, depth: Any) -> None:
        """Into the block where the builder stands; it goes on behind the loop."""
        b = self.builder
        before, loop, behind = b.block, b.append_basic_block("loop"), b.append_basic_block("behind")
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(self.index)
        starts = [b.phi(self.vector) for _ in range(self.rows * _ACROSS)]
        sums = list(starts)
        for step in range(0, STEP, 2):
            for place, columns in enumerate(self._two_steps(weights, stride, b.add(at, self._number(step)))):
                sums = self._added(sums, columns, x, b.add(at, self._number(step + place)))
        after = b.add(at, self._number(STEP))
        carried = [(at, after, self._number(0))]
        carried += [(start, end, self._zeros()) for start, end in zip(starts, sums, strict=True)]
        for start, end, first in carried:
            start.add_incoming(first, before)
            start.add_incoming(end, b.block)
        b.cbranch(b.icmp_signed("<", after, depth), loop, behind)
        b.position_at_end(behind)
        for place, total in enumerate(sums):
            row, across = divmod(place, _ACROSS)
            goal = b.add(b.mul(out_stride, self._number(row)), self._number(across * LANES))
            b.store(total, self._pointer(out, goal, self.vector), align=4)

    def _added(self, sums: list[Any], columns: list[Any], x: Any, step: Any) -> list[Any]:
        b, added = self.builder, []
        first = b.mul(step, self._number(self.rows))
        fused = self._function(f"llvm.fma.v{LANES}f32", self.vector, [self.vector] * 3)
        for row in range(self.rows):
            one = b.load(b.gep(x, [b.add(first, self._number(row))]))
            lane = b.insert_element(ir.Constant(self.vector, ir.Undefined), one, ir.Constant(self.word, 0))
            spread = b.shuffle_vector(
                lane, ir.Constant(self.vector, ir.Undefined), ir.Constant(self.words, [0] * LANES)
            )
            part = sums[row * _ACROSS : (row + 1) * _ACROSS]
            added += [b.call(fused, [column, spread, total]) for column, total in zip(columns, part, strict=True)]
        return added

    def _two_steps(self, weights: Any, stride: Any, step: Any) -> list[list[Any]]:
        """The columns of two steps of depth; two bfloat16 share a word, the earlier one in its lower half."""
        b = self.builder
        if not isinstance(weights.type.pointee, ir.IntType):
            starts = [b.mul(b.add(step, self._number(more)), stride) for more in (0, 1)]
            return [self._columns(weights, start, stride, self.vector) for start in starts]
        both = self._columns(weights, b.mul(b.udiv(step, self._number(2)), stride), stride, self.words)
        sixteen, upper = ir.Constant(self.words, [16] * LANES), ir.Constant(self.words, [0xFFFF0000] * LANES)
        early = [b.bitcast(b.shl(one, sixteen), self.vector) for one in both]
        return [early, [b.bitcast(b.and_(one, upper), self.vector) for one in both]]

    def _columns(self, weights: Any, first: Any, stride: Any, kind: Any) -> list[Any]:
        b = self.builder
        byte, skipped = ir.IntType(8).as_pointer(), b.mul(stride, self._number(_AHEAD))
        called = self._function("llvm.prefetch.p0", ir.VoidType(), [byte, self.word, self.word, self.word])
        loaded = []
        for across in range(_ACROSS):
            place = b.add(first, self._number(across * LANES))
            ahead = b.gep(weights, [b.add(place, skipped)])
            b.call(called, [b.bitcast(ahead, byte), *(ir.Constant(self.word, n) for n in (0, 3, 1))])
            loaded.append(b.load(self._pointer(weights, place, kind), align=4))
        return loaded

    def _pointer(self, array: Any, place: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array, [place]), kind.as_pointer())

    def _number(self, n: int) -> Any:
        return ir.Constant(self.index, n)

    def _zeros(self) -> Any:
        return ir.Constant(self.vector, [0.0] * LANES)

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        known = self.builder.module.globals.get(name)
        return known or ir.Function(self.builder.module, ir.FunctionType(result, arguments), name)


if kernels.AVAILABLE:

    @intrinsic
    def sums(
        typing: Any, rows: Any, weights: Any, at: Any, stride: Any, x: Any, x_at: Any, out: Any, out_at: Any,
        out_stride: Any, depth: Any,
    ) -> Any:  # fmt: skip
        """out[out_at + row * out_stride + column] = sum over steps of x[x_at + step * rows + row] *
        weights[at + step * stride + column], for 1 to `MOST` rows and the columns of a panel.
        """

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, _, at, stride, _, x_at, _, out_at, out_stride, depth = args
            arrays = [(signature.args[place], args[place]) for place in (1, 4, 6)]
            data = [context.make_array(kind)(context, builder, value).data for kind, value in arrays]
            weights, x, out = (builder.gep(one, [place]) for one, place in zip(data, (at, x_at, out_at), strict=True))
            end = builder.append_basic_block("end")
            choice = builder.switch(number, end)
            for rows in range(1, MOST + 1):
                block = builder.append_basic_block(f"rows{rows}")
                choice.add_case(ir.Constant(number.type, rows), block)
                builder.position_at_end(block)
                _Loop(builder, rows).write(weights, stride, x, out, out_stride, depth)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        sizes = types.int64
        return types.void(sizes, weights, sizes, sizes, x, sizes, out, sizes, sizes, sizes), code


@compiled
def stood_up(x: Array, start: int, rows: int, tall: Array) -> None:
    """Into `tall`: rows start, start + 1, ... of x[rows, depth], step by step of depth; what `sums` takes."""
    steps = tall[: rows * x.shape[1]].reshape(x.shape[1], rows)
    for row in range(rows):
        one, here = steps[:, row], x[start + row]
        for step in range(len(one)):
            one[step] = here[step]


@compiled
def parts(rows: int) -> int:
    """Into how many parts, of nearly equal size, that many rows are cut."""
    return (rows + MOST - 1) // MOST


def _multiplier(name: str, over: Any, **options: Any) -> Any:
    """`multiply` with a loop `over` the panels; numba knows what it has compiled, here and on disk, by its name."""

    def _multiply(x: Array, panels: Array, out: Array) -> None:
        rows, depth = x.shape
        count = parts(rows)
        tall = np.empty(rows * depth, dtype=np.float32)
        for part in range(count):
            start = part * rows // count
            stood_up(x, start, (part + 1) * rows // count - start, tall[start * depth :])
        words, columns = panels.shape[1], out.shape[1]
        flat, result = panels.reshape(-1), out.reshape(-1)
        for panel in over(len(panels)):
            if count < _UNPACKED_FROM:
                for part in range(count):
                    start = part * rows // count
                    sums(
                        (part + 1) * rows // count - start, flat, panel * words, WIDTH, tall, start * depth, result,
                        start * columns + panel * WIDTH, columns, depth,
                    )  # fmt: skip
            else:
                numbers = as_float32(panels[panel], depth)
                for part in range(count):
                    start = part * rows // count
                    sums(
                        (part + 1) * rows // count - start, numbers, 0, WIDTH, tall, start * depth, result,
                        start * columns + panel * WIDTH, columns, depth,
                    )  # fmt: skip

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


@compiled
def as_float32(panel: Array, depth: int) -> Array:
    """The numbers of one panel."""
    if len(panel) == depth * WIDTH:
        return panel.view(np.float32)
    packed = panel.view(np.uint32).reshape(depth // 2, WIDTH)
    words = np.empty((depth, WIDTH), dtype=np.uint32)
    for two in range(depth // 2):
        for column in range(WIDTH):
            words[2 * two, column] = packed[two, column] << np.uint32(16)
            words[2 * two + 1, column] = packed[two, column] & np.uint32(0xFFFF0000)
    return words.reshape(-1).view(np.float32)


def fits_bfloat16(matrix: Float[np.ndarray, "columns depth"]) -> bool:
    """Whether every number is one of bfloat16, and two of a column can share a word."""
    return matrix.shape[1] % 2 == 0 and not (np.ascontiguousarray(matrix).view(np.uint32) & 0xFFFF).any()


def in_panels(
    matrix: Float[np.ndarray, "columns depth"], as_bfloat16: bool = False
) -> Shaped[np.ndarray, "panels words"]:
    """A matrix for `multiply`, with columns of zeros up to a multiple of `WIDTH`.

    Args:
        as_bfloat16: two steps of depth in each uint32, for numbers that fit; otherwise float32.

    Raises `ValueError` if the depth is no multiple of `STEP`.
    """
    columns, depth = matrix.shape
    if depth % STEP:
        raise ValueError(f"the depth of a matrix in panels must be a multiple of {STEP}, found {depth}")
    count = -(-columns // WIDTH)
    padded = np.zeros((count * WIDTH, depth), dtype=np.float32)
    padded[:columns] = matrix
    panels = np.ascontiguousarray(padded.reshape(count, WIDTH, depth).transpose(0, 2, 1))
    if not as_bfloat16:
        return panels.reshape(count, -1)
    bits = panels.view(np.uint32)
    return ((bits[:, 0::2] >> 16) | bits[:, 1::2]).reshape(count, -1)
