"""The cache of machine code on disk: a function is loaded only if every source that was compiled into it is unchanged.

numba's own cache looks only at the file of the function. But the functions that it calls, the records that it takes and the
constants that it names come from other files. After an upgrade numba would run old code, or fail to load code that names
classes which no longer exist.
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

from specbeam.kernels.forms import count_form

LOG = logging.getLogger("specbeam.kernels")
_ROOT = Path(__file__).parents[2]
_IMPORT = re.compile(r"^\s*from (specbeam[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
_COMPILES = re.compile(
    r"^\s*(from specbeam\.(kernels\.compiling|core\.steps)|import numba|from numba|from llvmlite)", re.MULTILINE
)


@cache
def sources(path: Path) -> frozenset[Path]:
    """Return this file and all files whose functions, records or constants are compiled into its functions."""
    known = {path}
    waiting = [path]
    while waiting:
        for other, names in _imported(waiting.pop()):
            if other in known:
                continue
            if _COMPILES.search(_text(other)):
                waiting.append(other)
            elif not any(name.isupper() for name in names):
                continue
            known.add(other)
    return frozenset(known)


def _imported(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the files of this package that a file imports from, each with the names that it imports."""
    for module, names in _IMPORT.findall(_text(path)):
        place = _ROOT.joinpath(*module.split("."))
        each = re.findall(r"\w+", names.split("#")[0])
        if place.is_dir():
            yield from ((place / f"{name}.py", [name]) for name in each if (place / f"{name}.py").exists())
            place /= "__init__"
        if place.with_suffix(".py").exists():
            yield place.with_suffix(".py"), each


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def digest(path: Path) -> str:
    """Return a hash, 16 hexadecimal digits, of all sources of the functions in a file."""
    each = (sha256(_text(source).encode()).digest() for source in sorted(sources(path)))
    return sha256(b"".join(each)).hexdigest()[:16]


class _BySources:
    """A locator of cached code whose file names contain the hash of all sources."""

    _py_file: str
    _lineno: int

    def get_disambiguator(self) -> str:
        return f"{self._lineno}-{digest(Path(self._py_file))}"


class _Provided(_BySources, UserProvidedCacheLocator): ...


class _InTree(_BySources, InTreeCacheLocator): ...


class _UserWide(_BySources, UserWideCacheLocator): ...


class _Files(CompileResultCacheImpl):
    _locator_classes = (_Provided, _InTree, _UserWide)


class CodeCache(FunctionCache):
    """The cache that numba asks for the machine code of a function, in place of its own `FunctionCache`."""

    _impl_class = _Files

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return the key of a form, with the field names of its records: numba knows a record by class and types alone."""
        return super()._index_key(sig, codegen), _fields(sig)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load this form of the function from disk; return None, and log it, if it has to be compiled."""
        count_form()
        loaded = super().load_overload(sig, target_context)
        if loaded is None:
            LOG.info("compiling %s", self._py_func.__qualname__)
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save this form of the function, and delete what older sources left for the same version of Python."""
        super().save_overload(sig, data)
        LOG.info("compiled %s", self._py_func.__qualname__)
        base = self._impl.filename_base
        (name, _, _) = base.partition("-")
        (_, _, version) = base.rpartition(".")
        for path in Path(self._cache_path).glob(f"{name}-*.{version}.*nb[ic]"):
            if not path.name.startswith(base):
                path.unlink(missing_ok=True)


def _fields(kind: Any) -> tuple[Any, ...]:
    """Return the names of all fields of the records in a signature, nested ones included."""
    inside = kind if isinstance(kind, tuple) else getattr(kind, "types", ())
    own = getattr(getattr(kind, "instance_class", None), "_fields", ())
    return (*own, *(names for part in inside if (names := _fields(part))))
