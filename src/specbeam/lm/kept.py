"""Which models of a CPU keep the words of their files: large ones that the compiled forward runs.

Smaller ones become float32 as they are loaded, and the compiled forward's copy of their weights is a second one. A large one
stays as its files are, which are mapped to memory, and the compiled forward's copy is the only one that stays there.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specbeam import kernels
from specbeam.engines.cpu.decoder import misfit_of_shape
from specbeam.engines.torch import lean

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_ONE_FILE = "model.safetensors"
_SEVERAL = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """What a safetensors file says of one of its tensors."""

    path: Path
    type: str  # "F32", "BF16", "I32", ...
    shape: tuple[int, ...]


def kept_type(name: str, config: Any, kind: Any) -> torch.dtype | None:
    """Return the type that the weights of a model keep; None if they become float32.

    They keep the type of their files, if that is one for all of them, if they are more than `lean.LARGEST`, and if the
    compiled forward runs the model. Those of a model that reads sources keep float32 alone, in which
    transformers runs an encoder that is left to it.

    Args:
        name: a folder or hub id.
        config: the model's configuration.
        kind: the class of transformers that loads such models.
    """
    if not kernels.AVAILABLE:
        return None
    try:
        tensors = tensors_in(files_of(name)).values()
    except OSError:
        return None
    types = {one.type for one in tensors}
    numbers = sum(math.prod(one.shape) for one in tensors)
    if len(types) != 1 or numbers <= lean.LARGEST or not types <= TYPES.keys():
        return None
    kept = TYPES[types.pop()]
    if getattr(config, "is_encoder_decoder", False) and kept != torch.float32:
        return None
    with torch.device("meta"):
        model = kind.from_config(config, dtype=kept)
    return None if misfit_of_shape(model, None) else kept


def files_of(name: str) -> list[Path]:
    """Return the safetensors files of a model; none if its weights are in other files."""
    whole = _file(name, _ONE_FILE)
    if whole is not None:
        return [whole]
    index = _file(name, _SEVERAL)
    if index is None:
        return []
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = [_file(name, one) for one in names]
    return [one for one in found if one is not None]


def _file(name: str, file: str) -> Path | None:
    """Return a file of a folder or hub id; None if it has no such file."""
    folder = Path(name)
    if folder.is_dir():
        path = folder / file
        return path if path.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def tensors_in(files: list[Path]) -> dict[str, StoredTensor]:
    """Return what safetensors files hold, by the names of the tensors."""
    found = {}
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            found[name] = StoredTensor(path, entry["dtype"], tuple(entry["shape"]))
    return found
