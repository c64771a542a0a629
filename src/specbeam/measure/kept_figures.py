"""Figures measured on this machine, kept on disk under a key that covers everything that they depend on."""

import hashlib
import json
import os
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specbeam import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def machine() -> list[Any]:
    """Return what the speed of this machine depends on: processor, threads, version of torch, and GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    vectors = torch.backends.cpu.get_cpu_capability()
    return [
        platform.machine(),
        platform.processor(),
        vectors,
        os.cpu_count(),
        torch.get_num_threads(),
        torch.__version__,
        gpu,
    ]


def model_key(model: "PreTrainedModel | None") -> list[str] | None:
    """Return a key of a model's configuration, the shapes of its weights, their dtype and its device; None for no model.

    Where the model was loaded from is left out, as another one may stand there by now. So are the values of its weights,
    because a pass costs the same whatever they are.
    """
    if model is None:
        return None
    config = _without_names(model.config.to_dict())
    shapes = [(name, [*weight.shape], str(weight.dtype)) for name, weight in model.named_parameters()]
    header = hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).hexdigest()
    return [json.dumps(config, default=str), header, str(model.dtype), str(model.device)]


def _without_names(config: dict[Any, Any]) -> dict[Any, Any]:
    """Return a configuration, those inside of it included, without the places that models were loaded from."""
    return {
        name: _without_names(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name != "_name_or_path"
    }


def weights_key(model: "torch.nn.Module | None") -> str | None:
    """Return a hash of 16 numbers of every weight, which tells models of one shape apart; None for no model."""
    if model is None:
        return None
    samples = []
    for weight in model.parameters():
        stride = max(weight.numel() // 16, 1)
        # Tensors of a library that rounds weights hold several plain ones, and cannot be flattened.
        if hasattr(weight, "to_local"):  # spread over several processes, of which each has a part
            numbers = weight.to_local()
        else:
            numbers = weight.dequantize() if is_traceable_wrapper_subclass(weight) else weight
        samples.append(numbers.detach().flatten()[::stride][:16].double().cpu())
    return hashlib.blake2b(torch.cat(samples).numpy().tobytes(), digest_size=8).hexdigest()


@cache
def source_key(*rooms: str) -> str:
    """Return a hash of the source of these rooms of specbeam, such as "engines": what they cost changes with it."""
    package = Path(__file__).parent.parent
    digest = hashlib.blake2b(digest_size=8)
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def load(kind: str, key: Any) -> dict[str, Any] | None:
    """Return the record that was kept under this kind and key; None if there is none."""
    try:
        record = json.loads(_place(kind, key).read_text())
    except (OSError, ValueError):  # nothing is kept yet, or the file was cut short: the caller measures again
        return None
    return record if isinstance(record, dict) else None


def keep(kind: str, key: Any, record: dict[str, Any]) -> None:
    """Keep a record on disk under a kind and a key of JSON values. Does nothing if the disk cannot be written.

    The key is completed by the machine and the version of specbeam.
    """
    place = _place(kind, key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(record))
    except OSError:  # with a read-only home, figures are measured again in every process
        return


def folder() -> Path:
    """Return the folder of kept figures, below SPECBEAM_CACHE, XDG_CACHE_HOME or ~/.cache, whichever is set first."""
    root = os.environ.get("SPECBEAM_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specbeam"


def _place(kind: str, key: Any) -> Path:
    text = json.dumps([key, machine(), __version__])
    return folder() / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
