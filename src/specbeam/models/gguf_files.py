"""Models in GGUF files: their configuration, and a transformers model with the matrices that stay in the file.

Matrices in blocks stay as they are in the file, and the compiled forward packs them without another rounding
(engines/cpu/block_panels.py). The law is exactly that of the file's weights in float32: rows are not rounded, unlike in
llama.cpp. Where the compiled forward does not run a model, its matrices are widened to floats.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specbeam.core.errors import BadCheckpoint, NotSupported, UnsupportedModel, warn
from specbeam.engines import mapped
from specbeam.engines.blocks import BLOCKS, BlockMatrix
from specbeam.engines.cpu.decoder import misfit_of_shape
from specbeam.engines.families import family_of
from specbeam.engines.mapped import mark_mapped
from specbeam.engines.packed import PackedLinear
from specbeam.models.checkpoints.boundary import reading
from specbeam.models.checkpoints.gguf import PLAIN_TYPES, GgufFile, GgufTensor, read_header
from specbeam.models.checkpoints.numbers import fault_of
from specbeam.models.rounded_files import WithoutWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_LAYER = {  # names of a layer's tensors, without .weight and .bias
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_JOINED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # of rotary angles
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NOTE = "_specbeam_weights_note"
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message


class _Architecture(NamedTuple):
    """An architecture of llama.cpp.

    Attributes:
        kind: transformers' model type.
        settings: returns the settings of the configuration beyond those that all architectures have.
        names: of a layer's tensors, beyond `_LAYER`.
        adds_one: whether the file holds norms as 1 + w.
        by_pairs: whether the rows of queries and keys are stored by pairs of rotated numbers.
    """

    kind: str
    settings: Callable[[GgufFile], dict[str, Any]]
    names: dict[str, str] = {}  # noqa: RUF012, a named tuple
    adds_one: bool = False
    by_pairs: bool = False


def _needed(file: GgufFile, key: str) -> Any:
    """Return a value of the architecture. Raises `BadCheckpoint` if the file lacks it."""
    found = file.value(key)
    if found is None:
        raise BadCheckpoint(
            f"{file.path} has no {file.architecture}.{key}, which this architecture needs; convert the original model again"
        )
    return found


def _whole(file: GgufFile, key: str, default: int | None = None) -> int:
    """Return a whole number of at least 1. Raises `NotSupported` for one per layer, `BadCheckpoint` for something else."""
    found = _needed(file, key) if default is None else file.value(key, default)
    if isinstance(found, list) and len({*found}) == 1:
        found = found[0]
    if isinstance(found, list):
        raise NotSupported(
            f"{file.path} has another {file.architecture}.{key} in each layer, and specbeam's families have one"
        )
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise BadCheckpoint(
            f"{file.path} has {file.architecture}.{key} {found!r}; it must be a whole number of at least 1"
        )
    return found


def _head_size(file: GgufFile) -> int:
    heads = _whole(file, "attention.head_count")
    return _whole(file, "attention.key_length", _whole(file, "embedding_length") // heads)


def _rope(file: GgufFile) -> dict[str, Any]:
    """Return the settings of rotary positions."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.value("rope.freq_base", 10_000.0))}
    scaling = file.value("rope.scaling.type", "none")
    if scaling in ("linear", "yarn"):
        found["rope_type"] = scaling
        found["factor"] = float(_needed(file, "rope.scaling.factor"))
    elif scaling not in ("none", "longrope", ""):
        raise NotSupported(
            f"{file.path} scales rotary positions by {scaling!r}; specbeam reads none, linear, yarn, longrope"
        )
    if scaling == "yarn":
        found["original_max_position_embeddings"] = _whole(file, "rope.scaling.original_context_length")
    rotated = _whole(file, "rope.dimension_count", _head_size(file))
    if rotated != _head_size(file):
        found["partial_rotary_factor"] = rotated / _head_size(file)
    return found


