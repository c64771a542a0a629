"""Passes of encoder-decoder models' decoders on a GPU."""

from typing import TYPE_CHECKING, Any

import torch

from specbeam.engines.arrays import SourceStates
from specbeam.engines.gpu.cache import GpuCache
from specbeam.engines.gpu.decoder import GpuDecoder
from specbeam.engines.gpu.passes import GpuPasses
from specbeam.engines.kv.cross import ReadsSources
from specbeam.engines.kv.cross_pool import CrossPool
from specbeam.engines.torch.source_passes import plain_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GpuSourcePasses(ReadsSources, GpuPasses):
    """The passes of an encoder-decoder model's decoder, by the forward for GPUs; see `ReadsSources`.

    Captured passes depend only on sizes: sources and their lengths are read on the device.
    """

    cross: CrossPool
    runs_ranges = False

    def __init__(self, model: "PreTrainedModel", decoder: GpuDecoder, caches: list[list[Any]], capture: bool) -> None:
        super().__init__(model, decoder, caches, capture)
        assert decoder.sources is not None
        self.cross = decoder.sources
        self.readers = []

    @property
    def most_positions(self) -> int | None:
        return len(self.decoder.places) or None

    @torch.inference_mode()
    def store_source(self, states: SourceStates) -> int:
        rows = states[0].to(self.decoder.embedding)
        before = self.cross.keys
        with self.on_device():
            row = self.cross.add(len(rows), self.decoder.read_source(rows))
        if self.cross.keys is not before:
            self.graphs.clear()
        return row

    def plain_logits(self, states: torch.Tensor, path: list[int]) -> torch.Tensor:
        return plain_logits(self.model, states, path)

    def source_of(self, cache: GpuCache) -> tuple[int, int]:
        return self.cross.firsts[cache.source_row], self.cross.lengths[cache.source_row]
