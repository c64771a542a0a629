"""Passes of ranges of layers on a GPU: drafts by a model's first layers or an exit layer on the model's own cache.

`PackedPasses` drives them. Hidden states stay on the device, in the rows of one buffer, and the host holds the number of the
row in place of a state: each array of states in a session's cache has one column, of row numbers. So the steps of
`engines/cpu/early.py` keep, reorder and drop states without copying them.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from specbeam.core.records import FINAL
from specbeam.engines.arrays import Integers, LogitRows, States, Tapped, Vector
from specbeam.engines.cpu.cache import CpuCache
from specbeam.engines.cpu.decoder import Rows
from specbeam.engines.cpu.early import ExitLayer
from specbeam.engines.cpu.extras import numbers_of
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.families import norm_of
from specbeam.engines.gpu.cache import GpuCache
from specbeam.engines.gpu.decoder import GpuLayer, PassShape
from specbeam.engines.gpu.graphs import shape_for
from specbeam.engines.gpu.pages import PagedStore
from specbeam.engines.gpu.parts import WHOLE, PassPart
from specbeam.engines.gpu.staging import Inputs, Staging, mask_bytes
from specbeam.engines.kv.cache import Nodes
from specbeam.engines.kv.late import LateRows
from specbeam.engines.kv.member import RowMember
from specbeam.engines.kv.trie import Feed

if TYPE_CHECKING:
    from specbeam.engines.gpu.passes import GpuPasses

Embedding = Float32[np.ndarray, " width"]  # or the weight of a norm
FIRST_ROWS = 2048  # initial number of rows of states
_NO_VECTORS: Mapping[int, Embedding] = {}


class StateRows:
    """Rows of hidden states on the device, by number; row 0 is for padding.

    Rows are freed when no session refers to them any more, which is looked up only when none is free.

    Args:
        like: a tensor with the dtype, width and device of the rows.

    Attributes:
        rows: [rows, width]; replaced when it grows.
    """

    def __init__(self, like: Tensor, rows: int = FIRST_ROWS) -> None:
        self.rows = like.new_zeros(rows, like.shape[1])
        self._free = np.arange(1, rows)

    def take(self, count: int, rows_in_use: Callable[[], Integers]) -> Integers:
        """Return the numbers of `count` free rows.

        Args:
            rows_in_use: returns the numbers of all rows in use, in any order.
        """
        if count > len(self._free):
            self._free = np.setdiff1d(np.arange(1, len(self.rows)), rows_in_use())
            if max(count, len(self.rows) // 4) > len(self._free):  # otherwise rows would be looked up often
                self._grow(count)
        taken = self._free[:count]
        self._free = self._free[count:]
        return taken

    def _grow(self, count: int) -> None:
        before = len(self.rows)
        larger = self.rows.new_zeros(2 * max(before, count), self.rows.shape[1])
        larger[:before] = self.rows
        self.rows = larger
        self._free = np.concatenate([self._free, np.arange(before, len(larger))])


class RangeDecoder:
    """The layers of a model on a GPU, run in ranges, for `PackedPasses`.

    Where `CompiledDecoder` has a hidden state, there is one float32 number, the row of the state in `states`.

    Attributes:
        names: the kinds of attention of the layers.
        kinds: int64[layers], the kind of each layer, an index into `names`.
    """

    takes_steps = False  # compiled steps cannot call it

    def __init__(self, passes: "GpuPasses") -> None:
        self.passes = passes
        self.model = passes.decoder
        of = self.model.architecture
        self.names = of.names
        self.kinds = np.array([of.names.index(name) for name in of.kinds])
        self.states = StateRows(self.model.states_like)
        most = passes.staging.rows
        self._sources, self._goals = torch.zeros(2, most, dtype=torch.int64, device=passes.device)
        self._norms: dict[int, tuple[Any, Tensor]] = {}  # norms before the head on the device, by the id of the array

    def store(self) -> PagedStore:
        """Return the KV store of the model, which all its passes share."""
        return self.passes.store

    def forward(
        self,
        rows: Rows,
        store: PagedStore,
        vectors: Mapping[int, Embedding] = _NO_VECTORS,
        layers: slice = slice(None),
        states: States | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[States, Tapped]:
        """See `CompiledDecoder.forward`. There are no taps between early layers and others."""
        assert not taps
        first, stop, _ = layers.indices(len(self.kinds))
        if states is None:
            self._check(rows, vectors)
        numbered = [(number, self.model.layers[number]) for number in range(first, stop)]
        after = self._run(rows, numbered, states, vectors)
        return after, after[:, :0]

    def forward_exit(self, rows: Rows, store: PagedStore, layer: ExitLayer, states: States) -> States:
        """See `CompiledDecoder.forward_exit`."""
        return self._run(rows, [(layer.place, layer.weights)], states)

    def exit_layer(self, layer: nn.Module, norm: Any, after: int, place: int) -> ExitLayer:
        """Return an exit layer made of a layer of the same class as the model's, on its device and in its type.

        Args:
            norm: the norm after the layer.
            after: number of layers that run before it.
            place: its layer in the store.
        """
        like = self.model.embedding
        with torch.inference_mode(False), torch.no_grad():
            layer, norm = (copy.deepcopy(module).to(like.device, like.dtype) for module in (layer, norm))
            weights = self.model.layer_of(layer, len(self.kinds) - 1)
            numbers = numbers_of(norm_of(norm, self.model.architecture.family).cpu())
        return ExitLayer(after, weights, numbers, self.kinds[-1:], place)

    @torch.inference_mode()
    def logits(self, x: States, norm: Embedding | None = None) -> LogitRows:
        """See `CompiledDecoder.logits`."""
        if len(x) == 0:
            return np.zeros((0, self.model.vocab), dtype=np.float32)
        with self.passes.on_device():
            weight = self.model.last_norm if norm is None else self._norm(norm)
            return self.model.logits(self.read(x), weight).cpu().numpy()

    @torch.inference_mode()
    def normed(self, x: States) -> Float[Tensor, "rows width"]:
        """Return the output of the last layer after the final norm, in float32 on the device."""
        if len(x) == 0:
            return self.states.rows.new_zeros(0, self.model.width_of(FINAL), dtype=torch.float32)
        with self.passes.on_device():
            return self.model.input_of_head(self.read(x), self.model.last_norm).float()

    def read(self, x: States) -> Float[Tensor, "rows width"]:
        """Return a copy of the hidden states of some rows."""
        numbers = torch.from_numpy(_numbers(x)).to(self.states.rows.device)
        return self.states.rows.index_select(0, numbers)

    @torch.inference_mode()
    def write(self, x: States, states: Float[Tensor, "rows width"]) -> None:
        """Overwrite the hidden states of some rows."""
        numbers = torch.from_numpy(_numbers(x)).to(self.states.rows.device)
        self.states.rows[numbers] = states.to(self.states.rows)

    @torch.inference_mode()
    def new_rows(self, states: Float[Tensor, "rows width"]) -> States:
        """Store hidden states in free rows."""
        x = self._take(len(states))
        self.write(x, states)
        return x

    @torch.inference_mode()
    def input_of(self, token: int, position: int) -> Vector:
        """See `CompiledDecoder.input_of`."""
        inputs = self.passes.staging.inputs
        own = inputs._replace(
            tokens=torch.full_like(inputs.tokens[:1], token), positions=torch.full_like(inputs.positions[:1], position)
        )
        with self.passes.on_device():
            return self.model.embedded(own, 1)[0].float().cpu().numpy()

    def _norm(self, weight: Embedding) -> Tensor:
        """Return the weight of a norm on the device, in the model's type."""
        known = self._norms.get(id(weight))
        if known is None:
            known = weight, torch.from_numpy(weight).to(self.model.last_norm)
            self._norms[id(weight)] = known
        return known[1]

    def _take(self, count: int) -> States:
        """Return free rows of states."""
        before = self.states.rows
        taken = self.states.take(count, self._rows_in_use)
        if self.states.rows is not before:
            self.passes.graphs.clear()  # they read the old buffer
        return taken.astype(np.float32)[:, None]

    def _rows_in_use(self) -> Integers:
        """Return the rows of states to which any session refers."""
        found = [np.zeros(0, dtype=np.int64)]
        for cache in self.passes.caches:
            if isinstance(cache, CpuCache):
                stored = cache.trie.stored
                early = cache.early
                each = [cache.outputs[:stored], early.outputs[:stored], early.exited[:stored]]
                found += [_numbers(one) for one in (*each, early.waiting.states[: cache.waiting])]
        return np.concatenate(found)

    def _check(self, rows: Rows, vectors: Mapping[int, Embedding]) -> None:
        """Raise `IndexError` for unknown tokens and positions, which kernels would look up outside the model's arrays."""
        limits = self.passes.limits
        if rows.positions.max() >= limits.positions:
            raise IndexError("a position is beyond the model's last position")
        negative = {*np.flatnonzero(rows.tokens < 0).tolist()}
        if rows.tokens.max() >= limits.vocab or negative != {*vectors}:
            raise IndexError("a token is outside the model's vocabulary")

    @torch.inference_mode()
    def _run(
        self,
        rows: Rows,
        layers: list[tuple[int, GpuLayer]],
        states: States | None,
        vectors: Mapping[int, Embedding] = _NO_VECTORS,
    ) -> States:
        """Run layers on all rows, store their keys and values, and return the rows of their outputs.

        Args:
            layers: the layers with their numbers in the store.
            states: rows of the inputs of the first layer; None: the embeddings of the tokens.
            vectors: embeddings by row, for the rows whose token is negative.
        """
        passes = self.passes
        count = len(rows.tokens)
        found = self._take(count)
        counts = (rows.sessions[:, 2] - rows.sessions[:, 1]).tolist()
        shape = shape_for(counts, 0)
        part = WHOLE.with_given([*vectors], [torch.from_numpy(one) for one in vectors.values()], self.model.embedding)
        with passes.on_device():
            staging, filled_bytes = self._staged(rows, shape)
            places = self._sources, self._goals
            if staging is not passes.staging:
                places = tuple(self._goals.new_zeros(2, shape.rows))
            for goal, x in zip(places, (states, found), strict=True):
                if x is not None:
                    padded = np.zeros(shape.rows, dtype=np.int64)
                    padded[:count] = _numbers(x)
                    goal[: shape.rows] = torch.from_numpy(padded).to(goal.device)
            staging.copy_to_device(filled_bytes)
            if passes.device.type == "cuda":
                torch.cuda.current_stream(passes.device).synchronize()  # before the staging is filled again
            work = partial(self._run_layers, staging.inputs, shape, layers, states is None, places, part)
            if part.given is not None:
                work()
            else:
                key = (shape, states is None, len(layers), layers[0], layers[-1])
                passes.graphs.replayed(staging, key, work)
        return found

    def _run_layers(
        self,
        inputs: Inputs,
        shape: PassShape,
        layers: list[tuple[int, GpuLayer]],
        is_first: bool,
        places: tuple[Tensor, Tensor],
        part: PassPart,
    ) -> Tensor:
        """Launch the kernels of a pass; a captured graph repeats them on other inputs and other rows of states.

        Args:
            is_first: whether the layers read the embeddings of the tokens.
            places: the rows of the inputs and of the outputs.
        """
        rows = self.states.rows
        sources, goals = (one[: shape.rows] for one in places)
        x = self.model.embedded(inputs, shape.rows, part) if is_first else rows.index_select(0, sources)
        x = self.model.run_layers(x, layers, inputs, shape, self.passes.store)
        rows.index_copy_(0, goals, x)
        return x

    def _staged(self, rows: Rows, shape: PassShape) -> tuple[Staging, int]:
        """Write the inputs of a pass to a staging; return it and the bytes of the mask."""
        passes = self.passes
        seen = np.stack([rows.seen[name] for name in self.names])
        staging = passes.staging
        counts = (rows.sessions[:, 2] - rows.sessions[:, 1]).tolist()
        most = sum(mask_bytes(passes.limits, count, seen.shape[2]) for count in counts)
        if not staging.holds(shape.rows, shape.sessions, most):
            staging = Staging(passes.device, shape.rows, shape.sessions, most)
        inputs = staging.filled
        count = len(rows.tokens)
        inputs.tokens[:count] = np.where(rows.tokens < 0, self.model.blank, rows.tokens)
        inputs.positions[:count] = rows.positions
        inputs.slots[:count] = rows.slots
        byte = 0
        for session, (store_row, first, stop) in enumerate(rows.sessions.tolist()):
            own = seen[:, first:stop]
            inputs.caches[first:stop] = store_row
            inputs.sessions[:, session] = (
                first, stop - first, store_row, seen.shape[2], byte, own[0].size, 0, 0,
            )  # fmt: skip
            inputs.seen[byte : byte + own.size] = own.reshape(-1)
            byte += own.size
            if passes.limits.by_place:
                end = byte + 4 * seen.shape[2]
                inputs.seen[byte:end].view(np.int32)[:] = rows.places[session]
                byte = end
        for numbers in (inputs.tokens, inputs.positions, inputs.caches, inputs.slots):
            numbers[count : shape.rows] = 0  # padding writes to the waste slot
        inputs.sessions[:, len(rows.sessions) : shape.sessions] = 0
        return staging, byte


