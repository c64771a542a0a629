"""LLVM code for numba: products of a few rows with a panel of a matrix.

The panel is streamed through registers, while the sums stay in other registers. Every sum runs over the depth in order, so
the result of a row does not depend on the other rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from specbeam.core import compiling
from specbeam.engines.cpu.llvm import (
    TO_FIRST_CACHE,
    TO_SECOND_CACHE,
    CodeWriter,
    Value,
    constant,
    numbers_in,
    places_in,
    spread_out,
)
from specbeam.engines.cpu.rounding import GROUP, OF_SCALE, OF_ZERO
from specbeam.engines.dual_binary import BINARY_GROUP

if compiling.AVAILABLE:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    from specbeam.core.compiling.processor import dot_of_bfloat16, dot_of_bytes, features, lanes
    from specbeam.engines.cpu.llvm import BFLOAT16, FLOAT, INDEX, WORD

    BYTE = ir.IntType(8)
    HALF_WORD = ir.IntType(16)
    # dtypes of panels, by which numba chooses the code, whose elements are two words
    # Words of a number, of more than one.
    _WORDS_OF = {types.uint64: 2, types.int64: 2, types.float64: 2, types.complex64: 2, types.complex128: 4}
    LANES = lanes(features())  # 4-byte numbers in a register
    MOST = 6 if LANES == 8 else 12  # maximum number of rows at a time, whose sums fit in the registers
    DOT_OF_BYTES = dot_of_bytes(features())
    DOT_OF_BFLOAT16 = dot_of_bfloat16(features())
else:
    LANES = 16
    MOST = 12
    DOT_OF_BYTES = ""
    DOT_OF_BFLOAT16 = ""
    write_sums: Any = None  # never called without numba
    write_row_sums: Any = None
    write_ordered_sums: Any = None

ACROSS = 2  # registers across a panel
WIDTH = ACROSS * LANES  # columns of a panel
STEP = 4  # minimum number of steps of depth in a round of the loop; divides every depth
_AHEAD = 32  # prefetch distance in words of a column
_STEPS_PER_NIBBLES = 8  # steps of depth in a word of numbers of 4 bits
_STEPS_PER_BYTES = 4  # of 8 bits
_STEPS_PER_BITS = 32  # of 1 bit
_LOWER = 0x0F0F0F0F  # the lower half of each byte
_LOWEST = 0x01010101  # the lowest bit of each byte
_BITS_OF_ROWS = 8
_ORDER = 5  # the argument of `write_ordered_sums` that `write_row_sums` lacks
FLOAT16_SCALE = np.float32(2.0**112)  # float32 exponents count from 127, those of float16 from 15


class PanelPlaces(NamedTuple):
    """The places of the numbers of `write_sums` in flat arrays: indices of first words, and strides in words."""

    weights: Any  # index of the panel
    stride: Any  # between steps of depth of the panel
    x: Any
    x_pitch: Any  # between rows of x, where these are not transposed
    out: Any
    out_stride: Any  # between rows of the result
    depth: Any  # number of steps
    later: Any  # index of what is prefetched
    later_stride: Any  # between the lines that are prefetched


class _Loop(CodeWriter):
    """A writer of the code for the products of a fixed number of rows with one panel.

    Args:
        steps_per_word: steps of depth in a word of the panel: 1 for float32; 2 for bfloat16, the earlier step in the lower
            half.
        x_pitch: words between two rows of x, whose steps follow each other; None: the rows of x are transposed.
        later: index and stride of the words that are prefetched, see `PanelPlaces`; None: nothing is prefetched for later.
        order: pointer to the steps of depth in the order in which they are added; None: ascending.
    """

    later: tuple[Any, Any] | None = None
    order: Any = None

    def __init__(self, builder: Any, rows: int, steps_per_word: int = 1, x_pitch: Any = None) -> None:
        super().__init__(builder)
        self.rows = rows
        self.summed = range(rows)  # the rows whose sums are in registers
        self.steps_per_word = steps_per_word
        self.steps = max(STEP, steps_per_word)  # of depth in a round of the loop
        self.x_pitch = x_pitch
        self.vector = ir.VectorType(FLOAT, LANES)
        self.words = ir.VectorType(WORD, LANES)

    def write(self, weights: Any, stride: Any, x: Any, out: Any, out_stride: Any, depth: Any) -> None:
        """Write the code at the builder's position, and leave the builder after the loop; see `PanelPlaces`."""
        self.weights = weights
        self.x = x
        self.stride = Value(self.builder, stride)
        self.depth = Value(self.builder, depth)
        for place, total in enumerate(self._results()):
            row, across = divmod(place, ACROSS)
            self.store(total, out, Value(self.builder, out_stride) * row + across * LANES)

    def _results(self) -> list[Value]:
        """Write the loop; return the sums as float32 registers."""
        zeros = [self._zeros()] * (self.rows * ACROSS)
        with self.rounds(self.depth, self.steps, zeros) as loop:
            for number in range(0, self.steps, self.steps_per_word):
                step = self._step(loop.at + number)
                word = step // self.steps_per_word
                self._prefetch_later(word)
                for place, columns in enumerate(self._columns_of(word)):
                    loop.carried = self._added(loop.carried, columns, step + place)
        return self._finished(loop.carried)

    def _step(self, number: Value) -> Value:
        """Return the step of depth that is added as this number."""
        return number if self.order is None else self.loaded(self.order, number, INDEX)

    def _columns_of(self, word: Value) -> Iterable[list[Value]]:
        """Load the columns of a word; return them as float32 registers for each step of depth in the word."""
        start = word * self.stride
        if self.steps_per_word == 1:
            return [self._panel_at(start, self.vector)]
        both = self._panel_at(start, self.words)
        early = [(words << 16).seen_as(self.vector) for words in both]
        return [early, [(words & 0xFFFF0000).seen_as(self.vector) for words in both]]

    def _added(self, sums: list[Value], columns: list[Value], step: Value) -> list[Value]:
        """Return the sums of all rows plus the products of one step of depth."""
        added = []
        for number, row in enumerate(self.summed):
            spread = self._spread(self._place_of_x(step, row))
            part = sums[number * ACROSS : (number + 1) * ACROSS]
            added += [self._product(total, spread, column) for column, total in zip(columns, part, strict=True)]
        return added

    def _place_of_x(self, step: Value, row: int) -> Value:
        if self.x_pitch is None:
            return step * self.rows + row
        return Value(self.builder, self.x_pitch) * row + step

    def _spread(self, index: Value, kind: Any = None) -> Value:
        """Return a word of x in all lanes, as a number of type `kind`; None: the type of x."""
        number = self.loaded(self.x, index, kind or self.x.type.pointee)
        return spread_out(self.builder, number, LANES)

    def _product(self, total: Value, spread: Value, column: Value) -> Value:
        """Return `total` + `spread` * `column`."""
        return self.fused(column, spread, total)

    def _finished(self, sums: list[Value]) -> list[Value]:
        """Return the results, as float32 registers, given the sums over the whole depth."""
        return sums

    def _panel_at(self, first: Value, kind: Any) -> list[Value]:
        """Load registers across the panel, and prefetch the registers `_AHEAD` steps of depth later."""
        skipped = self.stride * _AHEAD
        found = []
        for across in range(ACROSS):
            place = first + across * LANES
            self.prefetch(self.weights, place + skipped, TO_FIRST_CACHE)
            found.append(self.loaded(self.weights, place, kind))
        return found

    def _across(self, first: Value, kind: Any) -> list[Value]:
        return [self.loaded(self.weights, first + across * LANES, kind) for across in range(ACROSS)]

    def _prefetch_later(self, word: Value) -> None:
        """Prefetch a line of the next panel while a word of this one is multiplied.

        With few rows, reading the panel takes at least as long as computing, which leaves no time to read another
        panel.
        """
        if self.later is not None and self.rows > MOST // 2:
            start, stride = (Value(self.builder, one) for one in self.later)
            self.prefetch(self.weights, start + word * stride, TO_SECOND_CACHE)

    def _zeros(self) -> Value:
        return constant(self.builder, self.vector, 0.0)


