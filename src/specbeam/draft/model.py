"""DRAFT: beams drafted by a small language model, one layer per pass."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from specbeam.dice import child_keys
from specbeam.errors import BrokenProcessor, DeadEnd
from specbeam.forest import Forest, Group
from specbeam.laws import Choice, Coarse, JointLaw, Pairs, candidates, running
from specbeam.lm.base import LM
from specbeam.probs import joint_law
from specbeam.records import Beams, Shape, Turn
from specbeam.session import Session


@dataclass(frozen=True)
class NoDraft:
    """Plain decoding: the roots alone."""

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        return [Forest.rooted(session.beams.tokens) for session in sessions]

    def settle(self, session: Session, turn: Turn) -> None:
        """Nothing to remember."""

    def close(self, session: Session) -> None:
        """Nothing to forget."""


@dataclass(eq=False)
class Growing:
    """One session's forest while it is drafted."""

    session: Session
    shape: Shape
    forest: Forest
    front: Beams  # the newest layer, without the beams that ended
    core: Bool[np.ndarray, " beams"]  # those that the draft model itself would have kept

    @classmethod
    def start(cls, session: Session, shape: Shape) -> "Growing":
        front = session.beams
        return cls(session, shape, Forest.rooted(front.tokens), front, np.ones(len(front), dtype=bool))

    def wants(self, layer: int) -> bool:
        return layer < self.shape.depth and len(self.front) > 0 and self.session.failure is None

    def law(self, rows: Float[torch.Tensor, "beams vocab"]) -> JointLaw:
        front, session = self.front, self.session
        return joint_law(
            rows, front.scores, front.counts, session.warp, lambda: session.paths(self.forest, front.nodes)
        )


@dataclass(frozen=True)
class BeamDrafter:
    """Beam sampling on the draft model, from the target's carried scores, in the session's own warp.

    Args:
        lm: the draft model.
        beams: how many beams the target keeps. With shared noise, that many draft pairs per layer are what the draft
            model would keep by itself (core); the rest of the layer are the next best (halo), whatever its truncation cut.
        coupling: "noise" drafts by the noise that the target will use; "rejection" draws and states its law.
        replacement: independent draws instead of draws without replacement (coupling "rejection" only).
        search: draft for transformers' beam modes, in which a beam that ends makes room for the next one: ends are not
            drafted.
    """

    lm: LM
    beams: int
    coupling: str = "noise"
    replacement: bool = False
    search: bool = False

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        growing = [Growing.start(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        for layer in range(max(shape.depth for shape in shapes)):
            active = [one for one in growing if one.wants(layer)]
            if not active:
                break
            rows = self.lm.extend([one.session for one in active], [one.forest for one in active])
            for one, logits in zip(active, rows, strict=True):
                one.session.count.draft_passes += 1
                with one.session.failing_alone("draft model: "):
                    try:
                        self._grow(one, one.law(logits))
                    except (DeadEnd, BrokenProcessor):  # on a draft's path; the target need not go there
                        one.front = one.front.pick(np.zeros(0, dtype=np.int64))
        return [one.forest for one in growing]

    def settle(self, session: Session, turn: Turn) -> None:
        self.lm.settle(session, turn)

    def close(self, session: Session) -> None:
        self.lm.close(session)

    def _grow(self, one: Growing, law: JointLaw) -> None:
        front, greedy = one.front, one.session.warp.greedy
        if self.coupling == "noise" or greedy:
            drawn, core, logj = self._by_noise(one, law)
        else:
            drawn = _drawn(one, law, self.replacement)
            core, logj = len(drawn), law.logj_at(drawn)
        pairs, draws, counts = drawn, np.arange(len(drawn)), np.ones_like(drawn)
        if self.replacement:
            pairs, draws, counts = _merged(drawn)
            logj = law.logj_at(pairs)
        parents, tokens = np.divmod(pairs, law.vocab)
        going = ~one.session.limits.ends(tokens)
        nodes = np.where(going, len(one.forest) - 1 + going.cumsum(), -1)
        known = None if greedy else law
        group = Group(front.nodes, parents[draws], tokens[draws], nodes[draws], known, self.replacement)
        layer = Beams(nodes, tokens, logj, counts, child_keys(front.keys[parents], tokens))
        is_core = np.arange(len(pairs)) < core
        if not going.all():
            layer, is_core, parents = layer.pick(going), is_core[going], parents[going]
        one.forest = one.forest.grown(layer.tokens, front.nodes[parents], groups=(group,))
        one.front, one.core = layer, is_core

    def _by_noise(self, one: Growing, law: JointLaw) -> Choice:
        """Core first, then halo. Any choice is lawful: the target's own choice does not look at it."""
        keys = None if one.session.warp.greedy else one.front.keys
        coarse = lambda: one.session.coarse_noise(one.front.keys, law.vocab)  # noqa: E731
        width = one.shape.width
        if self.search:
            return self._by_search(one, law, keys, coarse)
        return law.core_and_halo(min(self.beams, width), width, keys, coarse, one.core)

    def _by_search(self, one: Growing, law: JointLaw, keys: np.ndarray | None, coarse: Coarse) -> Choice:
        ends, width = one.session.limits.eos, one.shape.width
        looked = candidates(self.beams, len(ends))
        pairs = law.best(looked, keys, coarse, among=one.core)
        ended = one.session.limits.ends(pairs % law.vocab)
        core = pairs[running(law, pairs, ended, min(self.beams, width))]
        every = law.best(width + len(ends) * law.beams, keys, coarse)
        return law.chosen(core, every[~one.session.limits.ends(every % law.vocab)], width)


def _merged(drawn: Pairs) -> tuple[Pairs, Int64[np.ndarray, " draws"], Int64[np.ndarray, " _"]]:
    """Distinct pairs in the order of their first draw; which of them each draw is; how often each was drawn."""
    pairs, first, which, counts = np.unique(drawn, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return pairs[order], place[which], counts[order]


def _drawn(one: Growing, law: JointLaw, replacement: bool) -> np.ndarray:
    """Pairs in draw order."""
    support = law.support
    left = (law.p.ravel() if support is None else np.exp(law.logp_at(support))).copy()
    count = one.shape.width if replacement else min(one.shape.width, law.size)
    places: list[int] = []
    for _ in range(count):
        if not left.any():  # what is left has odds too small for a float
            break
        places.append(one.session.dice.pick(left))
        if not replacement:
            left[places[-1]] = 0.0
    return np.array(places, dtype=np.int64) if support is None else support[places]
