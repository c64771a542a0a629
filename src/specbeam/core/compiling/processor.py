"""The instruction sets of the processor that numba compiles for.

numba compiles for the current processor, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another one.
"""

from collections.abc import Collection
from functools import cache

from llvmlite import binding
from numba import config
from numba.core.codegen import get_host_cpu_features

# Names of the widest registers in assembly, and the features that provide them.
_REGISTERS = {"zmm": "avx512f", "ymm": "avx2"}

_SUM_OF_INTEGERS = """
define <16 x i32> @sum(<16 x i32> %a, <16 x i32> %b) {
  %c = add <16 x i32> %a, %b
  ret <16 x i32> %c
}
"""


@cache
def features() -> frozenset[str]:
    """Return the features of the processor, by their LLVM names.

    If the user names a processor without listing its features, only the width of its registers is known.
    """
    stated = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    switches = [switch.strip() for switch in stated.split(",")]
    names = {switch[1:] for switch in switches if switch.startswith("+")}
    assembly = _assembly(config.CPU_NAME or binding.get_host_cpu_name(), stated)
    names |= {feature for register, feature in _REGISTERS.items() if register in assembly}
    if "avx512f" in names:
        names.add("avx2")
    return frozenset(names)


def lanes(names: Collection[str]) -> int:
    """Return the number of 4-byte numbers in a register of processors with these features."""
    if "avx512f" in names:
        return 16
    return 8 if "avx2" in names else 4


def dots_bytes(names: Collection[str]) -> bool:
    """Return whether one instruction multiplies four pairs of bytes in each lane and adds the products."""
    return {16: "avx512vnni", 8: "avxvnni"}.get(lanes(names)) in names


def dots_bfloat16(names: Collection[str]) -> bool:
    """Return whether one instruction multiplies two pairs of bfloat16 numbers in each lane and adds the products."""
    return lanes(names) == 16 and "avx512bf16" in names


def _assembly(name: str, stated: str) -> str:
    """Return the assembly of a sum of sixteen integers, compiled for a processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=name, features=stated)
    module = binding.parse_assembly(_SUM_OF_INTEGERS)
    return str(machine.emit_assembly(module))
