"""A block of guesses after the text that COrAL refines: windows of the target's own pass vote on each of its tokens.

One turn is one refinement. The drafter passes the block on as a chain, and the target scores it. Then the windows of the
root and of the block's tokens, which look ahead and behind, vote on all tokens of the block; the rule accepts the first
tokens on which they agree, one more token by the votes, and keeps the other votes as the next block.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specbeam.core.draft.lookup import retrieved_chains
from specbeam.core.errors import NotSupported
from specbeam.core.forest import Forest
from specbeam.core.laws.reduce import SOUND, condition_of_norm
from specbeam.core.lm import LM
from specbeam.core.records import Needs, Scored, Shape, Turn, Verdict
from specbeam.core.session import Session
from specbeam.core.verify.walk import WalkInputs, checked, emitted_layers, norm_of, row_at, start_walk
from specbeam.models.heads.hidden_transfer import HiddenTransfer
from specbeam.models.heads.window import TextWindows, offsets_of

REASON = "refines its drafts by votes"  # the reason why their law is unknown
# Weights of votes fall by these factors per token of distance, as in the authors' program: steeply ahead, where votes are
# guesses, and slowly behind.
FALL_AHEAD = math.exp(-8)
FALL_BEHIND = math.exp(-1 / 8)
NEAREST_BEHIND = -2  # the vote behind with the largest weight: two tokens after the token it votes on
# Epsilon of eta sampling: a vote supports a token of at least this probability, or a smaller one if its law is flat.
TYPICAL = 0.1


@dataclass(eq=False)
class RefinedBlock:
    """The state of a text between two turns.

    Attributes:
        windows: the windows of the text.
        tokens: guesses of the next tokens, without the root.
        ages: for each of them, the number of passes that it has survived unchanged.
    """

    windows: TextWindows
    tokens: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class BlockOfGuesses:
    """A drafter that passes on the block that the last turn has left; in the first turn there is none."""

    models: ClassVar[tuple[LM, ...]] = ()
    no_law_reason: ClassVar[str] = REASON

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return each session's block as a chain, cut before the first end token."""
        return [self._chain(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _chain(self, session: Session, shape: Shape) -> Forest:
        block: RefinedBlock | None = session.state.get(RefinedBlock)
        guesses = [] if block is None else block.tokens[: shape.depth]
        return retrieved_chains(session, [guesses])

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the rule has changed the block."""

    def close(self, session: Session) -> None:
        """Free the block of a session."""
        session.state.pop(RefinedBlock, None)


@dataclass(frozen=True, eq=False)
class RefinementRule:
    """Accept the first tokens of a block on which the windows agree, and one token more by their votes.

    A token of the block is accepted if all tokens before it are, if the votes do not change it, if at least `threshold` of
    the weight of the next-token law and of the windows behind supports it, and if it has survived `refinements` passes. The
    token after the accepted ones is emitted as it is voted now, so each pass emits a token. Nothing is drawn.

    Law: approximate: none is stated.
    Source: arXiv 2410.09675, sec. 3.

    Args:
        head: the head of the windows.
        size: maximum number of tokens of a block.
        ahead, behind: number of tokens ahead and behind that the windows predict.
    """

    most_beams: ClassVar[int] = 1
    head: HiddenTransfer
    size: int
    ahead: int
    behind: int
    threshold: float
    refinements: int

    @property
    def needs(self) -> Needs:
        """The logits of all rows, and the states in which they enter the windows' layers."""
        return Needs(logits=True, taps=(self.head.layer,), prompt=True)

    def verify(self, session: Session, forest: Forest, scored: Scored) -> Verdict:
        """Return the verdict on a block. Raises `NotSupported` for processors, which the windows would not see."""
        if not session.warp.takes_raw_rows:
            raise NotSupported(
                "coral votes with windows that logits processors and grammars do not reach; leave these out, or take "
                "another method"
            )
        inputs = WalkInputs.of(session, forest, scored.logits)
        walk = start_walk(forest.size + 1)
        condition = int(condition_of_norm(norm_of(row_at(inputs.rows, 0))))
        if condition == SOUND:
            tokens = self._refine(session, forest.tokens[1:], scored)
            accepted = len(tokens) - 1
            nodes = np.append(np.arange(1, accepted + 1), -1)
            inputs.emit(walk, session, tokens, nodes, nodes > 0)
        return Verdict(checked(emitted_layers(walk), condition, session, scored.logits))

    def _refine(
        self, session: Session, guesses: Int64[np.ndarray, " guesses"], scored: Scored
    ) -> Int64[np.ndarray, " emitted"]:
        """Return the tokens to emit, and replace the block by the votes on the tokens after them."""
        block: RefinedBlock | None = session.state.get(RefinedBlock)
        weight = next(self.head.target.parameters())
        states = scored.hidden.to(weight)
        if block is None:
            block = session.state[RefinedBlock] = RefinedBlock(TextWindows(self.head))
            block.windows.append(scored.prompt.to(weight))
        windows = block.windows.logits(states, self.ahead, self.behind)
        logits = torch.cat([scored.logits.to(weight)[:, None], windows], 1)
        voting = Voting.of(logits.float().log_softmax(-1), self.ahead, self.behind, self.size)
        best = voting.best()
        count = len(guesses)
        kept = best[:count] == guesses
        ages = np.where(kept, np.array(block.ages[:count], dtype=np.int64) + 1, 0)
        is_supported = voting.support(torch.from_numpy(guesses).to(weight.device)) >= self.threshold
        passes = kept & is_supported & (ages >= self.refinements)
        accepted = int(np.cumprod(passes).sum())
        block.windows.append(states[: accepted + 1])
        block.tokens = best[accepted + 1 :].tolist()
        block.ages = [*ages[accepted + 1 :].tolist(), *[0] * (len(best) - count)][: len(block.tokens)]
        return best[: accepted + 1]


@dataclass(frozen=True, eq=False)
class Voting:
    """The votes of a root and the tokens of a block on the tokens after the root.

    Attributes:
        logp: float[rows, votes, vocab], log-probabilities: each row's next-token law, then the laws of its window.
        places: int64[rows, votes], the token that a vote is about, counted from 0 after the root; -1: none.
        weights: float[votes].
        reliable: bool[votes], the next-token law and the votes behind.
    """

    logp: Float[Tensor, "rows votes vocab"]
    places: Int64[Tensor, "rows votes"]
    weights: Float[Tensor, " votes"]
    reliable: Tensor

    @classmethod
    def of(cls, logp: Float[Tensor, "rows votes vocab"], ahead: int, behind: int, size: int) -> "Voting":
        """Return the votes of the windows of all rows on a block of at most `size` tokens."""
        device = logp.device
        offsets = torch.tensor([0, *offsets_of(ahead, behind)], device=device)
        places = torch.arange(len(logp), device=device)[:, None] + offsets
        places = torch.where((places >= 0) & (places < size), places, -1)
        distance = torch.where(offsets >= 0, offsets, (offsets + 1 - NEAREST_BEHIND).abs())
        fall = torch.where(offsets >= 0, FALL_AHEAD, FALL_BEHIND)
        return cls(logp, places, fall.to(logp) ** distance, offsets <= 0)

    def best(self) -> Int64[np.ndarray, " block"]:
        """Return the likeliest token of each place, by the weighted mean of the votes' log-probabilities."""
        is_vote = self.places >= 0
        places = self.places[is_vote]
        weights = self.weights.expand_as(is_vote)[is_vote]
        size = int(places.max()) + 1
        total = self.logp.new_zeros(size, self.logp.shape[-1])
        total.index_add_(0, places, self.logp[is_vote] * weights[:, None])
        best: Int64[np.ndarray, " block"] = total.argmax(-1).cpu().numpy()  # dividing by the weight changes no order
        return best

    def support(self, tokens: Int64[Tensor, " block"]) -> Float[np.ndarray, " block"]:
        """Return for each token of a block the share of the weight of its reliable votes that supports it.

        A vote supports tokens of at least the probability min(epsilon, sqrt(epsilon) exp(-entropy)).
        """
        is_vote = (self.places >= 0) & (self.places < len(tokens)) & self.reliable
        places = self.places[is_vote]
        logp = self.logp[is_vote]
        weights = self.weights.expand_as(is_vote)[is_vote]
        entropy = -(logp.exp() * logp).sum(-1)
        least = (math.sqrt(TYPICAL) * (-entropy).exp()).clamp_max(TYPICAL)
        found = logp.gather(1, tokens[places][:, None])[:, 0].exp() >= least
        share = weights.new_zeros(len(tokens)).index_add_(0, places, weights * found)
        whole = weights.new_zeros(len(tokens)).index_add_(0, places, weights)
        return (share / whole).cpu().numpy()
