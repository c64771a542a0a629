"""New EAGLE-3 heads, their files in speculators' format, and parts that new heads of other kinds share."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Int64
from torch import Tensor, nn

from specbeam.lab.train.head_files import frame_of, layer_config, target_rope, write_head
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import Head, LayerSizes, PairTrunk, Rotary, TrunkShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_sizes(target: "PreTrainedModel", plan: HeadPlan, norms_heads: bool = False) -> LayerSizes:
    """Return the sizes of a layer that is as wide as the target."""
    config = target.config.get_text_config()
    width = int(config.hidden_size)
    heads = int(config.num_attention_heads)
    return LayerSizes(
        width=width,
        reads=width,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or width // heads),
        inner=plan.inner,
        eps=1e-6,
        norms_heads=norms_heads,
    )


def new_eagle3(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> PairTrunk:
    """Return a new EAGLE-3 head as wide as the target, with the norms and the feedback of EAGLE-3.1.

    Its embedding is the target's and is not trained; its output matrix begins as the target's rows of its tokens.
    """
    shape = trunk_shape(target, plan, feeds_normed=True)
    rotary = Rotary(shape.sizes, *target_rope(target))
    trunk = PairTrunk(shape, rotary, own_embedding(target), own_head(target, tokens), tokens)
    first_weights(trunk)
    return trunk


def trunk_shape(target: "PreTrainedModel", plan: HeadPlan, feeds_normed: bool = False) -> TrunkShape:
    """Return the shape of a trunk as wide as the target, whose features are normed one by one."""
    sizes = layer_sizes(target, plan)
    return TrunkShape(
        sizes=sizes,
        layers=plan.layers,
        taps=plan.taps,
        target_width=sizes.width,
        pairs="attention",
        draft_vocab=plan.draft_vocab,
        norms_features="each",
        feeds_normed=feeds_normed,
    )


def own_embedding(target: "PreTrainedModel") -> nn.Embedding:
    """Return a copy of the target's embedding, float32, that is not trained; with its scale, if it has one (Gemma)."""
    embedding: Any = copy.deepcopy(target.get_input_embeddings())
    frozen: nn.Embedding = embedding.float().requires_grad_(False)
    return frozen


def own_head(target: "PreTrainedModel", tokens: Int64[Tensor, " draft_vocab"] | None) -> nn.Linear:
    """Return a copy of the target's output matrix, float32: its rows of these tokens; None: all rows."""
    rows: Tensor = target.get_output_embeddings().weight.detach().float()
    rows = rows.clone() if tokens is None else rows[tokens.to(rows.device)]
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    head.weight = nn.Parameter(rows)
    return head


def shared_head(target: "PreTrainedModel", tokens: Int64[Tensor, " draft_vocab"] | None) -> nn.Linear:
    """Return the target's output matrix, which is trained only if the head has a separate vocabulary; see `own_head`."""
    head = own_head(target, tokens)
    head.weight.requires_grad_(tokens is not None)
    return head


def first_weights(head: Head) -> None:
    """Initialise the inner matrices of a head: normal, with a deviation that keeps the size of rows."""
    for name, weight in head.named_parameters():
        if weight.ndim == 2 and not name.startswith(("embed_tokens.", "lm_head.")):
            nn.init.normal_(
                weight, std=weight.shape[1] ** -0.5 * (0.5 if "o_proj" in name or "down_proj" in name else 1)
            )


def save_eagle3(head: Head, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
    """Write an EAGLE-3 head in speculators' format; all flags are written, because readers differ in their defaults."""
    assert isinstance(head, PairTrunk)
    write_head(head, eagle3_config(head, target, plan, "eagle3", "Eagle3DraftModel"), folder, target)


def eagle3_config(
    head: PairTrunk, target: "PreTrainedModel", plan: HeadPlan, kind: str, architecture: str
) -> dict[str, Any]:
    """Return the configuration of an EAGLE-3 head, or one of a kind that has the same fields.

    Args:
        kind: name of the kind in speculators.
        architecture: class that loads such heads in speculators.
    """
    shape = head.shape
    return {
        **frame_of(kind, architecture, target, plan),
        "transformer_layer_config": layer_config(target, shape.sizes, shape.layers, head.rotary),
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": shape.norms_residual,
        "norm_before_fc": shape.norms_features == "all",
        "fc_norm": shape.norms_features == "each",
        "norm_output": shape.feeds_normed,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "embed_requires_grad": False,
        "target_hidden_size": None,
    }
