"""Reference counts of records in steps: only for variables that own what they hold.

numba counts a reference to each array of a record whenever the record or one of its fields is assigned, and takes it back
when the variable ends. With thirty arrays in a record this was a third of the LLVM code of a turn, most of which LLVM found
to cancel out. Here a variable owns references only if it needs them:

- Arguments, and what is read from them, belong to the caller until the function returns.
- What is read from a variable that outlives it belongs to that variable.
- A variable that is copied into another one or into a record, and ends there, passes its references on.
- If a record is only taken apart, its parts take over its references.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from numba import types
from numba.core import ir
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.registry import cpu_target
from numba.core.typed_passes import NativeLowering

KindOf = Callable[[str], Any]  # returns the numba type of a variable
_BASIC = (types.Integer, types.SliceType)  # indices that make a view of an array


class OwningLower(Lower):
    """Writes the LLVM code of a function, with references only for variables that own what they hold."""

    def init(self) -> None:
        """Find out what the variables own; in a function without counts there is nothing to find."""
        super().init()
        is_counted = self.context.enable_nrt and not self.func_ir.func_id.is_generator
        bodies = [block.body for block in self.blocks.values()] if is_counted else []
        self.ownership = Ownership(bodies, self.typeof, self._singly_assigned_vars)

    def lower_inst(self, inst: Any) -> None:
        """Write the code of a statement."""
        if id(inst) in self.ownership.ended:
            self._end_parts(inst.value, self.ownership.ended[id(inst)])
            with self._without_counts():
                super().lower_inst(inst)
        else:
            super().lower_inst(inst)

    def lower_assign(self, ty: Any, inst: Any) -> Any:
        """Write the code that computes the value of an assignment, and return the value."""
        counted = self.ownership.counted.get(id(inst))
        if counted is None:
            return super().lower_assign(ty, inst)
        with self._without_counts():
            value = super().lower_assign(ty, inst)
        for name in counted:
            self.incref(self.typeof(name), self.loadvar(name))
        return value

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        """Write the code that stores a value in a variable, and takes back references of its previous value."""
        if name in self.ownership.borrowing:
            with self._without_counts():
                super().storevar(value, name, argidx)
        else:
            super().storevar(value, name, argidx)

    def _end_parts(self, name: str, parts: list[int]) -> None:
        """Write the code that takes back the references of some parts of a record."""
        for part in parts:
            value = self.builder.extract_value(self.loadvar(name), part)
            self.decref(self.typeof(name)[part], value)

    @contextmanager
    def _without_counts(self) -> Iterator[None]:
        """Write no code that counts references."""
        before = self.context.enable_nrt
        self.context.enable_nrt = False
        try:
            yield
        finally:
            self.context.enable_nrt = before


@register_pass(mutates_CFG=True, analysis_only=False)
class _OwningLowering(NativeLowering):
    _name = "specbeam_owning_lowering"

    @property
    def lowering_class(self) -> type:
        return OwningLower


class StepCompiler(Compiler):
    """numba's compiler, with `OwningLower`."""

    def define_pipelines(self) -> Any:
        """Return numba's pipelines, with our pass in place of the one that writes LLVM code."""
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [
                (_OwningLowering if one is NativeLowering else one, text) for one, text in pipeline.passes
            ]
            pipeline.finalize()
        return pipelines


class _Read(NamedTuple):
    """An assignment of a part of a record, or of a view of an array, to a variable."""

    base: str
    part: int | None  # index in the record; None for a view of an array


