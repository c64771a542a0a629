"""The weight files of a model, and the names, types and shapes of their tensors, read without the numbers."""

import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbeam.core.errors import BadCheckpoint, MissingFile, SpecbeamError
from specbeam.models.checkpoints.boundary import json_object, reading, reading_file
from specbeam.models.checkpoints.hub import hub_lookups

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
FLOATS = (*TYPES, "F64")
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class StoredTensor(NamedTuple):
    """A tensor described by the header of its file."""

    path: Path
    type: str  # safetensors' name: "F32", "BF16", "I32", ...
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def file_of(name: str, file: str) -> Path | None:
    """Return the path of a file in a folder or hub repository; None if it has no such file.

    Raises `MissingFile` if there is neither a folder nor a repository of this name.
    """
    folder = Path(name)
    if folder.is_dir():
        path = folder / file
        return path if path.is_file() else None
    from transformers.utils import cached_file

    advice = "; give a folder that save_pretrained wrote, or the id of a model on the hub"
    what = f"there is no folder {name}, and no model of this name can be downloaded from the hub"
    with reading(what, MissingFile, advice), hub_lookups(name):
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def weight_files(name: str, named: str | None = None) -> list[Path]:
    """Return the weight files of a model, preferred like in transformers; an empty list if it has none.

    Args:
        name: a folder or hub id.
        named: the file, or index of files, that the model's configuration names.

    Raises `BadCheckpoint` if an index is broken or names files outside the folder, `MissingFile` if a file is missing.
    """
    for file in (ONE_FILE, INDEX, *_PICKLED) if named is None else (named,):
        check_is_inside(file, name)
        path = file_of(name, file)
        if path is not None:
            return shards_of(name, path) if file.endswith(".index.json") else [path]
    return []


def shards_of(name: str, index: Path) -> list[Path]:
    """Return the files that an index names. Raises the errors of `weight_files`."""
    names = sorted({*weight_map(index).values()})
    if not Path(name).is_dir():
        from transformers.utils.hub import cached_files

        # One call downloads several files in parallel.
        with reading(f"the files that {index} names cannot be downloaded from the hub", MissingFile), hub_lookups(name):
            cached_files(name, names)
    found = []
    for shard in names:
        path = file_of(name, shard)
        if path is None:
            raise MissingFile(f"{name} holds no {shard}, which {index.name} names; copy or download the whole folder")
        found.append(path)
    return found


def weight_map(index: Path, error: type[SpecbeamError] = BadCheckpoint) -> dict[str, str]:
    """Return the file name of each tensor in an index.

    Raises `error` if the index is broken or names files outside the folder.
    """
    held = json_object(index, error)
    with reading_file(index, error):
        found = held["weight_map"]
    if not isinstance(found, dict) or not found:
        raise error(
            f"{index} cannot be read: weight_map is {type(found).__name__}; it must name the file of each tensor"
        )
    for tensor, file in found.items():
        if not isinstance(file, str):
            raise error(f"{index} cannot be read: the file of {tensor} is {file!r}; it must be a name")
        check_is_inside(file, str(index), error)
    return found


def check_is_inside(file: str, where: str, error: type[SpecbeamError] = BadCheckpoint) -> None:
    """Raise `error` if a file name points outside its folder. The file may be a symbolic link, as in the hub's cache."""
    parts = {*PurePosixPath(file).parts, *PureWindowsPath(file).parts}
    is_absolute = PurePosixPath(file).is_absolute() or PureWindowsPath(file).is_absolute()
    if not file or is_absolute or ".." in parts or "\0" in file:
        raise error(f"{where} names the file {file!r}; it must be inside the folder")


def tensors_in(files: Iterable[Path], error: type[SpecbeamError] = BadCheckpoint) -> dict[str, StoredTensor]:
    """Return the tensors in files, by name. Raises `error` if a file is broken, or if two files hold the same name."""
    found: dict[str, StoredTensor] = {}
    for path in files:
        stored = _header(path, error)
        if twice := sorted(found.keys() & stored.keys()):
            raise error(f"{path.name} and {found[twice[0]].path.name} in {path.parent} both hold {twice[0]}")
        found |= stored
    return found


def read_tensors(path: Path, error: type[SpecbeamError] = BadCheckpoint) -> dict[str, Tensor]:
    """Return the tensors of a file, with their numbers. Raises `error` if it is broken or holds something else."""
    if path.suffix != ".safetensors":
        return _tensors_of(path, _unpickled(path, "cpu", error), error)
    from safetensors.torch import load_file

    with reading_file(path, error):
        return load_file(path)


def _header(path: Path, error: type[SpecbeamError]) -> dict[str, StoredTensor]:
    """Return the descriptions of the tensors in one file."""
    if path.suffix != ".safetensors":
        tensors = _tensors_of(path, _unpickled(path, "meta", error), error)
        return {name: StoredTensor(path, _type_name(one.dtype), tuple(one.shape)) for name, one in tensors.items()}
    from safetensors import safe_open

    found = {}
    with reading_file(path, error), safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, this is no dictionary
            part = file.get_slice(name)
            found[name] = StoredTensor(path, str(part.get_dtype()), tuple(part.get_shape()))
    _check_names(path, error)
    return found


def _check_names(path: Path, error: type[SpecbeamError]) -> None:
    """Raise `error` if the valid header of a safetensors file holds a name twice; the library would take the last one."""
    with reading_file(path, error), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        pairs: list[tuple[str, Any]] = json.loads(file.read(size), object_pairs_hook=list)
    counts = Counter(name for name, _ in pairs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise error(f"{path} cannot be read: its header holds {twice[0]} twice")


def _unpickled(path: Path, device: str, error: type[SpecbeamError]) -> Any:
    """Return the content of a file in torch's format without running its code."""
    with reading_file(path, error):
        mmap = device == "meta" and zipfile.is_zipfile(path)
        return torch.load(path, map_location=device, weights_only=True, mmap=mmap)


def _tensors_of(path: Path, found: Any, error: type[SpecbeamError]) -> dict[str, Tensor]:
    """Return the content of a file in torch's format. Raises `error` unless it is a dictionary of tensors by name."""
    said = f"{path} cannot be read: it does not hold tensors by name"
    if not isinstance(found, dict):
        raise error(f"{said}, but {type(found).__name__}")
    for name, one in found.items():
        if not isinstance(name, str) or not isinstance(one, Tensor):
            raise error(f"{said}: {name!r} is {type(one).__name__}; save the model itself, not the training state")
    return dict(found)


def _type_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a float type, or torch's name of another type."""
    names = {kind: name for name, kind in TYPES.items()} | {torch.float64: "F64"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
