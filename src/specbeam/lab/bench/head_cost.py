"""The cost of a pass of a draft head and of its target."""

from specbeam import Pair
from specbeam.models import HuggingFaceLM
from specbeam.models.heads import HeadLM
from specbeam.recipes import curve_of

ROWS = (1, 8, 32)


def head_cost(pair: Pair) -> str:
    """Return a sentence with the cost of passes of a pair's draft head and its target; "" if the draft is not a head."""
    if not isinstance(pair.draft, HeadLM):
        return ""
    head = _times(pair.draft)
    target = _times(pair.forgetful_target)
    rows = ", ".join(map(str, ROWS))
    how = "compiled" if pair.draft.is_compiled else "torch"
    return (
        f"A pass over {rows} rows takes {head} ms with the head ({how}), "
        f"{target} ms with the target ({pair.target.engine})"
    )


def _times(lm: HeadLM | HuggingFaceLM) -> str:
    """Return the milliseconds of passes of a model or head."""
    curve = curve_of(lm)
    return ", ".join(f"{1e3 * curve.pass_s(rows):.2f}" for rows in ROWS)
