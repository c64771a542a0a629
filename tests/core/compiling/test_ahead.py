"""Several processes compile what a first text needs, and none does what another one has done or is at."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from specbeam.core.compiling import AVAILABLE
from specbeam.errors import BadSetting

if not AVAILABLE:
    pytest.skip("numba is not installed", allow_module_level=True)

import numba
from numba import types

from specbeam.core.compiling import ahead, claims, code_cache
from specbeam.core.compiling.compiler import compiled
from specbeam.core.compiling.form_list import PLACE, StepForm, forms_in, modules_in, names_in, text_of
from tests.support.kernels_alone import write_kernels
from tests.support.machines import put_machine

pytestmark = pytest.mark.skipif(not claims.LOCKS, reason="no locks on files")
HOLDS = "import sys, time; from pathlib import Path; from specbeam.core.compiling.claims import claimed; "
HOLDS += "claim = claimed(Path(sys.argv[1])); print(claim is not None, flush=True); time.sleep(60)"
STEPS = """
import logging, sys
from specbeam.core.compiling.compiler import compiled
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
# A program that asks for one step, and goes on until its stdin is closed.
WAITS = "from specbeam.three import asked; print(asked(3)); from specbeam.core.compiling import ahead; "
WAITS += "print('begun', ahead._BEGUN[1].pid, flush=True); import sys; sys.stdin.read()"
# The same with a copy of it, which has all that it has open.
FORKS = WAITS.replace(
    "print('begun',", "import os, time; copy = os.fork(); copy or time.sleep(60); print('begun', copy,"
)


def _nothing():
    return None


def _refuse(*given, **settings):
    raise PermissionError(given)


def _adding(number):
    return lambda x: x + number


_compiled_nothing = compiled(_nothing)


@pytest.fixture
def package(tmp_path):
    """The kernels in a package of their own, with three steps; a first text needs `asked` and then `later`, of integers."""
    package = write_kernels(tmp_path)
    (package / "three.py").write_text(STEPS)
    lines = [
        '["step", "specbeam.three", "twice", ["int64"], []]',
        '["step", "specbeam.three", "asked", ["int64"], [0]]',
        '["entry", "specbeam.three", "asked", ["int64"], [1]]',
        '["step", "specbeam.three", "later", ["int64"], [1]]',
        '["entry", "specbeam.three", "later", ["int64"], [3]]',
    ]
    (package / "core" / "compiling" / PLACE.name).write_text("\n".join(lines))
    return package


def environment_of(package):
    return {"PYTHONPATH": str(package.parent), "SPECBEAM_CACHE": str(package / "cache")}


def started(package, program, compilers, **settings):
    environment = {**environment_of(package), "SPECBEAM_COMPILERS": str(compilers), **settings}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=package.parent, env=environment, stdout=subprocess.PIPE, text=True)


@contextmanager
def helped(package, program):
    """A program that a second process helps; the numbers of processes that it says, and the lines before."""
    environment = {**environment_of(package), "SPECBEAM_COMPILERS": "2"}
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=package.parent, env=environment, stdin=pipe, stdout=pipe, text=True)
    lines = []
    try:
        while not lines or not lines[-1].startswith("begun"):
            lines.append(process.stdout.readline())
            assert lines[-1], "the program has ended"
        numbers = [int(number) for number in lines[-1].split()[1:]]
        yield process, numbers, "".join(lines)
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def runs(number):
    """Whether there is a process of this number, a zombie included."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def is_alive(number):
    """Whether a process of this number has not ended."""
    try:
        (_, _, state) = Path(f"/proc/{number}/stat").read_text().rpartition(")")
    except FileNotFoundError:
        return False
    return not state.startswith(" Z")


def output(process):
    (text, _) = process.communicate(timeout=120)
    assert process.returncode == 0
    return text.split("\n")[:-1]


def kept(package, name):
    return list(package.rglob(f"three.{name}-*.nbc"))


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
    mine = claims.wait_for(path, 30)
    assert mine is not None
    assert claims.claimed(path) is None
    mine.end()
    mine.end()
    assert not path.exists()
    claims.claimed(path).end()


def test_who_has_waited_in_vain_waits_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PATIENCE", 0.2)
    monkeypatch.setattr(claims, "_is_patient", True)
    path = tmp_path / "one.claim"
    mine = claims.claimed(path)
    took = []
    for _ in range(2):
        begun = time.monotonic()
        assert claims.wait_patiently(path) is None
        took.append(time.monotonic() - begun)
    assert took[0] >= 0.2 > took[1]
    mine.end()
    claims.wait_patiently(path).end()


def test_a_claim_ends_where_its_file_can_no_longer_be_deleted(tmp_path, monkeypatch):
    path = tmp_path / "one.claim"
    mine = claims.claimed(path)
    with monkeypatch.context() as here:
        here.setattr(Path, "unlink", _refuse)
        mine.end()
    claims.claimed(path).end()
    assert not path.exists()


def test_where_files_cannot_be_locked_none_is_left(tmp_path, monkeypatch):
    """As on some shared disks."""

    def refuse(number, what):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="no locks"):
        claims.claimed(tmp_path / "one.claim")
    assert not list(tmp_path.iterdir())


def test_who_leaves_ends_its_claims(tmp_path):
    for name in ("one", "other"):
        claims.claimed(tmp_path / name)
    claims.end_all()
    assert not list(tmp_path.iterdir())
    assert not claims._HELD


@pytest.fixture
def apart(tmp_path, monkeypatch):
    """A folder in which the code of steps is kept."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_form_is_kept_when_its_file_is_there(apart):
    step = compiled(_nothing)
    step.compile(())
    assert step._cache.keeps((), step.targetctx)
    (code,) = apart.rglob("*.nbc")
    code.unlink()
    assert not step._cache.keeps((), step.targetctx)


