"""A forward of models on a GPU in few kernels, rows without padding; products of many rows are cuBLAS's.

The time of a pass of a small draft model depends on the number of kernels that it starts, not on arithmetic: here these are
ten per layer of a Llama, in transformers some forty. The results equal those of transformers up to rounding; `load` compares
both on a token tree.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from specbeam.engines.families import Architecture, ModelFamily, architecture_of, norm_of, parts_of
from specbeam.engines.gpu.kernels import activated, attended, norm_heads, normed, rotate_and_store
from specbeam.engines.gpu.pages import PagedStore
from specbeam.engines.gpu.products import GpuMatrix, multiplied, rounded_matrix
from specbeam.engines.gpu.staging import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PassShape(NamedTuple):
    """The size of a pass, for which a graph is captured."""

    rows: int
    sessions: int
    most: int  # the most rows of one session
    wanted: int  # number of rows whose logits are wanted


@dataclass(frozen=True, eq=False)
class GpuLayer:
    """The weights of one layer; matrices that read the same rows are joined. Norms are those of `families.LayerParts`."""

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
    up: GpuMatrix  # gate and up, or up alone
    up_bias: Tensor | None
    down: GpuMatrix
    down_bias: Tensor | None
    kind: int  # the kind of attention, an index into `GpuDecoder.kinds`, which selects the mask
    angles: Tensor  # float32[2, positions, pairs]
    scale: float  # what scores of attention are multiplied with


class GpuDecoder:
    """The forward of one model on a GPU; engines/families.py says of which models.

    It joins matrices that read the same rows, and turns the model's own matrices into views of the joined ones. So the model
    itself still works as before, and no weight is kept twice, but for those of norms.

    Args:
        rounded: whether all matrices are rounded to fp8, in copies; the model keeps its own beside them.
    """

    def __init__(self, model: "PreTrainedModel", rounded: bool = False) -> None:
        self.rounded = rounded
        architecture = architecture_of(model)
        family = architecture.family
        body: Any = model.base_model
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        self.architecture = architecture
        self.numbers = architecture.numbers
        self.heads = architecture.heads, architecture.kv_heads
        self.size = architecture.size
        self.eps = architecture.eps
        self.kinds = architecture.names
        self.embedding = embedding.weight
        own_scale = getattr(embedding, "embed_scale", None)
        self.embedding_scale = 1.0 if own_scale is None else float(own_scale.to(self.embedding.dtype))
        self.places = getattr(body, family.positions).weight if family.positions else None
        self.tables = _angle_tables(model, architecture)
        self.angles = self.tables[0]
        self.layers = [self._layer(layer, number) for number, layer in enumerate(getattr(body, family.layers))]
        self.last_norm = norm_of(getattr(body, family.final_norm), family)
        self.head = self._matrix(head.weight)
        self.processors = _processors(self.embedding.device)

    def store(self) -> PagedStore:
        """Return a new store for the keys and values of this model."""
        return PagedStore(len(self.layers), self.heads[1], self.size, self.embedding)

    def forward(self, inputs: Inputs, shape: PassShape, store: PagedStore) -> Float[Tensor, "wanted vocab"]:
        """Run the model on the rows of a pass, store their keys and values, and return the float32 logits of wanted rows."""
        of = self.architecture
        x = self._embedded(inputs, shape.rows)
        for number, layer in enumerate(self.layers):
            read = normed(x, layer.before_attention, self.eps)
            beside = normed(x, layer.before_inner, self.eps) if of.parallel else None
            qkv = multiplied(read, layer.qkv, layer.qkv_bias)
            self._norm_queries_and_keys(qkv, layer)
            pages = store.layer(number)
            q = rotate_and_store(qkv, self.heads, layer.angles, inputs, pages, of.family.by_head)
            mixed = attended(
                q, self.heads[1], pages, inputs, layer.kind, shape.sessions, shape.most, self.processors, layer.scale,
                self.numbers.attention_cap,
            )  # fmt: skip
            self._add(x, mixed, layer.out, layer.out_bias, layer.after_attention)
            read = normed(x, layer.before_inner, self.eps) if beside is None else beside
            both = multiplied(read, layer.up, layer.up_bias)
            wide = activated(both, of.activation, of.family.gated)
            self._add(x, wide, layer.down, layer.down_bias, layer.after_inner)
        x = x.index_select(0, inputs.wanted[: shape.wanted])
        return self._shaped(multiplied(normed(x, self.last_norm, self.eps), self.head)).float()

    def _embedded(self, inputs: Inputs, rows: int) -> Float[Tensor, "rows width"]:
        """Return what the first layer reads."""
        x = self.embedding.index_select(0, inputs.tokens[:rows])
        if self.embedding_scale * self.numbers.embedding != 1:
            x *= self.embedding_scale * self.numbers.embedding
        if self.places is not None:
            x += self.places.index_select(0, inputs.positions[:rows])
        return x

    def _norm_queries_and_keys(self, qkv: Float[Tensor, "rows all"], layer: GpuLayer) -> None:
        """Replace queries and keys by their norms, of each head or of all heads together, if the layer has any."""
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
        x: Float[Tensor, "rows width"],
        read: Float[Tensor, "rows wide"],
        matrix: GpuMatrix,
        bias: Tensor | None,
        norm: Tensor,
    ) -> None:
        """Add what leaves a sublayer to x, in place: its last matrix, then its norm if there is one."""
        if bias is None and not norm.numel() and self.numbers.residual == 1:
            multiplied(read, matrix, add_to=x)
            return
        more = normed(multiplied(read, matrix, bias), norm, self.eps)
        x.add_(more, alpha=self.numbers.residual)

    def _shaped(self, logits: Float[Tensor, "wanted vocab"]) -> Float[Tensor, "wanted vocab"]:
        """Return logits divided and capped as the family has it."""
        if self.numbers.logits_divisor != 1:
            logits = logits / self.numbers.logits_divisor
        cap = self.numbers.logits_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _matrix(self, numbers: Tensor) -> GpuMatrix:
        """Return a matrix of the model as passes read it."""
        return rounded_matrix(numbers) if self.rounded else GpuMatrix(numbers)

    def _layer(self, layer: Any, number: int) -> GpuLayer:
        """Return the weights of a layer of transformers, whose matrices become views of the joined ones."""
        of = self.architecture
        family = of.family
        parts = parts_of(layer, of)
        attention = getattr(layer, family.attention)
        inner = getattr(layer, family.inner)
        qkv = [getattr(attention, name) for name in family.qkv]
        rope = of.ropes[number]
        return GpuLayer(
            before_attention=parts.before_attention,
            after_attention=parts.after_attention,
            before_inner=parts.before_inner,
            after_inner=parts.after_inner,
            head_norms=parts.head_norms,
            wide_norms=parts.wide_norms,
            qkv=self._matrix(_joined([module.weight for module in qkv], family)),
            qkv_bias=None if qkv[0].bias is None else _join_rows([module.bias for module in qkv]),
            out=self._matrix(parts.out),
            out_bias=parts.out_bias if parts.out_bias.numel() else None,
            up=self._matrix(_joined([getattr(inner, name).weight for name in family.up], family)),
            up_bias=parts.up_bias if parts.up_bias.numel() else None,
            down=self._matrix(parts.down),
            down_bias=parts.down_bias if parts.down_bias.numel() else None,
            kind=self.kinds.index(of.kinds[number]),
            angles=self.tables[rope] if rope >= 0 else self.angles[:, :, :0],
            scale=of.scales[number],
        )


def _angle_tables(model: "PreTrainedModel", of: Architecture) -> list[Float[Tensor, "2 positions pairs"]]:
    """Return all tables of rotary angles of a model; one without pairs if its positions are learned."""
    body: Any = model.base_model
    positions = model.config.max_position_embeddings
    device = model.device
    if of.family.positions:
        return [torch.zeros(2, positions, 0, device=device)]
    tables = []
    for kind in of.tables:
        places = torch.arange(positions, device=device)[None]
        cos, sin = body.rotary_emb(torch.zeros(1, device=device), places, *([kind] if kind else []))
        pairs = cos.shape[-1] // 2
        tables.append(torch.stack([cos[0, :, :pairs], sin[0, :, :pairs]]).contiguous())
    return tables


def _joined(weights: list[Tensor], family: ModelFamily) -> Tensor:
    """Return these matrices as one, [outputs, inputs]; see `_join_rows`."""
    if len(weights) > 1:
        return _join_rows(weights)
    matrix = weights[0].detach()
    return matrix.t() if family.transposed else matrix


def _join_rows(weights: list[Tensor]) -> Tensor:
    """Join the rows of these weights in one tensor, turn the weights into views of it, and return it.

    If the weights are such views already, nothing is copied.
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
    """Return whether the memory of a weight ends where that of the other begins, in the same storage."""
    same = weight.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return (
        same
        and weight.stride() == other.stride()
        and other.data_ptr() == weight.data_ptr() + weight.numel() * weight.element_size()
    )


def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
