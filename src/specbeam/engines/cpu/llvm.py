"""Writers of LLVM code: registers with Python operators, access to arrays, and loops that carry registers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specbeam.core.compiling.compiler import AVAILABLE

if AVAILABLE:
    from llvmlite import ir
    from numba import types

    INDEX = ir.IntType(64)
    WORD = ir.IntType(32)
    FLOAT = ir.FloatType()
    BYTES = ir.IntType(8).as_pointer()

    class _BFloat16(ir.Type):
        """LLVM's type of a bfloat16 number, which llvmlite lacks."""

        def _to_string(self) -> str:
            return "bfloat"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, _BFloat16)

        def __hash__(self) -> int:
            return hash(_BFloat16)

    BFLOAT16 = _BFloat16()

TO_FIRST_CACHE = 3
TO_SECOND_CACHE = 2


class Value:
    """A register. Operators write the instruction for its type; integer operands become constants of this type."""

    def __init__(self, builder: Any, register: Any) -> None:
        self.builder = builder
        self.register = register
        self.kind = register.type

    def __add__(self, other: "Value | int") -> "Value":
        return self._with("add", other)

    def __sub__(self, other: "Value | int") -> "Value":
        return self._with("sub", other)

    def __mul__(self, other: "Value | int") -> "Value":
        return self._with("mul", other)

    def __floordiv__(self, other: "Value | int") -> "Value":
        return self._with("udiv", other)

    def __mod__(self, other: "Value | int") -> "Value":
        return self._with("urem", other)

    def __and__(self, other: "Value | int") -> "Value":
        return self._with("and_", other)

    def __or__(self, other: "Value | int") -> "Value":
        return self._with("or_", other)

    def __xor__(self, other: "Value | int") -> "Value":
        return self._with("xor", other)

    def __lshift__(self, other: "Value | int") -> "Value":
        return self._with("shl", other)

    def __rshift__(self, other: "Value | int") -> "Value":
        """Shift bits to the right, and fill with zeros."""
        return self._with("lshr", other)

    def __lt__(self, other: "Value | int") -> Any:
        return self.builder.icmp_signed("<", self.register, self._other(other).register)

    def __neg__(self) -> "Value":
        return Value(self.builder, self.builder.fneg(self.register))

    def _with(self, name: str, other: "Value | int") -> "Value":
        element = self.kind.element if isinstance(self.kind, ir.VectorType) else self.kind
        name = f"f{name}" if isinstance(element, ir.FloatType) else name
        return Value(self.builder, getattr(self.builder, name)(self.register, self._other(other).register))

    def _other(self, other: "Value | int") -> "Value":
        return other if isinstance(other, Value) else constant(self.builder, self.kind, other)

    def seen_as(self, kind: Any) -> "Value":
        """Return the same bits as a register of another type."""
        return Value(self.builder, self.builder.bitcast(self.register, kind))

    def shifted_with_sign(self, bits: int) -> "Value":
        """Return integers with their bits shifted to the right, filled with the sign."""
        return Value(self.builder, self.builder.ashr(self.register, self._other(bits).register))

    def shortened(self, kind: Any) -> "Value":
        """Return integers as a type of fewer bits."""
        return Value(self.builder, self.builder.trunc(self.register, kind))

    def in_floats(self, kind: Any) -> "Value":
        """Return signed integers as floats."""
        return Value(self.builder, self.builder.sitofp(self.register, kind))


def constant(builder: Any, kind: Any, number: float) -> Value:
    """Return a register with a number, in all lanes of a vector."""
    lanes = [number] * kind.count if isinstance(kind, ir.VectorType) else number
    return Value(builder, ir.Constant(kind, lanes))


class Loop:
    """A loop that is being written.

    Attributes:
        at: its counter.
        carried: registers at the start of a round; the writer of the body replaces them by the values at its end.
    """

    def __init__(self, at: Value, carried: list[Value]) -> None:
        self.at = at
        self.carried = carried


