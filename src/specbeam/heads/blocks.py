"""Readers of block heads: DFlash and DSpark, as z-lab, SpecForge, DeepSpec and speculators store them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbeam.errors import BadHead
from specbeam.heads.block import BlockHead, BlockShape
from specbeam.heads.files import HeadFiles
from specbeam.heads.layers import Rotary
from specbeam.heads.reading import (
    check_taps,
    embedding_of,
    fill,
    head_of,
    layer_sizes,
    own_head,
    positions_of,
    rope_of,
    width_of,
)
from specbeam.heads.vocabulary import read_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OTHER_NAMES = {
    "encoder.fc.": "fc.",
    "context_proj.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
}
REFUSED = {
    "prefix_gru.": "Domino heads",
    "candidate_selector.": "DFlash2 heads",
    "refiner_head.": "XPress heads",
    "markov_head.joint_proj.": "DSpark heads with a recurrent correction",
}
REFUSED_FIELDS = (  # of layers and laws that are not computed here
    "use_swa",
    "use_gemma_norm",
    "attention_value_scale",
    "attention_sink_bias",
    "output_multiplier",
    "final_logit_softcapping",
)


def is_block(config: Mapping[str, Any]) -> bool:
    """Return whether files with this configuration hold a block head."""
    return (
        config.get("speculators_model_type") in ("dflash", "dspark", "dflash2", "xpress")
        or "dflash_config" in config
        or any("DFlash" in name or "DSpark" in name for name in config.get("architectures") or [])
    )


def read_block(files: HeadFiles, target: "PreTrainedModel", taps: tuple[int, ...] | None = None) -> BlockHead:
    """Return a DFlash or DSpark head.

    Args:
        taps: the hidden states that it reads, see `Needs.taps`; None: as its files say.

    Raises `BadHead` if it cannot be read.
    """
    files.tensors = {_usual_name(name): one for name, one in files.tensors.items()}
    for part, what in REFUSED.items():
        if known := [name for name in files.tensors if name.startswith(part)]:
            raise BadHead(f"{files.where} holds {known[0]}; {what} cannot be read")
    config = files.config
    core: Mapping[str, Any] = config.get("transformer_layer_config") or config
    nested: Mapping[str, Any] = config.get("dflash_config") or {}
    for field in REFUSED_FIELDS:
        if config.get(field) or nested.get(field):
            raise BadHead(f"{files.where}: {field} is set in config.json; block heads with it cannot be read")
    if "sliding_attention" in (core.get("layer_types") or []):
        raise BadHead(f"{files.where} has layers with a window (layer_types); block heads with windows cannot be read")
    chosen, how = (taps, "as asked for") if taps is not None else read_block_taps(files)
    check_taps(files, target, chosen, how)
    sizes = layer_sizes(files, core)
    vocab = head_of(target).weight.shape[0]
    reads_token = files.has("markov_head.markov_w1.weight")
    correction = "no"
    rank = 0
    if reads_token:
        correction = "gated" if files.has("markov_head.gate_proj.weight") else "vanilla"
        rank = files.tensors["markov_head.markov_w1.weight"].shape[1]
    has_confidence = files.has("confidence_head.proj.weight")
    shape = BlockShape(
        sizes=sizes,
        layers=files.whole("num_hidden_layers", among=core),
        taps=chosen,
        target_width=width_of(target),
        rows=files.whole("block_size", least=1 if _is_anchored(files) else 2),
        first_row=0 if _is_anchored(files) else 1,
        draft_vocab=files.whole("draft_vocab_size", vocab),
        correction=correction,
        rank=rank,
        has_confidence=has_confidence,
        confidence_reads_token=has_confidence and files.tensors["confidence_head.proj.weight"].shape[1] > sizes.width,
    )
    embedding = embedding_of(files, target, sizes.width)
    head = own_head(files, shape.draft_vocab, sizes.width, embedding, target)
    tokens = read_tokens(files, shape.draft_vocab, vocab)
    mask = files.whole("mask_token_id", among={**config, **nested}, least=0)
    if not 0 <= mask < embedding.weight.shape[0]:
        raise BadHead(f"{files.where}: mask_token_id is {mask}; the target has {embedding.weight.shape[0]} tokens")
    block = BlockHead(shape, Rotary(sizes, rope_of(core), positions_of(core)), embedding, head, mask, tokens)
    fill(block, files, target)
    files.check_all_taken()
    return block


def read_block_taps(files: HeadFiles) -> tuple[tuple[int, ...], str]:
    """Return the hidden states that a block head reads, and how they were found: speculators counts what enters layers."""
    config = files.config
    inputs = config.get("aux_hidden_state_layer_ids")
    if inputs:
        return _whole_numbers(files, inputs), "what enters these layers"
    outputs = config.get("target_layer_ids") or (config.get("dflash_config") or {}).get("target_layer_ids")
    if outputs:
        return tuple(one + 1 for one in _whole_numbers(files, outputs, -1)), "what leaves the layers before these"
    raise BadHead(
        f"{files.where}: config.json does not say which layers' hidden states the head reads (target_layer_ids)"
    )


def _whole_numbers(files: HeadFiles, found: Any, least: int = 0) -> tuple[int, ...]:
    """Return a list of the configuration as integers. Raises `BadHead` if it is none."""
    is_list = isinstance(found, list) and all(type(one) is int and one >= least for one in found)
    if not is_list:
        raise BadHead(f"{files.where}: the layers are {found!r} in config.json; they must be a list of integers")
    return tuple(found)


def _is_anchored(files: HeadFiles) -> bool:
    """Return whether the row of the root drafts first: in DSpark heads and all of DeepSpec's, unless they say otherwise."""
    config = files.config
    nested = config.get("dflash_config")
    is_dspark = config.get("speculators_model_type") == "dspark"
    if "speculators_model_type" not in config:
        named = any("DSpark" in name for name in config.get("architectures") or [])
        is_dspark = named or (nested or {}).get("projector_type") == "dspark"
    return files.flag("sample_from_anchor", default=is_dspark)


def _usual_name(name: str) -> str:
    for other, usual in OTHER_NAMES.items():
        if name.startswith(other):
            return usual + name.removeprefix(other)
    return name
