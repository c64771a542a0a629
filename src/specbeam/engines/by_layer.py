"""A forward that calls the layers of a Llama-like transformers model one by one, on any device and in any float type.

Drafts can exit after a layer, and the target's pass continues from there on the same cache, as in the compiled forward.
`PackedPasses` drives both. States are copied through the host between the parts of a pass, and attention runs per
session, so this engine is slower than the others unless the model's own layers draft.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from specbeam.engines.arrays import Floats, LogitRows, States, Tapped, Vector
from specbeam.engines.cache_names import cache_argument
from specbeam.engines.cpu.decoder import Rows
from specbeam.engines.cpu.early import ExitLayer
from specbeam.engines.cpu.layers import NO_ATTENTION, NO_INNER
from specbeam.engines.eligibility import is_llama_like
from specbeam.engines.kv.masks import additive
from specbeam.engines.kv.store import Place
from specbeam.engines.kv.torch_store import KVStore, StoreLayer
from specbeam.engines.shared_tokens import SharedTokens, readable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_VECTORS: Mapping[int, Vector] = {}


class LayerStore(KVStore):
    """A KV store for the layers of a model and for exit layers."""

    def add_layer(self) -> int:
        """Add a layer to the store, and return its index."""
        self.layers.append(StoreLayer(self))
        return len(self.layers) - 1


class _At:
    """The cache argument of one layer's attention, which writes to one layer of the store."""

    def __init__(self, store: KVStore, place: int) -> None:
        self.layer = store.layers[place]

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store keys and values, and return all keys and values of the pass."""
        found: tuple[Tensor, Tensor] = self.layer.update(keys, values)
        return found


class LayerDecoder:
    """The layers of one model, called one by one. `layer_decoder` returns it for models that fit.

    Attributes:
        shared: the target's tokens, which a draft model reads and drafts; None: the model's own tokens.
        names: the kinds of attention of its layers.
        kinds: int64[layers], the kind of each layer, an index into `names`.
    """

    takes_steps = False  # compiled steps cannot call it

    def __init__(self, model: "PreTrainedModel", shared: SharedTokens | None = None) -> None:
        self.model = model
        self.shared = shared
        self.body: Any = model.base_model
        self.embedding = model.get_input_embeddings().weight
        config = model.config
        named = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.names = list(dict.fromkeys(named))
        self.kinds = np.array([self.names.index(name) for name in named])

    def skipping(self, attention: Sequence[int], inner: Sequence[int]) -> "LayerDecoder":
        """Return a forward with the same weights that skips some sublayers; see `CompiledDecoder.skipping`."""
        kinds = self.kinds.copy()
        kinds[list(attention)] |= NO_ATTENTION
        kinds[list(inner)] |= NO_INNER
        fewer = copy.copy(self)
        fewer.kinds = kinds
        return fewer

    def store(self) -> LayerStore:
        """Return a new KV store for this model."""
        return LayerStore(len(self.kinds))

    @torch.inference_mode()
    def forward(
        self,
        rows: Rows,
        store: LayerStore,
        vectors: Mapping[int, Vector] = _NO_VECTORS,
        layers: slice = slice(None),
        states: States | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[States, Tapped]:
        """See `CompiledDecoder.forward`."""
        x = self._embedded(rows, vectors) if states is None else self._on_device(states)
        places = range(*layers.indices(len(self.kinds)))
        modules = [self.body.layers[place] for place in places]
        found, tapped = self._run(x, rows, store, modules, places, self.kinds[layers].tolist(), taps)
        return _on_host(found), _on_host(tapped)

    @torch.inference_mode()
    def forward_exit(self, rows: Rows, store: LayerStore, layer: ExitLayer, states: States) -> States:
        """See `CompiledDecoder.forward_exit`."""
        x = self._on_device(states)
        found, _ = self._run(x, rows, store, [layer.weights], [layer.place], layer.kinds.tolist(), ())
        return _on_host(found)

    def exit_layer(self, layer: nn.Module, norm: Any, after: int, place: int) -> ExitLayer:
        """Return an exit layer made of a layer of the same class as the model's, on its device and in its type.

        Args:
            norm: the norm after the layer.
            after: number of layers that run before it.
            place: its index in the store.
        """
        made = copy.deepcopy(layer).to(self.embedding.device, self.embedding.dtype)
        weight = norm.weight.detach().float().cpu().numpy()
        return ExitLayer(after, made, weight, self.kinds[-1:], place)

    @torch.inference_mode()
    def logits(self, x: States, norm: Vector | None = None) -> LogitRows:
        """See `CompiledDecoder.logits`."""
        found = self.model.get_output_embeddings()(self._normed(x, norm))
        return _on_host(found if self.shared is None else self.shared.fitted_logits(found))

    @torch.inference_mode()
    def normed(self, x: States) -> States:
        """See `CompiledDecoder.normed`."""
        return _on_host(self._normed(x, None))

    def _normed(self, x: States, norm: Vector | None) -> Tensor:
        """Return the normed output of a layer; the norms of these models differ only in their weights."""
        states = self._on_device(x)
        if norm is None:
            found: Tensor = self.body.norm(states)
            return found
        eps = self.body.norm.variance_epsilon
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return self._on_device(norm) * wide.to(states.dtype)

    def _on_device(self, x: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.embedding.device, self.embedding.dtype)

    @torch.inference_mode()
    def input_of(self, token: int, position: int) -> Vector:
        """See `CompiledDecoder.input_of`."""
        one = np.zeros(1, dtype=np.int64)
        rows = Rows(one + token, one + position, one, one[:0].reshape(0, 3), {}, one[:0].reshape(0, 1))
        return _on_host(self._embedded(rows, _NO_VECTORS)[0])

    def _embedded(self, rows: Rows, vectors: Mapping[int, Vector]) -> Tensor:
        """Return the input of the first layer. Raises `IndexError` if the rows of negative tokens are not in `vectors`."""
        negative = rows.tokens < 0
        if negative.any() and {*np.flatnonzero(negative).tolist()} != {*vectors}:
            raise IndexError("a token is outside the model's vocabulary")
        known = torch.from_numpy(np.maximum(readable(self.shared, rows.tokens), 0)).to(self.embedding.device)
        x = self.model.get_input_embeddings()(known).clone()
        for row, vector in vectors.items():
            x[row] = self._on_device(vector)
        return x

    def _run(
        self,
        x: Tensor,
        rows: Rows,
        store: LayerStore,
        modules: Sequence[nn.Module],
        places: Sequence[int],
        kinds: Sequence[int],
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Run layers on all rows, session by session, and store their keys and values.

        Args:
            places: the indices of these layers in the store.
            kinds: their kinds of attention, plus NO_ATTENTION or NO_INNER to skip a sublayer.
            taps: indices into `modules`; the number of modules stands for the output of the last one.

        Returns the output of the last layer, float[rows, hidden], and the inputs of the layers `taps`, concatenated.
        """
        found = []
        tapped = []
        for cache, start, stop in rows.sessions.tolist():
            here = slice(start, stop)
            states = x[None, here]
            extent = next(iter(rows.seen.values())).shape[1]
            slots = torch.from_numpy(rows.slots[None, here]).to(x.device)
            store.place = Place(slice(cache, cache + 1), slots, extent)
            seen = [torch.from_numpy(rows.seen[name][here]).to(x.device) for name in self.names]
            masks = [additive(one[None, None], x.dtype) for one in seen]
            positions = torch.from_numpy(rows.positions[None, here]).to(x.device)
            rotations = self.body.rotary_emb(states, positions)
            outputs = [states]  # the input of the first layer, then the output of each layer
            for module, place, kind in zip(modules, places, kinds, strict=True):
                arguments = {
                    "attention_mask": masks[kind % NO_ATTENTION],
                    "position_ids": positions,
                    **cache_argument(module, _At(store, place)),
                    "use_cache": True,
                    "position_embeddings": rotations,
                }
                if kind < NO_ATTENTION:
                    after = module(states, **arguments)
                    states = after[0] if isinstance(after, tuple) else after
                else:
                    states = _without_sublayers(module, kind, states, arguments)
                outputs.append(states)
            found.append(states[0])
            tapped.append(torch.cat([outputs[tap][0] for tap in taps], 1) if taps else states[0, :, :0])
        return torch.cat(found), torch.cat(tapped)


def _without_sublayers(module: Any, kind: int, states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Return the output of a Llama-like layer that skips its attention, its inner layer or both.

    Args:
        kind: NO_ATTENTION, NO_INNER or both.
        arguments: of the attention.
    """
    if not kind & NO_ATTENTION:
        mixed, _ = module.self_attn(hidden_states=module.input_layernorm(states), **arguments)
        states = states + mixed
    if not kind & NO_INNER:
        states = states + module.mlp(module.post_attention_layernorm(states))
    return states


def _on_host(x: Tensor) -> Floats:
    return np.ascontiguousarray(x.float().cpu().numpy())


def layer_decoder(model: "PreTrainedModel", shared: SharedTokens | None = None) -> LayerDecoder | None:
    """Return the forward of a model by layers; None if the model is not Llama-like."""
    return LayerDecoder(model, shared) if is_llama_like(model) else None
