"""A profiler of nested spans; the time of a span excludes the spans inside it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Profile:
    """The seconds of each span. A span inside another is named after both: "draft/model"."""

    seconds: dict[str, float] = field(default_factory=dict)
    _name: str = ""
    _since: float = 0.0

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the time inside this context as a span inside the current one."""
        outer = self._switch(f"{self._name}/{name}" if self._name else name)
        try:
            yield
        finally:
            self._switch(outer)

    def move(self, name: str, seconds: float) -> None:
        """Move recorded time from the current span to a span inside it."""
        self.move_to(f"{self._name}/{name}", seconds)

    def move_to(self, name: str, seconds: float) -> None:
        """Move recorded time from the current span to another one."""
        for key, more in ((self._name, -seconds), (name, seconds)):
            self.seconds[key] = self.seconds.get(key, 0.0) + more

    def _switch(self, name: str) -> str:
        """Add the time since the last switch to the current span, and start another one. Returns the name of the former."""
        now = time.perf_counter()
        before = self._name
        if before:
            self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._name = name
        self._since = now
        return before


_RUNNING: ContextVar[Profile | None] = ContextVar("profile", default=None)
_NO_SPAN = nullcontext()


@contextmanager
def profiled() -> Iterator[Profile]:
    """Record the spans inside this context, and yield their profile. On a GPU the time is that of the host."""
    profile = Profile()
    token = _RUNNING.set(profile)
    try:
        yield profile
    finally:
        _RUNNING.reset(token)


def apportion(parts: Mapping[str, float], since: float) -> None:
    """Move the time since `since` from the current span to other spans, in the proportions of `parts`.

    Does nothing if no profile is being recorded.

    Args:
        parts: weight of each span by its name.
        since: a time of `time.perf_counter`.
    """
    profile = _RUNNING.get()
    whole = sum(parts.values())
    if profile is not None and whole > 0:
        seconds = time.perf_counter() - since
        for name, part in parts.items():
            profile.move_to(name, seconds * part / whole)


def span(name: str) -> AbstractContextManager[None]:
    """Return a context manager that records the time inside as a span of the running profile, if any."""
    profile = _RUNNING.get()
    return _NO_SPAN if profile is None else profile.span(name)


def record_share(name: str, since: float, share: float) -> None:
    """Record a share of the time since `since` (of `time.perf_counter`) as a span inside the current one.

    The share, from 0 to 1, comes from another measurement. Does nothing if no profile is being recorded.
    """
    profile = _RUNNING.get()
    if profile is not None:
        profile.move(name, share * (time.perf_counter() - since))
