"""Draft models of heads that add extra rows to the target's passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.records import LEARNT, NO_EXTRA_ROWS, ExtraRows, Needs, Turn
from specbeam.core.session import CacheOwner, Session
from specbeam.engines.families import positions_of
from specbeam.models.heads.arrays import AnyNodes, Logits, Nodes, Rows
from specbeam.models.heads.cache import NodeCache
from specbeam.models.heads.extra_rows import ExtraHead
from specbeam.models.heads.lm import HeadLM, TimedPrompt


class ExtraCache(NodeCache):
    """The cache of one session: the logits of the extra rows below each live node that had some when it was scored.

    Args:
        prompt: the tokens of the prompt; only the last one is read.
        device: the device of the logits.

    Attributes:
        rows: float[rows, vocab] by local node.
        fresh: the same for the nodes that the target has scored in this turn.
    """

    def __init__(self, prompt: list[int], device: torch.device) -> None:
        # The top of the trie represents all tokens before the last one; only timed passes draft from it.
        super().__init__(prompt[-1:], torch.zeros(1, 0, device=device), np.array([True, False]))
        self.rows: dict[int, Tensor] = {}
        self.fresh: list[Tensor | None] = []

    def note_scored(self, nodes: Nodes) -> None:
        self.rows |= {node: rows for node, rows in zip(nodes.tolist(), self.fresh, strict=True) if rows is not None}
        self.fresh = []

    def keep(self, former: Nodes) -> None:
        """See `NodeCache.keep`. Kept rows are copied, so that the rest of a pass can be freed."""
        self.rows = {
            node: self.rows[before].clone() for node, before in enumerate(former.tolist()) if before in self.rows
        }
        super().keep(former)

    @property
    def can_draft(self) -> bool:
        """Whether any root has logits to draft from."""
        roots = self.trie.root_at.tolist()
        nearest = [root if self.is_scored[root] else self.scored_above(root)[0] for root in roots]
        return any(node in self.rows for node in nearest)


class _Groups:
    """Key in a session's state of the nodes with extra rows in the current pass, and the number of rows of each."""


class ExtraLM(HeadLM):
    """A head of extra rows as a draft model: it adds extra rows below the nodes of each forest.

    If a text continues from a node without extra rows, the next turn makes no drafts.

    Args:
        least: nodes get extra rows if the draft's probability of the path to them is at least this, or unknown; 0: all nodes
            do. Roots always get some.

    Attributes:
        missed: number of turns after which there was nothing to draft from.
    """

    head: ExtraHead
    reads_prompt = False

    def __init__(self, head: ExtraHead, vocab: int, least: float = 0.0, engine: str = "auto") -> None:
        super().__init__(head, vocab, engine)
        self.needs_of_target = Needs(logits=True)
        self.extra_inputs = head.inputs
        self.least = least
        self.missed = 0
        self.positions = positions_of(head.target.config.get_text_config())
        self._variants: dict[float, ExtraLM] = {least: self}

    @property
    def bytes_read(self) -> int:
        """Zero, because its rows are part of the target's passes."""
        return 0

    def choosing(self, least: float) -> "ExtraLM":
        """Return this draft model with another `least`."""
        if least not in self._variants:
            variant = ExtraLM(self.head, self.vocab, least)
            variant._variants = self._variants
            self._variants[least] = variant
        return self._variants[least]

    def is_ready(self, session: CacheOwner) -> bool:
        """Return whether there are logits to draft from."""
        cache: ExtraCache | None = session.state.get(self)
        return cache is not None and cache.can_draft

    def extra_rows(self, session: Session, forest: Forest) -> ExtraRows:
        """Return the extra rows that the target scores with a forest: a chain under each chosen node."""
        nodes = self._chosen(session, forest)
        position = len(session.prompt) - 1 + session.length + forest.depths()[nodes]
        counts = np.full(len(nodes), self.head.depth)
        if self.positions is not None:
            counts = np.minimum(counts, np.maximum(self.positions - 1 - position, 0))
        session.state[_Groups, self] = (np.searchsorted(_scored(forest), nodes), counts)
        if counts.sum() == 0:
            return NO_EXTRA_ROWS
        kinds = np.concatenate([np.arange(count) for count in counts])
        above = forest.size + np.arange(len(kinds)) - 1
        return ExtraRows(LEARNT - kinds, np.where(kinds == 0, np.repeat(nodes, counts), above))

    def _chosen(self, session: Session, forest: Forest) -> Nodes:
        """Return the nodes that get extra rows: likely nodes that no pass has scored yet."""
        nodes = _scored(forest)
        cache: ExtraCache | None = session.state.get(self)
        if cache is not None:  # roots that were drafts have been scored by an earlier turn
            before = np.flatnonzero(cache.is_scored[cache.trie.root_at])
            nodes = nodes[~np.isin(nodes, before)]
        if self.least == 0 or len(forest.logq) == 0:
            return nodes
        logq = forest.logq[nodes]
        is_likely = np.isnan(logq) | (logq >= np.log(self.least))
        return nodes[is_likely | (forest.parents[nodes] < 0)]

    def new_cache(self, prompt: list[int], features: Rows) -> ExtraCache:
        return ExtraCache(prompt, features.device)

    @torch.inference_mode()
    def settle(self, session: CacheOwner, turn: Turn) -> None:
        """Store the logits of the extra rows of a turn, and keep the rows that drafts below surviving beams read."""
        if self not in session.state:
            session.state[self] = ExtraCache(session.prompt, self.device)
        cache: ExtraCache = session.state[self]
        places, counts = session.state.pop((_Groups, self))
        scored = len(turn.scored_nodes)
        cache.fresh = [None] * scored
        if counts.sum():
            assert turn.scored.extra is not None
            rows = turn.scored.extra.logits.split(counts.tolist())
            for place, own in zip(places.tolist(), rows, strict=True):
                cache.fresh[place] = own if len(own) else None
        cache.settle(turn, torch.zeros(scored, 0, device=self.device))
        self.missed += len(cache.trie.root_at) > 0 and not cache.can_draft

    def logits(self, caches: list[Any], wanted: list[AnyNodes]) -> list[Logits]:
        """See `HeadLM.logits`. If the nearest scored node had no extra rows, all logits are -inf."""
        self.passes += 1
        nothing = torch.full((self.vocab,), -torch.inf, device=self.device)
        found = []
        for cache, nodes in zip(caches, wanted, strict=True):
            rows = nothing.repeat(len(nodes), 1)
            for row, node in enumerate(nodes.tolist()):
                above, far = cache.scored_above(node)
                own = cache.rows.get(above)
                if own is not None:
                    rows[row] = own[min(far, len(own)) - 1]
            found.append(rows)
        return found

    @contextmanager
    def stored(self, length: int) -> Iterator[TimedPrompt]:
        """Yield a made-up prompt to time the reading of logits, which does not depend on the length.

        The extra rows themselves are part of the target's pass.
        """
        prompt = [7 % self.vocab]
        session: Any = SimpleNamespace(prompt=prompt, state={})
        cache = ExtraCache(prompt, self.device)
        cache.rows[0] = torch.zeros(self.head.depth, self.vocab, device=self.device)
        session.state[self] = cache
        self.extend([session], [Forest.rooted(prompt)])
        yield TimedPrompt(self, session)


def _scored(forest: Forest) -> Nodes:
    """Return the nodes of a forest that the target scores: the nodes whose rows are not known."""
    return unknown_nodes(0, forest.size, forest.known.nodes)
