"""Captured graphs of passes on a GPU, and the CUDA driver functions with which compiled steps launch them."""

import ctypes
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.engines.gpu.decoder import GpuDecoder, PassShape
from specbeam.engines.gpu.pages import PagedStore
from specbeam.engines.gpu.parts import WHOLE, PassPart
from specbeam.engines.gpu.staging import Staging
from specbeam.engines.torch.captured import Capture, SecondUseCache
from specbeam.engines.torch.ranking import RankedRows
from specbeam.engines.torch.sizes import rounded_up

if TYPE_CHECKING:
    from specbeam.engines.gpu.ranking import RowRanker

FEW = 64  # number of rows up to which the head takes no longer than for one row
Graph = tuple[torch.cuda.CUDAGraph, torch.Tensor]  # a graph, and the logits that it writes
# The addresses of the driver's functions: copy to the device, launch a graph, copy to the host, wait for the stream.
Calls = tuple[int, int, int, int]


class CapturedGraphs(NamedTuple):
    """The graphs with which steps run passes of one session."""

    # For each number of rows of a pass: the size that it is padded to, the handle of its graph, the address of its logits.
    by_rows: Int64[np.ndarray, "3 sizes"]
    stream: int  # handle of the CUDA stream
    calls: Calls


class Graphs:
    """The graphs of one model's passes: each size of a pass is captured at its second use.

    Passes whose inputs are not in `staging` are not captured, because graphs read their inputs there.

    Args:
        capture: whether to capture passes, which needs a GPU. Otherwise the same kernels are launched one by one, as a
            reference in tests.

    Attributes:
        steps_can_launch: whether compiled steps can launch the graphs.
    """

    def __init__(self, decoder: GpuDecoder, store: PagedStore, staging: Staging, capture: bool) -> None:
        self.decoder = decoder
        self.store = store
        self.staging = staging
        self.capture = Capture(staging.device) if capture else None
        has_handles = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")  # older versions of torch lack this method
        self.steps_can_launch = capture and has_handles and driver_calls() is not None
        self.graphs = SecondUseCache[Graph]()
        self.ranked = SecondUseCache[Any]()  # graphs of passes whose rows are ranked, by size and ranker
        self._uncapturable: set[Hashable] = set()  # keys of passes that read numbers on the host
        self.step_graphs: dict[tuple[PassPart, int], Graph] = {}  # graphs for steps, by part of the model and size
        self._tables = store.tables  # the tables of pages that graphs read
        self._by_rows: dict[PassPart, Int64[np.ndarray, "3 sizes"]] = {}  # see `CapturedGraphs.by_rows`

    def clear(self) -> None:
        """Delete all graphs after buffers that they read were replaced."""
        self.graphs.clear()
        self.ranked.clear()
        self.step_graphs.clear()
        self._by_rows.clear()
        self._uncapturable.clear()
        if self.capture is not None:
            self.capture.clear()

    def _follow_table(self) -> None:
        """Delete all graphs if a table of pages of the store was replaced, because they read the old one."""
        tables = self.store.tables
        if any(new is not old for new, old in zip(tables, self._tables, strict=False)):
            self.clear()
        self._tables = tables

    def run(self, staging: Staging, shape: PassShape, part: PassPart = WHOLE) -> Float[torch.Tensor, "wanted vocab"]:
        """Run a pass on the inputs of a staging, and return its logits, which are valid until the next pass."""
        forward = partial(self.decoder.forward, staging.inputs, shape, self.store, part)
        return forward() if part.given is not None else self.replayed(staging, (shape, part), forward)

    def replayed(self, staging: Staging, key: Hashable, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run the kernels of `forward` on the inputs of a staging, from the second use on as a captured graph.

        Args:
            key: equal keys launch the same kernels with the same arguments.

        Returns the tensor that `forward` returns, which is valid until the next pass.
        """
        self._follow_table()
        if self.capture is None or staging is not self.staging or key in self._uncapturable:
            return forward()  # graphs read only from self.staging
        is_second = key in self.graphs.made
        known = self.graphs.get(key, partial(self.capture, forward))
        if known is None:
            if is_second:
                self._uncapturable.add(key)
            return forward()
        graph, found = known
        graph.replay()
        return found

    def run_ranked(self, staging: Staging, shape: PassShape, ranker: "RowRanker") -> RankedRows:
        """Run a pass as `run` does, rank its rows, and return them; they are valid until the next ranking."""
        self._follow_table()

        def forward() -> RankedRows:
            return ranker.rank(self.decoder.forward(staging.inputs, shape, self.store))

        if self.capture is None or staging is not self.staging:
            return forward()
        known = self.ranked.get((shape, id(ranker)), partial(self.capture, forward))
        if known is None:
            return forward()
        graph, ranked = known
        graph.replay()
        return ranked

    @torch.inference_mode()
    def captured_for_steps(self, most: int, part: PassPart = WHOLE) -> CapturedGraphs | None:
        """Return the graphs of passes of one session with up to `most` rows, for steps; None if steps cannot launch them.

        Captures missing graphs.
        """
        self._follow_table()
        calls = driver_calls() if self.steps_can_launch else None
        if calls is None or most > FEW or not self._capture_up_to(most, part):
            return None
        stream = torch.cuda.current_stream(self.staging.device)
        stream.query()  # any runtime call gives this thread the device's context, which driver calls need
        return CapturedGraphs(self._by_rows[part], stream.cuda_stream, calls)

    def _capture_up_to(self, most: int, part: PassPart) -> bool:
        """Capture the missing graphs of passes of one session with 1 to `most` rows; return False on failure."""
        by_rows = self._by_rows.setdefault(part, np.zeros((3, FEW + 1), dtype=np.int64))
        if by_rows[1, 1 : most + 1].all():
            return True
        assert self.capture is not None
        self.staging.blank()
        for count in range(1, most + 1):
            size = rounded_up(count)
            if not by_rows[1, size]:
                shape = PassShape(size, 1, size, size)
                forward = partial(self.decoder.forward, self.staging.inputs, shape, self.store, part)
                forward()  # Triton compiles kernels at their first launch, which cannot be captured
                known = self.capture(forward)
                if known is None:
                    self.steps_can_launch = False
                    return False
                self.step_graphs[part, size] = known
                by_rows[:, size] = size, known[0].raw_cuda_graph_exec(), known[1].data_ptr()
            by_rows[:, count] = by_rows[:, size]
        return True


def shape_for(counts: list[int], wanted: int) -> PassShape:
    """Return the size to which a pass is padded.

    Args:
        counts: number of rows of each session.
        wanted: number of rows whose logits are needed.
    """
    return shape_for_sizes(sum(counts), len(counts), max(counts), wanted)


def shape_for_sizes(count: int, sessions: int, most: int, wanted: int) -> PassShape:
    """Return the size to which a pass of `count` rows is padded; see `PassShape`."""
    rows = rounded_up(count)
    logits = rows if rows <= FEW else min(rows, rounded_up(wanted))
    return PassShape(rows, rounded_up(sessions), min(rows, rounded_up(most)), logits if wanted else 0)


@cache
def driver_calls() -> Calls | None:
    """Return the addresses of the driver's functions; None if there is no CUDA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    names = ("cuMemcpyHtoDAsync_v2", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize")
    copy_to_device, launch, copy_to_host, wait = (
        ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0 for name in names
    )
    return copy_to_device, launch, copy_to_host, wait
