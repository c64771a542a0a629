"""The layers of heads: norms, attention over any rows, and gated MLPs.

Modules are named like the tensors of checkpoints. The caller of attention chooses which rows a row attends to, so that
drafting in a tree and training on whole texts run the same layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from specbeam.models.heads.arrays import Angles, Blocks, Heads, PerRow, Rows

# The attention of a layer: takes the layer's number, rotated queries, float[... rows, heads, size], keys and values,
# float[... rows, kv_heads, size]; returns the mixed values, float[... rows, heads, size].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
BASE = 10000.0  # default base of rotary positions; the target's base is never used


class View(NamedTuple):
    """Which rows the rows of a layer attend to."""

    within: int = 0  # size of the window in positions; 0: no window
    from_row: bool = False  # whether the window ends at the row itself, and not at the first row of its draft
    is_causal: bool = False  # whether a row of a block attends only to the rows of the block before it


def view_of(views: tuple[View, ...], layer: int) -> View:
    """Return the view of a layer; without views, rows attend to everything."""
    return views[layer] if views else View()


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a decoder layer, and its optional weights.

    Attributes:
        width: size of a row.
        reads: size of the input of queries, keys and values.
        heads, kv_heads, head_size: the shape of attention.
        inner: size of the gated MLP.
        eps: the epsilon of norms.
        has_bias: whether queries, keys and values have a bias.
        norms_heads: whether queries and keys are normed by head, as in Qwen3.
    """

    width: int
    reads: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    eps: float = 1e-6
    has_bias: bool = False
    norms_heads: bool = False

    def rows(self) -> dict[str, int]:
        """Return the numbers of rows of a layer's matrices by name."""
        return {
            "self_attn.o_proj": self.width,
            "self_attn.q_proj": self.heads * self.head_size,
            "self_attn.k_proj": self.kv_heads * self.head_size,
            "mlp.gate_proj": self.inner,
        }


class Norm(nn.Module):
    """RMSNorm with a weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Rows) -> Rows:
        """Return the normed rows."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * (wide * scale)).to(x.dtype)


class Rotary(nn.Module):
    """The rotation of queries and keys by the position of their rows.

    Args:
        sizes: the sizes of the layers.
        rope: `rope_parameters` in transformers: the type, the base `rope_theta`, and numbers of its scaling.
        positions: number of positions in training; some scalings depend on it.
    """

    def __init__(self, sizes: LayerSizes, rope: dict[str, Any], positions: int = 2048) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=sizes.width,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_size,
            max_position_embeddings=positions,
            rope_parameters=rope,
        )
        self.angles: nn.Module = LlamaRotaryEmbedding(config)
        self.sizes = sizes
        self.rope = rope
        self.positions = positions

    def forward(self, positions: PerRow) -> Angles:
        """Return the cosines and sines of positions."""
        like = next(self.angles.buffers())
        cos, sin = self.angles(like.new_zeros(1), positions.reshape(1, -1))
        shape = (*positions.shape, cos.shape[-1])
        return cos.reshape(shape), sin.reshape(shape)


def rotated(x: Heads, angles: Angles) -> Heads:
    """Return queries or keys, rotated by the cosines and sines of their positions."""
    cos, sin = (one[..., None, :].to(x.dtype) for one in angles)
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cos + turned * sin


class Attention(nn.Module):
    """The attention of a layer; its caller chooses which rows a row attends to."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        size = sizes.head_size
        self.q_proj = nn.Linear(sizes.reads, sizes.heads * size, sizes.has_bias)
        self.k_proj = nn.Linear(sizes.reads, sizes.kv_heads * size, sizes.has_bias)
        self.v_proj = nn.Linear(sizes.reads, sizes.kv_heads * size, sizes.has_bias)
        self.o_proj = nn.Linear(sizes.heads * size, sizes.width, bias=False)
        self.q_norm = Norm(size, sizes.eps) if sizes.norms_heads else nn.Identity()
        self.k_norm = Norm(size, sizes.eps) if sizes.norms_heads else nn.Identity()

    def queries(self, x: Float[Tensor, "*rows reads"], angles: Any) -> Heads:
        """Return the rotated queries of rows."""
        flat = self.q_proj(x).unflatten(-1, (self.sizes.heads, self.sizes.head_size))
        return rotated(self.q_norm(flat), angles)

    def keys_and_values(self, x: Float[Tensor, "*rows reads"], angles: Any) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values of rows, float[... rows, kv_heads, size] each."""
        shape = (self.sizes.kv_heads, self.sizes.head_size)
        keys = self.k_norm(self.k_proj(x).unflatten(-1, shape))
        return rotated(keys, angles), self.v_proj(x).unflatten(-1, shape)

    def forward(self, x: Float[Tensor, "*rows reads"], angles: Any, layer: int, attend: Attend) -> Rows:
        """Return attention's output, which the caller adds to the rows."""
        keys, values = self.keys_and_values(x, angles)
        mixed = attend(layer, self.queries(x, angles), keys, values)
        return self.o_proj(mixed.flatten(-2))


