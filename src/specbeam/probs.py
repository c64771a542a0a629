"""From logits to laws, and residuals.

Laws (`p`), log-laws (`logp`) and logits are three things; a function takes one of them and says which.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam import kernels
from specbeam.constraint import Constrained
from specbeam.errors import BrokenLaw, BrokenProcessor, DeadEnd, SpecbeamError
from specbeam.forest import Row
from specbeam.laws import JointLaw, log_norm
from specbeam.truncation import NO_TRUNCATION, Truncation

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

Paths = Callable[[], Int64[np.ndarray, "beams length"]]


@dataclass(frozen=True, eq=False)
class Warp:
    """What turns logits into the law that is decoded.

    `processors` (transformers' own: penalties, bans, the user's) depend on the path and see each beam's row by itself;
    the `truncation` (temperature, top-k, top-p, min-p) sees the flattened joint over all beams, as in DSBD
    (arXiv 2409.16560, sec. 3.1). `greedy` takes the best pairs instead of drawing: temperature 0.

    `search` is the order of transformers' beam modes: all processors, warpers too, see the log-probabilities of each beam's
    row, and what they leave is not normalised again.

    `constraint` is the one of the processors that keeps states of paths: the session tells it which of them live on.
    """

    processors: "LogitsProcessorList | None" = None
    truncation: Truncation = NO_TRUNCATION
    greedy: bool = False
    search: bool = False
    constraint: Constrained | None = None

    @property
    def for_loops(self) -> bool:
        """Whether compiled loops can choose by it: nobody else sees a row."""
        return kernels.AVAILABLE and not self.processors and not self.search

    @property
    def cut(self) -> Truncation:
        """What is cut: nothing at temperature 0."""
        return NO_TRUNCATION if self.greedy else self.truncation


def joint_law(
    logits: Float[torch.Tensor, "beams vocab"],
    scores: Float64[np.ndarray, " beams"],
    counts: Int64[np.ndarray, " beams"],
    warp: Warp,
    paths: Paths,
) -> JointLaw:
    """pi(b, v), the warped law of ``scores[b] + log p(v | b)``, for beams that occur `counts` times each.

    `paths()` gives prompt and tokens of each beam, int64[beams, length]; it is called only if a processor needs it.
    Raises `BrokenLaw` if the logits are no logits, `DeadEnd` if nothing is left to draw.
    """
    logits = _on_host(logits)
    if warp.search or warp.processors:
        _check(logits)
    if warp.search:
        logits = torch.log_softmax(logits, -1)
    if warp.processors:
        logits = _processed(logits, warp.processors, paths())
    norm = log_norm(logits)
    largest = norm.max()
    if not largest < np.inf:
        _check(logits)
    if largest == -np.inf:
        raise DeadEnd(f"every token is banned: {_banning(warp)} left nothing to draw")
    if warp.greedy:
        counts = np.ones_like(counts)
    if warp.search:
        norm = np.where(norm > -np.inf, 0.0, -np.inf)
    return JointLaw(logits, scores, norm, counts, warp.cut, normalised=not warp.search)


_OPTIONS = {
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
}


def _banning(warp: Warp) -> str:
    """The options that can have done it."""
    kinds = [type(one).__name__ for one in warp.processors or [] if not isinstance(one, Constrained)]
    kinds = [kind for kind in kinds if not kind.endswith("Warper") and kind != "RepetitionPenaltyLogitsProcessor"]
    names = [_OPTIONS.get(kind, kind) for kind in kinds] + ([] if warp.constraint is None else [warp.constraint.name])
    return " and ".join(names) or "the model"


def picked(rows: Float[torch.Tensor, "n vocab"], places: Int64[np.ndarray, " m"]) -> Float[torch.Tensor, "m vocab"]:
    """Some of the rows; without a copy where these are neighbours."""
    if len(places) and (places == np.arange(places[0], places[0] + len(places))).all():
        return rows[int(places[0]) : int(places[0]) + len(places)]
    if rows.device.type == "cpu" and rows.dtype != torch.bfloat16 and not rows.requires_grad:
        return torch.from_numpy(rows.numpy()[places])  # half the price of an index of tensors
    return rows[torch.from_numpy(places).to(rows.device)]


def on_host(logits: Float[torch.Tensor, "rows vocab"]) -> bool:
    """Whether these are float32 that loops can read in place."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and not logits.requires_grad


def _on_host(logits: Float[torch.Tensor, "rows vocab"]) -> Float[torch.Tensor, "rows vocab"]:
    """As float32 or float64."""
    if on_host(logits):
        return logits
    logits = logits.detach().cpu()
    return logits if logits.dtype == torch.float64 else logits.float()


def _check(logits: Float[torch.Tensor, "rows vocab"]) -> None:
    if not bool((logits.amax(1) < torch.inf).all()):  # also false for NaN
        what = "NaN" if bool(logits.isnan().any()) else "+inf"
        raise BrokenLaw(f"the model returned {what} logits; try float32, or look for overflow in the weights")


