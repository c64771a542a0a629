"""Acceptance by rank of a pair, as `specbeam tune` has measured it: kept on disk, and read by `sequoia`."""

from collections.abc import Sequence

from specbeam.lm.base import LM
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.measure import kept_figures


def keep_acceptance(target: HuggingFaceLM, draft: HuggingFaceLM, odds: Sequence[float]) -> None:
    """Keep on disk, for k = 1, 2, ..., the odds that the child accepted at a node is the k-th one tried."""
    kept_figures.keep("acceptance", _key(target, draft), {"odds": list(odds)})


def kept_acceptance(target: LM | None, draft: LM | None) -> tuple[float, ...] | None:
    """Return the odds that were kept for a pair; None if there are none."""
    if not isinstance(target, HuggingFaceLM) or not isinstance(draft, HuggingFaceLM):
        return None
    record = kept_figures.load("acceptance", _key(target, draft))
    if record is None:
        return None
    try:
        odds = tuple(float(value) for value in record["odds"])
    except (KeyError, TypeError, ValueError):  # somebody else has written the file
        return None
    is_law = len(odds) > 0 and min(odds) >= 0 and sum(odds) <= 1 + 1e-6
    return odds if is_law else None


def _key(target: HuggingFaceLM, draft: HuggingFaceLM) -> list[str | None]:
    return [kept_figures.weights_key(lm.model) for lm in (target, draft)]
