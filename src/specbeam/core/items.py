"""Items: a trie of token lists, and the processor that allows only these lists.

A state of the trie is an integer: the root is 0, and edge k leads to state k + 1, so a state needs no pointer to itself. The
tokens below a state are adjacent and ascending. The items below a state are adjacent in the order of their tokens, so a
subset of the items needs one running sum and no trie of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Integer, UInt8

from specbeam.core.constraint import Constrained
from specbeam.core.errors import BadSetting
from specbeam.core.steps import Array, step

NOWHERE = -1  # in place of a state: after a token that is not allowed
ALL = np.zeros(0, dtype=np.int32)  # `Items.counts` of the whole catalogue


class ItemTrie(NamedTuple):
    """A trie of items as flat arrays: about 20 bytes per state."""

    tokens: Array  # int32[edges]: the token of each edge, ascending below each state
    first: Array  # int32[states + 1]: the first edge below each state
    items: Array  # int32[states]: the item that is complete at each state; -1 for none
    low: Array  # int32[states]: the place of the first item below each state, in the order of tokens
    high: Array  # int32[states]: the place after the last one
    head: Array  # int32[largest token + 1]: the state after each first token; 0 for none


class Items(NamedTuple):
    """A trie, and a subset of its items."""

    trie: ItemTrie
    counts: Array  # int32[items + 1]: number of items of the subset before each place; no entries: all items


def trie_of(tokens: Integer[np.ndarray, "items longest"]) -> tuple[ItemTrie, Int64[np.ndarray, " items"]]:
    """Return the trie of items, and the number of the item at each place of the order of tokens.

    Args:
        tokens: the tokens of each item, a row per item, with -1 after the last token.

    Raises `BadSetting` if an item is empty, or if two items have the same tokens.
    """
    count, longest = tokens.shape
    order = np.lexsort(tokens.T[::-1]) if longest else np.arange(count)
    rows = tokens[order].astype(np.int32)
    lengths = (rows >= 0).sum(1)
    if count and lengths.min() == 0:
        raise BadSetting(f"item {order[int(lengths.argmin())]} of the catalogue has no tokens; leave it out")
    differs = np.ones(count, dtype=bool)
    if count > 1:
        differs[1:] = (rows[1:] != rows[:-1]).any(1)
    if not differs.all():
        second = int((~differs).argmax())
        raise BadSetting(
            f"items {order[second - 1]} and {order[second]} of the catalogue have the same tokens "
            f"{rows[second, : lengths[second]].tolist()[:8]}; an answer could not say which one it means: leave one out"
        )
    above = np.zeros(count, dtype=np.int64)  # the state of each row's prefix
    is_new = np.zeros(count, dtype=bool)
    edge_tokens: list[np.ndarray] = []
    edge_parents: list[np.ndarray] = []
    lows = [np.zeros(1, dtype=np.int64)]
    highs = [np.full(1, count)]
    complete = [np.full(1, -1)]
    states = 1
    for level in range(longest):
        column = rows[:, level]
        has = column >= 0
        is_new[1:] |= column[1:] != column[:-1]
        is_new[0] = True
        starts = np.flatnonzero(is_new & has)
        if len(starts) == 0:
            break
        edge_tokens.append(column[starts])
        edge_parents.append(above[starts])
        number = np.cumsum(is_new & has) - 1
        below = states + number
        last = np.bincount(number[has], minlength=len(starts))
        lows.append(starts)
        highs.append(starts + last)
        is_complete = lengths[starts] == level + 1
        complete.append(np.where(is_complete, order[starts], -1))
        above = np.where(has, below, above)
        states += len(starts)
    parents = np.concatenate(edge_parents) if edge_parents else np.zeros(0, dtype=np.int64)
    trie = ItemTrie(
        np.concatenate([np.zeros(0, dtype=np.int32), *edge_tokens]),
        np.searchsorted(parents, np.arange(states + 1)).astype(np.int32),
        np.concatenate(complete).astype(np.int32),
        np.concatenate(lows).astype(np.int32),
        np.concatenate(highs).astype(np.int32),
        _head(edge_tokens[0] if edge_tokens else np.zeros(0, dtype=np.int32)),
    )
    return trie, order


def _head(tokens: Array) -> Array:
    """Return the state after each first token, int32[largest token + 1]."""
    head = np.zeros(int(tokens.max(initial=-1)) + 1, dtype=np.int32)
    head[tokens] = np.arange(1, len(tokens) + 1)
    return head


@step
def is_alive(items: Items, state: int) -> bool:
    """Return whether any item of the subset is at or below a state."""
    if len(items.counts) == 0:
        return True
    return items.counts[items.trie.high[state]] > items.counts[items.trie.low[state]]


@step
def is_item(items: Items, state: int) -> bool:
    """Return whether an item of the subset is complete at a state; it is the first one below the state."""
    if items.trie.items[state] < 0:
        return False
    if len(items.counts) == 0:
        return True
    low = items.trie.low[state]
    return items.counts[low + 1] > items.counts[low]


@step
def state_after(items: Items, state: int, token: int) -> int:
    """Return the state after a token; NOWHERE if the token is not allowed."""
    trie = items.trie
    if state < 0 or token < 0:
        return NOWHERE
    found = NOWHERE
    if state == 0:
        if token < len(trie.head) and trie.head[token] > 0:
            found = trie.head[token]
    else:
        low = trie.first[state]
        high = trie.first[state + 1]
        while low < high:
            middle = (low + high) // 2
            if trie.tokens[middle] < token:
                low = middle + 1
            else:
                high = middle
        if low < trie.first[state + 1] and trie.tokens[low] == token:
            found = low + 1
    return found if found > 0 and is_alive(items, found) else NOWHERE


@step
def states_after(items: Items, paths: Array) -> Array:
    """Return the state after each path of tokens, int64[paths]; NOWHERE after a token that is not allowed.

    Args:
        paths: int64[paths, length].
    """
    states = np.zeros(len(paths), dtype=np.int64)
    for path in range(len(paths)):
        state = 0
        for token in paths[path]:
            state = state_after(items, state, token)
        states[path] = state
    return states


@step
def states_below(items: Items, roots: Array, tokens: Array, parents: Array) -> Array:
    """Return the state after each forest node, int64[nodes].

    Args:
        roots: int64[beams], the states of the live beams, which are the first nodes.
        tokens, parents: of the forest.
    """
    states = np.empty(len(tokens), dtype=np.int64)
    for node in range(len(tokens)):
        above = parents[node]
        states[node] = roots[node] if above < 0 else state_after(items, states[above], tokens[node])
    return states


@step
def ban_others(items: Items, rows: Array, states: Array, eos: Array) -> None:
    """Set the logits of all tokens to -inf that do not continue an item, in place.

    An end token is allowed exactly where an item is complete. Rows after NOWHERE stay as they are.

    Args:
        rows: float[rows, vocab].
        states: int64[rows].
        eos: int64[ends].
    """
    trie = items.trie
    vocab = rows.shape[1]
    for row in range(len(rows)):
        state = states[row]
        if state < 0:
            continue
        start = trie.first[state]
        stop = trie.first[state + 1]
        values = np.empty(stop - start, dtype=rows.dtype)
        for edge in range(start, stop):
            token = trie.tokens[edge]
            is_open = token < vocab and is_alive(items, edge + 1)
            values[edge - start] = rows[row, token] if is_open else -np.inf
        ends = np.empty(len(eos), dtype=rows.dtype)
        for place in range(len(eos)):
            ends[place] = rows[row, eos[place]] if eos[place] < vocab else -np.inf
        rows[row] = -np.inf
        for edge in range(start, stop):
            if trie.tokens[edge] < vocab:
                rows[row, trie.tokens[edge]] = values[edge - start]
        for place in range(len(eos)):
            if eos[place] < vocab:
                rows[row, eos[place]] = ends[place] if is_item(items, state) else -np.inf


@step
def allowed_bits(items: Items, states: Array, eos: Array, vocab: int) -> Array:
    """Return a bit per token, 1 if it is allowed after each state, uint8[states, bytes]; all tokens after NOWHERE."""
    trie = items.trie
    bits = np.zeros((len(states), (vocab + 7) // 8), dtype=np.uint8)
    for row in range(len(states)):
        state = states[row]
        if state < 0:
            bits[row] = 255
            continue
        for edge in range(trie.first[state], trie.first[state + 1]):
            token = trie.tokens[edge]
            if token < vocab and is_alive(items, edge + 1):
                bits[row, token >> 3] |= np.uint8(1 << (token & 7))
        for token in eos:
            if token < vocab:
                bit = np.uint8(1 << (token & 7))
                bits[row, token >> 3] &= ~bit
                if is_item(items, state):
                    bits[row, token >> 3] |= bit
    return bits


class ItemWalker:
    """A position in a trie, which moves forward and back by tokens; see `core.constraint.Walker`."""

    def __init__(self, items: Items, states: Sequence[int] = (0,)) -> None:
        self.items = items
        self.states = list(states)

    def take(self, token: int) -> None:
        self.states.append(int(state_after(self.items, self.states[-1], token)))

    def back(self, tokens: int) -> None:
        del self.states[len(self.states) - tokens :]

    def copy(self) -> "ItemWalker":
        return ItemWalker(self.items, self.states)


class ItemConstraint:
    """The constraint to the items of a trie, or to a subset of them; see `core.constraint.Constraint`.

    Args:
        subset: bool[items] in the order of tokens; None: all items.
        vocab: number of tokens of the model.
    """

    def __init__(self, trie: ItemTrie, subset: Bool[np.ndarray, " items"] | None, vocab: int) -> None:
        counts = ALL
        if subset is not None:
            counts = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(subset, dtype=np.int32)])
        self.items = Items(trie, counts)
        self.vocab = vocab

    def start(self) -> ItemWalker:
        return ItemWalker(self.items)

    def allowed(self, walkers: Sequence[ItemWalker]) -> UInt8[np.ndarray, "walkers bytes"]:
        states = np.array([walker.states[-1] for walker in walkers], dtype=np.int64)
        found: UInt8[np.ndarray, "walkers bytes"] = allowed_bits(
            self.items, states, np.zeros(0, dtype=np.int64), self.vocab
        )
        return found

    def complete(self, walkers: Sequence[ItemWalker]) -> list[bool]:
        return [walker.states[-1] >= 0 and bool(is_item(self.items, walker.states[-1])) for walker in walkers]

    def processor(self, eos: tuple[int, ...], prompt_length: int, name: str) -> "ConstrainedToItems":
        """Return the logits processor of one session; see `Constrained`."""
        return ConstrainedToItems(self, eos, prompt_length, name)


class ConstrainedToItems(Constrained):
    """The constraint of one session to items; see `Constrained`. A position is an integer, so nothing is remembered."""

    def __init__(self, constraint: ItemConstraint, eos: tuple[int, ...], prompt_length: int, name: str) -> None:
        super().__init__(constraint, eos, prompt_length, name)
        self.items = constraint.items
        self.ends = np.array(eos, dtype=np.int64)
        self.roots = np.zeros(1, dtype=np.int64)  # the states of the live beams

    def __call__(
        self, input_ids: Int64[torch.Tensor, "paths length"], scores: Float[torch.Tensor, "paths vocab"]
    ) -> Float[torch.Tensor, "paths vocab"]:
        paths = np.ascontiguousarray(input_ids[:, self.prompt_length :].cpu().numpy())
        rows = (
            scores.detach().cpu().float().clone().numpy() if scores.dtype != torch.float64 else scores.clone().numpy()
        )
        ban_others(self.items, rows, states_after(self.items, paths), self.ends)
        return torch.from_numpy(rows).to(scores.device, scores.dtype)

    def allowed(self, paths: Int64[np.ndarray, "paths length"], vocab: int) -> Bool[np.ndarray, "paths vocab"]:
        bits = allowed_bits(self.items, states_after(self.items, np.ascontiguousarray(paths)), self.ends, vocab)
        return np.unpackbits(bits, axis=1, count=vocab, bitorder="little").view(bool)

    def allowed_below(
        self,
        tokens: Int64[np.ndarray, " nodes"],
        parents: Int64[np.ndarray, " nodes"],
        wanted: Int64[np.ndarray, " rows"],
        vocab: int,
    ) -> UInt8[np.ndarray, "rows bytes"]:
        states = states_below(self.items, self.roots, tokens, parents)
        found: UInt8[np.ndarray, "rows bytes"] = allowed_bits(self.items, states[wanted], self.ends, vocab)
        return found

    def ban_below(
        self,
        rows: Float[np.ndarray, "rows vocab"],
        tokens: Int64[np.ndarray, " nodes"],
        parents: Int64[np.ndarray, " nodes"],
        wanted: Int64[np.ndarray, " rows"],
    ) -> None:
        """Ban in place what `allowed_below` does not allow."""
        states = states_below(self.items, self.roots, tokens, parents)
        ban_others(self.items, rows, states[wanted], self.ends)

    def permits(
        self, paths: Int64[np.ndarray, "paths length"], tokens: Int64[np.ndarray, " paths"]
    ) -> Bool[np.ndarray, " paths"]:
        states = states_after(self.items, np.ascontiguousarray(paths[:, self.prompt_length :]))
        allowed = np.ones(len(states), dtype=bool)
        for place, (state, token) in enumerate(zip(states.tolist(), tokens.tolist(), strict=True)):
            if state >= 0:
                is_end = token in self.eos
                allowed[place] = is_item(self.items, state) if is_end else state_after(self.items, state, token) > 0
        return allowed

    def keep(self, paths: Int64[np.ndarray, "beams length"]) -> None:
        self.roots = states_after(self.items, np.ascontiguousarray(paths))

    def forget(self, most: int) -> None:
        """Do nothing: a position is an integer."""

    def __len__(self) -> int:
        return len(self.roots)