class _LoopOfHalves(_Loop):
    """A `_Loop` for panels of float16, converted to float32 as they are loaded."""

    def _columns_of(self, word: Value) -> list[list[Value]]:
        b = self.builder
        loaded = self._panel_at(word * self.stride, ir.VectorType(HALF_WORD, LANES))
        if LANES > 4:  # a single instruction converts them
            halves = ir.VectorType(ir.HalfType(), LANES)
            return [[Value(b, b.fpext(bits.seen_as(halves).register, self.vector)) for bits in loaded]]
        scale = constant(b, self.vector, float(FLOAT16_SCALE))
        found = []
        for bits in loaded:
            wide = Value(b, b.zext(bits.register, self.words))
            size = ((wide & 0x7FFF) << 13).seen_as(self.vector)
            sign = (wide & 0x8000) << 16
            number = (size * scale).seen_as(self.words)
            found.append((number | sign).seen_as(self.vector))
        return [found]


class _LoopOfWords(_Loop):
    """A `_Loop` for bfloat16 numbers in two bytes each, such as keys and values of a cache."""

    def _columns_of(self, word: Value) -> list[list[Value]]:
        b = self.builder
        loaded = self._panel_at(word * self.stride, ir.VectorType(HALF_WORD, LANES))
        wide = [Value(b, b.zext(bits.register, self.words)) for bits in loaded]
        return [[(bits << 16).seen_as(self.vector) for bits in wide]]