def _llama(file: GgufFile) -> dict[str, Any]:
    rope = _rope(file)
    if _FACTORS[0] in file.tensors:
        rope |= _llama3_factors(file, rope)
    biased = "blk.0.attn_q.bias" in file.tensors
    return {"rope_parameters": rope, "attention_bias": biased, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _llama3_factors(file: GgufFile, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Llama 3.1 that give the divisors of rotary angles in a file.

    Raises `NotSupported` if they are others.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = _read(file, file.tensors[_FACTORS[0]]).float()
    found = {"rope_type": "llama3", "factor": float(stored.max()), **_LLAMA3}
    size = _head_size(file)
    config = _config_of(
        "llama", {"hidden_size": size, "num_attention_heads": 1, "head_dim": size} | {"rope_parameters": rope | found}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    if stored.shape != plain.shape or not torch.allclose(plain / stored, expected, rtol=1e-3):
        raise NotSupported(f"{file.path} divides rotary angles by {_FACTORS[0]}, and not as Llama 3.1 does")
    return found


def _qwen3(file: GgufFile) -> dict[str, Any]:
    return {"rope_parameters": _rope(file), "head_dim": _head_size(file)}


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return {"rope_parameters": _rope(file), "use_sliding_window": False}


def _gemma(file: GgufFile) -> dict[str, Any]:
    return {"rope_parameters": _rope(file), "head_dim": _head_size(file), "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    # llama.cpp scales scores by the width of a head, and in the model of 46 layers by that of hidden states.
    is_large = _whole(file, "block_count") == 46
    scalar = _whole(file, "embedding_length") // _whole(file, "attention.head_count") if is_large else _head_size(file)
    return _gemma(file) | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": _whole(file, "attention.sliding_window"),
        "attn_logit_softcapping": float(_needed(file, "attn_logit_softcapping")),
        "final_logit_softcapping": float(_needed(file, "final_logit_softcapping")),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    is_large = _whole(file, "block_count") == 62
    scalar = _whole(file, "embedding_length") // _whole(file, "attention.head_count") if is_large else _head_size(file)
    local = {"rope_type": "default", "rope_theta": float(file.value("rope.freq_base_swa", 10_000.0))}
    whole = _rope(file) | {"rope_theta": float(file.value("rope.freq_base", 1_000_000.0))}
    return _gemma(file) | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": _whole(file, "attention.sliding_window"),
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }


def _phi3(file: GgufFile) -> dict[str, Any]:
    rope = _rope(file)
    longest = _whole(file, "context_length")
    if _FACTORS[1] in file.tensors:
        rope["rope_type"] = "longrope"
        rope["long_factor"] = _read(file, file.tensors[_FACTORS[1]]).tolist()
        rope["short_factor"] = _read(file, file.tensors[_FACTORS[2]]).tolist()
        rope["original_max_position_embeddings"] = _whole(file, "rope.scaling.original_context_length", longest)
    window = file.value("attention.sliding_window") or None
    return {
        "rope_parameters": rope,
        "sliding_window": window,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", longest),
    }


_ARCHITECTURES = {
    "llama": _Architecture("llama", _llama, by_pairs=True),  # also Mistral
    "qwen2": _Architecture("qwen2", _qwen2),
    "qwen3": _Architecture("qwen3", _qwen3, _HEAD_NORMS),
    "gemma": _Architecture("gemma", _gemma, adds_one=True),
    "gemma2": _Architecture("gemma2", _gemma2, _FOUR_NORMS, adds_one=True),
    "gemma3": _Architecture("gemma3_text", _gemma3, _HEAD_NORMS | _FOUR_NORMS, adds_one=True),
    "phi3": _Architecture("phi3", _phi3, _JOINED),
}


@dataclass
class _Kept:
    """The treatment of the matrices in blocks, as counts by type.

    Attributes:
        as_stored: matrices that keep the bits of the file.
        widened: matrices that become floats.
        why: reason for widening them.
        embedding: whether the embedding is in blocks, and is widened because rows of it are looked up.
    """

    why: str = ""
    as_stored: Counter[str] = field(default_factory=Counter)
    widened: Counter[str] = field(default_factory=Counter)
    embedding: bool = False

    def note(self, words: torch.dtype) -> str:
        """Return a sentence for users; "" if the file has no blocks."""
        name = str(words).removeprefix("torch.")
        parts = []
        if self.as_stored:
            parts.append(
                f"{_counted(self.as_stored, 'keep', 'keeps')} the bits of the file ({_listed(self.as_stored)})"
            )
        if self.widened:
            said = f"{_counted(self.widened, 'are', 'is')} widened to {name} ({_listed(self.widened)})"
            parts.append(f"{said}, as {self.why}")
        if self.embedding:
            parts.append(f"the embedding is widened to {name}")
        return "; ".join(parts)


def _counted(counts: Counter[str], many: str, one: str) -> str:
    number = counts.total()
    return f"1 matrix {one}" if number == 1 else f"{number} matrices {many}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))


def weights_note_of(model: Any) -> str:
    """Return the sentence about the weights of a model from a GGUF file; "" for other models."""
    return str(vars(model).get(_NOTE, ""))


def read_gguf(
    path: Path, dtype: "str | torch.dtype", device: torch.device, may_pack: bool, may_map: bool
) -> "PreTrainedModel":
    """Return the model in a GGUF file.

    Args:
        dtype: type of widened matrices; "auto": float32 on a CPU and bfloat16 elsewhere.
        may_pack: whether matrices in blocks may stay so, for the compiled forward.
        may_map: whether 16-bit weights of a large model may stay in the memory-mapped file.

    Raises the errors of `load`.
    """
    file = read_header(path)
    of = _architecture_of(file)
    config = _configuration(file, of)
    names = dict(_names(file, of, config))
    is_on_cpu = device.type == "cpu"
    may_pack = may_pack and is_on_cpu
    model = _built(file, config, names, may_pack)
    why = "others of their role are floats" if may_pack else "only the compiled forward on a CPU reads blocks"
    if may_pack and (misfit := misfit_of_shape(model, None)):
        model = _built(file, config, names, may_pack=False)
        why = f"the compiled forward does not run this model: {misfit}"
    words = (torch.float32 if is_on_cpu else torch.bfloat16) if dtype == "auto" else dtype
    of_file = _type_of_large(file) if may_map and is_on_cpu and dtype == "auto" else None
    if of_file is not None and not misfit_of_shape(model, None):
        words = of_file
        mark_mapped(model)
    kind = getattr(torch, words) if isinstance(words, str) else words
    kept = _load(model, file, names, of, kind)
    kept.why = why
    _finish(model, file, kept.note(kind))
    return model.to(device)


def _architecture_of(file: GgufFile) -> _Architecture:
    """Return the architecture of a file. Raises an error if specbeam does not know it."""
    name = file.architecture
    if name in ("clip", "mmproj"):
        raise UnsupportedModel(f"{file.path} holds a reader of pictures ({name}), not a language model")
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} has the architecture {name!r}, and specbeam reads GGUF files of {', '.join(_ARCHITECTURES)}; give "
            "the original model in transformers' format, with quantize='int4' to make it small"
        )
    if file.value("expert_count", 0):
        raise NotSupported(
            f"{file.path} holds a mixture of experts, which specbeam does not read from GGUF files; give the original model "
            "in transformers' format"
        )
    if _EMBEDDING not in file.tensors:
        raise BadCheckpoint(f"{file.path} holds no {_EMBEDDING}: it is not a whole language model")
    return _ARCHITECTURES[name]


def _configuration(file: GgufFile, of: _Architecture) -> Any:
    """Return transformers' configuration of the model in a file."""
    heads = _whole(file, "attention.head_count")
    width = _whole(file, "embedding_length")
    embedding = file.tensors[_EMBEDDING].shape
    if len(embedding) != 2 or embedding[1] != width:
        raise BadCheckpoint(f"{file.path}: {_EMBEDDING} is {[*embedding]}, and the embedding_length is {width}")
    shared = _whole(file, "attention.head_count_kv", heads)
    if heads % shared or (
        "attention.key_length" not in file.metadata and width % heads and file.value("attention.key_length") is None
    ):
        raise BadCheckpoint(
            f"{file.path} has {heads} heads, {shared} heads of keys and a width of {width}, which do not fit"
        )
    tokens = {
        name: file.metadata.get(f"tokenizer.ggml.{key}")
        for name, key in (
            ("bos_token_id", "bos_token_id"),
            ("eos_token_id", "eos_token_id"),
            ("pad_token_id", "padding_token_id"),
        )
    }
    settings = {
        "hidden_size": width,
        "num_hidden_layers": _whole(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "intermediate_size": _whole(file, "feed_forward_length"),
        "max_position_embeddings": _whole(file, "context_length"),
        "rms_norm_eps": float(_needed(file, "attention.layer_norm_rms_epsilon")),
        "vocab_size": embedding[0],
        "tie_word_embeddings": _HEAD not in file.tensors,
    }
    if of.kind == "llama" and _head_size(file) * heads != width:
        settings["head_dim"] = _head_size(file)
    return _config_of(of.kind, settings | tokens | of.settings(file), str(file.path))


def _config_of(kind: str, settings: dict[str, Any], where: str = "") -> Any:
    from transformers import AutoConfig

    with reading(f"the metadata of {where} do not describe a {kind} model"):
        return AutoConfig.for_model(kind, **settings)


def _names(file: GgufFile, of: _Architecture, config: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors in a file with those of transformers."""
    yield _EMBEDDING, "model.embed_tokens.weight"
    yield "output_norm.weight", "model.norm.weight"
    yield _HEAD, "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for ours, theirs in (_LAYER | of.names).items():
            for end in ("weight", "bias"):
                yield f"blk.{layer}.{ours}.{end}", f"model.layers.{layer}.{theirs}.{end}"


def _built(file: GgufFile, config: Any, names: dict[str, str], may_pack: bool) -> Any:
    """Return a model without weights, with a `PackedLinear` for each matrix that stays in blocks.

    Raises `BadCheckpoint` if the file holds other tensors than the model.
    """
    from transformers import AutoModelForCausalLM

    with reading(f"the metadata of {file.path} do not describe a model"), WithoutWeights():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    _check_tensors(model, file, names)
    if may_pack:
        for name in _packable(model, file, names):
            _replace(model, file, names, name)
    return model


def _check_tensors(model: nn.Module, file: GgufFile, names: dict[str, str]) -> None:
    """Raise `BadCheckpoint` if a file and the model differ in the names or shapes of their tensors."""
    own = model.state_dict()
    wanted = {ours: own[theirs] for ours, theirs in names.items() if theirs in own}
    if strange := sorted(file.tensors.keys() - wanted.keys() - {*_FACTORS}):
        raise BadCheckpoint(
            f"{file.path} holds {_some(strange)}, which {type(model).__name__} does not have: it is another version of the "
            "architecture"
        )
    is_tied = _HEAD not in file.tensors
    if missing := sorted(wanted.keys() - file.tensors.keys() - ({_HEAD} if is_tied else set())):
        raise BadCheckpoint(
            f"{file.path} lacks {_some(missing)}, which {type(model).__name__} needs; download or convert the model again"
        )
    for name, tensor in file.tensors.items():
        if name in wanted and tensor.shape != tuple(wanted[name].shape):
            raise BadCheckpoint(
                f"{file.path}: {name} is {[*tensor.shape]}, and {[*wanted[name].shape]} by the metadata"
            )


def _some(names: list[str]) -> str:
    """Return the first names of a list."""
    return ", ".join(names[:4]) + (" and more" if len(names) > 4 else "")


def _packable(model: Any, file: GgufFile, names: dict[str, str]) -> list[str]:
    """Return the tensors that may stay in blocks: those of a role that are in blocks in all layers, and the head.

    The compiled forward stacks the matrices of a role over all layers, and joins those that read the same rows.
    """
    family = family_of(model)
    found = [_HEAD if _HEAD in file.tensors else _EMBEDDING]
    if family is None or file.tensors[found[0]].type not in BLOCKS:
        found = []
    if family is None:
        return found
    inner = {f"{family.inner}.{name}" for name in (*family.up, family.down)}
    roles = [
        {f"{family.attention}.{name}" for name in family.qkv},
        {f"{family.attention}.{family.out}"},
        {one for one in inner if not one.endswith(f".{family.down}")},
        {f"{family.inner}.{family.down}"},
    ]
    for role in roles:
        same = [one for one, theirs in names.items() if _role_of(theirs) in role and one in file.tensors]
        if same and all(file.tensors[one].type in BLOCKS for one in same):
            found += same
    return found


def _role_of(name: str) -> str:
    """Return the name of a layer's matrix within its layer, such as "mlp.up_proj"; "" for other tensors."""
    parts = name.split(".")
    is_matrix = parts[:2] == ["model", "layers"] and parts[-1] == "weight"
    return ".".join(parts[3:-1]) if is_matrix else ""


def _replace(model: Any, file: GgufFile, names: dict[str, str], name: str) -> None:
    """Replace the module of a tensor by a `PackedLinear`."""
    tensor = file.tensors[name]
    columns, depth = tensor.shape
    matrix = BlockMatrix(file.path, name, tensor.start, tensor.type, (columns, depth))
    if name in (_HEAD, _EMBEDDING):
        tied = None if name == _HEAD else model.get_input_embeddings().weight
        model.lm_head = PackedLinear(matrix, None, tied)
        return
    above, _, last = names[name].removesuffix(".weight").rpartition(".")
    module = model.get_submodule(above)
    order = _order_of(file, name)
    setattr(module, last, PackedLinear(matrix.in_order(order) if order else matrix, getattr(module, last).bias))


def _order_of(file: GgufFile, name: str) -> list[int]:
    """Return the order in which transformers has the rows of a tensor; empty: that of the file.

    llama.cpp stores the two numbers that are rotated together one after the other, transformers half a head apart.
    """
    role = name.split(".")[2] if name.startswith("blk.") else ""
    if not _ARCHITECTURES[file.architecture].by_pairs or role not in ("attn_q", "attn_k"):
        return []
    heads = _whole(file, "attention.head_count")
    if role == "attn_k":
        heads = _whole(file, "attention.head_count_kv", heads)
    rows = np.arange(file.tensors[name].shape[0])
    order: list[int] = rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1).tolist()
    return order


def _read(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """Return a tensor of floats as a view of the mapped file; its blocks as float32."""
    if tensor.type in BLOCKS:
        columns = int(np.prod(tensor.shape[:-1]))
        matrix = BlockMatrix(file.path, "", tensor.start, tensor.type, (columns, tensor.shape[-1]))
        return torch.from_numpy(matrix.read().weights()).reshape(tensor.shape)
    words = _TYPES[PLAIN_TYPES[tensor.type][0]]
    # "c": a private mapping, which torch may take for a writable one.
    stored = np.memmap(file.path, dtype=np.uint8, mode="c", offset=tensor.start, shape=(tensor.bytes,))
    return torch.from_numpy(stored).view(words).reshape(tensor.shape)


def _type_of_large(file: GgufFile) -> torch.dtype | None:
    """Return the 16-bit type of all matrices of a model with too many weights to widen them; None for others."""
    matrices = [one for one in file.tensors.values() if len(one.shape) > 1]
    types = {one.type for one in matrices}
    count = sum(int(np.prod(one.shape)) for one in matrices)
    if len(types) != 1 or count <= mapped.LARGEST_WIDENED:
        return None
    return {1: torch.float16, 30: torch.bfloat16}.get(types.pop())


def _load(model: Any, file: GgufFile, names: dict[str, str], of: _Architecture, words: torch.dtype) -> _Kept:
    """Load all tensors except the matrices that stay in blocks. Returns what became of the matrices."""
    kept = _Kept()
    state = {}
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    for name, tensor in file.tensors.items():
        if name in _FACTORS:
            continue
        theirs = names[name]
        is_in_blocks = tensor.type in BLOCKS
        if theirs.endswith(".weight") and theirs.removesuffix(".weight") in packed:
            kept.as_stored[tensor.type_name] += 1
            continue
        found = _read(file, tensor)
        if fault := fault_of(found):
            raise BadCheckpoint(f"{file.path}: {name} {fault}; download or convert the model again")
        if of.adds_one and name.endswith("norm.weight"):
            found = found.float() - 1
        order = _order_of(file, name)
        if is_in_blocks and name == _EMBEDDING:
            kept.embedding = True
        elif is_in_blocks:
            kept.widened[tensor.type_name] += 1
        in_order = found[order] if order else found
        state[theirs] = in_order.to(words)
    model.load_state_dict(state, strict=False, assign=True)
    embedding = model.get_input_embeddings().weight
    if _HEAD not in file.tensors and "lm_head" in packed:
        packed["lm_head"].tied = (embedding,)
        kept.as_stored[file.tensors[_EMBEDDING].type_name] += 1
    elif _HEAD not in file.tensors:
        model.lm_head.weight = embedding
    return kept


def _finish(model: Any, file: GgufFile, note: str) -> None:
    """Set the attributes that transformers sets when it loads a model, such as its name and generation config."""
    from transformers import GenerationConfig

    name = str(file.path)
    if note:
        model.config.quantization_config = {"quant_method": "gguf"}
    model.config._name_or_path = name
    model.name_or_path = name
    model.config.dtype = model.dtype
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_TOKENS]
    known = sorted({end for end in ends if isinstance(end, int)})
    if not known:
        warn(f"{file.path} names no token that ends a text; give eos_token_id")
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=(known[0] if len(known) == 1 else known) if known else None,
        pad_token_id=model.config.pad_token_id,
    )
    object.__setattr__(model, _NOTE, note)
    model.eval()
