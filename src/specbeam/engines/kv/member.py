"""A base class of the caches of all engines: the place of a session in the store."""

from typing import Any

import torch

from specbeam.core.answers import LOGITS
from specbeam.core.records import LEARNT, ExtraInputs
from specbeam.engines.arrays import Integers
from specbeam.engines.kv.prefix import Beginning
from specbeam.engines.kv.store import KVStore
from specbeam.engines.kv.trie import KVTrie


class RowMember:
    """A session's cache in a model, which is in one row of the store.

    Sessions whose prompts begin with the same tokens may be in the same row, where these tokens are stored once.

    Attributes:
        row: the index of the row of the store.
        row_caches: the caches of all sessions in this row of the store.
        leader: the cache that stores the beginning of this session's prompt too; None if there is none, or after this cache
            has taken the beginning over.
        common: number of tokens that the leader stores for this session.
        context, vectors: the context and the embeddings that the session has for this model besides tokens (see `Session`);
            None if it has none.
        early_layers: number of layers that are run ahead of the others, for drafts by the model itself; None: no layers.
        needs: outputs of each row that the parts of the session need.
        extra_inputs: inputs of the drafter's extra rows; None if there are none, or if they are tokens.
        has_prefix: whether the store holds the prefix of `extra_inputs`.
        prompt_rows: hidden states of rows before the first root, until they are handed out.
        namespace: whose prompts it shares beginnings with.
        recalled: `Session.recalled` of the session, if it has any.
        beginning: the part of its prompt found among known ones; None before it was looked up.
        source_row: the row of the store of sources that the session reads; -1 if it reads none, or before it has one.
    """

    trie: KVTrie

    def __init__(self, row: int, prompt: list[int]) -> None:
        self.row = row
        self.prompt = prompt
        self.row_caches: list[Any] = [self]
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

    def follow_slots(self, source: Integers, goal: Integers) -> None:
        """Follow tokens that are moved from slots to others between two turns: nothing here knows any slot."""

    def take_extra_inputs(self, inputs: ExtraInputs | None) -> None:
        """Take the inputs of extra rows, and reserve the slots of their prefix. Call it before anything is stored."""
        self.extra_inputs = inputs
        if inputs is not None and inputs.prefix:
            self.trie.reserve_prefix(inputs.prefix)

    def keep_prefix(self, store: KVStore) -> None:
        """Write the prefix to the store, which must have room, unless it is there already."""
        inputs = self.extra_inputs
        if inputs is None or self.has_prefix or not inputs.prefix:
            return
        for layer, (keys, values) in enumerate(zip(inputs.keys, inputs.values, strict=True)):
            store.write_prefix(layer, self.row, keys, values)
        self.has_prefix = True

    def vector_of(self, token: int) -> torch.Tensor:
        """Return the embedding that a negative number stands for, float[width]; raise `IndexError` if there is none."""
        inputs = self.extra_inputs
        if token <= LEARNT and inputs is not None and inputs.embeddings is not None:
            return inputs.embeddings[LEARNT - token]
        if token <= LEARNT or self.vectors is None:
            raise IndexError("a token is beyond those of the model")
        return self.vectors[-1 - token]

    @property
    def has_vectors(self) -> bool:
        """Whether any token that is not stored yet is given by embedding."""
        return self.vectors is not None and bool((self.trie.tokens[self.trie.stored :] < 0).any())
