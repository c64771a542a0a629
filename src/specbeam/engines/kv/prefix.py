"""The prefix cache: keys and values of the beginnings of earlier prompts, for later prompts to copy."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Chunk = list[Any]  # a result of `KVStore.take`


@dataclass(eq=False)
class PromptNode:
    """A node of the tree: a chunk shared by prompts that are equal up to its end.

    Attributes:
        above: the node of the previous chunk; None for the node of a namespace.
        chunk: its keys and values; None for the node of a namespace, which has no tokens.
        name: the chunk's tokens, its key in `above.after`.
        after: the next chunks.
        size: bytes of its keys and values.
    """

    above: "PromptNode | None"
    name: Any
    chunk: Chunk | None = None
    size: int = 0
    after: dict[Any, "PromptNode"] = field(default_factory=dict)


@dataclass(eq=False)
class Beginning:
    """The position of one prompt in the tree, so that the next lookup need not begin at its first token.

    Attributes:
        namespace: the namespace within which prompts share beginnings.
        prompt: its tokens.
        tokens: number of tokens up to this position.
        node: the chunk that ends there; None at the start, and if the tree had no room for it.
    """

    namespace: str
    prompt: Sequence[int]
    tokens: int = 0
    node: PromptNode | None = None


class KnownPrompts:
    """A tree of prompt chunks of one model, with the keys and values of each chunk.

    Only whole chunks computed in one pass are stored, and they are found only at the same positions of a prompt.
    So logits after a copied beginning are bit-identical to logits after a computed one. Entries are copies, so running
    sessions do not depend on them. The least recently used entries are dropped first.

    Args:
        chunk: tokens of a chunk.
        most_bytes: maximum bytes of all keys and values together.

    Attributes:
        asked: number of prompt tokens looked up so far.
        found: number of prompt tokens found.
        dropped: number of chunks dropped to make room.
        size: bytes in use.
    """

    def __init__(self, chunk: int, most_bytes: int) -> None:
        self.chunk = chunk
        self.most_bytes = most_bytes
        self.asked = 0
        self.found = 0
        self.dropped = 0
        self.size = 0
        self._spaces: dict[str, PromptNode] = {}
        # All chunks by last use, each after the chunks that follow it in a prompt, so that the first one is a leaf.
        self._used: OrderedDict[PromptNode, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def find(self, beginning: Beginning, start: int) -> list[Chunk]:
        """Return the longest run of known chunks of a prompt from token `start`.

        It never contains the last token of the prompt, whose logits must be computed.
        """
        node = self._node(beginning, start)
        last = None
        found = []
        for name in self._names(beginning.prompt, start):
            node = None if node is None else node.after.get(name)
            if node is None:
                break
            assert node.chunk is not None
            found.append(node.chunk)
            last = node
        if last is not None:
            self._touch(last)
            beginning.tokens = start + self.chunk * len(found)
            beginning.node = last
        self.found += self.chunk * len(found)
        return found

    def keep(self, beginning: Beginning, start: int, chunk: Chunk) -> None:
        """Store the keys and values of a prompt's chunk at token `start`.

        Does nothing if the chunks before it were dropped, or if it is larger than `most_bytes`.
        """
        size = sum(int(part.nbytes) for part in chunk)
        if size > self.most_bytes:
            return
        above = self._node(beginning, start)
        if start == 0 and above is None:
            above = self._spaces[beginning.namespace] = PromptNode(None, beginning.namespace)
        beginning.tokens = start + self.chunk
        beginning.node = None
        if above is None:
            return
        name = _name(beginning.prompt[start : start + self.chunk])
        node = above.after.get(name)
        if node is None:
            node = above.after[name] = PromptNode(above, name, chunk, size)
            self.size += size
        self._touch(node)
        beginning.node = node
        while self.size > self.most_bytes:
            self._drop_one()

    def _names(self, prompt: Sequence[int], start: int) -> Iterator[bytes]:
        whole = (len(prompt) - 1) // self.chunk * self.chunk
        for place in range(start, whole, self.chunk):
            yield _name(prompt[place : place + self.chunk])

    def _node(self, beginning: Beginning, start: int) -> PromptNode | None:
        """Return the node of the first `start` tokens of a prompt; None if there is none."""
        if start and beginning.tokens == start:
            is_valid = beginning.node in self._used  # it may have been dropped, or belong to an earlier tree
            return beginning.node if is_valid else None
        node = self._spaces.get(beginning.namespace)
        for place in range(0, start, self.chunk):
            if node is None:
                return None
            node = node.after.get(_name(beginning.prompt[place : place + self.chunk]))
        return node

    def _touch(self, node: PromptNode) -> None:
        """Mark a chunk and all chunks before it as just used."""
        at: PromptNode | None = node
        while at is not None and at.chunk is not None:
            self._used[at] = None
            self._used.move_to_end(at)
            at = at.above

    def _drop_one(self) -> None:
        """Drop the least recently used chunk, which is a leaf."""
        node, _ = self._used.popitem(last=False)
        assert node.above is not None
        assert not node.after
        del node.above.after[node.name]
        self.size -= node.size
        self.dropped += 1
        if node.above.chunk is None and not node.above.after:
            del self._spaces[node.above.name]


def _name(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int64).tobytes()
