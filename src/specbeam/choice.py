"""What the beams of a layer go on with: the best pairs of their joint law under noise, and what becomes of them."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt64

from specbeam import kernels
from specbeam.dice import child_keys
from specbeam.laws import Coarse, JointLaw, Pairs
from specbeam.limits import Limits
from specbeam.probs import Paths, Warp, joint_law, on_host, picked
from specbeam.records import Beams


@dataclass(frozen=True, eq=False)
class Choice:
    """Pairs (beam, token), the first `core` of them chosen for themselves."""

    parents: Int64[np.ndarray, " pairs"]  # of the beams that are prolonged
    tokens: Int64[np.ndarray, " pairs"]
    scores: Float64[np.ndarray, " pairs"]  # log-likelihood of the prolonged beams
    keys: UInt64[np.ndarray, " pairs"]
    ends: Bool[np.ndarray, " pairs"]  # end tokens
    core: int
    law: JointLaw | None  # None: nobody asked for it

    @classmethod
    def of(
        cls,
        pairs: Pairs,
        law: JointLaw,
        keys: UInt64[np.ndarray, " beams"],
        limits: Limits,
        core: int,
    ) -> "Choice":
        """Pairs of a law whose beams have these keys."""
        parents, tokens = np.divmod(pairs, law.vocab)
        below = child_keys(keys[parents], tokens)
        return cls(parents, tokens, law.logj_at(pairs), below, limits.ends(tokens), core, law)


def choose(
    logits: Float[torch.Tensor, "nodes vocab"],
    live: Beams,
    warp: Warp,
    paths: Paths,
    core: int,
    width: int,
    among: Bool[np.ndarray, " beams"],
    limits: Limits,
    coarse: Coarse,
    places: Int64[np.ndarray, " beams"] | None = None,
    law: JointLaw | None = None,
) -> Choice:
    """`JointLaw.core_and_halo` of the law of these beams, under their noise; at temperature 0 without.

    Args:
        places: rows of `logits` that belong to the beams; None: all, and the law is handed on.
        law: the law, where it is known.

    Raises `BrokenLaw`, `BrokenProcessor` and `DeadEnd` as `joint_law` does.
    """
    if law is None and (found := _at_once(logits, live, warp, core, width, among, limits, places)) is not None:
        return found
    if law is None:
        rows = logits if places is None else picked(logits, places)
        law = joint_law(rows, live.scores, live.counts, warp, paths)
    pairs, many = law.core_and_halo(core, width, None if warp.greedy else live.keys, coarse, among)
    return Choice.of(pairs, law, live.keys, limits, many)


def _at_once(
    logits: Float[torch.Tensor, "nodes vocab"],
    live: Beams,
    warp: Warp,
    core: int,
    width: int,
    among: Bool[np.ndarray, " beams"],
    limits: Limits,
    places: Int64[np.ndarray, " beams"] | None,
) -> Choice | None:
    """All of it in one compiled loop; None where that does not tell."""
    if not warp.for_loops or not warp.cut.told_at_once or not on_host(logits):
        return None
    norm, parents, tokens, scores, keys, ends, many = kernels.layer(
        np.ascontiguousarray(logits.numpy()), _ALL if places is None else places, live.scores, live.counts, live.keys, among,
        way(warp, limits, core, width),
    )  # fmt: skip
    if many < 0:
        return None
    law = None
    if places is None:
        counts = np.ones_like(live.counts) if warp.greedy else live.counts
        law = JointLaw(logits, live.scores, norm, counts, warp.cut)
    return Choice(parents, tokens, scores, keys, ends, many, law)


def way(warp: Warp, limits: Limits, core: int, width: int) -> kernels.Way:
    """For `kernels.layer`; the warp must be one that is `told_at_once`."""
    return kernels.Way(not warp.greedy, warp.cut.for_loops, core, width, limits.ending)


_ALL = np.zeros(0, dtype=np.int64)
