"""Machine code that comes with a wheel: usual forms of steps, for classes of processors.

`make wheel` compiles it (tools/ship_code.py). A form is taken if its sources and the versions of its compilers are unchanged
and the processor belongs to the class; otherwise it is compiled, as without a wheel.
"""

import platform
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
from numba.np.numpy_support import numpy_version

from specbeam.core.caches.files import digest_of
from specbeam.core.caches.folders import warn_once
from specbeam.core.compiling.processor import dot_of_bytes, features, lanes

FOLDER = Path(__file__).with_name("shipped_code")  # in wheels only; no folder may have the name of a module


class Processors(NamedTuple):
    """A class of processors that run the same machine code."""

    name: str  # LLVM's
    machines: tuple[str, ...]  # names of the architecture, as `platform.machine` returns them
    more: str  # NUMBA_CPU_FEATURES: features beyond those of the name
    needs: frozenset[str]  # all features that steps may use

    @property
    def label(self) -> str:
        """The name of the class, such as "x86-64-v4+avx512vnni"."""
        return self.name + self.more.replace(",", "")

    @property
    def archive(self) -> Path:
        """The file with the code for these processors."""
        return FOLDER / f"{self.label}.zip"

    def contains_this_one(self) -> bool:
        """Return whether this processor runs the code, and would be given the same steps."""
        here = features()
        is_equal = (lanes(here), dot_of_bytes(here)) == (lanes(self.needs), dot_of_bytes(self.needs))
        return platform.machine() in self.machines and self.needs <= here and is_equal


_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")
_V3 = frozenset({"avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
CLASSES = (
    Processors("x86-64-v4", _X86, "+avx512vnni", _V4 | {"avx512vnni"}),
    Processors("x86-64-v3", _X86, "", _V3),
    Processors("generic", _ARM, "+dotprod,+i8mm", frozenset({"dotprod", "i8mm"})),
    Processors("generic", _ARM, "+dotprod", frozenset({"dotprod"})),
    Processors("generic", _ARM, "", frozenset()),
)


def compilers() -> tuple[Any, ...]:
    """Return the versions that shipped code requires: the compilers, NumPy's (which fixes types) and Python's (bytecode)."""
    python = (platform.python_implementation(), *platform.python_version_tuple()[:2])
    return (numba.__version__, llvmlite.__version__, numpy_version, *python)


@cache
def class_here() -> Processors | None:
    """Return the class of this processor for which code was shipped; None if there is none."""
    found = (one for one in CLASSES if one.archive.exists() and one.contains_this_one())
    return next(found, None)


@cache
def _archive() -> zipfile.ZipFile | None:
    """Return the opened archive of this processor's class; None if there is none, or if it cannot be read."""
    processors = class_here()
    if processors is None:
        return None
    try:
        return zipfile.ZipFile(processors.archive)
    except (OSError, zipfile.BadZipFile) as error:
        warn_once(
            "shipped",
            f"{processors.archive} cannot be read ({error}), so its code is compiled again; install specbeam anew",
        )
        return None


def magic(codegen: Any, processors: Processors) -> tuple[Any, ...]:
    """Return what numba's code generator calls its magic tuple, for another class of processors."""
    (triple, *_) = codegen.magic_tuple()
    return (triple, processors.name, processors.more)


def shipped(place_of: Callable[[Processors], tuple[str, str]]) -> bytes | None:
    """Return the shipped content of a form; None if there is none, or if it is damaged.

    Args:
        place_of: returns the name of a form's file, and its key, for a class of processors.
    """
    archive = _archive()
    processors = class_here()
    if archive is None or processors is None:
        return None
    (name, key) = place_of(processors)
    try:
        found = archive.read(name)
    except (KeyError, OSError, zipfile.BadZipFile):
        return None
    (seal, _, content) = found.partition(b"\n")
    return content if seal == digest_of(key, content) else None
