"""The compiled encoder of a model: all rows of a source attend to each other."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import nn

from specbeam.core.compiling.repeated import Repeated
from specbeam.engines.arrays import AnyArray, Integers, OwnStates, States, TokenIds
from specbeam.engines.choices import Rounding
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.decoder import (
    CompiledDecoder,
    angles_of_model,
    kind_of_panels,
    kinds_of_panels,
    misfit_of_depths,
    weights_of,
)
from specbeam.engines.cpu.embedding import embedded_rows, table_of
from specbeam.engines.cpu.extras import numbers_of
from specbeam.engines.cpu.layers import all_layers, normalise
from specbeam.engines.cpu.panels import steps_in
from specbeam.engines.cpu.rows import KeyValues, LayerRows, Stack, Taps
from specbeam.engines.cpu.sources import no_sources
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.cpu.team import TEAM
from specbeam.engines.cpu.weights import Weights, layers_of_weights
from specbeam.engines.families import (
    ModelFamily,
    architecture_of,
    body_of,
    encoder_family,
    family_of,
    layers_in,
    misfit_of_encoder,
    norm_at,
    own_scale,
    parts_of,
    places_of,
    unplaced_in,
)
from specbeam.engines.mapped import mapped_files
from specbeam.engines.source import Source, grouped, in_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Number of rows of a pass from which further sources save no time, because reading the weights no longer dominates.
TOGETHER = 256
_NO_SOURCES = no_sources()


def misfit(model: "PreTrainedModel") -> str:
    """Return the reason why compiled layers cannot run the encoder of a model whose decoder they run; "" if they can."""
    if why := misfit_of_encoder(model):
        return why
    return misfit_of_depths(model, architecture_of(model, _family_of_encoder(model)), steps_in("float32"))


def _family_of_encoder(model: "PreTrainedModel") -> ModelFamily:
    family = family_of(model)
    assert family is not None
    return encoder_family(family)


class CompiledEncoder(nn.Module, ABC):
    """The encoder of a model for which `misfit` returns "", called like transformers' encoder.

    If the decoder's matrices are rounded to 8 or 4 bits, the encoder's are rounded to 8 bits, because every token of
    the text reads its output. The states of a source do not depend on other sources in the pass.

    Args:
        decoder: the compiled decoder of the same model.

    Attributes:
        module: transformers' encoder, for sources that this one does not support.
        rounding: of its matrices; None: they keep their type.
        places: float32[positions, hidden], embeddings of positions; no positions: the model has none.
    """

    def __init__(self, model: "PreTrainedModel", decoder: CompiledDecoder) -> None:
        super().__init__()
        family = _family_of_encoder(model)
        body: Any = body_of(model, family)
        of = architecture_of(model, family)
        layers = layers_in(model, family)
        files = mapped_files(model)
        rounding: Rounding | None = "int8" if decoder.kind.startswith("int") else None
        matrices = [weight for layer in layers for weight in layer.parameters() if weight.dim() > 1]
        tiled = tiles.available() if rounding else "tiles" in decoder.kind
        kind = kind_of_panels(matrices, rounding, tiled, files)
        weights = weights_of(layers, kinds_of_panels([parts_of(layer, of) for layer in layers], kind), of, files)
        self.module: nn.Module = body
        self.rounding = rounding
        self.threads = decoder.threads
        self.heads = of.heads
        self.size = of.size
        self.eps = of.eps
        self.places = numbers_of(places_of(body, of))
        self.last_norm = numbers_of(norm_at(body, of.family.final_norm, of.family))
        self.angles = angles_of_model(model, of)
        self.kind = kind
        self.weights = weights
        self.architecture = of
        if self.threads > 1:
            for panels in weights.matrices:
                TEAM.learn(panels)

    def get_input_embeddings(self) -> Any:
        """Return the token embedding, like transformers' encoder."""
        module: Any = self.module
        return module.get_input_embeddings()

    @abstractmethod
    def inputs_of(self, source: Source) -> AnyArray | None:
        """Return the inputs of a source for `read`; None if transformers' encoder has to read it."""

    @abstractmethod
    def rows_of(self, inputs: AnyArray) -> int:
        """Return the number of rows of a source in a pass, given its inputs."""

    @abstractmethod
    def entering(self, sources: Sequence[AnyArray]) -> list[OwnStates]:
        """Return the input of the first layer for each source, given the inputs of the sources."""

    @abstractmethod
    def run_layers(
        self,
        x: States,
        places: Integers,
        lengths: Int64[np.ndarray, " sources"],
    ) -> None:
        """Run all layers on the rows of sources, x, in place.

        Args:
            places: the position of each row in its source.
            lengths: the number of rows of each source.
        """

    @abstractmethod
    def states_by_transformers(self, inputs: AnyArray) -> Float[torch.Tensor, "rows hidden"]:
        """Return the states of a source by transformers' encoder in float32, given its inputs."""

    def stack(self, weights: Weights) -> Stack:
        """Return layers of this encoder in the form of the compiled layers."""
        return Stack(weights, self.angles, self.eps, self.heads, self.heads, self.size)

    def module_in_float32(self) -> Any:
        """Return transformers' encoder in float32, like the compiled layers: a copy if it has another type."""
        load = getattr(self.module, "load", None)  # of the encoder of a stand-in (StandInEncoder)
        module: Any = self.module if load is None else load()
        is_in_float32 = all(weight.dtype == torch.float32 for weight in module.parameters())
        return module if is_in_float32 else copy.deepcopy(module).float()

    @torch.inference_mode()
    def error_on(self, inputs: AnyArray) -> float:
        """Return the largest difference from transformers' states of a source, relative to their standard deviation."""
        expected = self.states_by_transformers(inputs)
        (found,) = self.read([inputs])
        return float((torch.from_numpy(found) - expected).abs().max() / expected.std().clamp_min(1e-6))

    def read_together(self, sources: Sequence[Source]) -> None:
        """Store the states of sources that this encoder has not read yet, several short sources in one pass.

        Later sources in the queue fill up the last pass.
        """
        asked = {*sources}
        for group in grouped(self._unread(sources, asked), asked, TOGETHER):
            self._read_group(group)

    def _unread(self, sources: Sequence[Source], asked: Collection[Source]) -> Iterator[tuple[Source, int]]:
        """Yield unread sources, and unread sources after them in the queue, with their numbers of rows."""
        for source in in_line(sources, TOGETHER):
            if self in source.states:
                continue
            inputs = self.inputs_of(source)
            if inputs is not None:
                yield source, self.rows_of(inputs)
            elif source not in asked:
                return

    def _read_group(self, group: list[Source]) -> None:
        states = self.read([inputs for source in group if (inputs := self.inputs_of(source)) is not None])
        for source, one in zip(group, states, strict=True):
            source.states[self] = torch.from_numpy(one.copy())[None]  # a copy does not keep the whole pass in memory

    def read(self, sources: Sequence[AnyArray]) -> list[OwnStates]:
        """Return the states of sources, given their inputs, by one pass over all rows."""
        each = self.entering(sources)
        x = np.concatenate(each)
        lengths = np.array([len(rows) for rows in each])
        places = np.concatenate([np.arange(length) for length in lengths])
        self.run_layers(x, places, lengths)
        normalise(x, self.last_norm, self.eps, x)
        return np.split(x, np.cumsum(lengths)[:-1])


