"""Readers of EAGLE heads: EAGLE-1, EAGLE-2 and HASS, EAGLE-3 as its five writers store it, and P-EAGLE.

The writers use different names, defaults, and numbers for the hidden states that a head reads. A wrong reading changes no
law; it only makes worse drafts.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from specbeam.core.errors import BadHead
from specbeam.core.records import FINAL
from specbeam.engines.eligibility import layers_of
from specbeam.models.heads.fields import Fields, listed
from specbeam.models.heads.files import HeadFiles
from specbeam.models.heads.layers import BASE, Rotary, View
from specbeam.models.heads.masked import MaskTrunk
from specbeam.models.heads.reading import (
    MOST_ROWS,
    TokenParts,
    check_taps,
    embedding_of,
    filled,
    layer_count,
    layer_sizes,
    mask_token,
    rope_of,
    rotary_of,
    token_parts,
    views_of,
)
from specbeam.models.heads.trunk import PairTrunk, TrunkShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFUSED = ("kv_a_proj_with_mqa", "parallel_draft_heads")  # parts of tensor names of unsupported heads
MASK_ROWS = 8  # speculators' default number of rows of a P-EAGLE block, including the row of the pair


def is_eagle3(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether files with this configuration and these tensors hold an EAGLE-3 head."""
    return (
        config.get("speculators_model_type") == "eagle3"
        or any("Eagle3" in name for name in listed(config.get("architectures")))
        or any(name.startswith("midlayer.") for name in names)
        or "layers.0.hidden_norm.weight" in names
    )


