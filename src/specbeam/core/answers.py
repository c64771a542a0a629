"""The results of a pass for each row: logits, and on request the likeliest tokens and hidden states."""

import numpy as np
import torch
from jaxtyping import Float

from specbeam.core.laws.listing import listed_rows
from specbeam.core.ranked import Listing, Ranked
from specbeam.core.records import Needs, Scored

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
    """Return lists of the `count` likeliest tokens of each row; equal logits are in the order of the vocabulary."""
    rows = logits.detach().float().cpu().contiguous().numpy()
    no_keys = np.zeros(0, dtype=np.uint64)
    found: Ranked = listed_rows(rows, no_keys, Listing(count))
    return found
