"""Steps of compiled runs that are the same for all caches with a field `trie`."""

from typing import Any, TypeVar

from specbeam.core.passes import has_pending, has_room_for, rewind, runs_layers, settle_target
from specbeam.core.steps import Array, step
from specbeam.engines.kv.steps import KNOWN, SIZE, STORED, has_room, prune, settle

Kind = TypeVar("Kind", bound=type)


@step
def trie_has_room(cache: Any, fresh: int, beams: int) -> bool:
    """Return whether the trie has capacity for a turn; see `has_room_for`."""
    return has_room(cache.trie, fresh, beams)


@step
def trie_has_pending(cache: Any) -> bool:
    """Return whether the trie has pending nodes; see `has_pending`."""
    return cache.trie.counts[SIZE] > cache.trie.counts[STORED]


@step
def trie_runs_layers(cache: Any, nodes: int) -> bool:
    """Return whether nodes are new or pending; see `runs_layers`."""
    counts = cache.trie.counts
    return counts[SIZE] > counts[STORED] or nodes > counts[KNOWN]


@step
def settle_trie(
    cache: Any, tree: tuple[Array, Array], nodes: Array, tokens: Array, parents: Array, kept: Array
) -> None:
    """Keep the paths to the surviving beams and to kept nodes, and free the rest; see `settle_target`."""
    settle(cache.trie, tree, nodes, tokens, parents, kept)


@step
def rewind_trie(cache: Any, nodes: int) -> None:
    """Restore the cache to the beginning of the turn; see `rewind`."""
    prune(cache.trie, cache.trie.local[:nodes].copy())


def over_trie(kind: Kind) -> Kind:
    """Register these steps for a record of a cache with a field `trie`; a class decorator."""
    has_room_for.of(kind)(trie_has_room)
    has_pending.of(kind)(trie_has_pending)
    runs_layers.of(kind)(trie_runs_layers)
    settle_target.of(kind)(settle_trie)
    rewind.of(kind)(rewind_trie)
    return kind
