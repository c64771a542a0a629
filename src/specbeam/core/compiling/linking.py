"""The linking of compiled functions: long ones are called by name, short ones are compiled into their callers.

numba compiles all direct and indirect callees into a function: in a chain of ten functions the last one is compiled ten
times. With calls by name, each long function is compiled and cached once.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import Any

from llvmlite import binding, ir
from numba import types, version_info
from numba.core.compiler_lock import global_compiler_lock

if version_info[:2] < (0, 63):
    raise ImportError("specbeam needs numba 0.63: libraries of older versions do not list their dependencies")

_FUNCTIONS: dict[tuple[str, str], Any] = {}  # all compiled functions, by module and qualified name
LONG = 400  # lines of LLVM code from which the cost of a call is negligible


def link_by_name(function: Any) -> None:
    """Make the compiled callers of a compiled function call each of its long forms by name."""
    source = function.py_func
    _FUNCTIONS[source.__module__, source.__qualname__] = function

    def add_overload(result: Any) -> None:
        # Callers of a form from disk may inline it, and then need the form's dependencies when they are loaded.
        result.library._reload_init.update(result.reload_init or ())
        function.overloads[tuple(result.signature.args)] = result  # Python calls it through `add_python_entry`
        library = result.library
        if library.is_called_by_name is None:
            is_found_by_name = "<locals>" not in function.py_func.__qualname__
            has_code = getattr(function, "is_called_by_address", False) or is_long(library)
            library.is_called_by_name = is_found_by_name and has_code
        if library.is_called_by_name:
            _replace_by_call(function, result)

    function.add_overload = add_overload


def take_any_number(function: Any) -> None:
    """Make compiled callers that pass constant integers use the function's form for arbitrary integers.

    numba would compile one form per constant, and per combination of constants.
    """
    template_of = function.get_call_template

    def with_any_number(arguments: Any, named: Any) -> Any:
        kinds = tuple(types.unliteral(kind) for kind in arguments)
        return template_of(kinds, {name: types.unliteral(kind) for name, kind in named.items()})

    function.get_call_template = with_any_number


def is_long(library: Any) -> bool:
    """Return whether a function, including inlined ones, has more than `LONG` lines of LLVM code."""
    module = library._get_module_for_linking()  # available for libraries from disk, too
    lines = 0
    for function in module.functions:
        if function.is_declaration or function.name.startswith("_ZN7cpython"):
            continue
        # Instructions are indented by two blanks. Iterating over them would take seconds.
        lines += str(function).count("\n  ")
        if lines > LONG:
            return True
    return False


def _replace_by_call(function: Any, result: Any) -> None:
    """Make callers of a form call it by name instead of inlining it."""
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
    needs._reload_init.add(partial(load_form, source.__module__, source.__qualname__, kinds))
    context.remove_user_function(result.entry_point)
    context.insert_user_function(result.entry_point, described, [needs])


def _add_symbol(function: Any, result: Any) -> str:
    """Add a form of a function to the symbols of this process. Returns its name, which is the same in every process."""
    source = function.py_func
    kinds = str(tuple(result.signature.args))
    form = sha256(kinds.encode()).hexdigest()[:16]
    name = f"{source.__module__}.{source.__qualname__}.{form}"
    binding.add_symbol(name, result.library.get_pointer_to_function(result.fndesc.mangled_name))
    return name


def function_named(module: str, name: str) -> Any:
    """Return the compiled function of this qualified name in a module, which may give the name to a verb."""
    import_module(module)
    return _FUNCTIONS[module, name]


def load_form(module: str, name: str, kinds: tuple[Any, ...]) -> None:
    """Load or compile a form of a function; numba calls this before it loads machine code that calls the form."""
    function = function_named(module, name)
    function.compile(kinds)
    _add_symbol(function, function.overloads[kinds])


def calling(function: Any) -> Any:
    """Return a new function that calls a compiled one with the same arguments, as its entry from Python."""
    source = function.py_func
    names = ", ".join(inspect.signature(source).parameters)
    text = "\n" * (source.__code__.co_firstlineno - 1) + f"def call({names}): return function({names})"
    made: dict[str, Any] = {"function": function, "__name__": source.__module__}
    exec(compile(text, source.__code__.co_filename, "exec"), made)
    call = made["call"]
    call.__name__ = f"call_{source.__name__}"
    call.__qualname__ = f"call_{source.__qualname__}"
    return call


class PythonEntry:
    """The entry through which Python calls a compiled function, made on first use: most are never used."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        with global_compiler_lock:  # only one thread makes it
            if "_made" not in vars(self):
                self._made = self._make()
        return getattr(self._made, name)


def add_python_entry(function: Any, python_entry: PythonEntry) -> None:
    """Make Python call a compiled function through `python_entry`, which compiles only forms that Python calls."""

    inserted = set()

    def compile_for_python(*values: Any) -> Any:  # keyword arguments have been moved to their positions
        kinds = tuple(function.typeof_pyval(value) for value in values)
        with global_compiler_lock:  # numba does not find a form that was inserted twice
            address = python_entry.compile(kinds)
            if kinds not in inserted:
                function._insert([kind._code for kind in kinds], address, False)
                inserted.add(kinds)
        return address

    function._compile_for_args = compile_for_python
    function.python_entry = python_entry