class CodeWriter:
    """A writer of code at the position of a builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def index(self, number: int) -> Value:
        """Return a constant of 64 bits."""
        return constant(self.builder, INDEX, number)

    def place(self, array: Any, index: Value, kind: Any) -> Any:
        """Return a pointer of a register type to an index of an array."""
        return self.builder.bitcast(self.builder.gep(array, [index.register]), kind.as_pointer())

    def loaded(self, array: Any, index: Value, kind: Any) -> Value:
        """Load a register of a type from an array, starting at an index."""
        return Value(self.builder, self.builder.load(self.place(array, index, kind), align=4))

    def store(self, value: Value, array: Any, index: Value) -> None:
        """Store a register in an array, starting at an index."""
        self.builder.store(value.register, self.place(array, index, value.kind), align=4)

    def prefetch(self, array: Any, index: Value, cache: int) -> None:
        """Prefetch the cache line of an index of an array into one of the processor's caches."""
        options = [ir.Constant(WORD, number) for number in (0, cache, 1)]
        line = self.builder.bitcast(self.builder.gep(array, [index.register]), BYTES)
        self.call("llvm.prefetch.p0", ir.VoidType(), line, *options)

    def call(self, name: str, result: Any, *given: Any) -> Any:
        """Call an LLVM function by name; return a register of type `result`."""
        kinds = [one.type for one in given]
        known = self.builder.module.globals.get(name)
        function = known or ir.Function(self.builder.module, ir.FunctionType(result, kinds), name)
        return self.builder.call(function, given)

    def fused(self, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c, rounded once."""
        name = f"llvm.fma.v{a.kind.count}f32"
        return Value(self.builder, self.call(name, a.kind, a.register, b.register, c.register))

    @contextmanager
    def rounds(self, stop: Value, step: int, carried: Sequence[Value] = ()) -> Iterator[Loop]:
        """Write a loop from 0 to `stop` in steps, at least one round; its body is the code written in this context.

        Args:
            carried: registers at the start of the first round; after the context `Loop.carried` holds their final values.
        """
        b = self.builder
        before = b.block
        body = b.append_basic_block("loop")
        end = b.append_basic_block("end")
        b.branch(body)
        b.position_at_end(body)
        at = b.phi(INDEX)
        starts = [b.phi(one.kind) for one in carried]
        loop = Loop(Value(b, at), [Value(b, start) for start in starts])
        yield loop
        following = loop.at + step
        at.add_incoming(ir.Constant(INDEX, 0), before)
        at.add_incoming(following.register, b.block)
        for start, first, last in zip(starts, carried, loop.carried, strict=True):
            start.add_incoming(first.register, before)
            start.add_incoming(last.register, b.block)
        b.cbranch(following < stop, body, end)
        b.position_at_end(end)


def spread_out(builder: Any, number: Value, lanes: int) -> Value:
    """Return a vector with a number in all lanes."""
    kind = ir.VectorType(number.kind, lanes)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, number.register, ir.Constant(WORD, 0))
    firsts = ir.Constant(ir.VectorType(WORD, lanes), [0] * lanes)
    return Value(builder, builder.shuffle_vector(first, nothing, firsts))


def places_in(context: Any, builder: Any, signature: Any, args: Any, starts: Any) -> list[Any]:
    """Return pointers into arrays, given pairs of an argument's number and an index into this array."""
    pointers = []
    for number, start in starts:
        data = context.make_array(signature.args[number])(context, builder, args[number]).data
        pointers.append(builder.gep(data, [start]))
    return pointers


def numbers_in(context: Any, builder: Any, kind: Any, numbers: Any) -> list[Any]:
    """Return the registers of a tuple of integers, of 64 bits each."""
    found = []
    for place, one in enumerate(kind.types):
        found.append(context.cast(builder, builder.extract_value(numbers, place), one, types.int64))
    return found