class Ownership:
    """What the variables of a function own.

    Args:
        bodies: the statements of each block of numba's code; empty if nothing is to be found.
        kind_of: returns the numba type of a variable.
        local: variables with a single assignment that are used only in its block.

    Attributes:
        borrowing: variables that own nothing.
        counted: by the id of an assignment that counts nothing itself, the variables to which it adds references.
        ended: by the id of a deletion that must not release the variable: the parts that it still has to release.
    """

    def __init__(self, bodies: list[list[Any]], kind_of: KindOf, local: set[str]) -> None:
        self.borrowing: set[str] = set()
        self.counted: dict[int, list[str]] = {}
        self.ended: dict[int, list[int]] = {}
        self._kind_of = kind_of
        self._local = local
        self._borrow_from_caller(bodies)
        for body in bodies:
            self._borrow_from_longer_lives(body)
        uses = _uses(bodies)
        for body in bodies:
            self._take_apart(body, uses)
        for body in bodies:
            self._pass_on(body)

    def _has_references(self, name: str) -> bool:
        """Return whether values of a variable refer to counted memory."""
        return _refers(self._kind_of(name))

    def _borrow_from_caller(self, bodies: list[list[Any]]) -> None:
        """Find the variables that hold arguments and what is read from them."""
        assigns = [one for body in bodies for one in body if isinstance(one, ir.Assign)]
        times = Counter(one.target.name for one in assigns)
        waiting = [one for one in assigns if times[one.target.name] == 1]
        while True:
            found = [one for one in waiting if self._is_of_caller(one)]
            if not found:
                break
            for one in found:
                self._borrow(one)
            waiting = [one for one in waiting if one.target.name not in self.borrowing]
        for body in bodies:
            self._end_without_counts(body)

    def _is_of_caller(self, assign: Any) -> bool:
        value = assign.value
        if isinstance(value, ir.Arg):
            return self._kind_of(f"arg.{value.name}") == self._kind_of(assign.target.name)
        base = self._base(assign)
        return base is not None and base in self.borrowing

    def _base(self, assign: Any) -> str | None:
        """Return the variable that owns the value of an assignment as long as it holds it; None for a new value."""
        if isinstance(assign.value, ir.Var):
            is_same = self._kind_of(assign.value.name) == self._kind_of(assign.target.name)
            return assign.value.name if is_same else None
        read = self._read(assign)
        return None if read is None else read.base

    def _read(self, assign: Any) -> _Read | None:
        """Return what a statement reads: a part of a record or a view of an array; None if it does something else."""
        value = assign.value if isinstance(assign, ir.Assign) else None
        if not isinstance(value, ir.Expr) or value.op not in ("getattr", "static_getitem", "getitem"):
            return None
        base = value.value.name
        kind = self._kind_of(base)
        if value.op == "getattr":
            is_field = isinstance(kind, types.BaseNamedTuple) and value.attr in kind.fields
            return _Read(base, kind.fields.index(value.attr)) if is_field else None
        if isinstance(kind, types.BaseTuple) and value.op == "static_getitem":
            is_part = isinstance(value.index, int)
            return _Read(base, value.index % len(kind)) if is_part else None
        index = value.index if value.op == "getitem" else value.index_var
        is_view = isinstance(kind, types.Array) and isinstance(self._kind_of(assign.target.name), types.Array)
        return _Read(base, None) if is_view and index is not None and _is_basic(self._kind_of(index.name)) else None

    def _borrow(self, assign: Any) -> None:
        self.borrowing.add(assign.target.name)
        self.counted[id(assign)] = []

    def _end_without_counts(self, body: list[Any]) -> None:
        for one in body:
            if isinstance(one, ir.Del) and one.value in self.borrowing:
                self.ended[id(one)] = []

    def _borrow_from_longer_lives(self, body: list[Any]) -> None:
        """Find the variables of a block whose values belong to variables that are deleted or changed later."""
        ends = _ends(body)
        for place, one in enumerate(body):
            if not isinstance(one, ir.Assign):
                continue
            name = one.target.name
            if name not in self._local or name in self.borrowing or not self._has_references(name):
                continue
            base = self._base(one)
            last = next((end for end in ends[name] if end > place), None)
            if base is None or last is None:
                continue
            if all(end > last for end in ends[base] if end > place):
                self._borrow(one)
        self._end_without_counts(body)

    def _take_apart(self, body: list[Any], uses: dict[str, list[Any]]) -> None:
        """Find the records of a block that are only taken apart, and let their parts take over their references."""
        made = {one.target.name for one in body if isinstance(one, ir.Assign)}
        for one in body:
            is_end = isinstance(one, ir.Del) and id(one) not in self.ended
            if not is_end or one.value not in self._local or one.value not in made:
                continue
            kind = self._kind_of(one.value)
            if not isinstance(kind, types.BaseTuple) or not self._has_references(one.value):
                continue
            reads = [self._read(use) for use in uses[one.value]]
            parts = [read.part for read in reads if read is not None and read.base == one.value]
            if len(parts) != len(reads) or len(set(parts)) != len(parts):
                continue
            taken = []
            for use, part in zip(uses[one.value], parts, strict=True):
                if use.target.name not in self.borrowing:
                    self.counted[id(use)] = []
                    taken.append(part)
            self.ended[id(one)] = [part for part in range(len(kind)) if part not in taken and _refers(kind[part])]

    def _pass_on(self, body: list[Any]) -> None:
        """Find the assignments of a block that copy variables, and which variables end there."""
        for place, one in enumerate(body):
            if not isinstance(one, ir.Assign) or id(one) in self.counted or not self._has_references(one.target.name):
                continue
            copied = self._copied(one)
            if copied is None:
                continue
            times = Counter(copied)
            ending = {end.value: end for end in _ends_after(body, place) if id(end) not in self.ended}
            passed = {name for name in times if times[name] == 1 and name in ending}
            self.counted[id(one)] = [name for name in copied if name not in passed and self._has_references(name)]
            for name in passed:
                self.ended[id(ending[name])] = []

    def _copied(self, assign: Any) -> list[str] | None:
        """Return the variables whose values are copied into the value of an assignment; None if it makes a new value."""
        value = assign.value
        if isinstance(value, ir.Var):
            return self._if_same(value, assign.target)
        if not isinstance(value, ir.Expr):
            return None
        if value.op == "cast" or (
            value.op == "exhaust_iter" and isinstance(self._kind_of(value.value.name), types.BaseTuple)
        ):
            return self._if_same(value.value, assign.target)
        if value.op == "build_tuple":
            return [item.name for item in value.items]
        if (
            value.op == "call"
            and value.vararg is None
            and isinstance(self._kind_of(value.func.name), types.NamedTupleClass)
        ):
            return [one.name for one in (*value.args, *(named for _, named in value.kws))]
        return None

    def _makes_record(self, call: Any) -> bool:
        """Return whether a call makes a record of its arguments."""
        return isinstance(self._kind_of(call.func.name), types.NamedTupleClass)

    def _if_same(self, source: Any, target: Any) -> list[str] | None:
        is_same = self._kind_of(source.name) == self._kind_of(target.name)
        return [source.name] if is_same else None


