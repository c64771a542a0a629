"""A forward without module calls, for small Llama-like models: in their short passes calls cost more than arithmetic.

Weights are fused, and norms are folded into the matrices after them. The two numbers of a rotary pair are side by side, so
that a rotation is one complex product. The results equal those of transformers up to rounding; `load` compares both on a
token tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from specbeam.core.records import FINAL
from specbeam.engines.families import head_size
from specbeam.engines.kv.late import LateRows
from specbeam.engines.kv.store import KVStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST = 300_000_000  # parameters; for larger models a second copy of the weights takes too much memory
PACKED_FROM = 1_000_000  # numbers of a matrix; packing slows products with smaller ones down


class Matrix:
    """A linear map, x -> x @ weight.T + bias, with the weight laid out once for products with few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.transposed = weight.t().contiguous()
        self.bias = bias
        self.packed = _packed(weight) if weight.numel() >= PACKED_FROM else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, float[rows, in] -> float[rows, out]."""
        if self.packed is not None and x.shape[0] > 1:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return torch.mm(x, self.transposed) if self.bias is None else torch.addmm(self.bias, x, self.transposed)

    def added(self, addend: Tensor, x: Tensor) -> Tensor:
        """Return `addend` + x @ weight.T, for matrices without bias."""
        if self.packed is not None and x.shape[0] > 1:
            return self(x).add_(addend)
        return torch.addmm(addend, x, self.transposed)


def _packed(weight: Tensor) -> Tensor | None:
    """Return the weight in oneDNN's own layout; None if this build of torch has no oneDNN for it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    except (RuntimeError, AttributeError):
        return None


