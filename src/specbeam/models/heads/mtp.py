"""Readers of modules of multi-token prediction, from a target's own checkpoint or from speculators' "mtp" folders.

transformers drops the modules when it loads a target, so they are read from the target's files. Writers use different names
and a different order of the projected parts; the layer inside is always of the target's kind (DeepSeek-V3, arXiv 2412.19437;
Qwen3-Next; MiMo, arXiv 2505.07608; FastMTP, arXiv 2509.18362).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specbeam.core.errors import BadHead, MissingFile
from specbeam.core.records import FINAL
from specbeam.models.checkpoints.boundary import reading, reading_file
from specbeam.models.checkpoints.headers import INDEX, tensors_in, weight_map
from specbeam.models.checkpoints.numbers import fault_of
from specbeam.models.heads.borrowed import Borrowed
from specbeam.models.heads.files import HeadFiles, folder_of, read_config
from specbeam.models.heads.head import Head
from specbeam.models.heads.modules import ModulesInARow
from specbeam.models.heads.reading import MOST_ROWS, embedding_of, filled, own_head
from specbeam.models.heads.trunk import BorrowedParts, PairTrunk, TrunkShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN = "mtp"  # the name of the draft of the target's own modules
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # fields for the number of modules
_INSTEAD = f'leave draft="{OWN}" out, or give the folder of a draft: "./{OWN}" if that is its name'
# Tensor names of writers, and the names here.
DEEPSEEK = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
MIMO = {
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "input_proj.weight": "fc.weight",
    "final_layernorm.weight": "norm.weight",
}
QWEN = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "fc.weight",
    "norm.weight": "norm.weight",
    "embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Naming:
    """How a writer stores modules.

    Attributes:
        pattern: a regular expression for tensor names; it matches the number of the module, if the name has one, and
            the rest.
        names: the writer's names of the tensors outside the layer, with their names here.
        swaps: whether the feature comes before the embedding in the projection.
    """

    pattern: str
    names: Mapping[str, str] = field(repr=False)
    swaps: bool = False


NAMINGS = {
    "model.layers.{number of layers}.*": Naming(r"(?:model\.|language_model\.)*layers\.(\d+)\.(.+)", DEEPSEEK),
    "mtp.*": Naming(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?(.+)", QWEN),
    "model.mtp_layers.*": Naming(r"model\.mtp_layers\.(\d+)\.(.+)", MIMO, swaps=True),
}
SPECULATORS = Naming(r"mtp_layers\.(\d+)\.(.+)", MIMO)


@dataclass
class ModuleTensors:
    """The names of the tensors of one module in its files, by their names here."""

    around: dict[str, str] = field(default_factory=dict)
    layer: dict[str, str] = field(default_factory=dict)


def is_own_modules(source: object) -> bool:
    """Return whether a draft means the target's own modules; a folder of this name is "./mtp"."""
    return isinstance(source, str) and source == OWN


def read_own_modules(target: "PreTrainedModel") -> Head:
    """Return the modules of multi-token prediction that a target's own files hold.

    Raises:
        MissingFile: the target has no files.
        BadHead: they hold no modules, or unsupported ones.
    """
    files, naming, modules = _own_files(target)
    borrowed = Borrowed(target, files.where)
    read = [_module(files, number, stored, naming, borrowed) for number, stored in enumerate(modules)]
    return read[0] if len(read) == 1 else ModulesInARow(read)


def read_speculators_module(files: HeadFiles) -> Head:
    """Return the module of a folder in speculators' "mtp" format. Raises `BadHead` if it cannot be read.

    It was trained with separate rows for each depth, so it is used once for each draft that its configuration states.
    """
    from transformers import AutoConfig

    core = files.fields.required("transformer_layer_config")
    theirs = files.target.config.get_text_config().model_type
    if core.text("model_type") != theirs:
        raise core.bad("model_type", f"the target's, {theirs!r}: is it for another target?")
    if core.whole("hidden_size") != files.width:
        raise core.bad("hidden_size", f"the width of the target, {files.width}")
    if files.fields.whole("num_nextn_predict_layers", 1) != 1:
        raise files.fields.bad("num_nextn_predict_layers", "1: folders with more modules cannot be read")
    modules = modules_of(files.tensors, SPECULATORS)
    if len(modules) != 1:
        raise BadHead(f"{files.where} has {len(modules)} modules mtp_layers.*, and one was expected")
    with reading(f"{files.where}: transformer_layer_config describes no layer", BadHead):
        config = AutoConfig.for_model(**core.values)
    module = _module(files, 0, modules[0], SPECULATORS, Borrowed(files.target, files.where, config))
    files.tensors = {name: tensor for name, tensor in files.tensors.items() if name not in files.taken}
    files.check_all_taken()
    proposal = files.fields.inner("speculators_config").first_of("proposal_methods")
    drafts = proposal.whole("speculative_tokens", 1, most=MOST_ROWS)
    return module if drafts == 1 else ModulesInARow([module] * drafts)


