"""FSPAD heads that are to be trained: EAGLE-1 heads with feature sampling and partial alignment (arXiv 2408.15562).

No code of the paper is public. The two modules are our reading of its text: the token that was drawn changes the feature
through a gate, and a small network stands between the states that estimate the target's and those that make logits, so that
the two aims pull less at one another.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import Int64
from torch import Tensor

from specbeam.core import FINAL
from specbeam.lab.train.eagle3 import first_weights, layer_sizes, own_embedding, own_head
from specbeam.lab.train.head_files import target_rope, write_head
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import Head, PairTrunk, Rotary, TrunkShape, own_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_GRADIENT = 0.5  # share of the logits' gradient that reaches the states


def new_fspad(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> PairTrunk:
    """Return a new FSPAD head as wide as the target; its states estimate the target's last hidden states.

    Its embedding is the target's, and so is the matrix that makes logits, unless the head has a separate vocabulary.
    """
    sizes = layer_sizes(target, plan)
    shape = TrunkShape(
        sizes=sizes,
        layers=plan.layers,
        taps=(FINAL,),
        target_width=sizes.width,
        pairs="projection",
        draft_vocab=plan.draft_vocab,
        norms_output=False,
        sampling=2 * sizes.width,
        alignment=sizes.width,
        logit_gradient=LOGIT_GRADIENT,
    )
    logits = own_head(target, tokens)
    logits.weight.requires_grad_(tokens is not None)
    trunk = PairTrunk(shape, Rotary(sizes, *target_rope(target)), own_embedding(target), logits, tokens)
    first_weights(trunk)
    return trunk


def save_fspad(head: Head, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
    """Write an FSPAD head in specbeam's format, without the target's weights."""
    assert isinstance(head, PairTrunk)
    leaves_out = ("embed_tokens.",) if head.tokens is not None else ("embed_tokens.", "lm_head.")
    write_head(head, own_config("fspad", head, target), folder, target, leaves_out)
