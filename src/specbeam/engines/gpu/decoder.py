"""A forward of models on a GPU in few kernels and without padding, with matrix products by cuBLAS.

The time of a small draft model's pass is bound by the number of kernels, not by arithmetic: a Llama layer takes ten
kernels here and about forty in transformers. The results equal transformers' up to rounding; `load` compares both on a
token tree.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from specbeam.core.records import FINAL
from specbeam.engines.arrays import JoinedRows, RowTensor
from specbeam.engines.families import (
    NO_TOKEN,
    Architecture,
    CrossParts,
    LayerParts,
    ModelFamily,
    angle_tables,
    architecture_of,
    bias_of_tokens,
    body_of,
    embedding_of,
    layers_in,
    matrix_at,
    module_at,
    norm_at,
    own_scale,
    parts_of,
    places_of,
    source_parts,
    unplaced_in,
)
from specbeam.engines.gpu.expert_kernels import Experts, mixed_experts
from specbeam.engines.gpu.kernels import Scores, activated, attended, norm_heads, norm_sum, normed, rotate_and_store
from specbeam.engines.gpu.pages import PagedStore
from specbeam.engines.gpu.parts import WHOLE, PassPart
from specbeam.engines.gpu.products import GpuMatrix, multiplied, rounded_matrix
from specbeam.engines.gpu.source_kernels import looked_at_sources
from specbeam.engines.gpu.staging import Inputs
from specbeam.engines.kv.cross_pool import CrossPool
from specbeam.engines.shared_tokens import SharedTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_LIMIT = 2**31 - 1  # number of positions of a model with biases by distance


class PassShape(NamedTuple):
    """The size of a pass, for which a graph is captured."""

    rows: int
    sessions: int
    most: int  # maximum number of rows of one session
    wanted: int  # number of rows whose logits are needed


@dataclass(frozen=True, eq=False)
class SourceLayer:
    """The weights of a layer's cross-attention; `before` and `after` are norms, as in `GpuLayer`."""

    before: Tensor
    after: Tensor
    query: GpuMatrix
    query_bias: Tensor | None
    out: GpuMatrix
    out_bias: Tensor | None
    both: GpuMatrix  # keys and values of the source
    both_bias: Tensor | None


@dataclass(frozen=True, eq=False)
class GpuLayer:
    """The weights of one layer; matrices that read the same rows are joined. For norms see `families.LayerParts`."""

    before_attention: Tensor
    after_attention: Tensor
    before_inner: Tensor
    after_inner: Tensor
    head_norms: Tensor
    wide_norms: Tensor
    qkv: GpuMatrix
    qkv_bias: Tensor | None
    out: GpuMatrix
    out_bias: Tensor | None
    up: GpuMatrix  # gate and up, or up only; no outputs in a mixture of experts
    up_bias: Tensor | None
    down: GpuMatrix  # no outputs in a mixture of experts
    down_bias: Tensor | None
    angles: Tensor  # float32[2, positions, pairs]
    scores: Scores  # its kind is an index into `GpuDecoder.kinds`
    source: SourceLayer | None  # None: no cross-attention
    experts: Experts | None  # None: an MLP


