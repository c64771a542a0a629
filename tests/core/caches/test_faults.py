"""Broken, foreign and planted files of caches, and disks that cannot be written: none is an error, or changes a result."""

import contextlib
import errno
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from specbeam.core.compiling import AVAILABLE

if not AVAILABLE:
    pytest.skip("numba is not installed", allow_module_level=True)

import numba
from numba import types

from specbeam.core import whole_files
from specbeam.core.caches import files, folders
from specbeam.core.compiling.compiler import compiled
from specbeam.core.measure.saved_figures import Figures, NumberField, RecordFields
from tests.support.kernels_alone import write_kernels

if not hasattr(os, "geteuid"):
    pytest.skip("files have no owners here", allow_module_level=True)

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
FIGURES = Figures("pass", RecordFields({"seconds": NumberField((None,))}))
RECORD = {"seconds": [1.0, 2.5]}
STRANGER = 54_321  # a user of whom the system knows nothing


def _thrice(x):
    return 3 * x


def run_step():
    """Call a step as a new process would. Returns its result, and how many of its two forms were loaded."""
    step = compiled(_thrice)
    step.compile((types.int64,))
    result = step(14)
    return result, sum(step._cache_hits.values()) + sum(step.python_entry._cache_hits.values())


class CodeUser:
    """A program that keeps machine code."""

    pattern = "code/*.nbc"

    def run(self):
        """Return whether the result is right, and whether it came from kept files."""
        (result, loaded) = run_step()
        assert loaded in (0, 2)
        return result == 42, loaded == 2


class FigureUser:
    """A program that keeps figures."""

    pattern = "figures/*.json"

    def run(self):
        """Return whether the figures are right, and whether they came from kept files."""
        known = FIGURES.load(["a model"])
        if known is None:
            FIGURES.keep(["a model"], RECORD)
        return known in (None, RECORD), known is not None


USERS = {"code": CodeUser(), "figures": FigureUser()}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The root of all kept files."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "_WARNED", set())
    return tmp_path / "cache"


@pytest.fixture(params=USERS)
def user(request, root):
    """A program that keeps files, and has kept them."""
    user = USERS[request.param]
    assert user.run() == (True, False)
    assert user.run() == (True, True)
    return user


def kept(root, user):
    found = sorted(root.glob(user.pattern))
    assert found
    return found


