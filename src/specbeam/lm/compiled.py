"""The forward of Llama-like models as compiled loops over panels: rows of all sessions without padding, each against the
lane of its own session. Twin of the model's own forward, up to rounding; `load` compares both on a token tree.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor, nn

from specbeam import kernels
from specbeam.kernels import compiled, compiled_in_any_order, exp_near_0
from specbeam.lm.kv_store import PanelStore
from specbeam.lm.lean import head_size, is_plain_llama
from specbeam.lm.panels import MOST, STEP, WIDTH, fits_bfloat16, in_panels, multiply, parts, stood_up, sums

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Array = Any  # numba finds the types by itself
_F0, _F1, _LOG2E = np.float32(0), np.float32(1), np.float32(1.4426950408889634)
_LN2_HEAD = np.float32(0.693359375)  # of few bits: its multiples are exact
_LN2_REST = np.float32(-2.12194440e-4)
_HALF, _LEAST, _MOST, _UNSEEN = (np.float32(n) for n in (0.5, -87, 87, -1e30))


@compiled_in_any_order
def exponential(x: Array, powers: Array) -> None:
    """x becomes exp(x), float32, to 2e-7 of it, between -87 and 87; outside, that of these.

    `powers`: scratch, int32 of the same length.
    """
    for place in range(len(x)):
        y = _LEAST if x[place] < _LEAST else x[place]
        y = _MOST if y > _MOST else y
        whole = np.floor(y * _LOG2E + _HALF)
        f = (y - whole * _LN2_HEAD) - whole * _LN2_REST
        x[place] = exp_near_0(f)
        powers[place] = (np.int32(whole) + 127) << 23
    scale = powers.view(np.float32)
    for place in range(len(x)):
        x[place] *= scale[place]


@compiled_in_any_order
def normed(x: Array, weight: Array, eps: float, out: Array) -> None:
    """RMSNorm of rows."""
    for row in range(len(x)):
        square = _F0
        for place in range(x.shape[1]):
            square += x[row, place] * x[row, place]
        factor = np.float32(1 / np.sqrt(square / x.shape[1] + eps))
        for place in range(x.shape[1]):
            out[row, place] = x[row, place] * factor * weight[place]


@compiled
def turned(x: Array, first: int, heads: int, size: int, angles: Array, positions: Array) -> None:
    """Rotary positions, in place, of `heads` heads from column `first` on. angles: float32[2, positions, size / 2]."""
    half = size // 2
    for row in range(len(x)):
        cos, sin = angles[0, positions[row]], angles[1, positions[row]]
        for head in range(heads):
            start = first + head * size
            one, other = x[row, start : start + half], x[row, start + half : start + size]
            for place in range(half):
                a, b = one[place], other[place]
                one[place] = a * cos[place] - b * sin[place]
                other[place] = b * cos[place] + a * sin[place]


@compiled_in_any_order
def softmax(scores: Array, seen: Array, powers: Array) -> None:
    """In place, over what is seen."""
    top = _UNSEEN
    for slot in range(len(scores)):
        scores[slot] = scores[slot] if seen[slot] else _UNSEEN
        top = scores[slot] if scores[slot] > top else top
    for slot in range(len(scores)):
        scores[slot] = scores[slot] - top
    exponential(scores, powers)
    total = _F0
    for slot in range(len(scores)):
        scores[slot] = scores[slot] if seen[slot] else _F0
        total += scores[slot]
    share = _F1 / total
    for slot in range(len(scores)):
        scores[slot] *= share


@compiled
def attend(
    q: Array, keys: Array, values: Array, rows: Array, seen: Array, reach: Array, group: int, scale: float, out: Array
) -> None:
    """Attention of all rows to their lanes.

    Args:
        q: float32[rows, ...]; head h stands at columns h * size.
        keys: float32[lanes, kv heads, size, slots]; values: float32[lanes, kv heads, slots, width], both contiguous.
        rows: int64[sessions, 3]: lane, first row, last row + 1.
        seen: bool[rows, slots]; reach: int64[rows], one past the last slot seen.
        group: query heads per kv head.
        out: float32[rows, heads * size]
    """
    kv_heads, size, stride = keys.shape[1], keys.shape[2], keys.shape[3]
    height, width = values.shape[2], values.shape[3]
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    most = -(-(reach.max()) // WIDTH) * WIDTH
    scores = np.empty((MOST, most), dtype=np.float32)
    flat_scores = scores.reshape(-1)
    tall = np.empty(MOST * max(size, most), dtype=np.float32)
    mixed = np.empty((MOST, width), dtype=np.float32)
    powers = np.empty(most, dtype=np.int32)
    for session in range(len(rows)):
        lane, first, last = rows[session]
        queries = (last - first) * group
        for kv in range(kv_heads):
            head_at = lane * kv_heads + kv
            for part in range(parts(queries)):
                start = part * queries // parts(queries)
                count = (part + 1) * queries // parts(queries) - start
                extent = 0
                for one in range(count):
                    row, head = first + (start + one) // group, kv * group + (start + one) % group
                    extent = max(extent, reach[row])
                    for place in range(size):
                        tall[place * count + one] = q[row, head * size + place] * scale
                extent = -(-extent // WIDTH) * WIDTH
                for panel in range(extent // WIDTH):
                    sums(
                        count, flat_keys, head_at * size * stride + panel * WIDTH, stride, tall, 0, flat_scores,
                        panel * WIDTH, most, size,
                    )  # fmt: skip
                for one in range(count):
                    softmax(scores[one, :extent], seen[first + (start + one) // group], powers[:extent])
                stood_up(scores[:, :extent], 0, count, tall)
                for panel in range(width // WIDTH):
                    sums(
                        count, flat_values, head_at * height * width + panel * WIDTH, width, tall, 0, mixed.reshape(-1),
                        panel * WIDTH, width, extent,
                    )  # fmt: skip
                for one in range(count):
                    row, head = first + (start + one) // group, kv * group + (start + one) % group
                    out[row, head * size : (head + 1) * size] = mixed[one, :size]


@compiled_in_any_order
def gated(both: Array, inner: int, out: Array) -> None:
    """SiLU of the first `inner` columns times the next ones."""
    powers = np.empty(inner, dtype=np.int32)
    falling = np.empty(inner, dtype=np.float32)
    for row in range(len(both)):
        for place in range(inner):
            falling[place] = -both[row, place]
        exponential(falling, powers)
        for place in range(inner):
            out[row, place] = both[row, place] / (_F1 + falling[place]) * both[row, inner + place]


@compiled
def kept(qkv: Array, heads: int, rows: Array, slots: Array, keys: Array, values: Array) -> None:
    """Store keys and values of all rows at their slots."""
    kv_heads, size = keys.shape[1], keys.shape[2]
    for session in range(len(rows)):
        lane, first, last = rows[session]
        for row in range(first, last):
            for kv in range(kv_heads):
                k, v = (heads + kv) * size, (heads + kv_heads + kv) * size
                keys[lane, kv, :, slots[row]] = qkv[row, k : k + size]
                values[lane, kv, slots[row], :size] = qkv[row, v : v + size]


@compiled
def all_layers(
    x: Array, weights: Any, angles: Array, eps: float, heads: int, positions: Array, rows: Array, slots: Array, seen: Array,
    reach: Array, kinds: Array, keys: Array, values: Array, threads: int,
) -> None:  # fmt: skip
    """The layers one after the other, on x: float32[rows, hidden], in place.

    Args:
        weights: `Weights`.
        seen: bool[kinds, rows, slots]; reach: int64[kinds, rows]; kinds: int64[layers], which of them a layer goes by.
        keys, values: of all layers; see `attend`.
    """
    count, hidden = x.shape
    kv_heads, size = keys.shape[2], keys.shape[3]
    h = np.empty((count, hidden), dtype=np.float32)
    qkv = np.empty((count, weights.qkv.shape[1] * WIDTH), dtype=np.float32)
    mixed = np.empty((count, heads * size), dtype=np.float32)
    out = np.empty((count, weights.out.shape[1] * WIDTH), dtype=np.float32)
    both = np.empty((count, weights.gate_up.shape[1] * WIDTH), dtype=np.float32)
    wide = np.empty((count, weights.inner), dtype=np.float32)
    scale = np.float32(1 / np.sqrt(size))
    for layer in range(len(kinds)):
        normed(x, weights.before_attention[layer], eps, h)
        multiply(h, weights.qkv[layer], qkv, threads)
        for place in range(weights.bias.shape[1]):
            for row in range(count):
                qkv[row, place] += weights.bias[layer, place]
        turned(qkv, 0, heads + kv_heads, size, angles, positions)
        kept(qkv, heads, rows, slots, keys[layer], values[layer])
        kind = kinds[layer]
        attend(qkv, keys[layer], values[layer], rows, seen[kind], reach[kind], heads // kv_heads, scale, mixed)
        multiply(mixed, weights.out[layer], out, threads)
        _add(x, out)
        normed(x, weights.before_inner[layer], eps, h)
        multiply(h, weights.gate_up[layer], both, threads)
        gated(both, weights.inner, wide)
        multiply(wide, weights.down[layer], out, threads)
        _add(x, out)


@compiled
def _add(x: Array, more: Array) -> None:
    """x += more, of which there may be more columns."""
    for row in range(len(x)):
        here, there = x[row], more[row]
        for place in range(len(here)):
            here[place] += there[place]


class Weights(NamedTuple):
    """Of all layers, one behind the other; matrices in panels, those that read the same rows side by side in one."""

    before_attention: Array  # float32[layers, hidden]: weights of norms
    before_inner: Array
    bias: Array  # float32[layers, columns] of qkv; no columns where there is none
    qkv: Array  # float32 or uint32[layers, panels, words]
    out: Array
    gate_up: Array
    down: Array
    inner: int


@dataclass(frozen=True, eq=False)
class Rows:
    """What a pass reads: a row per token, sessions one after the other."""

    tokens: Int64[np.ndarray, " n"]
    positions: Int64[np.ndarray, " n"]
    slots: Int64[np.ndarray, " n"]
    sessions: Int64[np.ndarray, "sessions 3"]  # lane, first row, last row + 1
    seen: dict[str, Bool[np.ndarray, "n slots"]]  # by kind of layer


class CompiledDecoder:
    """The forward of one model; see `compiled_decoder`."""

    def __init__(self, model: "PreTrainedModel") -> None:
        config, inner = model.config, model.model
        self.threads = _started()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.size = head_size(config)
        self.eps = float(config.rms_norm_eps)
        self.vocab = model.lm_head.weight.shape[0]
        self.embedding = _numbers(inner.embed_tokens.weight)
        self.angles = _angles(inner.rotary_emb, config.max_position_embeddings, self.size)
        head = _numbers(model.lm_head.weight)
        exact = fits_bfloat16(head) and all(
            fits_bfloat16(_numbers(one.weight)) for one in inner.layers.modules() if isinstance(one, nn.Linear)
        )
        self.weights = _weights(list(inner.layers), exact)
        self.last_norm, self.head = _numbers(inner.norm.weight), in_panels(head, exact)
        named = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.names = list(dict.fromkeys(named))
        self.kinds = np.array([self.names.index(name) for name in named])

    def store(self) -> PanelStore:
        return PanelStore(len(self.kinds), self.kv_heads, self.size, WIDTH)

    def forward(self, rows: Rows, store: PanelStore, wanted: Int64[np.ndarray, " m"]) -> Float[Tensor, "m vocab"]:
        """Logits of the `wanted` rows; keys and values of all are stored.

        Raises `IndexError` for tokens and positions that the model does not have: loops would read beyond its arrays.
        """
        if rows.positions.max() >= self.angles.shape[1]:
            raise IndexError(f"position {rows.positions.max()} is beyond the model's {self.angles.shape[1]}")
        x = self.embedding[rows.tokens]
        seen = np.array([rows.seen[name] for name in self.names])
        reach = seen.shape[2] - seen[:, :, ::-1].argmax(2)
        with _on_threads(self.threads) as threads:
            all_layers(
                x, self.weights, self.angles, self.eps, self.heads, rows.positions, rows.sessions, rows.slots, seen, reach,
                self.kinds, store.keys_by_slot, store.values_by_slot, threads,
            )  # fmt: skip
            return torch.from_numpy(self._scored(x[wanted], threads))

    def _scored(self, x: Float32[np.ndarray, "m hidden"], threads: int) -> Float32[np.ndarray, "m vocab"]:
        h, logits = np.empty_like(x), np.empty((len(x), len(self.head) * WIDTH), dtype=np.float32)
        normed(x, self.last_norm, self.eps, h)
        multiply(h, self.head, logits, threads)
        return logits[:, : self.vocab]


_ONE_AT_A_TIME = threading.Lock()  # numba's threads serve one caller


def _started() -> int:
    """Most threads; numba and torch may share a pool, and starting it sets torch's number."""
    before = torch.get_num_threads()
    most = kernels.start_threads()
    torch.set_num_threads(before)
    return most


