"""New SpecDiff heads, which are denoisers of masked diffusion (arXiv 2408.05636), and their additional loss.

Some blocks are learned with all drafts masked, as for drafts in one step, from the target's laws. In each other
block a random share of the drafts is masked and learned from the tokens that the target drew.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from specbeam.lab.train.dspark import mask_of
from specbeam.lab.train.eagle3 import first_weights, layer_sizes, own_embedding, shared_head
from specbeam.lab.train.head_files import target_rope
from specbeam.lab.train.losses import Lesson
from specbeam.lab.train.plan import HeadPlan
from specbeam.models.heads import NO_TOKEN, BlockShape, Denoiser, Head, Rotary, ScoredTrees

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST = 10.0  # weight of a masked draft; without a limit, blocks with few masked drafts would dominate


def new_specdiff(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> Denoiser:
    """Return a new SpecDiff head as wide as the target, with blocks of `plan.depth` drafts.

    Its embedding is the target's, and so is the matrix that makes logits, unless the head has a separate vocabulary. The
    embedding of the mask begins as the embedding of a token that does not occur in texts.
    """
    sizes = layer_sizes(target, plan, norms_heads=True)
    shape = BlockShape(
        sizes=sizes,
        layers=plan.layers,
        taps=plan.taps,
        target_width=sizes.width,
        rows=plan.depth + 1,
        first_row=1,
        draft_vocab=plan.draft_vocab,
    )
    logits = shared_head(target, tokens)
    head = Denoiser(shape, Rotary(sizes, *target_rope(target)), own_embedding(target), logits, tokens)
    first_weights(head)
    unused = torch.tensor(mask_of(target), device=head.embed_tokens.weight.device)
    head.mask_embedding.data = head.embed_tokens(unused).detach().clone()
    return head


def masked_lesson(head: Head, trees: ScoredTrees, learnt: Bool[Tensor, "rows length"], plan: HeadPlan) -> Lesson:
    """Return the drafts of a denoiser in one step, and its loss as a denoiser; each of a random part of the blocks.

    Draws from torch's own stream of random numbers.

    Args:
        learnt: the nodes whose children the target drew.
    """
    assert isinstance(head, Denoiser)
    if plan.shown == 0:
        return Lesson(head.drafts(trees, plan.depth, learnt))
    shape = trees.tokens.shape
    device = trees.tokens.device
    depth = head.shape.depth
    is_whole = torch.rand(shape, device=device) >= plan.shown
    masked_share = 1 - torch.rand(shape, device=device)  # in (0, 1]
    drafts = nodes_below(trees.parents, depth)
    tokens = trees.tokens.gather(1, drafts.clamp_min(0).flatten(1)).view_as(drafts)
    is_there = (drafts >= 0) & ~is_whole[..., None]
    is_masked = torch.rand(drafts.shape, device=device) < masked_share[..., None]
    known = torch.where(is_there & ~is_masked, tokens, NO_TOKEN)
    rows = head.blocks(trees.tokens, trees.depths, head.attend_in(trees), known)
    one_step = head.drafts_in(rows, trees, plan.depth, learnt, is_whole)
    anchors = torch.arange(shape[1], device=device).expand(shape)
    parents = torch.cat([anchors[..., None], drafts[..., :-1]], -1)
    is_drawn = is_there & learnt.gather(1, parents.clamp_min(0).flatten(1)).view_as(drafts)
    weights = (is_drawn & is_masked) * (1 / masked_share[..., None]).clamp_max(LARGEST)
    loss = denoising_loss(head, rows[:, :, head.shape.first_row :], tokens, weights, is_drawn)
    return Lesson(one_step, loss, plan.shown)


def denoising_loss(
    head: Denoiser,
    rows: Float[Tensor, "trees length drafts width"],
    tokens: Int64[Tensor, "trees length drafts"],
    weights: Float[Tensor, "trees length drafts"],
    is_drawn: Bool[Tensor, "trees length drafts"],
) -> Float[Tensor, ""]:
    """Return the weighted cross-entropy of masked drafts, by the number of drafts, masked or not.

    With weights of one over the probability of being masked, this is the bound of absorbing diffusion. Drafts outside
    the head's vocabulary are left out.
    """
    counted = weights > 0
    wanted = tokens[counted]
    if head.tokens is not None:
        own = head.tokens.to(wanted.device)
        number = torch.searchsorted(own, wanted).clamp_max(len(own) - 1)
        counted = counted.clone()
        counted[counted.clone()] = own[number] == wanted
        wanted = number[own[number] == wanted]
    surprise = functional.cross_entropy(head.lm_head(rows[counted]).float(), wanted, reduction="none")
    return (surprise * weights[counted]).sum() / is_drawn.sum().clamp_min(1)


def nodes_below(parents: Int64[Tensor, "rows length"], count: int) -> Int64[Tensor, "rows length count"]:
    """Return a random path of `count` nodes below each node, as columns; -1 where the tree has ended.

    Paths below the nodes of a tree take the same child wherever they meet.
    """
    rows, length = parents.shape
    has_parent = parents >= 0
    starts = length * torch.arange(rows, device=parents.device)[:, None]
    above = (parents + starts)[has_parent]
    lot = torch.rand(parents.shape, device=parents.device)[has_parent]
    largest = torch.full((rows * length,), -1.0, device=parents.device).scatter_reduce(0, above, lot, "amax")
    is_chosen = lot == largest[above]
    column = torch.arange(length, device=parents.device).expand_as(parents)[has_parent]
    child = torch.full((rows * length,), -1, device=parents.device)
    child[above[is_chosen]] = column[is_chosen]
    child = child.view(rows, length)
    path = [child]
    for _ in range(count - 1):
        last = path[-1]
        path.append(torch.where(last >= 0, child.gather(1, last.clamp_min(0)), -1))
    return torch.stack(path, -1)
