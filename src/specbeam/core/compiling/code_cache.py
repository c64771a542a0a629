"""The cache of machine code on disk: a function is loaded only if every source that was compiled into it is unchanged.

numba's own cache looks only at the file of the function. But the functions that it calls, the records that it takes and the
constants that it names come from other files. After an upgrade numba would run old code, or fail to load code that names
classes which no longer exist. It also reads any file that it finds, and fails on a damaged one.

Each form of a function has a file of its own, named by a hash of all that its machine code depends on. So checkouts and
versions share one folder, and none of them writes what another one reads.
"""

import logging
import pickle
import platform
import re
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
import numpy
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps

import specbeam
from specbeam.core.caches.files import clean, discard, keep_sealed, read_sealed
from specbeam.core.caches.folders import cache_folder
from specbeam.core.compiling import ahead
from specbeam.core.compiling.claims import LOCKS, Claim, claimed, wait_patiently
from specbeam.core.compiling.forms import count_form
from specbeam.core.compiling.libraries import KeptLibrary
from specbeam.core.compiling.registered import files_of
from specbeam.core.garbage import rarely_collected

LOG = logging.getLogger("specbeam.kernels")
_ROOT = Path(__file__).parents[3]
_IMPORT = re.compile(r"^\s*from ([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
_COMPILES = re.compile(
    r"^\s*(from specbeam\.core\.(compiling\.compiler|steps)|import numba|from numba|from llvmlite)", re.MULTILINE
)
# numba's settings that change machine code and are not part of the name of its processor.
_SETTINGS = (
    "OPT",
    "BOUNDSCHECK",
    "DEBUGINFO_DEFAULT",
    "LOOP_VECTORIZE",
    "SLP_VECTORIZE",
    "ENABLE_AVX",
    "USING_SVML",
    "LLVM_REFPRUNE_PASS",
    "LLVM_REFPRUNE_FLAGS",
)


def code_folder() -> Path | None:
    """Return the folder of machine code, below `NUMBA_CACHE_DIR` if that is set; None where nothing can be kept."""
    return cache_folder("code", config.CACHE_DIR, "NUMBA_CACHE_DIR")


def compiled_by() -> tuple[Any, ...]:
    """Return the versions and settings of all that makes machine code, except for the processor."""
    versions = (specbeam_version(), numba.__version__, llvmlite.__version__, numpy.__version__)
    return (*versions, *_python(), *(getattr(config, name, None) for name in _SETTINGS))


def specbeam_version() -> str:
    """Return the version of specbeam; nothing for its kernels alone, in a package of another name."""
    return getattr(specbeam, "__version__", "")


@cache
def _python() -> tuple[str, ...]:
    return platform.python_implementation(), platform.python_version()


@cache
def sources(path: Path) -> frozenset[Path]:
    """Return this file and all files whose functions, records or constants are compiled into its functions."""
    known = {path}
    waiting = [path]
    while waiting:
        for other, names in _imported(waiting.pop()):
            if other in known:
                continue
            if _COMPILES.search(_text(other)) or not other.is_relative_to(_ROOT):
                waiting.append(other)
            elif not any(name.isupper() for name in names):
                continue
            known.add(other)
    return frozenset(known)


@cache
def _imported(path: Path) -> list[tuple[Path, list[str]]]:
    """Return the files of specbeam, or of the file's own package, that it imports from, each with the names it imports."""
    found = []
    for module, names in _IMPORT.findall(_text(path)):
        place = _place_of(module, path)
        if place is None:
            continue
        each = re.findall(r"\w+", names.split("#")[0])
        if place.is_dir():
            found += _homes_in(place / "__init__.pyi", each)
            found += [(place / f"{name}.py", [name]) for name in each if (place / f"{name}.py").exists()]
            place /= "__init__"
        if place.with_suffix(".py").exists():
            found.append((place.with_suffix(".py"), each))
    return found


def _homes_in(stub: Path, names: list[str]) -> list[tuple[Path, list[str]]]:
    """Return the files in which a package's stub says that these names are, each with the names; none without a stub."""
    if not stub.exists():
        return []
    homes = []
    for module, stated in _IMPORT.findall(_text(stub)):
        named = [name for name in re.findall(r"\w+", stated) if name in names]
        if named:
            homes.append((_ROOT.joinpath(*module.split(".")).with_suffix(".py"), named))
    return [(path, named) for path, named in homes if path.exists()]


def _place_of(module: str, importing: Path) -> Path | None:
    """Return the path of a module without its suffix; None for modules of packages other than specbeam and the own one."""
    (first, *_) = module.lstrip(".").split(".")
    if first == "specbeam" and not module.startswith("."):
        return _ROOT.joinpath(*module.split("."))
    if module.startswith("."):
        above = importing.parents[len(module) - len(module.lstrip(".")) - 1]
        return above.joinpath(*module.lstrip(".").split("."))
    top = importing.parent
    package = ""
    while (top / "__init__.py").exists():
        package = top.name
        top = top.parent
    is_sibling = not package and (top / f"{first}.py").exists()
    return top.joinpath(*module.split(".")) if first == package or is_sibling else None


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def digest(path: Path) -> str:
    """Return a hash, 32 hexadecimal digits, of all sources of the functions in a file; nothing if it cannot be read.

    It is the same wherever the files lie.
    """
    try:
        each = sorted(sha256(f"{source.name}\n{_text(source)}".encode()).digest() for source in sources(path))
    except OSError:  # a function that was typed in has no file
        return ""
    return sha256(b"".join(each)).hexdigest()[:32]


class _Place(NamedTuple):
    """The file of a form, and the key that it is kept under."""

    path: Path
    key: str

    @property
    def claim(self) -> Path:
        """The file whose lock is the claim of the process that compiles the form."""
        return self.path.with_suffix(".claim")


class CodeCache(_Cache):
    """The cache that numba asks for the machine code of a function, in place of its own `FunctionCache`.

    Of several processes that find a form missing one compiles it, and the others read the file that it keeps. Without a
    folder or a source file nothing is kept.

    Args:
        function: the source of the compiled function.
        called: the cache of the function that this one only calls, if values around that one are compiled into it.
    """

    def __init__(self, function: Any, called: "CodeCache | None" = None) -> None:
        self._py_func = function
        self._called = called
        self._sources = digest(Path(function.__code__.co_filename))
        self._claims: dict[Any, Claim] = {}  # by signature, of the forms that this process compiles
        self._is_enabled = True

    @property
    def cache_path(self) -> str:
        """The folder of machine code; empty if there is none."""
        return str(code_folder() or "")

    def enable(self) -> None:
        """Load and keep forms."""
        self._is_enabled = True

    def disable(self) -> None:
        """Neither load nor keep forms."""
        self._is_enabled = False

    def flush(self) -> None:
        """Delete all forms of functions of this name."""
        folder = code_folder()
        if folder is not None:
            for path in folder.glob(f"{self._name()}-*.nbc"):
                discard(path, "it is flushed")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load this form of the function from disk; return None, and log it, if it has to be compiled.

        Waits while another process compiles it. Who gets None calls `save_overload`, or `give_up` if that fails.
        """
        count_form()
        target_context.refresh()
        place = self._place(sig, target_context.codegen())
        loaded = _load(place, target_context)
        if loaded is None and self._claim(sig, place, wait_patiently):
            loaded = _load(place, target_context)  # another process may have kept it meanwhile
        if loaded is None:
            LOG.info("compiling %s", self._py_func.__qualname__)
            if sig in self._claims:  # so that other processes can read and keep files, too
                ahead.begin(self._py_func)
        else:
            self.give_up(sig)
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save this form of the function. Warns once if it cannot be saved; the form can be called all the same."""
        place = self._place(sig, data.codegen)
        is_whole = not data.library.has_dynamic_globals and all(one.can_cache for one in data.lifted)
        if place is not None and is_whole:
            (state, *others) = data._reduce()
            keep_sealed(*place, dumps((data.library.with_names(state), *others)))
            clean(place.path.parent)
        self.give_up(sig)
        LOG.info("compiled %s", self._py_func.__qualname__)

    def give_up(self, sig: Any) -> None:
        """End the claim of this process on a form, if it has one."""
        claim = self._claims.pop(sig, None)
        if claim is not None:
            claim.end()

    def keeps(self, sig: Any, target_context: Any) -> bool:
        """Return whether this form of the function is on disk."""
        place = self._place(sig, target_context.codegen())
        return place is not None and place.path.exists()

    def claim(self, sig: Any, target_context: Any) -> bool:
        """Claim a form that this process is going to compile. Returns whether no other process is at it."""
        return self._claim(sig, self._place(sig, target_context.codegen()), claimed)

    def _claim(self, sig: Any, place: _Place | None, claim_on: Callable[[Path], Claim | None]) -> bool:
        """Claim a form. Returns whether this process has the claim, and not another one for too long."""
        if sig in self._claims:
            return True
        if not LOCKS or place is None:
            return False
        try:
            claim = claim_on(place.claim)
        except OSError:  # the folder is read-only, or its disk has no locks: each process compiles by itself
            return False
        if claim is not None:
            self._claims[sig] = claim
        return claim is not None

    def _place(self, sig: Any, codegen: Any) -> _Place | None:
        """Return where a form of this function is kept; None if it cannot be."""
        if not self._is_enabled or not self._sources:
            return None
        folder = code_folder()
        if folder is None:
            return None
        key = repr((compiled_by(), self._key(sig, codegen)))
        return _Place(folder / f"{self._name()}-{sha256(key.encode()).hexdigest()[:32]}.nbc", key)

    def _name(self) -> str:
        """Return the name of the function, as the names of files begin with it."""
        (*_, module) = self._py_func.__module__.split(".")
        return re.sub(r"[^\w.]", "", f"{module}.{self._py_func.__qualname__}")[:100]

    def _key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        """Return the key of a form: its source, its types, the processor, and the values around the function.

        numba knows a record by the name of its class and the types of its fields alone.
        """
        function = self._py_func
        code = function.__code__
        around = tuple(cell.cell_contents for cell in function.__closure__ or ())
        names = (function.__module__, function.__qualname__, code.co_firstlineno, self._sources)
        hashes = (sha256(code.co_code).hexdigest(), sha256(dumps(around)).hexdigest() if around else "")
        inside = self._called and self._called._key(sig, codegen)
        return (*names, *hashes, sig, *_records(sig), codegen.magic_tuple(), inside)


def _load(place: _Place | None, target_context: Any) -> Any:
    """Return a form that is kept; None if there is none, or none that can be loaded."""
    if place is None:
        return None
    content = read_sealed(*place)
    if content is None:
        return None
    try:
        return CompileResult._rebuild(target_context, *pickle.loads(content))
    except Exception as error:  # whatever a library raises of content that it does not expect
        discard(place.path, f"it cannot be loaded ({type(error).__name__}: {error})")
        return None


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


def _records(kind: Any) -> Iterator[str]:
    """Yield the names of the records in a signature, of their fields, and digests of the steps that verbs have for them."""
    record = getattr(kind, "instance_class", None)
    if record is not None:
        yield f"{record.__module__}.{record.__qualname__}"
        yield from getattr(record, "_fields", ())
        yield from (digest(path) for path in files_of(record))
    for part in kind if isinstance(kind, tuple) else getattr(kind, "types", ()):
        yield from _records(part)
