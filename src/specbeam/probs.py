"""From logits to laws: the joint law over (beam, token) pairs, and residuals.

Laws (`p`), log-laws (`logp`) and logits are three things; a function takes one of them and says which.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam.errors import BrokenLaw

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

Paths = Callable[[], Int64[np.ndarray, "beams length"]]


@dataclass(frozen=True, eq=False)
class Warp:
    """What turns logits into the law that is decoded.

    `processors` depend on the path (penalties, bans, the user's own) and see each beam's row by itself; `warpers`
    (temperature, top-k, top-p, min-p) see the flattened joint over all beams, as in DSBD (arXiv 2409.16560, sec. 3.1).
    Both are transformers' own `LogitsProcessorList`. `greedy` takes the best pairs instead of drawing: temperature 0.
    """

    processors: "LogitsProcessorList | None" = None
    warpers: "LogitsProcessorList | None" = None
    greedy: bool = False


@dataclass(frozen=True, eq=False)
class JointLaw:
    """The law of one draw of a (beam, token) pair."""

    logj: Float64[np.ndarray, "beams vocab"]  # log-likelihood of the prolonged beam: what a beam carries on
    logp: Float64[
        np.ndarray, "beams vocab"
    ]  # log of the warped law, normalised over all pairs; -inf outside its support

    @cached_property
    def p(self) -> Float64[np.ndarray, "beams vocab"]:
        return np.exp(self.logp)

    @property
    def support(self) -> int:
        """How many pairs have any odds."""
        return int(np.count_nonzero(self.logp > -np.inf))


def joint_law(
    logits: Float[torch.Tensor, "beams vocab"],
    scores: Float64[np.ndarray, " beams"],
    counts: Int64[np.ndarray, " beams"],
    warp: Warp,
    paths: Paths,
) -> JointLaw:
    """pi(b, v), the warped law of ``scores[b] + log p(v | b)``, for beams that occur `counts` times each.

    `paths()` gives prompt and tokens of each beam, int64[beams, length]; it is called only if a processor needs it.
    Raises `BrokenLaw` if the logits are no logits or nothing is left to draw.
    """
    logits = logits.detach().cpu()
    if not bool((logits < torch.inf).all()):  # also false for NaN
        what = "NaN" if bool(logits.isnan().any()) else "+inf"
        raise BrokenLaw(f"the model returned {what} logits; try float32, or look for overflow in the weights")
    if warp.processors:
        logits = _processed(logits.clone(), warp.processors, paths())  # a user's processor may write in place
        if bool(logits.isnan().any()):
            raise BrokenLaw("a logits processor returned NaN; banned tokens must get -inf")
    logj = scores[:, None] + log_softmax(logits.double().numpy())
    if not (logj > -np.inf).any():
        raise BrokenLaw("every token is banned: the logits processors and bad words left nothing to draw")
    if warp.greedy:
        return JointLaw(logj, logj)
    warped = _warped(logj, warp)
    if (counts > 1).any():
        warped = warped + np.log(counts)[:, None]
    return JointLaw(logj, log_softmax(warped.reshape(1, -1)).reshape(logj.shape))


def row_logp(logits: Float[torch.Tensor, "rows vocab"], warp: Warp, paths: Paths) -> Float64[np.ndarray, "rows vocab"]:
    """Log-law of the next token, warped, for each row by itself: what a token tree is drafted from.

    At temperature 0 the unwarped log-law: only its order matters there.
    """
    logits = logits.detach().cpu()
    if not bool((logits < torch.inf).all()):
        raise BrokenLaw("the model returned NaN or +inf logits; try float32, or look for overflow in the weights")
    if warp.processors:
        logits = _processed(logits.clone(), warp.processors, paths())
    scores = logits.double()
    if warp.warpers and not warp.greedy:
        scores = warp.warpers(torch.zeros(len(scores), 0, dtype=torch.long), scores.clone())
    return log_softmax(scores.numpy())


def _processed(
    logits: Float[torch.Tensor, "beams vocab"], processors: "LogitsProcessorList", paths: np.ndarray
) -> Float[torch.Tensor, "beams vocab"]:
    try:
        return processors(torch.from_numpy(paths), logits)
    except Exception as error:  # whatever a user's code raises belongs to this prompt and to no other
        raise BrokenLaw(f"a logits processor raised {type(error).__name__}: {error}") from error


def _warped(logj: Float64[np.ndarray, "beams vocab"], warp: Warp) -> Float64[np.ndarray, "beams vocab"]:
    if not warp.warpers:
        return logj
    row = torch.from_numpy(logj.reshape(1, -1).copy())
    return warp.warpers(torch.zeros(1, 0, dtype=torch.long), row).numpy().reshape(logj.shape)


def log_softmax(logits: Float64[np.ndarray, "rows n"]) -> Float64[np.ndarray, "rows n"]:
    """Along the last axis. A row of -inf stays -inf: a beam from which everything is banned has no odds."""
    top = logits.max(-1, keepdims=True)
    shifted = logits - np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted - np.where(np.isfinite(top), total, 0.0)


def residual(p: Float64[np.ndarray, " n"], law: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """norm((p - law)^+): the law of what is still missing after a draw from `law` was refused.

    If nothing is missing, p and law are equal up to rounding and the refusal had probability about 0: p itself.
    """
    left = np.maximum(p - law, 0.0)
    total = left.sum()
    return left / total if total > NOTHING else p


NOTHING = 1e-12  # missing mass below this is rounding


def best(values: Float64[np.ndarray, " n"], count: int) -> Int64[np.ndarray, " k"]:
    """Indices of the `count` largest values above -inf, best first; equal values keep their order."""
    count = min(count, int(np.count_nonzero(values > -np.inf)))
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    edge = np.partition(values, len(values) - count)[len(values) - count]
    rough = np.flatnonzero(values >= edge)
    return rough[np.argsort(-values[rough], kind="stable")][:count]
