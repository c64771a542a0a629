"""A forward of Llama-like models on a GPU: matrix products of cuBLAS, everything else in few kernels, rows without padding.

A step of a small draft model is bound by how many kernels it starts, not by arithmetic: ten a layer here, some forty in
transformers. The arithmetic is that of transformers up to rounding; `load` compares both on a token tree.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from specbeam.lm.gpu_staging import Inputs
from specbeam.lm.gpu_steps import attended, gated, normed, turned
from specbeam.lm.kv_store import KVStore
from specbeam.lm.lean import head_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PassShape(NamedTuple):
    """What a captured pass is captured for."""

    rows: int
    sessions: int
    most: int  # rows of one session
    wanted: int  # rows whose logits are asked for


class SlotStore(KVStore):
    """Keys and values of all layers in two buffers, [layers, lanes, heads, slots, size]."""

    def __init__(self, layers: int, heads: int, size: int, like: Tensor, slots: int) -> None:
        super().__init__(layers)
        self.slots = slots
        # Zeros, not empty: a masked slot still enters the product, and a stray NaN there would spread.
        self.keys, self.values = (like.new_zeros(layers, self.lanes, heads, slots, size) for _ in range(2))

    def grow(self, lanes: int, slots: int) -> None:
        self.keys, self.values = (_larger(one, lanes, slots) for one in (self.keys, self.values))

    @torch.inference_mode()
    def move_lane(self, source: int, goal: int) -> None:
        for one in (self.keys, self.values):
            one[:, goal] = one[:, source]

    @torch.inference_mode()
    def move_slots(self, lane: int, source: Int64[Tensor, " n"], goal: Int64[Tensor, " n"]) -> None:
        for one in (self.keys, self.values):
            one[:, lane, :, goal] = one[:, lane, :, source]


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
        config, inner = model.config, model.model
        self.heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.eps = head_size(config), float(config.rms_norm_eps)
        named = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.kinds = list(dict.fromkeys(named))
        self.embedding = inner.embed_tokens.weight
        self.layers = [_layer(one, self.kinds.index(name)) for one, name in zip(inner.layers, named, strict=True)]
        self.last_norm, self.head = inner.norm.weight, model.lm_head.weight
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
            keys, values = store.keys[number], store.values[number]
            q = turned(qkv, self.heads, self.angles, inputs, keys, values)
            mixed = attended(q, keys, values, inputs, layer.kind, shape.sessions, shape.most, self.processors)
            x.addmm_(mixed, layer.out.t())
            both = functional.linear(normed(x, layer.before_inner, self.eps), layer.gate_up)
            x.addmm_(gated(both), layer.down.t())
        x = x.index_select(0, inputs.wanted[: shape.wanted])
        return functional.linear(normed(x, self.last_norm, self.eps), self.head).float()


def _layer(layer: Any, kind: int) -> GpuLayer:
    attention, mlp = layer.self_attn, layer.mlp
    three = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [one.bias for one in three if one.bias is not None]
    return GpuLayer(
        layer.input_layernorm.weight,
        _together(three),
        torch.cat(biases) if biases else None,
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        _together([mlp.gate_proj, mlp.up_proj]),
        mlp.down_proj.weight,
        kind,
    )


def _together(linears: list[nn.Linear]) -> Tensor:
    """Their rows, one matrix after the other."""
    all_rows, start = torch.cat([one.weight.detach() for one in linears]), 0
    for one in linears:
        rows = len(one.weight)
        one.weight.data = all_rows[start : start + rows]
        start += rows
    return all_rows


def _larger(buffer: Float[Tensor, "layers lanes heads slots size"], lanes: int, slots: int) -> Tensor:
    layers, before, heads, known, size = buffer.shape
    grown = buffer.new_zeros(layers, lanes, heads, slots, size)
    grown[:, :before, :, :known] = buffer
    return grown


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
