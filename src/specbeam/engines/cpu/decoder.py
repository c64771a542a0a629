"""The compiled forward of Llama-like models on a CPU, which reads the weights in panels.

The rows of all sessions are in one pass without padding; each row attends to its own session's cache. The results equal
those of the model's own forward up to rounding; `load` compares both on a token tree.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn

from specbeam import kernels
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.cache_steps import ALL, CacheArrays
from specbeam.engines.cpu.early import ExitLayer, ExitWeights
from specbeam.engines.cpu.layers import NO_ATTENTION, NO_INNER, all_layers, normalise, score_rows
from specbeam.engines.cpu.panels import Kind, fits_bfloat16, in_lines, in_panels, steps_in
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.cpu.weights import Weights, layers_of_weights
from specbeam.engines.eligibility import head_size, is_plain_llama
from specbeam.engines.kv.store import PanelStore
from specbeam.kernels.compiling import Array, address_of
from specbeam.kernels.threads import allowed_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Parameters from which on tiles are used. A smaller model is in the processor's caches, where vector instructions multiply a
# few rows faster than tiles do.
TILED_FROM = 30_000_000

Rounding = Literal["int8", "int4"]


class Model(NamedTuple):
    """The weights and settings of a model, as compiled layers read them."""

    embedding: Array  # float32[vocab, hidden]
    weights: Weights
    angles: Array  # float32[2, positions, size / 2]
    eps: float
    heads: int
    kinds: Array  # int64[layers]: the kind of attention of each layer, an index into `CompiledDecoder.names`
    last_norm: Array  # float32[hidden]
    head: Array  # in panels
    vocab: int


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a pass: one for each token, the sessions one after the other."""

    tokens: Int64[np.ndarray, " n"]
    positions: Int64[np.ndarray, " n"]
    slots: Int64[np.ndarray, " n"]
    sessions: Int64[np.ndarray, "sessions 3"]  # row of the store, first row, last row + 1
    seen: dict[str, Bool[np.ndarray, "n slots"]]  # which slots each row may look at, by kind of layer

    def only(self, which: Bool[np.ndarray, " n"]) -> "Rows":
        """Return some of the rows."""
        before = np.concatenate([[0], np.cumsum(which)])  # number of them before each row
        sessions = np.column_stack([self.sessions[:, 0], before[self.sessions[:, 1:]]])
        seen = {kind: shown[which] for kind, shown in self.seen.items()}
        return Rows(self.tokens[which], self.positions[which], self.slots[which], sessions, seen)


_NO_VECTORS: Mapping[int, Float32[np.ndarray, " hidden"]] = {}


