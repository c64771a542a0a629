"""The list of the forms of steps that a first text needs, so that several processes can compile them in parallel.

The argument types of a step are known only when its caller is compiled, so without a list forms are compiled one after the
other. An outdated list does not affect texts: extra forms are unused, and missing ones are compiled when they are needed. It
only wastes time and memory of the worker processes, at low priority.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from numba import types

from specbeam.core.compiling.borrowed import RecordKind
from specbeam.core.compiling.linking import function_named

PLACE = Path(__file__).with_name("first_text.jsonl")
_ARRAY = re.compile(r"(readonly )?array\((\w+), (\d)d, ([CFA])\)")


class StepForm(NamedTuple):
    """One form of a step, or of the entry through which Python calls it."""

    module: str
    name: str  # qualified, in its module
    is_entry: bool
    kinds: tuple[Any, ...]  # the numba types of its arguments
    needs: list[int]  # indices, in the list, of the forms that it calls

    def function(self) -> Any:
        """Return the compiled function of this form. Raises an error if it does not exist."""
        found = function_named(self.module, self.name)
        return found.python_entry if self.is_entry else found


def text_of(modules: list[str], forms: list[StepForm]) -> str:
    """Return a list of forms as lines of JSON: modules, record types, each of which refers only to earlier ones, and forms.

    Args:
        modules: all modules that register steps. A form's cache key includes the steps registered for its records.
        forms: each after the forms that it calls.

    Raises:
        TypeError: a form has an argument of a type that lists cannot express.
    """
    numbers: dict[Any, int] = {}
    lines: list[Any] = [["module", module] for module in modules]

    def written(kind: Any) -> Any:
        if isinstance(kind, types.BaseNamedTuple):
            if kind not in numbers:
                record = kind.instance_class
                inside = [written(one) for one in kind.types]
                lines.append(["record", record.__module__, record.__qualname__, isinstance(kind, RecordKind), inside])
                numbers[kind] = len(numbers)
            return numbers[kind]
        if isinstance(kind, types.BaseTuple):
            return [written(one) for one in kind.types]
        if _kind_named(str(kind)) != kind:
            raise TypeError(f"a list of forms cannot express the type {kind}")
        return str(kind)

    for form in forms:
        kinds = [written(kind) for kind in form.kinds]
        lines.append(["entry" if form.is_entry else "step", form.module, form.name, kinds, form.needs])
    return "".join(json.dumps(line) + "\n" for line in lines)


def forms_in(text: str) -> list[StepForm]:
    """Return the forms in the lines of `text_of`. Imports the modules of their records.

    Record classes and numba types that do not exist are None in the argument types of forms.
    """
    records: list[Any] = []
    forms = []

    def read(kind: Any) -> Any:
        if isinstance(kind, int):
            return records[kind]
        if isinstance(kind, list):
            inside = [read(one) for one in kind]
            return None if None in inside else types.BaseTuple.from_types(inside)
        return _kind_named(kind)

    for what, module, *rest in _lines_of(text):
        if what == "record":
            (name, is_borrowed, inside) = rest
            records.append(_record_kind(module, name, is_borrowed, [read(one) for one in inside]))
        elif what != "module":
            (name, kinds, needs) = rest
            forms.append(StepForm(module, name, what == "entry", tuple(read(one) for one in kinds), needs))
    return forms


def names_in(text: str) -> frozenset[tuple[str, str]]:
    """Return the module and the name of each step in the lines of `text_of`, without imports."""
    return frozenset((module, rest[0]) for what, module, *rest in _lines_of(text) if what in ("step", "entry"))


def modules_in(text: str) -> list[str]:
    """Return the modules in the lines of `text_of`."""
    return [module for what, module, *_ in _lines_of(text) if what == "module"]


def _lines_of(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def _record_kind(module: str, name: str, is_borrowed: bool, kinds: list[Any]) -> Any:
    """Return the numba type of the records of a class; None if there is no such class with as many fields."""
    with suppress(ImportError, AttributeError):
        record = getattr(import_module(module), name)
        if None not in kinds and len(record._fields) == len(kinds):
            make: Callable[..., Any] = RecordKind if is_borrowed else types.BaseTuple.from_types
            return make(kinds, record)
    return None


def _kind_named(name: str) -> Any:
    """Return the numba type of an array or a number by its name; None if there is none."""
    array = _ARRAY.fullmatch(name)
    if array:
        (readonly, of, dimensions, layout) = array.groups()
        return types.Array(_kind_named(of), int(dimensions), layout, readonly=bool(readonly))
    return {"bool": types.boolean, "none": types.none}.get(name) or getattr(types, name, None)
