"""The split of threads between torch and compiled code: each side waits for work by spinning, which slows the other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Allowed(threading.local):
    threads: int | None = None  # for compiled code; None: as many as torch may use


_ALLOWED = _Allowed()


def allowed_threads() -> int:
    """Return how many threads compiled code may use: as many as torch, or what `torch_on_one_thread` has set."""
    return torch.get_num_threads() if _ALLOWED.threads is None else _ALLOWED.threads


@contextmanager
def torch_on_one_thread(compiled_threads: int | None = None) -> Iterator[None]:
    """Limit torch to one thread while the context is open, in the current thread.

    Args:
        compiled_threads: number of threads that compiled code may use meanwhile; None: as many as before.
    """
    before = torch.get_num_threads()
    allowed = _ALLOWED.threads
    _ALLOWED.threads = allowed_threads() if compiled_threads is None else compiled_threads
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _ALLOWED.threads = allowed
