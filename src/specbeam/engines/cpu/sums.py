"""LLVM code for numba: the products of a few rows with a panel of a matrix.

The panel is streamed through registers, while the sums stay in other registers. Every sum goes over the depth in order, so
that the result of a row does not depend on the other rows.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from specbeam.core import compiling
from specbeam.engines.cpu.rounding import GROUP, OF_SCALE, OF_ZERO

if compiling.AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    from specbeam.core.compiling.processor import features

    LANES = 16 if "avx512f" in features() else 8 if "avx2" in features() else 4  # 4-byte numbers in a register
    MOST = 6 if LANES == 8 else 12  # rows at a time, whose sums fit in the registers
    # Whether one instruction multiplies four pairs of bytes in each lane and adds the products up.
    DOTS_BYTES = {16: "avx512vnni", 8: "avxvnni"}.get(LANES) in features()
else:
    LANES = 16
    MOST = 12
    DOTS_BYTES = False
    write_sums: Any = None  # never called without numba
    write_row_sums: Any = None

ACROSS = 2  # registers across a panel
WIDTH = ACROSS * LANES  # columns of a panel
STEP = 4  # steps of depth in a round of the loop, at least; every depth is a multiple of it
_AHEAD = 32  # words of a column by which prefetching is ahead of the sums
_TO_FIRST_CACHE = 3
_TO_SECOND_CACHE = 2
_STEPS_PER_NIBBLES = 8  # steps of depth in a word of numbers of 4 bits
_LOWER = 0x0F0F0F0F  # the lower half of each byte
FLOAT16_SCALE = np.float32(2.0**112)  # float32 exponents count from 127, those of float16 from 15


class _Loop:
    """A writer of the LLVM code that computes the products of a fixed number of rows with one panel.

    Args:
        steps_per_word: steps of depth in a word of the panel: 1 for float32; 2 for bfloat16, the earlier step in the lower
            half.
        x_pitch: words between two rows of x, whose steps follow each other; None: the rows of x are transposed.
        later: what `write_sums` calls `later_at` and `later_stride`; None: nothing is prefetched for later.
    """

    later: tuple[Any, Any] | None = None

    def __init__(self, builder: Any, rows: int, steps_per_word: int, x_pitch: Any = None) -> None:
        self.builder = builder
        self.rows = rows
        self.steps_per_word = steps_per_word
        self.steps = max(STEP, steps_per_word)  # of depth in a round of the loop
        self.x_pitch = x_pitch
        self.index = ir.IntType(64)
        self.word = ir.IntType(32)
        self.vector = ir.VectorType(ir.FloatType(), LANES)
        self.words = ir.VectorType(self.word, LANES)

    def write(self, weights: Any, stride: Any, x: Any, out: Any, out_stride: Any, depth: Any) -> None:
        """Write the code at the builder's position, and leave the builder after the loop. For arguments see `write_sums`."""
        b = self.builder
        zeros = self._zeros()
        before = b.block
        loop = b.append_basic_block("loop")
        end = b.append_basic_block("end")
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(self.index)
        starts = [b.phi(zeros.type) for _ in range(self.rows * ACROSS)]
        sums = list(starts)
        for step in range(0, self.steps, self.steps_per_word):
            word = b.udiv(b.add(at, self._number(step)), self._number(self.steps_per_word))
            self._prefetch_later(weights, word)
            for place, columns in enumerate(self._columns_of(weights, stride, word)):
                sums = self._added(sums, columns, x, b.add(at, self._number(step + place)))
        next_at = b.add(at, self._number(self.steps))
        carried = [(at, next_at, self._number(0))]
        carried += [(start, total, zeros) for start, total in zip(starts, sums, strict=True)]
        for start, next_value, first in carried:
            start.add_incoming(first, before)
            start.add_incoming(next_value, b.block)
        b.cbranch(b.icmp_signed("<", next_at, depth), loop, end)
        b.position_at_end(end)
        for place, total in enumerate(self._finished(sums, weights, stride, x, depth)):
            row, across = divmod(place, ACROSS)
            goal = b.add(b.mul(out_stride, self._number(row)), self._number(across * LANES))
            b.store(total, self._pointer(out, goal, self.vector), align=4)

    def _columns_of(self, weights: Any, stride: Any, word: Any) -> Iterable[list[Any]]:
        """Load the columns of a word; return them as float32 registers for each step of depth in the word."""
        b = self.builder
        start = self.builder.mul(word, stride)
        if self.steps_per_word == 1:
            return [self._loaded(weights, start, stride, self.vector)]
        both = self._loaded(weights, start, stride, self.words)
        early = [b.bitcast(b.shl(words, self._all(16)), self.vector) for words in both]
        return [early, [b.bitcast(b.and_(words, self._all(0xFFFF0000)), self.vector) for words in both]]

    def _added(self, sums: list[Any], columns: list[Any], x: Any, step: Any) -> list[Any]:
        """Return the sums of all rows plus the products of one step of depth."""
        b = self.builder
        added = []
        for row in range(self.rows):
            spread = spread_out(b, b.load(b.gep(x, [self._place_of_x(step, row)])))
            part = sums[row * ACROSS : (row + 1) * ACROSS]
            added += [self._product(total, spread, column) for column, total in zip(columns, part, strict=True)]
        return added

    def _place_of_x(self, step: Any, row: int) -> Any:
        """Return the index in x of a row's word for a step."""
        b = self.builder
        if self.x_pitch is None:
            return b.add(b.mul(step, self._number(self.rows)), self._number(row))
        return b.add(b.mul(self.x_pitch, self._number(row)), step)

    def _product(self, total: Any, spread: Any, column: Any) -> Any:
        """Return `total` + `spread` * `column`."""
        fused = self._function(f"llvm.fma.v{LANES}f32", self.vector, [self.vector] * 3)
        return self.builder.call(fused, [column, spread, total])

    def _finished(self, sums: list[Any], weights: Any, stride: Any, x: Any, depth: Any) -> list[Any]:
        """Return the results, as float32 registers, given the sums over the whole depth."""
        return sums

    def _loaded(self, weights: Any, first: Any, stride: Any, kind: Any) -> list[Any]:
        """Load registers across the panel, and prefetch those `_AHEAD` steps of depth later."""
        b = self.builder
        skipped = b.mul(stride, self._number(_AHEAD))
        loaded = []
        for across in range(ACROSS):
            place = b.add(first, self._number(across * LANES))
            self._prefetch(weights, b.add(place, skipped), _TO_FIRST_CACHE)
            loaded.append(b.load(self._pointer(weights, place, kind), align=4))
        return loaded

    def _prefetch_later(self, weights: Any, word: Any) -> None:
        """Prefetch a line of what is multiplied after this panel, while a word of this one is multiplied.

        The sums of few rows take no longer than reading their panel does, which leaves no time to read another one.
        """
        if self.later is not None and self.rows > MOST // 2:
            start, stride = self.later
            place = self.builder.add(start, self.builder.mul(word, stride))
            self._prefetch(weights, place, _TO_SECOND_CACHE)

    def _prefetch(self, array: Any, place: Any, cache: int) -> None:
        """Write the code that reads the line of an index of an array into one of the processor's caches."""
        b = self.builder
        byte = ir.IntType(8).as_pointer()
        prefetch = self._function("llvm.prefetch.p0", ir.VoidType(), [byte, self.word, self.word, self.word])
        line = b.bitcast(b.gep(array, [place]), byte)
        b.call(prefetch, [line, *(ir.Constant(self.word, n) for n in (0, cache, 1))])

    def _pointer(self, array: Any, place: Any, kind: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(array, [place]), kind.as_pointer())

    def _number(self, n: int) -> Any:
        return ir.Constant(self.index, n)

    def _all(self, value: int) -> Any:
        return ir.Constant(self.words, [value] * LANES)

    def _zeros(self) -> Any:
        return ir.Constant(self.vector, [0.0] * LANES)

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        known = self.builder.module.globals.get(name)
        return known or ir.Function(self.builder.module, ir.FunctionType(result, arguments), name)


