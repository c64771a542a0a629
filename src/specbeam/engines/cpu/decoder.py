"""The forward of Llama-like models as compiled loops over panels: rows of all sessions without padding, each against the
cache of its own session. Twin of the model's own forward, up to rounding; `load` compares both on a token tree.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn

from specbeam import kernels
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.cache_steps import CacheArrays
from specbeam.engines.cpu.layers import all_layers, normalise, score_rows
from specbeam.engines.cpu.panels import Kind, fits_bfloat16, in_lines, in_panels
from specbeam.engines.cpu.sums import STEP, WIDTH
from specbeam.engines.eligibility import head_size, is_plain_llama
from specbeam.engines.kv.store import PanelStore
from specbeam.kernels.compiling import Array, address_of
from specbeam.kernels.threads import allowed_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TILED_FROM = 30_000_000  # parameters: of fewer, that caches hold, vectors multiply few rows sooner than tiles do


class Weights(NamedTuple):
    """Of all layers, one behind the other; matrices in panels, those that read the same rows side by side in one."""

    before_attention: Array  # float32[layers, hidden]: weights of norms
    before_inner: Array
    bias: Array  # float32[layers, columns] of qkv; no columns where there is none
    qkv: Array  # float32, uint32, uint16 or int32[layers, panels, words], see `in_panels`
    out: Array
    gate_up: Array
    down: Array
    inner: int


class Model(NamedTuple):
    """What loops read of a model."""

    embedding: Array  # float32[vocab, hidden]
    weights: Weights
    angles: Array  # float32[2, positions, size / 2]
    eps: float
    heads: int
    kinds: Array  # int64[layers]: which kind of attention a layer has
    last_norm: Array
    head: Array  # in panels
    vocab: int


@dataclass(frozen=True, eq=False)
class Rows:
    """What a pass reads: a row per token, sessions one after the other."""

    tokens: Int64[np.ndarray, " n"]
    positions: Int64[np.ndarray, " n"]
    slots: Int64[np.ndarray, " n"]
    sessions: Int64[np.ndarray, "sessions 3"]  # cache, first row, last row + 1
    seen: dict[str, Bool[np.ndarray, "n slots"]]  # by kind of layer


_NO_VECTORS: Mapping[int, Float32[np.ndarray, " hidden"]] = {}


class CompiledDecoder:
    """The forward of one model; see `compiled_decoder`."""

    def __init__(self, model: "PreTrainedModel", int8: bool = False) -> None:
        config = model.config
        inner = model.model
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
        tiled = model.num_parameters() >= TILED_FROM and tiles.available()
        kind: Kind = "int8" if int8 else "float32" if not exact else "tiles" if tiled else "bfloat16"
        self.weights = _weights(list(inner.layers), kind)
        self.last_norm = _numbers(inner.norm.weight)
        self.head = in_panels(head, kind)
        named = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.names = list(dict.fromkeys(named))
        self.kinds = np.array([self.names.index(name) for name in named])
        self.model = Model(
            self.embedding,
            self.weights,
            self.angles,
            self.eps,
            self.heads,
            self.kinds,
            self.last_norm,
            self.head,
            self.vocab,
        )

    def store(self) -> PanelStore:
        return PanelStore(len(self.kinds), self.kv_heads, self.size, WIDTH)

    def forward(
        self,
        rows: Rows,
        store: PanelStore,
        vectors: Mapping[int, Float32[np.ndarray, " hidden"]] = _NO_VECTORS,
        layers: slice = slice(None),
        behind: Float32[np.ndarray, "n hidden"] | None = None,
    ) -> Float32[np.ndarray, "n hidden"]:
        """What `logits` are made from, for all rows; keys and values of all are stored.

        Args:
            vectors: rows that are given by embedding, and not by their token, which is negative.
            layers: which of them are run; keys and values are those of these layers.
            behind: the rows behind the layer before these; None: what the tokens' embedding gives.

        Raises `IndexError` for tokens and positions that the model does not have: loops would read beyond its arrays.
        """
        if rows.positions.max() >= self.angles.shape[1]:
            raise IndexError(f"position {rows.positions.max()} is beyond the model's {self.angles.shape[1]}")
        x = self._embedded(rows.tokens, vectors) if behind is None else behind.copy()
        seen = np.array([rows.seen[name] for name in self.names])
        with _on_threads(self.threads) as threads:
            all_layers(
                x, _of_layers(self.weights, layers), self.angles, self.eps, self.heads, rows.positions, rows.sessions,
                rows.slots, seen, self.kinds[layers], store.keys_by_panel[layers], store.values_by_slot[layers], threads,
            )  # fmt: skip
        return x

    def _embedded(
        self, tokens: Int64[np.ndarray, " n"], vectors: Mapping[int, Float32[np.ndarray, " hidden"]]
    ) -> Float32[np.ndarray, "n hidden"]:
        """Return what the first layer reads."""
        strange = tokens < 0
        if strange.any() and {*np.flatnonzero(strange).tolist()} != {*vectors}:
            raise IndexError("a token is beyond those of the model")
        x = self.embedding.take(np.maximum(tokens, 0), 0)
        for row, vector in vectors.items():
            x[row] = vector
        return x

    @contextmanager
    def alone(self, cache: CpuCache, store: PanelStore, windows: Int64[np.ndarray, " kinds"]) -> Iterator[CacheArrays]:
        """A session for loops of its own; there must be room in its cache and in the store."""
        with _on_threads(self.threads) as threads:
            yield CacheArrays(
                cache.trie.arrays, cache.outputs, self.model, windows, store.keys_by_panel, store.values_by_slot, cache.row,
                threads, *self.addresses,
            )  # fmt: skip

    def logits(self, x: Float32[np.ndarray, "m hidden"]) -> Float32[np.ndarray, "m vocab"]:
        logits = np.empty((len(x), len(self.head) * WIDTH), dtype=np.float32)
        if len(x):
            with _on_threads(self.threads) as threads:
                score_rows(x, self.last_norm, self.eps, self.head, logits, threads)
        return np.ascontiguousarray(logits[:, : self.vocab])

    def normed(self, x: Float32[np.ndarray, "m hidden"]) -> Float32[np.ndarray, "m hidden"]:
        """Return what the head reads of rows behind the last layer."""
        out = np.empty_like(x)
        normalise(x, self.last_norm, self.eps, out)
        return out

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Of `all_layers` and `scored`, as this model calls them."""
        some = np.zeros((1, 1), dtype=np.float32)
        numbers = np.zeros(1, dtype=np.int64)
        store = self.store()
        layers = address_of(
            all_layers, some, self.weights, self.angles, self.eps, self.heads, numbers, numbers[None], numbers,
            np.zeros((1, 1, 1), dtype=bool), self.kinds, store.keys_by_panel, store.values_by_slot, 1,
        )  # fmt: skip
        return layers, address_of(score_rows, some, self.last_norm, self.eps, self.head, some, 1)


