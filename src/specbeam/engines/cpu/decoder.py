"""The compiled forward of models on a CPU, which reads weights in panels; engines/families.py lists the models.

One pass holds the rows of all sessions without padding; each row attends to its own session's cache. The results equal
transformers' forward up to rounding; `load` compares both on a token tree.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, Shaped
from torch import Tensor, nn

from specbeam.core import compiling
from specbeam.core.compiling.compiler import Array, address_of, borrowed
from specbeam.core.compiling.held import Held
from specbeam.core.ranked import WHOLE
from specbeam.engines import families
from specbeam.engines.arrays import Integers, LogitRows, Panels, States, Tapped, Vector, WindowSizes
from specbeam.engines.blocks import BlockMatrix, BlockNumbers, joined_blocks
from specbeam.engines.choices import Rounding
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.binary_panels import write_binaries
from specbeam.engines.cpu.block_panels import write_blocks
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.cache_steps import ALL, CacheArrays
from specbeam.engines.cpu.cache_words import WORDS, KVType
from specbeam.engines.cpu.early import ExitLayer, ExitWeights
from specbeam.engines.cpu.embedding import embedded_rows, table_of
from specbeam.engines.cpu.extras import extras_of, numbers_of, stacked
from specbeam.engines.cpu.layers import (
    NO_ATTENTION,
    NO_INNER,
    all_layers,
    input_of_head,
    normalise,
    projected,
    score_rows,
    shape_logits,
)
from specbeam.engines.cpu.nibbles import as_grouped, write_nibbles
from specbeam.engines.cpu.panels import BLOCK_KINDS, Kind, empty_panels, fits_bfloat16, steps_in, write_panels
from specbeam.engines.cpu.rows import KeyValues, LayerRows, Stack, Taps
from specbeam.engines.cpu.sources import Sources, layers_of_sources, no_sources
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.cpu.team import TEAM, threads_for
from specbeam.engines.cpu.weights import CrossWeights, Weights, layers_of_weights
from specbeam.engines.dual_binary import DualBinary, DualBinaryMatrix, joined_binaries, meets_rounded_rows
from specbeam.engines.families import (
    Architecture,
    CrossParts,
    LayerParts,
    Matrix,
    angle_tables,
    architecture_of,
    bias_of_tokens,
    body_of,
    embedding_of,
    embeddings_of,
    family_of,
    head_of,
    layers_in,
    matrix_at,
    misfit_of_family,
    norm_at,
    norm_of,
    own_scale,
    parts_of,
    places_of,
    rows_in_order,
    source_parts,
    unplaced_in,
)
from specbeam.engines.kv.store import PanelStore
from specbeam.engines.mapped import NOTHING_MAPPED, MappedFiles, mapped_files
from specbeam.engines.packed import Grouped, PackedMatrix, joined, matrices_of, weights_in
from specbeam.engines.shared_tokens import SharedTokens, readable
from specbeam.engines.torch.in_float32 import as_loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Number of parameters from which unrounded matrices use tiles. Smaller models fit the processor's caches, where vector
# instructions multiply a few rows faster than tiles. For rounded matrices `multiply` chooses by the number of rows.
TILED_FROM = 30_000_000


_NO_LIMIT = 1 << 40  # number of positions of a model that uses only distances
_WORDS = (torch.float32, torch.bfloat16, torch.float16)  # the types that panels keep
# The types whose bits are laid out in panels of a kind without a conversion to float32.
_TYPE_IN_WORDS: dict[Kind, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "bfloat16 pairs": torch.bfloat16,
    "tiles": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.bfloat16,
    "int8 tiles": torch.bfloat16,
    "int4": torch.bfloat16,
}


class Kinds(NamedTuple):
    """The kinds of panels of the matrices of layers."""

    qkv: Kind
    out: Kind
    up: Kind
    down: Kind


_FOUR: Kind = "blocks of 4 bits"
_EIGHT: Kind = "blocks of 8 bits"
_WIDER: tuple[Kind, ...] = ("nibbles", _FOUR, _EIGHT)  # each holds the matrices in blocks that those before it hold
_USUAL_KINDS = (
    Kinds("nibbles", "nibbles", "nibbles", "nibbles"),
    Kinds(_FOUR, _FOUR, _FOUR, _FOUR),
    Kinds(_EIGHT, _FOUR, _FOUR, _EIGHT),
    Kinds(_EIGHT, _EIGHT, _EIGHT, _EIGHT),
)


@borrowed
class Model(NamedTuple):
    """The weights and settings of a model, as compiled layers read them."""

    embedding: Array  # float32, uint16 or int16[vocab, hidden], see `table_of`
    embedding_scale: np.float32  # factor of embeddings of tokens
    places: Array  # float32[positions, hidden], added to embeddings; no positions: they are rotary
    unplaced: int  # the token without a position embedding, or a number that is not a token
    first_norm: Array  # before the first layer, see `Weights`
    weights: Weights
    angles: Array  # float32[tables, 2, positions, pairs], see `Stack`
    eps: float
    heads: int
    kinds: Array  # int64[layers]: the kind of attention of each layer, an index into `CompiledDecoder.names`
    last_norm: Array  # see `Weights`
    leave: Array  # in panels, the matrix between the last norm and the head; no panels: none
    head: Array  # in panels
    vocab: int
    read_as: Array  # int64[vocab]: the row of `embedding` of each token; empty: row t for token t
    logits_divisor: np.float32  # see `layers.shape_logits`
    logits_cap: np.float32
    logits_bias: Array  # float32[vocab], or no numbers


_NO_SOURCES = no_sources()


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a pass: one for each token, the sessions one after the other."""

    tokens: Integers
    positions: Integers
    slots: Integers
    sessions: Int64[np.ndarray, "sessions 3"]  # row of the store, first row, last row + 1
    seen: dict[str, Bool[np.ndarray, "n slots"]]  # which slots each row attends to, by kind of layer
    places: Int64[np.ndarray, "sessions slots"]  # position in the text of the token in each slot
    sources: Sources = field(default_factory=no_sources)  # of the sessions

    def only(self, which: Bool[np.ndarray, " n"]) -> "Rows":
        """Return some of the rows."""
        before = np.concatenate([[0], np.cumsum(which)])  # number of kept rows before each row
        sessions = np.column_stack([self.sessions[:, 0], before[self.sessions[:, 1:]]])
        seen = {kind: shown[which] for kind, shown in self.seen.items()}
        return Rows(
            self.tokens[which], self.positions[which], self.slots[which], sessions, seen, self.places, self.sources
        )


