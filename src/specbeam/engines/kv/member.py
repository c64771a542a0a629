"""A base class of the caches of all engines: the place of a session in the store."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from specbeam.engines.answers import LOGITS
from specbeam.engines.kv.trie import KVTrie


class RowMember:
    """A session's cache in a model, which is in one row of the store.

    Sessions whose prompts begin with the same tokens may be in the same row, where these tokens are stored once.

    Attributes:
        row: the index of the row of the store.
        company: the caches of all sessions in this row of the store.
        leader: the cache that stores the beginning of this session's prompt too; None if there is none, or after this cache
            has taken the beginning over.
        common: number of tokens that the leader stores for this session.
        context, vectors: the context and the embeddings that the session has for this model besides tokens (see `Session`);
            None if it has none.
        early_layers: number of layers that are run ahead of the others, for drafts by the model itself; None: no layers.
        needs: what the parts of the session need of each row of a pass.
        prompt_rows: hidden states of rows before the first root, until they are handed out.
    """

    trie: KVTrie

    def __init__(self, row: int, prompt: list[int]) -> None:
        self.row = row
        self.prompt = prompt
        self.company: list[Any] = [self]
        self.leader: Any = None
        self.common = 0
        self.context: Any = None
        self.vectors: torch.Tensor | None = None
        self.early_layers: int | None = None
        self.needs = LOGITS
        self.prompt_rows: list[torch.Tensor] = []

    def follow_slots(self, source: Int64[np.ndarray, " n"], goal: Int64[np.ndarray, " n"]) -> None:
        """Follow tokens that are moved from slots to others between two turns: nothing here knows any slot."""

    @property
    def has_vectors(self) -> bool:
        """Whether any token that is not stored yet is given by embedding."""
        return self.vectors is not None and bool((self.trie.tokens[self.trie.stored :] < 0).any())
