"""A head as a draft model: it scores the forests of drafters from the hidden states that the target has had."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specbeam.core.forest import Forest
from specbeam.errors import NotSupported
from specbeam.heads.cache import PairCache, PairRows
from specbeam.heads.trunk import PairTrunk
from specbeam.lm.base import checked_needs
from specbeam.records import FINAL, Needs, Scored, Turn
from specbeam.session import CacheOwner


@dataclass(frozen=True)
class StoredPairs:
    """A prompt in the cache of a head, on which its passes are timed."""

    lm: "TrunkLM"
    session: Any

    def pass_s(self, rows: int) -> float:
        """Return the seconds of a pass over `rows` rows, which are taken back after it."""
        root = Forest.rooted(self.session.prompt[-1:])
        nodes = np.arange(rows, dtype=np.int64)
        forest = root.grown(nodes % self.lm.vocab, np.zeros_like(nodes))
        began = time.perf_counter()
        (scored,) = self.lm.extend([self.session], [forest])
        scored.logits[:1, :1].cpu()  # waits for a device
        seconds = time.perf_counter() - began
        self.session.state[self.lm].rewind(1)
        return seconds


class TrunkLM:
    """A pair trunk as a draft model (see `LM`).

    In the first turn of a session the target has scored nothing yet, so there is nothing to draft from: the drafters leave
    it out (`is_ready`).

    Args:
        trunk: the head.
        vocab: number of tokens of the target.
        tokens: int64[draft_vocab], which tokens of the target the head's are, ascending; None: the same.

    Attributes:
        needs_of_target: what the target has to hand out for the head.
        passes: number of passes of the head so far.
    """

    keeps_nodes = True
    max_positions: int | None = None

    def __init__(self, trunk: PairTrunk, vocab: int, tokens: Int64[Tensor, " draft_vocab"] | None = None) -> None:
        self.trunk = trunk.eval()
        self.vocab = vocab
        self.tokens = tokens
        taps = tuple(tap for tap in trunk.shape.taps if tap != FINAL)
        self.needs_of_target = Needs(hidden=FINAL in trunk.shape.taps, prompt=True, taps=taps)
        self.device = trunk.fc.weight.device
        self.passes = 0
        self.curves: dict[int, Any] = {}  # cost of a pass by the length of the context; see `tune`

    def is_ready(self, session: CacheOwner) -> bool:
        """Return whether the head can draft for a session: its prompt was scored, and has no rows by embedding."""
        return self in session.state and min(session.prompt) >= 0

    @torch.inference_mode()
    def extend(
        self, sessions: Sequence[CacheOwner], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        """See `LM.extend`. Sessions that are not ready get rows in which all tokens are alike."""
        if any(need.states or need.ranked for need in checked_needs(self, len(sessions), needs)):
            raise NotSupported(f"{type(self).__name__} gives logits only, and a part needs more of its draft model")
        caches = [session.state.get(self) for session in sessions]
        wanted = [None if cache is None else cache.enter(forest) for cache, forest in zip(caches, forests, strict=True)]
        while rows := [found for cache in caches if cache is not None and (found := cache.next_rows())]:
            self._run(rows)
        answers = []
        for cache, nodes, forest in zip(caches, wanted, forests, strict=True):
            if cache is None or nodes is None:
                answers.append(Scored(torch.zeros(forest.size, self.vocab)))
            else:
                answers.append(Scored(self._logits(cache.states[torch.from_numpy(nodes).to(self.device)])))
        return answers

    def _run(self, rows: list[PairRows]) -> None:
        """Compute the head's states of some rows of each session, in one pass."""
        self.passes += 1
        feeds = [one.feed for one in rows]
        slices = [slice(*ends) for ends in pairwise(accumulate((len(feed) for feed in feeds), initial=0))]
        tokens = torch.from_numpy(np.concatenate([feed.tokens for feed in feeds])).to(self.device)
        positions = torch.from_numpy(np.concatenate([feed.positions for feed in feeds])).to(self.device)
        features = torch.cat([one.features for one in rows])
        own = self.trunk.fed_back(torch.cat([one.states for one in rows]))
        is_scored = torch.cat([one.is_scored for one in rows])
        given = torch.where(is_scored[:, None], features, own)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            parts = [
                one.attend(layer, queries[here], keys[here], values[here])
                for one, here in zip(rows, slices, strict=True)
            ]
            return torch.cat(parts)

        states = self.trunk(tokens, given, positions, attend)
        for one, here in zip(rows, slices, strict=True):
            one.cache.learn(len(one.feed), states[here])

    def _logits(self, states: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Return logits of all tokens of the target, float32; those that the head does not know have -inf."""
        known = self.trunk.logits(states).float()
        if self.tokens is None:
            return known
        rows = known.new_full((len(known), self.vocab), -torch.inf)
        rows[:, self.tokens] = known
        return rows

    @torch.inference_mode()
    def settle(self, session: CacheOwner, turn: Turn) -> None:
        """Take the target's hidden states of a turn, and keep what the surviving beams need."""
        cache: PairCache | None = session.state.get(self)
        if cache is None:
            shape = self.trunk.shape
            cache = PairCache(session.prompt, self._features(turn.scored.prompt), shape.sizes, shape.layers)
            session.state[self] = cache
        cache.settle(turn, self._features(turn.scored.hidden))

    def _features(self, states: Float[Tensor, "rows states"]) -> Float[Tensor, "rows width"]:
        """Return the features of rows of the target, from its hidden states; there may be no rows at all."""
        size = len(self.trunk.shape.taps) * self.trunk.shape.target_width
        return self.trunk.features(states.to(self.device).reshape(-1, size))

    @contextmanager
    def stored(self, length: int) -> "Iterator[StoredPairs]":
        """Yield a made-up prompt of `length` tokens, on which passes are timed."""
        width = self.trunk.shape.sizes.width
        prompt = [(7 * place + 3) % self.vocab for place in range(length)]
        features = torch.zeros(length - 1, width, device=self.device, dtype=self.trunk.fc.weight.dtype)
        shape = self.trunk.shape
        session: Any = SimpleNamespace(prompt=prompt, state={})
        session.state[self] = PairCache(prompt, features, shape.sizes, shape.layers)
        self.extend([session], [Forest.rooted(prompt[-1:])])
        yield StoredPairs(self, session)

    def peak(self, session: CacheOwner) -> int:
        """Return the largest number of rows of the session that were stored at the same time."""
        cache: Any = session.state.get(self)
        return 0 if cache is None else cache.trie.peak

    def close(self, session: CacheOwner) -> None:
        """Forget a session."""
        session.state.pop(self, None)
