"""Every error that specbeam raises on purpose. Each says what was found, what was expected and what to do."""

from collections.abc import Iterable, Sequence
from typing import Any


class SpecbeamError(Exception):
    """The base of all of them: `except SpecbeamError` catches what a user can mend."""


class BadSetting(SpecbeamError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class NotSupported(SpecbeamError, ValueError):
    """The method cannot honour what was asked for, and says so instead of ignoring it."""


class LostLaw(SpecbeamError, ValueError):
    """A rule that tries drafts against their law was given drafts whose law is not known."""


class BadForest(SpecbeamError, ValueError):
    """A drafter of one's own gave something that no model can read."""


class BadPrompt(SpecbeamError, ValueError):
    """A prompt is empty, too long, or holds tokens that the model does not know."""


class UnsupportedModel(SpecbeamError, ValueError):
    """The model cannot score a forest: encoder-decoder, recurrent state, ALiBi."""


class VocabularyMismatch(SpecbeamError, ValueError):
    """Draft and target do not speak the same tokens."""


class MissingFile(SpecbeamError, FileNotFoundError):
    """A path does not lead to what was expected there."""


class MissingPackage(SpecbeamError, ImportError):
    """An optional package is needed that is not installed."""


class BrokenLaw(SpecbeamError, ArithmeticError):
    """The model or a logits processor gave numbers that are no probabilities: NaN, infinity, or everything banned."""


class BrokenProcessor(BrokenLaw):
    """A logits processor raised, or gave what are no scores; the path that it did this for may be a draft's alone."""


class DeadEnd(BrokenLaw):
    """Every token is banned: the path has no way on."""


class BrokenPart(SpecbeamError, RuntimeError):
    """A controller or rule raised an error of its own, which is the cause of this one; the other prompts went on."""


class Cancelled(SpecbeamError):
    """Somebody ended this session; what was generated so far is not an answer."""


class AuditWarning(UserWarning):
    """An audited run does not look like the law that its method declares."""


class TooFewAnswers(SpecbeamError):
    """Fewer texts were left than `num_return_sequences`; `generations` holds those there are."""

    def __init__(self, text: str, generations: Sequence[Any] = ()) -> None:
        self.generations = list(generations)
        super().__init__(text)


class SomeFailed(SpecbeamError):
    """Some prompts failed; `generations` holds the results of the others, None where there is none."""

    def __init__(self, failures: Sequence[SpecbeamError], generations: Sequence[Any]) -> None:
        self.failures = list(failures)
        self.generations = list(generations)
        done = sum(one is not None for one in self.generations)
        text = "; ".join(str(failure) for failure in self.failures[:3])
        more = "" if len(self.failures) <= 3 else f"; and {len(self.failures) - 3} more"
        prompts = f"{len(self.failures)} prompt{'' if len(self.failures) == 1 else 's'}"
        super().__init__(f"{prompts} failed: {text}{more} ({done} results are in .generations)")


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Refuse a word that is none of those known."""
    if value not in known:
        raise BadSetting(f"{name} is {value!r}; it must be one of {', '.join(known)}")
