"""Temperature, top-k, top-p and min-p: which tokens a law keeps, found without sorting the vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64

from specbeam import kernels
from specbeam.errors import NotSupported

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

_FIELDS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
Values = Float[torch.Tensor, " _"]
FEW, MANY = 64, 512  # of a ranking that is made by insertion


@dataclass(frozen=True)
class Truncation:
    """Applied in this order, each to what the former left; 0 and 1 mean off. The same laws as transformers' warpers.

    Attributes:
        least: tokens that are kept whatever their odds.
        others: further warpers of transformers, which come last and may only ban.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    least: int = 1
    others: tuple[Any, ...] = ()

    @classmethod
    def of(cls, warpers: Sequence[Any]) -> "Truncation":
        """From transformers' warpers. One that stands out of the usual order is called as it is."""
        made: dict[str, Any] = {}
        others: list[Any] = []
        order = list(_FIELDS)
        for one in warpers:
            name = type(one).__name__
            if name == order[0] and (made or others):
                raise NotSupported("the temperature comes after other warpers; put it first")
            if name in order and not others and not any(_FIELDS[later] in made for later in order[order.index(name) :]):
                made[_FIELDS[name]] = getattr(one, _FIELDS[name])
                made["least"] = max(getattr(one, "min_tokens_to_keep", 1), made.get("least", 1))
            else:
                others.append(one)
        return cls(**made, others=tuple(others))

    @property
    def cuts(self) -> bool:
        """Whether any token can be lost."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or bool(self.others)

    @cached_property
    def looked(self) -> int:
        """How many of the best values tell the support, at first sight: 0 where nothing is cut, -1 where none do."""
        if not self.cuts:
            return 0
        looked = max(self.top_k, self.least) if self.top_k else FEW
        return -1 if self.others or looked > MANY or not (self.top_k or self.top_p < 1) else looked

    @cached_property
    def told_at_once(self) -> bool:
        """Whether the loop that has the norms of unwarped rows can cut: it knows their sum at temperature 1 alone."""
        return self.looked == 0 or (self.looked > 0 and (self.top_k > 0 or self.temperature == 1))

    @property
    def for_loops(self) -> kernels.Cut:
        return kernels.Cut(
            float(self.temperature), self.top_k, float(self.top_p), float(self.min_p), self.least, self.looked
        )

    def support(self, x: Values, log_total: float) -> Int64[torch.Tensor, " _"]:
        """Indices that are kept, in no order. `x` are log-odds after temperature, `log_total` their logsumexp."""
        values, kept = x, None
        if self.top_k:
            values, kept = _largest(x, max(self.top_k, self.least))
            log_total = float(values.double().logsumexp(0))
        if self.top_p < 1:
            values, inner = _nucleus(values, log_total, self.top_p, self.least)
            kept = inner if kept is None else kept[inner]
        if self.min_p > 0:
            edge = min(values.max() + math.log(self.min_p), values.topk(min(self.least, len(values))).values[-1])
            inner = torch.nonzero(values >= edge).flatten()
            kept = inner if kept is None else kept[inner]
        if self.others:
            kept = self._left_by_others(x, kept)
        if kept is None:
            return torch.nonzero(x > -torch.inf).flatten()
        return kept[x[kept] > -torch.inf]

    def _left_by_others(self, x: Values, kept: Int64[torch.Tensor, " _"] | None) -> Int64[torch.Tensor, " _"]:
        left = x if kept is None else torch.full_like(x, -torch.inf).index_copy_(0, kept, x[kept])
        for one in self.others:
            left = one(torch.zeros(1, 0, dtype=torch.long), left[None].clone())[0]
        return torch.nonzero(left > -torch.inf).flatten()

    def processors(self) -> "LogitsProcessorList | None":
        """The same as transformers' own warpers; None if there is nothing to do."""
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        chosen = LogitsProcessorList()
        if self.temperature != 1:
            chosen.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            chosen.append(TopKLogitsWarper(self.top_k, min_tokens_to_keep=self.least))
        if self.top_p < 1:
            chosen.append(TopPLogitsWarper(self.top_p, min_tokens_to_keep=self.least))
        if self.min_p > 0:
            chosen.append(MinPLogitsWarper(self.min_p, min_tokens_to_keep=self.least))
        chosen.extend(self.others)
        return chosen or None


NO_TRUNCATION = Truncation()


def _largest(x: Values, count: int) -> tuple[Values, Int64[torch.Tensor, " _"]]:
    """The `count` largest and all that equal the last of them."""
    if count >= len(x):
        kept = torch.nonzero(x > -torch.inf).flatten()
        return x[kept], kept
    values, indices = torch.topk(x, min(count + 8, len(x)))
    edge = values[count - 1]
    if values[-1] == edge and len(values) < len(x):  # more equals than we looked at
        indices = torch.nonzero(x >= edge).flatten()
        values = x[indices]
    fine = (values >= edge) & (values > -torch.inf)
    return values[fine], indices[fine]


def _nucleus(x: Values, log_total: float, mass: float, least: int) -> tuple[Values, Int64[torch.Tensor, " _"]]:
    """The fewest largest that hold at least `mass`, and not fewer than `least`."""
    looked = min(64, len(x))
    while True:
        values, indices = torch.topk(x, looked)
        reached = (values.double() - log_total).exp().cumsum(0)
        if looked == len(x) or reached[-1] >= mass:
            break
        looked = min(4 * looked, len(x))
    needed = min(max(int((reached < mass).sum()) + 1, least), looked)
    return values[:needed], indices[:needed]