class Gated(nn.Module):
    """The gated MLP of a Llama.

    Args:
        gate: size of the input of the gate; None: the width.
    """

    def __init__(self, width: int, inner: int, gate: int | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width if gate is None else gate, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Rows) -> Rows:
        """Return the MLP's output, which the caller adds to the rows."""
        return self.gated(x, x)

    def gated(self, gate: Float[Tensor, "*rows gate"], x: Rows) -> Rows:
        """Return the output for rows, given the input of the gate."""
        return self.down_proj(functional.silu(self.gate_proj(gate)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A layer of a Llama: attention and an MLP, each on normed rows.

    Args:
        has_first_norm: whether attention reads normed rows; the first layer of an EAGLE-1 head has no such norm.
    """

    def __init__(self, sizes: LayerSizes, has_first_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = Norm(sizes.width, sizes.eps) if has_first_norm else nn.Identity()
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = Norm(sizes.width, sizes.eps)
        self.mlp = Gated(sizes.width, sizes.inner)

    def forward(self, x: Rows, angles: Any, layer: int, attend: Attend) -> Rows:
        """Return the rows after the layer."""
        return self.with_inner(x + self.self_attn(self.input_layernorm(x), angles, layer, attend))

    def with_inner(self, x: Rows) -> Rows:
        """Return rows with the inner layer's output added."""
        return x + self.mlp(self.post_attention_layernorm(x))


class LocalMixing(nn.Module):
    """Two weighted sums of neighbouring rows of a block, before and after a sublayer, with weights that depend on the row.

    Args:
        width: size of a row.
        count: number of rows in a sum: the row itself and the rows just before it in its block.
        group: number of columns that share a row-dependent weight.
    """

    def __init__(self, width: int, count: int, group: int) -> None:
        super().__init__()
        self.count = count
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, count, width))
        self.kernel_projection = nn.Linear(width, 2 * count * (width // group), bias=False)

    def weights(self, x: Blocks) -> Float[Tensor, "*blocks rows 2 count width"]:
        """Return the weights of both sums, computed from the input rows of the first one."""
        changes = self.kernel_projection(x).unflatten(-1, (2, self.count, -1))
        return self.base_kernel + changes.repeat_interleave(self.group, -1)

    def mixed(self, x: Blocks, weights: Float[Tensor, "*blocks rows count width"]) -> Blocks:
        """Return the sums."""
        total = torch.zeros_like(x)
        for back in range(self.count):
            earlier = functional.pad(x, (0, 0, back, 0))[..., : x.shape[-2], :]
            total = total + weights[..., back, :] * earlier
        return total


class LocalLayer(DecoderLayer):
    """A layer of a Llama that mixes neighbouring rows of a block before and after each sublayer (DFlash2).

    Args:
        count, group: see `LocalMixing`.
    """

    def __init__(self, sizes: LayerSizes, count: int, group: int) -> None:
        super().__init__(sizes)
        self.attention_conv = LocalMixing(sizes.width, count, group)
        self.mlp_conv = LocalMixing(sizes.width, count, group)

    def forward(self, x: Blocks, angles: Any, layer: int, attend: Attend) -> Blocks:
        """Return the rows after the layer."""
        normed = self.input_layernorm(x)
        before, after = self.attention_conv.weights(normed).unbind(-3)
        added = self.self_attn(self.attention_conv.mixed(normed, before), angles, layer, attend)
        x = x + self.attention_conv.mixed(added, after)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.weights(normed).unbind(-3)
        added = self.mlp(self.mlp_conv.mixed(normed, before))
        return x + self.mlp_conv.mixed(added, after)


class PairLayer(DecoderLayer):
    """The first layer of an EAGLE-3 head: attention reads the concatenated embedding and feature of a row.

    Args:
        sizes: `reads` is the size of an embedding plus the width.
        norms_residual: whether attention is added to the normed feature instead of the feature itself.
    """

    def __init__(self, sizes: LayerSizes, norms_residual: bool) -> None:
        nn.Module.__init__(self)
        self.input_layernorm = Norm(sizes.reads - sizes.width, sizes.eps)
        self.hidden_norm = Norm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = Norm(sizes.width, sizes.eps)
        self.mlp = Gated(sizes.width, sizes.inner)
        self.norms_residual = norms_residual

    def forward(  # type: ignore[override]
        self, embedded: Float[Tensor, "*rows embed"], feature: Rows, angles: Any, attend: Attend
    ) -> Rows:
        """Return the rows after the layer."""
        normed = self.hidden_norm(feature)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        x = normed if self.norms_residual else feature
        return self.with_inner(x + self.self_attn(both, angles, 0, attend))


def attended(
    queries: Float[Tensor, "*batch rows heads size"],
    keys: Float[Tensor, "*batch slots kv_heads sizes"],
    values: Float[Tensor, "*batch slots kv_heads value_sizes"],
    seen: Bool[Tensor, "*batch rows slots"],
) -> Float[Tensor, "*batch rows heads value_size"]:
    """Return the mixed values of rows.

    Args:
        keys, values: one per slot and head; or several per slot, concatenated, each as long as a query.
        seen: which slots each row attends to, at least one.
    """
    each = keys.shape[-1] // queries.shape[-1]
    if each > 1:
        keys = _apart(keys, each)
        values = _apart(values, each)
        seen = seen.repeat_interleave(each, -1)
    q, k, v = (one if one.ndim == 4 else one[None] for one in (queries, keys, values))
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen[..., None, :, :],
        enable_gqa=queries.shape[-2] != keys.shape[-2],
    )
    return mixed.transpose(1, 2).reshape(*queries.shape[:-1], values.shape[-1])


def _apart(
    rows: Float[Tensor, "*batch slots kv_heads sizes"], each: int
) -> Float[Tensor, "*batch all_slots kv_heads size"]:
    """Return `each` concatenated keys or values of a slot as keys or values of `each` slots."""
    return rows.unflatten(-1, (each, -1)).movedim(-2, -3).flatten(-4, -3)
