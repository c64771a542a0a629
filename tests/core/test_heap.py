"""Freed memory goes back to the system."""

import platform
import subprocess
import sys

import pytest

from specbeam.core import heap


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back when asked")
def test_memory_between_small_arrays_is_given_back_after_growth():
    """Logits leave gaps in which smaller arrays end up, so later logits do not fit."""
    script = """
import sys
import numpy as np
from specbeam.core.heap import Heap, resident_memory

heap = Heap()
heap.trim_if_grown()
for _ in range(3):  # glibc learns that arrays of this size come and go
    np.ones(2**20)
large = []
small = []
for _ in range(100):
    large.append(np.ones(2**20))
    small.append(np.ones(64))
grown = resident_memory()
del large
heap.trim_if_grown()
print(int(grown > 8e8), int(resident_memory() < grown - 7e8))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n"


def test_where_the_allocator_cannot_give_back_nothing_happens(monkeypatch):
    one = heap.Heap()
    monkeypatch.setattr(heap, "resident_memory", lambda: 1.0)
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    one.trim_if_grown()
    one.allowed = 0.5
    one.trim_if_grown()
    assert one.allowed == heap.GROWTH + heap.SPARE
