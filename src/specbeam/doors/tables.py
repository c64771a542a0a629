"""Answers as tables of pandas."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from specbeam.core.records import Beam, Generation
from specbeam.errors import BadSetting, MissingPackage

if TYPE_CHECKING:
    import pandas as pd

_OF_REPORT = ("law", "target_passes", "draft_passes", "tokens_per_pass", "acceptance", "seconds", "joules")


def to_pandas(outs: "Iterable[Generation] | Generation", beams: bool = False) -> "pd.DataFrame":
    """Return answers as a table: a row per answer, or with `beams` a row per beam.

    The columns are prompt (its number), text, tokens, score, finished, and the figures of the report.

    Raises `BadSetting` for anything but answers of `generate`, and `MissingPackage` without pandas.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingPackage("to_pandas needs pandas: pip install 'specbeam[pandas]'") from error
    each = [outs] if isinstance(outs, Generation) else [*outs]
    _check_are_answers(each)
    columns = ["prompt", *(["beam"] if beams else []), "text", "tokens", "score", "finished", *_OF_REPORT]
    return pd.DataFrame(_rows(each, beams), columns=columns)


def _check_are_answers(each: list[Any]) -> None:
    """Raise `BadSetting` for the first element that is not a `Generation`."""
    for number, one in enumerate(each):
        if isinstance(one, Generation):
            continue
        advice = "give the list that generate returned"
        if isinstance(one, Beam):
            advice = "pandas.DataFrame(beams) makes a table of beams"
        elif one is None:
            advice = "this prompt failed; leave it out"
        raise BadSetting(f"to_pandas makes tables of Generations, and element {number} is {_kind(one)}; {advice}")


def _kind(value: Any) -> str:
    """Return the type of a value with its article, or None."""
    return "None" if value is None else f"a {type(value).__name__}"


def _rows(each: list[Generation], has_beams: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table. Answers of one beam search share their beams, which are listed once."""
    prompt = -1
    before: Generation | None = None
    for out in each:
        is_same_prompt = before is not None and out.sequence > before.sequence
        is_listed = is_same_prompt and before is not None and out.beams is before.beams
        prompt += not is_same_prompt
        before = out
        report = {name: getattr(out.report, name) for name in _OF_REPORT}
        beams = [out.beam]
        if has_beams:
            beams = [] if is_listed else out.beams
        for place, beam in enumerate(beams):
            facts = {"text": beam.text, "tokens": len(beam.tokens), "score": beam.score, "finished": beam.finished}
            yield {"prompt": prompt, "beam": place, **facts, **report}
