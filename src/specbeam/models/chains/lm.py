"""SCORE: a target that another program runs, as a language model of the protocol."""

import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64

from specbeam.core import compiling
from specbeam.core.answers import LOGITS, scored_rows
from specbeam.core.callbacks import Callback
from specbeam.core.control.cost import CostCurve
from specbeam.core.errors import NotSupported
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.guard import ThreadGuard
from specbeam.core.laws.listing import EQUALS
from specbeam.core.laws.ranking import NO_TRUNCATION
from specbeam.core.lm import checked_needs
from specbeam.core.measure.profiler import span
from specbeam.core.ranked import WHOLE, Listing
from specbeam.core.records import Needs, Scored, Turn
from specbeam.core.scored_by_call import CalledRows, called_rows
from specbeam.core.session import Session
from specbeam.core.verify.beams import BeamRule
from specbeam.core.verify.search import SearchRule
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.models.chains.chains import Chain, ForestChains, Likeliest, Scorer, chains_of
from specbeam.models.chains.rows import filled_rows, ranked_of, undecided_rows, whole_of
from specbeam.models.chains.runs import ChainRun
from specbeam.models.made_up import made_up_prompt

MEASURED_CHAINS = (1, 4, 16)  # of the round trips that are timed for `cost_curve`
MEASURED_TOKENS = 24  # before the last token of each chain
# Rules that read the kept tokens of a row and its logsumexp, and nothing else; of one text, and of several beams.
BY_KEPT_TOKENS = (MatchRule, PathRule, TraversalRule)
BY_KEPT_PAIRS = (BeamRule, SearchRule)


class _AskedRows(NamedTuple):
    """The rows of a session that a pass computes.

    Attributes:
        wanted: nodes of the forest.
        listed: number of tokens to list for each row.
        is_whole: whether the session reads whole rows, which are filled up from the lists.
    """

    session: Session
    forest: Forest
    wanted: Int64[np.ndarray, " wanted"]
    listed: int
    is_whole: bool


