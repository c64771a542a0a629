"""Acceptance by rank of a pair, measured and saved by `specbeam tune`, and used by `sequoia`."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from specbeam.core.lm import LM
from specbeam.core.measure import saved_figures
from specbeam.core.measure.saved_figures import Figures, NumberField, RecordFields
from specbeam.models.huggingface import HuggingFaceLM

# Prior probabilities that the accepted child of a node is the k-th one tried; they count as 20 nodes.
GUESS = (0.7, 0.12, 0.05, 0.03, 0.02)
GUESS_NODES = 20
_ACCEPTANCE = Figures(
    "acceptance",
    RecordFields(
        {"odds": NumberField((None,), most=1.0)},
        lambda record: len(record["odds"]) > 0 and sum(record["odds"]) <= 1 + 1e-6,
    ),
)


def with_guess(odds: Sequence[float], nodes: int) -> tuple[float, ...]:
    """Return probabilities measured at `nodes` nodes, mixed with the prior, so that none is 0 after few nodes."""
    guess = (*GUESS, *[0.0] * len(odds))
    total = nodes + GUESS_NODES
    return tuple((nodes * seen + GUESS_NODES * guessed) / total for seen, guessed in zip(odds, guess, strict=False))


def save_acceptance(target: HuggingFaceLM, draft: HuggingFaceLM, odds: Sequence[float]) -> None:
    """Save, for k = 1, 2, ..., the probability that the accepted child of a node is the k-th one tried."""
    _ACCEPTANCE.keep(_key(target, draft), {"odds": list(odds)})
    _KNOWN.setdefault(target, WeakKeyDictionary())[draft] = tuple(odds)


def saved_acceptance(target: LM | None, draft: LM | None) -> tuple[float, ...] | None:
    """Return the saved acceptance probabilities of a pair; None if there are none.

    They do not change while the pair is loaded; otherwise equal seeds could give different texts.
    """
    if not isinstance(target, HuggingFaceLM) or not isinstance(draft, HuggingFaceLM):
        return None
    of_target = _KNOWN.setdefault(target, WeakKeyDictionary())
    if draft not in of_target:
        of_target[draft] = _odds_on_disk(target, draft)
    return of_target[draft]


_KNOWN: "WeakKeyDictionary[HuggingFaceLM, WeakKeyDictionary[HuggingFaceLM, tuple[float, ...] | None]]" = (
    WeakKeyDictionary()
)


def _odds_on_disk(target: HuggingFaceLM, draft: HuggingFaceLM) -> tuple[float, ...] | None:
    record = _ACCEPTANCE.load(_key(target, draft))
    return None if record is None else tuple(float(value) for value in record["odds"])


def _key(target: HuggingFaceLM, draft: HuggingFaceLM) -> list[str | None]:
    return [saved_figures.weights_key(lm.known) for lm in (target, draft)]
