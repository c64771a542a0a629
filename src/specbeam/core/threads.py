"""The split of threads between torch and compiled code, whose idle threads spin and slow each other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Allowed(threading.local):
    threads: int | None = None  # for compiled code; None: as many as torch may use


_ALLOWED = _Allowed()


def allowed_threads() -> int:
    """Return the number of threads for compiled code: as many as torch, or the number set by `torch_on_one_thread`."""
    return torch.get_num_threads() if _ALLOWED.threads is None else _ALLOWED.threads


@contextmanager
def torch_on_one_thread(compiled_threads: int | None = None) -> Iterator[None]:
    """Limit torch to one thread inside this context, in the current thread.

    Args:
        compiled_threads: number of threads for compiled code inside the context; None: as many as before.
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