def _of_layers(weights: Weights, layers: slice) -> Weights:
    """Return the weights of some layers; a view."""
    if layers == slice(None):
        return weights
    some = {name: getattr(weights, name)[layers] for name in Weights._fields if name != "inner"}
    return weights._replace(**some)


_ONE_AT_A_TIME = threading.RLock()  # numba's threads serve one caller, who may run two models


def _started() -> int:
    """Most threads; numba and torch may share a pool, and starting it sets torch's number."""
    before = torch.get_num_threads()
    most = kernels.start_threads()
    torch.set_num_threads(before)
    return most


@contextmanager
def _on_threads(most: int) -> Iterator[int]:
    """As many as are allowed; how many that is."""
    threads = min(allowed_threads(), most)
    if threads == 1:
        yield 1
        return
    with _ONE_AT_A_TIME:
        kernels.use_threads(threads)
        yield threads


def _weights(layers: list[Any], kind: Kind) -> Weights:
    def panels(linears: Callable[[Any], list[nn.Linear]]) -> np.ndarray:
        each = [in_panels(np.concatenate([_numbers(one.weight) for one in linears(layer)]), kind) for layer in layers]
        return in_lines(np.stack(each))

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
def compiled_decoder(model: "PreTrainedModel", int8: bool = False) -> CompiledDecoder | None:
    """The compiled forward of a model; None where numba is missing or it would not be the same model.

    `int8`: with its matrices rounded to 8 bits, the embedding apart: another model, read in a quarter of the time.
    """
    sizes = model.config.hidden_size, getattr(model.config, "intermediate_size", 1), head_size(model.config)
    if not kernels.AVAILABLE or not is_plain_llama(model) or any(size % STEP for size in sizes):
        return None
    return CompiledDecoder(model, int8)
