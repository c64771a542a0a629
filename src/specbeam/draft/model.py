"""DRAFT: beams drafted by a small language model, one layer per pass."""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from specbeam.choice import Choice, choose
from specbeam.draft.model_fast import Draft, draft_at_once
from specbeam.errors import BrokenProcessor, DeadEnd
from specbeam.forest import Forest, Group
from specbeam.laws import Coarse, JointLaw, Pairs, candidates, running
from specbeam.lm.base import LM
from specbeam.probs import joint_law
from specbeam.records import Beams, Shape, Turn
from specbeam.session import Session

Rows = Float[torch.Tensor, "beams vocab"]


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
    layers: int = 0
    undecided: Rows | None = None  # logits of the front, where they are known already

    @classmethod
    def start(cls, session: Session, shape: Shape) -> "Growing":
        front = session.beams
        return cls(session, shape, Forest.rooted(front.tokens), front, np.ones(len(front), dtype=bool))

    @property
    def wants(self) -> bool:
        return self.layers < self.shape.depth and len(self.front) > 0 and self.session.failure is None

    def take_over(self, draft: Draft) -> None:
        self.forest, self.front, self.core, self.layers = draft.forest, draft.front, draft.core, draft.layers
        self.undecided = draft.undecided
        self.session.count.draft_passes += draft.passes

    def law(self, rows: Rows) -> JointLaw:
        return joint_law(rows, self.front.scores, self.front.counts, self.session.warp, self.paths)

    def paths(self) -> Int64[np.ndarray, "beams length"]:
        return self.session.paths(self.forest, self.front.nodes)

    def coarse(self, vocab: int) -> Coarse:
        """The noise of the front."""
        return lambda: self.session.coarse_noise(self.front.keys, vocab)

    def hang(self, choice: Choice, group: Group, nodes: Int64[np.ndarray, " pairs"], counts: np.ndarray) -> None:
        """A layer of drawn pairs; ends have no node."""
        layer = Beams(nodes, choice.tokens, choice.scores, counts, choice.keys)
        core, parents = np.arange(len(nodes)) < choice.core, choice.parents
        if choice.ends.any():
            going = ~choice.ends
            layer, core, parents = layer.pick(going), core[going], parents[going]
        self.forest = self.forest.grown(layer.tokens, self.front.nodes[parents], groups=(group,))
        self.front, self.core, self.layers = layer, core, self.layers + 1


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
    at_once: bool = field(default=True, repr=False)  # False: layer by layer, as the oracle of the loop

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        growing = [Growing.start(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        if len(growing) == 1:
            self._ahead(growing[0])
        while active := [one for one in growing if one.wants]:
            for one, logits in zip(active, self._rows(active), strict=True):
                with one.session.failing_alone("draft model: "):
                    try:
                        self._grow(one, logits)
                    except (DeadEnd, BrokenProcessor):  # on a draft's path; the target need not go there
                        one.front = one.front.pick(np.zeros(0, dtype=np.int64))
        return [one.forest for one in growing]

    def by_loops(self, session: Session) -> bool:
        """Whether a loop may draft for it."""
        return self.at_once and not self.search and (self.coupling == "noise" or session.warp.greedy)

    def _ahead(self, one: Growing) -> None:
        """What a loop can draft without looking at anything else."""
        if self.by_loops(one.session):
            draft = draft_at_once(self.lm, one.session, one.shape, self.beams)
            if draft is not None:
                one.take_over(draft)

    def _rows(self, active: list[Growing]) -> list[Rows]:
        if active[0].undecided is not None:  # then it is alone
            known, active[0].undecided = active[0].undecided, None
            return [known]
        for one in active:
            one.session.count.draft_passes += 1
        return self.lm.extend([one.session for one in active], [one.forest for one in active])

    def settle(self, session: Session, turn: Turn) -> None:
        self.lm.settle(session, turn)

    def close(self, session: Session) -> None:
        self.lm.close(session)

    def _grow(self, one: Growing, logits: Rows) -> None:
        if self.coupling == "noise" or one.session.warp.greedy:
            choice = self._by_noise(one, logits)
            counts = np.ones_like(choice.tokens)
            draws: slice | np.ndarray = slice(None)
        else:
            choice, draws, counts = _by_dice(one, one.law(logits), self.replacement)
        nodes = np.arange(len(one.forest), len(one.forest) + len(choice.tokens))
        if choice.ends.any():
            nodes = np.where(choice.ends, -1, len(one.forest) - 1 + (~choice.ends).cumsum())
        law = None if one.session.warp.greedy else choice.law
        parents, tokens = choice.parents[draws], choice.tokens[draws]
        one.hang(choice, Group(one.front.nodes, parents, tokens, nodes[draws], law, self.replacement), nodes, counts)

    def _by_noise(self, one: Growing, logits: Rows) -> Choice:
        """Core first, then halo. Any choice is lawful: the target's own choice does not look at it."""
        if self.search:
            return self._by_search(one, one.law(logits))
        width, session = one.shape.width, one.session
        return choose(
            logits, one.front, session.warp, one.paths, min(self.beams, width), width, one.core, session.limits,
            one.coarse(logits.shape[1]),
        )  # fmt: skip

    def _by_search(self, one: Growing, law: JointLaw) -> Choice:
        limits, width = one.session.limits, one.shape.width
        keys, coarse = None if one.session.warp.greedy else one.front.keys, one.coarse(law.vocab)
        looked = candidates(self.beams, len(limits.eos))
        pairs = law.best(looked, keys, coarse, among=one.core)
        core = pairs[running(law, pairs, limits.ends(pairs % law.vocab), min(self.beams, width))]
        every = law.best(width + len(limits.eos) * law.beams, keys, coarse)
        pairs, many = law.chosen(core, every[~limits.ends(every % law.vocab)], width)
        return Choice.of(pairs, law, one.front.keys, limits, many)


def _merged(drawn: Pairs) -> tuple[Pairs, Int64[np.ndarray, " draws"], Int64[np.ndarray, " _"]]:
    """Distinct pairs in the order of their first draw; which of them each draw is; how often each was drawn."""
    pairs, first, which, counts = np.unique(drawn, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return pairs[order], place[which], counts[order]


def _by_dice(
    one: Growing, law: JointLaw, replacement: bool
) -> tuple[Choice, Int64[np.ndarray, " draws"], Int64[np.ndarray, " pairs"]]:
    """The pairs that were drawn, which of them each draw is, and how often each was drawn."""
    pairs = drawn = _drawn(one, law, replacement)
    draws, counts = np.arange(len(drawn)), np.ones_like(drawn)
    if replacement:
        pairs, draws, counts = _merged(drawn)
    return Choice.of(pairs, law, one.front.keys, one.session.limits, len(drawn)), draws, counts


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
