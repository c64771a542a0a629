"""Steps on the cache of one session, whether it is in a model that a CPU or a GPU runs, or in a draft head."""

from typing import Any, NamedTuple

from specbeam.core.cycles import cycles
from specbeam.core.steps import Array, compiled_as, step
from specbeam.engines.cpu.cache_steps import CacheArrays, extend_cache, has_room, rewind_cache, settle_cache
from specbeam.engines.cpu.head_steps import (
    BlockModel,
    HeadArrays,
    extend_head_cache,
    head_has_room,
    rewind_head_cache,
    settle_head_cache,
    states_of,
)
from specbeam.engines.cpu.scratch import ScratchArrays, extend_scratch, forget_scratch, scratch_has_room
from specbeam.engines.gpu.cache import GpuCacheArrays, extend_gpu_cache
from specbeam.engines.kv.steps import SIZE, STORED

AnyCacheArrays = CacheArrays | GpuCacheArrays | HeadArrays | ScratchArrays

# What does a verb for each kind of cache; where none is named, that of `CacheArrays`.
_EXTEND_BY: dict[type, Any] = {
    GpuCacheArrays: extend_gpu_cache,
    HeadArrays: extend_head_cache,
    ScratchArrays: extend_scratch,
}
_HAS_ROOM_BY: dict[type, Any] = {HeadArrays: head_has_room, ScratchArrays: scratch_has_room}
_REWIND_BY: dict[type, Any] = {HeadArrays: rewind_head_cache, ScratchArrays: forget_scratch}


def extend_any_cache(cache: AnyCacheArrays, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Call `extend_cache`, or what does it for this type of cache."""
    extend: Any = _EXTEND_BY.get(type(cache), extend_cache)
    return extend(cache, tokens, parents, wanted)


@compiled_as(extend_any_cache)
def _compiled_extend_any_cache(cache: Any, tokens: Any, parents: Any, wanted: Any) -> Any:
    extend = _EXTEND_BY.get(cache.instance_class, extend_cache)

    def call(cache: Any, tokens: Any, parents: Any, wanted: Any) -> Any:
        return extend(cache, tokens, parents, wanted)

    return call


def any_has_room(cache: AnyCacheArrays, fresh: int, beams: int) -> bool:
    """Call `has_room`, or what does it for this type of cache."""
    found: bool = _HAS_ROOM_BY.get(type(cache), has_room)(cache, fresh, beams)
    return found


@compiled_as(any_has_room)
def _compiled_any_has_room(cache: Any, fresh: Any, beams: Any) -> Any:
    return _HAS_ROOM_BY.get(cache.instance_class, has_room)


def rewind_any_cache(cache: AnyCacheArrays, nodes: int) -> None:
    """Call `rewind_cache`, or what does it for this type of cache."""
    _REWIND_BY.get(type(cache), rewind_cache)(cache, nodes)


@compiled_as(rewind_any_cache)
def _compiled_rewind_any_cache(cache: Any, nodes: Any) -> Any:
    return _REWIND_BY.get(cache.instance_class, rewind_cache)


def any_waits(cache: AnyCacheArrays) -> bool:
    """Return whether the first pass of a turn runs layers, before anything is drafted: on a scratch cache it always does."""
    if isinstance(cache, ScratchArrays):
        return True
    return bool(cache.trie.counts[SIZE] > cache.trie.counts[STORED])


@compiled_as(any_waits)
def _compiled_any_waits(cache: Any) -> Any:
    def always(cache: Any) -> bool:
        return True

    def if_pending(cache: Any) -> bool:
        return cache.trie.counts[SIZE] > cache.trie.counts[STORED]

    return always if cache.instance_class is ScratchArrays else if_pending


class SettledTurn(NamedTuple):
    """What the cache of a draft model has to know of a turn, whose forest may have held more nodes for it.

    Node k of the forest that the target scored is node names[k] of the draft model's.
    """

    tokens: Array  # int64[nodes] of the draft model's forest
    parents: Array
    start: int  # number of nodes that it began with
    scored: Array  # int64[n]: the nodes of the target's forest that it computed rows of
    names: Array
    survivors: Array  # int64[beams]: node of the draft model's forest; -1 if it was no draft
    survivor_tokens: Array
    survivor_parents: Array
    kept: Array  # int64[n], see `Verdict.kept`


def settle_draft(draft: AnyCacheArrays, target: Any, turn: SettledTurn) -> None:
    """Settle the cache of a draft model, before that of the target, of which a head reads the hidden states."""
    _SETTLE_BY.get(type(draft), _settle_model)(draft, target, turn)


@compiled_as(settle_draft)
def _compiled_settle_draft(draft: Any, target: Any, turn: Any) -> Any:
    return _SETTLE_BY.get(draft.instance_class, _settle_model)


@step
def _settle_model(draft: Any, target: Any, turn: SettledTurn) -> None:
    tree = (turn.tokens, turn.parents)
    settle_cache(draft, tree, turn.survivors, turn.survivor_tokens, turn.survivor_parents, turn.kept)


@step
def _settle_head(draft: HeadArrays, target: Any, turn: SettledTurn) -> None:
    tree = (turn.tokens, turn.parents)
    states = states_of(target, turn.scored, draft.model.features.reads_final)
    settle_head_cache(
        draft, tree, turn.start, turn.names[turn.scored], states, turn.survivors, turn.survivor_tokens,
        turn.survivor_parents, turn.kept,
    )  # fmt: skip


@step
def _settle_scratch(draft: ScratchArrays, target: Any, turn: SettledTurn) -> None:
    forget_scratch(draft, 0)


_SETTLE_BY: dict[type, Any] = {HeadArrays: _settle_head, ScratchArrays: _settle_scratch}

PASSES, CYCLES = range(2)  # indices of `spent`
EACH = -1  # in place of the number of blocks, of models that run for each layer


def blocks_made(cache: AnyCacheArrays) -> int:
    """Return the number of blocks that a block head has made for the forest; `EACH` for all other models."""
    if isinstance(cache, HeadArrays) and isinstance(cache.model, BlockModel):
        return int(cache.blocks.made[0])
    return EACH


@compiled_as(blocks_made)
def _compiled_blocks_made(cache: Any) -> Any:
    def none_made(cache: Any) -> int:
        return EACH

    def made(cache: Any) -> int:
        return cache.blocks.made[0]

    if cache.instance_class is not HeadArrays:
        return none_made
    model = cache.types[HeadArrays._fields.index("model")]
    return made if model.instance_class is BlockModel else none_made


@step
def run_pass(cache: Any, tokens: Array, parents: Array, wanted: Array, spent: Array) -> Array:
    """Run one pass of a single session, and return the logits of the `wanted` nodes, float32[wanted, vocab].

    Args:
        cache: the session's cache in the model or head, one of `AnyCacheArrays`.
        tokens, parents: int64[nodes] of the forest.
        wanted: int64[wanted], forest nodes, ascending.
        spent: int64[2]; 1 is added to the passes, unless a block head had made the blocks already, and the pass's duration
            to the cycles.
    """
    began = cycles()
    before = blocks_made(cache)
    rows = extend_any_cache(cache, tokens, parents, wanted)
    spent[PASSES] += before == EACH or blocks_made(cache) > before
    spent[CYCLES] += cycles() - began
    return rows


@step
def now() -> int:
    """Return the present count of the processor's clock, in cycles; see `core.cycles`."""
    return cycles()
