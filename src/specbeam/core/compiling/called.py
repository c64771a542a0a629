"""Calls of compiled functions at run time: by address, with results.

A compiled function contains the types of its arguments, and so the types of all records that it passes on. A function that
calls its callees by address contains only the types that its own code needs, and is compiled once for all kinds of records.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specbeam.core.compiling.compiler import AVAILABLE
from specbeam.core.compiling.held import Held

if AVAILABLE:
    from llvmlite import ir
    from numba import typeof, types
    from numba.core.errors import NumbaTypeError
    from numba.core.typing.templates import Signature
    from numba.extending import intrinsic


class ListOf(NamedTuple):
    """In place of an example: a list of such values, as compiled functions make it."""

    example: Any


class Called(NamedTuple):
    """A function that is called by address: examples of its arguments after the records, and of its result.

    The arguments and the result have exactly the types of the examples.
    """

    records: int  # number of records, its first arguments, which are passed as addresses
    given: tuple[Any, ...]
    found: Any  # None: no result


def kind_of(example: Any) -> Any:
    """Return the numba type of an example."""
    if isinstance(example, ListOf):
        return types.List(kind_of(example.example))
    if isinstance(example, tuple) and any(isinstance(one, ListOf) for one in example):
        return types.Tuple([kind_of(one) for one in example])
    return types.unliteral(typeof(example))


def caller(name: str, called: Called) -> Any:
    """Return a function for compiled steps that calls a function by its address.

    Its arguments are the address, and a tuple of the arguments of the called function, whose records are given as addresses.
    Python cannot call it.

    Args:
        name: of the function, for errors.
        called: its description.
    """
    if not AVAILABLE:
        return None
    sentence = f"{name} was called with a record that is known by its address and has no such step"

    @intrinsic
    def call(typing: Any, address: Any, given: Any) -> Any:
        records = [types.int64] * called.records
        expected = (*records, *(kind_of(one) for one in called.given))
        found = tuple(types.unliteral(one) for one in given.types)
        if found != expected:
            differing = [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]]
            raise NumbaTypeError(f"{name} by address takes {len(expected)} arguments, not {len(found)}: {differing}")
        result = types.none if called.found is None else kind_of(called.found)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            convention = context.call_conv
            kinds = tuple(types.unliteral(one) for one in signature.args[1].types)
            pointer = convention.get_function_type(result, kinds).as_pointer()
            values = []
            for place, (kind, wanted) in enumerate(zip(signature.args[1].types, kinds, strict=True)):
                values.append(context.cast(builder, builder.extract_value(args[1], place), kind, wanted))
            is_missing = builder.icmp_signed("==", args[0], ir.Constant(args[0].type, 0))
            with builder.if_then(is_missing, likely=False):
                convention.return_user_exc(builder, NotImplementedError, (sentence,))
            place = builder.inttoptr(args[0], pointer)
            status, answer = convention.call_function(builder, place, result, kinds, values)
            with builder.if_then(status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value() if result == types.none else answer

        return Signature(result, (types.int64, given), None), code

    return call


def address_in(step: Any, records: Sequence[Held], called: Called) -> int:
    """Return the address of the form of a step for these records.

    Args:
        records: its first arguments.
        called: the description of its other arguments.
    """
    kinds = (*(typeof(one.record) for one in records), *(kind_of(one) for one in called.given))
    step.compile(kinds)
    made = step.overloads[kinds]
    expected = types.none if called.found is None else kind_of(called.found)
    if types.unliteral(made.signature.return_type) != expected:
        raise TypeError(f"{step.__qualname__} returns {made.signature.return_type}, not {expected}")
    return int(made.library.get_pointer_to_function(made.fndesc.mangled_name))
