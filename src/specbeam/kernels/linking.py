"""How compiled functions call each other: a long one is called where it stands, a short one is compiled into its callers.

numba compiles all that a function calls into it, and all that those call: of functions in a chain of ten the last one is
compiled ten times. Calls by name compile each long function once, and its machine code is kept once.
"""

import copy
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import Any

from llvmlite import binding, ir

LONG = 400  # lines of LLVM code, from which a call costs nothing beside what is called


def call_where_it_stands(function: Any) -> None:
    """Let the callers of a compiled function call each of its long forms by name."""
    add = function.add_overload

    def add_overload(result: Any) -> None:
        add(result)
        if is_long(result.library):
            _name(function, result)

    function.add_overload = add_overload


def is_long(library: Any) -> bool:
    """Return whether there is much in a function, with all that was compiled into it."""
    module = library._final_module
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
    """Give a form of a function a name, by which it is found in this process, and in others that read its callers."""
    context = result.target_context
    source = function.py_func
    kinds = tuple(result.signature.args)
    place = f"{source.__module__}.{source.__qualname__}"
    name = f"specbeam.{place}.{sha256(str(kinds).encode()).hexdigest()[:16]}"
    address = result.library.get_pointer_to_function(result.fndesc.mangled_name)
    binding.add_symbol(name, address)
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


def get_ready(module: str, name: str, kinds: tuple[Any, ...]) -> None:
    """Load a form of a function, or compile it, before one that calls it is loaded."""
    function: Any = import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    function.compile(kinds)