class _LoopOfHalves(_Loop):
    """A `_Loop` for panels of float16, which become float32 as they are loaded."""

    def __init__(self, builder: Any, rows: int) -> None:
        super().__init__(builder, rows, steps_per_word=1)

    def _columns_of(self, weights: Any, stride: Any, word: Any) -> list[list[Any]]:
        b = self.builder
        half = ir.IntType(16)
        kind = ir.VectorType(half, LANES)
        loaded = self._loaded(weights, b.mul(word, stride), stride, kind)
        if LANES > 4:  # one instruction does it
            halves = ir.VectorType(ir.HalfType(), LANES)
            return [[b.fpext(b.bitcast(bits, halves), self.vector) for bits in loaded]]
        scale = ir.Constant(self.vector, [float(FLOAT16_SCALE)] * LANES)
        found = []
        for bits in loaded:
            wide = b.zext(bits, self.words)
            size = b.bitcast(b.shl(b.and_(wide, self._all(0x7FFF)), self._all(13)), self.vector)
            sign = b.shl(b.and_(wide, self._all(0x8000)), self._all(16))
            number = b.bitcast(b.fmul(size, scale), self.words)
            found.append(b.bitcast(b.or_(number, sign), self.vector))
        return [found]


class _LoopOfWords(_Loop):
    """A `_Loop` for panels with a bfloat16 in each two bytes, such as keys and values of a cache that keeps them so."""

    def __init__(self, builder: Any, rows: int, x_pitch: Any) -> None:
        super().__init__(builder, rows, 1, x_pitch)

    def _columns_of(self, weights: Any, stride: Any, word: Any) -> list[list[Any]]:
        b = self.builder
        kind = ir.VectorType(ir.IntType(16), LANES)
        loaded = self._loaded(weights, b.mul(word, stride), stride, kind)
        return [[b.bitcast(b.shl(b.zext(bits, self.words), self._all(16)), self.vector) for bits in loaded]]


