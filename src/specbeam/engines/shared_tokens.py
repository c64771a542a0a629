"""The tokens that a draft model shares with a target whose vocabulary is another one: padded, or with added tokens."""

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
    """The target's tokens that a draft model knows under the same ids. It drafts these alone.

    A language model with shared tokens is given the target's ids, and has a logit for each of them: -inf for tokens that it
    does not know. Its own tokens that the target lacks have none.

    Attributes:
        known: by the target's ids.
        stand_in: the token of the draft model that it reads in place of one that it does not know.
    """

    known: Bool[np.ndarray, " vocab"]
    stand_in: int

    @property
    def vocab(self) -> int:
        """The number of the target's tokens."""
        return len(self.known)

    @property
    def key(self) -> tuple[bytes, int]:
        """The identity of these shared tokens."""
        return self.known.tobytes(), self.stand_in

    @cached_property
    def knows_all(self) -> bool:
        """Whether the draft model knows all of the target's tokens."""
        return bool(self.known.all())

    @cached_property
    def read_as(self) -> Int64[np.ndarray, " vocab"]:
        """The draft model's token for each of the target's."""
        return np.where(self.known, np.arange(self.vocab), self.stand_in)

    @cached_property
    def unknown(self) -> Bool[Tensor, " vocab"]:
        """The tokens that the draft model does not know."""
        return torch.from_numpy(~self.known)

    def read(self, tokens: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
        """Return the draft model's tokens for the target's; negative ones, which stand for other rows, as they are.

        Raises `IndexError` for tokens that the target does not have.
        """
        return np.where(tokens < 0, tokens, self.read_as[np.maximum(tokens, 0)])

    def fitted_bias(self, bias: Float[Tensor, " own"]) -> Float[Tensor, " vocab"]:
        """Return the bias of logits over the target's tokens, given the bias over the draft model's own.

        Both are empty without a bias.
        """
        if len(bias):
            return self.fitted_logits(bias)
        if self.knows_all:
            return bias
        return bias.new_zeros(self.vocab).masked_fill(self.unknown.to(bias.device), -torch.inf)

    def fitted_logits(self, logits: Float[Tensor, "*rows own"]) -> Float[Tensor, "*rows vocab"]:
        """Return logits over the target's tokens, given logits over the draft model's own."""
        found = logits[..., : self.vocab].contiguous()
        missing = self.vocab - found.shape[-1]
        if missing > 0:
            found = functional.pad(found, (0, missing))
        return found if self.knows_all else found.masked_fill(self.unknown.to(found.device), -torch.inf)


def readable(shared: SharedTokens | None, tokens: Any) -> Any:
    """Return token ids of a target as the draft model that shares some of them reads them; as they are without one."""
    return tokens if shared is None else shared.read(tokens)
