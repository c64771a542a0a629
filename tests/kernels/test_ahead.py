"""Several processes compile what a first text needs, and none does what another one has done or is at."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from specbeam.kernels import AVAILABLE

if not AVAILABLE:
    pytest.skip("numba is not installed", allow_module_level=True)

from numba import types

from specbeam.kernels import ahead, claims, code_cache
from specbeam.kernels.compiling import compiled
from specbeam.kernels.form_list import PLACE, StepForm, forms_in, names_in, text_of

pytestmark = pytest.mark.skipif(not claims.LOCKS, reason="no locks on files")
HOLDS = "import sys, time; from pathlib import Path; from specbeam.kernels.claims import claimed; "
HOLDS += "claim = claimed(Path(sys.argv[1])); print(claim is not None, flush=True); time.sleep(60)"
STEPS = """
import logging, sys
from specbeam.kernels.compiling import compiled
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
@compiled
def twice(x):
    return 2 * x
@compiled
def asked(x):
    if x > 100:
        raise ValueError("too many")
    return twice(x) + 1
@compiled
def later(x):
    return asked(x) - 1
"""


def _nothing():
    return None


_compiled_nothing = compiled(_nothing)


@pytest.fixture
def package(tmp_path):
    """The kernels in a package of their own, with three steps; a first text needs `asked` and then `later`, of integers."""
    kernels = tmp_path / "specbeam" / "kernels"
    shutil.copytree(PLACE.parent, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PLACE.parent.parent / "garbage.py", tmp_path / "specbeam")
    (tmp_path / "specbeam" / "__init__.py").touch()
    (tmp_path / "specbeam" / "three.py").write_text(STEPS)
    lines = [
        '["step", "specbeam.three", "twice", ["int64"], []]',
        '["step", "specbeam.three", "asked", ["int64"], [0]]',
        '["entry", "specbeam.three", "asked", ["int64"], [1]]',
        '["step", "specbeam.three", "later", ["int64"], [1]]',
        '["entry", "specbeam.three", "later", ["int64"], [3]]',
    ]
    (kernels / PLACE.name).write_text("\n".join(lines))
    return tmp_path / "specbeam"


def started(package, program, compilers, **settings):
    environment = {"PYTHONPATH": str(package.parent), "SPECBEAM_COMPILERS": str(compilers), **settings}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=package.parent, env=environment, stdout=subprocess.PIPE, text=True)


def output(process):
    (text, _) = process.communicate(timeout=120)
    assert process.returncode == 0
    return text.split("\n")[:-1]


def kept(package, name):
    return list(package.rglob(f"three.{name}-*.nbi"))


def eventually(is_so, seconds=60):
    latest = time.monotonic() + seconds
    while not is_so() and time.monotonic() < latest:
        time.sleep(0.05)
    return is_so()


def test_a_claim_ends_with_its_process_however_that_ends(tmp_path):
    path = tmp_path / "one.claim"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert other.stdout.readline() == "True\n"
        assert claims.claimed(path) is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    mine = claims.wait_for(path)
    assert mine is not None
    assert claims.claimed(path) is None
    mine.end()
    mine.end()
    assert not path.exists()
    claims.claimed(path).end()


def test_nobody_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PATIENCE", 0.05)
    path = tmp_path / "one.claim"
    mine = claims.claimed(path)
    assert claims.wait_for(path) is None
    with claims.alone(path):  # goes on without
        pass
    mine.end()


def test_another_process_compiles_what_comes_later(package):
    program = "from specbeam.three import asked; print(asked(3)); import sys; sys.stdin.read()"
    environment = {"PYTHONPATH": str(package.parent), "SPECBEAM_COMPILERS": "2"}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=package.parent,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert eventually(lambda: kept(package, "later") and kept(package, "call_later"))
    finally:
        (text, _) = process.communicate(b"", timeout=60)
    assert process.returncode == 0
    lines = text.decode().split("\n")
    assert "7" in lines
    assert "compiling later" not in lines
    assert not list(package.rglob("*.claim")) + list(package.rglob("*.saving"))


def test_two_processes_compile_each_form_once(package):
    program = "from specbeam.three import later; print(later(3), later(2.0))"
    both = [started(package, program, 1) for _ in range(2)]
    lines = [line for process in both for line in output(process)]
    assert lines.count("6 4.0") == 2
    for name in ("twice", "asked", "later", "call_later"):
        assert lines.count(f"compiling {name}") == 2, name  # the form for integers, and that for floats
    program += "; print(sum(later.python_entry._cache_hits.values()))"
    assert output(started(package, program, 1)) == ["6 4.0", "2"]


def test_functions_that_were_kept_are_compiled_in_and_called_as_before(package):
    program = "from specbeam.three import asked; print(asked(3))"
    assert "7" in output(started(package, program, 1))
    program = """
