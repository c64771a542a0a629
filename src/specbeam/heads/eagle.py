"""Readers of EAGLE heads: EAGLE-1, EAGLE-2 and HASS, and EAGLE-3 as its five writers store it.

The writers differ in names, in defaults, and in how they number the hidden states that a head reads. A wrong reading changes
no law, it only makes worse drafts.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.engines.eligibility import lacks_taps, layers_of
from specbeam.errors import BadHead
from specbeam.heads.files import HeadFiles
from specbeam.heads.layers import BASE, LayerSizes, Rotary
from specbeam.heads.trunk import PairTrunk, TrunkShape
from specbeam.heads.vocabulary import read_tokens
from specbeam.records import FINAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFUSED = ("kv_a_proj_with_mqa", "parallel_draft_heads")  # parts of names of heads that cannot be read


def is_eagle3(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether files with this configuration and these tensors hold an EAGLE-3 head."""
    return (
        config.get("speculators_model_type") == "eagle3"
        or any("Eagle3" in name for name in config.get("architectures") or [])
        or any(name.startswith("midlayer.") for name in names)
        or "layers.0.hidden_norm.weight" in names
    )


def is_eagle(names: Collection[str]) -> bool:
    """Return whether files with these tensors hold an EAGLE-1, EAGLE-2 or HASS head: they are of one format."""
    return "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names and "norm.weight" not in names


def read_eagle(files: HeadFiles, target: "PreTrainedModel") -> PairTrunk:
    """Return an EAGLE-1, EAGLE-2 or HASS head; they are of one format. Raises `BadHead` if it cannot be read."""
    config = files.config
    width = _target_width(target)
    if files.number("hidden_size") != width:
        raise BadHead(f"{files.where} has rows of {config['hidden_size']}, and the target's are of {width}")
    has_bias = files.flag("bias", default=files.has("fc.bias"))
    heads = int(files.number("num_attention_heads"))
    sizes = LayerSizes(
        width=width,
        reads=width,
        heads=heads,
        kv_heads=int(files.number("num_key_value_heads", heads)),
        head_size=width // heads,
        inner=int(files.number("intermediate_size")),
        eps=float(files.number("rms_norm_eps", 1e-6)),
        has_bias=files.flag("qkv_bias", default=False),
    )
    layers = int(files.number("num_hidden_layers", 1))
    vocab = _head_of(target).weight.shape[0]
    shape = TrunkShape(sizes, layers, (FINAL,), width, "projection", vocab, joins_bias=has_bias, norms_output=False)
    rotary = Rotary(sizes, _rope_of_eagle(config), _positions(config))
    trunk = PairTrunk(shape, rotary, _embedding(files, target, width), _head_of(target))
    _fill(trunk, files)
    files.check_all_taken()
    return trunk


