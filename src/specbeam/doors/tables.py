"""Answers as tables of pandas."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from specbeam.core.records import Generation
from specbeam.errors import NotSupported

if TYPE_CHECKING:
    import pandas as pd

_OF_REPORT = ("law", "target_passes", "draft_passes", "tokens_per_pass", "acceptance", "seconds", "joules")


def to_pandas(outs: "Iterable[Generation] | Generation", beams: bool = False) -> "pd.DataFrame":
    """Return answers as a table: a row per prompt, or with `beams` a row per beam.

    The columns are prompt (its number), text, tokens, score, finished, and the figures of the report.

    Raises `NotSupported` without pandas.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise NotSupported("to_pandas needs pandas: pip install 'specbeam[pandas]'") from error
    each = [outs] if isinstance(outs, Generation) else [*outs]
    rows = [row for number, out in enumerate(each) for row in _rows(number, out, beams)]
    columns = ["prompt", *(["beam"] if beams else []), "text", "tokens", "score", "finished", *_OF_REPORT]
    return pd.DataFrame(rows, columns=columns)


def _rows(number: int, out: Generation, beams: bool) -> list[dict[str, Any]]:
    """Return the rows of one answer."""
    report = {name: getattr(out.report, name) for name in _OF_REPORT}
    found = []
    for place, beam in enumerate(out.beams if beams else out.beams[:1]):
        facts = {"text": beam.text, "tokens": len(beam.tokens), "score": beam.score, "finished": beam.finished}
        found.append({"prompt": number, "beam": place, **facts, **report})
    return found
