"""Checks before a target is spread over devices or processes."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specbeam.core.errors import BadSetting, MissingPackage, NotSupported
from specbeam.engines.choices import OWN_ROUNDINGS, is_rounding
from specbeam.models.checkpoints.pretrained import open_checkpoint
from specbeam.models.heads.read import is_head
from specbeam.models.loading.models import name_or_path
from specbeam.models.loading.tokenizers import read_tokenizer
from specbeam.models.skipping import Skipping


def check_spread(
    target: Any, quantize: Any, compile: bool, device_map: Any, tensor_parallel: bool, kv: Any = None
) -> None:
    """Raise `BadSetting` if a target cannot be spread over devices or processes with these options."""
    name = "tensor_parallel" if tensor_parallel else "device_map"
    if device_map is not None and tensor_parallel:
        raise BadSetting("device_map and tensor_parallel both place the weights; give one of them")
    if isinstance(target, torch.nn.Module):
        raise BadSetting(f"{name} needs a model that is loaded from files, and the target is already an object")
    for option, is_given in {"compile": compile, "quantize": quantize is not None, "kv": kv is not None}.items():
        if is_given:
            raise BadSetting(f"{name} is for unchanged targets that transformers runs; leave {option} out")
    if find_spec("accelerate") is None:
        raise MissingPackage(f"{name} needs accelerate: pip install 'specbeam[parallel]'")


def check_before_spreading(target: Any, draft: Any, tokenizer: Any) -> Any:
    """Return the tokenizer, and raise errors of `load` before the processes load their weights.

    Afterwards, the other processes follow rank 0 and would wait for it.
    """
    name = name_or_path(target)
    if open_checkpoint(name).reads_sources:
        raise has_encoder(f"the model in {target}")
    if isinstance(draft, Skipping) or (isinstance(draft, str) and (draft == "swift" or draft in OWN_ROUNDINGS)):
        raise NotSupported(
            f"draft={draft!r} is the target run by specbeam's own forward, which cannot run sharded weights; give another "
            "draft model"
        )
    if isinstance(draft, (str, Path)) and not is_rounding(draft) and not is_head(draft):
        name_or_path(draft)
    return read_tokenizer(tokenizer if tokenizer is not None else target)


def has_encoder(what: str) -> NotSupported:
    return NotSupported(
        f"device_map and tensor_parallel need a decoder-only model, and {what} has an encoder; leave them out"
    )