def read_eagle3(files: HeadFiles, target: "PreTrainedModel", taps: tuple[int, ...] | None = None) -> PairTrunk:
    """Return an EAGLE-3 head.

    Args:
        taps: the hidden states that it reads, see `Needs.taps`; None: as its files say.

    Raises `BadHead` if it cannot be read.
    """
    files.tensors = {name.replace("midlayer.", "layers.0."): one for name, one in files.tensors.items()}
    if known := [name for name in files.tensors if any(part in name for part in REFUSED)]:
        raise BadHead(f"{files.where} holds {known[0]}; heads with latent attention or parallel heads cannot be read")
    config = files.config
    core: Mapping[str, Any] = config.get("transformer_layer_config") or config
    width = int(files.number("hidden_size", among=core))
    target_width = _target_width(target)
    heads = int(files.number("num_attention_heads", among=core))
    if "fc.weight" not in files.tensors:
        raise BadHead(f"{files.where} has no tensor fc.weight, which makes features of the target's hidden states")
    states = files.tensors["fc.weight"].shape[1]
    if states % target_width:
        raise BadHead(
            f"{files.where} reads rows of {states} numbers, no multiple of the target's width of {target_width}"
        )
    sizes = LayerSizes(
        width=width,
        reads=width,
        heads=heads,
        kv_heads=int(files.number("num_key_value_heads", heads, core)),
        head_size=int(files.number("head_dim", width // heads, core)),
        inner=int(files.number("intermediate_size", among=core)),
        eps=float(files.number("rms_norm_eps", 1e-6, core)),
        has_bias="layers.0.self_attn.q_proj.bias" in files.tensors,
        norms_heads="layers.0.self_attn.q_norm.weight" in files.tensors,
    )
    layers = int(files.number("num_hidden_layers", 1, core))
    chosen, how = (taps, "as asked for") if taps is not None else read_taps(config, target, states // target_width)
    if len(chosen) * target_width != states:
        raise BadHead(
            f"{files.where} reads {states // target_width} hidden states, and {len(chosen)} are named: {chosen}"
        )
    if why := lacks_taps(target, chosen):
        raise BadHead(f"{files.where} reads what enters layers {chosen} ({how}); {why}: is it for another target?")
    is_speculators = "speculators_model_type" in config
    shape = TrunkShape(
        sizes=sizes,
        layers=layers,
        taps=chosen,
        target_width=target_width,
        pairs="attention",
        draft_vocab=int(files.number("draft_vocab_size", files.number("vocab_size", among=core))),
        joins_bias="fc.bias" in files.tensors,
        norms_features=_norms_of_features(files),
        norms_residual=files.flag("norm_before_residual", default=False),
        # SpecForge's field of the same name says something else: its heads feed back states before the norm.
        feeds_normed=is_speculators and files.flag("norm_output", default=False),
    )
    rotary = Rotary(sizes, _rope_parameters(core), _positions(core))
    embedding = _embedding(files, target, width)
    head = _own_head(files, shape.draft_vocab, width, embedding, target)
    tokens = read_tokens(files, shape.draft_vocab, _head_of(target).weight.shape[0])
    trunk = PairTrunk(shape, rotary, embedding, head, tokens)
    _fill(trunk, files)
    files.check_all_taken()
    return trunk


def read_taps(config: Mapping[str, Any], target: "PreTrainedModel", count: int) -> tuple[tuple[int, ...], str]:
    """Return the hidden states that a head reads, and how they were found.

    Some writers number what enters a layer, and others what leaves it. Where a field is used by both, the default of all
    writers tells which numbering it is.

    Args:
        count: number of hidden states.
    """
    total = len(layers_of(target))
    default = (2, total // 2, total - 3)
    named = config.get("eagle_aux_hidden_state_layer_ids")
    if named and "speculators_model_type" in config:
        return tuple(map(int, named)), "what enters these layers"
    after = config.get("target_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not after and nested and tuple(nested) == default:
        return default, "what enters these layers, as the default of all writers"
    after = after or nested or named
    if after:
        return tuple(int(one) + 1 for one in after), "what leaves the layers before these"
    if count == 3:
        return default, "the default of all writers"
    raise BadHead(f"the head reads {count} hidden states, and its config.json does not say which layers they enter")


def _norms_of_features(files: HeadFiles) -> str:
    """Return how hidden states are normed before they become a feature; the tensors tell."""
    if "input_norm.weight" in files.tensors:
        return "all"
    return "each" if "fc_norm.0.weight" in files.tensors else "no"


def _rope_parameters(core: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the positions, from the field of transformers 5 or those of before."""
    known = core.get("rope_parameters")
    if known:
        return {"rope_type": "default", "rope_theta": core.get("rope_theta") or BASE, **known}
    scaling = dict(core.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    return {"rope_type": "default", "rope_theta": core.get("rope_theta") or BASE, **scaling}


def _rope_of_eagle(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the positions of an EAGLE-1 head: its writer takes 10000 whenever they are scaled."""
    if config.get("rope_scaling"):
        return _rope_parameters({"rope_scaling": config["rope_scaling"]})
    return _rope_parameters(config)


def _positions(core: Mapping[str, Any]) -> int:
    """Return the number of positions that a head was trained with."""
    return int(core.get("max_position_embeddings") or 2048)


def _target_width(target: "PreTrainedModel") -> int:
    return int(target.config.get_text_config().hidden_size)


def _head_of(target: "PreTrainedModel") -> Any:
    """Return the module that makes the target's logits."""
    return target.get_output_embeddings()


def _embedding(files: HeadFiles, target: "PreTrainedModel", width: int) -> Any:
    """Return the head's own embedding, or the target's if it has none."""
    if not files.has("embed_tokens.weight"):
        found = target.get_input_embeddings()
        if found.weight.shape[1] != width:
            raise BadHead(
                f"{files.where} has no embedding, and rows of {width}; the target's embedding has {found.weight.shape[1]}"
            )
        return found
    own = files.take("embed_tokens.weight")
    theirs = target.get_input_embeddings().weight
    if own.shape == theirs.shape and torch.equal(own.to(theirs), theirs):
        return target.get_input_embeddings()
    return nn.Embedding.from_pretrained(own.to(theirs))


def _own_head(files: HeadFiles, count: int, width: int, embedding: Any, target: "PreTrainedModel") -> Any:
    """Return the module that makes the head's logits: its own matrix, its embedding if tied, or the target's."""
    linear = nn.Linear(width, count, bias=False, device="meta")
    if files.has("lm_head.weight"):
        like = target.get_input_embeddings().weight
        linear.weight = nn.Parameter(files.take("lm_head.weight", count, width).to(like), requires_grad=False)
        return linear
    if files.config.get("tie_word_embeddings"):
        linear.weight = embedding.weight
        return linear
    found = _head_of(target)
    if found.weight.shape != (count, width):
        raise BadHead(
            f"{files.where} has no lm_head.weight, and {count} tokens; the target's head is {[*found.weight.shape]}"
        )
    return found


def _fill(trunk: PairTrunk, files: HeadFiles) -> None:
    """Take the tensors of the files for the trunk's own weights, in the type and place of the target's embedding.

    The embedding and the matrix that makes logits may be the target's: they stay as and where they are.
    """
    like = trunk.embed_tokens.weight
    trunk.rotary.to(like.device)
    for name, weight in trunk.named_parameters():
        if not name.startswith(("embed_tokens.", "lm_head.")):
            weight.data = files.take(name, *weight.shape).to(like)
            weight.requires_grad_(False)
