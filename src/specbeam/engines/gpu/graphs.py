"""Passes of a model on a GPU as captured graphs, and the driver's calls that loops run them with."""

import ctypes
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.engines.gpu.decoder import GpuDecoder, PassShape
from specbeam.engines.gpu.staging import Staging
from specbeam.engines.kv.store import SlotStore
from specbeam.engines.torch.captured import Capture, OfSecondTimes
from specbeam.engines.torch.sizes import up

FEW = 64  # rows for which the head costs what it costs for one
Graph = tuple[torch.cuda.CUDAGraph, torch.Tensor]  # and the logits that it writes
Calls = tuple[int, int, int, int]  # addresses of the driver's functions: copy there, launch a graph, copy here, wait


class CapturedGraphs(NamedTuple):
    """How loops run passes of one session."""

    # By the rows of a pass: the size it is filled up to, its graph, and where that has its logits.
    by_rows: Int64[np.ndarray, "3 sizes"]
    stream: int
    calls: Calls


class Graphs:
    """A pass is captured when its size is met for the second time; one that brought a staging of its own is not.

    Args:
        capture: on a GPU; otherwise the same steps run one by one, the oracle of the graphs.
    """

    def __init__(self, decoder: GpuDecoder, store: SlotStore, staging: Staging, capture: bool) -> None:
        self.decoder = decoder
        self.store = store
        self.staging = staging
        self.capture = Capture(staging.device) if capture else None
        self.loops = capture and hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec") and calls() is not None
        self.graphs = OfSecondTimes[Graph]()
        self.of_loops: dict[int, Graph] = {}  # by rows
        self._by_rows = np.zeros((3, FEW + 1), dtype=np.int64)

    def clear(self) -> None:
        """The store has moved: graphs write where nobody looks any more."""
        self.graphs.clear()
        self.of_loops.clear()
        self._by_rows[:] = 0
        if self.capture is not None:
            self.capture.clear()

    def run(self, staging: Staging, shape: PassShape) -> Float[torch.Tensor, "wanted vocab"]:
        """The logits are valid until the next pass."""
        forward = partial(self.decoder.forward, staging.inputs, shape, self.store)
        if self.capture is None or staging is not self.staging:  # graphs read that one alone
            return forward()
        known = self.graphs.get(shape, partial(self.capture, forward))
        if known is None:
            return forward()
        graph, logits = known
        graph.replay()
        return logits

    @torch.inference_mode()
    def captured_for_steps(self, most: int) -> CapturedGraphs | None:
        """What loops need to run passes of one session with up to so many rows; None where they cannot."""
        found = calls() if self.loops else None
        if found is None or most > FEW or not self._has_up_to(most):
            return None
        stream = torch.cuda.current_stream(self.staging.device)
        stream.query()  # through the runtime, so that this thread has the device's context when loops call the driver
        return CapturedGraphs(self._by_rows, stream.cuda_stream, found)

    def _has_up_to(self, most: int) -> bool:
        """Capture what is missing; False if that failed."""
        if self._by_rows[1, 1 : most + 1].all():
            return True
        assert self.capture is not None
        self.staging.blank()
        for count in range(1, most + 1):
            size = up(count)
            if not self._by_rows[1, size]:
                shape = PassShape(size, 1, size, size)
                forward = partial(self.decoder.forward, self.staging.inputs, shape, self.store)
                forward()  # what is compiled at its first use cannot be captured
                known = self.capture(forward)
                if known is None:
                    self.loops = False
                    return False
                self.of_loops[size] = known
                self._by_rows[:, size] = size, known[0].raw_cuda_graph_exec(), known[1].data_ptr()
            self._by_rows[:, count] = self._by_rows[:, size]
        return True


def shape_for(counts: list[int], wanted: int) -> PassShape:
    """The size that a pass with so many rows of each session is filled up to."""
    rows = up(sum(counts))
    asked = rows if rows <= FEW else min(rows, up(wanted))
    return PassShape(rows, up(len(counts)), min(rows, up(max(counts))), asked if wanted else 0)


@cache
def calls() -> Calls | None:
    """None where there is no such driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    names = ("cuMemcpyHtoDAsync_v2", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize")
    copy_there, launch, copy_here, wait = (
        ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0 for name in names
    )
    return copy_there, launch, copy_here, wait
