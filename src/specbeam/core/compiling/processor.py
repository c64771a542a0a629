"""The instruction sets of the processor that numba compiles for.

numba compiles for the current processor, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another one.
"""

from collections.abc import Collection
from functools import cache

from llvmlite import binding
from numba import config
from numba.core.codegen import get_host_cpu_features

# What the assembly of `_SAMPLES` contains on processors with a feature: the name of their widest registers, or of an
# instruction of ARM's.
_SIGNS = {
    "zmm": "avx512f",
    "vpaddw\t%zmm": "avx512bw",
    "vpdpbusd": "avx512vnni",
    "{vex}\tvpdpbusd": "avxvnni",
    "ymm": "avx2",
    "\tsdot\t": "dotprod",
    "\tusdot\t": "i8mm",
    "\tbfcvtn\t": "bf16",
}

_PRODUCTS = """
define i32 @{extension}(<16 x i8> %a, <16 x i8> %b) {{
  %c = {extension} <16 x i8> %a to <16 x i32>
  %d = sext <16 x i8> %b to <16 x i32>
  %e = mul <16 x i32> %c, %d
  %f = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %e)
  ret i32 %f
}}
"""
_SUM_AND_ROUNDING = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define <16 x i32> @sum(<16 x i32> %a, <16 x i32> %b) {
  %c = add <16 x i32> %a, %b
  ret <16 x i32> %c
}
define <32 x i16> @sum_of_halves(<32 x i16> %a, <32 x i16> %b) {
  %c = add <32 x i16> %a, %b
  ret <32 x i16> %c
}
define <4 x bfloat> @rounded(<4 x float> %a) {
  %b = fptrunc <4 x float> %a to <4 x bfloat>
  ret <4 x bfloat> %b
}
"""
# Sums of integers of 32 and 16 bits, rounding to bfloat16, and products of signed bytes with signed and with unsigned ones.
_SAMPLES = _SUM_AND_ROUNDING + _PRODUCTS.format(extension="sext") + _PRODUCTS.format(extension="zext")


@cache
def features() -> frozenset[str]:
    """Return the features of the processor, by their LLVM names.

    If the user names a processor without listing its features, only those are known that `_SIGNS` finds.
    """
    stated = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    switches = [switch.strip() for switch in stated.split(",")]
    names = {switch[1:] for switch in switches if switch.startswith("+")}
    assembly = _assembly(config.CPU_NAME or binding.get_host_cpu_name(), stated)
    names |= {feature for sign, feature in _SIGNS.items() if sign in assembly}
    if "avx512f" in names:
        names.add("avx2")
    return frozenset(names)


def lanes(names: Collection[str]) -> int:
    """Return the number of 4-byte numbers in a register of processors with these features."""
    if "avx512f" in names:
        return 16
    return 8 if "avx2" in names else 4


def dot_of_bytes(names: Collection[str]) -> str:
    """Return the instruction that multiplies four pairs of bytes in each lane and adds the products; "" for none.

    "vpdpbusd" and "usdot" multiply unsigned bytes by signed ones, "sdot" signed ones. "vpmaddubsw" multiplies two pairs of
    unsigned and signed bytes, and returns their sum in 16 bits.
    """
    if {16: "avx512vnni", 8: "avxvnni"}.get(lanes(names)) in names:
        return "vpdpbusd"
    if lanes(names) == 4 and "dotprod" in names:
        return "usdot" if "i8mm" in names else "sdot"
    if {16: "avx512bw", 8: "avx2"}.get(lanes(names)) in names:
        return "vpmaddubsw"
    return ""


def dot_of_bfloat16(names: Collection[str]) -> str:
    """Return the instruction that multiplies pairs of bfloat16 numbers in each lane and adds the products; "" for none.

    "dpbf16ps" adds both products of a pair. "bfmlal" adds one, so a pair takes two of them.
    """
    if lanes(names) == 16 and "avx512bf16" in names:
        return "dpbf16ps"
    return "bfmlal" if lanes(names) == 4 and "bf16" in names else ""


def _assembly(name: str, stated: str) -> str:
    """Return the assembly of `_SAMPLES`, compiled for a processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=name, features=stated)
    module = binding.parse_assembly(_SAMPLES)
    return str(machine.emit_assembly(module))