_NO_VECTORS: Mapping[int, Vector] = {}


class CompiledDecoder:
    """The compiled forward of a model for which `misfit` returns "".

    Args:
        rounding: type of all matrices except the embedding; rounding changes the model. "int8" weights are read in a
            quarter of the time of float32, "int4" weights in a seventh. None: matrices keep their type.
        shared: the target's tokens, which the model reads and drafts; None: its own tokens.
        rounds_rows: whether each row is rounded to bfloat16 before a product with a matrix, for models for which
            `misfit_of_bfloat16` returns "". It changes the model. Products of bfloat16 numbers are exact; their sums are
            float32.

    Attributes:
        kv: type of stored keys and values; set it before `store` is called.
    """

    takes_steps = True  # compiled steps can run this forward

    def __init__(
        self,
        model: "PreTrainedModel",
        rounding: Rounding | None = None,
        shared: SharedTokens | None = None,
        rounds_rows: bool = False,
    ) -> None:
        self.shared = shared
        self.kv: KVType = "float32"
        with as_loaded(model):
            architecture = architecture_of(model)
        numbers = architecture.numbers
        family = architecture.family
        body: Any = body_of(model, family)
        layers = layers_in(model, family)
        embedding = embedding_of(model, family)
        head = head_of(model)
        weights = weights_in(model)
        self.threads = threads_for(weights)
        self.architecture = architecture
        self.heads = architecture.heads
        self.kv_heads = architecture.kv_heads
        self.size = architecture.size
        self.eps = architecture.eps
        self.vocab = len(head) if shared is None else shared.vocab
        self.embedding = table_of(embeddings_of(model, family))
        self.embedding_scale = np.float32(own_scale(embedding))
        self.vector_scale = np.float32(numbers.embedding)  # of input embeddings
        self.places = numbers_of(places_of(body, architecture))
        self.first_norm = numbers_of(norm_at(body, family.first_norm, family))
        self.angles = angles_of_model(model, architecture)
        files = mapped_files(model)
        tiled = tiles.available() and (rounding == "int8" or weights >= TILED_FROM)
        leave = matrix_at(model, family.leave, family)
        kind: Kind = "bfloat16 pairs"
        if not rounds_rows:
            kind = kind_of_panels(_matrices_in(model), rounding, tiled, files)
        self.kind = kind
        self.kinds_of_matrices = kinds_of_panels([parts_of(layer, architecture) for layer in layers], kind)
        self.weights = weights_of(layers, self.kinds_of_matrices, architecture, files)
        self.last_norm = numbers_of(norm_at(body, family.final_norm, family))
        rows = self.vocab if shared is None else shared.head_rows
        self.head = _head_panels(head, rows, kind, files)
        self.leave = self.head[:0] if leave is None else panels_of([[leave]], kind, files)[0]
        self.enter = matrix_at(model, family.enter, family)
        if self.threads > 1:
            for panels in (self.head, *self.weights.matrices):
                TEAM.learn(panels)
        self.names = architecture.names
        self.kinds = np.array([self.names.index(name) for name in architecture.kinds])
        self.model = Model(
            embedding=self.embedding,
            embedding_scale=self.embedding_scale * self.vector_scale,
            places=self.places,
            unplaced=unplaced_in(body, family),
            first_norm=self.first_norm,
            weights=self.weights,
            angles=self.angles,
            eps=self.eps,
            heads=self.heads,
            kinds=self.kinds,
            last_norm=self.last_norm,
            leave=self.leave,
            head=self.head,
            vocab=self.vocab,
            read_as=np.zeros(0, dtype=np.int64) if shared is None else shared.read_as,
            logits_divisor=np.float32(numbers.logits_divisor),
            logits_cap=np.float32(numbers.logits_cap),
            logits_bias=numbers_of(bias_of_tokens(model, shared)),
        )
        self._held = [Held(self.model, is_shared=True)]  # kept alive, so that sessions copy them

    def store(self) -> PanelStore:
        """Return a new store for keys and values of this model."""
        words = np.dtype(WORDS[self.kv])
        if self.threads > 1:
            TEAM.learn_attention(words)
        return PanelStore(len(self.kinds), self.kv_heads, self.size, WIDTH, words)

    def skipping(self, attention: Sequence[int], inner: Sequence[int]) -> "CompiledDecoder":
        """Return a forward with the same weights that skips the attention and the inner layer of some layers.

        Skipped sublayers leave hidden states unchanged, and store no keys and values.
        """
        kinds = self.kinds.copy()
        kinds[list(attention)] |= NO_ATTENTION
        kinds[list(inner)] |= NO_INNER
        _ = self.addresses  # computed before copying, so that all copies share them
        fewer = copy.copy(self)
        fewer.kinds = kinds
        fewer.model = self.model._replace(kinds=kinds)
        fewer._held = [*self._held, Held(fewer.model, is_shared=True)]
        return fewer

    def forward(
        self,
        rows: Rows,
        store: PanelStore,
        vectors: Mapping[int, Vector] = _NO_VECTORS,
        layers: slice = slice(None),
        states: States | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[States, Tapped]:
        """Run layers on all rows, and store their keys and values.

        Returns the output of the last of these layers, to be passed to `logits` if it is the model's last one, and the
        inputs of the layers `taps`, concatenated.

        Args:
            vectors: embeddings by row, for the rows whose token is negative.
            layers: which layers to run; only their keys and values are stored.
            states: the input of the first of these layers; None: the embeddings of the tokens.
            taps: numbers of layers, counted from the first one that runs; see `Needs.taps`.

        Raises `IndexError` for unknown tokens and positions: the layers would read beyond the model's arrays.
        """
        if rows.positions.max() >= self.angles.shape[2]:
            raise IndexError(f"position {rows.positions.max()} is beyond the model's {self.angles.shape[2]}")
        x = self._embedded(rows, vectors) if states is None else states.copy()
        first, stop, _ = layers.indices(len(self.kinds))
        weights = self.weights if stop - first == len(self.kinds) else layers_of_weights(self.weights, first, stop)
        own = self._layer_rows(rows, layers_of_sources(rows.sources, first, stop))
        tapped = self._run(x, own, weights, self.kinds[layers], _in_store(store, layers), taps)
        return x, tapped

    def forward_exit(self, rows: Rows, store: PanelStore, layer: ExitLayer, states: States) -> States:
        """Run an exit layer on the output of the first layers, store its keys and values, and return its output."""
        x = states.copy()
        place = slice(layer.place, layer.place + 1)
        self._run(x, self._layer_rows(rows, _NO_SOURCES), layer.weights, layer.kinds, _in_store(store, place))
        return x

    def _layer_rows(self, rows: Rows, sources: Sources) -> LayerRows:
        seen = np.array([rows.seen[name] for name in self.names])
        return LayerRows(rows.positions, rows.slots, rows.sessions, seen, rows.places, sources)

    def _run(
        self,
        x: States,
        rows: LayerRows,
        weights: Weights,
        kinds: Int64[np.ndarray, " layers"],
        cache: KeyValues,
        taps: Sequence[int] = (),
    ) -> Tapped:
        """Run layers of these weights and kinds on x, in place, and store their keys and values.

        Returns the inputs of the layers `taps`, see `forward`.
        """
        tapped = np.empty((len(x), len(taps) * x.shape[1]), dtype=np.float32)
        marks = Taps(np.array(taps, dtype=np.int64), tapped)
        with TEAM.threads(self.threads) as threads:
            all_layers(x, self._stack(weights), rows, kinds, cache, marks, threads)
        return tapped

    def _stack(self, weights: Weights) -> Stack:
        return Stack(weights, self.angles, self.eps, self.heads, self.kv_heads, self.size)

    def exit_layer(self, layer: nn.Module, norm: Any, after: int, place: int) -> ExitLayer:
        """Return an exit layer made of a layer of the same shape as the model's.

        Its matrices get the type of the model's: bfloat16, float16, 8 or 4 bits. With 16-bit matrices its norms are rounded,
        too.

        Args:
            layer: of the class of the model's layers.
            norm: the norm after it.
            after: number of layers that run before it.
            place: its layer in the store.
        """
        words = None if self.kind.startswith("int") else _TYPE_IN_WORDS.get(self.kind)
        if words is not None:
            layer, norm = (copy.deepcopy(module).to(words).float() for module in (layer, norm))
        return ExitLayer(
            after=after,
            weights=weights_of([layer], self.kinds_of_matrices, self.architecture.at(-1)),
            norm=numbers_of(norm_of(norm, self.architecture.family)),
            kinds=self.kinds[-1:],
            place=place,
        )

    def input_of(self, token: int, position: int) -> Vector:
        """Return the input of the first layer for a token."""
        one = np.zeros(1, dtype=np.int64)
        found: Vector = self._embedded(
            Rows(one + token, one + position, one, one[:0].reshape(0, 3), {}, one[:0].reshape(0, 1)), _NO_VECTORS
        )[0]
        return found

    def _embedded(self, rows: Rows, vectors: Mapping[int, Vector]) -> States:
        """Return the input of the first layer; raise `IndexError` for negative tokens whose rows `vectors` lacks."""
        negative = rows.tokens < 0
        if negative.any() and {*np.flatnonzero(negative).tolist()} != {*vectors}:
            raise IndexError("a token is outside the model's vocabulary")
        tokens = readable(self.shared, rows.tokens)
        x = embedded_rows(self.embedding, np.maximum(tokens, 0)) * self.model.embedding_scale
        for row, vector in vectors.items():
            scaled = vector * self.vector_scale
            x[row] = scaled if self.enter is None else self.enter.float().numpy() @ scaled
        if len(self.places):
            placed = tokens != self.model.unplaced
            x[placed] += self.places[rows.positions[placed]]
        if len(self.first_norm):
            normalise(x, self.first_norm, self.eps, x)
        return x

    @contextmanager
    def arrays_for_steps(
        self,
        cache: CpuCache,
        store: PanelStore,
        windows: WindowSizes,
        part: int,
        sources: Sources = _NO_SOURCES,
    ) -> Iterator[CacheArrays]:
        """Yield a session's cache as arrays for steps. The cache and the store must have room.

        Args:
            windows, part, sources: see `CacheArrays`.
        """
        with TEAM.threads(self.threads) as threads:
            taps = np.array(cache.needs.taps if part == ALL else (), dtype=np.int64)
            yield CacheArrays(
                cache.trie.arrays, cache.outputs, cache.taps, taps, self.model, windows, store.keys_by_panel,
                store.values_by_slot, cache.row, threads, *self.addresses, part, cache.early_layers or 0,
                self._exit_of(cache), cache.early, sources, WHOLE,
            )  # fmt: skip

    def _exit_of(self, cache: CpuCache) -> ExitWeights:
        """Return the exit layer of a session in the form that steps read."""
        layer: ExitLayer | None = cache.needs.exit_layer
        if layer is None:
            return self._no_exit
        return ExitWeights(layer.weights, layer.norm, layer.kinds, layer.place)

    @cached_property
    def _no_exit(self) -> ExitWeights:
        """The placeholder for a missing exit layer, with the model's last norm for the logits of drafts."""
        none = layers_of_weights(self.weights, 0, 0)
        exit_weights = ExitWeights(none, self.last_norm, self.kinds[:0], -1)
        self._held.append(Held(exit_weights, is_shared=True))
        return exit_weights

    def logits(self, x: States, norm: Float32[np.ndarray, " weight"] | None = None) -> LogitRows:
        """Return the logits of rows, given the output of the last layer.

        Args:
            norm: the weight of the norm before the head, see `Weights`; None: the model's last norm.
        """
        logits = np.empty((len(x), self.vocab), dtype=np.float32)
        if len(x):
            with TEAM.threads(self.threads) as threads:
                score_rows(
                    x, self.last_norm if norm is None else norm, self.eps, self.leave, self.head, logits, threads
                )
            shape_logits(logits, self.model.logits_divisor, self.model.logits_cap, self.model.logits_bias)
        return logits

    def normed(self, x: States) -> States:
        """Return the input of the head, given the output of the last layer."""
        with TEAM.threads(self.threads) as threads:
            found = input_of_head(x, self.last_norm, self.eps, self.leave, threads)
        return x.copy() if found is x else found

    @property
    def _no_sources(self) -> Sources:
        """Empty sources, with keys and values in the stored type."""
        if not self.architecture.family.cross:
            return _NO_SOURCES
        words = WORDS[self.kv]
        keys = np.zeros((0,) * _NO_SOURCES.keys.ndim, dtype=words)
        values = np.zeros((0,) * _NO_SOURCES.values.ndim, dtype=words)
        return _NO_SOURCES._replace(keys=keys, values=values)

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """The addresses of `all_layers` and `score_rows`, compiled for the types of this model's arrays."""
        floats = np.zeros((1, 1), dtype=np.float32)
        numbers = np.zeros(1, dtype=np.int64)
        seen = np.zeros((1, 1, 1), dtype=bool)
        rows = LayerRows(numbers, numbers, numbers[None], seen, numbers[None], self._no_sources)
        cache = _in_store(self.store(), slice(None))
        layers = address_of(
            all_layers, floats, self._stack(self.weights), rows, self.kinds, cache, Taps(numbers, floats), 1
        )
        return layers, address_of(score_rows, floats, self.last_norm, self.eps, self.leave, self.head, floats, 1)


def _in_store(store: PanelStore, layers: slice) -> KeyValues:
    return KeyValues(store.keys_by_panel[layers], store.values_by_slot[layers])


class SourceReader:
    """The matrices of a decoder that make keys and values of sources, for all layers at once.

    They have the type of the decoder's other matrices.
    """

    def __init__(self, model: "PreTrainedModel", decoder: CompiledDecoder) -> None:
        of = decoder.architecture
        files = mapped_files(model)
        parts = [source_parts(layer, of) for layer in layers_in(model, of.family)]
        self.panels = panels_of([[matrix for one in parts for matrix in one.both]], decoder.kind, files)[0]
        self.bias = numbers_of(torch.cat([one.bias for one in parts]))
        self.columns = 2 * len(parts) * of.heads * of.size
        self.threads = decoder.threads

    def read(self, states: Float32[np.ndarray, "frames hidden"]) -> Float32[np.ndarray, "frames columns"]:
        """Return the keys, then the values of all heads, layer by layer, given the states of a source."""
        with TEAM.threads(self.threads) as threads:
            found = projected(states, self.panels, self.bias, threads)
        return found[:, : self.columns]


def _matrices_in(model: "PreTrainedModel") -> list[Tensor]:
    """Return the matrices of a model that are tensors: of its head, its layers, and between its last norm and the head."""
    family = family_of(model)
    assert family is not None
    matrices = [
        weight.flatten(0, -2) for layer in layers_in(model, family) for weight in layer.parameters() if weight.dim() > 1
    ]
    leave = matrix_at(model, family.leave, family)
    if leave is not None:
        matrices.append(leave)
    head = head_of(model)
    if isinstance(head, Tensor):
        matrices.insert(0, head)
    return matrices


def kind_of_panels(weights: list[Tensor], rounding: Rounding | None, tiled: bool, files: MappedFiles) -> Kind:
    """Return the smallest kind of panels that represents matrices exactly, or rounded by `rounding`.

    Args:
        tiled: whether tiles are used.
        files: mapped files, released after the weights are read.
    """
    if rounding == "int4":
        return "int4"
    if rounding == "int8":
        return "int8 tiles" if tiled else "int8"
    types = {weight.dtype for weight in weights}
    if types == {torch.float16}:
        return "float16"
    exact = types == {torch.bfloat16}
    if not exact:
        for weight in weights:
            exact = fits_bfloat16(numbers_of(weight))
            files.release([weight])
            if not exact:
                return "float32"
    return "tiles" if tiled else "bfloat16"


def kinds_of_panels(parts: Sequence[LayerParts], kind: Kind) -> Kinds:
    """Return the kinds of panels of layers' matrices: small integers in files stay packed unless rounded again.

    Args:
        parts: of each layer.
        kind: of the other matrices.
    """

    def matrices(name: str) -> list[Matrix]:
        return [one for part in parts for one in _matrices_of(getattr(part, name))]

    found = Kinds(*(kind_of_stored(matrices(name), kind) for name in Kinds._fields))
    in_blocks = {"nibbles", *BLOCK_KINDS}
    if not any(isinstance(one, BlockMatrix) for one in matrices("qkv")) or not in_blocks.issuperset(found):
        return found
    # Each combination is compiled by itself, so only the usual ones exist: files of about 4 bits have 8 bits for values and
    # for the last matrix of some layers.
    for usual in _USUAL_KINDS:
        if all(_WIDER.index(one) <= _WIDER.index(wide) for one, wide in zip(found, usual, strict=True)):
            return usual
    return found


def kind_of_stored(matrices: Sequence[Matrix], kind: Kind) -> Kind:
    """Return the smallest kind of panels that represents all of these matrices exactly.

    Args:
        kind: the kind of matrices that are not small integers in files, and of all matrices if they are rounded.
    """
    if kind.startswith("int") or isinstance(matrices[0], Tensor):
        return kind
    if isinstance(matrices[0], DualBinaryMatrix):
        return "dual binary"
    in_blocks = [one for one in matrices if isinstance(one, BlockMatrix)]
    if all(one.is_symmetric for one in in_blocks):
        return "nibbles"
    return _FOUR if all(one.bits == 4 for one in in_blocks) else _EIGHT


def panels_of(
    matrices: Sequence[Sequence[Matrix]],
    kind: Kind,
    files: MappedFiles = NOTHING_MAPPED,
    ordered: Callable[[Matrix], Matrix] = lambda part: part,
) -> Shaped[np.ndarray, "matrices panels words"]:
    """Return matrices in panels of a kind.

    Args:
        matrices: all of one shape; each consists of parts, float[columns, depth], one after the other.
        files: mapped files, released after the weights are laid out.
        ordered: reorders the columns of a part; a copy exists while its matrix is laid out.
    """
    columns = sum(len(part) for part in matrices[0])
    depth = matrices[0][0].shape[1]
    panels = empty_panels(len(matrices), columns, depth, kind)
    for parts, goal in zip(matrices, panels, strict=True):
        in_order = [ordered(part) for part in parts]
        if not isinstance(in_order[0], Tensor):
            _write_stored(goal, _joined_stored(in_order), columns, depth, kind)
            continue

        def leave(first: int, stop: int, parts: Sequence[Any] = in_order) -> None:
            files.release(_pieces_of(parts, first, stop))

        write_panels(goal, partial(_columns_of, in_order, kind), columns, depth, kind, leave)
        files.release(parts)  # pages between columns that were read together
    return panels


def _joined_stored(parts: Sequence[Any]) -> Grouped | BlockNumbers | DualBinary:
    """Read matrices of one kind, and return them concatenated along their columns."""
    if isinstance(parts[0], DualBinaryMatrix):
        return joined_binaries([part.read() for part in parts])
    if isinstance(parts[0], PackedMatrix):
        return joined([part.read() for part in parts])
    return joined_blocks([part.read() for part in parts])


def _write_stored(
    panels: Panels, matrix: Grouped | BlockNumbers | DualBinary, columns: int, depth: int, kind: Kind
) -> None:
    """Write a matrix of small integers to panels of a kind that represents it exactly, or rounded again.

    Args:
        columns: number of columns in the panels; missing ones become zeros.
    """
    words = panels.view(np.int32)
    if kind == "nibbles":
        assert not isinstance(matrix, DualBinary)
        write_nibbles(words, as_grouped(matrix) if isinstance(matrix, BlockNumbers) else matrix)
    elif kind == "dual binary":
        assert isinstance(matrix, DualBinary)
        write_binaries(words, matrix)
    elif kind in BLOCK_KINDS:
        assert isinstance(matrix, BlockNumbers)
        write_blocks(words, matrix, 4 if kind == _FOUR else 8)
    else:
        write_panels(panels, partial(_weights_of_columns, matrix), columns, depth, kind)


def _weights_of_columns(
    matrix: Grouped | BlockNumbers | DualBinary, first: int, stop: int
) -> Float32[np.ndarray, "some depth"]:
    return matrix.columns(first, stop).weights()


def _pieces_of(parts: Sequence[Tensor], first: int, stop: int) -> list[Tensor]:
    """Return the columns first .. stop of a matrix as pieces of its parts."""
    starts = accumulate((len(part) for part in parts), initial=0)
    pieces = [
        part.detach()[max(first - start, 0) : max(stop - start, 0)] for part, start in zip(parts, starts, strict=False)
    ]
    return [piece for piece in pieces if len(piece)]


def _columns_of(parts: Sequence[Tensor], kind: Kind, first: int, stop: int) -> Shaped[np.ndarray, "some depth"]:
    """Return the columns first .. stop of a matrix for `write_panels`, without a copy if one part has the right type."""
    pieces = _pieces_of(parts, first, stop)
    if all(piece.dtype == _TYPE_IN_WORDS.get(kind) for piece in pieces):
        found = [piece.view(torch.int16).numpy().view(np.uint16) for piece in pieces]
    else:
        found = [piece.float().numpy() for piece in pieces]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _head_panels(head: Matrix, rows: int, kind: Kind, files: MappedFiles) -> Panels:
    """Return the first rows of a head in panels, with zeros for missing tokens.

    Args:
        kind: of a head that is not small integers in a file, or is rounded.
    """
    if isinstance(head, Tensor):
        return panels_of([_head_parts(head, rows)], kind, files)[0]
    depth = head.shape[1]
    own_kind = kind if kind.startswith("int") else _EIGHT
    panels = empty_panels(1, rows, depth, own_kind)[0]
    _write_stored(panels, head.read().columns(0, rows), rows, depth, own_kind)
    return panels


def _head_parts(rows: Tensor, vocab: int) -> list[Matrix]:
    """Return the rows of a head for the first `vocab` tokens as parts: a view, and zeros for missing tokens."""
    missing = vocab - len(rows)
    return [rows[:vocab]] if missing <= 0 else [rows, rows.new_zeros(missing, rows.shape[1])]


def weights_of(
    layers: list[Any], kinds: Kind | Kinds, of: Architecture, files: MappedFiles = NOTHING_MAPPED
) -> Weights:
    """Return the weights of these layers, with matrices in panels.

    Args:
        layers: of a transformers model, or of a draft head with the module names of a Llama; at least one.
        kinds: of all panels, or by matrix.
        of: their architecture.
        files: mapped files, released after the weights are laid out.
    """
    by_matrix = kinds if isinstance(kinds, Kinds) else Kinds(kinds, kinds, kinds, kinds)
    parts = [parts_of(layer, of) for layer in layers]

    def panels(name: str) -> np.ndarray:
        found = [getattr(one, name) for one in parts]
        matrices = [_matrices_of(one) for one in found]
        return panels_of(matrices, getattr(by_matrix, name), files)

    def panels_of_inner(name: str) -> np.ndarray:
        experts = len(parts[0].router)
        if experts == 0:
            return panels(name)
        alone = [[one] for part in parts for one in getattr(part, name)]
        of_experts = panels_of(alone, getattr(by_matrix, name), files)
        return of_experts.reshape(len(parts), -1, of_experts.shape[2])

    qkv = panels_of([one.qkv for one in parts], by_matrix.qkv, files, partial(rows_in_order, of=of))

    return Weights(
        before_attention=stacked(parts, "before_attention"),
        before_inner=stacked(parts, "before_inner"),
        bias=stacked(parts, "qkv_bias"),
        head_norms=stacked(parts, "head_norms"),
        qkv=qkv,
        out=panels("out"),
        gate_up=panels_of_inner("up"),
        down=panels_of_inner("down"),
        inner=_matrices_of(parts[0].down)[0].shape[1],
        extras=extras_of(parts, of, _routers_of(parts)),
        cross=_cross_weights([one.cross for one in parts], by_matrix.out, files),
    )


def _cross_weights(parts: list[CrossParts], kind: Kind, files: MappedFiles) -> CrossWeights:
    """Return the weights of the cross-attention sublayers, with matrices in panels of a kind."""
    return CrossWeights(
        before=stacked(parts, "before"),
        after=stacked(parts, "after"),
        query=panels_of([[one.query] for one in parts], kind, files),
        query_bias=stacked(parts, "query_bias"),
        out=panels_of([[one.out] for one in parts], kind, files),
        out_bias=stacked(parts, "out_bias"),
    )


def _matrices_of(found: Matrix | list[Matrix]) -> list[Matrix]:
    return found if isinstance(found, list) else [found]


def _routers_of(parts: list[LayerParts]) -> Float32[np.ndarray, "layers panels words"] | None:
    """Return the routers of experts in float32 panels, regardless of the other matrices' kind; None without experts."""
    routers = [one.router for one in parts]
    if len(routers[0]) == 0:
        return None
    return panels_of([[one] for one in routers], "float32")


def angles_of(rotary: Any, positions: int) -> Float32[np.ndarray, "2 positions pairs"]:
    """Return the cosines and sines of the angles of all rotary pairs at each position."""
    return numbers_of(families.angles_of(rotary, positions, torch.device("cpu")))


def angles_of_model(model: "PreTrainedModel", of: Architecture) -> Float32[np.ndarray, "tables 2 positions pairs"]:
    """Return all tables of angles of a model."""
    return np.stack([numbers_of(table) for table in angle_tables(model, of, _NO_LIMIT)])


def misfit(model: "PreTrainedModel", rounding: Rounding | None) -> str:
    """Return the reason why the compiled forward cannot run a model with this rounding; "" if it can."""
    if model.device.type != "cpu" or model.dtype not in _WORDS:
        return f"it is in {model.dtype} on {model.device}; the compiled forward takes float32, bfloat16 and float16 on a CPU"
    return misfit_of_shape(model, rounding)


def misfit_of_bfloat16(model: "PreTrainedModel") -> str:
    """Return the reason why the compiled forward cannot make a model's products in bfloat16; "" if it can."""
    if why := misfit(model, None):
        return why
    if matrices_of(model):
        return "its files hold rounded weights"
    if kind_of_panels(_matrices_in(model), None, False, mapped_files(model)) != "bfloat16":
        return f"its weights, in {model.dtype}, are not numbers of bfloat16; load it with dtype='bfloat16'"
    return ""


def misfit_of_shape(model: "PreTrainedModel", rounding: Rounding | None) -> str:
    """Return `misfit` by the configuration alone, for a model whose weights may not be loaded yet."""
    if not compiling.AVAILABLE:
        if find_spec("numba") is None:
            return "numba is missing (pip install 'numba>=0.63')"
        return "numba is older than 0.63, or switched off (SPECBEAM_KERNELS=off)"
    family = family_of(model)
    if rounding is not None and family is not None and family.mixture:
        return f"experts cannot be rounded to {rounding}"
    return misfit_of_family(model) or _misfit_of_sizes(model, rounding)


def _misfit_of_sizes(model: "PreTrainedModel", rounding: Rounding | None) -> str:
    """Return the reason why the sizes of a model do not fit panels; "" if they do."""
    unit = steps_in(_strictest_kind(model, rounding))
    of = architecture_of(model)
    leave = matrix_at(model, of.family.leave, of.family)
    if leave is not None and len(leave) % max(unit, WIDTH):
        return f"its head reads {len(leave)} numbers; this must be a multiple of {max(unit, WIDTH)}"
    return misfit_of_depths(model, of, unit)


def _strictest_kind(model: "PreTrainedModel", rounding: Rounding | None) -> Kind:
    """Return a kind of panels whose depths fit all panels of a model."""
    if rounding is None and meets_rounded_rows(model):
        return "dual binary"
    return "int4" if rounding == "int4" or matrices_of(model) else "float32"


def misfit_of_depths(model: "PreTrainedModel", of: Architecture, unit: int) -> str:
    """Return the reason why the depths of the layers' matrices do not fit panels; "" if they do.

    Args:
        unit: must divide the depths.
    """
    first = layers_in(model, of.family)[0]
    inner = _matrices_of(parts_of(first, of).down)[0].shape[1]
    depths = model.config.hidden_size, inner, of.heads * of.size
    if of.size % steps_in("float32") or any(depth % unit for depth in depths):
        deep = ", ".join(map(str, depths))
        return f"its matrices are {deep} deep, with heads of {of.size}; the depths must be multiples of {unit}"
    return ""
