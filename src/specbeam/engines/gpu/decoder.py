"""A forward of Llama-like models on a GPU: matrix products by cuBLAS, everything else in few kernels, rows without padding.

The time of a pass of a small draft model depends on the number of kernels that it starts, not on arithmetic: here these are
ten per layer, in transformers some forty. The results equal those of transformers up to rounding; `load` compares both on a
token tree.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from specbeam.engines.families import head_size
from specbeam.engines.gpu.kernels import attended, gated, normed, rotate_and_store
from specbeam.engines.gpu.staging import Inputs
from specbeam.engines.kv.store import SlotStore

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
    """The weights of one layer; matrices that read the same rows are joined."""

    before_attention: Tensor  # weight of the norm before attention
    qkv: Tensor
    bias: Tensor | None
    out: Tensor
    before_inner: Tensor  # weight of the norm before the gated inner layer
    gate_up: Tensor
    down: Tensor
    kind: int  # the kind of attention, an index into `GpuDecoder.kinds`, which selects the mask


class GpuDecoder:
    """The forward of one model on a GPU.

    It joins matrices that read the same rows, and turns the model's own matrices into views of the joined ones. So the model
    itself still works as before, and no weight is kept twice.
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
        self.layers = [_layer(layer, self.kinds.index(name)) for layer, name in zip(inner.layers, named, strict=True)]
        self.last_norm = inner.norm.weight
        self.head = model.lm_head.weight
        places = torch.arange(config.max_position_embeddings, device=self.embedding.device)
        cos, sin = inner.rotary_emb(torch.zeros(1, device=places.device), places[None])
        self.angles = torch.stack([cos[0, :, : self.size // 2], sin[0, :, : self.size // 2]]).contiguous()
        self.processors = _processors(self.embedding.device)

    def store(self, slots: int) -> SlotStore:
        """Return a new store for the keys and values of this model."""
        return SlotStore(len(self.layers), self.heads[1], self.size, self.embedding, slots)

    def forward(self, inputs: Inputs, shape: PassShape, store: SlotStore) -> Float[Tensor, "wanted vocab"]:
        """Run the model on the rows of a pass, store their keys and values, and return the float32 logits of wanted rows."""
        x = self.embedding.index_select(0, inputs.tokens[: shape.rows])
        for number, layer in enumerate(self.layers):
            qkv = functional.linear(normed(x, layer.before_attention, self.eps), layer.qkv, layer.bias)
            keys = store.keys[number]
            values = store.values[number]
            q = rotate_and_store(qkv, self.heads, self.angles, inputs, keys, values)
            mixed = attended(q, keys, values, inputs, layer.kind, shape.sessions, shape.most, self.processors)
            x.addmm_(mixed, layer.out.t())
            both = functional.linear(normed(x, layer.before_inner, self.eps), layer.gate_up)
            x.addmm_(gated(both), layer.down.t())
        x = x.index_select(0, inputs.wanted[: shape.wanted])
        return functional.linear(normed(x, self.last_norm, self.eps), self.head).float()


def _layer(layer: Any, kind: int) -> GpuLayer:
    """Return the weights of a layer of transformers, whose matrices become views of the joined ones."""
    attention = layer.self_attn
    mlp = layer.mlp
    three = [attention.q_proj, attention.k_proj, attention.v_proj]
    return GpuLayer(
        layer.input_layernorm.weight,
        _join_rows([linear.weight for linear in three]),
        None if three[0].bias is None else _join_rows([linear.bias for linear in three]),
        attention.o_proj.weight,
        layer.post_attention_layernorm.weight,
        _join_rows([mlp.gate_proj.weight, mlp.up_proj.weight]),
        mlp.down_proj.weight,
        kind,
    )


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
