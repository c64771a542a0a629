"""What readers of all kinds of heads take from files and from targets: sizes, positions, embeddings and weights."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbeam.core.errors import BadHead
from specbeam.core.records import FINAL
from specbeam.engines.eligibility import lacks_taps
from specbeam.models.heads.fields import Fields
from specbeam.models.heads.files import HeadFiles
from specbeam.models.heads.head import Head
from specbeam.models.heads.layers import BASE, LayerSizes, Rotary, View

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_ROWS = 1024  # of a block
MOST_BASE = 1e11  # of positions
FIELD_NAMES = {  # of the sizes of a layer, as transformers calls them
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "inner": "intermediate_size",
}


def layer_sizes(files: HeadFiles, core: Fields) -> LayerSizes:
    """Return the sizes of a head's layers, which the tensors of the first one have. Raises `BadHead` if they do not.

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
    """Raise `BadHead` unless the tensors of the first layer have these sizes, which go together.

    Args:
        core: the fields that state them.
        names: of the fields.
    """
    if sizes.heads % sizes.kv_heads:
        raise core.bad(names["kv_heads"], f"a divisor of {names['heads']}, {sizes.heads}")
    if sizes.head_size % 2:
        raise core.bad(names["head_size"], f"even, and it is {sizes.head_size}")
    of_queries = sizes.heads * sizes.head_size
    of_keys = sizes.kv_heads * sizes.head_size
    for name, size, by in (
        ("self_attn.o_proj", sizes.width, names["width"]),
        ("self_attn.q_proj", of_queries, f"{names['head_size']} and {names['heads']}"),
        ("self_attn.k_proj", of_keys, f"{names['head_size']} and {names['kv_heads']}"),
        ("mlp.gate_proj", sizes.inner, names["inner"]),
    ):
        files.check_size(f"layers.0.{name}.weight", 0, size, core.inside + by)


def layer_count(files: HeadFiles, core: Fields, default: int | None = None) -> int:
    """Return the number of a head's layers. Raises `BadHead` unless there are tensors of as many."""
    stated = core.whole("num_hidden_layers", default)
    numbers = {name.split(".")[1] for name in files.tensors if name.startswith("layers.")}
    if len(numbers) != stated:
        raise BadHead(
            f"{files.where}: {core.inside}num_hidden_layers is {stated} in config.json, and there are tensors of "
            f"{len(numbers)} layers"
        )
    return stated


def views_of(core: Fields, layers: int, window: Callable[[int], View]) -> tuple[View, ...]:
    """Return how far back the rows of each layer look; () if all of them look at everything.

    Args:
        window: what a window of a number of positions is to the writer.
    """
    kinds = core.texts("layer_types")
    if not kinds and core.flag("use_sliding_window", default=False):  # as transformers has it for a Qwen
        start = core.whole("max_window_layers", 28, least=0)
        kinds = tuple("full_attention" if layer < start else "sliding_attention" for layer in range(layers))
    if not kinds:
        return ()
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise core.bad("layer_types", f"a list of 'full_attention' or 'sliding_attention' for each of {layers} layers")
    if "sliding_attention" not in kinds:
        return ()
    size = core.whole("sliding_window")
    return tuple(window(size) if kind == "sliding_attention" else View() for kind in kinds)


def rope_of(core: Fields, name: str | None = None) -> dict[str, Any]:
    """Return the parameters of the positions.

    Args:
        name: of the field that holds them; None: that of transformers 5, or those of before.
    """
    outer = core.number("rope_theta", BASE, most=MOST_BASE, may_be_least=False)
    name = name or _rope_field(core)
    stated = core.inner(name)
    if any(isinstance(one, Mapping) for one in stated.values.values()):
        raise core.bad(name, "the same for all layers: heads whose layers have positions of their own cannot be read")
    rope = dict(stated.values)
    kind = stated.text("rope_type") or stated.text("type") or "default"
    rope.pop("type", None)
    if kind not in _rope_types():
        raise core.bad(name, f"of a type of {', '.join(sorted(_rope_types()))}")
    if stated.number("partial_rotary_factor", 1.0) != 1:
        raise core.bad(name, "without partial_rotary_factor: heads that rotate a part of their columns cannot be read")
    return {
        **rope,
        "rope_type": kind,
        "rope_theta": stated.number("rope_theta", outer, most=MOST_BASE, may_be_least=False),
    }


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
    """Return the rotation by positions. Raises `BadHead` if its parameters make none.

    Args:
        rope: the parameters.
        name: see `rope_of`.
        of_positions: the field that holds the number of positions.
    """
    positions = core.whole(of_positions, 2048)
    name = name or _rope_field(core)
    try:
        rotary = Rotary(sizes, rope, positions)
        cos, sin = rotary(torch.arange(2))
        frequencies: Any = rotary.angles.inv_freq
        is_sound = bool(cos.isfinite().all() and sin.isfinite().all() and (frequencies > 0).all())
    except Exception as error:  # transformers does not say what its parameters have to be
        raise core.bad(name, f"what transformers takes for such positions ({type(error).__name__}: {error})") from error
    if not is_sound:
        raise core.bad(name, "such that all columns turn, by finite angles")
    return rotary


def check_taps(files: HeadFiles, target: "PreTrainedModel", taps: tuple[int, ...], how: str) -> None:
    """Raise `BadHead` unless the target has these hidden states, and they are as many as the head reads.

    Args:
        how: how they were found, for the error.
    """
    if "fc.weight" not in files.tensors:
        raise BadHead(f"{files.where} has no tensor fc.weight, which makes features of the target's hidden states")
    states = files.size("fc.weight", 1)
    width = width_of(target)
    if states % width:
        raise BadHead(f"{files.where} reads rows of {states} numbers, no multiple of the target's width of {width}")
    if len(taps) * width != states:
        raise BadHead(f"{files.where} reads {states // width} hidden states, and {len(taps)} are named: {taps} ({how})")
    if why := lacks_taps(target, tuple(tap for tap in taps if tap != FINAL)):
        raise BadHead(f"{files.where} reads what enters layers {taps} ({how}); {why}: is it for another target?")


def mask_token(fields: Fields, names: tuple[str, ...], vocab: int) -> int:
    """Return the token whose embedding mask rows read. Raises `BadHead` if none is stated, or the embedding has none.

    Args:
        names: of the fields that may state it; the first that is there does.
        vocab: number of tokens of the embedding.
    """
    name = next((one for one in names if fields.has(one)), names[0])
    mask = fields.whole(name, least=0)
    if mask >= vocab:
        raise BadHead(f"{fields.where}: {fields.inside}{name} is {mask}; the target has {vocab} tokens")
    return mask


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
        files.check_size("lm_head.weight", 0, count, "draft_vocab_size or vocab_size")
        like = target.get_input_embeddings().weight
        linear.weight = nn.Parameter(files.take("lm_head.weight", count, width).to(like), requires_grad=False)
        return linear
    if files.fields.flag("tie_word_embeddings", default=False):
        if embedding.weight.shape != (count, width):
            raise files.fields.bad("tie_word_embeddings", f"false, as the head has {count} tokens")
        linear.weight = embedding.weight
        return linear
    found = head_of(target)
    if found.weight.shape != (count, width):
        raise BadHead(
            f"{files.where} has no lm_head.weight, and {count} tokens (draft_vocab_size); the target's head is "
            f"{[*found.weight.shape]}"
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