@contextlib.contextmanager
def warned(text=None):
    """Expect one warning with a text; or none."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    ours = [str(one.message) for one in seen if issubclass(one.category, UserWarning)]
    assert len(ours) == (text is not None), ours
    if text is not None:
        assert text in ours[0]
        assert "SPECBEAM_CACHE" in ours[0]


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(place):
    def flip_bit(path):
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 4
        path.write_bytes(bytes(content))

    return flip_bit


def write(content):
    return lambda path: path.write_bytes(content)


def nest_deeply(path):
    path.write_text("[" * 100_000)


class Bomb:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


DAMAGE = {
    "truncated": truncate,
    "all but a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer by a byte": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": write(b""),
    "junk": write(b"\x80\x04junk" * 999),
    "zeros": write(bytes(5000)),
    "text": write(b"a text\nof two lines\n"),
    "JSON": write(b'{"digest": 7, "seconds": [1.0]}'),
    "deep JSON": nest_deeply,
    "bit of the beginning": flip(0.0),
    "bit of the middle": flip(0.5),
    "bit of the end": flip(1.0),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damaged_files_are_made_anew(root, user, fault):
    for path in kept(root, user):
        DAMAGE[fault](path)
    with warned():
        assert user.run() == (True, False)
        assert user.run() == (True, True)


def test_files_of_other_keys_are_made_anew(root, user):
    """Each is whole, and was kept for something else."""
    if user is USERS["code"]:
        (one, other) = kept(root, user)
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        (one,) = kept(root, user)
        FIGURES.keep(["another model"], {"seconds": [9.0]})
        (other,) = set(kept(root, user)) - {one}
        other.replace(one)
    with warned():
        assert user.run() == (True, False)
        assert user.run() == (True, True)


def test_a_whole_file_that_numba_cannot_load_is_made_anew(root):
    user = USERS["code"]
    user.run()
    key = compiled(_thrice)._cache._place((types.int64,), compiled(_thrice).targetctx.codegen()).key
    for path in kept(root, user):
        for content in (pickle.dumps("another thing"), b"no pickle"):
            files.save_sealed(path, key, content)
    with warned():
        assert user.run() == (True, False)
        assert user.run() == (True, True)


def give_away(path):
    os.chown(path, STRANGER, STRANGER)


def link_away(path):
    """Put a link in place of a file, to a copy of it elsewhere."""
    elsewhere = path.parent.parent.parent / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


DISTRUSTED = {
    "foreign": (give_away, "belongs to user"),
    "writable by all": (lambda path: path.chmod(0o666), "can be written by other users"),
    "writable by a group": (lambda path: path.chmod(0o620), "can be written by other users"),
    "link": (link_away, "cannot be read"),
    "pipe": (make_pipe, "is not a file"),
}


@pytest.mark.parametrize("fault", DISTRUSTED)
def test_files_that_may_be_of_others_are_not_read_and_made_anew(root, user, fault):
    if fault == "foreign" and not IS_ROOT:
        pytest.skip("only root can give files away")
    (spoil, reason) = DISTRUSTED[fault]
    paths = kept(root, user)
    for path in paths:
        spoil(path)
    with warned(reason):
        assert user.run() == (True, False)
        assert user.run() == (True, True)
    for path in paths:
        status = path.lstat()
        assert stat.S_ISREG(status.st_mode)
        assert status.st_uid == os.geteuid()
        assert stat.S_IMODE(status.st_mode) == 0o600
    for path in root.parent.glob("*.*"):  # what links led to is as it was
        assert path.stat().st_size > 50


@pytest.mark.parametrize("fault", ["raw", "with another digest", *DISTRUSTED])
def test_planted_code_is_not_run(root, tmp_path, fault):
    """Its author knows the key, so that only ownership tells."""
    if fault == "foreign" and not IS_ROOT:
        pytest.skip("only root can give files away")
    user = USERS["code"]
    user.run()
    mark = tmp_path / "was run"
    bomb = pickle.dumps(Bomb(mark))
    step = compiled(_thrice)
    keys = {}
    for cache in (step._cache, step.python_entry._cache):
        place = cache._place((types.int64,), step.targetctx.codegen())
        keys[place.path] = place.key
    assert set(keys) == set(kept(root, user))
    for path, key in keys.items():
        if fault == "raw":
            path.write_bytes(bomb)
        elif fault == "with another digest":
            files.save_sealed(path, "another key", bomb)
        else:
            files.save_sealed(path, key, bomb)
            (spoil, _) = DISTRUSTED[fault]
            spoil(path)
    with warned(DISTRUSTED[fault][1] if fault in DISTRUSTED else None):
        assert user.run() == (True, False)
    assert not mark.exists()


def test_a_file_that_cannot_be_read_is_made_anew(root, user, monkeypatch):
    paths = {str(path) for path in kept(root, user)}
    opened = os.open

    def refuse(path, flags, *mode, **settings):
        if str(path) in paths and flags & os.O_ACCMODE == os.O_RDONLY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *mode, **settings)

    with monkeypatch.context() as here, warned("cannot be read (Permission denied)"):
        here.setattr(os, "open", refuse)
        assert user.run() == (True, False)
    assert user.run() == (True, True)


def test_a_folder_in_place_of_a_file_is_replaced_if_it_is_empty(root, user):
    for path in kept(root, user):
        path.unlink()
        path.mkdir()
    with warned("is not a file"):
        assert user.run() == (True, False)
        assert user.run() == (True, True)
    for path in kept(root, user):
        path.unlink()
        (path / "inner").mkdir(parents=True)
    assert user.run() == (True, False)
    assert user.run() == (True, False)


def claim_of(root, user):
    return [path.with_suffix(".claim") for path in kept(root, user)]


CLAIMS = {
    "junk": write(b"junk"),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("/dev/full"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": lambda path: os.mkfifo(path),
    "unreadable": lambda path: (path.touch(), path.chmod(0)),
}


@pytest.mark.parametrize("fault", CLAIMS)
def test_broken_claims_hold_nothing_up(root, fault):
    user = USERS["code"]
    user.run()
    claims = claim_of(root, user)
    for path in kept(root, user):
        path.unlink()
    for path in claims:
        CLAIMS[fault](path)
    began = time.monotonic()
    with warned():
        assert user.run() == (True, False)
        assert user.run() == (True, True)
    assert time.monotonic() - began < 20


def make_file(root):
    shutil.rmtree(root)
    root.write_text("a file")


def link_to_stranger(root):
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)
    root.symlink_to(elsewhere)
    os.chown(root, STRANGER, STRANGER, follow_symlinks=False)


FOLDERS = {
    "is a file": (make_file, "is not a folder"),
    "dangling link": (lambda root: (shutil.rmtree(root), root.symlink_to("nowhere")), "cannot be created or read"),
    "writable by all": (lambda root: root.chmod(0o777), "can be written by other users (its mode is 777)"),
    "sticky": (lambda root: root.chmod(0o1777), "can be written by other users"),
    "writable by a group": (lambda root: root.chmod(0o770), "can be written by other users"),
    "inner is writable by all": (
        lambda root: [path.chmod(0o777) for path in root.iterdir()],
        "can be written by other users",
    ),
    "foreign": (give_away, f"belongs to user {STRANGER}"),
    "inner is foreign": (lambda root: [give_away(path) for path in root.iterdir()], f"belongs to user {STRANGER}"),
    "link of another user": (link_to_stranger, f"is a link of user {STRANGER}"),
}
OF_OTHERS = {"foreign", "inner is foreign", "link of another user"}


@pytest.mark.parametrize("fault", FOLDERS)
def test_folders_that_cannot_be_trusted_are_not_used(root, user, fault):
    if fault in OF_OTHERS and not IS_ROOT:
        pytest.skip("only root can give folders away")
    (spoil, reason) = FOLDERS[fault]
    spoil(root)
    with warned(reason):
        assert user.run() == (True, False)
        assert user.run() == (True, False)


@pytest.mark.parametrize("place", [".", "cache", "./cache", "../cache", "~nobody-of-this-name/cache"])
def test_relative_places_are_not_used(root, user, monkeypatch, place):
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("SPECBEAM_CACHE", place)
    with warned(f"SPECBEAM_CACHE is the relative path {place!r}"):
        assert user.run() == (True, False)
        assert user.run() == (True, False)


def test_a_relative_place_of_machine_code_is_not_used(root, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "here")
    with warned("NUMBA_CACHE_DIR is the relative path 'here'"):
        assert USERS["code"].run() == (True, False)
        assert USERS["code"].run() == (True, False)


def test_a_link_of_the_user_leads_to_the_root(root, user):
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)
    root.symlink_to(elsewhere)
    with warned():
        assert user.run() == (True, True)


def test_a_folder_that_is_deleted_meanwhile_is_made_again(root, user):
    shutil.rmtree(root)
    with warned():
        assert user.run() == (True, False)
        assert user.run() == (True, True)


FAILING = {"write": (whole_files, "open"), "rename": (Path, "replace")}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", FAILING)
def test_a_disk_that_takes_nothing_is_said_once(root, monkeypatch, call, number):
    def refuse(*given, **settings):
        raise OSError(number, os.strerror(number))

    (place, name) = FAILING[call]
    for user in USERS.values():
        monkeypatch.setattr(folders, "_WARNED", set())
        with monkeypatch.context() as here, warned(f"cannot be written ({os.strerror(number)})"):
            here.setattr(place, name, refuse, raising=False)
            assert user.run() == (True, False)
            assert user.run() == (True, False)
        assert not [*root.rglob("*.part"), *root.rglob("*.claim"), *root.glob(user.pattern)]
        assert user.run() == (True, False)
        assert user.run() == (True, True)


def test_locks_that_fail_hold_nothing_up(root, monkeypatch):
    from specbeam.core.compiling import claims

    def refuse(number, what):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    with warned():
        assert USERS["code"].run() == (True, False)
        assert USERS["code"].run() == (True, True)


def test_another_library_keeps_its_files_below_the_root_or_for_one_process(root, monkeypatch):
    monkeypatch.setenv("A_CACHE_DIR", "set by the user")
    folders.lend_folder("A_CACHE_DIR", "a")
    assert os.environ["A_CACHE_DIR"] == "set by the user"
    monkeypatch.setenv("A_CACHE_DIR", "")
    folders.lend_folder("A_CACHE_DIR", "a")
    assert os.environ["A_CACHE_DIR"] == str(root / "a")
    root.chmod(0o777)
    monkeypatch.setenv("A_CACHE_DIR", "")
    with warned("can be written by other users"):
        folders.lend_folder("A_CACHE_DIR", "a")
    lent = Path(os.environ["A_CACHE_DIR"])
    assert root not in lent.parents
    assert stat.S_IMODE(lent.stat().st_mode) == 0o700


def test_kept_files_are_for_their_user_alone(root, user):
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_settings_of_numba_that_change_machine_code_have_files_of_their_own(root, monkeypatch):
    user = USERS["code"]
    user.run()
    before = set(kept(root, user))
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    assert user.run() == (True, False)
    assert set(kept(root, user)) > before


def test_what_was_not_used_for_long_is_deleted_once_a_day(root):
    USERS["code"].run()
    folder = root / "code"
    days = {
        "new.nbc": 1,
        "used.nbc": 29,
        "old.nbc": 31,
        "dead.claim": 2,
        "live.claim": 0,
        ".dead.part": 2,
        "text.txt": 99,
    }
    for name, age in days.items():
        (folder / name).write_bytes(b"1234")
        then = time.time() - age * files.DAY_S - 60
        os.utime(folder / name, (then, then))
    files.clean(folder)
    assert {path.name for path in folder.iterdir()} >= set(days)  # it was cleaned today
    os.utime(folder / "cleaned", (0, 0))
    files.clean(folder)
    left = {path.name for path in folder.iterdir()}
    assert left & set(days) == {"new.nbc", "used.nbc", "live.claim", "text.txt"}
    assert USERS["code"].run() == (True, True)


def test_the_files_used_least_recently_go_when_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    for age in range(5):
        path = tmp_path / f"{age}.nbc"
        path.write_bytes(b"1234")
        os.utime(path, (time.time() - 100 * age, time.time() - 100 * age))
    files.clean(tmp_path)
    assert {path.name for path in tmp_path.glob("*.nbc")} == {"0.nbc", "1.nbc"}


# Whole processes, in a package of the kernels alone.

STEPS = """
import sys, time
from specbeam.core.compiling.compiler import compiled
@compiled
def twice(x):
    return 2 * x
