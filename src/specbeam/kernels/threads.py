"""Who takes how many threads: torch's and ours hinder each other, for each waits for work by spinning."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Allowed(threading.local):
    threads: int | None = None  # of compiled code; None: as many as torch may take


_ALLOWED = _Allowed()


def allowed_threads() -> int:
    """Return how many threads compiled code may take: as many as torch may, unless torch was told to leave them to it."""
    return torch.get_num_threads() if _ALLOWED.threads is None else _ALLOWED.threads


@contextmanager
def torch_on_one_thread(ours: int | None = None) -> Iterator[None]:
    """Let torch take one thread for a while, in this thread.

    Args:
        ours: number of threads that compiled code may take; None: as many as before.
    """
    before = torch.get_num_threads()
    allowed = _ALLOWED.threads
    _ALLOWED.threads = allowed_threads() if ours is None else ours
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _ALLOWED.threads = allowed
