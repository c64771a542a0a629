"""Where the time goes: laps inside laps, each with the time that was not spent in laps inside it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds by lap. A lap inside another is named after both: "draft/model"."""

    seconds: dict[str, float] = field(default_factory=dict)
    _name: str = ""
    _since: float = 0.0

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        outer = self._switch(f"{self._name}/{name}" if self._name else name)
        try:
            yield
        finally:
            self._switch(outer)

    def move(self, name: str, seconds: float) -> None:
        """From the present lap to one inside it."""
        self.move_to(f"{self._name}/{name}", seconds)

    def move_to(self, name: str, seconds: float) -> None:
        """From the present lap to another one."""
        for key, more in ((self._name, -seconds), (name, seconds)):
            self.seconds[key] = self.seconds.get(key, 0.0) + more

    def _switch(self, name: str) -> str:
        """Book the time since the last switch; give the name that it is booked on."""
        now = time.perf_counter()
        before = self._name
        if before:
            self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._name = name
        self._since = now
        return before


_RUNNING: ContextVar[Clock | None] = ContextVar("clock", default=None)
_NOBODY_ASKS = nullcontext()


@contextmanager
def timed() -> Iterator[Clock]:
    """Inside, laps are booked on this clock. On a GPU a lap is what the host waits for."""
    clock = Clock()
    token = _RUNNING.set(clock)
    try:
        yield clock
    finally:
        _RUNNING.reset(token)


def apportion(parts: Mapping[str, float], since: float) -> None:
    """Book the time since then on laps, in these proportions, and the rest of the present lap as it is."""
    clock = _RUNNING.get()
    whole = sum(parts.values())
    if clock is not None and whole > 0:
        seconds = time.perf_counter() - since
        for name, part in parts.items():
            clock.move_to(name, seconds * part / whole)


def lap(name: str) -> AbstractContextManager[None]:
    """Book the time inside on the running clock, if there is one."""
    clock = _RUNNING.get()
    return _NOBODY_ASKS if clock is None else clock.lap(name)


def book(name: str, since: float, share: float) -> None:
    """Book a share of the time since then, which was measured otherwise, as a lap inside the present one."""
    clock = _RUNNING.get()
    if clock is not None:
        clock.move(name, share * (time.perf_counter() - since))
