"""The waiting line: which job comes in next, fairly between the keys that jobs belong to."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar, runtime_checkable

AGE_S = 10.0  # seconds of waiting that count as much as one step of priority


@runtime_checkable
class InLine(Protocol):
    """A job as the line sees it."""

    key: str  # whose job it is
    priority: int  # lower is earlier
    arrived: float  # seconds of the clock that `Line.pop` is given


Job = TypeVar("Job", bound=InLine)


class Line(Generic[Job]):
    """Jobs that wait, by key: a stride scheduler with priorities.

    Each key has a clock that `charge` moves on by the work done for it. Of the jobs with the best priority the one comes
    next whose key has the lowest clock; jobs of one key keep their order. Waiting lifts low priorities to the usual one,
    0, so these do not wait for ever; jobs with a number below 0 that keep coming hold up all others. A key that comes back
    after a pause starts at the lowest clock of the busy ones: a pause earns no credit.

    Args:
        weights: by key, the share of the work that it should get; 1 for all others.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self.clocks: dict[str, float] = {}  # of keys with jobs that wait or run
        self.running: dict[str, int] = {}  # number of jobs inside, by key
        self._jobs: dict[str, deque[Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._jobs.values():
            yield from jobs

    def add(self, job: Job) -> None:
        """Let a job wait."""
        if job.key not in self.clocks:
            self.clocks[job.key] = min(self.clocks.values(), default=0.0)
        self._jobs.setdefault(job.key, deque()).append(job)

    def remove(self, job: Job) -> bool:
        """Take a job out that gives up. Returns False if it does not wait here."""
        jobs = self._jobs.get(job.key, deque())
        if job not in jobs:
            return False
        jobs.remove(job)
        self._forget_if_idle(job.key)
        return True

    def pop(self, now: float, fits: Callable[[Job], bool], most_running: Callable[[str], int]) -> Job | None:
        """Take out the next job, which counts as running until `leave`; None if it has to wait.

        The next job waits for its place even if a smaller one would fit now: otherwise large jobs would never come in.

        Args:
            now: the time, for the age of jobs.
            fits: whether there is room for a job.
            most_running: the most jobs of a key that may run; jobs of keys with as many do not hold up others.
        """
        first: Job | None = None
        for key, jobs in self._jobs.items():
            if not jobs or self.running.get(key, 0) >= most_running(key):
                continue
            best = min(jobs, key=lambda job: self._rank(job, now))
            if first is None or self._order(best, now) < self._order(first, now):
                first = best
        if first is None or not fits(first):
            return None
        self._jobs[first.key].remove(first)
        self.running[first.key] = self.running.get(first.key, 0) + 1
        return first

    def leave(self, key: str) -> None:
        """Note that a job of this key, which `pop` had returned, is over."""
        self.running[key] -= 1
        self._forget_if_idle(key)

    def charge(self, key: str, work: float) -> None:
        """Move the clock of a key on by work that was done for it."""
        if key in self.clocks:
            self.clocks[key] += work / self.weights.get(key, 1.0)

    def _rank(self, job: Job, now: float) -> float:
        """Return the priority of a job; lower is earlier. Age lifts it up to 0, no further: else who floods would win."""
        return job.priority if job.priority <= 0 else max(job.priority - (now - job.arrived) // AGE_S, 0)

    def _order(self, job: Job, now: float) -> tuple[float, float, float]:
        return self._rank(job, now), self.clocks[job.key], job.arrived

    def _forget_if_idle(self, key: str) -> None:
        """Forget a key without jobs, so that the line does not grow with the number of keys."""
        if not self._jobs.get(key) and not self.running.get(key):
            self._jobs.pop(key, None)
            self.running.pop(key, None)
            self.clocks.pop(key, None)