class _LoopOfWeights(_Loop):
    """A `_Loop` for panels of numbers of 4 bits that stand for exact float32 weights; see engines/cpu/nibbles.py.

    A weight is number * scale - zero point * scale, in one operation that rounds once. Each of these products has few enough
    bits, and so has the weight, so that none of them is rounded at all.
    """

    def __init__(self, builder: Any, rows: int) -> None:
        super().__init__(builder, rows, steps_per_word=_STEPS_PER_NIBBLES)

    def _columns_of(self, weights: Any, stride: Any, word: Any) -> Iterator[list[Any]]:
        b = self.builder
        in_group = GROUP // _STEPS_PER_NIBBLES
        group = b.udiv(word, self._number(in_group))
        place = b.mul(b.add(word, group), stride)
        packed = self._loaded(weights, place, stride, self.words)
        last = b.mul(b.add(b.mul(group, self._number(in_group + 1)), self._number(in_group)), stride)
        scales, offsets = self._scales_and_offsets(weights, last)
        fused = self._function(f"llvm.fma.v{LANES}f32", self.vector, [self.vector] * 3)
        for step in range(_STEPS_PER_NIBBLES):
            columns = []
            for bits, scale, offset in zip(packed, scales, offsets, strict=True):
                number = b.and_(b.lshr(bits, self._all(4 * step)), self._all(15))
                columns.append(b.call(fused, [b.sitofp(number, self.vector), scale, offset]))
            yield columns

    def _scales_and_offsets(self, weights: Any, last: Any) -> tuple[list[Any], list[Any]]:
        """Return the scales of a group, and minus its zero points times these, as registers across the panel."""
        b = self.builder
        scales = []
        offsets = []
        for across in range(ACROSS):
            place = b.add(last, self._number(across * LANES))
            both = b.load(self._pointer(weights, place, self.words), align=4)
            scale = b.bitcast(b.and_(both, self._all(OF_SCALE)), self.vector)
            zero = b.sitofp(b.and_(both, self._all(OF_ZERO)), self.vector)
            scales.append(scale)
            offsets.append(b.fneg(b.fmul(zero, scale)))
        return scales, offsets


