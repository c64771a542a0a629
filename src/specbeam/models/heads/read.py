"""Draft heads as draft models: the kind of head in files, its reader, and its draft model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from specbeam.core.errors import BadHead, NotSupported, SpecbeamError
from specbeam.core.lm import LM
from specbeam.engines.eligibility import check_takes_heads
from specbeam.engines.mapped import is_mapped
from specbeam.models.checkpoints.folders import gguf_in
from specbeam.models.checkpoints.hub import hub_lookups
from specbeam.models.engines import COMPILED
from specbeam.models.heads.block import BlockHead
from specbeam.models.heads.blocks import is_block, read_block
from specbeam.models.heads.chimera import Chimera
from specbeam.models.heads.denoiser import Denoiser
from specbeam.models.heads.eagle import is_eagle, is_eagle3, is_peagle, read_eagle, read_eagle3, read_peagle
from specbeam.models.heads.exit import ExitHead, exit_model
from specbeam.models.heads.extra_rows import ExtraHead
from specbeam.models.heads.extra_rows_lm import ExtraLM
from specbeam.models.heads.feature import FeatureHead
from specbeam.models.heads.files import HeadFiles, folder_of, names_in, read_config, read_files
from specbeam.models.heads.head import Head
from specbeam.models.heads.lm import (
    BlockLM,
    ChimeraLM,
    DenoiserLM,
    FeatureLM,
    HeadLM,
    MaskLM,
    ModulesLM,
    TrunkLM,
)
from specbeam.models.heads.masked import MaskTrunk
from specbeam.models.heads.modules import ModulesInARow
from specbeam.models.heads.mtp import is_own_modules, read_own_modules, read_speculators_module
from specbeam.models.heads.on_feature import kind_on_feature, read_on_feature
from specbeam.models.heads.own import FIELD, read_own
from specbeam.models.heads.trunk import PairTrunk
from specbeam.models.huggingface import HuggingFaceLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_FIELDS = (FIELD, "speculators_model_type", "eagle_config", "dflash_config")


def is_head(source: object) -> bool:
    """Return whether a folder, hub id or module is a draft head instead of a language model; "mtp" is one."""
    if is_own_modules(source):
        return True
    if isinstance(source, nn.Module):
        config = getattr(source, "config", None)
        return hasattr(config, "speculators_model_type") or not hasattr(source, "get_output_embeddings")
    folder = Path(str(source)).expanduser()
    if gguf_in(folder) is not None:
        return False
    if folder.is_file():  # loading it as a model raises the reason
        return False
    if not folder.is_dir():
        return _is_head_of_hub(str(source))
    if not (folder / "config.json").is_file():
        return False
    config = read_config(folder)
    if _is_of_head(config):
        return True
    names = names_in(folder)
    return is_peagle(config, names) or is_eagle3(config, names) or is_eagle(names)


def _is_of_head(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration alone identifies a head."""
    return any(field in config for field in HEAD_FIELDS) or is_block(config) or kind_on_feature(config) is not None


def _is_head_of_hub(name: str) -> bool:
    """Return whether a repository of the hub holds a head; False if it cannot be reached, or holds something else.

    Heads without a specific field are recognised by their tensors, which are fetched if there is only one layer.
    """
    from huggingface_hub import hf_hub_download

    try:
        with hub_lookups(name):
            config = read_config(Path(hf_hub_download(name, "config.json")).parent)
    except (OSError, ValueError):
        return False  # loading it as a model raises the reason
    if _is_of_head(config):
        return True
    return config.get("num_hidden_layers") == 1 and is_head(folder_of(name))


def read_head(source: "str | Path | nn.Module", target: "PreTrainedModel") -> Head:
    """Return the head in a folder, on the hub, or in a module.

    Args:
        source: a folder, a hub id, a module, or "mtp" for the modules of multi-token prediction in the target's own files.
        target: the model that it was trained for.

    Raises `MissingFile` or `BadHead`; `NotSupported` for targets that take no heads.
    """
    check_takes_heads(target)
    where = str(source)
    try:
        if is_own_modules(source):
            return read_own_modules(target)
        files = read_files(source, target)
        where = files.where
        return _read(files)
    except SpecbeamError:
        raise
    except Exception as error:  # fields are checked as they are read; tensors may be broken in any way
        raise BadHead(f"{where} cannot be read: {type(error).__name__}: {error}; are its tensors broken?") from error


def _read(files: HeadFiles) -> Head:
    files.fields.texts("architectures")  # these fields identify heads
    files.fields.text("speculators_model_type")
    files.fields.text("model_type")
    if FIELD in files.config:
        return read_own(files)
    if files.config.get("speculators_model_type") == "mtp":
        return read_speculators_module(files)
    if is_block(files.config):
        return read_block(files)
    if kind_on_feature(files.config):
        return read_on_feature(files)
    if is_peagle(files.config, files.tensors):
        return read_peagle(files)
    if is_eagle3(files.config, files.tensors):
        return read_eagle3(files)
    if is_eagle(files.tensors):
        return read_eagle(files)
    kind = files.config.get("speculators_model_type") or files.config.get("model_type")
    raise BadHead(
        f"{files.where} is a head of kind {kind!r}, which cannot be read; readable kinds are "
        "EAGLE-1, 2, 3, HASS, P-EAGLE, MTP, DFlash, DSpark, Medusa, Hydra, MLP speculator and ReDrafter, and "
        "heads trained by specbeam"
    )


def head_model(head: Head, target: HuggingFaceLM) -> LM:
    """Return a head as a draft model for a target."""
    if isinstance(head, ExitHead):
        return exit_model(head, target)
    kinds: dict[type[Head], type[HeadLM]] = {
        MaskTrunk: MaskLM,  # before its base, the pair trunk
        PairTrunk: TrunkLM,
        ModulesInARow: ModulesLM,
        Chimera: ChimeraLM,
        Denoiser: DenoiserLM,  # before its base, the block head
        BlockHead: BlockLM,
        FeatureHead: FeatureLM,
        ExtraHead: ExtraLM,
    }
    is_widened = is_mapped(target.model) and target.engine in COMPILED  # runs the head in float32
    for kind, model in kinds.items():
        if isinstance(head, kind):
            return model(head, target.vocab, engine="widened" if is_widened else "auto")
    raise NotSupported(f"there is no draft model for heads of type {type(head).__name__}")