def test_functions_around_different_values_are_kept_apart(apart):
    for _ in range(2):
        assert [compiled(_adding(number))(5) for number in (1, 2)] == [6, 7]


def test_functions_around_different_values_are_claimed_apart(apart):
    caches = [code_cache.CodeCache(_adding(number)) for number in (1, 2, 1)]
    context = _compiled_nothing.targetctx
    assert [cache.claim((types.int64,), context) for cache in caches] == [True, True, False]
    for cache in caches:
        cache.give_up((types.int64,))


def test_another_process_compiles_what_comes_later(package):
    """It ends when all is done, and leaves nothing, no zombie either."""
    with helped(package, WAITS) as (process, (other,), text):
        assert "7\n" in text
        assert eventually(lambda: kept(package, "later") and kept(package, "call_later"))
        assert eventually(lambda: not runs(other))
        assert process.poll() is None
    assert process.returncode == 0
    assert not list(package.rglob("*.claim"))


def test_a_program_that_is_set_up_in_python_is_helped_likewise(package):
    """The others keep code where this one does. What is no text in the path of modules is passed over, as Python does."""
    place = package.parent / "elsewhere"
    program = (
        f"import pathlib, sys, numba; numba.config.CACHE_DIR = {str(place)!r}; sys.path.append(pathlib.Path('odd')); "
    )
    with helped(package, program + WAITS):
        assert eventually(lambda: list(place.rglob("three.call_later-*.nbc")))
    assert not kept(package, "later")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no state of processes in /proc")
def test_others_work_for_one_program_at_a_time_and_end_with_it_even_if_it_has_a_copy(package):
    program = "from specbeam.core.compiling.ahead import place_of_claim; print(place_of_claim())"
    (place,) = output(started(package, program, 1))
    busy = claims.claimed(Path(place))  # as if others worked for another program
    with helped(package, FORKS) as (process, (copy, other), _):
        time.sleep(1.5)
        assert not kept(package, "later")
        assert is_alive(other)
        process.kill()
        process.wait()
        try:
            assert is_alive(copy)
            assert eventually(lambda: not is_alive(other), seconds=10)
        finally:
            os.kill(copy, signal.SIGKILL)
    busy.end()


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
from specbeam.core.compiling.compiler import address_of
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
    """What is in the list and still there is compiled all the same."""
    place = package / "core" / "compiling" / PLACE.name
    stale = [
        '["record", "specbeam.three", "Gone", false, ["int64"]]',
        '["step", "specbeam.three", "gone", ["int64"], []]',
        '["step", "specbeam.gone", "gone", [0, [0, "int64"], "int128"], []]',
        '["step", "specbeam.three", "twice", [0], []]',
        '["entry", "specbeam.three", "asked", [], []]',
        '["step", "specbeam.three", "sys", ["int64"], []]',
    ]
    place.write_text("\n".join([place.read_text(), *stale]))
    with helped(package, WAITS) as (_, (other,), text):
        assert "7\n" in text
        assert eventually(lambda: kept(package, "later"))
        assert eventually(lambda: not runs(other))


def test_on_one_processor_one_process_compiles(package):
    program = "from specbeam.three import asked; print(asked(3)); from specbeam.core.compiling import ahead; print(ahead._BEGUN)"
    assert output(started(package, program, 1))[-2:] == ["7", "[None]"]


def test_where_nothing_can_be_kept_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(code_cache, "claimed", _refuse)
    monkeypatch.setattr(code_cache, "wait_patiently", _refuse)
    cache = code_cache.CodeCache(_nothing)
    assert not cache.claim((), _compiled_nothing.targetctx)
    assert cache.load_overload((), _compiled_nothing.targetctx) is None
    assert not cache._claims


