"""Readers of EAGLE heads: EAGLE-1, EAGLE-2 and HASS, and EAGLE-3 as its five writers store it.

The writers differ in names, in defaults, and in how they number the hidden states that a head reads. A wrong reading changes
no law, it only makes worse drafts.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from specbeam.engines.eligibility import layers_of
from specbeam.errors import BadHead
from specbeam.heads.files import HeadFiles
from specbeam.heads.layers import LayerSizes, Rotary
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
    width = width_of(target)
    if files.number("hidden_size") != width:
        raise BadHead(f"{files.where} has rows of {config['hidden_size']}, and the target's are of {width}")
    has_bias = files.flag("bias", default=files.has("fc.bias"))
    heads = files.whole("num_attention_heads")
    sizes = LayerSizes(
        width=width,
        reads=width,
        heads=heads,
        kv_heads=files.whole("num_key_value_heads", heads),
        head_size=width // heads,
        inner=files.whole("intermediate_size"),
        eps=float(files.number("rms_norm_eps", 1e-6)),
        has_bias=files.flag("qkv_bias", default=False),
    )
    layers = files.whole("num_hidden_layers", 1)
    vocab = head_of(target).weight.shape[0]
    shape = TrunkShape(sizes, layers, (FINAL,), width, "projection", vocab, joins_bias=has_bias, norms_output=False)
    rotary = Rotary(sizes, _rope_of_eagle(config), positions_of(config))
    trunk = PairTrunk(shape, rotary, embedding_of(files, target, width), head_of(target))
    fill(trunk, files, target)
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
    width = width_of(target)
    states = files.tensors["fc.weight"].shape[1] if files.has("fc.weight") else 0
    chosen, how = (taps, "as asked for") if taps is not None else read_taps(config, target, states // width)
    check_taps(files, target, chosen, how)
    sizes = layer_sizes(files, core)
    is_speculators = "speculators_model_type" in config
    shape = TrunkShape(
        sizes=sizes,
        layers=files.whole("num_hidden_layers", 1, core),
        taps=chosen,
        target_width=width,
        pairs="attention",
        draft_vocab=files.whole("draft_vocab_size", files.number("vocab_size", among=core)),
        joins_bias="fc.bias" in files.tensors,
        norms_features=_norms_of_features(files),
        norms_residual=files.flag("norm_before_residual", default=False),
        # SpecForge's field of the same name says something else: its heads feed back states before the norm.
        feeds_normed=is_speculators and files.flag("norm_output", default=False),
    )
    rotary = Rotary(sizes, rope_of(core), positions_of(core))
    embedding = embedding_of(files, target, sizes.width)
    head = own_head(files, shape.draft_vocab, sizes.width, embedding, target)
    tokens = read_tokens(files, shape.draft_vocab, head_of(target).weight.shape[0])
    trunk = PairTrunk(shape, rotary, embedding, head, tokens)
    fill(trunk, files, target)
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
    if count in (0, 3):
        return default, "the default of all writers"
    raise BadHead(f"the head reads {count} hidden states, and its config.json does not say which layers they enter")


def _norms_of_features(files: HeadFiles) -> str:
    """Return how hidden states are normed before they become a feature; the tensors tell."""
    if "input_norm.weight" in files.tensors:
        return "all"
    return "each" if "fc_norm.0.weight" in files.tensors else "no"


def _rope_of_eagle(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the positions of an EAGLE-1 head: its writer takes 10000 whenever they are scaled."""
    if config.get("rope_scaling"):
        return rope_of({"rope_scaling": config["rope_scaling"]})
    return rope_of(config)
