"""A forward of Llama-like models on a GPU: matrix products of cuBLAS, everything else in few kernels, rows without padding.

A step of a small draft model is bound by how many kernels it starts, not by arithmetic: ten a layer here, some forty in
transformers. The arithmetic is that of transformers up to rounding; `load` compares both on a token tree.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from specbeam.engines.eligibility import head_size
from specbeam.engines.gpu.kernels import attended, gated, normed, turned
from specbeam.engines.gpu.staging import Inputs
from specbeam.engines.kv.store import SlotStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PassShape(NamedTuple):
    """What a captured pass is captured for."""

    rows: int
    sessions: int
    most: int  # rows of one session
    wanted: int  # rows whose logits are asked for


@dataclass(frozen=True, eq=False)
class GpuLayer:
    before_attention: Tensor  # of the norm
    qkv: Tensor
    bias: Tensor | None
    out: Tensor
    before_inner: Tensor
    gate_up: Tensor
    down: Tensor
    kind: int  # which mask counts


class GpuDecoder:
    """The forward of one model.

    Matrices that read the same rows are put together, and the model's own are views of that afterwards: it stays what it
    was, and no weight is kept twice.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        config = model.config
        inner = model.model
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.size = head_size(config)
        self.eps = float(config.rms_norm_eps)
        named = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.kinds = list(dict.fromkeys(named))
        self.embedding = inner.embed_tokens.weight
        self.layers = [_layer(one, self.kinds.index(name)) for one, name in zip(inner.layers, named, strict=True)]
        self.last_norm = inner.norm.weight
        self.head = model.lm_head.weight
        where = torch.arange(config.max_position_embeddings, device=self.embedding.device)
        cos, sin = inner.rotary_emb(torch.zeros(1, device=where.device), where[None])
        self.angles = torch.stack([cos[0, :, : self.size // 2], sin[0, :, : self.size // 2]]).contiguous()
        self.processors = _processors(self.embedding.device)

    def store(self, slots: int) -> SlotStore:
        return SlotStore(len(self.layers), self.heads[1], self.size, self.embedding, slots)

    def forward(self, inputs: Inputs, shape: PassShape, store: SlotStore) -> Float[Tensor, "wanted vocab"]:
        """float32 logits of the wanted rows; keys and values of all rows are stored."""
        x = self.embedding.index_select(0, inputs.tokens[: shape.rows])
        for number, layer in enumerate(self.layers):
            qkv = functional.linear(normed(x, layer.before_attention, self.eps), layer.qkv, layer.bias)
            keys = store.keys[number]
            values = store.values[number]
            q = turned(qkv, self.heads, self.angles, inputs, keys, values)
            mixed = attended(q, keys, values, inputs, layer.kind, shape.sessions, shape.most, self.processors)
            x.addmm_(mixed, layer.out.t())
            both = functional.linear(normed(x, layer.before_inner, self.eps), layer.gate_up)
            x.addmm_(gated(both), layer.down.t())
        x = x.index_select(0, inputs.wanted[: shape.wanted])
        return functional.linear(normed(x, self.last_norm, self.eps), self.head).float()


def _layer(layer: Any, kind: int) -> GpuLayer:
    attention = layer.self_attn
    mlp = layer.mlp
    three = [attention.q_proj, attention.k_proj, attention.v_proj]
    return GpuLayer(
        layer.input_layernorm.weight,
        _together([one.weight for one in three]),
        None if three[0].bias is None else _together([one.bias for one in three]),
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        _together([mlp.gate_proj.weight, mlp.up_proj.weight]),
        mlp.down_proj.weight,
        kind,
    )


def _together(weights: list[Tensor]) -> Tensor:
    """Their rows, one matrix after the other, of which they are views afterwards; they may be so already."""
    first = weights[0].detach()
    rows = sum(map(len, weights))
    if all(_next_to(one, other) for one, other in pairwise(weights)):
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    all_rows = torch.cat([one.detach() for one in weights])
    start = 0
    for one in weights:
        one.data = all_rows[start : start + len(one)]
        start += len(one)
    return all_rows


def _next_to(one: Tensor, other: Tensor) -> bool:
    """Whether the rows of the other begin where those of the one end."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return (
        same
        and one.stride() == other.stride()
        and other.data_ptr() == one.data_ptr() + one.numel() * one.element_size()
    )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
