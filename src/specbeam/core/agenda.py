"""The agenda of a best-first search: the frontier of the tree of texts, with an upper bound for each open prefix.

Log-probabilities are at most 0, so the score of a prefix bounds the scores of all texts that begin with it. A text that
ended is certainly the best of those that were not given yet if its score reaches the bounds of all open prefixes.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from specbeam.core.beams import Stop, normalised_score
from specbeam.core.errors import NotSupported
from specbeam.core.forest import Forest
from specbeam.core.laws.reduce import log_norm
from specbeam.core.laws.warp import Rows, check_rows, processed_rows
from specbeam.core.limits import Ended, Limits
from specbeam.core.session import Session

ROOT = 0  # the prefix without new tokens
_OLD = -1  # in place of a prefix: the entries of all prefixes of earlier turns
CHECKED = 256  # entries in which stop strings are looked for before they are dropped, per turn
_NO_NUMBERS = np.zeros(0, dtype=np.int64)
_NO_SCORES = np.zeros(0)


class Prefixes(NamedTuple):
    """The prefixes that the target has scored, in the order in which their rows arrived; a parent comes first.

    The arrays may have spare capacity at their ends.
    """

    tokens: Int64[np.ndarray, " prefixes"]  # the last token; -1 for the root
    parents: Int64[np.ndarray, " prefixes"]  # -1 for the root
    lengths: Int64[np.ndarray, " prefixes"]  # number of new tokens
    logliks: Float64[np.ndarray, " prefixes"]


class Entries(NamedTuple):
    """The frontier: continuations of scored prefixes by one token, which are not scored themselves."""

    parents: Int64[np.ndarray, " entries"]  # the prefix that each continues
    tokens: Int64[np.ndarray, " entries"]
    logliks: Float64[np.ndarray, " entries"]
    keys: Float64[np.ndarray, " entries"]  # the score of a text that ended; an upper bound for those that go on
    ended: Bool[np.ndarray, " entries"]

    def at(self, which: np.ndarray) -> "Entries":
        """Return the entries at the indices `which`, or where the mask `which` is True."""
        return Entries(*(values[which] for values in self))


NO_ENTRIES = Entries(_NO_NUMBERS, _NO_NUMBERS, _NO_SCORES, _NO_SCORES, np.zeros(0, dtype=bool))


class Agenda:
    """The state of one best-first search.

    Entries that cannot matter are dropped, so memory is bounded: with room for k more scored prefixes, only the k best open
    entries can still be scored; with n texts to give, only entries that reach the n-th best known text.

    Args:
        limits: the stop rules; `keep` is the number of texts to give.
        most: maximum number of prefixes that the target scores.

    Attributes:
        prefixes: the scored prefixes, `count` of them.
        entries: the frontier, as of the last `trim`.
        given: number of texts given so far.
        dropped: the largest key of a dropped entry; -inf if none was dropped.
        children: the scored prefix behind each pair of a prefix and a token.
        kept: the prefixes, without the root, that the target keeps in its cache, in the order of the next forest's nodes.
        is_begun: whether the root is scored.
        least: open entries with smaller keys are dropped.
        least_end: texts that ended with smaller scores are dropped.
    """

    def __init__(self, limits: Limits, most: int) -> None:
        self.limits = limits
        self.most = most
        self.prefixes = Prefixes(np.array([-1]), np.array([-1]), np.zeros(1, dtype=np.int64), np.zeros(1))
        self.count = 1
        self.entries = NO_ENTRIES
        self._fresh: dict[int, Entries] = {}
        self._is_gone: dict[int, Bool[np.ndarray, " entries"]] = {}
        self.given = 0
        self.dropped = -np.inf
        self.children: dict[tuple[int, int], int] = {}
        self.kept = _NO_NUMBERS
        self.is_begun = False
        self.least = -np.inf
        self.least_end = -np.inf

    @property
    def scored(self) -> int:
        """The number of prefixes that the target has scored."""
        return self.count if self.is_begun else 0

    @property
    def room(self) -> int:
        """The number of prefixes that may still be scored."""
        return max(self.most - self.scored, 0)

    @property
    def wanted(self) -> int:
        """The number of texts that are still to be given."""
        return self.limits.keep - self.given

    @property
    def is_over(self) -> bool:
        """Whether all wanted texts are given, or there are no further ones."""
        return self.is_begun and (self.wanted <= 0 or len(self.entries.keys) == 0)

    def text(self, prefix: int) -> list[int]:
        """Return the new tokens of a prefix."""
        tokens = []
        while prefix != ROOT:
            tokens.append(int(self.prefixes.tokens[prefix]))
            prefix = int(self.prefixes.parents[prefix])
        return tokens[::-1]

    def open_key(self, logliks: Float64[np.ndarray, " n"], length: int) -> Float64[np.ndarray, " n"]:
        """Return upper bounds for the scores of texts that begin with prefixes of `length` new tokens.

        Scores are at most 0, so a positive length penalty bounds them by the longest text, a negative one by the shortest.
        """
        return logliks / _open_divisor(self.limits, length)

    def expand(self, prefix: int, token: int, logp: Float64[np.ndarray, " vocab"]) -> int:
        """Replace the entry of `token` after `prefix` by its continuations. Returns its number as a scored prefix.

        Returns -1 if there is no such entry, because the text cannot matter.

        Args:
            logp: log-probabilities of the next token; -inf for banned tokens.
        """
        if self.limits.stop_strings and self.limits.stopped_by([*self.text(prefix), token]) is not None:
            return -1  # the text ends there: `_end_at_stop_strings` marks it
        loglik = self._take(prefix, token)
        if loglik is None:
            return -1
        number = self.count
        if number == len(self.prefixes.tokens):
            self.prefixes = Prefixes(*(np.concatenate([values, values]) for values in self.prefixes))
        tokens, parents, lengths, logliks = self.prefixes
        tokens[number] = token
        parents[number] = prefix
        lengths[number] = lengths[prefix] + 1
        logliks[number] = loglik
        self.count += 1
        self.children[prefix, token] = number
        self._add_continuations(number, logp)
        return number

    def _take(self, prefix: int, token: int) -> float | None:
        """Mark the open entry of a continuation as gone, and return its log-likelihood; None if there is none."""
        owner = prefix if prefix in self._fresh else _OLD
        entries = self._fresh.get(prefix, self.entries)
        places = np.flatnonzero((entries.tokens == token) & (entries.parents == prefix) & ~entries.ended)
        if len(places) == 0:
            return None
        if owner not in self._is_gone:
            self._is_gone[owner] = np.zeros(len(entries.keys), dtype=bool)
        self._is_gone[owner][places[0]] = True
        return float(entries.logliks[places[0]])

    def begin(self, logp: Float64[np.ndarray, " vocab"]) -> None:
        """Add the continuations of the root."""
        self.is_begun = True
        self._add_continuations(ROOT, logp)

    def _add_continuations(self, prefix: int, logp: Float64[np.ndarray, " vocab"]) -> None:
        """Add the entries of a scored prefix that may matter."""
        stop = self.limits.stop
        length = int(self.prefixes.lengths[prefix]) + 1
        before = self.prefixes.logliks[prefix]
        divisor = _open_divisor(self.limits, length)
        is_end = np.zeros(len(logp), dtype=bool)
        is_end[stop.eos[stop.eos < len(logp)]] = True
        if length >= stop.most and _ends_by_length(self.limits):
            is_end[:] = True
        goes_on = (logp > -np.inf) & ~is_end
        if length >= stop.most and not self.limits.stop_strings:  # such a text is cut off, and never ends
            goes_on[:] = False
        # Most tokens of a large vocabulary are dropped here, before anything else is computed for them.
        may_matter = goes_on
        if self.least > -np.inf:
            least = np.where(self._may_complete(len(logp)), self.least_end, self.least)
            may_matter = goes_on & (logp >= least * divisor - before)
        if may_matter.sum() < goes_on.sum():
            self.dropped = max(self.dropped, self.least)
        tokens = np.flatnonzero(may_matter | (is_end & (logp > -np.inf)))
        logliks = before + logp[tokens]
        ended = is_end[tokens]
        keys = logliks / divisor
        keys[ended] = _scores(stop, logliks[ended], length)
        matters = ~ended | (keys >= self.least_end)
        if not matters.all():
            self.dropped = max(self.dropped, self.least_end)
        count = int(matters.sum())
        fresh = Entries(np.full(count, prefix), tokens[matters], logliks[matters], keys[matters], ended[matters])
        self._fresh[prefix] = fresh

    def _may_complete(self, vocab: int) -> Bool[np.ndarray, " vocab"]:
        """Return whether each token is known as one that can complete a stop string."""
        closing = self.limits.closing
        found = np.zeros(vocab, dtype=bool)
        if self.limits.stop_strings and closing is not None:
            found[: len(closing)] = closing[:vocab]
        return found

    def _end_before_they_are_dropped(self) -> None:
        """Mark texts with a stop string as ended among the best open entries for which there is no room any more."""
        limits = self.limits
        entries = self.entries
        going = np.flatnonzero(~entries.ended)
        if not limits.stop_strings or len(going) <= self.room:
            return
        _, rest = _split(entries.keys[going], self.room)
        dropped = going[rest]
        may_end = entries.keys[dropped] >= self.least_end
        if limits.closing is not None:
            tokens = entries.tokens[dropped]
            may_end &= self._may_complete(int(tokens.max(initial=0)) + 1)[tokens]
        dropped = dropped[may_end]
        best, _ = _split(entries.keys[dropped], CHECKED)
        for place in dropped[best]:
            self._end_if_stopped(int(place))

    def _end_if_stopped(self, place: int) -> bool:
        """Mark an open entry as ended if its text has a stop string; return whether it has one."""
        entries = self.entries
        prefix = int(entries.parents[place])
        if self.limits.stopped_by([*self.text(prefix), int(entries.tokens[place])]) is None:
            return False
        entries.ended[place] = True
        length = int(self.prefixes.lengths[prefix]) + 1
        entries.keys[place] = self.limits.normalised(float(entries.logliks[place]), length)
        return True

    def _merge(self) -> None:
        """Join the new entries with the others, and drop those that are scored now."""
        owned = {_OLD: self.entries, **self._fresh}
        left = [
            entries.at(~self._is_gone[owner]) if owner in self._is_gone else entries for owner, entries in owned.items()
        ]
        self.entries = Entries(*(np.concatenate(values) for values in zip(*left, strict=True)))
        self._fresh = {}
        self._is_gone = {}

    def trim(self) -> None:
        """Add the continuations of newly scored prefixes to the entries, and drop entries that can no longer matter."""
        if self._fresh:
            self._merge()
        self._end_before_they_are_dropped()
        entries = self.entries
        kept = np.ones(len(entries.keys), dtype=bool)
        ends = np.flatnonzero(entries.ended)
        if len(ends) >= self.wanted > 0:
            best, rest = _split(entries.keys[ends], self.wanted)
            last = ends[best[-1]]
            kept[ends[rest]] = False
            kept &= entries.ended | (entries.keys >= entries.keys[last])
            self.least_end = max(self.least_end, float(entries.keys[last]))
            self.least = max(self.least, self.least_end)
        going = np.flatnonzero(kept & ~entries.ended)
        if len(going) > self.room:
            best, rest = _split(entries.keys[going], self.room)
            kept[going[rest]] = False
            if self.room:
                self.least = max(self.least, float(entries.keys[going[best[-1]]]))
        if not kept.all():
            self.dropped = max(self.dropped, float(entries.keys[~kept].max()))
            self.entries = entries.at(kept)

    def close(self) -> tuple[Ended, ...]:
        """Score no further prefixes, and return the best texts found so far, as at the limit of prefixes."""
        self.most = self.scored
        self.trim()
        return self.pop()

    def pop(self) -> tuple[Ended, ...]:
        """Remove and return the texts that come next, best first, until an open prefix may have a better continuation."""
        found = []
        while self.wanted > 0 and len(self.entries.keys):
            self._end_at_stop_strings(1)
            entries = self.entries
            if len(entries.keys) == 0:
                break
            top = int(entries.keys.argmax())
            if not entries.ended[top]:
                level = np.flatnonzero(entries.ended & (entries.keys == entries.keys[top]))
                if len(level) == 0:
                    break
                top = int(level[0])
            is_other = np.ones(len(entries.keys), dtype=bool)
            is_other[top] = False
            self.entries = entries.at(is_other)
            self.given += 1
            tokens = [*self.text(int(entries.parents[top])), int(entries.tokens[top])]
            found.append(Ended(tokens, float(entries.logliks[top]), bound=self.bound))
        return tuple(found)

    @property
    def bound(self) -> float:
        """An upper bound of the scores of all texts that were not given yet; -inf if there are none."""
        return max(float(self.entries.keys.max(initial=-np.inf)), self.dropped)

    def front(self, count: int) -> Entries:
        """Return up to `count` open entries of the largest keys, best first."""
        self._end_at_stop_strings(count)
        going = np.flatnonzero(~self.entries.ended)
        best, _ = _split(self.entries.keys[going], count)
        return self.entries.at(going[best])

    def _end_at_stop_strings(self, count: int) -> None:
        """Mark texts with a stop string among the `count` best open entries as ended, and drop those at the length limit."""
        if not self.limits.stop_strings:
            return
        while True:
            entries = self.entries
            going = np.flatnonzero(~entries.ended)
            best = going[_split(entries.keys[going], count)[0]]
            kept = np.ones(len(entries.keys), dtype=bool)
            changed = False
            for place in best:
                length = int(self.prefixes.lengths[entries.parents[place]]) + 1
                if self._end_if_stopped(int(place)):
                    changed = True
                elif length >= self.limits.max_new_tokens:
                    kept[place] = False
                    changed = True
            self.entries = entries.at(kept)
            if not changed:
                return

    def needed(self) -> Int64[np.ndarray, " prefixes"]:
        """Return the prefixes above open entries, without the root, ascending."""
        marked = np.zeros(self.count, dtype=bool)
        marked[self.entries.parents[~self.entries.ended]] = True
        for prefix in range(len(marked) - 1, 0, -1):
            if marked[prefix]:
                marked[self.prefixes.parents[prefix]] = True
        marked[ROOT] = False
        return np.flatnonzero(marked)


def _split(
    keys: Float64[np.ndarray, " n"], count: int
) -> tuple[Int64[np.ndarray, " best"], Int64[np.ndarray, " rest"]]:
    """Return the indices of the `count` largest keys, in descending order, and those of the others."""
    if count >= len(keys) or count == 0:
        order = np.argsort(-keys, kind="stable")
        return order[:count], order[count:]
    parted = np.argpartition(-keys, count - 1)
    best = parted[:count]
    return best[np.argsort(-keys[best], kind="stable")], parted[count:]


def _scores(stop: Stop, logliks: Float64[np.ndarray, " n"], length: int) -> Float64[np.ndarray, " n"]:
    """Return the scores of texts of `length` tokens."""
    return np.array([normalised_score(stop, loglik, length) for loglik in logliks])


def _ends_by_length(limits: Limits) -> bool:
    """Return whether texts end at the length limit, because nothing else can end them."""
    return not limits.eos and not limits.stop_strings


def _open_divisor(limits: Limits, length: int) -> float:
    """Return the number by which the log-likelihood of a prefix of `length` new tokens is divided for its bound."""
    stop = limits.stop
    if stop.penalty >= 0:
        return float(stop.most) ** stop.penalty
    shortest = length if limits.stop_strings else length + 1
    return float(shortest) ** stop.penalty


def agenda_of(session: Session, most: int) -> Agenda:
    """Return the agenda of a session, which its drafter and its rule share.

    Raises `NotSupported` if the scores of the session's texts have no bound.

    Args:
        most: maximum number of prefixes that the target scores.
    """
    agenda = session.state.get(Agenda)
    if agenda is None:
        if not session.warp.is_bounded:
            raise NotSupported(
                "a processor or option may raise the probability of a token above 1, and then no score of a prefix bounds "
                "the texts that begin with it; leave out guidance_scale, sequence_bias, logits_processor, "
                "exponential_decay_length_penalty and repetition penalties below 1"
            )
        agenda = session.state[Agenda] = Agenda(session.limits, most)
    found: Agenda = agenda
    return found


def close_search(session: Session) -> None:
    """End a best-first search with the best texts found so far, which may not be certain; do nothing for other sessions."""
    agenda: Agenda | None = session.state.get(Agenda)
    if agenda is not None:
        session.ended += agenda.close()


def log_law(
    session: Session, forest: Forest, nodes: Int64[np.ndarray, " n"], rows: Rows
) -> Float64[np.ndarray, "n vocab"]:
    """Return the log-probabilities after forest nodes, which may have different depths, as beam search computes them.

    Args:
        rows: the logits of these nodes.
    """
    warp = session.warp
    if not warp.processors:
        check_rows(rows)
        norms = log_norm(rows)
        return rows.astype(np.float64) - np.where(norms > -np.inf, norms, 0.0)[:, None]
    found = np.empty(rows.shape)
    depths = forest.depths()[nodes]
    for depth in np.unique(depths):
        here = np.flatnonzero(depths == depth)
        same = nodes[here]
        found[here] = processed_rows(np.ascontiguousarray(rows[here]), warp, partial(session.paths, forest, same))
    return found
