"""Losses of training: the probability that a draft token is rejected, and the cross-entropy to the target's law."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specbeam.models.heads import DraftRows


class Lesson(NamedTuple):
    """The drafts of a head on a batch of trees."""

    drafts: list[DraftRows]  # by depth, see `Head.drafts`
    other: Float[Tensor, ""] | None = None  # the head's own loss, if it has one
    share: float = 0.0  # share of `other` in the whole loss; the loss of the drafts has the rest


def overlap(
    logits: Float[Tensor, "laws vocab"],
    ids: Int64[Tensor, "laws kept"],
    logp: Float[Tensor, "laws kept"],
    known: Bool[Tensor, "laws kept"] | None = None,
) -> tuple[Float[Tensor, " laws"], Float[Tensor, " laws"]]:
    """Return the overlap of each draft law q with the target's law p, and the cross-entropy of q to p in nats.

    The overlap is the sum over tokens of min(p, q), the probability that a token drawn from q is accepted; one minus it
    is the total variation. All tokens with unknown p count as a single token, so the overlap is an upper bound, by at
    most their probability, and the cross-entropy a lower bound.

    Args:
        logits: logits of the draft.
        ids: the tokens whose probability under the target is known, distinct in each row.
        logp: log-probabilities of these tokens.
        known: whether each of these tokens is in the draft's vocabulary, at the place in `ids`; others have probability 0 in
            the draft, and are left out of the cross-entropy. None: all are.
    """
    logq = logits.float().log_softmax(-1).gather(-1, ids)
    p = logp.exp()
    q = logq.exp()
    if known is not None:
        logq = logq * known
        q = q * known
    rest_p = (1 - p.sum(-1)).clamp_min(0)
    rest_q = (1 - q.sum(-1)).clamp_min(0)
    accepted = torch.minimum(p, q).sum(-1) + torch.minimum(rest_p, rest_q)
    surprise = -(p * logq).sum(-1) - rest_p * (rest_q + 1e-9).log()
    return accepted, surprise


def draft_loss(
    accepted: Float[Tensor, " laws"],
    surprise: Float[Tensor, " laws"],
    weights: Float[Tensor, " laws"],
    variation: float,
) -> Float[Tensor, ""]:
    """Return the loss of a batch, the mean over laws by weight.

    Args:
        accepted: the overlap of each pair of laws.
        surprise: the cross-entropy of each pair.
        weights: how much each law counts.
        variation: the share of total variation, in [0, 1]; cross-entropy has the rest. Speed depends on total variation, but
            its gradient is zero at tokens with too large q, and small at tokens with small q, so it learns slowly alone. It
            is multiplied by 4, so that its gradients are about as large as the cross-entropy's.
    """
    each = (1 - variation) * surprise + variation * 4 * (1 - accepted)
    return (each * weights).sum() / weights.sum()
