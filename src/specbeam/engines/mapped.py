"""Weights that lie in files which are mapped to memory: they take none but what of them was read, and can give that back.

transformers loads safetensors so, if no type is changed: a weight is a view of the file. An engine that lays weights out
anew then needs memory for its own only, if each weight leaves memory after it was read. What reads it later gets it from the
file again.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_WIDENED = 300_000_000  # weights; `load` leaves those of a larger model in the type of their files
_MAPPED = "_specbeam_mapped"
_DONT_NEED = 4  # MADV_DONTNEED of Linux


def mark_mapped(model: "PreTrainedModel") -> None:
    """Mark a model whose weights `load` has left in the type of their files, for an engine that computes in float32."""
    object.__setattr__(model, _MAPPED, True)


def is_mapped(model: "PreTrainedModel") -> bool:
    """Return whether a model was marked by `mark_mapped`."""
    return bool(vars(model).get(_MAPPED, False))


@dataclass(frozen=True)
class MappedFiles:
    """The parts of memory that hold what was read of files, and nothing that this process has written.

    Attributes:
        parts: first address, and the one after the last, of each part.
    """

    parts: tuple[tuple[int, int], ...]

    def holds(self, weight: Tensor) -> bool:
        """Return whether a weight lies in a file."""
        start = weight.data_ptr()
        return any(first <= start and start + weight.nbytes <= stop for first, stop in self.parts)

    def release(self, weights: Iterable[Tensor]) -> None:
        """Let weights leave memory, those that lie in a file; whoever reads them gets them from the file again."""
        for weight in weights:
            if self.holds(weight):
                start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
                if stop > start:
                    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONT_NEED)


NOTHING_MAPPED = MappedFiles(())


def mapped_files(model: "PreTrainedModel") -> MappedFiles:
    """Return where the weights of a model that is kept as its files are lie in memory; nowhere if this cannot be known.

    A part that this process has written to, as a training does, counts as no file: giving it back would undo that.
    """
    if not is_mapped(model) or sys.platform != "linux":
        return NOTHING_MAPPED
    weights = [weight.data_ptr() for weight in model.parameters()]
    parts = []
    for first, stop, fields in _maps():
        is_unwritten = (
            fields.get("Anonymous") == "0 kB" and fields.get("Swap") == "0 kB"
        )  # a written page may be swapped
        is_file = is_unwritten and fields["path"].startswith("/")
        if is_file and any(first <= start < stop for start in weights):
            parts.append((first, stop))
    return MappedFiles(tuple(parts))


def _maps() -> Iterable[tuple[int, int, dict[str, Any]]]:
    """Yield the parts of this process's memory: first address, the one after the last, and what Linux tells of it."""
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
        first = 0
        stop = 0
        fields: dict[str, Any] = {}
        for line in lines:
            head, _, rest = line.partition(" ")
            if head.endswith(":"):
                fields[head[:-1]] = rest.strip()
                continue
            if fields:
                yield first, stop, fields
            low, _, high = head.partition("-")
            first = int(low, 16)
            stop = int(high, 16)
            path = line.split(maxsplit=5)[5:]
            fields = {"path": path[0].strip() if path else ""}
        if fields:
            yield first, stop, fields
