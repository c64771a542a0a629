"""DRAFT: blocks of tokens that a denoiser unmasks in several steps (SpecDiff, arXiv 2408.05636).

All drafts of a block begin as masks. Each step computes the law of each mask, given the known tokens, and replaces some
masks by tokens. So a token may be drawn before tokens to its left, which then depend on it. A rule that tries drafts
needs the law of a token given the tokens to its left, which differs from the law that it was drawn from: such drafts
can only be matched. If masks become tokens from left to right, or all in one step, each token is drawn from its law
given the tokens to its left, and can be tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.draft.lookup import permitted
from specbeam.core.forest import CHOSEN, INDEPENDENT, LOST, Forest, Siblings, siblings
from specbeam.core.laws.rows import RowLaw, best_token
from specbeam.core.laws.warp import on_host, row_laws
from specbeam.core.lm import LM, fill_prompts
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session

MASK = -1

Order = Literal["confidence", "random", "left to right"]
ORDERS: tuple[Order, ...] = ("confidence", "random", "left to right")


@runtime_checkable
class Denoising(Protocol):
    """The interface of a denoiser, in addition to that of a language model."""

    @property
    def block_depth(self) -> int:
        """The number of drafts of a block."""
        ...

    def denoised(
        self, sessions: Sequence[Session], forests: Sequence[Forest], known: Sequence[Int64[np.ndarray, "_ _"]]
    ) -> list[Float[torch.Tensor, "_ _ vocab"]]:
        """Return logits of the drafts below the roots of forests, given the known drafts of each root."""
        ...


@dataclass(eq=False)
class MaskedBlocks:
    """The blocks below the roots of a session while they are unmasked."""

    session: Session
    tokens: Int64[np.ndarray, "roots drafts"]  # or MASK
    laws: dict[tuple[int, int], RowLaw] = field(default_factory=dict)  # the laws of drawn tokens, by root and place

    @property
    def forest(self) -> Forest:
        """The roots."""
        return Forest.rooted(self.session.beams.tokens)

    @property
    def is_going(self) -> bool:
        """Whether there are masks, and nothing has failed."""
        return bool((self.tokens == MASK).any()) and self.session.failure is None


@dataclass(frozen=True)
class Unmasking:
    """A drafter of one chain below each beam, unmasked in several steps of one model pass each.

    Each step unmasks an equal share of the remaining masks, rounded up.

    Args:
        lm: the denoiser.
        steps: number of steps.
        order: the order of masks: by the probability of their likeliest tokens ("confidence"), at random ("random"), or
            "left to right".
        drawn: True: tokens are drawn from their laws; False: they are the likeliest.
    """

    lm: Any  # an `LM` that is `Denoising`
    steps: int
    order: Order = "confidence"
    drawn: bool = True

    @property
    def models(self) -> tuple[LM, ...]:
        """The models that it runs."""
        return (self.lm,)

    @property
    def no_law_reason(self) -> str:
        """The reason why the law of the drafts is unknown; "" if it is known."""
        return no_law_reason(self.steps, self.order, self.drawn)

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return a chain below each live beam of each session, of at most the length of a block."""
        blocks = [self._masked(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        for step in range(self.steps):
            going = [block for block in blocks if block.is_going]
            if not going:
                break
            for block in going:
                block.session.count.draft_passes += 1
            answers = self.lm.denoised(
                [block.session for block in going],
                [block.forest for block in going],
                [block.tokens for block in going],
            )
            for block, rows in zip(going, answers, strict=True):
                with block.session.failing_alone("draft model: "):
                    self._unmask(block, rows, self.steps - step)
        return [self._chains(block) for block in blocks]

    def _masked(self, session: Session, shape: Shape) -> MaskedBlocks:
        """Return the blocks of a session with all drafts masked."""
        drafts = min(shape.depth, self.lm.block_depth)
        return MaskedBlocks(session, np.full((session.beams.size, drafts), MASK, dtype=np.int64))

    def _unmask(self, block: MaskedBlocks, rows: Float[torch.Tensor, "roots drafts vocab"], left: int) -> None:
        """Replace some masks of each block by tokens, with `left` steps left."""
        for root in range(len(block.tokens)):
            masks = np.flatnonzero(block.tokens[root] == MASK)
            if len(masks) == 0:
                continue
            logits = on_host(rows[root])[masks]
            laws = row_laws(logits, block.session.warp)
            count = math.ceil(len(masks) / left)
            for which in self._first(block.session, laws, count):
                law = laws[which]
                if law is not None:
                    block.tokens[root, masks[which]] = self._token(block.session, law, logits[which])
                    block.laws[root, int(masks[which])] = law

    def _first(self, session: Session, laws: list[RowLaw | None], count: int) -> list[int]:
        """Return the masks that become tokens in this step, given their laws."""
        if self.order == "left to right" or count == len(laws):
            return list(range(count))
        if self.order == "confidence":
            most = np.array([-np.inf if law is None else law.logp.max() for law in laws])
            return np.argsort(-most, kind="stable")[:count].tolist()
        left = np.ones(len(laws))
        chosen = []
        for _ in range(count):
            chosen.append(int(session.dice.pick(left)))
            left[chosen[-1]] = 0.0
        return chosen

    def _token(self, session: Session, law: RowLaw, row: Float[np.ndarray, " vocab"]) -> int:
        """Return the token that a mask becomes; at temperature 0 the likeliest."""
        if self.drawn and not session.warp.greedy:
            return law.token(session.dice.pick(law.p))
        return int(best_token(row))

    def _chains(self, block: MaskedBlocks) -> Forest:
        """Return the forest of unmasked chains. Ends and banned tokens get no node, and end their chain."""
        session = block.session
        forest = block.forest
        for root, tokens in enumerate(block.tokens.tolist()):
            parent = root
            for place, token in enumerate(tokens):
                if token == MASK or session.failure is not None:
                    break
                goes_on = token not in session.limits.eos and bool(
                    permitted(session, forest, np.array([parent]), np.array([token])).all()
                )
                node = forest.size if goes_on else -1
                group = self._group(session, parent, token, node, block.laws[root, place])
                forest = forest.grown([token] if goes_on else [], [parent] if goes_on else [], groups=[group])
                if not goes_on:
                    break
                parent = node
        return forest

    def _group(self, session: Session, parent: int, token: int, node: int, law: RowLaw) -> Siblings:
        """Return a draft as a group of siblings, with its law if it is known."""
        if session.warp.greedy or not self.drawn:
            return siblings(CHOSEN, [parent], [token], [node])
        if self.no_law_reason:
            return siblings(LOST, [parent], [token], [node])
        stated = law.tokens if len(law.tokens) else np.arange(law.size)
        return siblings(INDEPENDENT, [parent], [token], [node], law=(stated, law.p), vocab=law.vocab)

    def fill(self, sessions: list[Session], most: int) -> list[bool]:
        """Store the next chunk of up to `most` long prompts; return whether each session may take a turn."""
        return fill_prompts(self.lm, sessions, None, most)

    def settle(self, session: Session, turn: Turn) -> None:
        """Settle the denoiser's cache."""
        self.lm.settle(session, turn)

    def close(self, session: Session) -> None:
        """Free the denoiser's state for the session."""
        self.lm.close(session)


def no_law_reason(steps: int, order: Order, drawn: bool) -> str:
    """Return why the law of these drafts is unknown, as the predicate of a sentence "RECIPE ..."; "" if it is known."""
    if not drawn or steps == 1 or order == "left to right":
        return ""
    return "draws tokens before those to their left, so their law given these is not known"
