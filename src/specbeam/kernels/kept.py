"""Where compiled loops are kept: a loop is read again only if every source that was compiled into it is still the same.

numba looks at the file that a loop stands in. But the loops that it calls, the records that it takes and the constants that
it names come from other files, so after an upgrade it would run old code, or fail to read what names classes that are gone.
"""

import logging
import re
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)

LOG = logging.getLogger("specbeam.kernels")
_ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^\s*from (specbeam[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
_COMPILES = re.compile(
    r"^\s*(from specbeam\.(kernels\.compiling|core\.steps)|import numba|from numba|from llvmlite)", re.MULTILINE
)


@cache
def sources(path: Path) -> frozenset[Path]:
    """The file, and those whose loops, records or constants it compiles in."""
    found = {path}
    waiting = [path]
    while waiting:
        for other, names in _imported(waiting.pop()):
            if other in found:
                continue
            if _COMPILES.search(_text(other)):
                waiting.append(other)
            elif not any(name.isupper() for name in names):
                continue
            found.add(other)
    return frozenset(found)


def _imported(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Files of this package, and the names that come from each."""
    for module, names in _IMPORT.findall(_text(path)):
        there = _ROOT.joinpath(*module.split("."))
        each = re.findall(r"\w+", names.split("#")[0])
        if there.is_dir():
            yield from ((there / f"{name}.py", [name]) for name in each if (there / f"{name}.py").exists())
            there /= "__init__"
        if there.with_suffix(".py").exists():
            yield there.with_suffix(".py"), each


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def digest(path: Path) -> str:
    """Of all sources of the loops in a file."""
    each = (sha256(_text(one).encode()).digest() for one in sorted(sources(path)))
    return sha256(b"".join(each)).hexdigest()[:16]


class _BySources:
    _py_file: str
    _lineno: int

    def get_disambiguator(self) -> str:
        return f"{self._lineno}-{digest(Path(self._py_file))}"


class _Provided(_BySources, UserProvidedCacheLocator): ...


class _InTree(_BySources, InTreeCacheLocator): ...


class _UserWide(_BySources, UserWideCacheLocator): ...


class _Where(CompileResultCacheImpl):
    _locator_classes = (_Provided, _InTree, _UserWide)


class Kept(FunctionCache):
    """What numba asks for a loop's machine code, in place of its own."""

    _impl_class = _Where

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """A form of a loop goes by the fields of its records too: numba knows a record by its class and types alone."""
        return super()._index_key(sig, codegen), _fields(sig)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return this form of the loop as it was kept; None if it has to be compiled, which is logged."""
        found = super().load_overload(sig, target_context)
        if found is None:
            LOG.info("compiling %s", self._py_func.__qualname__)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep this form of the loop, and nothing of what it was before for this version of Python."""
        super().save_overload(sig, data)
        LOG.info("compiled %s", self._py_func.__qualname__)
        base = self._impl.filename_base
        (name, _, _) = base.partition("-")
        (_, _, version) = base.rpartition(".")
        for path in Path(self._cache_path).glob(f"{name}-*.{version}.*nb[ic]"):
            if not path.name.startswith(base):
                path.unlink(missing_ok=True)


def _fields(kind: Any) -> tuple[Any, ...]:
    """The names of all fields of the records in a signature."""
    inside = kind if isinstance(kind, tuple) else getattr(kind, "types", ())
    own = getattr(getattr(kind, "instance_class", None), "_fields", ())
    return (*own, *(found for one in inside if (found := _fields(one))))
