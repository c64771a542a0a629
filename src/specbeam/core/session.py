"""A session: everything that changes during one generation (beams, scores, dice, limits, the state of each part)."""

import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Int64

from specbeam.core.audit import Audit
from specbeam.core.beams import (
    BEAMS,
    FROM_BEFORE,
    FROM_PASS,
    LENGTH,
    UNSEEN,
    Beams,
    EndedTexts,
    Finished,
    is_session_over,
    paths_to,
    room_for_ended,
    room_for_texts,
    rooted_beams,
    settle_turn,
)
from specbeam.core.dice import Dice
from specbeam.core.early_end import EarlyEnd
from specbeam.core.errors import BadSetting, BrokenLaw, BrokenPart, LostLaw, SpecbeamError
from specbeam.core.forest import NO_KNOWN_ROWS, Forest, Start, next_start, scored_rows_of, start_of_roots
from specbeam.core.laws.named import UNKNOWN
from specbeam.core.laws.warp import Warp, on_host
from specbeam.core.limits import Ended, Limits
from specbeam.core.records import Certificate, ExtraInputs, Needs, Report, RowCounts, Shape, Turn, Verdict


@runtime_checkable
class CacheOwner(Protocol):
    """The part of a session that a language model uses; `context` and `vectors` are optional (see `Session`)."""

    prompt: list[int]
    state: dict[Hashable, Any]


def is_broken(session: CacheOwner) -> bool:
    """Return True if a session failed on NaN or infinite logits; its cached keys and values may be NaN too."""
    return isinstance(getattr(session, "failure", None), BrokenLaw)


@runtime_checkable
class Controller(Protocol):
    """PLAN: the depth and width of the next draft.

    Optional members:
        more(session, depth, confidence) -> bool: whether a draft continues after a layer (control/stopping.py).
        needs: Needs: the parts of the target's rows that it reads in `turn.scored`.
        numbers(session): a record whose kind has the steps of control/planning.py. With it, many turns are one compiled run.
        enter(session, batch_size) -> bool: called before the first turn of a session, with the number of sessions that
            decode together; whether it drafts at all. If not, its drafter is replaced by `NoDraft`.
        remember(session): called when a session is over (control/needs.py).
        largest: Shape: the largest shape that it plans, from which servers reckon memory.
    """

    def plan(self, session: "Session") -> Shape: ...

    def settle(self, session: "Session", turn: Turn) -> None: ...


@runtime_checkable
class Drafter(Protocol):
    """DRAFT: token trees under the live beams, for many sessions at once.

    A session may be settled without a draft, if one of the `models` was not ready for it (`is_ready`).

    Optional members:
        close(session): free the state of a session that is over.
        models: its draft models; () if it has none. Without this attribute, torch keeps its threads (decoder.py).
        no_law_reason: str: the reason why the law of its drafts is unknown; such drafts can be matched but not tried.
        listing(session, width) -> Listing | None: the lists of tokens (ranked.py) from which it can draft; None: it
            reads no rows. Without it, rows are whole.
        fill(sessions, most) -> list[bool]: store a chunk of each long prompt; True for prompts that are stored whole.
        needs: Needs: the parts of the target's rows that it reads in `turn.scored`.
        extra_rows(session, forest) -> ExtraRows: additional rows for the target's pass, returned in `turn.scored.extra`. A
            model of the drafter may have them instead.
        extra_inputs: ExtraInputs: inputs of the extra rows other than tokens.
        spec(session): a record whose kind has a step `draft_turn` (draft/turns.py). With it, turns run compiled.
        keeps_nodes: True if its forests start with `session.start`, so that nodes can be kept from turn to turn.
        most_nodes(beams, shape) -> int: the maximum number of nodes of a forest of this shape, with those kept from earlier
            turns; without it, depth * width.
    """

    def draft(self, sessions: list["Session"], shapes: list[Shape]) -> list[Forest]: ...

    def settle(self, session: "Session", turn: Turn) -> None: ...


