"""Adapters (LoRA and others) in files: merged into the weights of their base model, with peft.

A merged model is a plain one: every engine and method takes it, and its law is that of the base model with the adapter.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from specbeam.core.errors import BadCheckpoint, MissingFile, MissingPackage, NotSupported
from specbeam.models.checkpoints.boundary import json_object, reading
from specbeam.models.checkpoints.folders import ADAPTER, adapter_kind
from specbeam.models.checkpoints.headers import file_of, tensors_in
from specbeam.models.checkpoints.hub import hub_lookups
from specbeam.models.checkpoints.numbers import check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_ADDS_ROWS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT")
_BY_TEXT = ("XLORA", "POLY")
_MERGED = "_specbeam_merged"


class Adapter(NamedTuple):
    """An adapter in files.

    Attributes:
        name: its folder or hub id.
        kind: such as "LoRA".
        base: folder or hub id of the base model.
        file: its weights.
    """

    name: str
    kind: str
    base: str
    file: Path


def adapter_at(source: Any) -> Adapter | None:
    """Return the adapter in a folder or hub repository; None if it holds something else.

    Raises an error if an adapter cannot be merged, or if its files are incomplete.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        name = str(folder)
    elif (
        folder.exists()
        or not str(source).strip()
        or isinstance(source, Path)
        or str(source).startswith((".", "~", "/"))
    ):
        return None
    else:
        name = str(source)
    path = file_of(name, ADAPTER)
    if path is None:
        return None
    described = json_object(path)
    kind = adapter_kind(described)
    method = str(described.get("peft_type") or "LORA")
    if method in _ADDS_ROWS:
        raise NotSupported(
            f"{name} holds a {kind} adapter, which adds learned rows to prompts and cannot be merged into weights"
        )
    if method in _BY_TEXT or described.get("alora_invocation_tokens"):
        raise NotSupported(f"{name} holds a {kind} adapter whose weights depend on the text, and cannot be merged")
    base = described.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise BadCheckpoint(
            f"{path} has base_model_name_or_path {base!r}; it must name the model that the adapter changes"
        )
    file = next((found for one in _FILES if (found := file_of(name, one)) is not None), None)
    if file is None:
        raise MissingFile(f"{name} holds {ADAPTER} and no weights of the adapter: {' or '.join(_FILES)}")
    for package in ("peft", "accelerate"):
        if find_spec(package) is None:
            raise MissingPackage(
                f"{name} holds a {kind} adapter, and merging it needs {package}: pip install 'specbeam[adapters]'"
            )
    return Adapter(name, kind, base, file)


def merged(adapter: Adapter, base: "PreTrainedModel") -> "PreTrainedModel":
    """Return the base model with an adapter merged into its weights, in place.

    Raises `BadCheckpoint` if the tensors of the adapter are not those that the base model takes.
    """
    from peft import PeftModel, get_peft_model_state_dict

    what = f"the {adapter.kind} adapter {adapter.name} does not fit {adapter.base}"
    with reading(what), hub_lookups(adapter.name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors that peft does not find are compared below
        joined: Any = PeftModel.from_pretrained(base, adapter.name)
        wanted = get_peft_model_state_dict(joined)
    stored = tensors_in([adapter.file])
    for names, does in ((stored.keys() - wanted.keys(), "holds"), (wanted.keys() - stored.keys(), "lacks")):
        if names:
            first = ", ".join(sorted(names)[:3])
            raise BadCheckpoint(f"{what}: its file {does} {first}{' and more' if len(names) > 3 else ''}")
    with reading(f"{what}: it cannot be merged"):
        model: PreTrainedModel = joined.merge_and_unload()
    check_weights(adapter.name, model)
    object.__setattr__(model, _MERGED, True)
    return model.eval()


def is_merged(model: nn.Module) -> bool:
    """Return whether `load` merged an adapter into a model, whose only owner is then the engine."""
    return bool(vars(model).get(_MERGED, False))
