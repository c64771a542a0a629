"""The cache of machine code on disk: a function is loaded only if every source that was compiled into it is unchanged.

numba's own cache looks only at the file of the function. But the functions that it calls, the records that it takes and the
constants that it names come from other files. After an upgrade numba would run old code, or fail to load code that names
classes which no longer exist.
"""

import logging
import re
from collections.abc import Callable
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
from numba.core.compiler_lock import global_compiler_lock

from specbeam.garbage import rarely_collected
from specbeam.kernels import ahead
from specbeam.kernels.claims import LOCKS, Claim, alone, claimed, wait_patiently
from specbeam.kernels.forms import count_form
from specbeam.kernels.libraries import KeptLibrary

LOG = logging.getLogger("specbeam.kernels")
_ENDINGS = (".nbi", ".nbc", ".claim", ".saving")  # of the files of a function
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


@cache
def _imported(path: Path) -> list[tuple[Path, list[str]]]:
    """Return the files of this package that a file imports from, each with the names that it imports."""
    found = []
    for module, names in _IMPORT.findall(_text(path)):
        place = _ROOT.joinpath(*module.split("."))
        each = re.findall(r"\w+", names.split("#")[0])
        if place.is_dir():
            found += [(place / f"{name}.py", [name]) for name in each if (place / f"{name}.py").exists()]
            place /= "__init__"
        if place.with_suffix(".py").exists():
            found.append((place.with_suffix(".py"), each))
    return found


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

    def reduce(self, cres: Any) -> Any:
        """Return what numba keeps of a form, with the names in its machine code beside that."""
        (state, *others) = super().reduce(cres)
        return (cres.library.with_names(state), *others)


class CodeCache(FunctionCache):
    """The cache that numba asks for the machine code of a function, in place of its own `FunctionCache`.

    Of several processes that find a form missing one compiles it, and the others read what it keeps. The sources are read at
    once; what numba prepares, which is a third of the time that the decorator takes, waits for the first use.

    Args:
        function: the source of the compiled function.
        called: the cache of the function that this one only calls, if values around that one are compiled into it.
    """

    _impl_class = _Files

    def __init__(self, function: Any, called: "CodeCache | None" = None) -> None:
        digest(Path(function.__code__.co_filename))
        self._function = function
        self._called = called
        self._claims: dict[Any, Claim] = {}  # by signature, of the forms that this process compiles

    def __getattr__(self, name: str) -> Any:
        """Prepare the cache, when an attribute is asked for that it has only then."""
        if name.startswith("__") or "_impl" in vars(self):
            raise AttributeError(name)
        super().__init__(self._function)
        return getattr(self, name)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Return the key of a form, with the field names of its records: numba knows a record by class and types alone."""
        inside = self._called and self._called._index_key(sig, codegen)
        return super()._index_key(sig, codegen), _fields(sig), inside

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load this form of the function from disk; return None, and log it, if it has to be compiled.

        Waits while another process compiles it. Whoever gets None calls `save_overload`, or `give_up` if that fails.
        """
        count_form()
        loaded = super().load_overload(sig, target_context)
        if loaded is None and self._claim(sig, target_context, wait_patiently):
            loaded = super().load_overload(sig, target_context)  # another process may have kept it meanwhile
        if loaded is None:
            LOG.info("compiling %s", self._py_func.__qualname__)
            if sig in self._claims:  # what others compile can be kept
                ahead.begin(self._py_func)
        else:
            self.give_up(sig)
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save this form of the function, and delete what older sources left for the same version of Python.

        Nothing is saved while another process does not end saving another form: this one can be called all the same.
        """
        base = self._impl.filename_base
        with alone(
            Path(self._cache_path) / f"{base}.saving"
        ) as is_free:  # the index of a function names all of its forms
            if is_free:
                super().save_overload(sig, data)
                self._delete_older()
        self.give_up(sig)
        LOG.info("compiled %s", self._py_func.__qualname__)

    def _delete_older(self) -> None:
        """Delete what other sources of this function left, claims of processes that were killed included."""
        base = self._impl.filename_base
        (name, _, _) = base.partition("-")
        (_, _, version) = base.rpartition(".")
        for path in Path(self._cache_path).glob(f"{name}-*.{version}.*"):
            if path.suffix in _ENDINGS and not path.name.startswith(base):
                path.unlink(missing_ok=True)

    def give_up(self, sig: Any) -> None:
        """End the claim of this process on a form, if it has one."""
        claim = self._claims.pop(sig, None)
        if claim is not None:
            claim.end()

    def keeps(self, sig: Any, target_context: Any) -> bool:
        """Return whether this form of the function is on disk."""
        name = self._cache_file._load_index().get(self._index_key(sig, target_context.codegen()))
        return name is not None and (Path(self._cache_path) / name).exists()  # numba writes the index first

    def claim(self, sig: Any, target_context: Any) -> bool:
        """Claim a form that this process is going to compile. Returns whether no other process is at it."""
        return self._claim(sig, target_context, claimed)

    def _claim(self, sig: Any, target_context: Any, claim_on: Callable[[Path], Claim | None]) -> bool:
        """Claim a form. Returns whether this process has the claim, and not another one for too long."""
        if sig in self._claims:
            return True
        if not LOCKS:
            return False
        key = repr(self._index_key(sig, target_context.codegen()))
        form = sha256(key.encode()).hexdigest()[:16]
        try:
            claim = claim_on(Path(self._cache_path) / f"{self._impl.filename_base}.{form}.claim")
        except OSError:  # nothing can be kept there, and numba says so
            return False
        if claim is not None:
            self._claims[sig] = claim
        return claim is not None


def compile_in_turn(function: Any) -> None:
    """Make a compiled function be compiled into a library of `kernels.libraries`, and end its claims where that fails."""
    compile_form = function.compile
    codegen = function.targetctx.codegen()

    def compile_once(sig: Any) -> Any:
        with global_compiler_lock, rarely_collected():
            before = codegen._library_class
            codegen._library_class = KeptLibrary
            try:
                return compile_form(sig)
            finally:
                codegen._library_class = before
                function._cache.give_up(sig)

    function.compile = compile_once


def _fields(kind: Any) -> tuple[Any, ...]:
    """Return the names of all fields of the records in a signature, nested ones included."""
    inside = kind if isinstance(kind, tuple) else getattr(kind, "types", ())
    own = getattr(getattr(kind, "instance_class", None), "_fields", ())
    return (*own, *(names for part in inside if (names := _fields(part))))
