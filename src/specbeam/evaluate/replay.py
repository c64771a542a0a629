"""What a run saw, and what transformers' search makes of the very same logits."""

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch.overrides import TorchFunctionMode

from specbeam.core.forest import Forest
from specbeam.lm.base import LM
from specbeam.records import Needs, Scored, Turn
from specbeam.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Path = tuple[int, ...]  # prompt and new tokens
Rows = dict[Path, Float[torch.Tensor, " vocab"]]


class Recorder:
    """A language model that remembers the logits it gave: those of each place of a request, by path. For small runs."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.vocab = lm.vocab
        self.max_positions = lm.max_positions
        self.rows: dict[int, Rows] = {}

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """See `LM.extend`."""
        scored = self.lm.extend(sessions, forests, needs)
        for session, forest, found in zip(sessions, forests, scored, strict=True):
            rows = found.logits
            known = self.rows.setdefault(session.place, {})
            before = [(*session.prompt, *session.settled, *tail) for tail in session.tails.tolist()]
            for node, row in enumerate(rows.cpu().clone(), forest.size - len(rows)):
                root = node
                while forest.parents[root] >= 0:
                    root = int(forest.parents[root])
                known[(*before[root], *forest.path(node))] = row
        return scored

    def settle(self, session: Session, turn: Turn) -> None:
        self.lm.settle(session, turn)

    def peak(self, session: Session) -> int:
        return self.lm.peak(session)

    def close(self, session: Session) -> None:
        self.lm.close(session)


def replaying(model: "PreTrainedModel", rows: Rows) -> "PreTrainedModel":
    """The model, with the logits after a path taken from `rows`; it computes those that are not there.

    It keeps no cache: call `generate` with ``use_cache=False``.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    @functools.wraps(model.forward)
    def forward(input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        found = [rows[tuple(path)] if tuple(path) in rows else whole(model, path)[-1] for path in input_ids.tolist()]
        return CausalLMOutputWithPast(logits=torch.stack([row.float().to(model.device) for row in found])[:, None])

    made = copy.copy(model)  # shares the weights
    vars(made)["forward"] = forward  # goes before the method of its class
    return made


class EqualsInOrder(TorchFunctionMode):
    """`torch.topk` that leaves equal values in their order, as our search does; by itself it promises none.

    Logits in bfloat16 are often equal, and which of two equal beams comes first decides what follows.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk:
            return func(*args, **kwargs)
        values = args[0]
        k = kwargs["k"] if "k" in kwargs else args[1]
        return tuple(found[..., :k] for found in torch.sort(values, dim=-1, descending=True, stable=True))


def whole(model: "PreTrainedModel", path: Sequence[int]) -> Float[torch.Tensor, "length vocab"]:
    """Logits after each token of a path, by one plain forward."""
    with torch.inference_mode():
        return model(torch.tensor([list(path)], device=model.device)).logits[0]


def leaves(rows: Rows) -> Iterator[Path]:
    """Paths that none of the others prolongs; every path is a beginning of one of them."""
    ordered = sorted(rows)
    for path, after in zip(ordered, [*ordered[1:], ()], strict=True):
        if after[: len(path)] != path:
            yield path