def modules_of(names: Iterable[str], naming: Naming, first: int = 0) -> list[ModuleTensors]:
    """Return the tensors of each module by a writer's naming; a module missing in between has none.

    Args:
        first: the number of the first module.
    """
    found: dict[int, ModuleTensors] = {}
    shared: dict[str, str] = {}
    for name in names:
        match = re.fullmatch(naming.pattern, name)
        if match is None or (match[1] is not None and int(match[1]) < first):
            continue
        number, part = match.groups()
        if number is None:
            shared[naming.names.get(part, part)] = name
            continue
        stored = found.setdefault(int(number) - first, ModuleTensors())
        if part in naming.names:
            stored.around[naming.names[part]] = name
        else:
            stored.layer[part] = name
    for stored in found.values():
        stored.around.update(shared)
    return [found.get(number, ModuleTensors()) for number in range(1 + max(found, default=-1))]


def _module(files: HeadFiles, number: int, stored: ModuleTensors, naming: Naming, borrowed: Borrowed) -> PairTrunk:
    """Return a module from its tensors."""
    width = files.width
    like = files.target.get_input_embeddings().weight
    own = _around(files, number, stored, naming)
    layer = borrowed.layer({part: _tensor(files, name) for part, name in stored.layer.items()}, like)
    norms = [borrowed.norm(own.take(name), like) for name in ("enorm.weight", "hnorm.weight", "norm.weight")]
    shape = TrunkShape(
        sizes=borrowed.sizes,
        layers=1,
        taps=(FINAL,),
        target_width=width,
        pairs="normed projection",
        draft_vocab=files.vocab,
        swaps=naming.swaps,
        feeds_normed=True,
    )
    embedding = embedding_of(own, width)
    matrix = _matrix_of(own, shape, embedding)
    trunk = PairTrunk(shape, borrowed.rotary, embedding, matrix, None, BorrowedParts(layer, *norms))
    return filled(trunk, own, ("enorm.", "hnorm.", "norm.", "layers."))


def _around(files: HeadFiles, number: int, stored: ModuleTensors, naming: Naming) -> HeadFiles:
    """Return the tensors outside a module's layer by their names here. Raises `BadHead` if one is missing or unknown."""
    theirs = {ours: name for name, ours in naming.names.items()}
    own = HeadFiles(files.where, {}, {}, files.target)
    vector: tuple[int, ...] = (files.width,)
    shapes = {"enorm.weight": vector, "hnorm.weight": vector, "norm.weight": vector}
    shapes["fc.weight"] = (files.width, 2 * files.width)
    for ours, shape in shapes.items():
        if ours not in stored.around:
            raise BadHead(f"{files.where}: module {number} has no tensor {theirs[ours]}")
        own.tensors[ours] = _tensor(files, stored.around[ours], *shape)
    for ours in ("embed_tokens.weight", "lm_head.weight"):
        if ours in stored.around:
            own.tensors[ours] = _tensor(files, stored.around[ours])
    if strange := sorted(set(stored.around) - set(own.tensors)):
        raise BadHead(f"{files.where} holds tensors that are not known: {stored.around[strange[0]]}")
    return own


def _tensor(files: HeadFiles, name: str, *shape: int) -> Tensor:
    """Return a tensor of the files, which modules may share. Raises `BadHead` if it is unusable or has another shape."""
    found = files.tensors[name]
    if fault := fault_of(found):
        raise BadHead(
            f"{files.where}: {name} {fault}; modules of rounded or non-finite weights cannot be read: convert them to "
            "bfloat16, or download them again"
        )
    if shape and tuple(found.shape) != shape:
        raise BadHead(f"{files.where}: {name} is {[*found.shape]}, and {[*shape]} was expected")
    files.taken.add(name)
    return found


