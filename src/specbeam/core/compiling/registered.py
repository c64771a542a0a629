"""The files of the steps that kinds of records have registered for verbs: machine code of their callers depends on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

_FILES: dict[type, set[Path]] = {}  # by kind


def note_step(kind: type, source: Callable[..., Any]) -> None:
    """Note that a record of this type has a step whose source is this function."""
    _FILES.setdefault(kind, set()).add(Path(source.__code__.co_filename))


def files_of(kind: type) -> list[Path]:
    """Return the files of the steps of a kind, in the order of their names."""
    return sorted(_FILES.get(kind, ()))