class TextEncoder(CompiledEncoder):
    """The encoder of texts; see `CompiledEncoder`.

    transformers' encoder reads sources longer than the position table, and, if positions skip padding, sources with
    padding.
    """

    def __init__(self, model: "PreTrainedModel", decoder: CompiledDecoder) -> None:
        super().__init__(model, decoder)
        family = self.architecture.family
        body: Any = self.module
        scale = self.architecture.numbers.embedding
        self.embedding = table_of(body.embed_tokens.weight)
        self.embedding_scale = np.float32(own_scale(body.embed_tokens)) * np.float32(scale)
        self.unplaced = unplaced_in(body, family)
        self.first_norm = numbers_of(norm_at(body, family.first_norm, family))
        self.layers = [layers_of_weights(self.weights, number, number + 1) for number in range(len(self.weights.qkv))]
        # Column of the biases of distance 0, see `families.biases_by_distance`; -1: no biases.
        biases = self.architecture.biases
        self.middle = biases[0].shape[1] // 2 if biases else -1
        self.all_layers = Repeated(all_layers, slice(0))
        if self.threads > 1:
            TEAM.learn_attention(np.dtype(np.float32))

    def forward(self, input_ids: torch.Tensor) -> tuple[Float[torch.Tensor, "1 length hidden"]]:
        """Return the states of one source, given its tokens, int64[1, length].

        Raises `IndexError` for tokens outside the model's vocabulary.
        """
        tokens = input_ids[0].numpy()
        if not self.knows(tokens):
            return (self.module(input_ids=input_ids)[0],)
        (states,) = self.read([tokens])
        return (torch.from_numpy(states)[None],)

    def knows(self, tokens: TokenIds) -> bool:
        """Return whether the position table covers all positions of a source."""
        if len(self.places) == 0:
            return True
        return len(tokens) <= len(self.places) and not (tokens == self.unplaced).any()

    def inputs_of(self, source: Source) -> TokenIds | None:
        if source.name != "input_ids" or source.inputs is None:
            return None
        tokens: TokenIds = source.inputs[0].numpy()
        is_read = self.knows(tokens) and tokens.size > 0 and tokens.min() >= 0 and tokens.max() < len(self.embedding)
        return tokens if is_read else None

    def rows_of(self, inputs: TokenIds) -> int:
        return inputs.size

    def states_by_transformers(self, inputs: TokenIds) -> Float[torch.Tensor, "length hidden"]:
        states: torch.Tensor = self.module_in_float32()(input_ids=torch.from_numpy(inputs)[None])[0]
        return states[0]

    def entering(self, sources: Sequence[Int64[np.ndarray, " _"]]) -> list[OwnStates]:
        lengths = [len(tokens) for tokens in sources]
        places = np.concatenate([np.arange(length) for length in lengths])
        x = embedded_rows(self.embedding, np.concatenate(sources)) * self.embedding_scale
        if len(self.places):
            x += self.places[places]
        if len(self.first_norm):
            normalise(x, self.first_norm, self.eps, x)
        return np.split(x, np.cumsum(lengths)[:-1])

    def run_layers(
        self,
        x: States,
        places: Integers,
        lengths: Int64[np.ndarray, " sources"],
    ) -> None:
        ends = np.cumsum(lengths)
        which = np.column_stack([np.arange(len(lengths)), ends - lengths, ends])
        panels = -(-int(lengths.max()) // WIDTH)
        slots = np.arange(panels * WIDTH)
        seen = slots[None, None] < np.repeat(lengths, lengths)[None, :, None]
        of_slots = np.repeat((slots - max(self.middle, 0))[None], len(lengths), axis=0)
        # All layers store their keys and values in the same buffers, one after the other.
        width = -(-self.size // WIDTH) * WIDTH
        keys = np.zeros((1, len(lengths), self.heads, panels, self.size, WIDTH), dtype=np.float32)
        values = np.zeros((1, len(lengths), self.heads, panels * WIDTH, width), dtype=np.float32)
        rows = LayerRows(places, places, which, seen, of_slots, _NO_SOURCES)
        kinds = np.zeros(1, dtype=np.int64)
        no_taps = Taps(np.zeros(0, dtype=np.int64), np.empty((len(x), 0), dtype=np.float32))
        with TEAM.threads(self.threads) as threads:
            for weights in self.layers:
                self.all_layers(x, self.stack(weights), rows, kinds, KeyValues(keys, values), no_taps, threads)