def is_peagle(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether files with this configuration and these tensors hold a P-EAGLE head."""
    return config.get("speculators_model_type") == "peagle" or "mask_hidden" in names


def is_eagle(names: Collection[str]) -> bool:
    """Return whether files with these tensors hold an EAGLE-1, EAGLE-2 or HASS head, which share one format."""
    return "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names and "norm.weight" not in names


def read_eagle(files: HeadFiles) -> PairTrunk:
    """Return an EAGLE-1, EAGLE-2 or HASS head. Raises `BadHead` if it cannot be read."""
    fields = files.fields
    width = files.width
    if fields.whole("hidden_size") != width:
        raise fields.bad("hidden_size", f"the target's, {width}")
    heads = fields.whole("num_attention_heads")
    if width % heads:
        raise fields.bad("num_attention_heads", f"a divisor of hidden_size, {width}")
    # The head size of these heads is their share of the width, whatever the files state.
    core = Fields(files.where, {**files.config, "head_dim": width // heads})
    sizes = layer_sizes(files, core)
    has_bias = fields.flag("bias", default=files.has("fc.bias"))
    if fields.flag("qkv_bias", default=sizes.has_bias) != sizes.has_bias:
        raise fields.bad("qkv_bias", f"{str(sizes.has_bias).lower()}, as its tensors show")
    shape = TrunkShape(
        sizes=sizes,
        layers=layer_count(files, fields, 1),
        taps=(FINAL,),
        target_width=width,
        pairs="projection",
        draft_vocab=files.vocab,
        joins_bias=has_bias,
        norms_output=False,
    )
    rotary = rotary_of(fields, sizes, _rope_of_eagle(fields))
    trunk = PairTrunk(shape, rotary, embedding_of(files, width), files.target.get_output_embeddings())
    return filled(trunk, files)


def read_eagle3(files: HeadFiles) -> PairTrunk:
    """Return an EAGLE-3 head. Raises `BadHead` if it cannot be read."""
    shape, rotary, (embedding, head, tokens) = _parts_of(files, View)
    return filled(PairTrunk(shape, rotary, embedding, head, tokens), files)


def read_peagle(files: HeadFiles) -> MaskTrunk:
    """Return a P-EAGLE head; see `read_eagle3`.

    Writers have three names for the mask token, and store the learned state of mask rows in one to three dimensions.
    """
    shape, rotary, (embedding, head, tokens) = _parts_of(files, lambda size: View(size, from_row=True))
    vocab = embedding.weight.shape[0]
    mask = mask_token(files.fields, ("mask_token_id", "pard_token", "ptd_token_id"), vocab)
    proposal = files.fields.inner("speculators_config").first_of("proposal_methods")
    rows = proposal.whole("speculative_tokens", MASK_ROWS, most=MOST_ROWS)
    trunk = MaskTrunk(shape, rotary, embedding, head, mask, rows, tokens)
    states = trunk.states_size
    if files.has("mask_hidden") and files.tensors["mask_hidden"].numel() == states:
        files.tensors["mask_hidden"] = files.tensors["mask_hidden"].reshape(1, 1, states)
    return filled(trunk, files)


def _parts_of(files: HeadFiles, window: Callable[[int], View]) -> tuple[TrunkShape, Rotary, TokenParts]:
    """Return the parts of an EAGLE-3 head, and take its tensors that are not weights of the trunk.

    Args:
        window: returns the view for a window of this size.
    """
    files.tensors = {name.replace("midlayer.", "layers.0."): one for name, one in files.tensors.items()}
    if known := [name for name in files.tensors if any(part in name for part in REFUSED)]:
        raise BadHead(f"{files.where} holds {known[0]}; heads with latent attention or parallel heads cannot be read")
    fields = files.fields
    core = fields.inner("transformer_layer_config") if fields.has("transformer_layer_config") else fields
    width = files.width
    states = files.size("fc.weight", 1) if files.has("fc.weight") else 0
    taps, how = read_taps(fields, files.target, states // width)
    check_taps(files, taps, how)
    if fields.whole("target_hidden_size", width) != width:
        raise fields.bad("target_hidden_size", f"the width of the target, {width}")
    sizes = layer_sizes(files, core)
    files.check_size("fc.weight", 0, sizes.width, f"{core.inside}hidden_size")
    layers = layer_count(files, core, 1)
    is_speculators = fields.has("speculators_model_type")
    vocab = core.whole("vocab_size", files.vocab)
    shape = TrunkShape(
        sizes=sizes,
        layers=layers,
        taps=taps,
        target_width=width,
        pairs="attention",
        draft_vocab=fields.whole("draft_vocab_size", vocab),
        joins_bias=files.has("fc.bias"),
        norms_features=_norms_of_features(files),
        norms_residual=fields.flag("norm_before_residual", default=False),
        # SpecForge's field has another meaning: its heads feed back states before the norm.
        feeds_normed=fields.flag("norm_output", default=False) and is_speculators,
        # Other writers copy the target's window fields, but train heads without windows.
        views=views_of(core, layers, window) if is_speculators else (),
    )
    rotary = rotary_of(core, sizes, rope_of(core))
    return shape, rotary, token_parts(files, shape.draft_vocab, sizes.width)


def read_taps(fields: Fields, target: "PreTrainedModel", count: int) -> tuple[tuple[int, ...], str]:
    """Return the hidden states that a head reads, and where they are stated.

    Some writers number the inputs of layers, others the outputs. If both use a field, the default of all writers reveals
    the numbering.

    Args:
        count: number of hidden states.
    """
    total = len(layers_of(target))
    default = (2, total // 2, total - 3)
    name = "eagle_aux_hidden_state_layer_ids"
    named = fields.wholes(name)
    if named and fields.has("speculators_model_type"):
        return named, f"{name}: the inputs of these layers"
    after = fields.wholes("target_layer_ids", least=-1)
    nested = fields.inner("eagle_config").wholes(name, least=-1)
    if not after and nested == default:
        return default, f"eagle_config.{name}: the inputs of these layers, the default of all writers"
    if found := after or nested or named:
        stated = name
        if after:
            stated = "target_layer_ids"
        elif nested:
            stated = f"eagle_config.{name}"
        return tuple(one + 1 for one in found), f"{stated}: the outputs of the layers before these"
    if count in (0, 3):
        return default, "the default of all writers"
    raise BadHead(
        f"{fields.where} reads {count} hidden states, and its config.json does not state their layers ({name})"
    )


def _norms_of_features(files: HeadFiles) -> str:
    """Return how hidden states are normed before they make a feature, by the tensors; fields must agree."""
    fields = files.fields
    found = "no"
    if files.has("fc_norm.0.weight"):
        found = "each"
    if files.has("input_norm.weight"):
        found = "all"
    for name, kind in (("norm_before_fc", "all"), ("fc_norm", "each")):
        is_kind = found == kind
        if fields.flag(name, default=is_kind) != is_kind:
            raise fields.bad(name, f"{str(is_kind).lower()}, as its tensors show")
    return found


def _rope_of_eagle(fields: Fields) -> dict[str, Any]:
    """Return the parameters of the positions of an EAGLE-1 head: its writer uses base 10000 if they are scaled."""
    if not fields.has("rope_scaling"):
        return rope_of(fields)
    scaling = Fields(fields.where, {"rope_scaling": fields.values["rope_scaling"]})
    return rope_of(scaling) | {"rope_theta": BASE}