class GpuDecoder:
    """The forward of one model on a GPU; engines/families.py lists the models.

    It joins matrices that read the same rows, and turns the model's matrices into views of the joined ones. So the
    model object works as before, and only norms, some biases and tables of sines are stored twice.

    Args:
        rounded: whether all matrices are rounded to fp8, in copies; the model's own matrices do not change.
        shared: the target's tokens, which a draft model reads and drafts; None: the model's own tokens.

    Attributes:
        vocab: the number of logits.
        ranges: see `ModelLimits.ranges`.
        blank: the token of rows with other embeddings; it has a position embedding if any token has one.
        sources: the cross-attention keys and values of all sources, in an encoder-decoder model.
    """

    def __init__(self, model: "PreTrainedModel", rounded: bool = False, shared: SharedTokens | None = None) -> None:
        self.rounded = rounded
        architecture = architecture_of(model)
        family = architecture.family
        body: Any = body_of(model, family)
        embedding = embedding_of(model, family)
        head: Any = model.get_output_embeddings()
        self.architecture = architecture
        self.numbers = architecture.numbers
        self.heads = architecture.heads, architecture.kv_heads
        self.size = architecture.size
        self.eps = architecture.eps
        self.kinds = architecture.names
        self.embedding = embedding.weight
        self.embedding_scale = own_scale(embedding)
        self.places = places_of(body, architecture).to(self.embedding)
        self.unplaced = unplaced_in(body, family)
        self.blank = 1 if self.unplaced == 0 else 0
        self.first_norm = norm_at(body, family.first_norm, family).to(self.embedding.device)
        enter = matrix_at(model, family.enter, family)
        leave = matrix_at(model, family.leave, family)
        self.enter = None if enter is None else GpuMatrix(enter)  # makes embeddings, which are not rounded
        self.leave = None if leave is None else self._matrix(leave)
        self.tables = angle_tables(model, architecture, _NO_LIMIT)
        self.angles = self.tables[0]
        self.ranges, self._biases = _ranges_of(architecture)
        self.layers = [self.layer_of(layer, number) for number, layer in enumerate(layers_in(model, family))]
        self.last_norm = norm_at(body, family.final_norm, family).to(self.embedding.device)
        self.vocab = len(head.weight) if shared is None else shared.vocab
        self.known = len(self.embedding) if shared is None else shared.vocab  # number of input tokens
        self.read_as = None if shared is None else torch.from_numpy(shared.read_as).to(self.embedding.device)
        self.head = self._matrix(head.weight[: self.vocab if shared is None else shared.head_rows])
        self.logits_bias = bias_of_tokens(model, shared).to(self.embedding)
        self.sources = CrossPool(len(self.layers), self.heads[1], self.size, self.embedding) if family.cross else None
        self.processors = _processors(self.embedding.device)

    @property
    def states_like(self) -> Tensor:
        """An empty tensor with the type, width and device of hidden states between layers."""
        return self.embedding.new_empty(0, self.layers[0].qkv.numbers.shape[1])

    def width_of(self, column: int) -> int:
        """Return the width of the hidden states of a column; see `Needs.columns`."""
        width = self.states_like.shape[1]
        return width if column != FINAL or self.leave is None else len(self.leave.numbers)

    def store(self) -> PagedStore:
        """Return a new KV store for this model."""
        return PagedStore(len(self.layers), self.heads[1], self.size, self.embedding)

    def forward(
        self, inputs: Inputs, shape: PassShape, store: PagedStore, part: PassPart = WHOLE
    ) -> Float[Tensor, "wanted vocab"]:
        """Run the model on the rows of a pass, store their keys and values, and return the float32 logits of wanted rows."""
        x = self.embedded(inputs, shape.rows, part)
        x = self.run_layers(x, enumerate(self.layers), inputs, shape, store, part)
        part.keep(len(self.layers), x)
        if FINAL in part.columns:
            part.keep(FINAL, self.input_of_head(x, self.last_norm))
        return self.logits(x.index_select(0, inputs.wanted[: shape.wanted]), self.last_norm)

    def run_layers(
        self,
        x: RowTensor,
        layers: Iterable[tuple[int, GpuLayer]],
        inputs: Inputs,
        shape: PassShape,
        store: PagedStore,
        part: PassPart = WHOLE,
    ) -> RowTensor:
        """Run layers on the rows of a pass, and return the output of the last one; x may be overwritten.

        Args:
            layers: the layers with their numbers in the store.
        """
        of = self.architecture
        for number, layer in layers:
            x = part.before_layer(x, number)
            read = normed(x, layer.before_attention, self.eps)
            mlp_input = self._input_of_parallel_mlp(x, read, layer) if of.parallel else None
            if number not in part.no_attention:
                self._add_attention(x, read, number, layer, inputs, shape, store)
            if number in part.no_inner:
                continue
            read = normed(x, layer.before_inner, self.eps) if mlp_input is None else mlp_input
            if layer.experts is not None:
                more = normed(mixed_experts(read, layer.experts, of), layer.after_inner, self.eps)
                x.add_(more, alpha=self.numbers.residual)
                continue
            both = multiplied(read, layer.up, layer.up_bias)
            wide = activated(both, of.activation, of.family.gated)
            self._add(x, wide, layer.down, layer.down_bias, layer.after_inner)
        return x

    def _input_of_parallel_mlp(self, x: RowTensor, read: RowTensor, layer: GpuLayer) -> RowTensor:
        """Return the input of an MLP parallel to attention: `read`, the input of attention, if both have the same norm."""
        norms = self.architecture.family.norms
        has_own = norms.before_inner != norms.before_attention
        return normed(x, layer.before_inner, self.eps) if has_own else read

    def _add_attention(
        self,
        x: RowTensor,
        read: RowTensor,
        number: int,
        layer: GpuLayer,
        inputs: Inputs,
        shape: PassShape,
        store: PagedStore,
    ) -> None:
        """Add the attention of a layer to x, in place, given its input `read`, and store keys and values."""
        qkv = multiplied(read, layer.qkv, layer.qkv_bias)
        self._norm_queries_and_keys(qkv, layer)
        pages = store.layer(number)
        q = rotate_and_store(qkv, self.heads, layer.angles, inputs, pages, self.architecture.family.by_head)
        mixed = attended(q, self.heads[1], pages, inputs, shape.sessions, shape.most, self.processors, layer.scores)
        self._add(x, mixed, layer.out, layer.out_bias, layer.after_attention)
        self._look_at_sources(x, number, layer, inputs, shape)

    def logits(self, x: RowTensor, norm: Tensor) -> Float[Tensor, "rows vocab"]:
        """Return the float32 logits of rows, given the output of the last layer.

        Args:
            norm: the weight of the norm before the head.
        """
        return self._shaped(multiplied(self.input_of_head(x, norm), self.head)).float()

    def input_of_head(self, x: RowTensor, norm: Tensor) -> Float[Tensor, "rows read"]:
        """Return the input of the head, given the output of the last layer; `norm` as in `logits`."""
        x = normed(x, norm, self.eps)
        return x if self.leave is None else multiplied(x, self.leave)

    def embedded(self, inputs: Inputs, rows: int, part: PassPart = WHOLE) -> RowTensor:
        """Return the input of the first layer."""
        tokens = inputs.tokens[:rows]
        if self.read_as is not None:
            tokens = self.read_as.index_select(0, tokens)
        x = self.embedding.index_select(0, tokens)
        if self.embedding_scale * self.numbers.embedding != 1:
            x *= self.embedding_scale * self.numbers.embedding
        x = part.embedded(x, self.numbers.embedding)
        if self.enter is not None:
            x = multiplied(x, self.enter)
        if len(self.places):
            places = self.places.index_select(0, inputs.positions[:rows])
            if self.unplaced != NO_TOKEN:
                places *= (tokens != self.unplaced)[:, None]
            x += places
        return normed(x, self.first_norm, self.eps)

    def _look_at_sources(self, x: RowTensor, number: int, layer: GpuLayer, inputs: Inputs, shape: PassShape) -> None:
        """Add the cross-attention of a layer, in place; do nothing if it has none."""
        own = layer.source
        if own is None or self.sources is None:
            return
        read = normed(x, own.before, self.eps)
        q = multiplied(read, own.query, own.query_bias).view(len(x), self.heads[0], self.size)
        found = looked_at_sources(
            q, self.sources.keys[number], self.sources.values[number], inputs, shape.sessions, shape.most,
            self.processors, layer.scores.scale,
        )  # fmt: skip
        self._add(x, found, own.out, own.out_bias, own.after)

    def read_source(
        self, states: Float[Tensor, "frames hidden"]
    ) -> Iterator[tuple[Float[Tensor, "frames heads size"], Tensor]]:
        """Yield each layer's keys and values of a source, given its encoder states."""
        for layer in self.layers:
            own = layer.source
            assert own is not None
            both = multiplied(states, own.both, own.both_bias)
            keys, values = both.view(len(states), 2, self.heads[1], self.size).unbind(1)
            yield keys, values

    def _norm_queries_and_keys(self, qkv: JoinedRows, layer: GpuLayer) -> None:
        """Normalise queries and keys in place, per head or over all heads, if the layer has such norms."""
        if layer.head_norms.numel():
            norm_heads(qkv, layer.head_norms, self.heads, self.eps)
        if layer.wide_norms.numel():
            queries = self.heads[0] * self.size
            both = queries + self.heads[1] * self.size
            for start, stop in ((0, queries), (queries, both)):
                part = qkv[:, start:stop]
                part.copy_(normed(part.contiguous(), layer.wide_norms[start:stop], self.eps))

    def _add(
        self,
        x: RowTensor,
        read: Float[Tensor, "rows wide"],
        matrix: GpuMatrix,
        bias: Tensor | None,
        norm: Tensor,
    ) -> None:
        """Add a sublayer's output to x, in place: its last matrix, then a norm of the output or of the sum."""
        if norm.numel() and self.architecture.family.norm_of_sum:
            norm_sum(x, multiplied(read, matrix, bias), norm, self.eps, self.numbers.residual)
            return
        if bias is None and not norm.numel() and self.numbers.residual == 1:
            multiplied(read, matrix, add_to=x)
            return
        more = normed(multiplied(read, matrix, bias), norm, self.eps)
        x.add_(more, alpha=self.numbers.residual)

    def _shaped(self, logits: Float[Tensor, "wanted own"]) -> Float[Tensor, "wanted vocab"]:
        """Return the logits of all tokens, divided, capped and biased as in the family."""
        if self.numbers.logits_divisor != 1:
            logits = logits / self.numbers.logits_divisor
        cap = self.numbers.logits_cap
        if cap:
            logits = torch.tanh(logits / cap) * cap
        missing = self.vocab - logits.shape[1]
        if missing:
            logits = functional.pad(logits, (0, missing))  # the biases of tokens that are not drafted are -inf
        return logits + self.logits_bias if len(self.logits_bias) else logits

    def _matrix(self, numbers: Tensor) -> GpuMatrix:
        return rounded_matrix(numbers) if self.rounded else GpuMatrix(numbers)

    def layer_of(self, layer: Any, number: int) -> GpuLayer:
        """Return the weights of a transformers layer, whose matrices become views of the joined ones.

        Args:
            number: the number of the layer, or of the model's layer that has the same kind of attention.
        """
        of = self.architecture
        family = of.family
        parts = parts_of(layer, of)
        attention = module_at(layer, family.attention)
        inner = module_at(layer, family.inner)
        qkv = [getattr(attention, name) for name in family.qkv]
        up = [parts.router[:0]] if family.mixture else [getattr(inner, name).weight for name in family.up]
        some_lack_bias = any(module.bias is None for module in qkv)
        rope = of.ropes[number]
        scores = Scores(
            kind=self.kinds.index(of.kinds[number]),
            scale=of.scales[number],
            cap=self.numbers.attention_cap,
            biases=self._biases[number] if self._biases else None,
            by_place=of.by_place,
        )
        return GpuLayer(
            before_attention=parts.before_attention,
            after_attention=parts.after_attention,
            before_inner=parts.before_inner,
            after_inner=parts.after_inner,
            head_norms=parts.head_norms,
            wide_norms=parts.wide_norms,
            qkv=self._matrix(_joined([module.weight for module in qkv], family)),
            qkv_bias=_bias(parts.qkv_bias) if some_lack_bias else _join_rows([module.bias for module in qkv]),
            out=self._matrix(parts.out),
            out_bias=_bias(parts.out_bias),
            up=self._matrix(_joined(up, family)),
            up_bias=_bias(parts.up_bias),
            down=self._matrix(parts.router[:0] if family.mixture else parts.down),
            down_bias=_bias(parts.down_bias),
            angles=self.tables[rope] if rope >= 0 else self.angles[:, :, :0],
            scores=scores,
            source=self._source_layer(layer, parts.cross) if family.cross else None,
            experts=_experts(inner, parts) if family.mixture else None,
        )

    def _source_layer(self, layer: Any, parts: CrossParts) -> SourceLayer:
        """Return the weights of a layer's cross-attention."""
        of = self.architecture
        attention = module_at(layer, of.family.cross)
        both = [getattr(attention, name).weight for name in of.family.qkv[1:]]
        return SourceLayer(
            before=parts.before,
            after=parts.after,
            query=self._matrix(parts.query),
            query_bias=_bias(parts.query_bias),
            out=self._matrix(parts.out),
            out_bias=_bias(parts.out_bias),
            both=self._matrix(_join_rows(both)),
            both_bias=_bias(source_parts(layer, of).bias),
        )


