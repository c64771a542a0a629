"""Which of the target's tokens a draft model knows, and which of these it drafts."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """The target's tokens that a draft model has under the same ids, and how many of them it drafts.

    A language model with shared tokens reads the target's ids and returns a logit for each of them: -inf for tokens that it
    does not draft. Tokens of the model that the target lacks get no logit.

    Attributes:
        known: whether the draft model knows each of the target's tokens.
        stand_in: the token that the draft model reads in place of unknown tokens.
        below: only known tokens with ids below this number are drafted, so that a pass reads less of the head; None: all.
    """

    known: Bool[np.ndarray, " vocab"]
    stand_in: int
    below: int | None = None

    @property
    def vocab(self) -> int:
        """The number of the target's tokens."""
        return len(self.known)

    @property
    def key(self) -> tuple[bytes, int, int | None]:
        """A key for caches."""
        return self.known.tobytes(), self.stand_in, self.below

    @property
    def head_rows(self) -> int:
        """The number of the target's first tokens that contain all drafted ones."""
        return self.vocab if self.below is None else min(self.below, self.vocab)

    @cached_property
    def drafted(self) -> Bool[np.ndarray, " vocab"]:
        """Whether each of the target's tokens is drafted."""
        return self.known & (np.arange(self.vocab) < self.head_rows)

    @cached_property
    def drafts_all(self) -> bool:
        """Whether the draft model drafts all tokens of the target."""
        return bool(self.drafted.all())

    @cached_property
    def read_as(self) -> Int64[np.ndarray, " vocab"]:
        """The draft model's token for each of the target's."""
        return np.where(self.known, np.arange(self.vocab), self.stand_in)

    @cached_property
    def undrafted(self) -> Bool[Tensor, " vocab"]:
        """The tokens that the draft model does not draft."""
        return torch.from_numpy(~self.drafted)

    def read(self, tokens: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
        """Return the draft model's tokens for the target's; negative tokens, which stand for other rows, are unchanged.

        Raises `IndexError` for tokens that the target does not have.
        """
        return np.where(tokens < 0, tokens, self.read_as[np.maximum(tokens, 0)])

    def fitted_bias(self, bias: Float[Tensor, " own"]) -> Float[Tensor, " vocab"]:
        """Return the bias of logits by the target's tokens, given the bias by the draft model's tokens; empty: no bias."""
        if len(bias):
            return self.fitted_logits(bias)
        if self.drafts_all:
            return bias
        return bias.new_zeros(self.vocab).masked_fill(self.undrafted.to(bias.device), -torch.inf)

    def fitted_logits(self, logits: Float[Tensor, "*rows own"]) -> Float[Tensor, "*rows vocab"]:
        """Return logits by the target's tokens, given logits by the draft model's tokens."""
        found = logits[..., : self.vocab].contiguous()
        missing = self.vocab - found.shape[-1]
        if missing > 0:
            found = functional.pad(found, (0, missing))
        return found if self.drafts_all else found.masked_fill(self.undrafted.to(found.device), -torch.inf)


def readable(shared: SharedTokens | None, tokens: Any) -> Any:
    """Return a draft model's tokens for those of the target; unchanged if `shared` is None."""
    return tokens if shared is None else shared.read(tokens)
