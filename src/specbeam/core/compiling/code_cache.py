"""The cache of machine code on disk: a function is loaded only if all sources that were compiled into it are unchanged.

numba's own cache checks only the file of the function. But its callees, record types and constants come from other files.
After an upgrade numba would run old code, or fail to load code that refers to removed classes. numba also trusts any
file that it finds, and fails on damaged ones.

Each form of a function has its own file, named by a hash of everything that its machine code depends on. So checkouts and
versions share one folder without overwriting each other's files.
"""

import logging
import pickle
import platform
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
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
from specbeam.core.caches.files import clean, discard, read_sealed, save_sealed
from specbeam.core.caches.folders import cache_folder
from specbeam.core.compiling import ahead
from specbeam.core.compiling.claims import LOCKS, Claim, claimed, wait_patiently
from specbeam.core.compiling.forms import count_form, tell
from specbeam.core.compiling.libraries import CachedLibrary
from specbeam.core.compiling.registered import files_of
from specbeam.core.compiling.shipped import Processors, compilers, magic, shipped
from specbeam.core.garbage import rarely_collected

LOG = logging.getLogger("specbeam.kernels")
_ROOT = Path(__file__).parents[3]
_IMPORT = re.compile(r"^\s*from ([\w.]+) import (\([^)]*\)|.*)$", re.MULTILINE)
_COMPILES = re.compile(
    r"^\s*(from specbeam\.core\.(compiling\.compiler|steps)|import numba|from numba|from llvmlite)", re.MULTILINE
)
# Settings of numba that change machine code and are not part of the processor's name.
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
    """Return the folder of machine code, below `NUMBA_CACHE_DIR` if it is set; None without a usable folder."""
    return cache_folder("code", config.CACHE_DIR, "NUMBA_CACHE_DIR")


def compiled_by() -> tuple[Any, ...]:
    """Return the versions and settings on which machine code depends, except for the processor."""
    versions = (specbeam_version(), numba.__version__, llvmlite.__version__, numpy.__version__)
    return (*versions, *_python(), *_settings())


def _settings() -> tuple[Any, ...]:
    return tuple(getattr(config, name, None) for name in _SETTINGS)


def specbeam_version() -> str:
    """Return the version of specbeam; "" if its kernels are packaged alone under another name."""
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
    """Return the files of specbeam, or of the file's own package, that it imports from, with the imported names."""
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
    """Return the files that define these names according to a package's stub, with the names; empty without a stub."""
    if not stub.exists():
        return []
    homes = []
    for module, stated in _IMPORT.findall(_text(stub)):
        named = [name for name in re.findall(r"\w+", stated) if name in names]
        if named:
            homes.append((_ROOT.joinpath(*module.split(".")).with_suffix(".py"), named))
    return [(path, named) for path, named in homes if path.exists()]


def _place_of(module: str, importing: Path) -> Path | None:
    """Return the path of a module without suffix; None for packages other than specbeam and the importing one."""
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
    """Return a hash, 32 hexadecimal digits, of all sources of the functions in a file; "" if it cannot be read.

    It does not depend on the location of the files.
    """
    try:
        each = sorted(sha256(f"{source.name}\n{_text(source)}".encode()).digest() for source in sources(path))
    except OSError:  # a function typed into the interpreter has no file
        return ""
    return sha256(b"".join(each)).hexdigest()[:32]


class _Place(NamedTuple):
    """The file of a form, and its key."""

    path: Path
    key: str

    @property
    def claim(self) -> Path:
        """The lock file of the process that compiles the form."""
        return self.path.with_suffix(".claim")


