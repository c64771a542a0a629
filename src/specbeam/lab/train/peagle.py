"""New P-EAGLE heads, and their files in speculators' format."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Int64
from torch import Tensor, nn

from specbeam.lab.train.dspark import mask_of
from specbeam.lab.train.eagle3 import eagle3_config, first_weights, own_embedding, own_head, trunk_shape
from specbeam.lab.train.head_files import target_rope, write_head
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import Head, MaskTrunk, Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def new_peagle(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> MaskTrunk:
    """Return a new P-EAGLE head as wide as the target, whose blocks have `plan.depth` rows.

    Its embedding is the target's and is not trained; its output matrix begins as the target's rows of its tokens. The vector
    that mask rows read in place of a feature begins at random, and passes the same norms.
    """
    shape = trunk_shape(target, plan)
    rotary = Rotary(shape.sizes, *target_rope(target))
    mask = mask_of(target)
    trunk = MaskTrunk(shape, rotary, own_embedding(target), own_head(target, tokens), mask, plan.depth, tokens)
    first_weights(trunk)
    nn.init.normal_(trunk.mask_hidden)
    return trunk


def save_peagle(head: Head, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
    """Write a P-EAGLE head in speculators' format; all flags are written, because readers differ in their defaults."""
    assert isinstance(head, MaskTrunk)
    config: dict[str, Any] = {
        **eagle3_config(head, target, plan, "peagle", "PEagleDraftModel"),
        "mask_token_id": head.mask,
    }
    write_head(head, config, folder, target)