@cache
def _refers(kind: Any) -> bool:
    """Return whether values of a type refer to counted memory."""
    return bool(cpu_target.target_context.data_model_manager[kind].contains_nrt_meminfo())


def _is_basic(kind: Any) -> bool:
    """Return whether an index of this type makes a view of an array."""
    if isinstance(kind, types.BaseTuple):
        return all(isinstance(one, _BASIC) for one in kind)
    return isinstance(kind, _BASIC)


def _ends(body: list[Any]) -> dict[str, list[int]]:
    """Return the places in a block where variables are deleted or change, by variable, in order."""
    ends = defaultdict(list)
    for place, one in enumerate(body):
        if isinstance(one, ir.Del):
            ends[one.value].append(place)
        elif isinstance(one, ir.Assign):
            ends[one.target.name].append(place)
    return ends


def _ends_after(body: list[Any], place: int) -> Iterator[Any]:
    """Yield the deletions of variables directly after a statement."""
    for one in body[place + 1 :]:
        if not isinstance(one, ir.Del):
            break
        yield one


def _uses(bodies: list[list[Any]]) -> dict[str, list[Any]]:
    """Return the statements that use each variable, other than assignments to it and its deletion."""
    uses = defaultdict(list)
    for body in bodies:
        for one in body:
            for name in _used(one):
                uses[name].append(one)
    return uses


def _used(statement: Any) -> list[str]:
    """Return the names of the variables that a statement uses, each as often as it does."""
    if isinstance(statement, ir.Del):
        return []
    source = statement.value if isinstance(statement, ir.Assign) else statement
    if isinstance(source, ir.Var):
        return [source.name]
    if isinstance(source, (ir.Expr, ir.Stmt)):
        return [variable.name for variable in source.list_vars()]
    return []  # a constant or an argument