class _LoopOfWeights(_Loop):
    """A `_Loop` for panels of 4-bit numbers that represent exact float32 weights; see engines/cpu/nibbles.py.

    A weight is number * scale - zero point * scale, in one operation that rounds once. Both products and the weight
    have so few bits that float32 represents them exactly.
    """

    def _columns_of(self, word: Value) -> Iterator[list[Value]]:
        in_group = GROUP // _STEPS_PER_NIBBLES
        group = word // in_group
        packed = self._panel_at((word + group) * self.stride, self.words)
        last = self._across((group * (in_group + 1) + in_group) * self.stride, self.words)
        scales = [(both & OF_SCALE).seen_as(self.vector) for both in last]
        zeros = [(both & OF_ZERO).in_floats(self.vector) for both in last]
        offsets = [-(zero * scale) for zero, scale in zip(zeros, scales, strict=True)]
        for step in range(_STEPS_PER_NIBBLES):
            columns = []
            for bits, scale, offset in zip(packed, scales, offsets, strict=True):
                number = bits >> 4 * step & 15
                columns.append(self.fused(number.in_floats(self.vector), scale, offset))
            yield columns


class _LoopOfBlocks(_Loop):
    """A `_Loop` for panels of small integers in blocks, which represent exact float32 weights; see `BlockNumbers`.

    A round takes half a group, which shares a scale. After the words with numbers of a group come a word with its scales
    and a word with its offset; see `block_panels`. A weight is number * scale + offset, in one operation that rounds once.
    """

    def __init__(self, builder: Any, rows: int, steps_per_word: int = 1, x_pitch: Any = None) -> None:
        super().__init__(builder, rows, steps_per_word, x_pitch)
        self.steps = GROUP // 2
        self.in_group = GROUP // steps_per_word

    def _results(self) -> list[Value]:
        zeros = [self._zeros()] * (self.rows * ACROSS)
        with self.rounds(self.depth, self.steps, zeros) as loop:
            group = loop.at // GROUP
            scales, offsets = self._factors(group, loop.at // self.steps)
            for step in range(0, self.steps, self.steps_per_word):
                word = (loop.at + step) // self.steps_per_word
                self._prefetch_later(word)
                packed = self._panel_at((word + group * 2) * self.stride, self.words)
                for place in range(self.steps_per_word):
                    columns = []
                    for bits, scale, offset in zip(packed, scales, offsets, strict=True):
                        number = self._number(bits, place).in_floats(self.vector)
                        columns.append(self.fused(number, scale, offset))
                    loop.carried = self._added(loop.carried, columns, loop.at + (step + place))
        return loop.carried

    def _factors(self, group: Value, half: Value) -> tuple[list[Value], list[Value]]:
        """Return the scales and the offsets of a group's half; `half` counts halves of groups."""
        at = group * (self.in_group + 2) + self.in_group
        left = (half % 2 * -8 + 8).shortened(WORD)  # shift that brings the byte of this half to the top
        shift = spread_out(self.builder, left, LANES)
        of_scales = self._across(at * self.stride, self.words)
        of_offsets = self._across((at + 1) * self.stride, self.words)
        scales = [self._half(word) * self._top_byte(word << shift) for word in of_scales]
        return scales, [self._half(word) * self._top_byte(word << 8) for word in of_offsets]

    def _half(self, word: Value) -> Value:
        """Return the float16 in the lower half of each lane as float32."""
        b = self.builder
        if LANES > 4:  # a single instruction converts them
            bits = Value(b, b.trunc(word.register, ir.VectorType(HALF_WORD, LANES)))
            halves = bits.seen_as(ir.VectorType(ir.HalfType(), LANES))
            return Value(b, b.fpext(halves.register, self.vector))
        scale = constant(b, self.vector, float(FLOAT16_SCALE))
        size = ((word & 0x7FFF) << 13).seen_as(self.vector)
        sign = (word & 0x8000) << 16
        return ((size * scale).seen_as(self.words) | sign).seen_as(self.vector)

    def _top_byte(self, word: Value) -> Value:
        """Return the highest byte of each lane, which is signed, as float32."""
        return word.shifted_with_sign(24).in_floats(self.vector)

    def _number(self, bits: Value, place: int) -> Value:
        """Return the number at a place of each word: an unsigned one of 4 bits, or a signed one of 8 bits."""
        if self.steps_per_word == _STEPS_PER_NIBBLES:
            return bits >> 4 * place & 15
        return (bits << 24 - 8 * place).shifted_with_sign(24)


class _LoopOfPairs(_Loop):
    """A `_Loop` for panels and rows with two bfloat16 numbers in a word, the earlier step in the lower half.

    A word adds the product of its later step, then that of its earlier one, each rounded once to float32: the order of the
    instruction of x86. The instruction treats denormal numbers as zero, so results differ from those of other processors by
    terms below 1e-33.
    """

    def _columns_of(self, word: Value) -> list[list[Value]]:
        return [self._panel_at(word * self.stride, self.words)]

    def _added(self, sums: list[Value], columns: list[Value], step: Value) -> list[Value]:
        return super()._added(sums, columns, step // self.steps_per_word)

    def _product(self, total: Value, spread: Value, column: Value) -> Value:
        """Return `total` plus the products of two pairs of bfloat16 numbers in each lane."""
        if DOT_OF_BFLOAT16:
            names = {
                "dpbf16ps": [f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"],
                # The odd numbers of the registers, then the even ones.
                "bfmlal": ["llvm.aarch64.neon.bfmlalt", "llvm.aarch64.neon.bfmlalb"],
            }[DOT_OF_BFLOAT16]
            pairs = ir.VectorType(BFLOAT16, 2 * LANES)
            factors = [spread.seen_as(pairs).register, column.seen_as(pairs).register]
            for name in names:
                total = Value(self.builder, self.call(name, self.vector, total.register, *factors))
            return total
        later = [(words & 0xFFFF0000).seen_as(self.vector) for words in (spread, column)]
        early = [(words << 16).seen_as(self.vector) for words in (spread, column)]
        total = self.fused(later[0], later[1], total)
        return self.fused(early[0], early[1], total)


class _LoopOfBytes(_Loop):
    """A `_Loop` for panels with four int8 in a word and rows with four uint8 in a word, summed as integers.

    So results are the same on every machine. In the panel, the columns are followed by their scales and by the
    contribution of the offset 128 of x to their sums. x is followed by the scales of its rows. "sdot" and "vpmaddubsw" take
    the bytes of x without their offset, whose contribution is then not subtracted.
    """

    @property
    def in_pairs(self) -> bool:
        """Whether products are summed in 16 bits first."""
        return DOT_OF_BYTES == "vpmaddubsw"

    def _columns_of(self, word: Value) -> list[list[Value]]:
        return [self._panel_at(word * self.stride, self.words)]

    def _added(self, sums: list[Value], columns: list[Value], step: Value) -> list[Value]:
        return super()._added(sums, columns, step // self.steps_per_word)

    def _product(self, total: Value, spread: Value, column: Value) -> Value:
        """Return `total` plus the products of four unsigned bytes with four signed ones in each lane."""
        if DOT_OF_BYTES == "sdot":
            return self._with_products(total, spread ^ 0x80808080, column)
        if not self.in_pairs:
            return self._with_products(total, spread, column)
        signed = spread ^ 0x80808080
        size = self._in_bytes("llvm.abs", signed, ir.Constant(ir.IntType(1), 0))
        pairs = self._with_pairs(self._zeros(), size, self._signed_like(column, signed))
        return total + self._sum_of_pairs(pairs)

    def _in_bytes(self, name: str, value: Value, *given: Any) -> Value:
        """Return the words of an operation on the bytes of words."""
        bytes_of = ir.VectorType(BYTE, 4 * LANES)
        found = self.call(f"{name}.v{4 * LANES}i8", bytes_of, value.seen_as(bytes_of).register, *given)
        return Value(self.builder, found).seen_as(self.words)

    def _signed_like(self, column: Value, signed: Value) -> Value:
        """Return the bytes of a column, with the other sign where the byte of `signed` is negative."""
        bytes_of = ir.VectorType(BYTE, 4 * LANES)
        of_column, of_sign = (one.seen_as(bytes_of) for one in (column, signed))
        if LANES == 8:
            found = self.call("llvm.x86.avx2.psign.b", bytes_of, of_column.register, of_sign.register)
            return Value(self.builder, found).seen_as(self.words)
        opposite = constant(self.builder, bytes_of, 0) - of_column
        found = self.builder.select(of_sign < 0, opposite.register, of_column.register)
        return Value(self.builder, found).seen_as(self.words)

    def _with_pairs(self, total: Value, unsigned: Value, signed: Value) -> Value:
        """Return `total` plus the sums of two products of bytes, both in 16 bits, which they must fit."""
        name = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}[LANES]
        bytes_of = ir.VectorType(BYTE, 4 * LANES)
        halves = ir.VectorType(HALF_WORD, 2 * LANES)
        factors = [one.seen_as(bytes_of).register for one in (unsigned, signed)]
        pairs = Value(self.builder, self.call(name, halves, *factors))
        return (total.seen_as(halves) + pairs).seen_as(self.words)

    def _sum_of_pairs(self, pairs: Value) -> Value:
        """Return the sum of both halves of each lane, which are signed."""
        name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[LANES]
        halves = ir.VectorType(HALF_WORD, 2 * LANES)
        ones = constant(self.builder, self.words, 0x00010001).seen_as(halves)
        return Value(self.builder, self.call(name, self.words, pairs.seen_as(halves).register, ones.register))

    def _with_products(self, total: Value, unsigned: Value, signed: Value) -> Value:
        """Return `total` plus the products of four bytes with four bytes in each lane.

        Args:
            unsigned: for "sdot" it must be in the range of signed bytes.
        """
        if DOT_OF_BYTES == "vpdpbusd":
            name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
            given = [one.register for one in (total, unsigned, signed)]
            return Value(self.builder, self.call(name, self.words, *given))
        if DOT_OF_BYTES:
            quarters = ir.VectorType(ir.IntType(8), 4 * LANES)
            name = f"llvm.aarch64.neon.{DOT_OF_BYTES}.v{LANES}i32.v{4 * LANES}i8"
            factors = [one.seen_as(quarters).register for one in (unsigned, signed)]
            return Value(self.builder, self.call(name, self.words, total.register, *factors))
        for place in range(4):
            low = unsigned >> 8 * place & 255
            high = (signed << 24 - 8 * place).shifted_with_sign(24)
            total = total + low * high
        return total

    def _finished(self, sums: list[Value]) -> list[Value]:
        words = self.depth // self.steps_per_word
        end = words * self.stride
        scales = self._across(end, self.vector)
        offsets = self._across(end + WIDTH, self.words)
        finished = []
        for place, total in enumerate(sums):
            row, across = divmod(place, ACROSS)
            scale = self._spread(words * self.rows + row, FLOAT)
            own = total if DOT_OF_BYTES == "sdot" or self.in_pairs else total - offsets[across]
            whole = own.in_floats(self.vector)
            finished.append(whole * scales[across] * scale)
        return finished

    def _zeros(self) -> Value:
        return constant(self.builder, self.words, 0)


class _LoopOfNibbles(_LoopOfBytes):
    """A `_LoopOfBytes` for panels with eight 4-bit numbers in a word, in groups with a scale for each column.

    The numbers of the panel are unsigned, with an offset of 8; those of x are signed. The sum of a group is an integer;
    it is then multiplied by the scale and added to the sums of earlier groups. After the words of a group comes one
    word for each two columns: its lower half is the scale, a bfloat16, of a column in the first half of the panel, its
    upper half the scale of one in the second half. After the scales of the rows of x comes the correction for the
    offset, per group and row. The products of a group by "vpmaddubsw" are summed in 16 bits first, which they fit.
    """

    def _results(self) -> list[Value]:
        words = GROUP // _STEPS_PER_NIBBLES  # of a group in a column
        scales_at = self.depth // self.steps_per_word * self.rows
        starts_at = scales_at + self.rows
        zeros = [constant(self.builder, self.vector, 0.0)] * (self.rows * ACROSS)
        with self.rounds(self.depth // GROUP, 1, zeros) as loop:
            group = loop.at
            of_words = self.stride * words
            first = group * (of_words + LANES)
            scales = self._scales(first + of_words)
            starts: list[Value] = []
            for row in range(self.rows):
                starts += [self._spread(starts_at + group * self.rows + row)] * ACROSS
            whole = [self._zeros()] * len(starts) if self.in_pairs else starts
            for word in range(words):
                both = self._panel_at(first + self.stride * word, self.words)
                early = [nibbles & _LOWER for nibbles in both]
                late = [nibbles >> 4 & _LOWER for nibbles in both]
                step = group * GROUP + word * _STEPS_PER_NIBBLES
                whole = self._added(whole, early, step)
                whole = self._added(whole, late, step + self.steps_per_word)
            if self.in_pairs:
                whole = [start + self._sum_of_pairs(pairs) for start, pairs in zip(starts, whole, strict=True)]
            sums = []
            for start, total, scale in zip(loop.carried, whole, scales * self.rows, strict=True):
                sums.append(self.fused(scale, total.in_floats(self.vector), start))
            loop.carried = sums
        factors = [self._spread(scales_at + row, FLOAT) for row in range(self.rows)]
        return [total * factors[place // ACROSS] for place, total in enumerate(loop.carried)]

    def _product(self, total: Value, spread: Value, column: Value) -> Value:
        """Return `total` plus the products of four signed bytes with four unsigned ones in each lane."""
        add = self._with_pairs if self.in_pairs else self._with_products
        return add(total, column, spread)

    def _scales(self, index: Value) -> list[Value]:
        both = self.loaded(self.weights, index, self.words)
        return [bits.seen_as(self.vector) for bits in (both << 16, both & 0xFFFF0000)]


class _LoopOfBinaries(_LoopOfNibbles):
    """A `_LoopOfNibbles` for panels of two binary matrices with scales; see engines/cpu/binary_panels.py.

    An instruction multiplies the bytes of a row by the entries of four steps, one in each byte.
    """

    def _results(self) -> list[Value]:
        """See `_Loop._results`. Many rows take two loops: a group has two integers and a float for each result."""
        if self.rows <= MOST // 2:
            return self._results_of_summed()
        found = []
        for first, stop in ((0, self.rows // 2), (self.rows // 2, self.rows)):
            self.summed = range(first, stop)
            found += self._results_of_summed()
        return found

    def _results_of_summed(self) -> list[Value]:
        words = BINARY_GROUP // _STEPS_PER_BITS  # of a group in a column of a binary matrix
        rows = len(self.summed)
        scales_at = self.depth // self.steps_per_word * self.rows
        zeros = [constant(self.builder, self.vector, 0.0)] * (rows * ACROSS)
        with self.rounds(self.depth // BINARY_GROUP, 1, zeros) as loop:
            first = loop.at * self.stride * (2 * words + 1)
            both = self._across(first + self.stride * (2 * words), self.words)
            shares = [[one << 16 for one in both], [one & 0xFFFF0000 for one in both]]
            for number, scales in enumerate(shares):
                whole = [self._zeros()] * (rows * ACROSS)
                for word in range(words):
                    bits = self._panel_at(first + self.stride * (number * words + word), self.words)
                    whole = self._counted(whole, bits, loop.at * BINARY_GROUP + word * _STEPS_PER_BITS)
                if self.in_pairs:
                    whole = [self._sum_of_pairs(pairs) for pairs in whole]
                sums = []
                for start, total, scale in zip(loop.carried, whole, scales * rows, strict=True):
                    sums.append(self.fused(scale.seen_as(self.vector), total.in_floats(self.vector), start))
                loop.carried = sums
        factors = [self._spread(scales_at + row, FLOAT) for row in self.summed]
        return [total * factors[place // ACROSS] for place, total in enumerate(loop.carried)]

    def _counted(self, sums: list[Value], bits: list[Value], step: Value) -> list[Value]:
        """Return the sums of all rows plus the numbers of a row at the steps, from `step` on, whose bit is 1."""
        for turn in range(_STEPS_PER_BITS // self.steps_per_word):
            entries = [one >> turn & _LOWEST for one in bits]
            sums = self._added(sums, entries, step + turn * self.steps_per_word)
        return sums


class _LoopOfPlanes(_LoopOfBinaries):
    """A `_LoopOfBinaries` for processors without products of bytes: rows are split into their bits.

    The numbers of a row where a bit of the panel is 1 add up to the counts of common bits, each times its value.
    """

    def _counted(self, sums: list[Value], bits: list[Value], step: Value) -> list[Value]:
        found = []
        word = step // self.steps_per_word
        for number, row in enumerate(self.summed):
            planes = [self._spread(self._place_of_x(word + plane, row), WORD) for plane in range(_BITS_OF_ROWS)]
            *lower, sign = planes
            for across, of_panel in enumerate(bits):
                total = self._zeros() - self._count(of_panel & sign)  # in two's complement, the highest bit is negative
                for plane in reversed(lower):
                    total = total + total + self._count(of_panel & plane)
                found.append(sums[number * ACROSS + across] + total)
        return found

    def _count(self, bits: Value) -> Value:
        """Return the number of ones in each lane."""
        return Value(self.builder, self.call(f"llvm.ctpop.v{LANES}i32", self.words, bits.register))


if compiling.AVAILABLE:

    @intrinsic
    def write_sums(typing: Any, rows: Any, weights: Any, x: Any, out: Any, places: Any) -> Any:
        """Write the products of 1 to `MOST` rows with the columns of one panel to `out`.

        out[out + row * out_stride + column] = sum over steps of x[x + step * rows + row] *
        weights[weights + step * stride + column], with the numbers in `places`, see `PanelPlaces`.

        Weights are float32; uint32 with two bfloat16 each; complex64 with four, and x uint16, bfloat16; uint8, two for a
        float16; uint64 with sixteen 4-bit numbers each, see engines/cpu/nibbles.py; int64 or float64, with numbers of 4 or
        8 bits in blocks, see engines/cpu/block_panels.py; int32 with four int8 each, and x int32; int16 with four 4-bit
        numbers each, and x uint32; or complex128, with bits, see engines/cpu/binary_panels.py, and x uint32, or int16 on
        processors without `DOT_OF_BYTES`; the last three as `panels.write_transposed` makes them.

        With more than half of `MOST` rows, the line of weights[later + word * later_stride] is prefetched for each word of
        a column, so that the next panel is already in the cache.
        """

        def loop_of(builder: Any, rows: int, kind: Any, places: PanelPlaces) -> _Loop:
            loop = _loop(builder, rows, kind)
            # The pointer to the weights is that of this panel, in words.
            distance = builder.sub(places.later, places.weights)
            if kind in _WORDS_OF:
                distance = builder.mul(distance, ir.Constant(INDEX, _WORDS_OF[kind]))
            loop.later = (distance, places.later_stride)
            return loop

        return types.void(types.int64, weights, x, out, places), _code_of_sums(loop_of)

    @intrinsic
    def write_row_sums(typing: Any, rows: Any, weights: Any, x: Any, out: Any, places: Any) -> Any:
        """Write the same products as `write_sums` for rows of x that are not transposed, `PanelPlaces.x_pitch` apart.

        Weights are float32, or uint16, the bits of bfloat16 numbers.
        """

        def loop_of(builder: Any, rows: int, kind: Any, places: PanelPlaces) -> _Loop:
            loop = _LoopOfWords if kind == types.uint16 else _Loop
            return loop(builder, rows, x_pitch=places.x_pitch)

        return types.void(types.int64, weights, x, out, places), _code_of_sums(loop_of)

    @intrinsic
    def write_ordered_sums(typing: Any, rows: Any, weights: Any, x: Any, out: Any, places: Any, order: Any) -> Any:
        """Write the products of `write_row_sums`, whose steps of depth are order[:places.depth], int64, in this order."""

        def loop_of(builder: Any, rows: int, kind: Any, places: PanelPlaces) -> _Loop:
            loop = _LoopOfWords if kind == types.uint16 else _Loop
            return loop(builder, rows, x_pitch=places.x_pitch)

        return types.void(types.int64, weights, x, out, places, order), _code_of_sums(loop_of)


def _code_of_sums(loop_of: Callable[[Any, int, Any, PanelPlaces], _Loop]) -> Callable[..., Any]:
    """Return the function that writes the code of `write_sums`, by the loops for numbers of rows and a dtype of weights."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        places = PanelPlaces(*numbers_in(context, builder, signature.args[4], args[4]))
        starts = ((1, places.weights), (2, places.x), (3, places.out))
        weights, x, out = places_in(context, builder, signature, args, starts)
        order = None
        if len(args) > _ORDER:
            (order,) = places_in(context, builder, signature, args, ((_ORDER, ir.Constant(INDEX, 0)),))
        kind = signature.args[1].dtype
        if kind == types.int16 or kind in _WORDS_OF:  # registers hold words anyway
            weights = builder.bitcast(weights, WORD.as_pointer())
        if signature.args[2].dtype in (types.uint16, types.int16):
            x = builder.bitcast(x, WORD.as_pointer())
        if kind == types.uint8:
            weights = builder.bitcast(weights, HALF_WORD.as_pointer())

        def write(rows: int) -> None:
            loop = loop_of(builder, rows, kind, places)
            loop.order = order
            loop.write(weights, places.stride, x, out, places.out_stride, places.depth)

        _write_for_each(builder, args[0], write)
        return context.get_dummy_value()

    return code


def _write_for_each(builder: Any, number: Any, write: Any) -> None:
    """Write a switch on `number`, 1 to `MOST`, between the code that `write` writes for each number of rows."""
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
    """Return the code writer for panels of a numba dtype."""
    loop, steps_per_word = {
        types.float32: (_Loop, 1),
        types.uint32: (_Loop, 2),
        types.complex64: (_LoopOfPairs, 2),
        types.uint8: (_LoopOfHalves, 1),
        types.uint64: (_LoopOfWeights, _STEPS_PER_NIBBLES),
        types.int64: (_LoopOfBlocks, _STEPS_PER_NIBBLES),
        types.float64: (_LoopOfBlocks, _STEPS_PER_BYTES),
        types.int32: (_LoopOfBytes, 4),
        types.int16: (_LoopOfNibbles, 4),
        types.complex128: (_LoopOfBinaries if DOT_OF_BYTES else _LoopOfPlanes, 4),
    }[kind]
    return loop(builder, rows, steps_per_word)