@runtime_checkable
class Rule(Protocol):
    """VERIFY: the beams that survive.

    `scored` holds the target's logits of every forest node, float[nodes, vocab]; for a rule with `needs` it is a `Scored`.

    Optional members:
        law: str: the output law of a method for one sequence; it is not inherited (see `law_of`).
        tries: bool: whether it needs the law that drafts were drawn from.
        most_beams: int: the most beams that it judges; a method that keeps more is refused.
        needs: Needs: the parts of each row that it reads.
        spec(session): a record whose kind has a step `verify_turn` (verify/turns.py). With it, turns run compiled.
        listing(session) -> Listing: the lists of tokens (ranked.py) by which it can decide; without it, rows are whole.
        widths(session): the number of draws of each layer, for steps (control/width.py); without it, one sequence.
        keeps_nodes: True if it takes forests with known rows, which `scored` does not hold.
        ignores_drafts(session) -> bool: whether texts are independent of the drafts.
        needs_bounds: bool: whether processors must not raise probabilities, so that the score of a prefix bounds its texts.
        is_lazy(session) -> bool: whether layers are decided without the rows of beams that cannot win.
    """

    def verify(self, session: "Session", forest: Forest, scored: Any) -> Verdict: ...


def keeps_nodes(target: object, parts: "Parts") -> bool:
    """Return whether scored nodes below the surviving beams are kept for the next turn.

    The target, the drafter and the rule all have to support it, and no part may need more than logits.
    """
    supported = all(getattr(one, "keeps_nodes", False) for one in (target, parts.drafter, parts.rule))
    return supported and parts.own_needs == Needs(logits=True)


def is_part(value: object, kind: type) -> bool:
    """Return whether `value` is a part of this kind, and not the class of one."""
    return isinstance(value, kind) and not isinstance(value, type)


