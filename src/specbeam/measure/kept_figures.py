"""What was measured on this machine, kept on disk under a name that covers everything the figures depend on."""

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def machine() -> list[Any]:
    """What the speed of arithmetic depends on."""
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
    """Names the shape and type of a model; not its weights, which cost the same whatever they are."""
    return None if model is None else [model.config.to_json_string(use_diff=False), str(model.dtype), str(model.device)]


def weights_key(model: "PreTrainedModel | None") -> str | None:
    """Tells models of one shape apart: a hash of a few numbers of every weight."""
    if model is None:
        return None
    few = [one.detach().flatten()[:: max(one.numel() // 16, 1)][:16].double().cpu() for one in model.parameters()]
    return hashlib.blake2b(torch.cat(few).numpy().tobytes(), digest_size=8).hexdigest()


def load(kind: str, key: Any) -> dict[str, Any] | None:
    """What was kept under the name; None if nothing was."""
    try:
        return json.loads(_place(kind, key).read_text())
    except (OSError, ValueError):  # nothing measured yet, or a file cut short: measure again
        return None


def keep(kind: str, key: Any, record: dict[str, Any]) -> None:
    place = _place(kind, key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(record))
    except OSError:  # a read-only home costs a measurement, not the answer
        return


def folder() -> Path:
    """Where it is kept."""
    root = os.environ.get("SPECBEAM_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specbeam"


def _place(kind: str, key: Any) -> Path:
    text = json.dumps([key, machine(), __version__])
    return folder() / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
