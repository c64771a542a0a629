"""A recorder of the logits that a run saw, and a replay of them to transformers' own search."""

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch.overrides import TorchFunctionMode

from specbeam import Needs
from specbeam.core import LM, Forest, Scored, Session, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Path = tuple[int, ...]  # tokens of a prompt and of a text that continues it
Rows = dict[Path, Float[torch.Tensor, " vocab"]]


class Recorder:
    """A language model that stores all logits that it returns, by the place of the session in the request and by path.

    The logits stay in memory, so it is for small runs only.

    Attributes:
        rows: the logits after each path, for each place of the request.
    """

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.vocab = lm.vocab
        self.max_positions = lm.max_positions
        self.rows: dict[int, Rows] = {}

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """Score the nodes as `LM.extend` does, and store their logits."""
        scored = self.lm.extend(sessions, forests, needs)
        for session, forest, answer in zip(sessions, forests, scored, strict=True):
            rows = answer.logits
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
    """Return a copy of the model that takes the logits after a path from `rows`, and computes missing ones.

    The copy shares the weights and has no KV cache: call its `generate` with ``use_cache=False``.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    @functools.wraps(model.forward)
    def forward(input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        logits = []
        for path in input_ids.tolist():
            row = rows[tuple(path)] if tuple(path) in rows else forward_logits(model, path)[-1]
            logits.append(row.float().to(model.device))
        return CausalLMOutputWithPast(logits=torch.stack(logits)[:, None])

    replay = copy.copy(model)  # shares the weights
    vars(replay)["forward"] = forward  # takes precedence over the method of the class
    return replay


class EqualsInOrder(TorchFunctionMode):
    """A mode in which `torch.topk` returns equal values in their order, as specbeam's search does.

    `torch.topk` does not define the order of equal values. Logits in bfloat16 are often equal, and the beam that
    comes first among equal ones decides what follows.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk:
            return func(*args, **kwargs)
        values = args[0]
        k = kwargs["k"] if "k" in kwargs else args[1]
        return tuple(part[..., :k] for part in torch.sort(values, dim=-1, descending=True, stable=True))


def forward_logits(model: "PreTrainedModel", path: Sequence[int]) -> Float[torch.Tensor, "length vocab"]:
    """Return the logits after each token of a path, from one plain forward of the model."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(path)], device=model.device)).logits[0]
    return logits


def leaves(rows: Rows) -> Iterator[Path]:
    """Yield the paths that are not a prefix of another path; every path is a prefix of a yielded one."""
    ordered = sorted(rows)
    for path, after in zip(ordered, [*ordered[1:], ()], strict=True):
        if after[: len(path)] != path:
            yield path
