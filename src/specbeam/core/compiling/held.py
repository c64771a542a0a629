"""Records held in memory, which compiled functions take by address: many of one type in an array of addresses.

A compiled function that serves many sessions cannot take their records as arguments: their number would be part of its type.

Do not write comprehensions in functions that use `held_at`: numba would take records for local values, and remove
assignments to elements of their arrays.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Int64

from specbeam.core.compiling.compiler import AVAILABLE, compiled

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
_SIZES: dict[Any, int] = {}  # bytes of records, by fingerprint
_ALL: "WeakValueDictionary[int, Held]" = WeakValueDictionary()  # by address, for steps whose source Python runs


class Held:
    """A borrowed record held in memory, with its address for `held_at`.

    The record and its arrays stay alive with this object. The contents of its arrays may change, its fields may not.
    """

    def __init__(self, record: Any) -> None:
        self.record = record
        self.address = id(record)
        self.kind: Any = type(record)
        if AVAILABLE:
            self.kind = compute_fingerprint(record)
            self._memory = np.zeros(_size_of(record, self.kind), dtype=np.uint8)
            self.address = self._memory.ctypes.data
            _write(record, self.address)
        _ALL[self.address] = self


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

    def _size_of(record: Any, kind: Any) -> int:
        """Return the bytes of a record in memory.

        Args:
            kind: its fingerprint, the same for all records of a type.
        """
        if kind not in _SIZES:
            context = cpu_target.target_context
            memory = context.data_model_manager[typeof(record)].memory
            _SIZES[kind] = int(context.get_abi_sizeof(memory))
        return _SIZES[kind]

    @compiled
    def _write(record: Any, address: int) -> None:
        """Write a record to memory."""
        _copy_to(record, address)
