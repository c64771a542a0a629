"""Files of trained heads, in the formats of speculators 0.9.0 and specbeam."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specbeam.core import write_whole
from specbeam.engines import output_shape
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import Head, LayerSizes, Rotary, own_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPECULATORS = "0.9.0"


def target_rope(target: "PreTrainedModel") -> tuple[dict[str, Any], int]:
    """Return the rotary parameters of a target and its number of positions, for a head.

    Heads for a target without rotary positions, or with several kinds of them, get the default ones.
    """
    config = target.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    if "rope_theta" not in rope:
        return {"rope_type": "default", "rope_theta": 10000.0}, positions
    return {"rope_type": "default", **rope}, positions


def frame_of(kind: str, architecture: str, target: "PreTrainedModel", plan: HeadPlan) -> dict[str, Any]:
    """Return the fields that all heads in speculators' format have."""
    return {
        "speculators_model_type": kind,
        "architectures": [architecture],
        "speculators_version": SPECULATORS,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": plan.depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target.config.name_or_path or None,
                "architectures": [type(target).__name__],
            },
        },
    }


def layer_config(target: "PreTrainedModel", sizes: LayerSizes, layers: int, rotary: Rotary) -> dict[str, Any]:
    """Return the configuration of a head's layers, as transformers has it for a Llama, or for a Qwen3 with norms by head."""
    return {
        "model_type": "qwen3" if sizes.norms_heads else "llama",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": sizes.eps,
        "max_position_embeddings": rotary.positions,
        "rope_parameters": rotary.rope,
        "vocab_size": int(target.get_input_embeddings().weight.shape[0]),
        "tie_word_embeddings": False,
    }


def write_head(
    head: Head, config: dict[str, Any], folder: Path, target: "PreTrainedModel", leaves_out: tuple[str, ...] = ()
) -> None:
    """Write the configuration and the weights of a head (`as_written`), with the maps of a separate vocabulary.

    Each file is written atomically.

    Args:
        leaves_out: prefixes of the names of weights that are not written.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {
        name: as_written(weight) for name, weight in head.named_parameters() if not name.startswith(leaves_out)
    }
    if head.tokens is not None:
        tokens = head.tokens.cpu()
        is_drafted = torch.zeros(output_shape(target)[0], dtype=torch.bool)
        is_drafted[tokens] = True
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = is_drafted
    write_whole(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_whole(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def of_target(head: Head) -> tuple[str, ...]:
    """Return prefixes of the names of weights that a head shares with its target."""
    return ("embed_tokens.",) if head.tokens is not None else ("embed_tokens.", "lm_head.")


def save_own(kind: str, head: Any, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
    """Write a head of this kind in specbeam's own format, without the target's weights."""
    write_head(head, own_config(kind, head, target), folder, target, of_target(head))


def as_written(weight: Tensor) -> Tensor:
    """Return a weight of a head as it is written: bfloat16 if it was trained or if that loses nothing, else float32.

    A head's pass takes about as long as reading its weights, and engines store exact bfloat16 numbers in half the memory.
    """
    wide = weight.detach().float().cpu().contiguous()
    short = wide.bfloat16()
    return short if weight.requires_grad or torch.equal(short.float(), wide) else wide
