"""A compiled loop that was kept is read again only while all that was compiled into it is the same."""

import subprocess
import sys

import pytest

from specbeam.core.compiling import AVAILABLE
from tests.support.kernels_alone import SOURCE, write_kernels

if not AVAILABLE:
    pytest.skip("numba is not installed", allow_module_level=True)

from specbeam.core.compiling import code_cache

INNER = """
from typing import NamedTuple
from specbeam.core.compiling.compiler import compiled
class {record}(NamedTuple):
    number: int
@compiled
def inner(one):
    return one.number {change}
"""
OUTER = """
from specbeam.inner import {record}, inner
from specbeam.core.compiling.compiler import compiled
@compiled
def outer(number):
    return inner({record}(number))
print(outer(5), sum(outer.python_entry._cache_hits.values()))
"""
RECORD = """
from typing import NamedTuple
class Record(NamedTuple):
    {first}: int
    {second}: int
"""
TAKES = """
from specbeam.core.compiling.compiler import compiled
@compiled
def takes(record):
    return 10 * record.tens + record.ones
"""
OTHERS = """
import numba
@numba.njit(cache=True)
def twice(x):
    return 2 * x
@numba.njit(cache=True)
def thrice(x):
    return 3 * x
"""
CALLS_OTHERS = """
from others import thrice, twice
from specbeam.core.compiling.compiler import compiled
@compiled
def calls_twice(x):
    return twice(x) + 1
@compiled
def calls_thrice(x):
    return thrice(x) + 1
"""


@pytest.fixture
def package(tmp_path):
    return write_kernels(tmp_path)


def run(package, change, record="One"):
    for name, text in (("inner", INNER), ("outer", OUTER)):
        (package / f"{name}.py").write_text(text.format(change=change, record=record))
    return printed(package, "import specbeam.outer")


def printed(package, program):
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": "", "SPECBEAM_CACHE": str(package.parent / "cache")}
    done = subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True, check=True)
    return tuple(int(number) for number in done.stdout.split())


def test_a_change_of_an_inner_loop_reaches_the_outer_one(package):
    assert run(package, "+ 1") == (6, 0)
    assert run(package, "+ 1") == (6, 1)
    assert run(package, "+ 10") == (15, 0)
    assert run(package, "+ 10", record="Another") == (15, 0)


def test_a_record_goes_by_its_fields_wherever_it_comes_from(package):
    """The loop does not name it: it takes what it is given."""
    program = "from specbeam.record import Record; from specbeam.takes import takes; print(takes(Record(1, 2)))"
    (package / "takes.py").write_text(TAKES)
    for fields, expected in ((("tens", "ones"), 12), (("ones", "tens"), 21), (("tens", "ones"), 12)):
        (package / "record.py").write_text(RECORD.format(first=fields[0], second=fields[1]) + "#" * expected)
        assert printed(package, program) == (expected,)


def test_functions_that_numba_keeps_are_kept_and_read_alike_in_steps_and_outside(package):
    """Of two functions of somebody else one is compiled and kept for a step, the other one outside; then the other way."""
    (package.parent / "others.py").write_text(OTHERS)
    (package / "calls.py").write_text(CALLS_OTHERS)
    imports = "from others import thrice, twice; from specbeam.calls import calls_thrice, calls_twice; "
    hits = "; print(*(sum(one._cache_hits.values()) for one in (twice, thrice)))"
    assert printed(package, imports + "print(calls_twice(5), thrice(5))" + hits) == (11, 15, 0, 0)
    assert printed(package, imports + "print(twice(5), calls_thrice(5))" + hits) == (10, 16, 1, 1)


@pytest.mark.parametrize(
    "older",
    ["import numba.core.caching as old; del old._Cache", "import numba; numba.version_info = (0, 62, 1)"],
)
def test_an_older_numba_is_said_and_left_alone(older):
    """Its cache has other names, or its libraries know less."""
    command = [sys.executable, "-c", f"{older}; from specbeam.core import compiling; print(compiling.AVAILABLE)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "is too old for specbeam's steps, which need 0.63" in done.stderr


def test_sources_are_those_that_are_compiled_in():
    turns = {str(path.relative_to(SOURCE)) for path in code_cache.sources(SOURCE / "core" / "run_steps.py")}
    assert turns >= {"core/beams.py", "core/passes.py", "core/draft/turns.py", "core/verify/turns.py"}
    assert not turns & {"core/session.py", "core/decode.py", "core/verify/beams.py", "core/draft/tree.py"}
    assert not any(path.startswith(("engines/", "models/")) for path in turns)  # these are told by their records
    rules = {str(path.relative_to(SOURCE)) for path in code_cache.sources(SOURCE / "core" / "verify" / "beams.py")}
    assert rules >= {"core/laws/joint.py", "core/noise.py", "core/verify/trials.py"}
    assert "core/draft/children.py" in {  # for constants: it has no steps of its own
        str(path.relative_to(SOURCE)) for path in code_cache.sources(SOURCE / "core" / "draft" / "tree.py")
    }
    laws = {str(path.relative_to(SOURCE)) for path in code_cache.sources(SOURCE / "core" / "laws" / "joint.py")}
    assert "core/laws/reduce.py" in laws
    assert not laws & {"core/run_steps.py", "core/verify/beams.py"}


PARTS = {
    "inner.py": "from specbeam.core.steps import step\n\n@step\ndef added(x):\n    return x + {change}\n",
    "kinds.py": """
from typing import NamedTuple
from .inner import added
from specbeam.core.steps import borrowed, step, verb

@borrowed
class Mine(NamedTuple):
    number: int

@verb(0, has_body=False)
def answer(kind): ...

@answer.of(Mine)
@step
def answer_mine(kind):
    return added(kind.number)

@step
def ask(kind):
    return answer(kind)

print(ask(Mine(5)), sum(ask.python_entry._cache_hits.values()))
""",
}


def test_a_change_of_a_step_that_a_package_of_ones_own_registers_reaches_the_callers_of_its_verb(tmp_path):
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").touch()
    environment = {"PYTHONPATH": f"{SOURCE.parent}:{tmp_path}", "SPECBEAM_CACHE": str(tmp_path / "cache")}
    for change, expected in ((1, (6, 0)), (1, (6, 1)), (10, (15, 0))):
        for name, text in PARTS.items():
            (package / name).write_text(text.replace("{change}", str(change)))
        command = [sys.executable, "-c", "import own.kinds"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert tuple(int(number) for number in done.stdout.split()) == expected
