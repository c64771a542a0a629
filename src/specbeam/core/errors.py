"""The errors that decoding raises on purpose. Each message states what was found, what was expected and what to do."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

_OURS = __name__.partition(".")[0]  # the package


class SpecbeamError(Exception):
    """The base class of all errors of specbeam: `except SpecbeamError` catches what a user can correct."""


class BadSetting(SpecbeamError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class NotSupported(SpecbeamError, ValueError):
    """An option or combination that is not supported; specbeam raises this error instead of ignoring the option."""


class UnknownKind(SpecbeamError, TypeError):
    """A verb has no step for a kind of record, because a user's own part or engine has not registered one."""


class LostLaw(SpecbeamError, ValueError):
    """A rule that tries drafts against their law got drafts of unknown law."""


class BadForest(SpecbeamError, ValueError):
    """A user's own drafter returned a forest that no model can read."""


class BadPrompt(SpecbeamError, ValueError):
    """A prompt is empty, too long, or has tokens outside of the model's vocabulary."""


class NoPrompts(BadPrompt, BadSetting):
    """A call has no prompts, or its prompts are of the wrong type."""


class UnsupportedModel(SpecbeamError, ValueError):
    """The model cannot score a forest, because of recurrent state, ALiBi, or fixed positions."""


class VocabularyMismatch(SpecbeamError, ValueError):
    """Draft and target do not have the same tokens."""


class MissingFile(SpecbeamError, FileNotFoundError):
    """A file or folder is missing, or does not hold what was expected."""


class CannotWrite(SpecbeamError, OSError):
    """A file cannot be written: its folder is missing, it is a folder itself, permission or space is missing."""


class BadCheckpoint(SpecbeamError, ValueError):
    """The files of a model are broken, do not fit each other, or have weights that are not numbers."""


class BadHead(SpecbeamError, ValueError):
    """The files of a draft head cannot be read, or the head does not fit the target."""


class MissingPackage(SpecbeamError, ImportError):
    """An optional package that the call needs is not installed."""


class BrokenLaw(SpecbeamError, ArithmeticError):
    """The scores of the model or of a logits processor define no law: NaN, infinity, or every token banned."""


class BrokenProcessor(BrokenLaw):
    """A logits processor raised an error or returned something other than scores.

    Its path may be a draft that would not have been accepted.
    """


class DeadEnd(BrokenLaw):
    """Every next token is banned, so the text cannot continue."""


class BrokenPart(SpecbeamError, RuntimeError):
    """A part, such as a controller or rule, raised an error, which is the `__cause__` of this one.

    It ends the session of its prompt; other prompts are not affected.
    """


@contextmanager
def naming(part: object, method: str) -> Iterator[None]:
    """Turn the errors of a part's method into `BrokenPart`, whose message names them; errors of specbeam pass."""
    try:
        yield
    except SpecbeamError:
        raise
    except Exception as error:
        raise BrokenPart(f"{type(part).__name__}.{method} raised {type(error).__name__}: {error}") from error


class Cancelled(SpecbeamError):
    """A session was cancelled by its user; the text generated so far is not an answer."""


class TimedOut(SpecbeamError, TimeoutError):
    """A session had not started, or had no token, at its deadline."""


class ServerRefused(SpecbeamError):
    """A server did not answer, or refused a request; the message is the server's."""


class ServerGone(ServerRefused):
    """The program that runs the target does not answer, or not in time, so other prompts would fail, too."""


class AuditWarning(UserWarning):
    """The output of an audited run is unlikely under the declared law of its method."""


class TooFewAnswers(SpecbeamError):
    """A session ended with fewer texts than `num_return_sequences`; `generations` holds the texts that it has."""

    def __init__(self, text: str, generations: Sequence[Any] = ()) -> None:
        self.generations = list(generations)
        super().__init__(text)


class SomeFailed(SpecbeamError):
    """Some prompts failed; `failures` holds their errors.

    `generations` has an entry per prompt and return sequence, in the order of the prompts; None for failures.
    """

    def __init__(self, failures: Sequence[SpecbeamError], generations: Sequence[Any]) -> None:
        self.failures = list(failures)
        self.generations = list(generations)
        done = sum(generation is not None for generation in self.generations)
        text = "; ".join(str(failure) for failure in self.failures[:3])
        more = "" if len(self.failures) <= 3 else f"; and {len(self.failures) - 3} more"
        prompts = counted(len(self.failures), "prompt")
        super().__init__(f"{prompts} failed: {text}{more} ({counted(done, 'result')} in .generations)")


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the line outside of specbeam that called it, however deep the fault was found."""
    outside = 1
    for depth, (frame, _) in enumerate(walk_stack(sys._getframe()), 1):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == _OURS:
            outside = depth + 1
    warnings.warn(text, kind, stacklevel=outside)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 pass" and "2,000 passes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Raise `BadSetting` unless the setting `name` has one of the `known` values."""
    if value not in known:
        raise BadSetting(f"{name} is {value!r}; it must be one of {', '.join(known)}")
