"""How many threads there are, and who may take them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Let torch, and what goes by its number of threads, take one thread for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
