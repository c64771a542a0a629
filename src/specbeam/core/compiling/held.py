"""Records held in memory, which compiled functions take by address: many of one type in an array of addresses.

A compiled function that serves many sessions cannot take their records as arguments: their number would be part of its type.

Do not write comprehensions in functions that use `held_at`: numba would take records for local values, and remove
assignments to elements of their arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Int64

from specbeam.core.compiling.compiler import AVAILABLE, Array, compiled
from specbeam.core.compiling.repeated import form_for

if AVAILABLE:
    from llvmlite import ir
    from numba import typeof, types
    from numba._dispatcher import compute_fingerprint
    from numba.core import cgutils
    from numba.core.imputils import impl_ret_untracked, lower_builtin
    from numba.core.registry import cpu_target
    from numba.extending import intrinsic, type_callable

    from specbeam.core.compiling.borrowed import RecordKind

_OWNERS = 2  # the first fields of numba's array structure: the memory's counter and the Python object that owns it
_LAYOUTS: dict[Any, "_Layout"] = {}  # by the kind of a held record
_SHARED: "WeakValueDictionary[int, Held]" = WeakValueDictionary()  # by the id of a record that others contain
_ALL: "WeakValueDictionary[int, Held]" = WeakValueDictionary()  # by address, for steps whose source Python runs


class _Layout(NamedTuple):
    """Where the parts of a record are in memory.

    Attributes:
        write: writes a record with empty tuples in place of its shared fields ("the rest") to an array of bytes, and returns
            the array's address.
        size: bytes of the record.
        size_of_rest: bytes of the record without its shared fields.
        of_rest: (offset in the record, offset in the rest, bytes) of each group of fields that are not shared.
        of_shared: offset in the record of each shared field.
    """

    write: Callable[[Any, Array], int]
    size: int
    size_of_rest: int
    of_rest: list[tuple[int, int, int]]
    of_shared: list[int]


class Held:
    """A borrowed record held in memory, with its address for `held_at`.

    The record and its arrays stay alive with this object. The contents of its arrays may change, its fields may not.

    Args:
        is_shared: whether many records have this one as a field. While this object lives, they copy its memory; otherwise
            numba would read each of a model's eighty arrays for every session.
    """

    def __init__(self, record: Any, is_shared: bool = False) -> None:
        self.record = record
        self.address = id(record)
        self.kind: Any = type(record)
        if AVAILABLE:
            self._hold(record)
        if is_shared:
            _SHARED[id(record)] = self
        _ALL[self.address] = self

    def _hold(self, record: Any) -> None:
        """Write the record to memory of its own; fields that are held as shared are copied from theirs."""
        found = [_SHARED.get(id(one)) if isinstance(one, tuple) else None for one in record]
        held = [one for one in found if one is not None]
        rest = record
        if held:
            rest = record._make(one if other is None else () for one, other in zip(record, found, strict=True))
        self.kind = (compute_fingerprint(rest), *(one.kind for one in held))
        layout = _LAYOUTS.get(self.kind)
        if layout is None:
            layout = _LAYOUTS[self.kind] = _layout_of(record, rest)
        written = np.zeros(layout.size_of_rest, dtype=np.uint8)
        self.address = layout.write(rest, written)
        self._memory = written
        if held:
            self._memory = np.zeros(layout.size, dtype=np.uint8)
            self.address = self._memory.ctypes.data
            for start, start_in_rest, size in layout.of_rest:
                self._memory[start : start + size] = written[start_in_rest : start_in_rest + size]
            for start, one in zip(layout.of_shared, held, strict=True):
                self._memory[start : start + len(one._memory)] = one._memory


def addresses_of(records: Sequence[Held]) -> Int64[np.ndarray, " records"]:
    """Return the addresses of records of one type. Raises `TypeError` if their types differ."""
    if len({one.kind for one in records}) > 1:
        raise TypeError(f"compiled functions take held records of one type, not {len({one.kind for one in records})}")
    return np.array([one.address for one in records], dtype=np.int64)


def held_at(address: Any, like: Any) -> Any:
    """Return the record at an address; in compiled code it has the type of `like`, which must be that of the record.

    Args:
        address: of a `Held`, or the result of `address_of_record`.
    """
    return _ALL[int(address)].record if isinstance(address, (int, np.integer)) else address


def address_of_record(record: Any) -> Any:
    """Return a value by which `held_at` finds a record that is held, or is a field of a held record."""
    return record


if AVAILABLE:
    # Compiled into the caller: a compiled function would return a copy of the record.
    @type_callable(held_at)
    def _held_at_kind(context: Any) -> Any:
        return lambda address, like: like if isinstance(like, RecordKind) else None

    @lower_builtin(held_at, types.Integer, RecordKind)
    def _record_at(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        memory = context.data_model_manager[kind].memory
        found = builder.inttoptr(args[0], memory.as_pointer())
        return impl_ret_untracked(context, builder, kind, found)

    @type_callable(address_of_record)
    def _address_kind(context: Any) -> Any:
        return lambda record: types.int64 if isinstance(record, RecordKind) else None

    @lower_builtin(address_of_record, RecordKind)
    def _address_in(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.ptrtoint(args[0], ir.IntType(64))
        return impl_ret_untracked(context, builder, types.int64, found)

    @intrinsic
    def _copy_to(typing: Any, record: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = signature.args[0]
            memory = context.data_model_manager[kind].memory
            goal = builder.inttoptr(args[1], memory.as_pointer())
            builder.store(builder.load(args[0]), goal)
            _forget_owners(context, builder, kind, goal)
            return context.get_dummy_value()

        return (types.void(record, types.int64), code) if isinstance(record, RecordKind) else None

    def _forget_owners(context: Any, builder: Any, kind: Any, place: Any) -> None:
        """Write code that clears the owners of all arrays of a record, which Python keeps alive."""
        if isinstance(kind, types.Array):
            for number in range(_OWNERS):
                field = cgutils.gep_inbounds(builder, place, 0, number)
                builder.store(ir.Constant(field.type.pointee, None), field)
        elif isinstance(kind, types.BaseTuple):
            for number, one in enumerate(kind.types):
                _forget_owners(context, builder, one, cgutils.gep_inbounds(builder, place, 0, number))

    def _layout_of(record: Any, rest: Any) -> _Layout:
        """Return the layout of a record.

        Args:
            rest: see `_Layout.write`.
        """
        context = cpu_target.target_context
        target = context.target_data
        memory = context.data_model_manager[typeof(record)].memory
        memory_of_rest = context.data_model_manager[typeof(rest)].memory
        of_rest: list[tuple[int, int, int]] = []
        of_shared = []
        for place, one in enumerate(record):
            start = memory.get_element_offset(target, place)
            if rest[place] is not one:
                of_shared.append(start)
                continue
            start_in_rest = memory_of_rest.get_element_offset(target, place)
            stop = start + memory.elements[place].get_abi_size(target)
            if of_rest and start - start_in_rest == of_rest[-1][0] - of_rest[-1][1]:
                start, start_in_rest, _ = of_rest.pop()
            of_rest.append((start, start_in_rest, stop - start))
        size = memory.get_abi_size(target)
        size_of_rest = memory_of_rest.get_abi_size(target)
        write = form_for(_write, (rest, np.zeros(size_of_rest, dtype=np.uint8)))
        return _Layout(write, size, size_of_rest, of_rest, of_shared)

    @compiled
    def _write(record: Any, memory: Array) -> int:
        """Write a record to memory, and return its address."""
        address = memory.ctypes.data
        _copy_to(record, address)
        return address