def _experts(inner: Any, parts: LayerParts) -> Experts:
    """Return the experts of a layer, given its module of experts."""
    return Experts(parts.router.detach(), inner.experts.gate_up_proj.detach(), inner.experts.down_proj.detach())


def _bias(found: Tensor) -> Tensor | None:
    return found if found.numel() else None


def _ranges_of(of: Architecture) -> tuple[UInt8[np.ndarray, " distances"], list[Float[Tensor, "heads ranges"]]]:
    """Return the ranges of distances with equal biases (`ModelLimits.ranges`), and the biases of each layer by range."""
    no_ranges = np.zeros(0, dtype=np.uint8)
    if not of.biases:
        return no_ranges, []
    if of.by_place:
        (biases,) = of.biases
        return no_ranges, [biases.contiguous()] * len(of.scales)
    every = torch.stack(of.biases).float().cpu().flatten(0, 1)
    biases, ranges = every.unique_consecutive(dim=1, return_inverse=True)
    numbers = (1 + ranges).to(torch.uint8).numpy()  # at most `MOST_RANGES`
    by_layer = biases.view(len(of.biases), of.heads, -1).contiguous().to(of.biases[0].device)
    return numbers, [*by_layer]


def _joined(weights: list[Tensor], family: ModelFamily) -> Tensor:
    """Return these matrices as one, [outputs, inputs]; see `_join_rows`."""
    if len(weights) > 1:
        return _join_rows(weights)
    matrix = weights[0].detach()
    return matrix.t() if family.transposed else matrix


def _join_rows(weights: list[Tensor]) -> Tensor:
    """Join the rows of these weights in one tensor, turn the weights into views of it, and return it.

    Nothing is copied if the weights already are such views.
    """
    first = weights[0].detach()
    rows = sum(map(len, weights))
    if all(_is_followed_by(weight, other) for weight, other in pairwise(weights)):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    all_rows = torch.cat([weight.detach() for weight in weights])
    start = 0
    for weight in weights:
        weight.data = all_rows[start : start + len(weight)]
        start += len(weight)
    return all_rows


def _is_followed_by(weight: Tensor, other: Tensor) -> bool:
    """Return whether `other` begins where `weight` ends, in the same storage."""
    same = weight.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return (
        same
        and weight.stride() == other.stride()
        and other.data_ptr() == weight.data_ptr() + weight.numel() * weight.element_size()
    )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