class CompiledDecoder:
    """The compiled forward of one model. `compiled_decoder` makes it, and checks that it fits the model.

    Args:
        rounding: what to round the matrices to; None: they stay as they are.
    """

    takes_steps = True  # compiled steps can run it

    def __init__(self, model: "PreTrainedModel", rounding: Rounding | None = None) -> None:
        config = model.config
        inner = model.model
        self.threads = start_threads_beside_torch()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.size = head_size(config)
        self.eps = float(config.rms_norm_eps)
        self.vocab = model.lm_head.weight.shape[0]
        self.embedding = numbers_of(inner.embed_tokens.weight)
        self.angles = angles_of(inner.rotary_emb, config.max_position_embeddings, self.size)
        head = numbers_of(model.lm_head.weight)
        exact = fits_bfloat16(head) and all(
            fits_bfloat16(numbers_of(module.weight))
            for module in inner.layers.modules()
            if isinstance(module, nn.Linear)
        )
        tiled = model.num_parameters() >= TILED_FROM and tiles.available()
        kind: Kind
        if rounding == "int4":
            kind = "int4"
        elif rounding == "int8":
            kind = "int8 tiles" if tiled else "int8"
        elif exact:
            kind = "tiles" if tiled else "bfloat16"
        else:
            kind = "float32"
        self.kind = kind
        self.weights = weights_of(list(inner.layers), kind)
        self.last_norm = numbers_of(inner.norm.weight)
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
        """Return a new store for the keys and values of this model."""
        return PanelStore(len(self.kinds), self.kv_heads, self.size, WIDTH)

    def skipping(self, attention: Sequence[int], inner: Sequence[int]) -> "CompiledDecoder":
        """Return this forward without the attention and without the gated inner layer of some layers.

        It shares the weights. What is left out changes no hidden state, and stores no keys and values.
        """
        kinds = self.kinds.copy()
        kinds[list(attention)] |= NO_ATTENTION
        kinds[list(inner)] |= NO_INNER
        _ = self.addresses  # found once, for all that is copied
        fewer = copy.copy(self)
        fewer.kinds = kinds
        fewer.model = self.model._replace(kinds=kinds)
        return fewer

    def forward(
        self,
        rows: Rows,
        store: PanelStore,
        vectors: Mapping[int, Float32[np.ndarray, " hidden"]] = _NO_VECTORS,
        layers: slice = slice(None),
        states: Float32[np.ndarray, "n hidden"] | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Float32[np.ndarray, "n hidden"], Float32[np.ndarray, "n tapped"]]:
        """Run layers on all rows, and store their keys and values.

        Returns the output of the last of these layers, and what enters the layers `taps`, side by side. `logits` takes the
        output of the model's last layer.

        Args:
            vectors: embeddings by row, of the rows whose token is negative.
            layers: which layers to run; only their keys and values are stored.
            states: the output of the layer before these for all rows; None: the embeddings of the tokens.
            taps: numbers of layers, counted from the first that is run; see `Needs.taps`.

        Raises `IndexError` for tokens and positions that the model does not have: the layers would read beyond its arrays.
        """
        if rows.positions.max() >= self.angles.shape[1]:
            raise IndexError(f"position {rows.positions.max()} is beyond the model's {self.angles.shape[1]}")
        x = self._embedded(rows.tokens, vectors) if states is None else states.copy()
        first, stop, _ = layers.indices(len(self.kinds))
        weights = self.weights if stop - first == len(self.kinds) else layers_of_weights(self.weights, first, stop)
        tapped = self._run(x, rows, weights, self.kinds[layers], store, layers, taps)
        return x, tapped

    def forward_exit(
        self, rows: Rows, store: PanelStore, layer: ExitLayer, states: Float32[np.ndarray, "n hidden"]
    ) -> Float32[np.ndarray, "n hidden"]:
        """Run an exit layer on what left the first layers for all rows, store its keys and values, and return its output."""
        x = states.copy()
        self._run(x, rows, layer.weights, layer.kinds, store, slice(layer.place, layer.place + 1))
        return x

    def _run(
        self,
        x: Float32[np.ndarray, "n hidden"],
        rows: Rows,
        weights: Weights,
        kinds: Int64[np.ndarray, " layers"],
        store: PanelStore,
        places: slice,
        taps: Sequence[int] = (),
    ) -> Float32[np.ndarray, "n tapped"]:
        """Run layers of these weights and kinds on x, in place; their keys and values are in these layers of the store.

        Returns what enters the layers `taps`, see `forward`.
        """
        seen = np.array([rows.seen[name] for name in self.names])
        tapped = np.empty((len(x), len(taps) * x.shape[1]), dtype=np.float32)
        with on_threads(self.threads) as threads:
            all_layers(
                x, weights, self.angles, self.eps, self.heads, rows.positions, rows.sessions, rows.slots, seen, kinds,
                store.keys_by_panel[places], store.values_by_slot[places], np.array(taps, dtype=np.int64), tapped, threads,
            )  # fmt: skip
        return tapped

    def exit_layer(self, layer: nn.Module, norm: Any, after: int, place: int) -> ExitLayer:
        """Return a layer of the model's own shape as its exit layer.

        Its matrices are kept as those of the model are: rounded to bfloat16, 8 bits or 4, if these are.

        Args:
            layer: the layer, of the class of the model's layers.
            norm: the norm behind it.
            after: number of layers that run before it.
            place: its layer in the store.
        """
        if self.kind in ("bfloat16", "tiles"):
            layer, norm = (copy.deepcopy(module).bfloat16().float() for module in (layer, norm))
        return ExitLayer(
            after=after,
            weights=weights_of([layer], self.kind),
            norm=numbers_of(norm.weight),
            kinds=self.kinds[-1:],
            place=place,
        )

    def _embedded(
        self, tokens: Int64[np.ndarray, " n"], vectors: Mapping[int, Float32[np.ndarray, " hidden"]]
    ) -> Float32[np.ndarray, "n hidden"]:
        """Return what the first layer reads; raise `IndexError` if a token is negative and its row is not in `vectors`."""
        negative = tokens < 0
        if negative.any() and {*np.flatnonzero(negative).tolist()} != {*vectors}:
            raise IndexError("a token is beyond those of the model")
        x = self.embedding.take(np.maximum(tokens, 0), 0)
        for row, vector in vectors.items():
            x[row] = vector
        return x

    @contextmanager
    def arrays_for_steps(
        self, cache: CpuCache, store: PanelStore, windows: Int64[np.ndarray, " kinds"], part: int
    ) -> Iterator[CacheArrays]:
        """Yield a session's cache as arrays for steps. There must be room for what they store, in the cache and the store.

        Args:
            windows, part: see `CacheArrays`.
        """
        with on_threads(self.threads) as threads:
            taps = np.array(cache.needs.taps if part == ALL else (), dtype=np.int64)
            yield CacheArrays(
                cache.trie.arrays, cache.outputs, cache.taps, taps, self.model, windows, store.keys_by_panel,
                store.values_by_slot, cache.row, threads, *self.addresses, part, cache.early_layers or 0,
                self._exit_of(cache), cache.early,
            )  # fmt: skip

    def _exit_of(self, cache: CpuCache) -> ExitWeights:
        """Return the exit layer of a session, as steps read it."""
        layer: ExitLayer | None = cache.needs.exit_layer
        if layer is None:
            return self._no_exit
        return ExitWeights(layer.weights, layer.norm, layer.kinds, layer.place)

    @cached_property
    def _no_exit(self) -> ExitWeights:
        """What stands for the exit layer where there is none: drafts are read out by the norm of the model."""
        none = layers_of_weights(self.weights, 0, 0)
        return ExitWeights(none, self.last_norm, self.kinds[:0], -1)

    def logits(
        self, x: Float32[np.ndarray, "m hidden"], norm: Float32[np.ndarray, " hidden"] | None = None
    ) -> Float32[np.ndarray, "m vocab"]:
        """Return the logits of rows, given the output of the last layer for them.

        Args:
            norm: the weight of the norm in front of the head; None: that of the model.
        """
        logits = np.empty((len(x), len(self.head) * WIDTH), dtype=np.float32)
        if len(x):
            with on_threads(self.threads) as threads:
                score_rows(x, self.last_norm if norm is None else norm, self.eps, self.head, logits, threads)
        return np.ascontiguousarray(logits[:, : self.vocab])

    def normed(self, x: Float32[np.ndarray, "m hidden"]) -> Float32[np.ndarray, "m hidden"]:
        """Return the output of the last layer after the final norm, which is what the head reads."""
        out = np.empty_like(x)
        normalise(x, self.last_norm, self.eps, out)
        return out

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """The addresses of `all_layers` and `score_rows`, in their forms for the types of this model's arrays."""
        floats = np.zeros((1, 1), dtype=np.float32)
        numbers = np.zeros(1, dtype=np.int64)
        store = self.store()
        layers = address_of(
            all_layers, floats, self.weights, self.angles, self.eps, self.heads, numbers, numbers[None], numbers,
            np.zeros((1, 1, 1), dtype=bool), self.kinds, store.keys_by_panel, store.values_by_slot, numbers, floats, 1,
        )  # fmt: skip
        return layers, address_of(score_rows, floats, self.last_norm, self.eps, self.head, floats, 1)


