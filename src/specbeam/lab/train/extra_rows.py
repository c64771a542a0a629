"""Heads that are extra rows in the target's pass: new heads, their files, and the probabilities of their top tokens."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specbeam.errors import NotSupported
from specbeam.lab.train.head_files import write_head
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import Bita, ExtraHead, Head, HiddenTransfer, StoredTrees, chain_of, extra_rows_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RANKS = 16  # number of likeliest tokens whose probabilities are saved with a head


def new_bita(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " none"] | None) -> Bita:
    """Return new soft prompts and mask embeddings.

    The prompts begin as keys and values of the target on tokens from all over its vocabulary, and the masks as the mean of
    its embeddings: learning starts from rows of a size that its layers know.

    Raises `NotSupported` if the target's layers store keys and values of different sizes.
    """
    embedding = target.get_input_embeddings()
    vocab = embedding.weight.shape[0]
    device = embedding.weight.device
    count = max(plan.prefix, 1)
    spread = (torch.arange(count, device=device) * vocab + vocab // 2) // count
    cached = StoredTrees(target, chain_of(spread % vocab, {})).cache.layers
    shapes = set()
    for layer in cached:
        shapes |= {tuple(layer.keys.shape), tuple(layer.values.shape)}
    if len(shapes) > 1:
        raise NotSupported(f"{type(target).__name__} stores keys and values of different sizes: {sorted(shapes)}")
    _, kv_heads, _, size = shapes.pop()
    with torch.no_grad():
        mean = embedding(torch.arange(vocab, device=device)).float().mean(0)
    head = Bita(target, plan.depth, (len(cached), kv_heads, plan.prefix, size), len(mean))
    with torch.no_grad():
        for number, layer in enumerate(cached):
            head.keys[number].copy_(layer.keys[0, :, : plan.prefix])
            head.values[number].copy_(layer.values[0, :, : plan.prefix])
        head.masks.weight.copy_(mean)
    return head


def new_hidden_transfer(
    target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " none"] | None
) -> HiddenTransfer:
    """Return new maps, which are the identity: each pseudo state begins as the state of the token itself."""
    width = int(target.config.get_text_config().hidden_size)
    return HiddenTransfer(target, plan.depth, plan.enters, width)


class RankedDrafts(NamedTuple):
    """Drafts of one depth, and the laws that the target has there."""

    logits: Float[Tensor, "drafts vocab"]
    ids: Int64[Tensor, "drafts kept"]  # the target's likeliest tokens
    logp: Float[Tensor, "drafts kept"]  # their log-probabilities
    weights: Float[Tensor, " drafts"]


def rank_odds(batches: Iterable[list[RankedDrafts]]) -> tuple[tuple[float, ...], ...]:
    """Return, by depth, the mean probability under the target of the head's likeliest token, of the second, and so on.

    This is the probability that a child of that rank is the target's next token, given its parent. Tokens whose
    probability under the target is not stored count as impossible.

    Args:
        batches: drafts by batch and depth.
    """
    sums: list[Tensor] = []
    weights: list[float] = []
    for batch in batches:
        for depth, (logits, ids, logp, weight) in enumerate(batch):
            if depth == len(sums):
                sums.append(torch.zeros(RANKS, dtype=torch.float64))
                weights.append(0.0)
            best = logits.topk(min(RANKS, logits.shape[-1]), -1).indices
            is_same = best[..., None] == ids[:, None]
            odds = (is_same * logp.exp()[:, None]).sum(-1)
            weighted = odds * weight[:, None]
            sums[depth][: odds.shape[1]] += weighted.sum(0).double().cpu()
            weights[depth] += float(weight.sum())
    return tuple(
        tuple((total / weight).clamp(0, 1).tolist()) for total, weight in zip(sums, weights, strict=True) if weight
    )


def save_extra_rows(head: Head, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
    """Write a head of extra rows in specbeam's own format."""
    assert isinstance(head, ExtraHead)
    write_head(head, extra_rows_config(head), folder, target)
