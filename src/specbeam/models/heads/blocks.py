"""Readers of block heads, as z-lab, SpecForge, DeepSpec and speculators store them: DFlash, DSpark, Domino, DFlash2, XPress.

Writers define windows differently: in speculators a window is a number of positions before the root of a block, the same for
all rows; in SpecForge and z-lab it ends at each row.
"""

from collections.abc import Mapping
from typing import Any

from specbeam.core.errors import BadHead
from specbeam.models.heads.block import BlockHead, BlockShape
from specbeam.models.heads.fields import Fields, listed
from specbeam.models.heads.files import HeadFiles
from specbeam.models.heads.layers import View
from specbeam.models.heads.reading import (
    MOST_ROWS,
    check_taps,
    filled,
    layer_count,
    layer_sizes,
    mask_token,
    rope_of,
    rotary_of,
    token_parts,
    views_of,
)

# Prefixes of tensor names in files, and the prefixes here.
OTHER_NAMES = {
    "encoder.fc.": "fc.",
    "context_proj.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "logit_head.markov_head.": "markov_head.",
    "logit_head.confidence_head.": "confidence_head.",
    "logit_head.prefix_gru.": "domino.prefix_gru.",
    "logit_head.embed_proj.": "domino.embed_proj.",
    "prefix_gru.": "domino.prefix_gru.",
    "embed_proj.": "domino.embed_proj.",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
REFUSED_FIELDS = (  # for layers and laws that are not implemented, because no writer documents them in full
    "use_swa",
    "use_gemma_norm",
    "attention_value_scale",
    "attention_sink_bias",
)
SPECULATORS = ("dflash", "dspark", "dflash2", "xpress")
PROJECTORS = ("", "dflash", "dspark", "domino")  # kinds of heads, where files name them so
ARCHITECTURES = ("DFlash", "DSpark", "Domino", "XPress")


def is_block(config: Mapping[str, Any]) -> bool:
    """Return whether files with this configuration hold a block head."""
    return (
        config.get("speculators_model_type") in SPECULATORS
        or "dflash_config" in config
        or any(part in name for name in listed(config.get("architectures")) for part in ARCHITECTURES)
    )


def read_block(files: HeadFiles) -> BlockHead:
    """Return a block head. Raises `BadHead` if it cannot be read."""
    files.tensors = {_usual_name(name): one for name, one in files.tensors.items()}
    fields = files.fields
    core = fields.inner("transformer_layer_config") if fields.has("transformer_layer_config") else fields
    nested = fields.inner("dflash_config")
    _check_fields(fields, nested)
    taps, how = read_block_taps(files)
    check_taps(files, taps, how)
    sizes = layer_sizes(files, core)
    files.check_size("fc.weight", 0, sizes.width, f"{core.inside}hidden_size")
    layers = layer_count(files, core)
    vocab = files.vocab
    first_row = 0 if _is_anchored(fields) else 1
    rows = _holder(fields, nested, "block_size").whole("block_size", least=2 if first_row else 1, most=MOST_ROWS)
    has_confidence = files.has("confidence_head.proj.weight")
    shape = BlockShape(
        sizes=sizes,
        layers=layers,
        taps=taps,
        target_width=files.width,
        rows=rows,
        first_row=first_row,
        draft_vocab=fields.whole("draft_vocab_size", vocab),
        has_confidence=has_confidence,
        confidence_reads_token=has_confidence and files.size("confidence_head.proj.weight", 1) > sizes.width,
        logit_scale=_holder(fields, nested, "output_multiplier").number("output_multiplier", 1.0, may_be_0=False),
        logit_cap=_holder(fields, nested, "final_logit_softcapping").number("final_logit_softcapping", 0.0),
        views=_views(fields, core, layers, rows),
        **_correction(files, nested, rows),
        **_local(files, nested, sizes.width, rows),
    )
    if shape.correction == "selector" and (shape.draft_vocab != vocab or shape.inner > vocab):
        raise BadHead(
            f"{files.where}: draft_vocab_size is {shape.draft_vocab} and selector_top_k {shape.inner}; DFlash2 heads must "
            f"have all {vocab} tokens of the target, and choose among at most {vocab}"
        )
    embedding, head, tokens = token_parts(files, shape.draft_vocab, sizes.width)
    mask = mask_token(_holder(fields, nested, "mask_token_id"), ("mask_token_id",), embedding.weight.shape[0])
    block = BlockHead(shape, rotary_of(core, sizes, rope_of(core)), embedding, head, mask, tokens)
    return filled(block, files)


def _check_fields(fields: Fields, nested: Fields) -> None:
    """Raise `BadHead` if there are fields of layers and laws that are not implemented."""
    for name in REFUSED_FIELDS:
        for one in (fields, nested):
            if one.values.get(name):
                raise BadHead(
                    f"{one.where}: {one.inside}{name} is set in config.json; block heads with it cannot be read"
                )
    scale = _holder(fields, nested, "input_embedding_scale")
    if scale.number("input_embedding_scale", 1.0) != 1:
        raise scale.bad("input_embedding_scale", "1: writers disagree on how embeddings are scaled")


def _holder(fields: Fields, nested: Fields, name: str) -> Fields:
    """Return the part of the configuration with this field: `dflash_config` if it is there, else the top level."""
    return nested if nested.has(name) else fields


def _correction(files: HeadFiles, nested: Fields, rows: int) -> dict[str, Any]:
    """Return the fields of a shape for the correction by the tokens above; the tensors determine its kind.

    Args:
        rows: number of rows of a block.
    """
    fields = files.fields
    if files.has("markov_head.markov_w1.weight"):
        kind = "gated" if files.has("markov_head.gate_proj.weight") else "vanilla"
        if files.has("markov_head.joint_proj.weight"):
            kind = "rnn"
        holder = _holder(fields, nested, "markov_head_type")
        if holder.text("markov_head_type", kind) != kind:
            raise holder.bad("markov_head_type", f"{kind!r}, as its tensors show")
        return {"correction": kind, "rank": files.size("markov_head.markov_w1.weight", 1)}
    if files.has("domino.prefix_gru.weight_hh_l0"):
        return {
            "correction": "prefix",
            "rank": files.size("domino.embed_proj.0.weight", 0),
            "inner": files.size("domino.prefix_gru.weight_hh_l0", 1),
            "pure_drafts": nested.whole("pure_draft_prefix_len", 0, least=0),
        }
    if files.has("candidate_selector.hidden_projection.weight"):
        return {
            "correction": "selector",
            "rank": files.size("candidate_selector.hidden_projection.weight", 0),
            "inner": _holder(fields, nested, "selector_top_k").whole("selector_top_k"),
        }
    if files.has("refiner_head.in_proj.weight"):
        mixed = files.tensors.get("refiner_head.mix_l")
        if mixed is not None and mixed.ndim == 3 and mixed.shape[1] != rows:
            raise fields.bad("block_size", f"{mixed.shape[1]}, as in the tensor refiner_head.mix_l")
        return {
            "correction": "refiner",
            "rank": files.size("refiner_head.in_proj.weight", 0),
            "inner": files.size("refiner_head.mlp_gate.weight", 0),
        }
    return {}


def _local(files: HeadFiles, nested: Fields, width: int, rows: int) -> dict[str, Any]:
    """Return the fields of a shape for the mixing of neighbouring rows of a block (DFlash2).

    Args:
        width: size of a row.
        rows: number of rows of a block.
    """
    name = "layers.0.attention_conv.kernel_projection.weight"
    if not files.has(name):
        return {}
    fields = files.fields
    counted = _holder(fields, nested, "conv_kernel_size")
    grouped = _holder(fields, nested, "conv_group_size")
    count = counted.whole("conv_kernel_size", most=rows)
    group = grouped.whole("conv_group_size", most=width)
    if width % group:
        raise grouped.bad("conv_group_size", f"a divisor of the width of the rows, {width}")
    files.check_size(name, 0, 2 * count * (width // group), "conv_kernel_size and conv_group_size")
    return {"local_rows": count, "local_group": group}


def _views(fields: Fields, core: Fields, layers: int, rows: int) -> tuple[View, ...]:
    """Return the views of the layers; see `BlockShape.views`.

    Args:
        layers: number of layers.
        rows: number of rows of a block.
    """
    if fields.has("speculators_model_type"):
        is_dflash2 = fields.text("speculators_model_type") == "dflash2"
        looks_ahead = fields.flag("sliding_window_non_causal", default=is_dflash2)
        # A window ends just before the root.
        return views_of(core, layers, lambda size: View(size + 1, is_causal=not looks_ahead))
    views = views_of(core, layers, lambda size: View(size, from_row=True, is_causal=True))
    if views and not fields.has("dflash_config"):
        raise core.bad("layer_types", "full attention, as all of DeepSpec's heads have it, without a dflash_config")
    if fields.has("is_causal"):
        is_causal = fields.flag("is_causal", default=False)
        views = tuple(view._replace(is_causal=is_causal) for view in views or (View(),) * layers)
    if any(0 < view.within < rows for view in views):
        raise core.bad(
            "sliding_window", f"at least block_size, {rows}: writers disagree on the meaning of smaller windows"
        )
    return views


def read_block_taps(files: HeadFiles) -> tuple[tuple[int, ...], str]:
    """Return the hidden states that a block head reads, and where they are stated; speculators numbers inputs of layers."""
    fields = files.fields
    nested = fields.inner("dflash_config")
    name = "aux_hidden_state_layer_ids"
    if inputs := fields.wholes(name):
        return inputs, f"{name}: the inputs of these layers"
    name = "target_layer_ids"
    if outputs := fields.wholes(name, least=-1) or nested.wholes(name, least=-1):
        return tuple(one + 1 for one in outputs), f"{name}: the outputs of the layers before these"
    raise BadHead(f"{files.where}: config.json lacks target_layer_ids, the layers whose hidden states the head reads")


def _is_anchored(fields: Fields) -> bool:
    """Return whether the row of the root makes the first draft: by default in DSpark heads and all heads of DeepSpec."""
    nested = fields.inner("dflash_config")
    if fields.has("speculators_model_type"):
        is_dspark = fields.text("speculators_model_type") == "dspark"
        return fields.flag("sample_from_anchor", default=is_dspark)
    projector = nested.text("projector_type")
    if projector not in PROJECTORS:
        raise nested.bad("projector_type", f"one of {', '.join(filter(None, PROJECTORS))}, or null")
    named = any("DSpark" in name for name in fields.texts("architectures"))
    shifts = nested.flag("shift_label", default=False) and projector == "domino"
    return fields.flag("sample_from_anchor", default=named or shifts or projector == "dspark")


def _usual_name(name: str) -> str:
    for other, usual in OTHER_NAMES.items():
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name