_ONE_AT_A_TIME = threading.RLock()  # numba's threads serve one caller at a time, which may run two models


def start_threads_beside_torch() -> int:
    """Start numba's threads, and return the most that there are, without a change of torch's number of threads.

    numba and torch may share a pool of threads; to start it sets torch's number.
    """
    before = torch.get_num_threads()
    most = kernels.start_threads()
    torch.set_num_threads(before)
    return most


@contextmanager
def on_threads(most: int) -> Iterator[int]:
    """Set numba's threads to those that compiled code may use, at most `most`, and yield their number.

    With more than one thread, other callers wait until this context is left.
    """
    threads = min(allowed_threads(), most)
    if threads == 1:
        yield 1
        return
    with _ONE_AT_A_TIME:
        kernels.use_threads(threads)
        yield threads


def weights_of(layers: list[Any], kind: Kind) -> Weights:
    """Return the weights of these layers, with matrices in panels of a kind.

    Args:
        layers: of a transformers model, or of a draft head, whose modules have the same names; at least one.
    """

    def panels(linears: Callable[[Any], list[nn.Linear]]) -> np.ndarray:
        each = []
        for layer in layers:
            matrix = np.concatenate([numbers_of(linear.weight) for linear in linears(layer)])
            each.append(in_panels(matrix, kind))
        return in_lines(np.stack(each))

    def qkv(layer: Any) -> list[nn.Linear]:
        return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]

    def norm(module: Any) -> np.ndarray:
        weight = getattr(module, "weight", None)
        return np.zeros(0, dtype=np.float32) if weight is None else numbers_of(weight)

    def head_norms(layer: Any) -> list[np.ndarray]:
        return [norm(getattr(layer.self_attn, name, None)) for name in ("q_norm", "k_norm")]

    biases = [[numbers_of(linear.bias) for linear in qkv(layer) if linear.bias is not None] for layer in layers]
    return Weights(
        before_attention=np.stack([norm(layer.input_layernorm) for layer in layers]),
        before_inner=np.stack([norm(layer.post_attention_layernorm) for layer in layers]),
        bias=np.stack([np.concatenate([np.zeros(0, dtype=np.float32), *bias]) for bias in biases]),
        head_norms=np.array([head_norms(layer) for layer in layers]),
        qkv=panels(qkv),
        out=panels(lambda layer: [layer.self_attn.o_proj]),
        gate_up=panels(lambda layer: [layer.mlp.gate_proj, layer.mlp.up_proj]),
        down=panels(lambda layer: [layer.mlp.down_proj]),
        inner=layers[0].mlp.gate_proj.weight.shape[0],
    )


