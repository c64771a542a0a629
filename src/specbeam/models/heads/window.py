"""COrAL's windows: rows that enter a model's last layers once more, to predict tokens ahead and behind (arXiv 2410.09675).

A row is the state of a token at one layer, rotated to another position. The rotation of its queries selects the token to
predict: a row at position n predicts the token at position n + 1, as all rows of the model do. A row ahead attends to the
rows between it and its token, as in `HiddenTransfer`; a row behind attends to itself. Rows of the text attend to neither.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from specbeam.engines.cache_names import cache_argument
from specbeam.engines.eligibility import layers_of
from specbeam.engines.kv.masks import Masks
from specbeam.models.early_layers import last_norm
from specbeam.models.heads.extra_rows import logits_of
from specbeam.models.heads.hidden_transfer import HiddenTransfer

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

States = Float[Tensor, "trees rows width"]


def offsets_of(ahead: int, behind: int) -> list[int]:
    """Return the positions of the rows of a window relative to the row of the text: ahead first, 1 to `ahead`, then
    behind, -1 to -`behind`.

    The row itself predicts the next token, so a row at offset k predicts the token k + 1 positions after it.
    """
    return [*range(1, ahead + 1), *range(-1, -behind - 1, -1)]


def seen_in_window(ahead: int, behind: int) -> Bool[Tensor, "window window"]:
    """Return which rows of its own window each row sees, in the order of `offsets_of`."""
    seen = torch.eye(ahead + behind, dtype=torch.bool)
    seen[:ahead, :ahead] = torch.ones(ahead, ahead, dtype=torch.bool).tril()
    return seen


def through_last_layers(
    head: HiddenTransfer,
    states: States,
    positions: Int64[Tensor, "trees rows"],
    seen: Bool[Tensor, "trees rows slots"],
    slot_positions: Int64[Tensor, "trees slots"],
    cache: "Cache | None" = None,
) -> States:
    """Return the last hidden states, after the final norm, of rows that enter at the head's layer.

    Gradients flow to layers that require them.

    Args:
        seen: which keys each row attends to; the keys of the cache come first, then those of the rows.
        slot_positions: the position of each key.
        cache: keys and values of earlier rows; those of the new rows are appended.
    """
    model = head.target
    config = model.config
    mask = Masks(config, config._attn_implementation or "eager", model.dtype).of_rows(seen, positions, slot_positions)
    angles = model.base_model.rotary_emb(states, positions)
    for number, layer in enumerate(layers_of(model)[head.layer :], head.layer):
        of_layer = mask[config.layer_types[number]] if isinstance(mask, dict) else mask
        states = layer(
            states,
            attention_mask=of_layer,
            position_ids=positions,
            position_embeddings=angles,
            **cache_argument(layer, cache),
        )
    normed: Tensor = last_norm(model)(states)
    return normed


class TextWindows:
    """The windows of one text that grows: keys and values of its tokens in the last layers.

    Args:
        head: the head of the windows, whose `behind` counts the tokens behind.

    Attributes:
        length: number of tokens that are stored.
    """

    def __init__(self, head: HiddenTransfer) -> None:
        from transformers.cache_utils import DynamicCache

        self.head = head
        self.cache = DynamicCache()
        self.length = 0

    @torch.no_grad()
    def append(self, states: Float[Tensor, "rows width"]) -> None:
        """Store tokens, given the states in which they enter the head's layer."""
        count = len(states)
        if count == 0:
            return
        positions = self.length + torch.arange(count, device=states.device)
        slots = torch.arange(self.length + count, device=states.device)
        seen = slots <= positions[:, None]
        through_last_layers(self.head, states[None], positions[None], seen[None], slots[None], self.cache)
        self.length += count

    @torch.no_grad()
    def logits(
        self, states: Float[Tensor, "rows width"], ahead: int, behind: int
    ) -> Float[Tensor, "rows window vocab"]:
        """Return the logits of the windows of tokens, in the order of `offsets_of`; store nothing.

        Rows before the first position of the text have no meaning.

        Args:
            states: of the tokens that follow the stored ones, as in `append`.
            ahead, behind: number of window rows.
        """
        device = states.device
        count = len(states)
        width = ahead + behind
        own = self.length + torch.arange(count, device=device)
        offsets = torch.tensor(offsets_of(ahead, behind), device=device)
        positions = torch.cat([own, (own[:, None] + offsets).clamp_min(0).flatten()])
        slot_positions = torch.cat([torch.arange(self.length, device=device), positions])
        text = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        windows = torch.kron(torch.eye(count, dtype=torch.bool), seen_in_window(ahead, behind))
        seen = torch.zeros(len(positions), len(slot_positions), dtype=torch.bool, device=device)
        seen[:, : self.length] = True
        seen[:, self.length : self.length + count] = torch.cat([text, text.repeat_interleave(width, 0)])
        seen[count:, self.length + count :] = windows.to(device)
        rows = torch.cat([states, states.repeat_interleave(width, 0)])
        last = through_last_layers(self.head, rows[None], positions[None], seen[None], slot_positions[None], self.cache)
        self.cache.crop(-len(positions))
        return logits_of(self.head.target, last[0, count:]).unflatten(0, (count, width))
