"""What a model answers for the rows of a pass: logits, and what is made from them on request."""

import torch
from jaxtyping import Float

from specbeam.records import Needs, Ranked, Scored

LOGITS = Needs(logits=True)  # what is asked for where nobody says what
_NONE = torch.zeros(0, 0)


def answered(
    needs: Needs,
    logits: Float[torch.Tensor, "nodes vocab"],
    hidden: Float[torch.Tensor, "states size"] = _NONE,
    prompt: Float[torch.Tensor, "rows size"] = _NONE,
) -> Scored:
    """Return what was asked for of these rows."""
    return Scored(
        logits=logits if needs.logits else _NONE,
        ranked=ranked_rows(logits, needs.ranked) if needs.ranked else Scored.ranked,
        hidden=hidden,
        prompt=prompt,
    )


def ranked_rows(logits: Float[torch.Tensor, "nodes vocab"], count: int) -> Ranked:
    """Return the `count` likeliest tokens of each row, where the logits are; of equal ones the first comes first."""
    count = min(count, logits.shape[1])
    values, tokens = logits.topk(count, dim=-1)
    reaching = (logits >= values[:, -1:]).sum(-1)
    if bool((reaching > count).any()):  # which of equal ones `topk` takes is not said
        values, tokens = (found[:, :count] for found in logits.sort(dim=-1, descending=True, stable=True))
    else:
        tokens, order = tokens.sort(-1)
        values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, order)
    return Ranked(logits.float().logsumexp(-1), tokens, values)
