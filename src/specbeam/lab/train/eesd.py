"""New EESD heads: an exit layer after the target's first layers (arXiv 2406.03853).

No code of the paper is public. Our choice is to initialise the layer and its norm from the target's last layer and
norm: logits make sense from the start.
"""

from typing import TYPE_CHECKING

from jaxtyping import Int64
from torch import Tensor

from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import ExitHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def new_eesd(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> ExitHead:
    """Return a new exit head; its output matrix is the target's, so it knows all tokens."""
    assert plan.exit_layer is not None
    return ExitHead(target, plan.exit_layer)
