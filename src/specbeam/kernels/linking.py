"""How compiled functions call each other: a long one is called where it stands, a short one is compiled into its callers.

numba compiles all that a function calls into it, and all that those call: of functions in a chain of ten the last one is
compiled ten times. Calls by name compile each long function once, and its machine code is kept once.
"""

import copy
import inspect
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import Any

from llvmlite import binding, ir

_FUNCTIONS: dict[tuple[str, str], Any] = {}  # all that were made, by module and name
LONG = 400  # lines of LLVM code, from which a call costs nothing beside what is called


def call_where_it_stands(function: Any) -> None:
    """Let the callers of a compiled function call each of its long forms by name."""
    source = function.py_func
    _FUNCTIONS[source.__module__, source.__qualname__] = function

    def add_overload(result: Any) -> None:
        # A form that was read from disk is compiled into callers too, and they need all that it needs.
        result.library._reload_init.update(result.reload_init or ())
        function.overloads[tuple(result.signature.args)] = result  # and Python is not told: it comes by another door
        is_found_by_name = "<locals>" not in function.py_func.__qualname__
        if is_found_by_name and is_long(result.library):
            _name(function, result)

    function.add_overload = add_overload


def is_long(library: Any) -> bool:
    """Return whether there is much in a function, with all that was compiled into it."""
    module = library._get_module_for_linking()  # it is there in libraries that were read from disk, too
    lines = 0
    for function in module.functions:
        if function.is_declaration or function.name.startswith("_ZN7cpython"):
            continue
        for block in function.blocks:
            lines += sum(1 for _ in block.instructions)
            if lines > LONG:
                return True
    return False


def _name(function: Any, result: Any) -> None:
    """Let callers compile a call by name in, in place of the function."""
    context = result.target_context
    source = function.py_func
    kinds = tuple(result.signature.args)
    name = _add_symbol(function, result)
    described = copy.copy(result.fndesc)
    described.mangled_name = name
    needs = context.codegen().create_library(f"needs {name}")
    module = needs.create_ir_module(f"needs {name}")
    empty = ir.Function(module, ir.FunctionType(ir.VoidType(), []), f"needs.{name}")
    ir.IRBuilder(empty.append_basic_block()).ret_void()
    needs.add_ir_module(module)
    needs._reload_init.add(partial(get_ready, source.__module__, source.__qualname__, kinds))
    context.remove_user_function(result.entry_point)
    context.insert_user_function(result.entry_point, described, [needs])


def _add_symbol(function: Any, result: Any) -> str:
    """Let machine code find a form of a function in this process. Returns its name, which is the same in every process."""
    source = function.py_func
    kinds = str(tuple(result.signature.args))
    form = sha256(kinds.encode()).hexdigest()[:16]
    name = f"{source.__module__}.{source.__qualname__}.{form}"
    binding.add_symbol(name, result.library.get_pointer_to_function(result.fndesc.mangled_name))
    return name


def get_ready(module: str, name: str, kinds: tuple[Any, ...]) -> None:
    """Load a form of a function, or compile it, before one that calls it is loaded."""
    import_module(module)
    function = _FUNCTIONS[module, name]
    function.compile(kinds)
    _add_symbol(function, function.overloads[kinds])


def calling(function: Any) -> Any:
    """Return a function with the arguments of a compiled one that calls it: so this is compiled once for all callers."""
    source = function.py_func
    names = ", ".join(inspect.signature(source).parameters)
    text = "\n" * (source.__code__.co_firstlineno - 1) + f"def call({names}): return function({names})"
    made: dict[str, Any] = {"function": function, "__name__": source.__module__}
    exec(compile(text, source.__code__.co_filename, "exec"), made)
    call = made["call"]
    call.__name__ = f"call_{source.__name__}"
    call.__qualname__ = f"call_{source.__qualname__}"
    return call


def open_for_python(function: Any, door: Any) -> None:
    """Let Python call the forms of a compiled function through its door, which is compiled for those alone."""

    def compile_for_python(*values: Any) -> Any:  # numba has put named arguments in their places
        kinds = tuple(function.typeof_pyval(value) for value in values)
        door.compile(kinds)
        entry = door.overloads[kinds].entry_point
        function._insert([kind._code for kind in kinds], entry, False)
        return entry

    function._compile_for_args = compile_for_python
    function.door = door