class RangedPasses(PackedPasses):
    """The passes of a model on a GPU for sessions in which its first layers or an exit layer draft; see `PackedPasses`."""

    decoder: RangeDecoder

    def __init__(self, passes: "GpuPasses") -> None:
        super().__init__(passes.model, RangeDecoder(passes), passes.caches)

    def cache(self, row: int, prompt: list[int]) -> CpuCache:
        return CpuCache(row, prompt, 1)

    def cache_like(self, other: GpuCache) -> CpuCache:
        """Return a cache of a session with the same tokens, which takes the place of another in its row of the store."""
        trie = other.trie
        if len(again := np.flatnonzero(trie.root_at < trie.stored)):
            trie = other.trie.scratch(again)
        cache = CpuCache(other.row, other.prompt, 1, trie)
        own = vars(cache)
        kept = {"answered", "outputs", "trie"}
        own |= {name: value for name, value in vars(other).items() if name in own and name not in kept}
        return cache

    def run_layer(self, cache: RowMember, feed: Feed, layer: int, states: States) -> States:
        """See `PackedPasses.run_layer`; `states` and the result are hidden states."""
        rows = self.decoder.new_rows(torch.from_numpy(np.ascontiguousarray(states)))
        after = super().run_layer(cache, feed, layer, rows)
        return self.decoder.read(after).float().cpu().numpy()

    def _states(self, cache: CpuCache, nodes: Nodes | slice) -> torch.Tensor:
        assert cache.needs.columns == (FINAL,)  # taps are refused for these sessions
        return self.decoder.normed(cache.outputs[nodes])

    def _reserve(self, caches: Sequence[RowMember], extent: int) -> None:
        self.store.release_from(len(self.caches))
        for cache in caches:
            self.store.reserve_row(cache.row, extent)

    def _run_layers(
        self,
        rows: Rows,
        entering: Sequence[LateRows],
        entries: Integers,
        vectors: dict[int, Embedding],
        layers: slice,
        states: States | None,
        taps: Sequence[int],
    ) -> tuple[States, Tapped]:
        """See `PackedPasses._run_layers`. Extra rows pass through earlier layers as any token; no other row sees them."""
        rows = replace(rows, tokens=np.where(entries > 0, self.decoder.model.blank, rows.tokens))
        later = entries[(entries > layers.start) & (entries < layers.stop)]
        edges = sorted({layers.start, layers.stop, *later.tolist()})
        for start, stop in pairwise(edges):
            for one in entering:
                if one.layer == start and states is not None:
                    before = self.decoder.read(states)
                    one.write(before)
                    self.decoder.write(states, before)
            states, _ = self.decoder.forward(
                rows, self.store, vectors if states is None else {}, slice(start, stop), states
            )
        assert states is not None
        return states, states[:, :0]


def _numbers(x: States) -> Integers:
    """Return the rows of states as integers."""
    return x.ravel().astype(np.int64)