@dataclass(frozen=True, eq=False)
class LeanLayer:
    """The matrices of one layer, and its kind of attention."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    kind: str


@dataclass(frozen=True, eq=False)
class Grid:
    """The layout of the rows of a pass: a batch with padding for attention, packed without padding for everything else."""

    batch: int
    rows: int
    real: Tensor | None  # int64[n]: places among the batch * rows that hold a token; None: all do

    def packed(self, x: Tensor) -> Tensor:
        """Return only the rows that hold a token, [batch * rows, ...] -> [n, ...]."""
        return x if self.real is None else x[self.real]

    def without(self, places: list[Tensor]) -> "Grid":
        """Return the same layout without rows at some places; itself if there are none."""
        if not places:
            return self
        every = torch.arange(self.batch * self.rows) if self.real is None else self.real
        return Grid(self.batch, self.rows, every[~torch.isin(every, torch.cat(places))])

    def laid_out(self, x: Tensor) -> Tensor:
        """Return the rows in the batch, [n, width] -> [batch, rows, width], with zeros for padding."""
        if self.real is not None:
            x = x.new_zeros(self.batch * self.rows, x.shape[1]).index_copy_(0, self.real, x)
        return x.view(self.batch, self.rows, -1)


class LeanDecoder:
    """The lean forward of one model, which passes `is_plain_llama`."""

    def __init__(self, model: "PreTrainedModel") -> None:
        config = model.config
        inner = model.model
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.size = head_size(config)
        self.eps = config.rms_norm_eps
        self.embedding = inner.embed_tokens.weight
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.layers = [self._layer(layer, kind) for layer, kind in zip(inner.layers, kinds, strict=True)]
        self.head = Matrix(model.lm_head.weight * inner.norm.weight)
        self.last_norm = inner.norm.weight
        self.rotations = _rotations(inner.rotary_emb, config.max_position_embeddings, self.size)

    def _layer(self, layer: Any, kind: str) -> LeanLayer:
        attention = layer.self_attn
        mlp = layer.mlp
        rows = [self._paired(attention.q_proj), self._paired(attention.k_proj), _weight_and_bias(attention.v_proj)]
        weight = torch.cat([w for w, _ in rows]) * layer.input_layernorm.weight
        bias = None if rows[0][1] is None else torch.cat([b for _, b in rows if b is not None])
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * layer.post_attention_layernorm.weight
        out = Matrix(attention.o_proj.weight)
        down = Matrix(mlp.down_proj.weight)
        return LeanLayer(Matrix(weight, bias), out, Matrix(gate_up), down, kind)

    def paired_keys(self, keys: Float[Tensor, "heads rows size"]) -> Float[Tensor, "heads rows size"]:
        """Return keys with the two numbers of each rotary pair side by side, as attention here reads them."""
        return keys.unflatten(-1, (2, self.size // 2)).transpose(-1, -2).flatten(-2)

    def _paired(self, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias with the rows of each head reordered, so that rotary pairs are neighbours."""

        def reordered(x: Tensor) -> Tensor:
            return x.view(-1, 2, self.size // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

        weight, bias = _weight_and_bias(linear)
        return reordered(weight), None if bias is None else reordered(bias)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Tensor | dict[str, Tensor],
        store: KVStore,
        wanted: int,
        real: Tensor | None = None,
        states: dict[int, Tensor] | None = None,
        embeds: Tensor | None = None,
        entering: Sequence[LateRows] = (),
    ) -> Tensor:
        """Run the model on a batch, and return the logits of the last `wanted` rows, float[batch, wanted, vocab].

        Args:
            tokens, positions: int64[batch, rows].
            masks: numbers that are added to the scores of attention, or a dict of them by layer type.
            real: which of the batch * rows are no padding; only these pass through the matrices. None: all.
            states: the keys are `Needs.columns`, for which the hidden states of all rows, float[batch, rows, width], are
                set.
            embeds: float[batch, rows, width], used in place of the embeddings of the tokens.
            entering: rows that enter between layers; the layers before have no rows of them.
        """
        whole = Grid(tokens.shape[0], tokens.shape[1], real)
        grid = whole.without([rows.places for rows in entering])
        if embeds is None:
            x = self.embedding[grid.packed(tokens.reshape(-1))]
        else:
            x = grid.packed(embeds.reshape(grid.batch * grid.rows, -1))
        rotations = self.rotations[grid.packed(positions.reshape(-1))][:, None]
        states = {} if states is None else states
        for number, layer in enumerate(self.layers):
            if here := [rows for rows in entering if rows.layer == number]:
                later = whole.without([rows.places for rows in entering if rows.layer > number])
                every = grid.laid_out(x).flatten(0, 1)
                for rows in here:
                    rows.write(every)
                grid = later
                x = grid.packed(every)
                rotations = self.rotations[grid.packed(positions.reshape(-1))][:, None]
            if number in states:
                states[number] = grid.laid_out(x)
            mask = masks[layer.kind] if isinstance(masks, dict) else masks
            x = self._attended(x, layer, rotations, mask, store, number, grid)
            gate, up = layer.gate_up(self._normed(x)).chunk(2, -1)
            x = layer.down.added(x, functional.silu(gate).mul_(up))
        if len(self.layers) in states:
            states[len(self.layers)] = grid.laid_out(x)
        if FINAL in states:
            states[FINAL] = grid.laid_out(self._normed(x) * self.last_norm)
        last = grid.laid_out(x)[:, -wanted:].reshape(grid.batch * wanted, -1)
        return self.head(self._normed(last)).view(grid.batch, wanted, -1)

    def _attended(
        self,
        x: Tensor,
        layer: LeanLayer,
        rotations: Tensor,
        mask: Tensor,
        store: KVStore,
        number: int,
        grid: "Grid",
    ) -> Tensor:
        """Return x plus the output of the layer's attention; store the keys and values of its rows."""
        qkv = layer.qkv(self._normed(x))
        rotated = (self.heads + self.kv_heads) * self.size
        pairs = torch.view_as_complex(qkv[:, :rotated].reshape(len(qkv), -1, self.size // 2, 2)) * rotations
        qk = grid.laid_out(torch.view_as_real(pairs).view(len(qkv), rotated))
        qk = qk.view(grid.batch, grid.rows, -1, self.size).transpose(1, 2)
        v = grid.laid_out(qkv[:, rotated:]).view(grid.batch, grid.rows, self.kv_heads, self.size).transpose(1, 2)
        keys, values = store.layers[number].update(qk[:, self.heads :], v)
        attended = functional.scaled_dot_product_attention(
            qk[:, : self.heads], keys, values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
        )
        flat = attended.transpose(1, 2).reshape(grid.batch * grid.rows, -1)
        return layer.out.added(x, grid.packed(flat))

    def _normed(self, x: Tensor) -> Tensor:
        """Return the RMSNorm of x without its weight, which is folded into the matrix after it."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def _weight_and_bias(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def _rotations(rotary: nn.Module, positions: int, size: int) -> Tensor:
    """Return the rotation of each rotary pair at each position, complex64[positions, size / 2]."""
    places = torch.arange(positions)[None]
    cos, sin = rotary(torch.zeros(1), places)
    return torch.complex(cos[0, :, : size // 2], sin[0, :, : size // 2])