class ChainLM:
    """A target that scores chains of tokens, such as vLLM; its cache of keys and values is its own affair.

    Args:
        scorer: the engine.

    Attributes:
        passes: number of round trips so far.
        chains: number of chains scored so far.
        guard: allows one thread at a time.
        engine: a short name of the kind of engine.
        device: of the rows that it returns.
    """

    keeps_nodes = True
    shares_passes = True
    returns_lists = True
    supports_runs = compiling.AVAILABLE

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.vocab = scorer.vocab
        self.max_positions = scorer.max_positions
        self.guard = ThreadGuard()
        self.engine = scorer.engine
        self.device = torch.device("cpu")  # of its rows
        self.passes = 0
        self.chains = 0
        weak_self = weakref.ref(self)  # a callback that held the model would keep its engine until a garbage collection

        def score_jobs(*numbers: int) -> None:
            lm = weak_self()
            assert lm is not None  # steps run for sessions of a model that is in use
            lm.score_jobs(*numbers)

        self._callback = Callback(score_jobs)
        self._numbers = itertools.count()
        self._sessions: dict[int, Session] = {}
        self._release = weakref.finalize(self, scorer.close)

    def release(self) -> None:
        """Free the engine if it was made for this model, as happens when the model is dropped; it scores no more."""
        self._release()

    def __repr__(self) -> str:
        return f"<ChainLM of {self.model_name}>"

    @property
    def model_name(self) -> str:
        """The name of the model that the engine runs."""
        return self.scorer.name

    @cached_property
    def cost_curve(self) -> CostCurve:
        """The seconds of a round trip by its number of chains, measured at the first use."""
        prompt = made_up_prompt(MEASURED_TOKENS, self.vocab)
        seconds = []
        for chains in MEASURED_CHAINS:
            texts = [Chain([*prompt, number % self.vocab], MEASURED_TOKENS, 8, "") for number in range(chains)]
            seconds.append(min(self._seconds_of(texts) for _ in range(2)))
        return CostCurve(MEASURED_CHAINS, tuple(seconds))

    def _seconds_of(self, chains: list[Chain]) -> float:
        began = time.perf_counter()
        self.scorer.score(chains)
        return time.perf_counter() - began

    def lacks(self, needs: Needs) -> str:
        """Return the reason why this target cannot provide these needs; "" if it can."""
        if needs.states or needs.exit_layer is not None:
            return f"{self.scorer.name} returns log-probabilities only, and no hidden states"
        if needs.ranked > self.scorer.most_listed:
            return f"{self.scorer.name} lists up to {self.scorer.most_listed} tokens ({self.scorer.more_listed})"
        return ""

    def extend(
        self, sessions: Sequence[Session], forests: Sequence[Forest], needs: Sequence[Needs] | None = None
    ) -> list[Scored]:
        checked = checked_needs(self, len(sessions), needs)
        asked = []
        for session, forest, need in zip(sessions, forests, checked, strict=True):
            start = session.state.get(self, 0)
            session.state[self] = forest.size
            wanted = unknown_nodes(start, forest.size, forest.known.nodes)
            count = self._count_or_failure(session) if need.logits else need.ranked
            asked.append(_AskedRows(session, forest, wanted, count, need.logits))
        found = self._rows(asked)
        return [self._answer(one, need, rows) for one, need, rows in zip(asked, checked, found, strict=True)]

    def _answer(self, asked: "_AskedRows", needs: Needs, rows: Likeliest) -> Scored:
        """Return the rows of a session's new nodes in the form that its parts need."""
        if not needs.logits:
            return Scored(ranked=ranked_of(rows, Listing(needs.ranked), self.vocab))
        return scored_rows(needs, torch.from_numpy(self._whole(rows)))

    def _count_or_failure(self, session: Session) -> int:
        """Return the number of tokens to list for a turn that reads whole rows; 1 if the session fails for it.

        Other sessions of the pass go on.
        """
        with session.failing_alone():
            return self._count_for(session)
        return 1

    def _rows(self, asked: Sequence["_AskedRows"]) -> list[Likeliest]:
        """Return the rows that sessions ask for, with lists that decide their laws.

        Longer lists are asked for where a token that is not listed is as likely as the last one that a law keeps. A session
        whose law even the longest lists leave open fails, and no other one.
        """
        found = self._scored([self._chains(*one[:4]) for one in asked])
        most = min(self.scorer.most_listed, self.vocab)
        counts = [one.listed for one in asked]
        open_places = self._undecided(asked, found)
        while open_places:
            longer = [place for place in open_places if counts[place] < most]
            for place in set(open_places) - {*longer}:
                self._fail_by_equals(asked[place].session)
            if not longer:
                return found
            for place in longer:
                counts[place] = min(2 * counts[place], most)
            again = self._scored([self._chains(*asked[place][:3], counts[place]) for place in longer])
            for place, rows in zip(longer, again, strict=True):
                found[place] = rows
            open_places = self._undecided(asked, found)
        return found

    def _undecided(self, asked: Sequence["_AskedRows"], found: Sequence[Likeliest]) -> list[int]:
        """Return the places of the sessions whose lists leave their law open."""
        return [
            place
            for place, (one, rows) in enumerate(zip(asked, found, strict=True))
            if one.is_whole
            and one.session.failure is None
            and rows.tokens.shape[1] < self.vocab
            and len(undecided_rows(rows, kept_tokens(one.session)))
        ]

    def _fail_by_equals(self, session: Session) -> None:
        """End a session whose law the longest lists leave open."""
        error = NotSupported(
            f"after this text more tokens are equally likely than the {self.scorer.most_listed} that {self.scorer.name} "
            f"lists, so the law ({law_in_words(session)}) is not decided: {self.scorer.more_listed}"
        )
        session.fail(error, "")

    def _count_for(self, session: Session) -> int:
        """Return the number of tokens to list for a turn that reads whole rows.

        Raises `NotSupported` if the law of the session needs more than the engine lists.
        """
        kept = kept_tokens(session)
        if kept and kept < min(self.scorer.most_listed, self.vocab):
            return min(kept + EQUALS, self.scorer.most_listed, self.vocab)
        self._check_whole(session)
        return self.vocab

    def _check_whole(self, session: Session) -> None:
        """Raise `NotSupported` if the engine cannot return whole rows."""
        if self.scorer.most_listed < self.vocab:
            raise NotSupported(
                f"{law_in_words(session)} needs the probabilities of all {self.vocab:,} tokens, and {self.scorer.name} "
                f"lists {self.scorer.most_listed}: give top_k, or {self.scorer.more_listed}"
            )

    def _whole(self, rows: Likeliest) -> Float32[np.ndarray, "rows vocab"]:
        """Return whole rows, filled up if the law of their session reads the listed tokens only."""
        if rows.tokens.shape[1] == self.vocab:
            return whole_of(rows, self.vocab)
        return filled_rows(rows, self.vocab)

    def _chains(self, session: Session, forest: Forest, wanted: Int64[np.ndarray, " n"], count: int) -> ForestChains:
        return chains_of(session.texts, session.prompt, forest, wanted, count, session.namespace)

    def _scored(self, jobs: Sequence[ForestChains]) -> list[Likeliest]:
        """Return the rows of the wanted nodes of each job, by one call of the engine."""
        every: list[Chain] = [chain for job in jobs for chain in job.chains]
        answers: list[Likeliest] = []
        if every:
            with span("model"):
                answers = self.scorer.score(every)
            self.passes += 1
            self.chains += len(every)
        found = []
        start = 0
        for job in jobs:
            own = answers[start : start + len(job.chains)]
            start += len(job.chains)
            found.append(_of_nodes(job, own))
        return found

    def listing_for(self, session: Session, asked: Listing) -> Listing:
        """Return the lists that runs of a session get; WHOLE if its laws need whole rows.

        Raises `NotSupported` if they need more than the engine lists.

        Args:
            asked: the lists that the session's parts ask for; WHOLE if a part needs whole rows.
        """
        kept = kept_tokens(session)
        if asked.length == 0 and kept and kept < self.scorer.most_listed:
            return WHOLE  # filled rows, see `_count_for`
        truncation = session.warp.cut
        sums_warm_rows = truncation.temperature != 1 and truncation.top_k == 0
        if asked.length == 0 or asked.by_noise or sums_warm_rows:
            self._check_whole(session)
            return WHOLE
        if self.scorer.most_listed >= self.vocab:
            return asked
        most = self.scorer.most_listed - 1  # one more bounds the others
        if asked.length - EQUALS > most:
            raise NotSupported(
                f"{law_in_words(session)} needs lists of {asked.length - EQUALS + 1} tokens, and {self.scorer.name} lists "
                f"{self.scorer.most_listed}: keep fewer beams or draft beams, or {self.scorer.more_listed}"
            )
        return asked._replace(length=min(asked.length, most))

    def for_run(
        self, session: Session, fresh: int, beams: int, more: int, needs: Needs = LOGITS
    ) -> AbstractContextManager[ChainRun | None] | None:
        """See `RunLM.for_run`."""
        return self._cache(session, fresh + beams)

    @contextmanager
    def _cache(self, session: Session, fresh: int) -> Iterator[ChainRun]:
        """Yield the record of a session for runs, with capacity for turns of up to `fresh` new nodes."""
        held = session.state.get((ChainRun, self))
        start = session.start
        size = len(start.tokens)
        if held is None or len(held.tokens) < size + 4 * fresh + 256:
            capacity = 2 * (size + 4 * fresh + 256)
            number = next(self._numbers) if held is None else held.session
            arrays = np.zeros((2, capacity), dtype=np.int64)
            size_of_forest = np.zeros(1, dtype=np.int64)
            address = self._callback.address
            held = ChainRun(number, self.vocab, WHOLE, address, arrays[0], arrays[1], size_of_forest)
            session.state[(ChainRun, self)] = held
            self._sessions[number] = session
        held.tokens[:size] = start.tokens
        held.parents[:size] = start.parents
        held.size[0] = size
        yield held

    def finish_run(self, session: Session, passes: int, roots: int) -> None:
        """See `RunLM.finish_run`; round trips are counted when they are made."""

    def take_failure(self) -> BaseException | None:
        """Return the error of the last call of a run, once; None if there was none."""
        failure = self._callback.failure
        self._callback.failure = None
        return failure

    def score_jobs(self, *numbers: int) -> None:
        """Score the forests of a run; `rows_by_call` passes the numbers."""
        called = called_rows(numbers)
        is_listed = called.listing.length > 0
        asked = []
        for job in called.jobs:
            session = self._sessions[job.session]
            count = min(called.listing.length + 1, self.vocab) if is_listed else self._count_or_failure(session)
            forest = Forest(job.tokens.copy(), job.parents.copy())
            asked.append(_AskedRows(session, forest, job.wanted.copy(), count, not is_listed))
        start = 0
        for one, rows in zip(asked, self._rows(asked), strict=True):
            place = slice(start, start + len(one.wanted))
            start = place.stop
            self._write(called, place, one.session, rows)

    def _write(self, called: CalledRows, place: slice, session: Session, rows: Likeliest) -> None:
        """Write the rows of a session to the arrays of a call."""
        if called.listing.length == 0:
            called.logits[place] = self._whole(rows)
            return
        listing = called.listing._replace(temperature=session.warp.cut.temperature)
        ranked = ranked_of(rows, listing, self.vocab)
        called.tokens[place] = ranked.tokens
        called.logits[place] = ranked.logits
        called.sums[:, place] = np.stack([ranked.norms, ranked.warm, ranked.rest])

    def settle(self, session: Session, turn: Turn) -> None:
        session.state.pop(self, None)

    def peak(self, session: Session) -> int:
        """Return 0: the engine does not say how many tokens it stores."""
        return 0

    def close(self, session: Session) -> None:
        session.state.pop(self, None)
        held = session.state.pop((ChainRun, self), None)
        if held is not None:
            self._sessions.pop(held.session, None)


