"""The queue of waiting jobs: fair scheduling between the API keys that jobs belong to."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar, runtime_checkable

AGE_S = 10.0  # seconds of waiting that count as much as one step of priority


@runtime_checkable
class InLine(Protocol):
    """A job that can wait in a line."""

    key: str  # the client that the job belongs to
    priority: int  # lower is earlier
    arrived: float  # seconds of the clock that `Line.pop` is given


Job = TypeVar("Job", bound=InLine)


class Line(Generic[Job]):
    """Waiting jobs by key: a stride scheduler with priorities.

    Each key has a clock, which `charge` advances by the work done for the key. Among the jobs of the best priority, the job
    whose key has the lowest clock comes next; jobs of one key keep their order. Waiting improves a low priority up to the
    usual one, 0, so no job starves, unless jobs with priorities below 0 keep arriving. A key that returns
    after a pause starts at the lowest clock of the busy keys: a pause earns no credit.

    Args:
        weights: relative share of the work by key; 1 for all others.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self.clocks: dict[str, float] = {}  # the clock of each key with waiting or running jobs
        self.running: dict[str, int] = {}  # number of running jobs by key
        self._jobs: dict[str, deque[Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._jobs.values():
            yield from jobs

    def add(self, job: Job) -> None:
        """Append a job to the queue of its key."""
        if job.key not in self.clocks:
            self.clocks[job.key] = min(self.clocks.values(), default=0.0)
        self._jobs.setdefault(job.key, deque()).append(job)

    def remove(self, job: Job) -> bool:
        """Remove a waiting job. Returns False if it is not waiting."""
        jobs = self._jobs.get(job.key, deque())
        if job not in jobs:
            return False
        jobs.remove(job)
        self._forget_if_idle(job.key)
        return True

    def pop(self, now: float, fits: Callable[[Job], bool], most_running: Callable[[str], int]) -> Job | None:
        """Remove and return the next job, which counts as running until `leave`; None if it does not fit yet.

        A smaller job does not overtake a job that does not fit: otherwise large jobs would starve.

        Args:
            now: clock time.
            fits: whether there is room for a job.
            most_running: maximum number of running jobs of a key; keys at their limit do not hold up others.
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
        """Record the end of a running job of this key."""
        self.running[key] -= 1
        self._forget_if_idle(key)

    def charge(self, key: str, work: float) -> None:
        """Advance the clock of a key by the work done for it."""
        if key in self.clocks:
            self.clocks[key] += work / self.weights.get(key, 1.0)

    def _rank(self, job: Job, now: float) -> float:
        """Return the priority of a job; lower is earlier. Age improves it only up to 0, or floods would win."""
        return job.priority if job.priority <= 0 else max(job.priority - (now - job.arrived) // AGE_S, 0)

    def _order(self, job: Job, now: float) -> tuple[float, float, float]:
        return self._rank(job, now), self.clocks[job.key], job.arrived

    def _forget_if_idle(self, key: str) -> None:
        """Forget a key without jobs, so that the memory does not grow with the number of keys."""
        if not self._jobs.get(key) and not self.running.get(key):
            self._jobs.pop(key, None)
            self.running.pop(key, None)
            self.clocks.pop(key, None)