from specbeam.three import asked, later, twice
from specbeam.kernels.compiling import address_of
print(twice(4), asked(4), address_of(twice, 3) > 0)
(entry,) = asked.python_entry.overloads.values()
print(entry.library._shared_module is None)
print(later(3))
try:
    later(200)
except ValueError as error:
    print(error)
"""
    lines = [line for line in output(started(package, program, 1)) if "compil" not in line]
    assert lines == ["8 9 True", "True", "6", "too many"]


def test_a_list_of_other_sources_harms_nobody(package):
    place = package / "kernels" / PLACE.name
    place.write_text(
        place.read_text()
        + '\n["step", "specbeam.three", "gone", ["int64"], []]\n["entry", "specbeam.three", "asked", [], []]'
    )
    assert "7" in output(started(package, "from specbeam.three import asked; print(asked(3))", 3))


def test_on_one_processor_one_process_compiles(package):
    program = (
        "from specbeam.three import asked; print(asked(3)); from specbeam.kernels import ahead; print(ahead._BEGUN)"
    )
    assert output(started(package, program, 1))[-2:] == ["7", "[None]"]


def test_where_nothing_can_be_kept_nothing_is_claimed(monkeypatch):
    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(code_cache, "claimed", refuse)
    monkeypatch.setattr(code_cache, "wait_for", refuse)
    cache = code_cache.CodeCache(_nothing)
    assert not cache.claim(())
    assert cache.load_overload((), _compiled_nothing.targetctx) is None
    assert not cache._claims


def test_how_many_processes_compile_can_be_set(monkeypatch):
    monkeypatch.setenv("SPECBEAM_COMPILERS", "5")
    assert ahead.processes_wanted() == 5
    monkeypatch.setenv("SPECBEAM_COMPILERS", "")
    assert 1 <= ahead.processes_wanted() <= ahead.MOST


@pytest.mark.slow
def test_the_list_has_what_a_first_text_needs(tmp_path):
    """`python tools/first_text.py` writes it anew. What is known of the costs of a pair changes what its texts need."""
    program = """
import specbeam as sb
from specbeam.kernels import code_cache
from specbeam.kernels.form_list import PLACE, forms_in
asked = set()
load = code_cache.CodeCache.load_overload
def noted(cache, kinds, context):
    source = cache._py_func
    name = source.__qualname__.removeprefix("call_")
    asked.add((source.__module__, name, name != source.__qualname__, kinds))
    return load(cache, kinds, context)
code_cache.CodeCache.load_overload = noted
sb.generate(sb.load("bundled"), "Die Katze schläft.", seed=1)
print("missing:", asked - {tuple(form[:4]) for form in forms_in(PLACE.read_text())}, len(asked) > 50)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SPECBEAM_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert "missing: set() True" in done.stdout


def test_the_list_names_steps_that_exist_and_calls_that_come_before():
    text = PLACE.read_text()
    forms = forms_in(text)
    assert text_of(forms) == text
    for number, form in enumerate(forms):
        assert all(need < number for need in form.needs)
        assert form.function().py_func.__module__ == form.module
    assert {("specbeam.runs", "run_turns"), ("specbeam.engines.cpu.layers", "all_layers")} <= names_in(text)


def test_a_kind_that_a_list_has_no_words_for_is_said():
    with pytest.raises(TypeError, match="no words for omitted"):
        text_of([StepForm("specbeam.runs", "run_turns", False, (types.Omitted(3),), [])])