def _matrix_of(own: HeadFiles, shape: TrunkShape, embedding: Any) -> Any:
    """Return the output matrix: the target's, unless the files have a different one."""
    theirs = own.target.get_output_embeddings().weight
    if own.has("lm_head.weight"):
        stored = own.tensors["lm_head.weight"]
        if stored.shape == theirs.shape and torch.equal(stored.to(theirs), theirs):
            own.take("lm_head.weight")
    return own_head(own, shape.draft_vocab, shape.sizes.width, embedding)


def _own_files(target: "PreTrainedModel") -> tuple[HeadFiles, Naming, list[ModuleTensors]]:
    """Return the files with a target's modules, their naming, and the tensor names of each module."""
    folder, stored = _stored_names(target)
    config = read_config(folder)
    where = str(getattr(target, "name_or_path", folder))
    layers = int(target.config.get_text_config().num_hidden_layers)
    stated = _stated_modules(config)
    for naming in NAMINGS.values():
        first = layers if naming.names is DEEPSEEK else 0
        modules = modules_of(stored, naming, first)
        if not modules:
            continue
        if stated is not None and stated[1] > len(modules):
            raise BadHead(
                f"{where}: {stated[0]} is {stated[1]} in config.json, and its files hold {len(modules)} modules"
            )
        wanted = {name for one in modules for name in (*one.around.values(), *one.layer.values())}
        tensors = _read(target, {name: stored[name] for name in wanted})
        return HeadFiles(where, config, tensors, target), naming, modules
    known = ", ".join(NAMINGS).replace("{number of layers}", str(layers))
    message = f"{where} holds no modules of multi-token prediction: none of its tensors is {known}"
    if stated is not None:
        message += f", though config.json states {stated[0]} {stated[1]}: were they lost in a conversion?"
    if strange := sorted(name for name in stored if "mtp" in name):
        message += f"; the name {strange[0]} is unknown"
    raise BadHead(f"{message}; {_INSTEAD}")


def _stated_modules(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the field with the number of modules, and the number; None if no field states a positive number."""
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, Mapping) else [config]
    for place in places:
        for name in COUNTS:
            count = place.get(name)
            if isinstance(count, int) and count > 0:
                return name, count
    return None


def _stored_names(target: "PreTrainedModel") -> tuple[Path, dict[str, str]]:
    """Return the folder of a target's files, and the file of each tensor."""
    name = str(getattr(target, "name_or_path", "") or "")
    if not name:
        raise MissingFile(
            f'draft="{OWN}" reads the modules of multi-token prediction from the files of the target, and this model object '
            f"names none: load the target by its folder or hub id; or {_INSTEAD}"
        )
    folder = _folder(name, "*.json")
    if not (folder / INDEX).is_file():
        folder = _folder(name, "*.json", "*.safetensors")
        if not any(folder.glob("*.safetensors")):
            raise MissingFile(f'{folder} holds no safetensors file, which draft="{OWN}" reads; {_INSTEAD}')
        found = tensors_in(sorted(folder.glob("*.safetensors")), BadHead)
        return folder, {tensor: one.path.name for tensor, one in found.items()}
    return folder, weight_map(folder / INDEX, BadHead)


def _folder(name: str, *patterns: str) -> Path:
    """Return the folder of a target; from the hub, files of these patterns are fetched."""
    try:
        return folder_of(name, patterns)
    except MissingFile as error:
        raise MissingFile(
            f'draft="{OWN}" reads the modules of multi-token prediction from the files of the target: {error}; {_INSTEAD}'
        ) from error


def _read(target: "PreTrainedModel", stored: Mapping[str, str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    shards = sorted({*stored.values()})
    folder = _folder(str(target.name_or_path), "*.json", *shards)
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise MissingFile(f"{folder} holds no {shard}, which {INDEX} names")
        names = sorted(name for name, where in stored.items() if where == shard)
        with reading_file(folder / shard, BadHead), safe_open(folder / shard, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors
