"""Readers of sizes, positions, embeddings and weights, shared by all kinds of heads."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from specbeam.core.errors import BadHead
from specbeam.core.records import FINAL
from specbeam.engines.eligibility import lacks_taps
from specbeam.models.heads.arrays import TokenMap
from specbeam.models.heads.fields import Fields
from specbeam.models.heads.files import HeadFiles
from specbeam.models.heads.head import Head
from specbeam.models.heads.layers import BASE, LayerSizes, Rotary, View
from specbeam.models.heads.vocabulary import read_tokens

HeadKind = TypeVar("HeadKind", bound=Head)
FULL = "full_attention"
SLIDING = "sliding_attention"
MOST_ROWS = 1024  # largest number of rows of a block
MOST_BASE = 1e11  # largest base of rotary positions
FIELD_NAMES = {  # transformers' names of the sizes of a layer
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "inner": "intermediate_size",
}


def layer_sizes(files: HeadFiles, core: Fields) -> LayerSizes:
    """Return the sizes of a head's layers. Raises `BadHead` if the tensors of the first layer have other sizes.

    Args:
        core: the part of the configuration that describes them.
    """
    width = core.whole("hidden_size")
    heads = core.whole("num_attention_heads")
    kv_heads = core.whole("num_key_value_heads", heads)
    head_size = core.whole("head_dim", max(width // heads, 1))
    if core.text("hidden_act", "silu") not in ("silu", "swish"):
        raise core.bad("hidden_act", "'silu': heads with other inner layers cannot be read")
    sizes = LayerSizes(
        width=width,
        reads=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        inner=core.whole("intermediate_size"),
        eps=core.number("rms_norm_eps", 1e-6, most=1.0),
        has_bias="layers.0.self_attn.q_proj.bias" in files.tensors,
        norms_heads="layers.0.self_attn.q_norm.weight" in files.tensors,
    )
    check_layers(files, core, sizes, FIELD_NAMES)
    return sizes


def check_layers(files: HeadFiles, core: Fields, sizes: LayerSizes, names: Mapping[str, str]) -> None:
    """Raise `BadHead` unless these sizes are consistent, and the tensors of the first layer have them.

    Args:
        core: the fields that state them.
        names: the name of each size's field.
    """
    if sizes.heads % sizes.kv_heads:
        raise core.bad(names["kv_heads"], f"a divisor of {names['heads']}, {sizes.heads}")
    if sizes.head_size % 2:
        raise core.bad(names["head_size"], f"even, found {sizes.head_size}")
    fields = {
        "self_attn.o_proj": names["width"],
        "self_attn.q_proj": f"{names['head_size']} and {names['heads']}",
        "self_attn.k_proj": f"{names['head_size']} and {names['kv_heads']}",
        "mlp.gate_proj": names["inner"],
    }
    for name, size in sizes.rows().items():
        files.check_size(f"layers.0.{name}.weight", 0, size, core.inside + fields[name])


def layer_count(files: HeadFiles, core: Fields, default: int | None = None) -> int:
    """Return the number of a head's layers. Raises `BadHead` unless the files hold the stated number."""
    stated = core.whole("num_hidden_layers", default)
    stored = stored_layers(files)
    if stored != stated:
        raise BadHead(
            f"{files.where}: {core.inside}num_hidden_layers is {stated} in config.json, and there are tensors of "
            f"{stored} layers"
        )
    return stated


def stored_layers(files: HeadFiles) -> int:
    """Return the number of layers with tensors."""
    return len({name.split(".")[1] for name in files.tensors if name.startswith("layers.")})


def views_of(core: Fields, layers: int, window: Callable[[int], View]) -> tuple[View, ...]:
    """Return the views of the layers; () if all rows attend to everything.

    Args:
        window: returns the writer's view for a window of this size.
    """
    kinds = core.texts("layer_types")
    if not kinds and core.flag("use_sliding_window", default=False):  # as in transformers' Qwen
        full = min(core.whole("max_window_layers", 28, least=0), layers)
        kinds = (FULL,) * full + (SLIDING,) * (layers - full)
    if kinds and (len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}):
        raise core.bad("layer_types", f"a list of {FULL!r} or {SLIDING!r} for each of {layers} layers")
    if SLIDING not in kinds:
        return ()
    view_of_kind = {FULL: View(), SLIDING: window(core.whole("sliding_window"))}
    return tuple(view_of_kind[kind] for kind in kinds)


def rope_of(core: Fields, name: str | None = None) -> dict[str, Any]:
    """Return the parameters of the positions.

    Args:
        name: the name of their field; None: the name in transformers 5 or earlier, whichever is there.
    """
    outer = core.number("rope_theta", BASE, most=MOST_BASE, may_be_0=False)
    name = name or _rope_field(core)
    stated = core.inner(name)
    if any(isinstance(one, Mapping) for one in stated.values.values()):
        raise core.bad(name, "the same for all layers: heads whose layers have positions of their own cannot be read")
    kind = stated.text("rope_type") or stated.text("type") or "default"
    known = _rope_types()
    if kind not in known:
        raise core.bad(name, f"of a type of {', '.join(sorted(known))}")
    if stated.number("partial_rotary_factor", 1.0) != 1:
        raise core.bad(name, "without partial_rotary_factor: heads that rotate a part of their columns cannot be read")
    rope = {field: value for field, value in stated.values.items() if field != "type"}
    base = stated.number("rope_theta", outer, most=MOST_BASE, may_be_0=False)
    return rope | {"rope_type": kind, "rope_theta": base}


def _rope_types() -> set[str]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return {"default", *ROPE_INIT_FUNCTIONS}


def _rope_field(core: Fields) -> str:
    return "rope_parameters" if core.has("rope_parameters") else "rope_scaling"


def rotary_of(
    core: Fields,
    sizes: LayerSizes,
    rope: dict[str, Any],
    name: str | None = None,
    of_positions: str = "max_position_embeddings",
) -> Rotary:
    """Return the rotation by positions. Raises `BadHead` if its parameters are invalid.

    Args:
        rope: the parameters.
        name: see `rope_of`.
        of_positions: the field that holds the number of positions.
    """
    positions = core.whole(of_positions, 2048)
    name = name or _rope_field(core)
    try:
        rotary = Rotary(sizes, rope, positions)
        angles = rotary(torch.arange(2))
        frequencies: Any = rotary.angles.inv_freq
        is_sound = all(one.isfinite().all() for one in angles) and bool((frequencies > 0).all())
    except Exception as error:  # transformers does not document the parameters that it accepts
        raise core.bad(
            name, f"valid for transformers' positions of this type ({type(error).__name__}: {error})"
        ) from error
    if not is_sound:
        raise core.bad(name, "parameters that rotate all columns by finite angles")
    return rotary


def check_taps(files: HeadFiles, taps: tuple[int, ...], how: str) -> None:
    """Raise `BadHead` unless the target has these hidden states, and their number fits the head.

    Args:
        how: where they are stated, for the error.
    """
    if not files.has("fc.weight"):
        raise BadHead(f"{files.where} has no tensor fc.weight, which makes features of the target's hidden states")
    states = files.size("fc.weight", 1)
    width = files.width
    if states % width:
        raise BadHead(f"{files.where} reads rows of {states} numbers, not a multiple of the target's width of {width}")
    if len(taps) * width != states:
        raise BadHead(f"{files.where} reads {states // width} hidden states, and {len(taps)} are named: {taps} ({how})")
    if why := lacks_taps(files.target, tuple(tap for tap in taps if tap != FINAL)):
        raise BadHead(f"{files.where} reads the inputs of layers {taps} ({how}); {why}: is it for another target?")


def check_target(files: HeadFiles, expected: Mapping[str, Any], why: str) -> None:
    """Raise `BadHead` unless the configuration states these fields of the target that the head was trained for.

    Args:
        why: the reason why they must be equal, for the error.
    """
    stated = files.fields.required("target")
    for name, value in expected.items():
        if stated.values.get(name) != value:
            raise stated.bad(name, f"the target's, {value!r}: {why}")


def mask_token(fields: Fields, names: tuple[str, ...], vocab: int) -> int:
    """Return the token whose embedding mask rows read. Raises `BadHead` if none is stated, or the embedding lacks it.

    Args:
        names: the names of the fields that may state it; the first one found counts.
        vocab: number of tokens of the embedding.
    """
    name = next(filter(fields.has, names), names[0])
    mask = fields.whole(name, least=0)
    if mask >= vocab:
        raise BadHead(f"{fields.where}: {fields.inside}{name} is {mask}; the target has {vocab} tokens")
    return mask


class TokenParts(NamedTuple):
    """The parts of a head that depend on tokens."""

    embedding: Any
    head: Any  # makes logits
    tokens: TokenMap


def token_parts(files: HeadFiles, count: int, width: int) -> TokenParts:
    """Return the embedding, output matrix and tokens of a head with `count` tokens and rows of this width."""
    embedding = embedding_of(files, width)
    head = own_head(files, count, width, embedding)
    return TokenParts(embedding, head, read_tokens(files, count))


def embedding_of(files: HeadFiles, width: int) -> Any:
    """Return the head's own embedding, or the target's if it has none."""
    embedding = files.target.get_input_embeddings()
    theirs = embedding.weight
    if not files.has("embed_tokens.weight"):
        if theirs.shape[1] != width:
            raise BadHead(
                f"{files.where} has no embedding, and rows of {width}; the target's embedding has {theirs.shape[1]}"
            )
        return embedding
    own = files.take("embed_tokens.weight", theirs.shape[0], width)
    if own.shape == theirs.shape and torch.equal(own.to(theirs), theirs):
        return embedding
    return nn.Embedding.from_pretrained(own.to(theirs))


def own_head(files: HeadFiles, count: int, width: int, embedding: Any) -> Any:
    """Return the module with the output matrix: the head's own, its embedding if tied, or the target's."""
    linear = nn.Linear(width, count, bias=False, device="meta")
    if files.has("lm_head.weight"):
        files.check_size("lm_head.weight", 0, count, "draft_vocab_size or vocab_size")
        like = files.target.get_input_embeddings().weight
        linear.weight = nn.Parameter(files.take("lm_head.weight", count, width).to(like), requires_grad=False)
        return linear
    if files.fields.flag("tie_word_embeddings", default=False):
        if embedding.weight.shape != (count, width):
            raise files.fields.bad("tie_word_embeddings", f"false, as the head has {count} tokens")
        linear.weight = embedding.weight
        return linear
    found = files.target.get_output_embeddings()
    if found.weight.shape != (count, width):
        raise BadHead(
            f"{files.where} has no lm_head.weight, and {count} tokens (draft_vocab_size); the target's head is "
            f"{[*found.weight.shape]}"
        )
    return found


def filled(head: HeadKind, files: HeadFiles, others: tuple[str, ...] = ()) -> HeadKind:
    """Return a head with the tensors of files as its weights, in the type and on the device of the target's embedding.

    Args:
        others: prefixes of names of further weights that belong to the target. The embedding (`embed_tokens`) and the output
            matrix (`lm_head`) may belong to it, too: all of these stay unchanged.

    Raises `BadHead` if a tensor is missing, does not fit, or is left over.
    """
    like = files.target.get_input_embeddings().weight
    if hasattr(head, "rotary"):
        head.rotary.to(like.device)
    for name, weight in head.named_parameters():
        if not name.startswith(("embed_tokens.", "lm_head.", *others)):
            weight.data = files.take(name, *weight.shape).to(like)
            weight.requires_grad_(False)
    files.check_all_taken()
    return head
