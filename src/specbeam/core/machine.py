"""The memory and processors that this process may use, with the limits of its container or service (cgroups of Linux)."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
QUOTA = "cpu.max"  # processor microseconds per period, and the period
# The limit of a group in bytes, the bytes in use, and the name of those that the system takes back when it needs them.
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory() -> float:
    """Return the memory in bytes that this process may still take; infinity if it is unknown.

    This is the smallest of the free memory of the machine and of what the limits of the process's groups leave.
    """
    sizes = [_left_in(group) for group in _groups()]
    with suppress(OSError, ValueError):
        (_, _, available) = MEMORY.read_text().partition("MemAvailable:")
        (kilobytes, *_) = available.split()
        sizes.append(1024.0 * int(kilobytes))
    return min(sizes, default=float("inf"))


def processor_quota() -> float:
    """Return the average number of processors that the process's groups may use; infinity without a limit."""
    quotas = []
    for group in _groups():
        with suppress(OSError, ValueError):  # "max" is no number
            (quota, period) = (group / QUOTA).read_text().split()
            quotas.append(int(quota) / int(period))
    return min(quotas, default=float("inf"))


def _groups() -> Iterator[Path]:
    """Yield the folders of the groups of this process, and of those above them, whose limits hold for it, too.

    A container sees its own group as the root of all groups.
    """
    places = [GROUPS, GROUPS / "memory"]
    with suppress(OSError, ValueError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                inner = GROUPS / kinds / path.lstrip("/")
                places += [inner, *inner.parents]
    for place in dict.fromkeys(places):
        if place.is_relative_to(GROUPS):
            yield place


def _left_in(group: Path) -> float:
    """Return the bytes that the limit of a group leaves; infinity without a limit."""
    for limit, used, reclaimable in (VERSION_2, VERSION_1):
        with suppress(OSError, ValueError):  # "max" is no number
            most = int((group / limit).read_text())
            taken = int((group / used).read_text())
            return max(most - taken + _reclaimable(group, reclaimable), 0.0)
    return float("inf")


def _reclaimable(group: Path, name: str) -> int:
    """Return the bytes of files in memory that the system takes back when a group needs them."""
    with suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
