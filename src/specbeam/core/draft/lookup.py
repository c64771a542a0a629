"""DRAFT without a model: repeat what followed an earlier occurrence of the last tokens.

Nothing is drawn, but the drafts depend on the text, so they can be matched but not tried.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Int64

from specbeam.core.draft.indexes import GramIndex, gram_index
from specbeam.core.draft.retrieval import RetrievalSpec, find_chains, hang_chains
from specbeam.core.draft.suffixes import SuffixIndex, suffix_index
from specbeam.core.errors import BadForest
from specbeam.core.forest import LOST, Forest, Siblings, siblings
from specbeam.core.limits import SPAN
from specbeam.core.lm import LM
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session

RETRIEVED = "retrieves its drafts"  # the reason why their law is unknown


def retrieved_chains(session: Session, guesses: list[list[int]]) -> Forest:
    """Return a chain of guesses under each live beam, cut before the first end token or banned token.

    Guesses that are already nodes, kept from earlier turns, get no second node. Raises `BadForest` unless there is a list
    for each live beam, empty if there is no guess; several chains under a beam are a tree (`Forest.grown`).
    """
    beams = session.beams.size
    if len(guesses) != beams:
        raise BadForest(
            f"{len(guesses)} chains for {beams} live beams; give a list of tokens for each, [] for no guess"
        )
    sizes = np.array([len(chain) for chain in guesses], dtype=np.int64)
    stops = np.cumsum(sizes)
    tokens = np.array([token for chain in guesses for token in chain], dtype=np.int64)
    return _hung_chains(session, tokens, stops - sizes, stops)


def _hung_chains(
    session: Session,
    tokens: Int64[np.ndarray, " n"],
    starts: Int64[np.ndarray, " beams"],
    stops: Int64[np.ndarray, " beams"],
) -> Forest:
    """Return chains of the tokens from starts[k] to before stops[k] under live beam k; see `retrieved_chains`."""
    if session.warp.constraint is not None:
        stops = np.array(
            [_allowed_stop(session, tokens, *chain) for chain in enumerate(zip(starts, stops, strict=True))]
        )
    return hang_chains(session.undrafted, tokens, starts, stops, session.limits.ending)


def _allowed_stop(session: Session, tokens: Int64[np.ndarray, " n"], root: int, chain: tuple[int, int]) -> int:
    """Return the index at which a chain under a root stops: before a banned token, an end token or an embedding."""
    start, stop = chain
    forest = Forest.rooted(session.beams.tokens)
    parent = root
    for place in range(start, stop):
        token = int(tokens[place])
        can_be_drafted = token >= 0 and token not in session.limits.eos
        if not can_be_drafted or not permitted(session, forest, np.array([parent]), np.array([token])).all():
            return place
        forest = forest.grown([token], [parent])
        parent = forest.size - 1
    return stop


def permitted(
    session: Session, forest: Forest, parents: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]
) -> Bool[np.ndarray, " n"]:
    """Return whether the constraint allows each token after its parent; all parents must have the same depth.

    Retrieved drafts are matched, so leaving any of them out does not change the law of the output.
    """
    if session.warp.constraint is not None:
        with session.failing_alone("draft: "):
            return session.permits(forest, parents, tokens)
    return np.full(len(tokens), session.failure is None)


def retrieved(tokens: list[int], parent: int, nodes: list[int]) -> Siblings:
    """Return a LOST group of siblings."""
    return siblings(LOST, [parent], tokens, nodes)


class Retrieval:
    """A base class of drafters that continue earlier occurrences of the last tokens, which an index of the text finds."""

    models: ClassVar[tuple[LM, ...]] = ()
    keeps_nodes: ClassVar[bool] = True
    no_law_reason: ClassVar[str] = RETRIEVED

    def make_index(self, room: int) -> Any:
        """Return an empty index with capacity for `room` tokens."""
        raise NotImplementedError

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return the chains of each session."""
        return [self._chains(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _chains(self, session: Session, shape: Shape) -> Forest:
        spec = self._spec(session)
        starts, stops = find_chains(spec, session.texts, shape.depth)
        return _hung_chains(session, spec.index.text, starts, stops)

    def spec(self, session: Session) -> RetrievalSpec | None:
        """Return how steps retrieve chains; None if the session has a constraint, which has to see them."""
        return None if session.warp.constraint is not None else self._spec(session)

    def _spec(self, session: Session) -> RetrievalSpec:
        offset = len(session.read) + len(session.prompt)
        return RetrievalSpec(updated_index(self, session, self.make_index), offset, session.limits.ending)

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the text is the memory."""

    def close(self, session: Session) -> None:
        """Free the index of a session."""
        session.state.pop(self, None)


def updated_index(owner: object, session: Session, make: Callable[[int], Any]) -> Any:
    """Return the index of a session, with capacity for the text of a run; its text begins with source and prompt.

    Steps add the generated tokens; if a larger index replaces a full one, all tokens are added again.
    """
    needed = len(session.read) + len(session.prompt) + session.length + SPAN
    index = session.state.get(owner)
    if index is None or len(index.text) < needed:
        index = session.state[owner] = make(2 * needed)
        before = [*session.read, *session.prompt]
        index.text[: len(before)] = before
    return index


@dataclass(frozen=True)
class PromptLookup(Retrieval):
    """A drafter that continues the last (or first) earlier match of the last tokens (prompt lookup decoding).

    Args:
        longest: length of the longest match to look for; shorter ones follow, down to one token.
        match: which match to continue if there are several.
    """

    longest: int = 3
    match: Literal["last", "first"] = "last"

    def make_index(self, room: int) -> GramIndex:
        """Return an empty index of runs of tokens."""
        return gram_index(self.longest, self.match == "first", room)


@dataclass(frozen=True)
class SuffixMatch(Retrieval):
    """A drafter that continues the longest earlier match of any length; the longer the match, the longer the draft.

    Source: arXiv 2411.10666.

    Args:
        per_match: number of draft tokens per matched token, added to 1.
    """

    per_match: float = 4.0

    def make_index(self, room: int) -> SuffixIndex:
        """Return an empty suffix automaton."""
        return suffix_index(self.per_match, room)
