"""Borrowed records: read-only arguments of compiled functions, passed as one address and without reference counts.

numba splits a record at each call into about ten numbers per array, and counts references to each array at each assignment.
A model's cache holds eighty arrays, so most of the code of its callees served only this. A borrowed record stays in
memory unchanged, and its fields are read where they are used. The caller owns its arrays and keeps them alive during
the call.
"""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from inspect import signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models, register_default
from numba.core.imputils import impl_ret_borrowed, impl_ret_untracked, lower_builtin, lower_getattr_generic
from numba.core.typing.typeof import typeof_impl
from numba.extending import NativeValue, box, type_callable, unbox
from numba.np.numpy_support import as_dtype

_BIT = ir.IntType(1)
_INDEX = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_NOTHING = ir.VoidType()
_ITEM_SIZE = 3  # index of the item size in numba's array structure, whose first three fields have 64 bits each


class RecordKind(types.NamedTuple):
    """The numba type of a borrowed record."""

    name: str

    def __init__(self, kinds: Any, record: type) -> None:
        super().__init__(kinds, record)
        # Mangled function names include this name, and numba's own has thousands of characters.
        self.name = f"{record.__name__}.{sha256(self.name.encode()).hexdigest()[:16]}"


@register_default(RecordKind)
class _Model(models.DataModel):
    """The memory layout of a borrowed record: inner records are inlined, and nothing is reference-counted."""

    memory: Any

    def __init__(self, manager: Any, kind: RecordKind) -> None:
        super().__init__(manager, kind)
        inner = [manager.lookup(one) for one in kind.types]
        self.memory = ir.LiteralStructType(
            [one.memory if isinstance(one, _Model) else one.get_value_type() for one in inner]
        )

    def get_value_type(self) -> Any:
        return self.memory.as_pointer()

    def get_data_type(self) -> Any:
        return self.memory

    def get_return_type(self) -> Any:
        return self.memory

    def as_argument(self, builder: Any, value: Any) -> Any:
        return value

    def from_argument(self, builder: Any, value: Any) -> Any:
        return value

    def as_data(self, builder: Any, value: Any) -> Any:
        return builder.load(value)

    def from_data(self, builder: Any, value: Any) -> Any:
        place = _room(builder, self.memory)
        builder.store(value, place)
        return place

    as_return = as_data
    from_return = from_data


def borrow(record: type) -> None:
    """Make compiled functions borrow records of a class, a NamedTuple.

    Compiled functions cannot make such a record from their own arrays (see `views_of`), nor return one to Python,
    because its arrays would be freed. They can read fields only by name, and cannot use such a record as a constant.
    """

    @typeof_impl.register(record)
    def _(value: Any, context: Any) -> Any:
        kinds = [typeof_impl(one, context) for one in value]
        if any(kind is None for kind in kinds):
            return None
        return RecordKind([types.unliteral(kind) for kind in kinds], record)


def views_of(record: type) -> Callable[..., Any]:
    """Return a function that makes a record of this class; in compiled code a borrowed one, from views of borrowed arrays.

    Each call site has memory for one record: in a loop, each iteration overwrites the record of the previous one.
    """

    def make(*values: Any) -> Any:
        return record(*values)

    @type_callable(make)
    def _(context: Any) -> Any:
        def kind_of(*kinds: Any) -> RecordKind:
            return RecordKind([types.unliteral(kind) for kind in kinds], record)

        kind_of.pysig = signature(record)  # type: ignore[attr-defined]  # as numba does for the class itself
        return kind_of

    @lower_builtin(make, types.VarArg(types.Any))
    def _(context: Any, builder: Any, called: Any, values: Any) -> Any:
        made = called.return_type
        place = _room(builder, context.data_model_manager[made].memory)
        for number, (value, given, kind) in enumerate(zip(values, called.args, made.types, strict=True)):
            goal = cgutils.gep_inbounds(builder, place, 0, number)
            if isinstance(kind, RecordKind):
                builder.store(builder.load(value), goal)
            else:
                builder.store(context.cast(builder, value, given, kind), goal)
        return impl_ret_untracked(context, builder, made, place)

    return make


@lower_getattr_generic(RecordKind)
def _field(context: Any, builder: Any, kind: RecordKind, value: Any, name: str) -> Any:
    number = kind.fields.index(name)
    place = cgutils.gep_inbounds(builder, value, 0, number)
    if isinstance(kind.types[number], RecordKind):
        return place
    return impl_ret_borrowed(context, builder, kind.types[number], builder.load(place))