def row_laws(logits: Float[torch.Tensor, "rows vocab"], warp: Warp, paths: Paths) -> list[Row]:
    """`row_logp`, each row on the tokens that the truncation left it: none, where everything is banned."""
    logits = _on_host(logits)
    if warp.processors:
        _check(logits)
        logits = _processed(logits, warp.processors, paths())
    return cut(logits, warp)


MOST = 512  # tokens of a row that are ranked one by one


def cut(logits: Float[torch.Tensor, "rows vocab"], warp: Warp, compiled: bool = kernels.AVAILABLE) -> list[Row]:
    """The laws of processed rows, warped; `compiled`: by the loops of `kernels`, otherwise by array code, their oracle."""
    vocab, cuts = logits.shape[1], warp.truncation
    if warp.greedy or not cuts.cuts:
        return [Row(logp, vocab) for logp in _warped(logits, warp)]
    known = cut_at_once(logits, warp) if compiled else None
    if known is None:
        return [_compact(logp) for logp in _warped(logits, warp)]
    return [one or _compact(_warped(logits[row : row + 1], warp)[0]) for row, one in enumerate(known)]


def cut_at_once(logits: Float[torch.Tensor, "rows vocab"], warp: Warp) -> list[Row | None] | None:
    """The same by one compiled loop, None for rows where it does not tell; None where none of them can be told."""
    vocab, cuts = logits.shape[1], warp.truncation
    if warp.greedy or cuts.looked < 1 or logits.dtype != torch.float32 or not kernels.AVAILABLE:
        return None
    by = (cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p, cuts.least)
    tokens, logp, counts = kernels.truncated(np.ascontiguousarray(logits.numpy()), *by, max(MOST, cuts.least))
    laws, start = list[Row | None](), 0
    for count in counts.tolist():
        laws.append(Row(logp[start : start + count], vocab, tokens[start : start + count]) if count > 0 else None)
        start += max(count, 0)
    return laws


def _compact(logp: Float64[np.ndarray, " vocab"]) -> Row:
    tokens = np.flatnonzero(logp > -np.inf)
    return Row(logp[tokens], len(logp), tokens)


def row_logp(logits: Float[torch.Tensor, "rows vocab"], warp: Warp, paths: Paths) -> Float64[np.ndarray, "rows vocab"]:
    """Log-law of the next token, warped, for each row by itself: what a token tree is drafted from.

    At temperature 0 the unwarped log-law: only its order matters there.
    """
    logits = _on_host(logits)
    if warp.processors:
        _check(logits)
        logits = _processed(logits, warp.processors, paths())
    return _warped(logits, warp)


def _warped(logits: Float[torch.Tensor, "rows vocab"], warp: Warp) -> Float64[np.ndarray, "rows vocab"]:
    if warp.greedy or warp.truncation == NO_TRUNCATION:
        return log_softmax(logits)
    _check(logits)
    logits = logits / warp.truncation.temperature
    if warp.truncation.cuts:
        kept = torch.full_like(logits, -torch.inf)
        for row, total, goal in zip(logits, log_norm(logits).tolist(), kept, strict=True):
            if total == -np.inf:  # everything is banned
                continue
            support = warp.truncation.support(row, total)
            goal[support] = row[support]
        logits = kept
    return log_softmax(logits)


def _processed(
    logits: Float[torch.Tensor, "beams vocab"], processors: "LogitsProcessorList", paths: np.ndarray
) -> Float[torch.Tensor, "beams vocab"]:
    if all(isinstance(one, Constrained) for one in processors):
        return processors(torch.from_numpy(paths), logits)
    try:
        with torch.no_grad():  # a processor may have weights
            processed = processors(torch.from_numpy(paths), logits.clone())  # a user's processor may write in place
    except SpecbeamError:
        raise
    except Exception as error:  # whatever a user's code raises belongs to this prompt and to no other
        raise BrokenProcessor(f"a logits processor raised {type(error).__name__}: {error}") from error
    if processed.shape != logits.shape:
        raise BrokenProcessor(
            f"a logits processor returned {tuple(processed.shape)} for scores of {tuple(logits.shape)}"
        )
    if not bool((processed.amax(1) < torch.inf).all()):  # also false for NaN
        _check(logits)  # or was it the model?
        what = "NaN" if bool(processed.isnan().any()) else "+inf"
        raise BrokenProcessor(f"a logits processor returned {what}; banned tokens must get -inf, others a finite score")
    return processed


def log_softmax(logits: Float[torch.Tensor, "rows n"]) -> Float64[np.ndarray, "rows n"]:
    """In float64, along the last axis. A row of -inf stays -inf: a beam from which everything is banned has no odds."""
    norm = log_norm(logits)
    if not (norm < np.inf).all():
        _check(logits)
    return logits.double().numpy() - np.where(np.isfinite(norm), norm, 0.0)[:, None]


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
    if kernels.AVAILABLE and count > 0:
        return kernels.largest(values[None], np.zeros(1), count)[:count]
    count = min(count, int(np.count_nonzero(values > -np.inf)))
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    edge = np.partition(values, len(values) - count)[len(values) - count]
    rough = np.flatnonzero(values >= edge)
    return rough[np.argsort(-values[rough], kind="stable")][:count]
