"""New Chimera heads (arXiv 2402.15758).

As in the paper's code, the head's features are trained to resemble the target's, with a weight from the plan.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from specbeam.lab.train.eagle3 import first_weights, layer_sizes, own_embedding, shared_head
from specbeam.lab.train.head_files import target_rope
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import Chimera, ChimeraShape, Rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def new_chimera(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> Chimera:
    """Return a new Chimera head as wide as the target, whose read-outs begin as the target's matrix, twice.

    Its embedding is the target's, and so is the matrix behind "shared" read-outs, unless the head has its own
    vocabulary.
    """
    sizes = layer_sizes(target, plan)
    shape = ChimeraShape(sizes, plan.depth, plan.draft_vocab, plan.read_out)
    logits = shared_head(target, tokens)
    is_own = plan.read_out == "own"
    rotary = Rotary(sizes, *target_rope(target))
    head = Chimera(shape, rotary, own_embedding(target), None if is_own else logits, tokens)
    first_weights(head)
    nn.init.zeros_(head.trigrams.block.linear.weight)
    nn.init.zeros_(head.trigrams.block.linear.bias)
    if is_own:
        for matrix in head.matrices:
            matrix.weight.data = torch.cat([logits.weight.data, logits.weight.data], 1)
    else:
        same = torch.eye(sizes.width)
        for matrix in head.maps:
            matrix.weight.data = torch.cat([same, same], 1)
    return head
