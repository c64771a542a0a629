"""What caches of all engines know of the row of the store that they are in."""

from typing import Any

import torch

from specbeam.engines.answers import LOGITS
from specbeam.engines.kv.trie import KVTrie


class RowMember:
    """A session in a model. Those whose prompts begin with the same tokens may be in one row, where these are stored once.

    Attributes:
        row: of the store.
        company: all members of the row.
        leader: the member that stores the beginning of this prompt, too; None if nobody does, or once it is taken over.
        common: number of tokens that the leader stores for this one.
        context, vectors: what the session gives this model besides tokens (see `Session`); None: nothing.
        early_layers: layers that are run ahead of the others, for drafts of the model itself; None: none.
        needs: what the parts of the session ask of each row of a pass.
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

    @property
    def has_vectors(self) -> bool:
        """Whether a token that is not stored yet is given by embedding."""
        return self.vectors is not None and bool((self.trie.tokens[self.trie.stored :] < 0).any())
