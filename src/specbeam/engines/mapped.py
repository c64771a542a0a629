"""Release of weights in memory-mapped files: only pages that were read take memory, and that memory can be released.

transformers maps safetensors if their type is not converted: a weight is a view of the file. If an engine releases each
weight after packing it, only the packed copy stays in memory. Later reads load the weight from the file again.
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

LARGEST_WIDENED = 300_000_000  # weights; `load` does not convert larger models to float32
_MAPPED = "_specbeam_mapped"
_DONT_NEED = 4  # MADV_DONTNEED of Linux


def mark_mapped(model: "PreTrainedModel") -> None:
    """Mark a model whose weights `load` has left in mapped files, for engines that compute in float32."""
    object.__setattr__(model, _MAPPED, True)


def is_mapped(model: "PreTrainedModel") -> bool:
    """Return whether a model was marked by `mark_mapped`."""
    return bool(vars(model).get(_MAPPED, False))


@dataclass(frozen=True)
class MappedFiles:
    """The memory ranges of mapped files that this process has not written.

    Attributes:
        parts: start and end address of each range.
    """

    parts: tuple[tuple[int, int], ...]

    def holds(self, weight: Tensor) -> bool:
        """Return whether a weight is in a mapped file."""
        start = weight.data_ptr()
        return any(first <= start and start + weight.nbytes <= stop for first, stop in self.parts)

    def release(self, weights: Iterable[Tensor]) -> None:
        """Free the memory of weights in mapped files; a later read loads them from the file again."""
        for weight in weights:
            if self.holds(weight):
                start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
                stop = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
                if stop > start:
                    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONT_NEED)


NOTHING_MAPPED = MappedFiles(())


def mapped_files(model: "PreTrainedModel") -> MappedFiles:
    """Return the memory ranges of a mapped model's weights; none if they cannot be determined.

    Ranges that this process has written to, for example in training, are excluded: releasing them would undo the changes.
    """
    if not is_mapped(model) or sys.platform != "linux":
        return NOTHING_MAPPED
    weights = [weight.data_ptr() for weight in model.parameters()]
    parts = []
    for first, stop, fields in _maps():
        # A written page is anonymous, or swapped out.
        is_unwritten = fields.get("Anonymous") == "0 kB" and fields.get("Swap") == "0 kB"
        is_file = is_unwritten and fields["path"].startswith("/")
        if is_file and any(first <= start < stop for start in weights):
            parts.append((first, stop))
    return MappedFiles(tuple(parts))


def _maps() -> Iterable[tuple[int, int, dict[str, Any]]]:
    """Yield start, end and fields of the memory ranges of this process in Linux's smaps."""
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
