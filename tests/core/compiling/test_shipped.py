"""Code that comes with a wheel is taken where it fits, and is no condition for anything."""

import logging
import platform
import zipfile

import pytest

from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from numba import config, types

from specbeam.core.caches import folders
from specbeam.core.caches.files import digest_of
from specbeam.core.compiling import shipped
from specbeam.core.compiling.code_cache import CodeCache, content_of
from specbeam.core.compiling.compiler import compiled
from specbeam.core.compiling.processor import features
from specbeam.core.compiling.shipped import CLASSES, Processors

HERE = Processors("of-this-test", (platform.machine(),), "", features())


def thrice(number):
    """Return three times a number."""
    return 3 * number


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """The path of the shipped code of this processor, and a function that ships the code of `thrice`."""
    monkeypatch.setenv("SPECBEAM_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    monkeypatch.setattr(shipped, "CLASSES", (HERE,))
    (tmp_path / "shipped").mkdir()
    for one in (shipped.class_here, shipped._archive):
        one.cache_clear()
    yield HERE.archive
    for one in (shipped.class_here, shipped._archive):
        one.cache_clear()


def ship(path, change=lambda content: content):
    """Write the code of `thrice` for integers to an archive; `change` its content."""
    step = compiled(thrice)
    step._cache.disable()
    step.compile((types.int64,))
    result = step.overloads[types.int64,]
    step._cache.enable()
    (name, key) = step._cache.shipped_place((types.int64,), result.library.codegen, HERE)
    content = content_of(result)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, digest_of(key, content) + b"\n" + change(content))


def compiled_now(caplog):
    """Call the step in a cache without files; return whether it had to be compiled."""
    caplog.clear()
    step = compiled(thrice)
    assert isinstance(step._cache, CodeCache)
    with caplog.at_level(logging.INFO, logger="specbeam.kernels"):
        step.compile((types.int64,))
    assert step(14) == 42
    return "compiling thrice" in caplog.messages


def test_shipped_code_is_taken_and_not_saved_again(archive, caplog, tmp_path):
    ship(archive)
    assert not compiled_now(caplog)
    assert not [*(tmp_path / "caches").rglob("code_cache.thrice*.nbc")]


def test_without_a_wheel_it_is_compiled(archive, caplog):
    assert compiled_now(caplog)


@pytest.mark.parametrize("change", [lambda content: content[:-9], lambda content: content + b"x", lambda content: b""])
def test_a_damaged_form_is_compiled(archive, caplog, change):
    ship(archive, change)
    assert compiled_now(caplog)


def test_a_damaged_archive_is_said_once_and_compiled(archive, caplog, monkeypatch):
    monkeypatch.setattr(folders, "_WARNED", set())
    archive.write_bytes(b"PK\x03\x04 and no more")
    with pytest.warns(UserWarning, match=r"of-this-test\.zip cannot be read .* install specbeam anew") as said:
        assert compiled_now(caplog)
    assert len(said) == 1


@pytest.mark.parametrize("field", ["needs", "machines"])
def test_other_processors_have_other_code(archive, monkeypatch, caplog, field):
    ship(archive)
    others = {"needs": features() | {"avx1024"}, "machines": ("pdp11",)}
    monkeypatch.setattr(shipped, "CLASSES", (HERE._replace(**{field: others[field]}),))
    assert compiled_now(caplog)


def test_settings_that_change_code_have_other_code(archive, monkeypatch, caplog):
    ship(archive)
    monkeypatch.setattr(config, "BOUNDSCHECK", 1)
    assert compiled_now(caplog)


def test_the_first_class_that_fits_is_taken():
    """A class with more features stands before those with fewer, whose steps are other ones."""
    for number, one in enumerate(CLASSES):
        for later in CLASSES[number + 1 :]:
            assert one.machines != later.machines or one.needs > later.needs


def test_no_module_has_the_name_of_the_folder():
    """It would be taken for a package, and the digest of all sources would change with the folder."""
    assert not shipped.FOLDER.with_suffix(".py").exists()
