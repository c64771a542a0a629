"""The base class of all engines' session caches: a session's place in the KV store."""

from typing import Any

import torch

from specbeam.core.answers import LOGITS
from specbeam.core.records import LEARNT, ExtraInputs
from specbeam.engines.arrays import Integers
from specbeam.engines.kv.prefix import Beginning
from specbeam.engines.kv.store import RowStore
from specbeam.engines.kv.trie import KVTrie


class RowMember:
    """A session's cache in a model, in one row of the store.

    Attributes:
        row: index of the row.
        leader: another cache that stores the beginning of this session's prompt; None if there is none, or once this
            cache has taken over the beginning.
        common: number of tokens that the leader stores for this session.
        context, vectors: the session's context and embeddings for this model (see `Session`); None if missing.
        early_layers: number of first layers that draft on this cache; None: no drafts by the model's own layers.
        needs: outputs of each row that the parts of the session need.
        extra_inputs: inputs of the drafter's extra rows; None if there are none, or if they are tokens.
        has_prefix: whether the store holds the prefix of `extra_inputs`.
        prompt_rows: hidden states of rows before the first root, until they are returned.
        namespace: the namespace within which prompts share beginnings.
        recalled: `Session.recalled`.
        beginning: the position of its prompt in the tree of known prompts; None before the first lookup.
        source_row: the row of its source in the cross-attention store; -1 without a source.
    """

    trie: KVTrie

    def __init__(self, row: int, prompt: list[int]) -> None:
        self.row = row
        self.prompt = prompt
        self.leader: Any = None
        self.common = 0
        self.context: Any = None
        self.vectors: torch.Tensor | None = None
        self.early_layers: int | None = None
        self.needs = LOGITS
        self.extra_inputs: ExtraInputs | None = None
        self.has_prefix = False
        self.prompt_rows: list[torch.Tensor] = []
        self.namespace = ""
        self.recalled: dict[Any, int] = {}
        self.beginning: Beginning | None = None
        self.source_row = -1

    @property
    def prompt_whole(self) -> int:
        """The number of prompt tokens whose keys and values are stored in all layers."""
        return self.trie.prompt_stored

    def follow_slots(self, source: Integers, goal: Integers) -> None:
        """Update slot numbers after tokens were moved between two turns. This class stores none."""

    def take_extra_inputs(self, inputs: ExtraInputs | None) -> None:
        """Set the inputs of extra rows, and reserve the slots of their prefix. Call it before anything is stored."""
        self.extra_inputs = inputs
        if inputs is not None and inputs.prefix:
            self.trie.reserve_prefix(inputs.prefix)

    def keep_prefix(self, store: RowStore) -> None:
        """Write the prefix to the store, which must have room, unless it is already there."""
        inputs = self.extra_inputs
        if inputs is None or self.has_prefix or not inputs.prefix:
            return
        for layer, (keys, values) in enumerate(zip(inputs.keys, inputs.values, strict=True)):
            store.write_prefix(layer, self.row, keys, values)
        self.has_prefix = True

    def vector_of(self, token: int) -> torch.Tensor:
        """Return the embedding of a negative token, float[width]. Raises `IndexError` if there is none."""
        inputs = self.extra_inputs
        if token <= LEARNT and inputs is not None and inputs.embeddings is not None:
            return inputs.embeddings[LEARNT - token]
        if token <= LEARNT or self.vectors is None:
            raise IndexError("a token is outside the model's vocabulary")
        return self.vectors[-1 - token]

    @property
    def has_vectors(self) -> bool:
        """Whether any pending token is an embedding row."""
        return self.vectors is not None and bool((self.trie.tokens[self.trie.stored :] < 0).any())
