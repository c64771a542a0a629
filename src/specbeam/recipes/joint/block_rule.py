"""VERIFY: choose a block of tokens from the complete joint law, for tables and small vocabularies."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64

from specbeam.core.errors import NotSupported
from specbeam.core.forest import Forest
from specbeam.core.laws.reduce import DEAD
from specbeam.core.laws.warp import check_condition, on_host
from specbeam.core.records import Verdict
from specbeam.core.session import Session
from specbeam.core.verify.walk import WalkInputs, emitted_layers, start_walk
from specbeam.recipes.joint.beam_rule import refuse_audit
from specbeam.recipes.joint.layers import TIE, layers

BlockMode = Literal["argmax", "ancestral", "joint_temperature", "joint_topk"]


@dataclass(frozen=True)
class BlockRule:
    """Choose one of all blocks.

    A block is a path that is one token longer than the depth of the tree, or that ends earlier.

    The tree must hold every path (see `EveryBlock`). The probability p of a block is the product of its warped conditionals.

    Args:
        mode: "argmax": the most probable block. "ancestral": one draw from p. "joint_temperature": one draw from
            p^(1/temperature), normalised. "joint_topk": one draw from p among the `top` most probable blocks. Ties are
            broken in lexicographic order.
        temperature: temperature of blocks, in addition to that of tokens.
        top: number of blocks.

    Law: by mode; "ancestral" is plain sampling, because p is the product of the conditionals.
    Source: multi-token joint decoding, arXiv 2407.09722, sec. 2.
    """

    most_beams: ClassVar[int] = 1
    mode: BlockMode = "argmax"
    temperature: float = 1.0
    top: int = 1

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        self.check(session.warp.greedy, session.audited)
        logp = block_logp(session, forest, scored)
        if not np.any(logp > -np.inf):
            check_condition(DEAD, on_host(scored), session.warp)
        last, token = divmod(self._chosen(session, forest, logp), logp.shape[1])
        nodes: list[int] = []
        while last > 0:
            nodes.insert(0, last)
            last = int(forest.parents[last])
        tokens = [*forest.tokens[nodes].tolist(), token]
        drafted = [True] * len(nodes) + [False]
        inputs = WalkInputs.of(session, forest, scored)
        walk = start_walk(len(tokens))
        inputs.emit(walk, session, np.array(tokens), np.array([*nodes, -1]), np.array(drafted))
        return Verdict(emitted_layers(walk), audit=inputs.audit(session))

    def check(self, greedy: bool, audited: bool) -> None:
        """Raise `NotSupported` if the mode cannot serve an audit or temperature 0 (`greedy`)."""
        if self.mode != "ancestral":
            refuse_audit(audited)
        if greedy and self.mode == "ancestral":
            raise NotSupported("mode 'ancestral' at temperature 0 is greedy decoding; use method 'greedy'")
        if greedy and self.mode != "argmax":
            raise NotSupported(f"mode {self.mode!r} draws blocks; use mode='argmax' for temperature 0")

    def _chosen(self, session: Session, forest: Forest, logp: Float64[np.ndarray, "nodes vocab"]) -> int:
        """Return the index of the chosen block in the flattened table."""
        flat = logp.ravel()
        if self.mode == "argmax":
            return most_probable(forest, logp, 1)[0]
        if self.mode == "joint_topk":
            flat = np.full_like(flat, -np.inf)
            kept = most_probable(forest, logp, self.top)
            flat[kept] = logp.ravel()[kept]
        return session.dice.pick(np.exp((flat - flat.max()) / self.temperature))


def most_probable(forest: Forest, logp: Float64[np.ndarray, "nodes vocab"], count: int) -> list[int]:
    """Return the indices of up to `count` most probable blocks in the flattened table; ties in lexicographic order."""
    flat = logp.ravel()
    vocab = logp.shape[1]
    count = min(count, int(np.count_nonzero(flat > -np.inf)))
    edge = np.partition(flat, -count)[-count]
    above = np.flatnonzero(flat > edge + TIE).tolist()
    equal = np.flatnonzero((flat >= edge - TIE) & (flat <= edge + TIE)).tolist()
    equal.sort(key=lambda block: [*forest.path(block // vocab), block % vocab])
    return above + equal[: count - len(above)]


def block_logp(
    session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]
) -> Float64[np.ndarray, "nodes vocab"]:
    """Return the log-likelihood of each block by its last node and last token; -inf for prefixes of longer blocks."""
    deepest = int(forest.depths().max())
    eos = np.array(session.limits.eos, dtype=np.int64)
    logp = np.full(tuple(scored.shape), -np.inf)
    for depth, (nodes, known, _, _) in enumerate(layers(session, forest, scored, deepest + 1)):
        shown = eos if depth < deepest else np.arange(scored.shape[1])
        logp[np.ix_(nodes, shown)] = known[:, shown]
    return logp
