"""The source files of steps that are registered for verbs by record type; machine code of callers depends on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

_FILES: dict[type, set[Path]] = {}  # by record type
_MODULES: set[str] = set()


def note_step(kind: type, source: Callable[..., Any]) -> None:
    """Record that this type has a step with this source function."""
    _FILES.setdefault(kind, set()).add(Path(source.__code__.co_filename))
    _MODULES.add(source.__module__)


def files_of(kind: type) -> list[Path]:
    """Return the files of the steps of a record type, sorted."""
    return sorted(_FILES.get(kind, ()))


def modules_of_package(package: str) -> list[str]:
    """Return the imported modules of a package that register steps, sorted."""
    return sorted(one for one in _MODULES if one.startswith(f"{package}."))
