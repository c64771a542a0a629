"""Translation of exceptions of libraries that read files into errors of specbeam that name the file."""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbeam.core.errors import BadCheckpoint, MissingPackage, SpecbeamError

LARGEST_JSON = 64 * 2**20  # bytes of a file that describes a model
_LONGEST = 300  # characters quoted from a library's message
_BEGINNINGS = {  # first bytes of common wrong files, with advice
    b"version https://git-lfs": "it is a Git LFS pointer, not the file itself; fetch it with git lfs pull",
    b"<!doctype html": "it is a web page; download the file again",
    b"<html": "it is a web page; download the file again",
    b"gguf": "it is a GGUF file of llama.cpp under another name",
}


@contextmanager
def reading(what: str, error: type[SpecbeamError] = BadCheckpoint, advice: str = "") -> Iterator[None]:
    """Raise a file-reading library's exceptions as a specbeam error, with the original as its cause.

    Wrap library calls only: a bug in specbeam must not be reported as a broken file. specbeam's own errors pass
        through.

    Args:
        what: beginning of the message, such as "x cannot be read".
        error: the type of the error; if it is `BadCheckpoint`, a missing package raises `MissingPackage`.
        advice: end of the message.
    """
    try:
        yield
    except SpecbeamError:
        raise
    except Exception as raised:
        is_missing = isinstance(raised, ImportError) and error is BadCheckpoint
        kind: type[SpecbeamError] = MissingPackage if is_missing else error
        raise kind(f"{what}: {beginning(raised)}{advice}") from raised


@contextmanager
def reading_file(path: Path, error: type[SpecbeamError] = BadCheckpoint) -> Iterator[None]:
    """Raise a library's exceptions about one file as an error that names the file and its fault."""
    try:
        with reading(f"{path} cannot be read", error):
            yield
    except error as raised:
        if raised.__cause__ is not None and (why := _wrong_with(path, raised.__cause__)):
            raise error(f"{path} cannot be read: {why}") from raised.__cause__
        raise


def json_object(path: Path, error: type[SpecbeamError] = BadCheckpoint) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `error` if the file holds something else, or more than `LARGEST_JSON`."""
    with reading_file(path, error):
        size = path.stat().st_size
        content = path.read_text(encoding="utf-8") if size <= LARGEST_JSON else ""
    if size > LARGEST_JSON:
        raise error(f"{path} has {size:,} bytes; it must have at most {LARGEST_JSON:,}")
    with reading_file(path, error):
        found = json.loads(content)
    if not isinstance(found, dict):
        raise error(f"{path} holds {type(found).__name__}; it must be a JSON object")
    return found


def beginning(error: BaseException) -> str:
    """Return the type of an error and the start of its message; some messages list every model of transformers."""
    said = " ".join(str(error).split())
    short = said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def _wrong_with(path: Path, raised: BaseException) -> str:
    """Return the fault of a file that a library could not read; "" if it is not known."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        first = file.read(64)
    if not first:
        return "it is empty; download or save it again"
    for start, why in _BEGINNINGS.items():
        if first.lower().startswith(start):
            return why
    if isinstance(raised, pickle.UnpicklingError):
        return (
            "it is broken, or holds more than tensors, and specbeam runs no code from files; save the model with "
            "save_pretrained, which writes safetensors"
        )
    return ""
