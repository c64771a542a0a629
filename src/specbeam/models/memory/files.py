"""Reading and writing of the folder of a trained memory: its plan, its weights, and the model it was trained with."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.errors import BadHead, BadSetting, MissingFile, warn
from specbeam.core.measure.saved_figures import weights_key
from specbeam.core.whole_files import write_whole
from specbeam.models.checkpoints.boundary import json_object
from specbeam.models.checkpoints.headers import read_tensors
from specbeam.models.checkpoints.numbers import fault_of
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.recall import Recall

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "hmt"
CONFIG = "memory.json"
WEIGHTS = "memory.safetensors"
BACKBONE = "backbone"  # folder of the model, if it was trained with its memory


def save_memory(folder: Path, recall: Recall, plan: MemoryPlan, model: "PreTrainedModel", name: str | None) -> None:
    """Write a memory, each file atomically.

    Args:
        model: the model of the memory.
        name: path or hub id of this model; None: it is in the folder itself, see `BACKBONE`.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "kind": KIND,
        "plan": asdict(plan),
        "size": recall.size,
        "width": recall.width,
        "model": name,
        "weights": weights_key(model),
    }
    tensors = {key: value.detach().float().cpu().contiguous() for key, value in recall.state_dict().items()}
    write_whole(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_whole(folder / CONFIG, (json.dumps(described, indent=2) + "\n").encode())


def holds_memory(source: Any) -> bool:
    """Return whether a path is the folder of a memory."""
    return isinstance(source, (str, Path)) and (Path(source).expanduser() / CONFIG).is_file()


def backbone_of(folder: "str | Path") -> str:
    """Return the path or hub id of the model that a memory was trained with. Raises `MissingFile` if it names none."""
    path = Path(folder).expanduser()
    name = _config(path).get("model")
    if name is None and (path / BACKBONE).is_dir():
        return str(path / BACKBONE)
    if not isinstance(name, str):
        raise MissingFile(
            f"{path} has no folder {BACKBONE} and does not name its model; give the model: hmt(pair, {str(path)!r})"
        )
    return name


def read_memory(folder: "str | Path") -> tuple[MemoryPlan, Recall, str | None]:
    """Return the plan of a memory, its weights, and the hash of the weights of its model (`weights_key`).

    Raises `MissingFile` if files are missing, `BadHead` if they cannot be read or do not fit each other.
    """
    path = Path(folder).expanduser()
    config = _config(path)
    if not (path / WEIGHTS).is_file():
        raise MissingFile(
            f"{path} has {CONFIG} but no {WEIGHTS}, the weights of the memory; train again, or copy the whole folder"
        )
    known = {field.name for field in fields(MemoryPlan)}
    given = config.get("plan")
    if not isinstance(given, dict) or set(given) - known or "segment" not in given:
        raise BadHead(
            f"{path / CONFIG}: plan is {given!r}; it must be an object with segment and any of {', '.join(sorted(known))}"
        )
    try:
        plan = MemoryPlan(**given)
    except BadSetting as error:
        raise BadHead(f"{path / CONFIG}: {error}") from error
    size = config.get("size")
    width = config.get("width")
    if not isinstance(size, int) or not isinstance(width, int) or size < 1 or width < 1:
        raise BadHead(f"{path / CONFIG}: size is {size!r} and width {width!r}; both must be numbers of at least 1")
    tensors = read_tensors(path / WEIGHTS, BadHead)
    expected = {"summary": [size], "first": [size], "queries.weight": [width, size], "keys.weight": [width, size]}
    found = {name: [*tensor.shape] for name, tensor in tensors.items()}
    if found != expected:
        raise BadHead(f"{path / WEIGHTS} holds {found}; by {CONFIG} it must hold {expected}")
    for name, tensor in tensors.items():
        if fault := fault_of(tensor):
            raise BadHead(f"{path / WEIGHTS}: {name} {fault}; it must hold finite floats: train or copy it again")
    recall = Recall(size, width)
    recall.load_state_dict(tensors)
    return plan, recall.requires_grad_(False), config.get("weights")


def warn_of_other_model(folder: "str | Path", key: str | None, model: "PreTrainedModel") -> None:
    """Warn if a memory was trained with a model of other weights; only models in float32 can be compared."""
    if key is not None and model.dtype == torch.float32 and key != weights_key(model):
        warn(
            f"{folder} was trained with other weights than this {type(model).__name__} has: texts have the law of this "
            "model with this memory, and recalled memories may be noise",
        )


def _config(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        names = sorted(one.name for one in path.iterdir()) if path.is_dir() else []
        held = ", ".join(names[:6]) or "nothing"
        raise MissingFile(f"{path} has no {CONFIG} (it holds {held}); give the folder that `specbeam train hmt` wrote")
    found = json_object(path / CONFIG, BadHead)
    if found.get("kind") != KIND:
        raise BadHead(f"{path / CONFIG} has kind {found.get('kind')!r}; this version reads {KIND!r}")
    return found