class _LoopOfBytes(_Loop):
    """A `_Loop` for panels with four int8 in a word and rows with four uint8 in a word, which are summed as integers.

    So the result is the same number on every machine. In the panel the columns are followed by their scales, and by what the
    offset of x, 128, adds to their sums. x is followed by the scales of its rows.
    """

    def __init__(self, builder: Any, rows: int) -> None:
        super().__init__(builder, rows, steps_per_word=4)

    def _columns_of(self, weights: Any, stride: Any, word: Any) -> list[list[Any]]:
        return [self._loaded(weights, self.builder.mul(word, stride), stride, self.words)]

    def _added(self, sums: list[Any], columns: list[Any], x: Any, step: Any) -> list[Any]:
        return super()._added(sums, columns, x, self.builder.udiv(step, self._number(self.steps_per_word)))

    def _product(self, total: Any, spread: Any, column: Any) -> Any:
        """Return `total` plus the products of four unsigned bytes with four signed ones in each lane."""
        b = self.builder
        if DOTS_BYTES:
            name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
            return b.call(self._function(name, self.words, [self.words] * 3), [total, spread, column])
        for place in range(4):
            unsigned = b.and_(b.lshr(spread, self._all(8 * place)), self._all(255))
            signed = b.ashr(b.shl(column, self._all(24 - 8 * place)), self._all(24))
            total = b.add(total, b.mul(unsigned, signed))
        return total

    def _finished(self, sums: list[Any], weights: Any, stride: Any, x: Any, depth: Any) -> list[Any]:
        b = self.builder
        words = self.builder.udiv(depth, self._number(self.steps_per_word))
        end = b.mul(words, stride)
        places = [b.add(end, self._number(across * LANES)) for across in range(ACROSS)]
        scales = [b.load(self._pointer(weights, place, self.vector), align=4) for place in places]
        places = [b.add(place, self._number(WIDTH)) for place in places]
        offsets = [b.load(self._pointer(weights, place, self.words), align=4) for place in places]
        finished = []
        for place, total in enumerate(sums):
            row, across = divmod(place, ACROSS)
            at = b.add(b.mul(words, self._number(self.rows)), self._number(row))
            scale = spread_out(b, b.load(self._pointer(x, at, ir.FloatType())))
            whole = b.sitofp(b.sub(total, offsets[across]), self.vector)
            finished.append(b.fmul(b.fmul(whole, scales[across]), scale))
        return finished

    def _zeros(self) -> Any:
        return self._all(0)