class CodeCache(_Cache):
    """The cache of a function's machine code, in place of numba's `FunctionCache`.

    If several processes miss a form, one compiles it and the others load the file that it saves. Without a folder or a
    source file nothing is saved.

    Args:
        function: the source of the compiled function.
        called: for an entry: the cache of the function that it calls, if this function has a closure.
    """

    def __init__(self, function: Any, called: "CodeCache | None" = None) -> None:
        self._py_func = function
        self._called = called
        self._sources = digest(Path(function.__code__.co_filename))
        self._claims: dict[Any, Claim] = {}  # by signature, of forms that this process is compiling
        self._under_way: set[Any] = set()  # signatures of forms that this process is compiling, with or without a claim
        self._is_enabled = True

    @property
    def cache_path(self) -> str:
        """The folder of machine code; empty if there is none."""
        return str(code_folder() or "")

    def enable(self) -> None:
        """Load and save forms."""
        self._is_enabled = True

    def disable(self) -> None:
        """Neither load nor save forms."""
        self._is_enabled = False

    def flush(self) -> None:
        """Delete all forms of functions of this name."""
        folder = code_folder()
        if folder is not None:
            for path in folder.glob(f"{self._name()}-*.nbc"):
                discard(path, "it is flushed")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load this form of the function from disk; return None, and log it, if it must be compiled.

        Waits while another process compiles it. After None, the caller calls `save_overload`, or `give_up` on failure.
        """
        count_form()
        target_context.refresh()
        place = self._place(sig, target_context.codegen())
        loaded = _load(place, target_context) or self._load_shipped(sig, target_context)
        if loaded is None and self._claim(sig, place, wait_patiently):
            loaded = _load(place, target_context)  # another process may have saved it in the meantime
        if loaded is None:
            LOG.info("compiling %s", self._py_func.__qualname__)
            self._under_way.add(sig)
            tell(begins=True)
            if sig in self._claims:  # locks work here, so other processes can share files
                ahead.begin(self._py_func)
        else:
            self.give_up(sig)
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save this form of the function. Warns once if it cannot be saved; the form can still be called."""
        place = self._place(sig, data.codegen)
        is_whole = not data.library.has_dynamic_globals and all(one.can_cache for one in data.lifted)
        if place is not None and is_whole:
            save_sealed(*place, content_of(data))
            clean(place.path.parent)
        self.give_up(sig)
        LOG.info("compiled %s", self._py_func.__qualname__)

    def give_up(self, sig: Any) -> None:
        """End the compilation of a form, if any: release this process's claim, and tell that it ended."""
        claim = self._claims.pop(sig, None)
        if claim is not None:
            claim.end()
        if sig in self._under_way:
            self._under_way.remove(sig)
            tell(begins=False)

    def keeps(self, sig: Any, target_context: Any) -> bool:
        """Return whether this form of the function is on disk."""
        place = self._place(sig, target_context.codegen())
        is_kept = place is not None and place.path.exists()
        return is_kept or self._shipped(sig, target_context.codegen()) is not None

    def claim(self, sig: Any, target_context: Any) -> bool:
        """Claim a form to compile it. Returns False if another process is compiling it."""
        return self._claim(sig, self._place(sig, target_context.codegen()), claimed)

    def _claim(self, sig: Any, place: _Place | None, claim_on: Callable[[Path], Claim | None]) -> bool:
        """Claim a form. Returns whether this process has the claim."""
        if sig in self._claims:
            return True
        if not LOCKS or place is None:
            return False
        try:
            claim = claim_on(place.claim)
        except OSError:  # a read-only folder, or a disk without locks: each process compiles for itself
            return False
        if claim is not None:
            self._claims[sig] = claim
        return claim is not None

    def _place(self, sig: Any, codegen: Any) -> _Place | None:
        """Return the file and key of a form of this function; None if it cannot be saved."""
        if not self._is_enabled or not self._sources:
            return None
        folder = code_folder()
        if folder is None:
            return None
        key = repr((compiled_by(), self._key(sig, codegen.magic_tuple())))
        return _Place(folder / self._file(key), key)

    def shipped_place(self, sig: Any, codegen: Any, processors: Processors) -> tuple[str, str]:
        """Return the name and the key of a form's file in the code of a wheel."""
        key = repr((compilers(), _settings(), self._key(sig, magic(codegen, processors))))
        return self._file(key), key

    def _shipped(self, sig: Any, codegen: Any) -> bytes | None:
        """Return the content of this form in the code of a wheel; None if it has none."""
        if not self._is_enabled or not self._sources:
            return None
        return shipped(partial(self.shipped_place, sig, codegen))

    def _load_shipped(self, sig: Any, target_context: Any) -> Any:
        """Return this form from the code of a wheel; None if it has none that can be loaded."""
        content = self._shipped(sig, target_context.codegen())
        if content is None:
            return None
        try:
            return _rebuilt(content, target_context)
        except Exception as error:  # libraries raise all kinds of errors for unexpected content
            LOG.info("the shipped code of %s cannot be loaded: %s", self._py_func.__qualname__, error)
            return None

    def _file(self, key: str) -> str:
        """Return the name of the file of the form with this key."""
        return f"{self._name()}-{sha256(key.encode()).hexdigest()[:32]}.nbc"

    def _name(self) -> str:
        """Return the name of the function, the prefix of its file names."""
        (*_, module) = self._py_func.__module__.split(".")
        return re.sub(r"[^\w.]", "", f"{module}.{self._py_func.__qualname__}")[:100]

    def _key(self, sig: Any, processor: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the key of a form: its sources, types, processor (numba's magic tuple) and closure.

        The key includes the field names of records, because numba identifies them only by class name and field types.
        """
        function = self._py_func
        code = function.__code__
        around = tuple(cell.cell_contents for cell in function.__closure__ or ())
        names = (function.__module__, function.__qualname__, code.co_firstlineno, self._sources)
        hashes = (sha256(code.co_code).hexdigest(), sha256(dumps(around)).hexdigest() if around else "")
        inside = self._called and self._called._key(sig, processor)
        return (*names, *hashes, sig, *_records(sig), processor, inside)


def _load(place: _Place | None, target_context: Any) -> Any:
    """Return a saved form; None if there is none that can be loaded."""
    if place is None:
        return None
    content = read_sealed(*place)
    if content is None:
        return None
    try:
        return _rebuilt(content, target_context)
    except Exception as error:  # libraries raise all kinds of errors for unexpected content
        discard(place.path, f"it cannot be loaded ({type(error).__name__}: {error})")
        return None


def content_of(data: Any) -> bytes:
    """Return the content with which numba's result of a compilation is saved."""
    (state, *others) = data._reduce()
    return dumps((data.library.with_names(state), *others))


def _rebuilt(content: bytes, target_context: Any) -> Any:
    """Return the form that was saved as this content."""
    return CompileResult._rebuild(target_context, *pickle.loads(content))


def compile_in_turn(function: Any) -> None:
    """Make a function compile into a library of `compiling.libraries`, and release its claims if this fails."""
    compile_form = function.compile
    codegen = function.targetctx.codegen()

    def compile_once(sig: Any) -> Any:
        with global_compiler_lock, rarely_collected():
            before = codegen._library_class
            codegen._library_class = CachedLibrary
            try:
                return compile_form(sig)
            finally:
                codegen._library_class = before
                function._cache.give_up(sig)

    function.compile = compile_once


def _records(kind: Any) -> Iterator[str]:
    """Yield the names of the records in a signature and of their fields, and digests of the steps registered for them."""
    record = getattr(kind, "instance_class", None)
    if record is not None:
        yield f"{record.__module__}.{record.__qualname__}"
        yield from getattr(record, "_fields", ())
        yield from (digest(path) for path in files_of(record))
    for part in kind if isinstance(kind, tuple) else getattr(kind, "types", ()):
        yield from _records(part)