@contextmanager
def _on_threads(most: int) -> Iterator[int]:
    """As many as torch takes; how many that is."""
    threads = min(torch.get_num_threads(), most)
    if threads == 1:
        yield 1
        return
    with _ONE_AT_A_TIME:
        kernels.use_threads(threads)
        yield threads


def _weights(layers: list[Any], exact: bool) -> Weights:
    def panels(linears: Callable[[Any], list[nn.Linear]]) -> np.ndarray:
        return np.stack(
            [in_panels(np.concatenate([_numbers(one.weight) for one in linears(layer)]), exact) for layer in layers]
        )

    def qkv(layer: Any) -> list[nn.Linear]:
        return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]

    biases = [[_numbers(one.bias) for one in qkv(layer) if one.bias is not None] for layer in layers]
    return Weights(
        before_attention=np.stack([_numbers(layer.input_layernorm.weight) for layer in layers]),
        before_inner=np.stack([_numbers(layer.post_attention_layernorm.weight) for layer in layers]),
        bias=np.stack([np.concatenate([np.zeros(0, dtype=np.float32), *one]) for one in biases]),
        qkv=panels(qkv),
        out=panels(lambda layer: [layer.self_attn.o_proj]),
        gate_up=panels(lambda layer: [layer.mlp.gate_proj, layer.mlp.up_proj]),
        down=panels(lambda layer: [layer.mlp.down_proj]),
        inner=layers[0].mlp.gate_proj.weight.shape[0],
    )


def _numbers(weight: Tensor) -> Float32[np.ndarray, "..."]:
    return weight.detach().contiguous().numpy()


def _angles(rotary: Any, positions: int, size: int) -> Float32[np.ndarray, "2 positions half"]:
    """Cosines and sines of each pair at each position."""
    cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None])
    return np.ascontiguousarray(torch.stack([cos[0, :, : size // 2], sin[0, :, : size // 2]]).numpy())


@torch.inference_mode()
def compiled_decoder(model: "PreTrainedModel") -> CompiledDecoder | None:
    """The compiled forward of a model; None where numba is missing or it would not be the same model."""
    sizes = model.config.hidden_size, getattr(model.config, "intermediate_size", 1), head_size(model.config)
    if not kernels.AVAILABLE or not is_plain_llama(model) or any(size % STEP for size in sizes):
        return None
    return CompiledDecoder(model)
