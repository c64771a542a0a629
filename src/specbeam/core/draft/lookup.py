"""DRAFT without a model: continue the text as it continued when its last tokens occurred before.

Nothing is drawn. But what is found depends on the text, so the drafts can be matched and not tried.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Int64

from specbeam.core.draft.retrieval import GramIndex, RetrievalSpec, find_chains, gram_index, hang_chains
from specbeam.core.forest import LOST, Forest, Siblings, siblings
from specbeam.core.limits import SPAN
from specbeam.core.lm import LM
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session

RETRIEVED = "retrieves its drafts"  # the reason why their law is not known


def retrieved_chains(session: Session, guesses: list[list[int]]) -> Forest:
    """Return a chain of guesses under each live beam, cut before the first end token or token that the constraint bans.

    Guesses that the session has kept as nodes from earlier turns get no second node.
    """
    sizes = np.array([len(chain) for chain in guesses])
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
    return hang_chains(started_forest(session), tokens, starts, stops, session.limits.ending)


def _allowed_stop(session: Session, tokens: Int64[np.ndarray, " n"], root: int, chain: tuple[int, int]) -> int:
    """Return where a chain under a root has to stop because the constraint bans a token, or a token can be no draft."""
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


def started_forest(session: Session) -> Forest:
    """Return what the forest of a turn starts with: the roots, and nodes that were kept from earlier turns."""
    start = session.start
    return Forest(start.tokens, start.parents, known=start.known)


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
    """Return a LOST group of siblings: their law is not known."""
    return siblings(LOST, [parent], tokens, nodes)


class Retrieval:
    """A base class of drafters that continue earlier occurrences of the last tokens, which an index of the text finds."""

    models: ClassVar[tuple[LM, ...]] = ()
    keeps_nodes: ClassVar[bool] = True
    no_law_reason: ClassVar[str] = RETRIEVED

    def make_index(self, room: int) -> Any:
        """Return an empty index with room for `room` tokens."""
        raise NotImplementedError

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return the chains of each session."""
        return [self._chains(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _chains(self, session: Session, shape: Shape) -> Forest:
        spec = self._spec(session)
        starts, stops = find_chains(spec, session.texts, shape.depth)
        return _hung_chains(session, spec.index.text, starts, stops)

    def spec(self, session: Session) -> RetrievalSpec | None:
        """Return how steps retrieve chains; None if the constraint of the session has to see them."""
        return None if session.warp.constraint is not None else self._spec(session)

    def _spec(self, session: Session) -> RetrievalSpec:
        head = len(session.read) + len(session.prompt)
        return RetrievalSpec(updated_index(self, session, self.make_index), head, session.limits.ending)

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the text itself is the memory."""

    def close(self, session: Session) -> None:
        """Forget the index of a session."""
        session.state.pop(self, None)


def updated_index(owner: object, session: Session, make: Callable[[int], Any]) -> Any:
    """Return the index of a session, with room for its text after a run, and with the source and the prompt in its text.

    Steps let it read the text; one that was made anew, with more room, reads all of it again.
    """
    needed = len(session.read) + len(session.prompt) + session.length + SPAN
    index = session.state.get(owner)
    if index is None or len(index.text) < needed:
        index = session.state[owner] = make(2 * needed)
        head = [*session.read, *session.prompt]
        index.text[: len(head)] = head
    return index


@dataclass(frozen=True)
class PromptLookup(Retrieval):
    """A drafter that continues the last (or first) earlier match of the last tokens (prompt lookup decoding).

    Args:
        longest: length of the longest match that is tried; if there is none, shorter ones are tried, down to one token.
        match: which of several earlier places to continue.
    """

    longest: int = 3
    match: Literal["last", "first"] = "last"

    def make_index(self, room: int) -> GramIndex:
        """Return an empty index of runs of tokens."""
        return gram_index(self.longest, self.match == "first", room)


class SuffixAutomaton:
    """An index of all substrings of a growing text, by its longest suffix that occurred before.

    The match is updated before its token is inserted, so it always refers to an earlier place. If the insertion splits the
    state of the match, the match moves to the part that is still long enough.

    Source: SAM-Decoding (arXiv 2411.10666).
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # suffix link of each state
        self._length = [0]  # length of its longest string
        self._end = [0]  # index after the first occurrence of that string
        self._last = 0  # state of the whole text
        self._state = 0  # state of the match
        self.matched = 0  # length of the match

    def add(self, token: int) -> None:
        self._state, self.matched = self._next_match(self._state, self.matched, token)
        self._insert(token)

    def matched_with(self, tail: Sequence[int]) -> tuple[int, int]:
        """Return state and length of the match of the text followed by `tail`."""
        state = self._state
        matched = self.matched
        for token in tail:
            state, matched = self._next_match(state, matched, token)
        return state, matched

    def continuation(self, most: int, tail: Sequence[int] = ()) -> list[int]:
        state, matched = self.matched_with(tail)
        return self.text[self._end[state] : self._end[state] + most] if matched else []

    def _next_match(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Return state and length of the match after one more token."""
        while state and token not in self._next[state]:
            state = self._link[state]
            matched = self._length[state]
        return (self._next[state][token], matched + 1) if token in self._next[state] else (0, 0)

    def _insert(self, token: int) -> None:
        self.text.append(token)
        new = self._new_state(self._length[self._last] + 1, len(self.text), {}, 0)
        above = self._last
        while above != -1 and token not in self._next[above]:
            self._next[above][token] = new
            above = self._link[above]
        if above != -1:
            below = self._next[above][token]
            self._link[new] = (
                below if self._length[above] + 1 == self._length[below] else self._split(above, below, token)
            )
        self._last = new

    def _split(self, above: int, below: int, token: int) -> int:
        clone = self._new_state(self._length[above] + 1, self._end[below], dict(self._next[below]), self._link[below])
        self._link[below] = clone
        while above != -1 and self._next[above].get(token) == below:
            self._next[above][token] = clone
            above = self._link[above]
        if self._state == below and self.matched <= self._length[clone]:
            self._state = clone
        return clone

    def _new_state(self, length: int, end: int, following: dict[int, int], link: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class _IndexReader:
    """An index, and the number of tokens of the session that were added to it."""

    def __init__(self, index: Any, tokens: Iterable[int]) -> None:
        self.index = index
        self.read = 0
        self.catch_up(list(tokens))

    def catch_up(self, tokens: list[int]) -> None:
        """Add the tokens of the session that are not in the index yet."""
        for token in tokens[self.read :]:
            self.index.add(token)
        self.read = len(tokens)


def _updated_index(key: Hashable, session: Session, make: Any) -> Any:
    """Return the index of a session, after adding source, prompt and the new tokens that all live beams share."""
    reader = session.state.get(key)
    if reader is None:
        reader = session.state[key] = _IndexReader(make(), [])
    reader.catch_up([*session.read, *session.prompt, *session.settled])
    return reader.index


@dataclass(frozen=True)
class SuffixMatch:
    """A drafter that continues the longest earlier match of any length; the longer the match, the longer the draft.

    Source: arXiv 2411.10666.

    Args:
        per_match: number of draft tokens per matched token, added to 1.
    """

    per_match: float = 4.0
    models: ClassVar[tuple[LM, ...]] = ()
    keeps_nodes: ClassVar[bool] = True
    no_law_reason: ClassVar[str] = RETRIEVED

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        return [self._chains(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _chains(self, session: Session, shape: Shape) -> Forest:
        index = _updated_index(self, session, SuffixAutomaton)
        chains = []
        for tail in session.tails.tolist():
            most = min(shape.depth, 1 + int(self.per_match * index.matched_with(tail)[1]))
            chains.append(index.continuation(most, tail))
        return retrieved_chains(session, chains)

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the text itself is the memory."""

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
