"""Decodes the rows of a job together; each row has its own seed and settings, and an error affects only its row."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specbeam import Beam, Generation, Method, Pair
from specbeam.apps.jobs.rows import JobRow, row_seed
from specbeam.core import TURNS, Decoder
from specbeam.doors import Request, Settings, source_length, usual_method
from specbeam.errors import BadSetting, NotSupported, ServerGone, SpecbeamError, TooFewAnswers
from specbeam.recipes import resolve

# The columns of an answer with their types, for typed tables; `id` is a text or an integer.
ANSWER_COLUMNS = {
    "id": "text", "text": "text", "score": "number", "finish_reason": "text", "beams": "beams",
    "prompt_tokens": "integer", "new_tokens": "integer", "target_passes": "integer", "draft_passes": "integer",
    "accepted": "integer", "seed": "integer", "law": "text", "error": "text",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The models, method and settings that a job decodes each row with.

    Attributes:
        method: a recipe other than "auto", which could choose another method when the job is resumed.
        seed: determines the seed of each row, together with the row's id.
        batch_size: number of texts decoded at the same time.
        options: options of `specbeam.generate`; the settings of a row override them.
    """

    pair: Pair
    method: Method
    seed: int = 0
    batch_size: int = 32
    options: dict[str, Any] = field(default_factory=dict)


def work_of(pair: Pair, method: Method | str | None, seed: int, batch_size: int, options: dict[str, Any]) -> Work:
    """Return the work with checked settings. Raises `BadSetting` or `NotSupported` if they are invalid."""
    resolved = usual_method(pair) if method is None else resolve(method)
    if resolved.name == "auto":
        raise NotSupported(
            "a job cannot use method 'auto': its measurements could choose another method when the job is resumed, and "
            "texts would differ; choose a method (`specbeam methods`)"
        )
    for name, value in (("batch_size", batch_size), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool) or value < (1 if name == "batch_size" else 0):
            raise BadSetting(f"{name} is {value!r}; it must be an integer of at least {int(name == 'batch_size')}")
    given = {name: value for name, value in options.items() if value is not None}
    work = Work(pair, resolved, seed, batch_size, given)
    Request.of(pair, [], resolved, Settings.given(given), seed)
    return work


class AnsweredRow(NamedTuple):
    """A row with its answer, a value for each of `ANSWER_COLUMNS`."""

    row: JobRow
    record: dict[str, Any]


class _Asked(NamedTuple):
    """A row being decoded."""

    row: JobRow
    request: Request
    seed: int


def answer_rows(
    work: Work, rows: Iterable[JobRow], after_step: Callable[[], None] = lambda: None
) -> Iterator[AnsweredRow]:
    """Decode rows, and yield each row with its answer as soon as it is finished. Rows are read as places become free.

    A row that fails gets an answer with its error, and does not affect other rows.

    Raises `ServerGone` if the program that runs the target does not answer any more.

    Args:
        after_step: called after each step of the decoder.
    """
    line = iter(rows)
    under_way: list[_Asked] = []
    with Decoder(work.pair.target, work.batch_size, TURNS, filling=work.batch_size) as decoder:
        while True:
            while decoder.free and (row := next(line, None)) is not None:
                asked = _ask(work, row)
                if isinstance(asked, AnsweredRow):
                    yield asked
                    continue
                for session in asked.request.sessions:
                    session.count.restart()
                    decoder.add(session)
                under_way.append(asked)
            if not decoder.busy:
                return
            decoder.step()
            after_step()
            over = [asked for asked in under_way if all(session.over for session in asked.request.sessions)]
            under_way = [asked for asked in under_way if asked not in over]
            _raise_if_target_is_gone(over)
            for asked in over:
                yield _answer(work, asked)


def _raise_if_target_is_gone(over: Iterable[_Asked]) -> None:
    """Raise `ServerGone` if a row failed with it: all later rows would, and a resumed job decodes this one again."""
    for asked in over:
        for session in asked.request.sessions:
            if isinstance(session.failure, ServerGone):
                raise session.failure


def _ask(work: Work, row: JobRow) -> _Asked | AnsweredRow:
    """Return a row with its sessions, or its answer if the row is invalid."""
    if row.error:
        return failed_row(row, row.error)
    seed = row_seed(work.seed, row)
    try:
        own = {name: value for name, value in row.settings.items() if name != "seed"}
        prompt = {"messages": row.prompt} if row.is_chat else row.prompt
        request = Request.of(work.pair, [prompt], work.method, Settings.given(work.options | own), seed)
        for error in request.refused.values():
            raise error
    except SpecbeamError as error:
        return failed_row(row, _said(error), seed)
    except (TypeError, ValueError, OverflowError) as error:  # a setting of the row has the wrong type, or is too large
        return failed_row(row, f"BadSetting: {error}", seed)
    return _Asked(row, request, seed)


def failed_row(row: JobRow, error: str, seed: int | None = None) -> AnsweredRow:
    """Return a row whose answer is an error."""
    record = dict.fromkeys(ANSWER_COLUMNS) | {"id": row.id, "seed": seed, "error": error}
    return AnsweredRow(row, record)


def _answer(work: Work, asked: _Asked) -> AnsweredRow:
    """Return a row whose sessions are over with its answer."""
    error = ""
    of_sessions: list[list[Generation]] = []
    for session in asked.request.sessions:
        result = asked.request.result(session)
        if isinstance(result, SpecbeamError):
            error = error or _said(result)
            result = result.generations if isinstance(result, TooFewAnswers) else []
        of_sessions.append(list(result))
    if not any(of_sessions):
        return failed_row(asked.row, error, asked.seed)
    beams = _beams(of_sessions)
    first = next(generations[0] for generations in of_sessions if generations)
    record = {
        "id": asked.row.id,
        "text": first.text,
        "score": beams[0].score,
        "finish_reason": _reason(beams[0]),
        "beams": [_shown(beam) for beam in beams],
        "prompt_tokens": source_length(asked.request.sessions[0]) or len(first.prompt),
        "new_tokens": len(first.tokens),
    }
    counts = [session.count for session in asked.request.sessions]
    record["target_passes"] = sum(count.target_passes for count in counts)
    record["draft_passes"] = sum(count.draft_passes for count in counts)
    record["accepted"] = sum(count.accepted for count in counts)
    record |= {"seed": asked.seed, "law": first.report.law, "error": error or None}
    return AnsweredRow(asked.row, record)


def _beams(of_sessions: list[list[Generation]]) -> list[Beam]:
    """Return the beams of one session, best first; of several sessions, the best beam of each, in order."""
    if len(of_sessions) == 1:
        return of_sessions[0][0].beams
    return [generations[0].beams[0] for generations in of_sessions if generations]


def _shown(beam: Beam) -> dict[str, Any]:
    shown = {"text": beam.text, "tokens": beam.tokens, "score": beam.score, "finish_reason": _reason(beam)}
    return shown if beam.item is None else shown | {"item": str(beam.item)}


def _reason(beam: Beam) -> str:
    """Return "stop" for a finished text, "length" for one cut off at the limit."""
    return "stop" if beam.finished else "length"


def _said(error: SpecbeamError) -> str:
    """Return the class and message of an error, without the number of the prompt, which is always 0."""
    return f"{type(error).__name__}: {str(error).replace('prompt 0', 'the prompt', 1)}"
