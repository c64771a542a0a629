"""Draft heads in the compiled layers of the CPU engine (engines/cpu/head_steps.py).

torch runs the other heads: those on another device, of another type, or with modules that a Llama lacks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float32
from torch import nn

from specbeam.core import compiling
from specbeam.core.compiling.compiler import address_of
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.passes import SettledTurn
from specbeam.core.records import FINAL, Turn
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.decoder import TILED_FROM, angles_of, weights_of
from specbeam.engines.cpu.extras import numbers_of
from specbeam.engines.cpu.head_steps import (
    ATTENTION,
    NO_NORM,
    NORM_OF_ALL,
    NORM_OF_EACH,
    NORMED_PROJECTION,
    PROJECTION,
    BlockModel,
    Blocks,
    FeatureWeights,
    HeadArrays,
    PairFeed,
    TrunkModel,
    begin_pairs,
    context_layers,
    entered,
    extend_head_cache,
    finish_pairs,
    make_features,
    of_all_tokens,
    pair_layers,
    pairs_ready,
    rewind_head_cache,
    run_all,
    settle_head_cache,
)
from specbeam.engines.cpu.layers import score_rows
from specbeam.engines.cpu.panels import Kind, fits_bfloat16, in_panels
from specbeam.engines.cpu.rows import KeyValues, LayerRows, Stack
from specbeam.engines.cpu.sources import no_sources
from specbeam.engines.cpu.sums import STEP, WIDTH
from specbeam.engines.cpu.team import TEAM, threads_for
from specbeam.engines.cpu.weights import layers_of_weights
from specbeam.engines.families import FIXED_ROPES, Architecture, llama_architecture
from specbeam.engines.kv.steps import BLOCK
from specbeam.engines.kv.store import PanelStore
from specbeam.engines.kv.trie import KVTrie, widened
from specbeam.models.heads.arrays import AnyNodes
from specbeam.models.heads.block import BlockHead
from specbeam.models.heads.head import Head
from specbeam.models.heads.layers import LayerSizes, Rotary
from specbeam.models.heads.trunk import PairTrunk

SHORT = 4 * BLOCK  # initial capacity of a cache: a short text with the drafts of a turn
WORDS = (torch.float32, torch.bfloat16, torch.float16)  # types of weights that can become float32
_NONE = np.zeros(0, dtype=np.float32)
_NO_TOKENS = np.zeros(0, dtype=np.int64)
_PAIRS = {"attention": ATTENTION, "projection": PROJECTION, "normed projection": NORMED_PROJECTION}
_NORMS = {"no": NO_NORM, "all": NORM_OF_ALL, "each": NORM_OF_EACH}


class CompiledCache:
    """A session's cache in a compiled head; see `HeadArrays`.

    Attributes:
        row: the session's row of the store.
        answered: number of forest nodes whose rows were returned in this turn.
    """

    def __init__(self, row: int, tokens: list[int], width: int, states: int, columns: int) -> None:
        self.row = row
        self.trie = KVTrie(tokens, SHORT)
        self.features = np.zeros((0, width), dtype=np.float32)
        self.is_scored = np.zeros(0, dtype=bool)
        self.states = np.zeros((0, states), dtype=np.float32)
        self.blocks = Blocks(_NO_TOKENS, np.zeros(1, dtype=np.int64), np.zeros((0, columns), dtype=np.float32))
        self.answered = 0

    def make_room(self, fresh: int, more: int, block: int) -> None:
        """Make room for `fresh` new forest nodes, and for `more` nodes that are stored later.

        Args:
            block: number of rows of a block, 0 for a trunk.
        """
        trie = self.trie
        trie.make_room(fresh + more)
        trie.make_slots(trie.pending + fresh + more)
        rows = trie.arrays.nodes.shape[1]
        if rows > len(self.features):
            self.features = widened(self.features, rows, self.features.shape[1])
            self.states = widened(self.states, rows, self.states.shape[1])
            self.is_scored = widened(self.is_scored, rows)
            at = np.full(rows, -1)
            at[: len(self.blocks.at)] = self.blocks.at
            self.blocks = self.blocks._replace(at=at)
        needed = (trie.known + fresh) * block
        if needed > len(self.blocks.base):
            base = np.empty((needed, self.blocks.base.shape[1]), dtype=np.float32)
            base[: len(self.blocks.base)] = self.blocks.base
            self.blocks = self.blocks._replace(base=base)

    def finish_run(self, roots: int) -> None:
        """Read the `roots` roots from the arrays, after steps have settled the last turn of a run."""
        self.trie.root_at = self.trie.local[:roots].copy()
        self.answered = 0


class CompiledHead:
    """A head in compiled layers.

    Args:
        head: `lacks_compiled_form` must return "" for it.
        vocab: number of tokens of the target.
    """

    def __init__(self, head: Head, vocab: int) -> None:
        self.threads = threads_for(sum(weight.numel() for weight in head.parameters()))
        self.is_trunk = isinstance(head, PairTrunk)
        rotary: Any = head.rotary
        self.rotary = rotary
        sizes: LayerSizes = rotary.sizes
        self.width = sizes.width
        self.states_size = head.states_size
        model = _trunk_model(head, vocab) if isinstance(head, PairTrunk) else _block_model(head, vocab)  # type: ignore[arg-type]
        self.model: TrunkModel | BlockModel = model
        layers = len(model.kinds) + self.is_trunk
        self.store = PanelStore(layers, sizes.kv_heads, sizes.head_size, WIDTH)
        self.columns = len(model.head) * WIDTH
        if self.threads > 1:
            TEAM.learn(model.head)
            TEAM.learn(model.features.matrix)
        self.rows = 0  # of the store in use or free
        self.free_rows: list[int] = []
        self.addresses = self._addresses()

    def new_cache(self, prompt: list[int], states: Float32[np.ndarray, "before states"]) -> CompiledCache:
        """Return the cache of a new session.

        Args:
            states: the target's hidden states of the prompt's tokens but the last one.
        """
        if not self.free_rows:
            self.free_rows.append(self.rows)
            self.rows += 1
        first = 0 if self.is_trunk else 1  # the local node of the first token
        tokens = prompt[1:] if self.is_trunk else prompt
        states_width = self.width if self.is_trunk else 0
        cache = CompiledCache(self.free_rows.pop(), tokens, self.width, states_width, self.columns)
        cache.make_room(0, 0, 0)
        with TEAM.threads(self.threads) as threads:
            features = make_features(self.model.features, self.model.eps, states, threads)
        cache.features[first : first + len(features)] = features
        cache.is_scored[first : first + len(features)] = True
        return cache

    def close(self, cache: CompiledCache, is_broken: bool = False) -> None:
        """Free the cache of a session.

        Args:
            is_broken: whether it may hold NaN, which must not reach other sessions: its row is cleared.
        """
        if is_broken and cache.row < self.store.caches:
            self.store.clear_cache(cache.row)
        self.free_rows.append(cache.row)

    @contextmanager
    def arrays_for_steps(self, cache: CompiledCache, fresh: int, more: int = 0) -> Iterator[HeadArrays]:
        """Yield a session's cache as arrays for steps, with room for `fresh` new forest nodes and `more` later ones."""
        block = self.model.rows
        cache.make_room(fresh, more, block)
        positions = int(cache.trie.positions.max()) + fresh + more + block + 2
        if positions > self.model.angles.shape[2]:
            angles = angles_of(self.rotary.angles, 2 * positions)[None]
            self.model = self.model._replace(angles=angles)
        slots = cache.trie.capacity + -(-len(cache.blocks.base) // BLOCK) * BLOCK
        self.store.reserve(self.rows, slots)
        with TEAM.threads(self.threads) as threads:
            yield HeadArrays(
                cache.trie.arrays, cache.features, cache.is_scored, cache.states, cache.blocks, self.model,
                self.store.keys_by_panel, self.store.values_by_slot, cache.row, threads, *self.addresses,
            )  # fmt: skip

    def extend(
        self, caches: Sequence[CompiledCache], forests: Sequence[Forest]
    ) -> tuple[list[Float32[np.ndarray, "_ vocab"]], int]:
        """Return the logits of the new nodes of each forest, and the number of passes."""
        wanted = [
            unknown_nodes(cache.answered, forest.size, forest.known.nodes)
            for cache, forest in zip(caches, forests, strict=True)
        ]
        for cache, forest in zip(caches, forests, strict=True):
            cache.answered = forest.size
        if len(caches) > 1 and self.is_trunk:
            return self._extend_together(caches, forests, wanted)
        rows = []
        passes = 0
        for cache, forest, nodes in zip(caches, forests, wanted, strict=True):
            with self.arrays_for_steps(cache, forest.size - cache.trie.known) as arrays:
                before = int(cache.blocks.made[0])
                rows.append(extend_head_cache(arrays, forest.tokens, forest.parents, nodes))
                passes += self.is_trunk or int(cache.blocks.made[0]) > before
        return rows, passes

    def _extend_together(
        self, caches: Sequence[CompiledCache], forests: Sequence[Forest], wanted: list[AnyNodes]
    ) -> tuple[list[Float32[np.ndarray, "_ vocab"]], int]:
        """Do `extend` for several sessions of a trunk, whose rows share passes."""
        pairs = [*zip(caches, forests, strict=True)]
        for cache, forest in pairs:  # make room for all sessions first, as this moves the arrays of the store
            with self.arrays_for_steps(cache, forest.size - cache.trie.known):
                pass
        passes = 0
        nodes = []
        with TEAM.threads(self.threads):
            each: list[HeadArrays] = []
            for cache, forest, asked in zip(caches, forests, wanted, strict=True):
                with self.arrays_for_steps(cache, forest.size - cache.trie.known) as arrays:
                    nodes.append(entered(arrays, forest.tokens, forest.parents, asked))
                    each.append(arrays)
            while busy := [arrays for arrays in each if pairs_ready(arrays)]:
                self._run_together(busy)
                passes += 1
            x = np.concatenate([arrays.states[one] for arrays, one in zip(each, nodes, strict=True)])
            logits = np.empty((len(x), self.columns), dtype=np.float32)
            if len(x):
                model = self.model
                score_rows(x, model.last_norm, model.eps, model.head[:0], model.head, logits, each[0].threads)
        ends = np.cumsum([len(one) for one in nodes])[:-1]
        return np.split(of_all_tokens(self.model, logits), ends), passes

    def _run_together(self, busy: list[HeadArrays]) -> None:
        """Compute pending rows of several sessions in one pass."""
        feeds: list[PairFeed] = [begin_pairs(arrays, pairs_ready(arrays)) for arrays in busy]
        ends = np.cumsum([0, *(len(feed.tokens) for feed in feeds)])
        seen = np.zeros((1, ends[-1], max(feed.seen.shape[2] for feed in feeds)), dtype=bool)
        places = np.zeros((len(feeds), seen.shape[2]), dtype=np.int64)
        for number, (feed, start, stop) in enumerate(zip(feeds, ends, ends[1:], strict=False)):
            extent = feed.seen.shape[2]
            seen[0, start:stop, :extent] = feed.seen[0]
            places[number, :extent] = feed.places[0]
        tokens, given, positions, slots = (
            np.concatenate([getattr(feed, name) for feed in feeds])
            for name in ("tokens", "given", "positions", "slots")
        )
        joined = PairFeed(tokens, given, positions, slots, seen, places)
        rows = np.array([
            (arrays.store_row, start, stop) for arrays, start, stop in zip(busy, ends, ends[1:], strict=False)
        ])  # fmt: skip
        x = np.empty((ends[-1], self.width), dtype=np.float32)
        first = busy[0]
        model = cast(TrunkModel, self.model)  # block heads run one session at a time
        pair_layers(x, model, joined, rows, KeyValues(first.keys, first.values), first.threads)
        for arrays, start, stop in zip(busy, ends, ends[1:], strict=False):
            finish_pairs(arrays, x[start:stop])

    def settle(self, cache: CompiledCache, turn: Turn, states: Float32[np.ndarray, "nodes states"]) -> None:
        """Keep the rows that the surviving beams of a session need.

        Args:
            states: the target's hidden states of the forest nodes that it has scored in this turn, ascending.
        """
        forest = turn.forest
        verdict = turn.verdict
        beams = verdict.beams
        start = forest.roots + int((forest.parents[forest.known.nodes] >= 0).sum())
        scored = turn.scored_nodes
        settled = SettledTurn(
            forest.tokens, forest.parents, start, scored, np.arange(forest.size), beams.nodes, beams.tokens,
            verdict.parents, verdict.kept,
        )  # fmt: skip
        with self.arrays_for_steps(cache, forest.size + beams.size) as arrays:
            settle_head_cache(arrays, settled, scored, states)
        cache.finish_run(beams.size)

    def rewind(self, cache: CompiledCache, nodes: int) -> None:
        """Take back the rows of all nodes of this turn's forest except the first `nodes`."""
        with self.arrays_for_steps(cache, 0) as arrays:
            rewind_head_cache(arrays, nodes)
        cache.answered = min(cache.answered, nodes)

    def _addresses(self) -> tuple[int, int, int]:
        """Return the addresses in `HeadArrays`, compiled for the types of this head's arrays."""
        model = self.model
        floats = np.zeros((1, 1), dtype=np.float32)
        numbers = np.zeros(1, dtype=np.int64)
        seen = np.zeros((1, 1, 1), dtype=bool)
        cache = KeyValues(self.store.keys_by_panel, self.store.values_by_slot)
        score = address_of(score_rows, floats, model.last_norm, model.eps, model.head[:0], model.head, floats, 1)
        if isinstance(model, TrunkModel):
            feed = PairFeed(numbers, floats, numbers, numbers, seen, numbers[None])
            return address_of(pair_layers, floats, model, feed, numbers[None], cache, 1), 0, score
        rows = LayerRows(numbers, numbers, numbers[None], seen, numbers[None], no_sources())
        _, _, kv_heads, _, size, _ = cache.keys.shape
        stack = Stack(model.weights, model.angles, model.eps, model.heads, kv_heads, size)
        layers = address_of(run_all, floats, stack, rows, model.kinds, cache, 1)
        context = address_of(context_layers, floats, model, numbers, numbers[None], numbers, cache, 1)
        return layers, context, score


def lacks_compiled_form(head: Head, vocab: int, types: tuple[torch.dtype, ...] = (torch.float32,)) -> str:
    """Return the reason why compiled layers cannot run a head; "" if they can.

    Args:
        vocab: number of tokens of the target.
        types: allowed for its weights; the layers compute in float32.
    """
    if not compiling.AVAILABLE:
        return "numba is missing"
    if type(head) not in (PairTrunk, BlockHead):
        return f"compiled layers run EAGLE, DFlash and DSpark heads, and this is a {type(head).__name__}"
    weights = list(head.parameters())
    if any(weight.dtype not in types or weight.device.type != "cpu" for weight in weights):
        return "its weights are not in float32 on a CPU"
    if any(module._forward_hooks or module._forward_pre_hooks for module in head.modules()):
        return "its modules have hooks"
    known: Any = head
    if type(known.embed_tokens) is not nn.Embedding or type(known.lm_head) is not nn.Linear:
        return "its embedding or its output matrix is of another kind"
    if known.lm_head.bias is not None:
        return "its output matrix has a bias"
    if type(known.rotary) is not Rotary:
        return "its layers are of the target's own kind"
    if any(view.within or view.is_causal for view in known.shape.views):
        return "its rows do not attend to everything above them, or not to all rows of their block"
    if known.rotary.rope.get("rope_type", "default") not in FIXED_ROPES:
        return "its positions depend on the length of the text"
    if isinstance(head, PairTrunk) and (head.shape.sampling or head.shape.alignment):
        return "it has the modules of FSPAD"
    if isinstance(head, BlockHead) and head.shape.correction not in ("no", "vanilla"):
        return f"its correction is of kind {head.shape.correction!r}"
    if isinstance(head, BlockHead) and (head.shape.local_rows or head.shape.logit_scale != 1 or head.shape.logit_cap):
        return "it mixes neighbouring rows, or changes the size of its logits"
    mask = head.mask if isinstance(head, BlockHead) else 0
    if known.embed_tokens.weight.shape[0] < max(vocab, mask + 1):
        return "its embedding lacks some tokens"
    sizes: LayerSizes = known.rotary.sizes
    depths = (sizes.width, known.embed_tokens.weight.shape[1], sizes.inner, sizes.head_size, head.states_size)
    if any(depth % STEP for depth in depths):
        return f"its sizes are not multiples of {STEP}"
    return ""


def _kind_of(matrices: Sequence[torch.Tensor], tiled: bool) -> Kind:
    """Return the smallest kind of panels that holds these matrices exactly."""
    exact = all(fits_bfloat16(numbers_of(matrix)) for matrix in matrices)
    if not exact:
        return "float32"
    return "tiles" if tiled else "bfloat16"


def _weights_in(head: Any) -> tuple[list[Any], Kind, bool]:
    """Return the layers of a head, the kind of panels for their matrices and `fc`, and whether tiles are used."""
    tiled = sum(weight.numel() for weight in head.parameters()) >= TILED_FROM and tiles.available()
    linears = [module for module in head.layers.modules() if isinstance(module, nn.Linear)]
    kind = _kind_of([head.fc.weight, *(linear.weight for linear in linears)], tiled)
    return [*head.layers], kind, tiled


def _numbers_in(module: Any, name: str = "weight") -> np.ndarray:
    """Return a weight of a module; an empty array if it has none."""
    weight = getattr(module, name, None)
    return _NONE if weight is None else numbers_of(weight)


def _architecture_of(sizes: LayerSizes, layers: int) -> Architecture:
    """Return the architecture of `layers` layers of a head: layers of a Llama."""
    return llama_architecture(layers, sizes.heads, sizes.kv_heads, sizes.head_size, sizes.eps)


def _no_panels(kind: Kind) -> np.ndarray:
    return in_panels(np.zeros((WIDTH, STEP), dtype=np.float32), kind)[:0]


def _common_parts(head: Any, vocab: int, tiled: bool) -> dict[str, Any]:
    """Return the fields that `TrunkModel` and `BlockModel` share."""
    matrix = head.lm_head.weight
    return {
        "embedding": numbers_of(head.embed_tokens.weight),
        "angles": angles_of(head.rotary.angles, SHORT)[None],
        "eps": float(head.shape.sizes.eps),
        "heads": head.shape.sizes.heads,
        "last_norm": _numbers_in(head.norm),
        "head": in_panels(numbers_of(matrix), _kind_of([matrix], tiled)),
        "tokens": _NO_TOKENS if head.tokens is None else head.tokens.cpu().numpy().astype(np.int64),
        "vocab": vocab,
    }


@torch.inference_mode()
def _trunk_model(head: PairTrunk, vocab: int) -> TrunkModel:
    """Return a trunk in the form that compiled layers read."""
    known: Any = head
    shape = head.shape
    layers, kind, tiled = _weights_in(head)
    reads_pairs = shape.pairs == "attention"
    fc = in_panels(numbers_of(known.fc.weight), kind)
    norm = _NONE
    if shape.norms_features == "all":
        norm = _numbers_in(known.input_norm)
    if shape.norms_features == "each":
        norm = np.concatenate([_numbers_in(one) for one in known.fc_norm])
    features = FeatureWeights(
        reads_final=FINAL in shape.taps,
        norms=_NORMS[shape.norms_features] if reads_pairs else NO_NORM,
        norm=norm,
        each=shape.target_width,
        matrix=fc if reads_pairs else _no_panels(kind),
        width=shape.sizes.width,
        bias=_numbers_in(known.fc, "bias") if reads_pairs else _NONE,
        norm_after=_NONE,
    )
    embedding_norm = _NONE
    feature_norm = _NONE
    if reads_pairs:
        embedding_norm = _numbers_in(layers[0].input_layernorm)
        feature_norm = _numbers_in(layers[0].hidden_norm)
    if shape.pairs == "normed projection":
        embedding_norm = _numbers_in(known.enorm)
        feature_norm = _numbers_in(known.hnorm)
    first = weights_of(layers[:1], kind, _architecture_of(shape.sizes, 1))
    others = layers_of_weights(first, 0, 0)
    if len(layers) > 1:
        others = weights_of(layers[1:], kind, _architecture_of(shape.sizes, len(layers) - 1))
    return TrunkModel(
        features=features,
        rows=0,
        pairs=_PAIRS[shape.pairs],
        swaps=bool(shape.swaps) and not reads_pairs,
        norms_residual=bool(shape.norms_residual),
        feeds_normed=bool(shape.feeds_normed) and shape.norms_output,
        embedding_norm=embedding_norm,
        feature_norm=feature_norm,
        join=_no_panels(kind) if reads_pairs else fc,
        join_bias=_NONE if reads_pairs else _numbers_in(known.fc, "bias"),
        first=first,
        others=others,
        kinds=np.zeros(len(layers) - 1, dtype=np.int64),
        **_common_parts(head, vocab, tiled),
    )


@torch.inference_mode()
def _block_model(head: BlockHead, vocab: int) -> BlockModel:
    """Return a block head in the form that compiled layers read."""
    known: Any = head
    shape = head.shape
    layers, kind, tiled = _weights_in(head)
    features = FeatureWeights(
        reads_final=FINAL in shape.taps,
        norms=NO_NORM,
        norm=_NONE,
        each=shape.target_width,
        matrix=in_panels(numbers_of(known.fc.weight), kind),
        width=shape.sizes.width,
        bias=_NONE,
        norm_after=_numbers_in(known.hidden_norm),
    )
    rows = np.zeros((1, 0), dtype=np.float32)
    correction = _no_panels(kind)
    if shape.correction != "no":
        padding = (0, -shape.rank % STEP)  # zeros, as a matrix in panels takes a multiple of `STEP`
        rows = numbers_of(nn.functional.pad(known.markov_head.markov_w1.weight, padding))
        matrix = nn.functional.pad(known.markov_head.markov_w2.weight, padding)
        correction = in_panels(numbers_of(matrix), _kind_of([matrix], tiled))
    return BlockModel(
        features=features,
        mask=head.mask,
        rows=shape.rows,
        first_row=shape.first_row,
        weights=weights_of(layers, kind, _architecture_of(shape.sizes, len(layers))),
        kinds=np.zeros(len(layers), dtype=np.int64),
        correction_rows=rows,
        correction=correction,
        **_common_parts(head, vocab, tiled),
    )
