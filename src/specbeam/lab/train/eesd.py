"""EESD heads that are to be trained: an exit layer behind the target's first layers (arXiv 2406.03853), and their files.

No code of the paper is public. That the layer begins as the target's last one, with its norm, is our choice: its logits make
sense from the start.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import Int64
from torch import Tensor

from specbeam.lab.train.head_files import write_head
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import ExitHead, Head, own_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def new_eesd(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> ExitHead:
    """Return a new exit head; the matrix that makes its logits is the target's, so it knows all tokens."""
    assert plan.exit_layer is not None
    return ExitHead(target, plan.exit_layer)


def save_eesd(head: Head, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
    """Write an exit head in our own format."""
    assert isinstance(head, ExitHead)
    write_head(head, own_config("eesd", head, target), folder, target)