def kept_tokens(session: Session) -> int:
    """Return the number of likeliest tokens of each row that the law of a session reads; 0: it may read all of them."""
    warp = session.warp
    parts = session.parts
    reads_more = bool(warp.processors) or bool(warp.others) or session.audited or parts.own_needs != LOGITS
    if reads_more or type(parts.rule) not in (*BY_KEPT_TOKENS, *BY_KEPT_PAIRS):
        return 0
    if type(parts.rule) in BY_KEPT_PAIRS:
        return _kept_pairs(session)
    if warp.greedy:
        return 1
    return max(warp.truncation.top_k, warp.truncation.least) if warp.truncation.top_k > 0 else 0


def _kept_pairs(session: Session) -> int:
    """Return `kept_tokens` of a rule that chooses among the pairs of several beams and tokens."""
    rule: Any = session.parts.rule
    listing: Listing = rule.listing(session)
    truncation = session.warp.cut
    has_no_number = truncation.cuts and truncation.top_k == 0  # top-p and min-p keep any number of tokens
    if listing.length == 0 or listing.by_noise or has_no_number:
        return 0
    sums_warm_rows = truncation.temperature != 1 and truncation.top_k == 0
    return 0 if sums_warm_rows else listing.length - EQUALS


def law_in_words(session: Session) -> str:
    """Return the law of a session with its settings, for errors."""
    settings = session.warp.truncation
    plain = NO_TRUNCATION._asdict()
    given = [
        f"{name}={value:g}"
        for name, value in settings._asdict().items()
        if isinstance(value, float) and value != plain[name]
    ]
    if session.warp.processors:
        given.append("logits processors or a constraint")
    return f"{session.parts.law.split(';')[0]}{' with ' if given else ''}{', '.join(given)}"


def _of_nodes(job: ForestChains, answers: Sequence[Likeliest]) -> Likeliest:
    """Return the rows of the wanted nodes of a forest, in their order."""
    if not answers:
        return Likeliest(np.zeros((0, 1), dtype=np.int64), np.zeros((0, 1)))
    rows = [answer.tokens.shape[0] for answer in answers]
    starts = np.cumsum([0, *rows[:-1]])
    places = starts[job.chain_of] + job.row_of
    tokens = np.concatenate([answer.tokens for answer in answers])[places]
    return Likeliest(tokens, np.concatenate([answer.logp for answer in answers])[places])
