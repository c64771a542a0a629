"""What readers of all kinds of heads take from files and from targets: sizes, positions, embeddings and weights."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.engines.eligibility import lacks_taps
from specbeam.errors import BadHead
from specbeam.heads.files import HeadFiles
from specbeam.heads.head import Head
from specbeam.heads.layers import BASE, LayerSizes
from specbeam.records import FINAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_sizes(files: HeadFiles, core: Mapping[str, Any]) -> LayerSizes:
    """Return the sizes of a head's layers.

    Args:
        core: the part of the configuration that describes them.
    """
    width = files.whole("hidden_size", among=core)
    heads = files.whole("num_attention_heads", among=core)
    return LayerSizes(
        width=width,
        reads=width,
        heads=heads,
        kv_heads=files.whole("num_key_value_heads", heads, core),
        head_size=files.whole("head_dim", width // heads, core),
        inner=files.whole("intermediate_size", among=core),
        eps=float(files.number("rms_norm_eps", 1e-6, core)),
        has_bias="layers.0.self_attn.q_proj.bias" in files.tensors,
        norms_heads="layers.0.self_attn.q_norm.weight" in files.tensors,
    )


def rope_of(core: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the positions, from the field of transformers 5 or those of before."""
    known = core.get("rope_parameters")
    if known:
        return {"rope_type": "default", "rope_theta": core.get("rope_theta") or BASE, **known}
    scaling = dict(core.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    return {"rope_type": "default", "rope_theta": core.get("rope_theta") or BASE, **scaling}


def check_taps(files: HeadFiles, target: "PreTrainedModel", taps: tuple[int, ...], how: str) -> None:
    """Raise `BadHead` unless the target has these hidden states, and they are as many as the head reads.

    Args:
        how: how they were found, for the error.
    """
    if "fc.weight" not in files.tensors:
        raise BadHead(f"{files.where} has no tensor fc.weight, which makes features of the target's hidden states")
    states = files.tensors["fc.weight"].shape[1]
    width = width_of(target)
    if states % width:
        raise BadHead(f"{files.where} reads rows of {states} numbers, no multiple of the target's width of {width}")
    if len(taps) * width != states:
        raise BadHead(f"{files.where} reads {states // width} hidden states, and {len(taps)} are named: {taps}")
    if why := lacks_taps(target, tuple(tap for tap in taps if tap != FINAL)):
        raise BadHead(f"{files.where} reads what enters layers {taps} ({how}); {why}: is it for another target?")


def positions_of(core: Mapping[str, Any]) -> int:
    """Return the number of positions that a head was trained with."""
    return int(core.get("max_position_embeddings") or 2048)


def width_of(target: "PreTrainedModel") -> int:
    """Return the size of the target's hidden states."""
    return int(target.config.get_text_config().hidden_size)


def head_of(target: "PreTrainedModel") -> Any:
    """Return the module that makes the target's logits."""
    return target.get_output_embeddings()


def embedding_of(files: HeadFiles, target: "PreTrainedModel", width: int) -> Any:
    """Return the head's own embedding, or the target's if it has none."""
    if not files.has("embed_tokens.weight"):
        found = target.get_input_embeddings()
        if found.weight.shape[1] != width:
            raise BadHead(
                f"{files.where} has no embedding, and rows of {width}; the target's embedding has {found.weight.shape[1]}"
            )
        return found
    theirs = target.get_input_embeddings().weight
    own = files.take("embed_tokens.weight", theirs.shape[0], width)
    if own.shape == theirs.shape and torch.equal(own.to(theirs), theirs):
        return target.get_input_embeddings()
    return nn.Embedding.from_pretrained(own.to(theirs))


def own_head(files: HeadFiles, count: int, width: int, embedding: Any, target: "PreTrainedModel") -> Any:
    """Return the module that makes the head's logits: its own matrix, its embedding if tied, or the target's."""
    linear = nn.Linear(width, count, bias=False, device="meta")
    if files.has("lm_head.weight"):
        like = target.get_input_embeddings().weight
        linear.weight = nn.Parameter(files.take("lm_head.weight", count, width).to(like), requires_grad=False)
        return linear
    if files.config.get("tie_word_embeddings"):
        linear.weight = embedding.weight
        return linear
    found = head_of(target)
    if found.weight.shape != (count, width):
        raise BadHead(
            f"{files.where} has no lm_head.weight, and {count} tokens; the target's head is {[*found.weight.shape]}"
        )
    return found


def fill(head: Head, files: HeadFiles, target: "PreTrainedModel", others: tuple[str, ...] = ()) -> None:
    """Take the tensors of the files for a head's own weights, in the type and place of the target's embedding.

    Args:
        others: beginnings of further names of weights that are the target's. Its embedding (`embed_tokens`) and the matrix
            that makes logits (`lm_head`) may be: they stay as and where they are.
    """
    like = target.get_input_embeddings().weight
    if hasattr(head, "rotary"):
        head.rotary.to(like.device)
    for name, weight in head.named_parameters():
        if not name.startswith(("embed_tokens.", "lm_head.", *others)):
            weight.data = files.take(name, *weight.shape).to(like)
            weight.requires_grad_(False)
