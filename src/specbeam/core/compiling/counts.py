"""Reference counts without atomic operations and without calls, for the machine code of steps.

numba counts references to arrays by calls of a function with an atomic operation, as long as sixteen multiplications: a
quarter of the time of a turn over short lists. Steps need no atomic operations. Each call from Python has a count of its own
for each array that it is given or makes, and only the thread of that call changes it: threads that help in a pass run
functions without counts (`compiling.uncounted`) on arrays that they know by address.
"""

from functools import cache
from typing import Any

from llvmlite import binding, ir
from llvmlite.binding.newpassmanagers import create_new_module_pass_manager
from numba.core import config

_WORD = ir.IntType(config.MACHINE_BITS)
_BYTES = ir.IntType(8).as_pointer()
_COUNT = ir.FunctionType(ir.VoidType(), [_BYTES])
_FREE = "NRT_MemInfo_call_dtor"  # of numba's runtime
_STEPS = {"NRT_incref": 1, "NRT_decref": -1}  # the functions of numba that count


def with_inlined_counts(module: Any, builder: Any) -> Any:
    """Return an optimised LLVM module with the counts of one thread inlined: a copy, or the module if it counts nothing.

    For machine code only: when LLVM optimises code, it knows needless counts by the names of numba's functions.

    Args:
        builder: a new pass builder of numba's code generator.
    """
    names = {function.name for function in module.functions}
    counting = [name for name in _STEPS if name in names]
    if not counting or config.DEBUG_NRT:
        return module
    found = module.clone()
    for name in counting:
        function = found.get_function(name)
        if not function.is_declaration:
            function.linkage = "linkonce_odr"  # so that our definition replaces it
        function.name = _own_name(name)
    found.link_in(binding.parse_assembly(_code()))
    for name in _STEPS:
        found.get_function(_own_name(name)).linkage = "private"
    manager = create_new_module_pass_manager()
    manager.add_always_inliner_pass()
    manager.add_simplify_cfg_pass()
    manager.run(found, builder)
    found.verify()
    return found


def _own_name(name: str) -> str:
    return f"specbeam_{name}"


@cache
def _code() -> str:
    """Return the LLVM code of the functions that count."""
    module = ir.Module("counts")
    free = ir.Function(module, _COUNT, _FREE)
    for name, step in _STEPS.items():
        function = ir.Function(module, _COUNT, _own_name(name))
        function.attributes.add("alwaysinline")
        _define(function, step, free)
    return str(module)


def _define(function: ir.Function, step: int, free: ir.Function) -> None:
    """Define a function that adds `step` to the count at an address, unless that is null, and frees the array at 0."""
    builder = ir.IRBuilder(function.append_basic_block())
    (place,) = function.args
    is_counted = builder.icmp_unsigned("!=", place, ir.Constant(_BYTES, None))
    with builder.if_then(is_counted):
        count = builder.bitcast(place, _WORD.as_pointer())
        changed = builder.add(builder.load(count), ir.Constant(_WORD, step))
        builder.store(changed, count)
        if step < 0:
            with builder.if_then(builder.icmp_unsigned("==", changed, ir.Constant(_WORD, 0)), likely=False):
                builder.call(free, [place])
    builder.ret_void()