class _LoopOfNibbles(_LoopOfBytes):
    """A `_LoopOfBytes` for panels with eight numbers of 4 bits in a word, in groups that have a scale for each column.

    Here the numbers of the panel are without a sign, 8 too large, and those of x are signed. The sum of a group is a whole
    number. Only then it is multiplied by the scale, and added to those before. After the words of a group there is one word
    for each two columns: its lower half is the scale of a column in the first half of the panel, a bfloat16, and its upper
    half that of one in the second. After the scales of the rows of x there is, for each group and row, what takes away what
    the 8 adds.
    """

    def write(self, weights: Any, stride: Any, x: Any, out: Any, out_stride: Any, depth: Any) -> None:
        """See `_Loop.write`."""
        b = self.builder
        zeros = self._all_float(0.0)
        before = b.block
        loop = b.append_basic_block("loop")
        end = b.append_basic_block("end")
        words = b.udiv(depth, self._number(self.steps_per_word))
        scales_at = b.mul(words, self._number(self.rows))
        starts_at = b.add(scales_at, self._number(self.rows))
        groups = b.udiv(depth, self._number(GROUP))
        b.branch(loop)
        b.position_at_end(loop)
        group = b.phi(self.index)
        sums_before = [b.phi(self.vector) for _ in range(self.rows * ACROSS)]
        of_words = b.mul(stride, self._number(GROUP // _STEPS_PER_NIBBLES))
        first = b.mul(group, b.add(of_words, self._number(LANES)))
        scales = self._scales(weights, b.add(first, of_words))
        whole: list[Any] = []
        for row in range(self.rows):
            at = b.add(b.add(starts_at, b.mul(group, self._number(self.rows))), self._number(row))
            whole += [spread_out(b, b.load(b.gep(x, [at])))] * ACROSS
        for word in range(GROUP // _STEPS_PER_NIBBLES):
            place = b.add(first, b.mul(self._number(word), stride))
            both = self._loaded(weights, place, stride, self.words)
            early = [b.and_(nibbles, self._all(_LOWER)) for nibbles in both]
            late = [b.and_(b.lshr(nibbles, self._all(4)), self._all(_LOWER)) for nibbles in both]
            step = b.add(b.mul(group, self._number(GROUP)), self._number(word * _STEPS_PER_NIBBLES))
            whole = self._added(whole, early, x, step)
            whole = self._added(whole, late, x, b.add(step, self._number(self.steps_per_word)))
        sums = [
            super(_LoopOfBytes, self)._product(start, b.sitofp(total, self.vector), scales[place % ACROSS])
            for place, (start, total) in enumerate(zip(sums_before, whole, strict=True))
        ]
        next_group = b.add(group, self._number(1))
        group.add_incoming(self._number(0), before)
        group.add_incoming(next_group, b.block)
        for start, total in zip(sums_before, sums, strict=True):
            start.add_incoming(zeros, before)
            start.add_incoming(total, b.block)
        b.cbranch(b.icmp_signed("<", next_group, groups), loop, end)
        b.position_at_end(end)
        for place, total in enumerate(sums):
            row, across = divmod(place, ACROSS)
            scale = spread_out(b, b.load(self._pointer(x, b.add(scales_at, self._number(row)), ir.FloatType())))
            goal = b.add(b.mul(out_stride, self._number(row)), self._number(across * LANES))
            b.store(b.fmul(total, scale), self._pointer(out, goal, self.vector), align=4)

    def _product(self, total: Any, spread: Any, column: Any) -> Any:
        """Return `total` plus the products of four signed bytes with four unsigned ones in each lane."""
        return super()._product(total, column, spread)

    def _scales(self, weights: Any, place: Any) -> list[Any]:
        """Return the scales of a group as registers across the panel."""
        b = self.builder
        both = b.load(self._pointer(weights, place, self.words), align=4)
        return [
            b.bitcast(bits, self.vector) for bits in (b.shl(both, self._all(16)), b.and_(both, self._all(0xFFFF0000)))
        ]

    def _all_float(self, value: float) -> Any:
        return ir.Constant(self.vector, [value] * LANES)


if compiling.AVAILABLE:

    @intrinsic
    def write_sums(
        typing: Any, rows: Any, weights: Any, at: Any, stride: Any, x: Any, x_at: Any, out: Any, out_at: Any,
        out_stride: Any, depth: Any, later_at: Any, later_stride: Any,
    ) -> Any:  # fmt: skip
        """Write the products of 1 to `MOST` rows with the columns of one panel to `out`.

        out[out_at + row * out_stride + column] = sum over steps of x[x_at + step * rows + row] *
        weights[at + step * stride + column]

        Weights are float32; or uint32 with two bfloat16 each; or uint8, of which two are a float16; or uint64 with sixteen
        numbers of 4 bits each, see engines/cpu/nibbles.py; or int32 with four int8 each, and x int32; or int16 with four
        numbers of 4 bits each, and x uint32; both as `panels.write_transposed` makes them.

        Of more than half of `MOST` rows, the line of weights[later_at + word * later_stride] is prefetched for each word of
        a column: of what comes after this panel, which is then there when it is needed.
        """

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, _, at, stride, _, x_at, _, out_at, out_stride, depth, later_at, later_stride = args
            later_at = builder.sub(later_at, at)  # the pointer to the weights is that of this panel
            weights, x, out = places_in(context, builder, signature, args, ((1, at), (4, x_at), (6, out_at)))
            kind = signature.args[1].dtype
            if kind in (types.int16, types.uint64):  # the registers are words in any case
                weights = builder.bitcast(weights, ir.IntType(32).as_pointer())
            if kind == types.uint8:
                weights = builder.bitcast(weights, ir.IntType(16).as_pointer())

            def write(rows: int) -> None:
                loop = _loop(builder, rows, kind)
                loop.later = (later_at, later_stride)
                loop.write(weights, stride, x, out, out_stride, depth)

            _write_for_each(builder, number, write)
            return context.get_dummy_value()

        sizes = types.int64
        return types.void(sizes, weights, sizes, sizes, x, sizes, out, sizes, sizes, sizes, sizes, sizes), code

    @intrinsic
    def write_row_sums(
        typing: Any, rows: Any, weights: Any, at: Any, stride: Any, x: Any, x_at: Any, x_pitch: Any, out: Any, out_at: Any,
        out_stride: Any, depth: Any,
    ) -> Any:  # fmt: skip
        """Write what `write_sums` writes, of rows of x that are not transposed: `x_pitch` apart.

        Weights are float32, or uint16, the bits of bfloat16 numbers.
        """

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number, _, at, stride, _, x_at, x_pitch, _, out_at, out_stride, depth = args
            weights, x, out = places_in(context, builder, signature, args, ((1, at), (4, x_at), (7, out_at)))
            is_words = signature.args[1].dtype == types.uint16

            def write(rows: int) -> None:
                loop = _LoopOfWords(builder, rows, x_pitch) if is_words else _Loop(builder, rows, 1, x_pitch)
                loop.write(weights, stride, x, out, out_stride, depth)

            _write_for_each(builder, number, write)
            return context.get_dummy_value()

        sizes = types.int64
        return types.void(sizes, weights, sizes, sizes, x, sizes, sizes, out, sizes, sizes, sizes), code


def spread_out(builder: Any, number: Any) -> Any:
    """Return a register with a number in all lanes."""
    word = ir.IntType(32)
    kind = ir.VectorType(number.type, LANES)
    lane = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(word, 0))
    firsts = ir.Constant(ir.VectorType(word, LANES), [0] * LANES)
    return builder.shuffle_vector(lane, ir.Constant(kind, ir.Undefined), firsts)


def places_in(context: Any, builder: Any, signature: Any, args: Any, starts: Any) -> list[Any]:
    """Return pointers into arrays, given the number of each among the arguments, and the index of a word in it."""
    pointers = []
    for number, start in starts:
        data = context.make_array(signature.args[number])(context, builder, args[number]).data
        pointers.append(builder.gep(data, [start]))
    return pointers


def _write_for_each(builder: Any, number: Any, write: Any) -> None:
    """Write the code that chooses by `number`, 1 to `MOST`, among what `write` writes for each number of rows."""
    end = builder.append_basic_block("end")
    choice = builder.switch(number, end)
    for rows in range(1, MOST + 1):
        block = builder.append_basic_block(f"rows{rows}")
        choice.add_case(ir.Constant(number.type, rows), block)
        builder.position_at_end(block)
        write(rows)
        builder.branch(end)
    builder.position_at_end(end)


def _loop(builder: Any, rows: int, kind: Any) -> _Loop:
    """Return the writer of the code for panels of a numba dtype."""
    if kind == types.int32:
        return _LoopOfBytes(builder, rows)
    if kind == types.int16:
        return _LoopOfNibbles(builder, rows)
    if kind == types.uint64:
        return _LoopOfWeights(builder, rows)
    if kind == types.uint8:
        return _LoopOfHalves(builder, rows)
    return _Loop(builder, rows, {types.float32: 1, types.uint32: 2}[kind])
