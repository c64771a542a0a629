"""The memory that this process holds, and what of it the allocator can give back to the system."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

OWN_PAGES = Path("/proc/self/statm")
GROWTH = 1.25  # of resident memory, and bytes on top, before freed memory is given back to the system
SPARE = 2.0**28


def resident_memory() -> float:
    """Return the memory of this process in bytes that is not swapped out; 0 if the system does not tell."""
    with suppress(OSError, ValueError):
        (_, pages, *_) = OWN_PAGES.read_text().split()
        return float(int(pages) * os.sysconf("SC_PAGE_SIZE"))
    return 0.0


class Heap:
    """The allocator of this process. Small arrays that outlive the logits around them keep gaps, which add up to gigabytes.

    Attributes:
        allowed: resident memory in bytes above which freed memory is given back; 0 before the first look.
    """

    def __init__(self) -> None:
        self.allowed = 0.0

    def trim_if_grown(self) -> None:
        """Give freed memory back to the system if the process has grown since the last time; only for glibc."""
        if resident_memory() <= self.allowed:
            return
        if self.allowed:
            with suppress(AttributeError, OSError):
                ctypes.CDLL(None).malloc_trim(0)
        self.allowed = GROWTH * resident_memory() + SPARE


HEAP = Heap()
