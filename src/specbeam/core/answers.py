"""The results of a pass for each row: logits, and on request the likeliest tokens and hidden states."""

import torch
from jaxtyping import Float

from specbeam.core.records import Needs, Ranked, Scored

LOGITS = Needs(logits=True)  # the needs of a session whose parts state none
_NONE = torch.zeros(0, 0)


def scored_rows(
    needs: Needs,
    logits: Float[torch.Tensor, "nodes vocab"],
    hidden: Float[torch.Tensor, "states size"] = _NONE,
    prompt: Float[torch.Tensor, "rows size"] = _NONE,
) -> Scored:
    """Return the rows of a pass as `Scored`, with only the fields that `needs` names.

    Args:
        logits: of the nodes that the pass scored.
        hidden: hidden states of the same nodes after the final norm, or none.
        prompt: hidden states of rows before the first root, or none.
    """
    return Scored(
        logits=logits if needs.logits else _NONE,
        ranked=ranked_rows(logits, needs.ranked) if needs.ranked else Scored.ranked,
        hidden=hidden,
        prompt=prompt,
    )


def ranked_rows(logits: Float[torch.Tensor, "nodes vocab"], count: int) -> Ranked:
    """Return the `count` likeliest tokens of each row, best first, on the device of the logits.

    Tokens with equal logits are in the order of the vocabulary.
    """
    count = min(count, logits.shape[1])
    values, tokens = logits.topk(count, dim=-1)
    reaching = (logits >= values[:, -1:]).sum(-1)
    if bool((reaching > count).any()):  # `topk` breaks ties in no defined order
        values, tokens = (column[:, :count] for column in logits.sort(dim=-1, descending=True, stable=True))
    else:
        tokens, order = tokens.sort(-1)
        values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, order)
    return Ranked(logits.float().logsumexp(-1), tokens, values)
