"""Passes of a model on a GPU as captured graphs, and the driver's calls that loops run them with."""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.lm.gpu_decoder import GpuDecoder, PassShape, SlotStore
from specbeam.lm.gpu_staging import Staging
from specbeam.lm.sizes import up

FEW = 64  # rows for which the head costs what it costs for one


class ForLoops(NamedTuple):
    """How loops run passes of one session."""

    by_rows: Int64[
        np.ndarray, "3 sizes"
    ]  # of a pass: the size it is filled up to, its graph, and where that has its logits
    stream: int
    calls: tuple[int, int, int, int]  # addresses of the driver's functions: copy there, launch a graph, copy here, wait


class Graphs:
    """A pass is captured when its size is met for the second time; larger ones than the staging is made for are not.

    Args:
        capture: on a GPU; otherwise the same steps run one by one, the oracle of the graphs.
    """

    def __init__(self, decoder: GpuDecoder, store: SlotStore, staging: Staging, capture: bool) -> None:
        self.decoder, self.store, self.staging, self.capture = decoder, store, staging, capture
        self.loops = capture and hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")  # since torch 2.9
        self._known: dict[PassShape, tuple[torch.cuda.CUDAGraph, torch.Tensor] | None] = {}
        self._by_rows = np.zeros((3, FEW + 1), dtype=np.int64)
        self._pool: Any = None

    def clear(self) -> None:
        """The store has moved: graphs write where nobody looks any more."""
        self._known.clear()
        self._by_rows[:] = 0
        self._pool = None  # it went with the last of its graphs

    def run(self, staging: Staging, shape: PassShape) -> Float[torch.Tensor, "wanted vocab"]:
        """The logits are valid until the next pass."""
        known = self._known.get(shape)
        if known is None:
            if not self.capture or staging is not self.staging or shape not in self._known:
                self._known[shape] = None
                return self.decoder.forward(staging.inputs, shape, self.store)
            known = self._known[shape] = self._captured(shape)
        graph, logits = known
        graph.replay()
        return logits

    @torch.inference_mode()
    def for_loops(self, most: int) -> "ForLoops | None":
        """What loops need to run passes of one session with up to so many rows; None where they cannot."""
        if not self.loops or most > FEW:
            return None
        with torch.cuda.device(self.staging.device):
            if not self._by_rows[1, 1 : most + 1].all():
                self._capture_up_to(most)
            return ForLoops(self._by_rows, torch.cuda.current_stream().cuda_stream, calls())

    def _capture_up_to(self, most: int) -> None:
        self.staging.blank()
        for count in range(1, most + 1):
            size = up(count)
            if not self._by_rows[1, size]:
                shape = PassShape(size, 1, size, size)
                self.decoder.forward(
                    self.staging.inputs, shape, self.store
                )  # to compile what is compiled at its first use
                graph, logits = self._known[shape] = self._captured(shape)
                self._by_rows[:, size] = size, graph.raw_cuda_graph_exec(), logits.data_ptr()
            self._by_rows[:, count] = self._by_rows[:, size]

    def _captured(self, shape: PassShape) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self.decoder.forward(self.staging.inputs, shape, self.store)
        return graph, logits


def shape_for(counts: list[int], wanted: int) -> PassShape:
    """The size that a pass with so many rows of each session is filled up to."""
    rows = up(sum(counts))
    asked = rows if rows <= FEW else min(rows, up(wanted))
    return PassShape(rows, up(len(counts)), min(rows, up(max(counts))), asked if wanted else 0)


@cache
def calls() -> tuple[int, int, int, int]:
    """See `ForLoops`."""
    driver = ctypes.CDLL("libcuda.so.1")
    names = ("cuMemcpyHtoDAsync_v2", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize")
    copy_there, launch, copy_here, wait = (
        ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0 for name in names
    )
    return copy_there, launch, copy_here, wait
