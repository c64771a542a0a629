"""New DSpark heads, and their files in speculators' format."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Int64
from torch import Tensor

from specbeam.lab.train.eagle3 import first_weights, layer_sizes, own_embedding, shared_head
from specbeam.lab.train.head_files import frame_of, layer_config, of_target, target_rope, write_head
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import BlockHead, BlockShape, Head, Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def new_dspark(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> BlockHead:
    """Return a new DSpark head as wide as the target: anchored blocks of `plan.depth` rows, a correction, a confidence.

    Its embedding is the target's, and so is the matrix that makes logits, unless the head has a separate vocabulary.
    """
    sizes = layer_sizes(target, plan, norms_heads=True)
    shape = BlockShape(
        sizes=sizes,
        layers=plan.layers,
        taps=plan.taps,
        target_width=sizes.width,
        rows=plan.depth,
        first_row=0,
        draft_vocab=plan.draft_vocab,
        correction="vanilla",
        rank=plan.rank,
        has_confidence=True,
        confidence_reads_token=True,
    )
    logits = shared_head(target, tokens)
    head = BlockHead(shape, Rotary(sizes, *target_rope(target)), own_embedding(target), logits, mask_of(target), tokens)
    first_weights(head)
    head.markov_head.markov_w2.weight.data.zero_()  # the correction starts at zero
    return head


def mask_of(target: "PreTrainedModel") -> int:
    """Return the token whose embedding stands for an unknown token: one that does not occur in texts.

    That is the padding token, if it has an embedding that is not zero (rows of zeros would all be alike) and does not also
    end or begin texts, or else the last token whose embedding is not zero.
    """
    rows = target.get_input_embeddings().weight.detach().float()
    config = target.config.get_text_config()
    padding = config.pad_token_id
    others = {
        config.bos_token_id,
        *(config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]),
    }
    is_token = padding is not None and 0 <= padding < len(rows) and padding not in others
    if is_token and rows[padding].abs().sum() > 0:
        return int(padding)
    return int(rows.abs().sum(-1).nonzero()[-1, 0])


def save_dspark(head: Head, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
    """Write a DSpark head in speculators' format, without the target's weights."""
    assert isinstance(head, BlockHead)
    shape = head.shape
    layers = layer_config(target, shape.sizes, shape.layers, head.rotary)
    config: dict[str, Any] = {
        **frame_of("dspark", "DSparkDraftModel", target, plan),
        "transformer_layer_config": {**layers, "layer_types": ["full_attention"] * shape.layers},
        "draft_vocab_size": shape.draft_vocab,
        "block_size": shape.rows,
        "mask_token_id": head.mask,
        "aux_hidden_state_layer_ids": list(shape.taps),
        "target_hidden_size": None,
        "sample_from_anchor": shape.first_row == 0,
        "sliding_window_non_causal": False,
        "markov_rank": shape.rank,
        "markov_head_type": shape.correction,
        "enable_confidence_head": shape.has_confidence,
        "confidence_head_with_markov": shape.confidence_reads_token,
    }
    write_head(head, config, folder, target, of_target(head))
