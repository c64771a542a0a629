"""The errors raised for users; all are `SpecbeamError`s."""

from collections.abc import Sequence
from typing import Any

from specbeam.core.errors import *  # noqa: F403
from specbeam.core.errors import SpecbeamError, counted


class BadAudio(SpecbeamError, ValueError):
    """Audio cannot be read, is too short, or has invalid samples."""


class BrokenValue(SpecbeamError, ValueError):
    """The value function of a search raised an error, or returned something other than a value."""


class SearchFailed(SpecbeamError):
    """The searches of some prompts failed; `failures` holds their errors.

    `results` has an entry per prompt; failed searches have their tree so far.
    """

    def __init__(self, failures: Sequence[SpecbeamError], results: Sequence[Any]) -> None:
        self.failures = list(failures)
        self.results = list(results)
        different = list(dict.fromkeys(str(failure) for failure in self.failures))
        drawn = sum(result.spent for result in self.results)
        super().__init__(
            f"{len(self.failures)} of {len(self.results)} searches failed: {'; '.join(different[:3])} "
            f"(the trees of all, {counted(drawn, 'token')}, are in .results)"
        )
