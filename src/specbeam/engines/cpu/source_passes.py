"""Passes of the compiled forward of decoders with cross-attention."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float32, Int64

from specbeam.engines.arrays import SourceStates
from specbeam.engines.cpu.audio_encoder import AudioEncoder, misfit_of_convolutions
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.cache_words import WORDS, KVType
from specbeam.engines.cpu.decoder import CompiledDecoder, Rows, SourceReader
from specbeam.engines.cpu.encoder import TOGETHER, TextEncoder, misfit
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.cpu.sources import Sources
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.kv.cross import CrossPanels, ReadsSources
from specbeam.engines.kv.member import RowMember
from specbeam.engines.source import Source, grouped, in_line
from specbeam.engines.torch.source_passes import plain_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CompiledSourcePasses(ReadsSources, PackedPasses):
    """The passes of the compiled forward of a decoder with cross-attention; see `ReadsSources`."""

    cross: CrossPanels
    decoder: CompiledDecoder
    runs_ranges = False

    def __init__(self, model: "PreTrainedModel", decoder: CompiledDecoder, caches: list[list[Any]]) -> None:
        super().__init__(model, decoder, caches)
        self.cross = self._new_cross()
        self.readers = []
        self.reader = SourceReader(model, decoder)

    def _new_cross(self) -> CrossPanels:
        decoder = self.decoder
        return CrossPanels(len(decoder.kinds), decoder.heads, decoder.size, WIDTH, WORDS[decoder.kv])

    def store_kv_as(self, kv: KVType) -> None:
        super().store_kv_as(kv)
        self.cross = self._new_cross()

    @property
    def most_positions(self) -> int | None:
        return len(self.decoder.places) or None

    def store_source(self, states: SourceStates) -> int:
        return self._store_read(self.reader.read(_rows_of(states)))

    def row_of(self, source: Source, encoder: Any) -> int:
        read = source.ahead.pop(self, None)
        return super().row_of(source, encoder) if read is None else self._store_read(read)

    def _store_read(self, read: Float32[np.ndarray, "frames columns"]) -> int:
        layers, heads, size = self.cross.shape
        return self.cross.add(read.reshape(len(read), layers, 2, heads, size))

    def read_ahead(self, sources: Sequence[Source], encoder: Any) -> None:
        for group in grouped(self._read_but_not_stored(sources, encoder), {*sources}, TOGETHER):
            self._read_group(group, encoder)

    def _read_but_not_stored(self, sources: Sequence[Source], encoder: Any) -> Iterator[tuple[Source, int]]:
        """Yield sources without keys and values, then such sources after them in the queue, with their numbers of frames."""
        held = {source for source, _ in self.readers}
        for source in in_line(sources, TOGETHER):
            if source not in held and self not in source.ahead and encoder in source.states:
                yield source, source.states[encoder].shape[1]

    def _read_group(self, group: list[Source], encoder: Any) -> None:
        """Compute the keys and values of several sources by one product; a single source is computed when it is stored."""
        if len(group) < 2:
            return
        each = [_rows_of(source.states[encoder]) for source in group]
        read = self.reader.read(np.concatenate(each))
        ends = np.cumsum([len(rows) for rows in each])
        for source, own in zip(group, np.split(read, ends[:-1]), strict=True):
            source.ahead[self] = own.copy()  # a copy does not keep the whole product in memory

    def misfit_of_encoder(self) -> str:
        why = misfit(self.model)
        theirs = super().own_encoder()
        if not why and theirs.main_input_name != "input_ids":
            why = misfit_of_convolutions(theirs)
        return why

    @torch.inference_mode()
    def own_encoder(self) -> Any:
        theirs = super().own_encoder()
        if self.misfit_of_encoder():
            return theirs
        kind = TextEncoder if theirs.main_input_name == "input_ids" else AudioEncoder
        return kind(self.model, self.decoder)

    def plain_logits(self, states: torch.Tensor, path: list[int]) -> torch.Tensor:
        return plain_logits(self.model, states, path)

    def _sources_of(self, caches: Sequence[RowMember]) -> Sources:
        return self._all_sources(np.array([cache.source_row for cache in caches], dtype=np.int64))

    def _all_sources(self, rows: Int64[np.ndarray, " sessions"]) -> Sources:
        return Sources(self.cross.keys, self.cross.values, np.array(self.cross.lengths, dtype=np.int64), rows)

    def _with_context(self, rows: Rows, caches: Sequence[RowMember]) -> Rows:
        return replace(rows, sources=self._sources_of(caches))

    def _context_for_steps(self, cache: CpuCache) -> tuple[Any, ...]:
        return (self._sources_of([cache]),)


def _rows_of(states: SourceStates) -> Float32[np.ndarray, "frames size"]:
    found: Float32[np.ndarray, "frames size"] = states[0].float().contiguous().numpy()
    return found
