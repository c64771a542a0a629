"""Which instructions a processor has, by the names of its features and by the assembly for it."""

import pytest

from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from llvmlite import binding

from specbeam.core.compiling import processor
from specbeam.core.compiling.processor import dot_of_bfloat16, dot_of_bytes


@pytest.mark.parametrize(
    ("names", "of_bytes", "of_bfloat16"),
    [
        ({"avx512f", "avx512vnni", "avx512bf16"}, "vpdpbusd", "dpbf16ps"),
        ({"avx512f", "avx2"}, "", ""),
        ({"avx2", "avxvnni"}, "vpdpbusd", ""),
        ({"avx512f", "avx512bw"}, "vpmaddubsw", ""),
        ({"avx2", "avx512vnni"}, "vpmaddubsw", ""),
        ({"avx2"}, "vpmaddubsw", ""),
        ({"dotprod", "i8mm", "bf16"}, "usdot", "bfmlal"),
        ({"dotprod"}, "sdot", ""),
        (set(), "", ""),
    ],
)
def test_products_of_four_bytes_and_of_two_halves(names, of_bytes, of_bfloat16):
    assert (dot_of_bytes(names), dot_of_bfloat16(names)) == (of_bytes, of_bfloat16)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cortex-a72", set()),
        ("neoverse-n1", {"dotprod"}),
        ("apple-m1", {"dotprod"}),
        ("neoverse-n2", {"dotprod", "i8mm", "bf16"}),
        ("haswell", {"avx2"}),
        ("alderlake", {"avx2", "avx512vnni", "avxvnni"}),  # the instruction of both, and registers of one
        ("knl", {"avx512f", "avx2"}),
        ("skylake-avx512", {"avx512f", "avx512bw", "avx2"}),
        ("znver4", {"avx512f", "avx512bw", "avx512vnni", "avx2"}),
    ],
)
def test_assembly_tells_what_a_processor_has(name, found):
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    is_arm = name.startswith(("cortex", "neoverse", "apple"))
    triple = "aarch64-unknown-linux-gnu" if is_arm else "x86_64-unknown-linux-gnu"
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=name)
    assembly = machine.emit_assembly(binding.parse_assembly(processor._SAMPLES))
    assert {feature for sign, feature in processor._SIGNS.items() if sign in assembly} == found
