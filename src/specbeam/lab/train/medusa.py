"""New Medusa heads, and their files in Medusa's own format."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import Int64
from torch import Tensor, nn

from specbeam.core import write_whole
from specbeam.lab.train.eagle3 import own_head
from specbeam.lab.train.head_files import as_written
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import FeatureSizes, Head, Medusa

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def new_medusa(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> Medusa:
    """Return new Medusa heads, one for each depth, which at first give the target's law of the next token.

    They know all tokens: their format has no separate vocabulary.
    """
    width = int(target.config.get_text_config().hidden_size)
    head = Medusa(FeatureSizes(width, plan.draft_vocab, plan.draft_vocab, plan.depth), plan.layers)
    head.matrices = nn.ModuleList(own_head(target, None) for _ in range(plan.depth))
    for name, weight in head.named_parameters():
        if "linear" in name:
            nn.init.zeros_(weight)
    return head


def save_medusa(head: Head, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
    """Write Medusa heads as FasterDecoding/Medusa does."""
    from safetensors.torch import save

    assert isinstance(head, Medusa)
    tensors: dict[str, Tensor] = {}
    for name, weight in head.named_parameters():
        kind, number, *rest = name.split(".")
        place = str(plan.layers) if kind == "matrices" else rest.pop(0)
        tensors[".".join([number, place, *rest])] = as_written(weight)
    config = {
        "medusa_num_heads": plan.depth,
        "medusa_num_layers": plan.layers,
        "base_model_name_or_path": target.config.name_or_path or None,
        "hidden_size": head.sizes.width,
        "vocab_size": head.sizes.vocab,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "medusa_lm_head.safetensors", save(tensors, metadata={"format": "pt"}))
    write_whole(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