def test_how_many_processes_compile_can_be_set(monkeypatch):
    monkeypatch.setenv("SPECBEAM_COMPILERS", "5")
    assert ahead.processes_wanted() == 5
    monkeypatch.setenv("SPECBEAM_COMPILERS", "many")
    with pytest.raises(BadSetting, match="SPECBEAM_COMPILERS is 'many'"):
        ahead.processes_wanted()
    monkeypatch.setenv("SPECBEAM_COMPILERS", "")
    assert 1 <= ahead.processes_wanted() <= ahead.MOST


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 6),
        ({"groups/cpu.max": "max 100000"}, 6),
        ({"groups/cpu.max": "250000 100000"}, 2),
        ({"groups/cpu.max": "50000 100000"}, 1),
        ({"meminfo": "MemTotal: 90000000 kB\nMemAvailable: 5000000 kB\nBuffers: 1 kB\n"}, 3),
        ({"groups/memory.max": "8000000000", "groups/memory.current": "3000000000"}, 3),
    ],
)
def test_no_more_processes_compile_than_the_machine_or_its_container_has_room_for(
    tmp_path, monkeypatch, files, expected
):
    monkeypatch.delenv("SPECBEAM_COMPILERS", raising=False)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 6)
    put_machine(tmp_path, monkeypatch, files)
    assert ahead.processes_wanted() == expected


@pytest.fixture
def first(monkeypatch):
    """A process that finds the first form missing, with two processors. Returns what is called then."""
    monkeypatch.setattr(ahead, "_BEGUN", [])
    monkeypatch.setattr(ahead, "_names", lambda: {(__name__, "_nothing")})
    monkeypatch.setenv("SPECBEAM_COMPILERS", "2")
    return lambda: ahead.begin(_nothing)


@pytest.mark.parametrize(
    ("executable", "is_frozen"), [("/usr/bin/uwsgi", False), ("", False), (None, False), (sys.executable, True)]
)
def test_a_program_that_has_python_inside_is_not_started_again(first, monkeypatch, executable, is_frozen):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", is_frozen, raising=False)
    monkeypatch.setattr(subprocess, "Popen", _refuse)
    first()
    assert ahead._BEGUN == []


def test_a_program_that_is_about_to_end_begins_no_other(first, monkeypatch):
    def refuse(*given, **settings):
        raise RuntimeError("can't create new process at interpreter shutdown")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    first()
    assert ahead._BEGUN == [None]


@pytest.mark.parametrize("error", [RuntimeError, BrokenPipeError, KeyboardInterrupt])
def test_a_process_that_cannot_be_begun_with_is_ended(first, monkeypatch, error):
    begun = []

    def fail(process, line):
        begun.append(process)
        raise error

    monkeypatch.setattr(ahead, "_begin_with", fail)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            first()
    else:
        first()
    assert ahead._BEGUN == [None]
    assert begun[0].returncode is not None
    assert "-I" in begun[0].args


@pytest.mark.slow
def test_the_list_has_what_a_first_text_needs(tmp_path):
    """`make first-text` writes it anew. What is known of the costs of a pair changes what its texts need."""
    program = """
import specbeam as sb
from specbeam.core.compiling import code_cache
from specbeam.core.compiling.form_list import PLACE, forms_in
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


@pytest.mark.slow
def test_processes_that_compile_for_a_program_make_the_forms_that_it_needs(tmp_path):
    """The key of a form includes the steps of its records, which the program may have imported and others not."""
    program = 'import specbeam as sb; sb.generate(sb.load("bundled"), "Die Katze schläft.", seed=1)'
    names = []
    for processes in ("1", "2"):
        folder = tmp_path / processes
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SPECBEAM_CACHE": str(folder),
            "SPECBEAM_COMPILERS": processes,
        }
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)
        names.append({path.name for path in folder.rglob("*.nbc")})
    assert names[0] == names[1]


def test_the_list_names_steps_that_exist_and_calls_that_come_before():
    text = PLACE.read_text()
    forms = forms_in(text)
    assert text_of(modules_in(text), forms) == text
    for number, form in enumerate(forms):
        assert all(need < number for need in form.needs)
        assert form.function().py_func.__module__ == form.module
    assert {("specbeam.core.run_steps", "run_turns"), ("specbeam.engines.cpu.layers", "all_layers")} <= names_in(text)


def test_what_is_no_more_has_no_kind():
    records = [["record", __name__, "Gone", True, ["int64"]], ["record", "collections", "OrderedDict", False, []]]
    of_other_fields = ["record", "specbeam.core.compiling.form_list", "StepForm", False, ["int64"]]
    form = ["step", __name__, "_nothing", [0, 1, 2, [1, "int64"], "int64"], []]
    (read,) = forms_in("\n".join(json.dumps(line) for line in [*records, of_other_fields, form]))
    assert read.kinds == (None, None, None, None, types.int64)


def test_a_kind_that_a_list_has_no_words_for_is_said():
    with pytest.raises(TypeError, match="cannot express the type omitted"):
        text_of([], [StepForm("specbeam.core.run_steps", "run_turns", False, (types.Omitted(3),), [])])
