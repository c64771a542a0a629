"""DRAFT for best-first search: the best open prefixes of the agenda, and drafts of the prefixes that come next.

A drafter runs the same search ahead: below a prefix whose target row is missing, the draft model's log-probabilities stand
in for the target's. The forest has the prefixes that this search would expand, so it is broad where many prefixes compete
and deep where one leads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from specbeam.core.agenda import ROOT, Agenda, agenda_of, log_law
from specbeam.core.errors import BrokenProcessor
from specbeam.core.forest import Forest, KnownRows, unknown_nodes
from specbeam.core.laws.warp import best_places, on_host
from specbeam.core.lm import LM, fill_prompts
from specbeam.core.ranked import NO_ROWS
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session

COPIED = math.log(0.5)  # log-probability that stands for a token copied from an earlier match
LONGEST_MATCH = 3  # tokens of the longest match to look for


class Guessed(NamedTuple):
    """Prefixes that may become nodes of the forest."""

    # the forest node that each continues; -1 - k for scored prefix k, which may lack a node
    nodes: Int64[np.ndarray, " n"]
    tokens: Int64[np.ndarray, " n"]
    logliks: Float64[np.ndarray, " n"]
    keys: Float64[np.ndarray, " n"]
    lengths: Int64[np.ndarray, " n"]

    def at(self, which: Int64[np.ndarray, " some"]) -> "Guessed":
        """Return some of the candidates."""
        return Guessed(*(values[which] for values in self))

    def with_more(self, others: "Guessed") -> "Guessed":
        """Return the candidates of both."""
        return Guessed(*(np.concatenate(pair) for pair in zip(self, others, strict=True)))


@dataclass(eq=False)
class Growing:
    """The forest of one session while it grows.

    Attributes:
        left: number of nodes that may still be added.
        candidates: the prefixes to choose from.
        fresh: the nodes of the latest round; the root in the first turn.
        logliks: the log-likelihood of the path to each node of `fresh`, and `lengths` its number of tokens.
    """

    session: Session
    agenda: Agenda
    left: int
    forest: Forest = field(init=False)
    candidates: Guessed = field(init=False)
    fresh: Int64[np.ndarray, " nodes"] = field(init=False)
    logliks: Float64[np.ndarray, " nodes"] = field(init=False)
    lengths: Int64[np.ndarray, " nodes"] = field(init=False)
    asked: int = 0  # number of nodes that the draft model has seen

    def __post_init__(self) -> None:
        agenda = self.agenda
        prefixes = agenda.prefixes
        self._node_of = {ROOT: 0} | {int(prefix): node for node, prefix in enumerate(agenda.kept, 1)}
        above = [self._node_of[int(prefixes.parents[prefix])] for prefix in agenda.kept]
        forest = Forest.rooted(self.session.beams.tokens).grown(prefixes.tokens[agenda.kept], above)
        is_known = self.session.keeps_nodes and agenda.is_begun
        known = np.arange(forest.size if is_known else 0)
        self.forest = forest._replace(known=KnownRows(known, NO_ROWS))
        front = agenda.front(self.left)
        lengths = prefixes.lengths[front.parents] + 1
        self.candidates = Guessed(-1 - front.parents, front.tokens, front.logliks, front.keys, lengths)
        self.fresh = np.zeros(0 if agenda.is_begun else 1, dtype=np.int64)
        self.logliks = np.zeros(len(self.fresh))
        self.lengths = np.zeros(len(self.fresh), dtype=np.int64)

    def add_best(self, count: int) -> None:
        """Add the best candidates as nodes."""
        chosen = best_places(self.candidates.keys, min(count, self.left))
        picked = self.candidates.at(chosen)
        self.candidates = self.candidates.at(np.setdiff1d(np.arange(len(self.candidates.keys)), chosen))
        self.left -= len(chosen)
        above = [int(node) if node >= 0 else self._node(-1 - int(node)) for node in picked.nodes]
        start = self.forest.size
        self.forest = self.forest.grown(picked.tokens, above)
        self.fresh = np.arange(start, self.forest.size)
        self.logliks = picked.logliks
        self.lengths = picked.lengths

    def _node(self, prefix: int) -> int:
        """Return the node of a scored prefix, after adding nodes for it and those above it if there are none."""
        if prefix not in self._node_of:
            above = self._node(int(self.agenda.prefixes.parents[prefix]))
            self.forest = self.forest.grown([int(self.agenda.prefixes.tokens[prefix])], [above])
            self._node_of[prefix] = self.forest.size - 1
        return self._node_of[prefix]

    def guess(self, place: int, tokens: Int64[np.ndarray, " n"], logq: Float64[np.ndarray, " n"]) -> None:
        """Add candidates below node `place` of `fresh`; those that end a text or cannot matter are left out."""
        limits = self.session.limits
        length = int(self.lengths[place]) + 1
        logliks = self.logliks[place] + logq
        keys = self.agenda.open_key(logliks, length)
        useful = (keys >= self.agenda.least) & (keys > -np.inf) & ~np.isin(tokens, limits.ending)
        if length >= limits.max_new_tokens:
            useful[:] = False
        nodes = np.full(int(useful.sum()), self.fresh[place])
        lengths = np.full(len(nodes), length)
        guesses = Guessed(nodes, tokens[useful], logliks[useful], keys[useful], lengths)
        self.candidates = self.candidates.with_more(guesses)


@dataclass(frozen=True)
class SearchAhead:
    """A drafter that puts the best open prefixes of the agenda into the forest, and drafts below them.

    A turn has up to `shape.width` new nodes. They are chosen in `shape.depth` rounds, the best ones first; after each round,
    guesses below the newest nodes join the candidates.

    Args:
        most: maximum number of prefixes that the target scores, as of the rule.
        lm: the draft model; None: none.
        copies: whether to guess that a text continues like an earlier match of its last tokens in the source and prompt.
    """

    most: int
    lm: LM | None = None
    copies: bool = False

    @property
    def models(self) -> tuple[LM, ...]:
        """The models that it runs."""
        return () if self.lm is None else (self.lm,)

    @property
    def keeps_nodes(self) -> bool:
        """Whether the draft model, too, can keep nodes from turn to turn."""
        return all(getattr(model, "keeps_nodes", False) for model in self.models)

    def most_nodes(self, beams: int, shape: Shape) -> int:
        """Return the limit of scored prefixes: all of them may stay in the forest."""
        return self.most

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return a forest per session, of up to `shape.width` new nodes."""
        growing: list[Growing] = []
        for session, shape in zip(sessions, shapes, strict=True):
            agenda = agenda_of(session, self.most)
            room = agenda.room if agenda.is_begun else agenda.room - 1  # the root is scored, too
            growing.append(Growing(session, agenda, min(shape.width, room)))
        rounds = max((shape.depth for shape in shapes), default=1) if self.lm is not None or self.copies else 1
        steps = {one: max(-(-one.left // rounds), 1) for one in growing}
        first = [one for one in growing if len(one.fresh)]
        self._guess(first)
        for number in range(rounds):
            is_last = number == rounds - 1
            for one in growing:
                one.add_best(one.left if is_last else steps[one])
            if not is_last:
                self._guess([one for one in growing if one.left and len(one.fresh)])
        return [one.forest for one in growing]

    def _guess(self, growing: Sequence[Growing]) -> None:
        """Add candidates below the newest nodes of each forest."""
        if self.copies:
            for one in growing:
                self._copy(one)
        if self.lm is None or not growing:
            return
        answers = self.lm.extend([one.session for one in growing], [one.forest for one in growing])
        for one, answer in zip(growing, answers, strict=True):
            one.session.count.draft_passes += 1
            nodes = unknown_nodes(one.asked, one.forest.size, one.forest.known.nodes)
            one.asked = one.forest.size
            with one.session.failing_alone("draft model: "):
                rows = on_host(answer.logits)[np.searchsorted(nodes, one.fresh)]
                try:
                    logq = log_law(one.session, one.forest, one.fresh, np.ascontiguousarray(rows))
                except BrokenProcessor:  # on a drafted path, which the search may never take
                    continue
                for place, row in enumerate(logq):
                    tokens = best_places(row, one.left)
                    one.guess(place, tokens, row[tokens])

    def _copy(self, one: Growing) -> None:
        """Guess the token after the last earlier match of the last tokens of each new node's text."""
        before = np.array([*one.session.read, *one.session.prompt], dtype=np.int64)
        for place, node in enumerate(one.fresh):
            text = np.concatenate([before, np.array(one.forest.path(int(node)), dtype=np.int64)])
            token = token_after_match(text)
            if token >= 0:
                one.guess(place, np.array([token]), np.array([COPIED]))

    def fill(self, sessions: list[Session], most: int) -> list[bool]:
        """Store the next chunk of up to `most` long prompts; return whether each session may take a turn."""
        return [True] * len(sessions) if self.lm is None else fill_prompts(self.lm, sessions, None, most)

    def settle(self, session: Session, turn: Turn) -> None:
        """Settle the draft model's cache."""
        if self.lm is not None:
            self.lm.settle(session, turn)

    def close(self, session: Session) -> None:
        """Free the draft model's state for the session."""
        if self.lm is not None:
            self.lm.close(session)


def token_after_match(text: Int64[np.ndarray, " n"]) -> int:
    """Return the token that followed the last earlier match of the text's last tokens, the longest match first; else -1.

    >>> token_after_match(np.array([5, 6, 7, 8, 5, 6]))
    7
    """
    for size in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        found = np.flatnonzero((windows == text[-size:]).all(1))
        if len(found):
            return int(text[found[-1] + size])
    return -1