def lacking(value: object, kind: type) -> str:
    """Return what is given in place of a part of this kind, and what it lacks, for messages; for a text, the text."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, type):
        return f"no part: {value.__name__} is a class; give an object, such as {value.__name__}()"
    methods = [name for name in vars(kind) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(value, name, None))]
    return f"no part: {value!r} has no {' and no '.join(missing)} (docs/write_a_method.md)"


def law_of(rule: Rule) -> str:
    """Return the output law that a rule states, or UNKNOWN.

    A subclass of a rule may verify in another way, so it must state its own law.
    """
    states_law = "law" in vars(type(rule)) or "law" in getattr(rule, "__dict__", {})
    return str(rule.law) if states_law else UNKNOWN  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Parts:
    """The parts that decode one session.

    Raises `LostLaw` if the rule tries drafts (`tries`) whose law is unknown (`no_law_reason` of the drafter).
    """

    drafter: Drafter
    rule: Rule
    controller: Controller
    law: str

    def __post_init__(self) -> None:
        for part, kind in ((self.drafter, Drafter), (self.rule, Rule), (self.controller, Controller)):
            if not is_part(part, kind):
                raise BadSetting(f"the {kind.__name__.lower()} is {lacking(part, kind)}")
        if type(self.drafter).__hash__ is None:
            raise BadSetting(f"{type(self.drafter).__name__} has no hash, and sessions are grouped by their drafters: "
                             "make it a @dataclass(frozen=True) or @dataclass(eq=False)")  # fmt: skip
        why = getattr(self.drafter, "no_law_reason", "")
        if why and getattr(self.rule, "tries", False):
            raise LostLaw(
                f"{type(self.rule).__name__} tries drafts against the law they were drawn from, and "
                f"{type(self.drafter).__name__} {why}; such drafts can only be matched: MatchRule"
            )

    @cached_property
    def needs(self) -> Needs:
        """The needs of all parts and of the models that draft, for each row of the target."""
        asked = self.own_needs
        for model in getattr(self.drafter, "models", None) or ():
            asked |= getattr(model, "needs_of_target", Needs())
        return asked

    @cached_property
    def extra_owner(self) -> Any:
        """The drafter, or its model, that adds extra rows to the target's pass; None if there are none.

        Raises `BadSetting` if several add rows: a pass takes extra rows of one part only.
        """
        each = (self.drafter, *(getattr(self.drafter, "models", None) or ()))
        found = list({id(one): one for one in each if hasattr(one, "extra_rows")}.values())
        if len(found) > 1:
            raise BadSetting(
                f"{' and '.join(type(one).__name__ for one in found)} add extra rows to the target's pass, which takes "
                "extra rows from one part only; draft with one of them"
            )
        return found[0] if found else None

    @cached_property
    def own_needs(self) -> Needs:
        """The needs of the parts themselves; a rule without `needs` reads logits."""
        asked: Needs = getattr(self.rule, "needs", Needs(logits=True))
        for part in (self.drafter, self.controller):
            asked |= getattr(part, "needs", Needs())
        return asked


@dataclass
class Counters:
    target_passes: int = 0
    draft_passes: int = 0
    drafted: int = 0  # draft nodes
    passed: Counter[int] = field(default_factory=Counter)  # by depth below the roots of a turn, layers that passed
    widths: list[int] = field(default_factory=list)
    peak_kv_tokens: int = 0
    rows: RowCounts = field(default_factory=RowCounts)
    # its share of the time of decoding steps, which is split equally among their sessions; NaN if code was compiled
    seconds: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @property
    def accepted(self) -> int:
        """The number of layers that passed."""
        return self.passed.total()

    def restart(self) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def add_passed(self, passed: Int64[np.ndarray, " depths"] | Bool[np.ndarray, " depths"]) -> None:
        """Count how often the layer of each depth passed."""
        for depth in np.flatnonzero(passed).tolist():
            self.passed[depth] += int(passed[depth])

    def add_sources(self, sources: Int64[np.ndarray, "layers 3"]) -> None:
        """Count where the rows of layers of beams came from; see `Layers.sources`."""
        is_lazy = sources[:, UNSEEN] > 0
        is_free = (sources[:, FROM_PASS] == 0) & (sources[:, FROM_BEFORE] > 0)
        saved = int(sources[:, FROM_BEFORE].sum())
        self.rows += RowCounts(0, saved, len(sources), int(is_lazy.sum()), int(is_free.sum()))


class Session:
    """One generation: its beams, texts, limits, dice, counters, and the state of each part.

    The loop (turn.py, runs.py, decoder.py) changes it between passes; a part changes its own entry in `state` only.

    Attributes:
        before: the tokens before the new ones, as logits processors see them: padding and prompt, int64[n].
        start: the beginning of the next turn's forest: the roots, and nodes that are kept from earlier turns.
        keeps_nodes: whether nodes are kept from turn to turn; see `keeps_nodes`.
        early_end: ends its compiled runs early; its decoder sets it.
        context: further inputs by model, passed to its engine as they are. For models of transformers these are keyword
            arguments of the forward, tensors with a first dimension of 1 (the states of an encoder).
        read: tokens of a source in the decoder's vocabulary, so that drafts may copy from them.
        vectors: inputs given as embeddings (soft prompts, images), by model, float[rows, size]: the token -1 - k of a
            prompt, or of a drafter's extra rows, stands for row k.
        namespace: prompts of the same namespace may share stored prefixes; see `HuggingFaceLM.remember_prompts`.
        recalled: by model, the number of tokens of the prompt that were copied from earlier prompts.
    """

    def __init__(
        self,
        prompt: list[int],
        parts: Parts,
        warp: Warp,
        limits: Limits,
        key: int | None,
        place: int = 0,
        audited: bool = False,
        number: int | None = None,
    ) -> None:
        self.prompt = prompt
        self.parts = parts
        self.warp = warp
        self.limits = limits
        self.place = place
        self.number = place if number is None else number  # of the prompt, which several sessions may share
        self.dice = Dice(key)
        self.beams = Beams.start(prompt[-1], self.dice.key)
        self.start = Start(self.beams.tokens, np.array([-1]), NO_KNOWN_ROWS)
        self.keeps_nodes = False
        self.early_end = EarlyEnd()
        self.texts = room_for_texts(None, 1, 64)
        self.pad([])
        self.ended: list[Ended] = []
        self.finished = Finished(np.zeros(0), np.zeros(1, dtype=np.int64))  # the normalised scores of those
        self.failure: SpecbeamError | None = None
        self.state: dict[Hashable, Any] = {}
        self.batch_size = 1  # number of sessions in the current pass, itself included; set by the loop
        self.shape = Shape(0, 0)  # planned for the current turn; set by the loop
        self.context: Mapping[Any, Any] = {}
        self.read: list[int] = []
        self.vectors: Mapping[Any, torch.Tensor] = {}
        self.namespace = ""
        self.recalled: dict[Any, int] = {}
        self.audited = audited
        self.audit = Audit()
        self.certificate: Certificate | None = None
        self.count = Counters()

    def pad(self, padding: list[int]) -> None:
        """Set the padding of the prompt in a batch, which logits processors see. Call it before the first turn."""
        named = [token for token in self.prompt if token >= 0]  # the others are given as embeddings
        self.before = np.array([*padding, *named], dtype=np.int64)
        if self.warp.constraint is not None:
            self.warp.constraint.prompt_length = len(self.before)

    @property
    def undrafted(self) -> Forest:
        """The forest that the next turn begins with: the roots, and nodes that are kept from earlier turns."""
        return Forest(self.start.tokens, self.start.parents, known=self.start.known)

    @property
    def extra_inputs(self) -> ExtraInputs | None:
        """The inputs of the drafter's extra rows other than tokens; None if there are none."""
        return getattr(self.parts.extra_owner, "extra_inputs", None)

    @property
    def settled(self) -> list[int]:
        """The new tokens that all live beams have in common."""
        return self.texts.settled.tolist()

    @property
    def tails(self) -> Int64[np.ndarray, "beams length"]:
        """The tokens of each live beam after those that all share."""
        return self.texts.tails

    @property
    def length(self) -> int:
        """The number of tokens generated so far."""
        return int(self.texts.sizes[LENGTH])

    @property
    def remaining(self) -> int:
        """The number of tokens that may still be generated."""
        return self.limits.max_new_tokens - self.length

    @property
    def over(self) -> bool:
        """Whether the session is over, by failure or by its limits."""
        if self.failure is not None:
            return True
        return bool(is_session_over(self.finished, self.limits.stop, self.beams.scores, self.length))

    def failing_alone(self, who: str = "") -> AbstractContextManager[None]:
        """Return a context whose errors end this session and no other."""
        return failing_together([self], who)

    def fail(self, error: Exception, who: str) -> None:
        """End the session with this error; its message names the prompt."""
        kind: type[SpecbeamError] = BrokenPart  # any other error is a fault of a part
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, SpecbeamError):
            kind = type(error)
            what = str(error)
        self.failure = kind(f"prompt {self.number}, step {self.length}: {who}{what}")
        self.failure.__cause__ = error.__cause__ if isinstance(error, BrokenPart) and error.__cause__ else error

    def new_tokens(self, forest: Forest, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n length"]:
        """Return the new tokens up to and including each node; all nodes must have the same depth."""
        return self.paths(forest, nodes)[:, len(self.before) :]

    def paths(self, forest: Forest, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n length"]:
        """Return padding, prompt and new tokens up to and including each node, as logits processors see them."""
        return paths_to(self.texts, self.before, forest, nodes)

    def permits(
        self, forest: Forest, nodes: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]
    ) -> Bool[np.ndarray, " n"]:
        """Return whether the constraint allows each token after its node; all nodes must have the same depth."""
        if self.warp.constraint is None:
            return np.ones(len(nodes), dtype=bool)
        return self.warp.constraint.permits(self.paths(forest, nodes), tokens)

    def finished_with_room(self, draws: int) -> Finished:
        """Return the scores of ended beams, with capacity for `draws` more."""
        held = int(self.finished.held[0])
        if held + draws > len(self.finished.scores):
            scores = np.zeros(2 * (held + draws))
            scores[:held] = self.finished.scores[:held]
            self.finished = Finished(scores, self.finished.held)
        return self.finished

    def advance(self, turn: Turn) -> None:
        """Apply a turn's verdict: store ended beams, extend the live ones, and count."""
        verdict = turn.verdict
        layers = verdict.layers
        if verdict.searched is None:
            self._settle_layers(turn)
            self.count.drafted += turn.forest.size - len(self.start.tokens)
        else:
            self.ended += verdict.searched.texts
            self.texts.sizes[BEAMS] = verdict.beams.size
            self.count.drafted += verdict.searched.drafted
        self.beams = rooted_beams(verdict.beams)
        self.start = self._next_start(turn)
        self.count.add_sources(layers.sources)
        self.count.add_passed(layers.passed)
        if verdict.audit is not None:
            self.audit += verdict.audit
        if verdict.certificate is not None:
            self.certificate = (self.certificate or Certificate()) + verdict.certificate
        self.keep_constraint(self.beams.tokens[:0] if self.over else self.beams.tokens)

    def _settle_layers(self, turn: Turn) -> None:
        """Store the beams that ended in a turn's layers, extend the live ones, and count the widths."""
        verdict = turn.verdict
        layers = verdict.layers
        counts = layers.beams.counts
        draws = int(counts.sum())
        length = self.length + layers.size
        self.texts = room_for_texts(self.texts, max(verdict.beams.size, 1), length)
        ended = room_for_ended(int(counts[layers.ended].sum()), length)
        finished = self.finished_with_room(draws)
        settle_turn(self.texts, finished, ended, turn.forest, layers, verdict.beams, verdict.parents, self.limits.stop)
        self.put_aside(ended)
        start = 0
        for stop in layers.draw_ends.tolist():
            if stop > start:
                self.count.widths.append(int(counts[start:stop].sum()))
            start = stop

    def _next_start(self, turn: Turn) -> Start:
        """Return the beginning of the next forest after a turn."""
        survivors = turn.verdict.beams
        if not self.keeps_nodes or turn.verdict.searched is not None:
            return start_of_roots(survivors.tokens, self.start.known.rows)
        forest = turn.forest
        rows = scored_rows_of(forest, on_host(turn.scored.logits))
        return next_start(forest.tokens, forest.parents, rows, survivors.nodes, survivors.tokens, turn.verdict.kept)

    def put_aside(self, ended: EndedTexts) -> None:
        """Add ended texts to `ended`."""
        start = 0
        for number in range(int(ended.sizes[0])):
            stop = int(ended.ends[number])
            self.ended.append(Ended(ended.tokens[start:stop].tolist(), float(ended.logliks[number])))
            start = stop

    def keep_constraint(self, tokens: Int64[np.ndarray, " beams"]) -> None:
        """Drop all paths of the constraint but those of the live beams, which end with these tokens."""
        if self.warp.constraint is not None:
            live = Forest.rooted(tokens)
            self.warp.constraint.keep(self.new_tokens(live, np.arange(live.size)))

    def hypotheses(self) -> Iterator[Ended]:
        """Yield all texts of the session: ended beams, then live ones that were cut off."""
        yield from self.ended
        settled = self.settled
        for tail, score, count in zip(self.tails, self.beams.scores, self.beams.counts, strict=True):
            yield from [Ended([*settled, *tail.tolist()], float(score), finished=False)] * int(count)

    def report(self, tokens: int) -> Report:
        """Return law and cost of the session so far, for an answer of this number of new tokens."""
        seconds = time.perf_counter() - self.count.began
        return Report(
            law=self.parts.law,
            tokens=tokens,
            target_passes=self.count.target_passes,
            draft_passes=self.count.draft_passes,
            accepted=self.count.accepted,
            widths=list(self.count.widths),
            seconds=seconds,
            peak_kv_tokens=self.count.peak_kv_tokens,
            audit=self.audit if self.audited else None,
            certificate=self.certificate,
            rows=self.count.rows,
        )


@contextmanager
def failing_together(sessions: Sequence[Session], who: str = "") -> Iterator[None]:
    """Let errors end these sessions and no other."""
    try:
        yield
    except Exception as error:
        for session in sessions:
            session.fail(error, who)