@unbox(RecordKind)
def _from_python(kind: RecordKind, value: Any, c: Any) -> Any:
    builder = c.builder
    memory = c.context.data_model_manager[kind].memory
    place = _room(builder, memory)
    builder.store(ir.Constant(memory, None), place)  # fields must be empty if an error leaves them unread
    has_failed = cgutils.alloca_once_value(builder, cgutils.false_bit)
    releases: list[Callable[[], None]] = []
    _read(kind, value, place, c, has_failed, releases)

    def release() -> None:
        for one in reversed(releases):
            one()

    return NativeValue(place, cleanup=release, is_error=builder.load(has_failed))


def _read(
    kind: RecordKind, value: Any, place: Any, c: Any, has_failed: Any, releases: list[Callable[[], None]]
) -> None:
    """Write the code that reads a Python record into memory, and append the functions that release its references."""
    builder = c.builder
    size = c.pyapi.tuple_size(value)
    failed = builder.icmp_unsigned("!=", size, ir.Constant(size.type, len(kind.types)))
    for number, one in enumerate(kind.types):
        item = c.pyapi.tuple_getitem(value, number)
        goal = cgutils.gep_inbounds(builder, place, 0, number)
        if isinstance(one, RecordKind):
            _read(one, item, goal, c, has_failed, releases)
        elif isinstance(one, types.Array):
            failed = builder.or_(failed, _read_array(one, item, goal, c))
            releases.append(partial(_release_array, goal, c))
        else:
            native = c.unbox(one, item)
            failed = builder.or_(failed, native.is_error)
            builder.store(native.value, goal)
            releases.append(partial(_release, one, goal, native.cleanup, c))
    with builder.if_then(failed, likely=False):
        c.pyapi.err_set_string("PyExc_TypeError", f"the fields of this {kind.instance_class.__name__} have other types")
        builder.store(cgutils.true_bit, has_failed)


def _release(kind: Any, place: Any, cleanup: Callable[[], None] | None, c: Any) -> None:
    """Write the code that releases the references of one field."""
    if cleanup is not None:
        cleanup()
    if c.context.data_model_manager[kind].contains_nrt_meminfo():
        c.context.nrt.decref(c.builder, kind, c.builder.load(place))


def _read_array(kind: Any, value: Any, place: Any, c: Any) -> Any:
    """Write the call that reads a Python array into memory; return whether it failed.

    One function per module reads all arrays: inlined for each array, its code was half of an entry.
    """
    arguments = [c.pyapi.pyobj, _BYTES, _INDEX]
    function = cgutils.get_or_insert_function(c.builder.module, ir.FunctionType(_BIT, arguments), "specbeam.read_array")
    if function.is_declaration:
        _keep_apart(function)
        builder = ir.IRBuilder(function.append_basic_block())
        value_in, place_in, size_in = function.args
        read = ir.FunctionType(ir.IntType(32), [c.pyapi.pyobj, _BYTES])
        reader = cgutils.get_or_insert_function(c.builder.module, read, "NRT_adapt_ndarray_from_python")
        condition = builder.call(reader, [value_in, place_in])
        found = builder.load(
            builder.gep(builder.bitcast(place_in, _INDEX.as_pointer()), [ir.Constant(_INDEX, _ITEM_SIZE)])
        )
        failed = builder.icmp_signed("!=", condition, ir.Constant(condition.type, 0))
        builder.ret(builder.or_(failed, builder.icmp_signed("!=", found, size_in)))
    size = ir.Constant(_INDEX, as_dtype(kind.dtype).itemsize)
    return c.builder.call(function, [value, c.builder.bitcast(place, _BYTES), size])


def _release_array(place: Any, c: Any) -> None:
    """Write the call that releases an array."""
    function = cgutils.get_or_insert_function(
        c.builder.module, ir.FunctionType(_NOTHING, [_BYTES]), "specbeam.release_array"
    )
    if function.is_declaration:
        _keep_apart(function)
        builder = ir.IRBuilder(function.append_basic_block())
        place_in = builder.bitcast(function.args[0], _BYTES.as_pointer())
        c.context.nrt.decref(builder, types.MemInfoPointer(types.voidptr), builder.load(place_in))
        builder.ret_void()
    c.builder.call(function, [c.builder.bitcast(place, _BYTES)])


def _keep_apart(function: Any) -> None:
    """Make a function internal to its module, and never inlined."""
    function.linkage = "internal"
    function.attributes.add("noinline")


@box(RecordKind)
def _to_python(kind: RecordKind, value: Any, c: Any) -> Any:
    raise NotImplementedError(f"a borrowed {kind.instance_class.__name__} cannot be returned to Python")


def _room(builder: Any, memory: Any) -> Any:
    """Return the address of stack memory of the compiled function."""
    with builder.goto_entry_block():
        return builder.alloca(memory)
