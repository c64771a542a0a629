"""SCORE: the steps of one session's cache in a model. The engine that makes a kind of cache registers its steps.

An engine whose cache is a record with the steps `extend`, `has_room_for`, `rewind` and `settle_target` takes part in
compiled runs; the bodies of the other verbs fit ordinary caches.
"""

from typing import Any, NamedTuple

import numpy as np

from specbeam.core.compiling.held import address_of_record, held_at
from specbeam.core.cycles import cycles
from specbeam.core.ranked import Ranked, whole_rows
from specbeam.core.steps import Array, step, verb

PASSES, CYCLES = range(2)  # indices of `spent`
EACH = -1  # in place of the number of blocks, for models with a pass per layer


class SettledTurn(NamedTuple):
    """A turn on the forest of a draft model, which may have more nodes than the target's, for the draft model's cache."""

    tokens: Array  # int64[nodes] of the draft model's forest
    parents: Array
    start: int  # number of nodes that it began with
    scored: Array  # int64[n]: the nodes of the target's forest whose rows it computed
    node_map: Array  # int64[nodes of the target's forest]: the same nodes in the draft model's forest
    survivors: Array  # int64[beams]: node of the draft model's forest; -1 if it was not drafted
    survivor_tokens: Array
    survivor_parents: Array
    kept: Array  # int64[n], see `Verdict.kept`


class Asked(NamedTuple):
    """The rows that a session asks a pass for: the arguments of `extend_ranked`."""

    tokens: Array  # int64[nodes] of the forest
    parents: Array
    wanted: Array  # int64[n]: forest nodes, ascending
    keys: Array  # uint64[n], see `extend_ranked`


@verb(0, has_body=False, by_address=True)
def extend(cache: Any, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Store a forest and all pending nodes, and return the logits of the `wanted` nodes, float32[wanted, vocab].

    Implements `LM.extend` for one session.

    Args:
        tokens, parents: int64[nodes] of the forest.
        wanted: int64[wanted], forest nodes, ascending.
    """


@verb(0, by_address=True)
@step
def extend_ranked(cache: Any, tokens: Array, parents: Array, wanted: Array, keys: Array, whole: bool) -> Ranked:
    """Do as `extend`, but return the rows as `Ranked`, as lists if the engine makes them for this session.

    Args:
        keys: uint64[wanted], the keys of the paths to the wanted nodes, for lists by noise.
        whole: whether whole rows are wanted in any case.
    """
    return whole_rows(extend(cache, tokens, parents, wanted))


@verb(0, by_address=True)
@step
def extend_all(like: Any, caches: list[Any], asked: list[Asked], whole: bool, spent: Array) -> list[Ranked]:
    """Return for each of many sessions the rows that it asks for; no rows if it asks for none, or its nodes are refused.

    An engine that can serve many sessions by one pass registers a step for its kind of cache.

    Args:
        like: any of the caches.
        caches: where each cache is held, see `compiling.held.address_of_record`.
        whole: see `extend_ranked`.
        spent: int64[sessions, 2], as in `run_ranked_pass`.
    """
    return extend_one_by_one(like, caches, asked, whole, spent)


@step
def extend_alone(cache: Any, tokens: Array, parents: Array, wanted: Array, keys: Array, whole: bool) -> Ranked:
    """Implement `extend_ranked` by `extend_all` of a single session."""
    spent = np.zeros((1, 2), dtype=np.int64)
    return extend_all(cache, [address_of_record(cache)], [Asked(tokens, parents, wanted, keys)], whole, spent)[0]


@verb(0, by_address=True)
@step
def whole_rows_again(cache: Any, known: Ranked, nodes: Array) -> Ranked:
    """Return the whole rows of stored nodes whose rows a pass has returned before, maybe as lists.

    Args:
        known: the rows as they were returned.
        nodes: int64[n], forest nodes.
    """
    return known


@verb(0, has_body=False, by_address=True)
def has_room_for(cache: Any, fresh: int, beams: int) -> bool:  # type: ignore[empty-body]
    """Return whether a cache has capacity for a turn of `fresh` new forest nodes that leaves at most `beams` beams."""


@verb(0, has_body=False, by_address=True)
def rewind(cache: Any, nodes: int) -> None:
    """Restore a cache to the beginning of the turn, whose forest started with `nodes` nodes."""


@verb(0, has_body=False, by_address=True)
def settle_target(
    cache: Any, tree: tuple[Array, Array], nodes: Array, tokens: Array, parents: Array, kept: Array
) -> None:
    """Keep the paths to the surviving beams and to kept nodes in the target's cache, and free the rest.

    Args:
        tree: tokens and parents of the turn's forest.
        nodes, tokens, parents: int64[beams] of the survivors: forest node (-1 if it was not drafted), token, parent node.
        kept: int64[n], see `Verdict.kept`.
    """


@verb(0, by_address=True)
@step
def settle_draft(draft: Any, target: Any, turn: SettledTurn) -> None:
    """Settle the cache of a draft model, before that of the target, whose hidden states a head reads."""
    tree = (turn.tokens, turn.parents)
    settle_target(draft, tree, turn.survivors, turn.survivor_tokens, turn.survivor_parents, turn.kept)


@verb(0, by_address=True)
def has_pending(cache: Any) -> bool:
    """Return whether the first pass of a turn has to run layers for earlier tokens."""
    return True


@verb(0, by_address=True)
def runs_layers(cache: Any, nodes: int) -> bool:
    """Return whether a pass over a forest of `nodes` nodes runs the layers of the model."""
    return True


@verb(0, by_address=True)
def keep_only(cache: Any, nodes: Array) -> None:
    """Remove all nodes stored in this turn except `nodes`, int64[n], which ascend."""
    return


@verb(0, by_address=True)
def blocks_made(cache: Any) -> int:
    """Return the number of blocks that a block head has made for the forest; `EACH` for all other models."""
    return EACH


@step
def run_ranked_pass(
    cache: Any, tokens: Array, parents: Array, wanted: Array, keys: Array, whole: bool, spent: Array
) -> Ranked:
    """Run one pass of a single session, and return the rows of the `wanted` nodes; see `extend_ranked`.

    Args:
        cache: the session's cache in the model or head.
        spent: int64[2]; the passes grow by 1, unless a block head had made the blocks already, and the cycles by the time
            of the pass.
    """
    began = cycles()
    before = blocks_made(cache)
    rows = extend_ranked(cache, tokens, parents, wanted, keys, whole)
    spent[PASSES] += before == EACH or blocks_made(cache) > before
    spent[CYCLES] += cycles() - began
    return rows


@step
def extend_one_by_one(like: Any, caches: list[Any], asked: list[Asked], whole: bool, spent: Array) -> list[Ranked]:
    """Return the rows of many sessions, by one pass after the other; see `extend_all`."""
    found = []
    for number in range(len(asked)):
        one = asked[number]
        rows = whole_rows(np.empty((0, 0), dtype=np.float32))
        if len(one.wanted) > 0:
            cache = held_at(caches[number], like)
            rows = run_ranked_pass(cache, one.tokens, one.parents, one.wanted, one.keys, whole, spent[number])
        found.append(rows)
    return found


@step
def now() -> int:
    """Return the cycle counter of the processor; see `core.cycles`."""
    return cycles()