def numbers_of(weight: Tensor) -> Float32[np.ndarray, "..."]:
    """Return a weight as a contiguous array, without a copy if it is contiguous."""
    return weight.detach().contiguous().numpy()


def angles_of(rotary: Any, positions: int, size: int) -> Float32[np.ndarray, "2 positions half"]:
    """Return the cosine and the sine of each rotary pair's angle at each position."""
    cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None])
    return np.ascontiguousarray(torch.stack([cos[0, :, : size // 2], sin[0, :, : size // 2]]).numpy())


@torch.inference_mode()
def compiled_decoder(model: "PreTrainedModel", rounding: Rounding | None = None) -> CompiledDecoder | None:
    """Return the compiled forward of a model; None if numba is missing, or if it would not compute the same as the model.

    Args:
        rounding: what to round all matrices but the embedding to, which makes it another model: "int8" weights are read in a
            quarter of the time of float32, "int4" weights in less than a sixth. None: they stay as they are.
    """
    if not kernels.AVAILABLE or not is_plain_llama(model) or misfit(model, rounding):
        return None
    return CompiledDecoder(model, rounding)


def misfit(model: "PreTrainedModel", rounding: Rounding | None) -> str:
    """Return the reason why the sizes of a Llama-like model do not fit panels; "" if they do."""
    unit = steps_in("int4" if rounding == "int4" else "float32")
    config = model.config
    size = head_size(config)
    depths = config.hidden_size, getattr(config, "intermediate_size", 1), config.num_attention_heads * size
    if size % steps_in("float32") or any(depth % unit for depth in depths):
        deep = ", ".join(map(str, depths))
        return f"its matrices are {deep} deep, with heads of {size}; the depths must be multiples of {unit}"
    return ""
