"""DRAFT without a model: continue the text as it continued when its last tokens occurred before.

Nothing is drawn. But what is found depends on the text, so the drafts can be matched and not tried.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int64

from specbeam.core.forest import LOST, Forest, Siblings, find_child, siblings
from specbeam.core.lm import LM
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session

RETRIEVED = "retrieves its drafts"  # the reason why their law is not known


def retrieved_chains(session: Session, guesses: list[list[int]]) -> Forest:
    """Return a chain of guesses under each live beam, cut before the first end token or token that the constraint bans.

    Guesses that the session has kept as nodes from earlier turns get no second node.
    """
    forest = started_forest(session)
    for root, chain in enumerate(guesses):
        parent = root
        for token in chain:
            if (
                token < 0  # a token of the prompt that is given by embedding
                or token in session.limits.eos
                or not permitted(session, forest, np.array([parent]), np.array([token])).all()
            ):
                break
            node = int(find_child(forest.tokens, forest.parents, parent, token))
            if node < 0:
                node = forest.size
                forest = forest.grown([token], [parent])
            forest = forest.grown([], [], groups=[retrieved([token], parent, [node])])
            parent = node
    return forest


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


@runtime_checkable
class Index(Protocol):
    """An index of a growing text, which finds what followed earlier occurrences of its last tokens."""

    def add(self, token: int) -> None:
        """Append a token to the text."""
        ...

    def continuation(self, most: int, tail: list[int]) -> list[int]:
        """Return up to `most` tokens that followed an earlier occurrence of the last tokens of the text and `tail`.

        `tail` holds the tokens of one beam that come after the text and are not added to it.
        """
        ...


class GramIndex:
    """An index of where each run of up to `longest` tokens occurred last (or first). A look-up takes O(longest) time."""

    def __init__(self, longest: int, match: Literal["last", "first"] = "last") -> None:
        self.longest = longest
        self.match = match
        self.text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # by run: the index of the token after it

    def add(self, token: int) -> None:
        place = len(self.text)
        for size in range(1, min(self.longest, place) + 1):
            run = tuple(self.text[place - size :])
            if self.match == "last" or run not in self._after:
                self._after[run] = place
        self.text.append(token)

    def continuation(self, most: int, tail: Sequence[int] = ()) -> list[int]:
        """Return up to `most` tokens that followed the longest earlier match of the last tokens."""
        last = [*self.text[-self.longest :], *tail]
        for size in range(min(self.longest, len(last)), 0, -1):
            place = self._after.get(tuple(last[-size:]))
            if place is not None:
                return self.text[place : place + most]
        return []


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
class PromptLookup:
    """A drafter that continues the last (or first) earlier match of the last tokens (prompt lookup decoding).

    Args:
        longest: length of the longest match that is tried; if there is none, shorter ones are tried, down to one token.
        match: which of several earlier places to continue.
    """

    longest: int = 3
    match: Literal["last", "first"] = "last"
    models: ClassVar[tuple[LM, ...]] = ()
    keeps_nodes: ClassVar[bool] = True
    no_law_reason: ClassVar[str] = RETRIEVED

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        return [self._chains(session, shape) for session, shape in zip(sessions, shapes, strict=True)]

    def _chains(self, session: Session, shape: Shape) -> Forest:
        index = _updated_index(self, session, self._empty)
        return retrieved_chains(session, [index.continuation(shape.depth, tail) for tail in session.tails.tolist()])

    def _empty(self) -> GramIndex:
        return GramIndex(self.longest, self.match)

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: the text itself is the memory."""

    def close(self, session: Session) -> None:
        session.state.pop(self, None)


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
