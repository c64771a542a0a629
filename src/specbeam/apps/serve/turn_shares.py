"""Turns in equal parts for the keys whose jobs run."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Running(Protocol):
    """A running job."""

    key: str
    last_step: int  # the last step in which it took turns


Job = TypeVar("Job", bound=Running)


def next_jobs(
    jobs: Sequence[Job],
    clocks: Mapping[str, float],
    weights: Mapping[str, float],
    absent: Collection[str],
    at_once: int,
) -> list[Job]:
    """Return the jobs that take turns in the next step, in order, so that no key is slower because another has more jobs.

    Each key takes turns for as many jobs, by weight, as the key with the fewest, at least one; its other jobs wait for
    their turn. Jobs of the key with the least work so far come first.

    Args:
        jobs: all running jobs.
        clocks: the work so far by key; 0 for all others.
        weights: relative share of the work by key; 1 for all others.
        absent: keys without running jobs that may have one at any time. They would wait for the turns of the others, and
            count as keys with one job.
        at_once: number of jobs that decode in parallel. At least this many take turns, if that many run.
    """
    jobs_of: dict[str, list[Job]] = defaultdict(list)
    for job in sorted(jobs, key=lambda job: job.last_step):
        jobs_of[job.key].append(job)
    counts = dict.fromkeys(absent, 1) | {key: len(own) for key, own in jobs_of.items()}
    if len(counts) < 2:
        return [*jobs]
    share = min(count / weights.get(key, 1.0) for key, count in counts.items())
    first: list[Job] = []
    further: list[Job] = []
    for key in sorted(jobs_of, key=lambda key: clocks.get(key, 0.0)):
        part = max(math.floor(share * weights.get(key, 1.0) + 1e-9), 1)
        first += jobs_of[key][:part]
        further += jobs_of[key][part:]
    further.sort(key=lambda job: job.last_step)
    return first + further[: max(at_once - len(first), 0)]