@compiled
def asked(x):
    return twice(x) + 1
if __name__ == "__main__":
    from specbeam.three import asked
    print(asked(3), sum(asked.python_entry._cache_hits.values()))
"""
RUN = [sys.executable, "-B", "-m", "specbeam.three"]
# A user without an entry in the list of users, who may read the files of Python wherever they are.
AS_STRANGER = ["setpriv", "--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
AS_STRANGER += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    package = write_kernels(tmp_path_factory.mktemp("alone"))
    (package / "three.py").write_text(STEPS)
    return package


def begun(package, cache, before=(), command=RUN, **settings):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent), "SPECBEAM_COMPILERS": "1"}
    environment |= settings
    if cache is not None:
        environment["SPECBEAM_CACHE"] = str(cache)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*before, *command], cwd=package.parent, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def ended(process):
    """What a process has printed, and its warnings, after it has ended well."""
    (text, complaints) = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    warned_of = [line for line in complaints.splitlines() if "UserWarning" in line]
    assert "Traceback" not in complaints
    return text.strip(), warned_of


def can(*command):
    """Whether a command of the system can be run here."""
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def mounting(script):
    """Return a command that mounts something for a process alone, which is the rest of the command."""
    return ["unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"]


needs_mounts = pytest.mark.skipif(not can(*mounting("true"), "true"), reason="nothing can be mounted")
needs_strangers = pytest.mark.skipif(not can(*AS_STRANGER, "true"), reason="users cannot be changed")


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_cold_processes_at_once_find_the_same(package, tmp_path, count):
    processes = [begun(package, tmp_path) for _ in range(count)]
    for process in processes:
        (text, complaints) = ended(process)
        assert text in ("7 0", "7 1")
        assert not complaints
    assert not list(tmp_path.rglob("*.part")) + list(tmp_path.rglob("*.claim"))
    assert ended(begun(package, tmp_path)) == ("7 1", [])


def test_a_process_that_is_killed_while_it_compiles_holds_nothing_up(package, tmp_path):
    killed = begun(package, tmp_path)
    while not list(tmp_path.rglob("*.claim")):
        assert killed.poll() is None
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    began = time.monotonic()
    assert ended(begun(package, tmp_path)) == ("7 0", [])
    assert time.monotonic() - began < 25  # the patience with a process that lives is longer
    assert ended(begun(package, tmp_path)) == ("7 1", [])


def test_without_a_home_folder_nothing_is_kept(package):
    environment = {"HOME": ""}
    if IS_ROOT and can(*AS_STRANGER, "true"):
        (text, complaints) = ended(begun(package, None, AS_STRANGER))
        assert text == "7 0"
        assert len(complaints) == 1
        assert "this user has no home folder" in complaints[0]
        environment = {"HOME": "/nonexistent/home"}
        (text, complaints) = ended(begun(package, None, AS_STRANGER, **environment))
        assert text == "7 0"
        assert len(complaints) == 1
        assert "/nonexistent/home/.cache/specbeam cannot be created" in complaints[0]


@needs_root
@needs_strangers
def test_a_user_who_may_not_write_the_cache_of_another_one_runs_without(package, tmp_path):
    assert ended(begun(package, tmp_path / "cache")) == ("7 0", [])
    for path in (tmp_path, tmp_path / "cache", *(tmp_path / "cache").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (text, complaints) = ended(begun(package, tmp_path / "cache", AS_STRANGER))
    assert text == "7 0"
    assert len(complaints) == 1
    assert "belongs to user 0" in complaints[0]


@needs_mounts
def test_a_package_that_is_read_only_is_kept_code_of(package, tmp_path):
    read_only = mounting(f"mount --bind {package} {package} && mount -o remount,bind,ro {package}")
    assert ended(begun(package, tmp_path, read_only)) == ("7 0", [])
    assert ended(begun(package, tmp_path, read_only)) == ("7 1", [])


@needs_mounts
def test_a_cache_that_is_read_only_is_read(package, tmp_path):
    read_only = mounting(f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path}")
    (text, complaints) = ended(begun(package, tmp_path / "cache", read_only))
    assert text == "7 0"
    assert len(complaints) == 1
    assert "cannot be created or read (Read-only file system)" in complaints[0]
    assert ended(begun(package, tmp_path / "cache")) == ("7 0", [])
    assert ended(begun(package, tmp_path / "cache", read_only)) == ("7 1", [])
    for path in (tmp_path / "cache").rglob("*.nbc"):
        truncate(path)
    (text, complaints) = ended(begun(package, tmp_path / "cache", read_only))
    assert text == "7 0"
    assert len(complaints) == 1
    assert "cannot be written (Read-only file system)" in complaints[0]


@needs_mounts
@pytest.mark.parametrize("size", ["8k", "24k"])
def test_a_full_disk_is_run_with(package, tmp_path, size):
    full = mounting(f"mount -t tmpfs -o size={size},mode=700 tmpfs {tmp_path}")
    (text, complaints) = ended(begun(package, tmp_path, full))
    assert text == "7 0"
    assert len(complaints) == 1
    assert "No space left on device" in complaints[0]


def test_processes_that_compile_ahead_harm_nothing_where_nothing_can_be_kept(package):
    assert ended(begun(package, Path("/dev/null/cache"), SPECBEAM_COMPILERS="3"))[0] == "7 0"
