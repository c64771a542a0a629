"""What is alive in one generation: beams, scores, dice, limits, the state of each part."""

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt32, UInt64

from specbeam import dice, kernels
from specbeam.errors import BadSetting, BrokenPart, LostLaw, SpecbeamError
from specbeam.forest import Forest
from specbeam.limits import Ended, Limits
from specbeam.probs import Warp
from specbeam.records import Audit, Beams, Certificate, Report, Shape, Step, Turn, Verdict


@runtime_checkable
class Seat(Protocol):
    """What a language model needs of a session."""

    prompt: list[int]
    state: dict[Hashable, Any]


@runtime_checkable
class Controller(Protocol):
    """PLAN: how deep and how wide the next draft is."""

    def plan(self, session: "Session") -> Shape: ...

    def settle(self, session: "Session", turn: Turn) -> None: ...


@runtime_checkable
class Drafter(Protocol):
    """DRAFT: guesses hung under the live beams, for many sessions at once."""

    def draft(self, sessions: list["Session"], shapes: list[Shape]) -> list[Forest]: ...

    def settle(self, session: "Session", turn: Turn) -> None: ...

    def close(self, session: "Session") -> None: ...


@runtime_checkable
class Rule(Protocol):
    """VERIFY: what lives on. `scored` holds the target's logits of every forest node."""

    def verify(self, session: "Session", forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict: ...


def is_part(value: object, kind: type) -> bool:
    """Whether it is a part of this kind, and not the class of one."""
    return isinstance(value, kind) and not isinstance(value, type)


@dataclass(frozen=True)
class Parts:
    """The parts that decode one session.

    A drafter may have `law_lost`, which says why the law of its drafts is not known, and a rule `tries`, which says that it
    needs to know it. Raises `LostLaw` where the two meet.
    """

    drafter: Drafter
    rule: Rule
    controller: Controller
    law: str

    def __post_init__(self) -> None:
        if type(self.drafter).__hash__ is None:
            raise BadSetting(f"{type(self.drafter).__name__} has no hash, and sessions are told apart by their drafters: "
                             "make it a @dataclass(frozen=True) or @dataclass(eq=False)")  # fmt: skip
        why = getattr(self.drafter, "law_lost", "")
        if why and getattr(self.rule, "tries", False):
            raise LostLaw(
                f"{type(self.rule).__name__} tries drafts against the law they were drawn from, and "
                f"{type(self.drafter).__name__} {why}; such drafts can only be matched: MatchRule"
            )


@dataclass
class Counters:
    target_passes: int = 0
    draft_passes: int = 0
    accepted: int = 0
    widths: list[int] = field(default_factory=list)
    peak_kv_tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        """Start the clock."""
        self.began = time.perf_counter()


class Tape:
    """Tokens in a buffer that grows."""

    def __init__(self, tokens: list[int]) -> None:
        self._room, self._size = np.array(tokens, dtype=np.int64), len(tokens)

    @property
    def tokens(self) -> Int64[np.ndarray, " length"]:
        """A view, valid until the next `append`."""
        return self._room[: self._size]

    def append(self, tokens: Int64[np.ndarray, " more"]) -> None:
        size = self._size + len(tokens)
        if size > len(self._room):
            self._room = np.append(self.tokens, np.zeros(size, dtype=np.int64))
        self._room[self._size : size] = tokens
        self._size = size


class Session:
    """One generation. Rooms read it; only `advance` and each part's own entry in `state` change."""

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
        self.prompt, self.parts, self.warp, self.limits, self.place = prompt, parts, warp, limits, place
        self.number = place if number is None else number  # of the prompt, of which several sessions may be drawn
        self.dice = dice.Dice(key)
        self.beams = Beams.start(prompt[-1], self.dice.key)
        self.pad([])
        self.tails = np.zeros((1, 0), dtype=np.int64)  # what each live beam has behind them
        self.ended: list[Ended] = []
        self.failure: SpecbeamError | None = None
        self.state: dict[Hashable, Any] = {}
        self.beside = 1  # sessions that share the present pass, itself included; told by the loop
        self.shape = Shape(0, 0)  # that was planned for the present turn; told by the loop
        self.audited, self.audit = audited, Audit()
        self.certificate: Certificate | None = None
        self.count = Counters()
        self._noise: dict[int, np.ndarray] = {}

    def pad(self, padding: list[int]) -> None:
        """What stands before the prompt in a padded batch: logits processors see it. For sessions that have not begun."""
        self._head = len(padding) + len(self.prompt)
        self._text = Tape([*padding, *self.prompt])
        if self.warp.constraint is not None:
            self.warp.constraint.prompt_length = self._head

    @property
    def settled(self) -> list[int]:
        """New tokens that all live beams share."""
        return self._text.tokens[self._head :].tolist()

    @property
    def length(self) -> int:
        """Tokens generated so far."""
        return len(self._text.tokens) - self._head + self.tails.shape[1]

    @property
    def remaining(self) -> int:
        return self.limits.max_new_tokens - self.length

    @property
    def over(self) -> bool:
        if self.failure is not None:
            return True
        return self.limits.enough(self.ended, self.beams.scores, self.length)

    def failing_alone(self, who: str = "") -> AbstractContextManager[None]:
        """What goes wrong for this prompt ends this session and no other."""
        return failing_together([self], who)

    def fail(self, error: Exception, who: str) -> None:
        """End with this error, said of this prompt."""
        kind: type[SpecbeamError]
        kind, what = BrokenPart, f"{type(error).__name__}: {error}"  # a part of somebody's own, or a mistake of ours
        if isinstance(error, SpecbeamError):
            kind, what = type(error), str(error)
        self.failure = kind(f"prompt {self.number}, step {self.length}: {who}{what}")
        self.failure.__cause__ = error

    def new_tokens(self, forest: Forest, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n length"]:
        """Generated tokens up to and with each node; the nodes must be equally deep."""
        return self.paths(forest, nodes)[:, self._head :]

    def paths(self, forest: Forest, nodes: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, "n length"]:
        """Padding, prompt and generated tokens up to and with each node: what logits processors look at."""
        shared, below = self._text.tokens, forest.below(nodes)
        known = len(shared) + self.tails.shape[1]
        paths = np.empty((len(nodes), known + below.shape[1]), dtype=np.int64)
        paths[:, : len(shared)] = shared
        paths[:, len(shared) : known] = self.tails[forest.root_of(nodes)]
        paths[:, known:] = below
        return paths

    def permits(
        self, forest: Forest, nodes: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]
    ) -> Bool[np.ndarray, " n"]:
        """Whether the constraint lets each token follow its node; the nodes must be equally deep."""
        if self.warp.constraint is None:
            return np.ones(len(nodes), dtype=bool)
        return self.warp.constraint.permits(self.paths(forest, nodes), tokens)

    def coarse_noise(self, keys: UInt64[np.ndarray, " n"], vocab: int) -> UInt32[np.ndarray, "n vocab"]:
        """`dice.coarse` of the next token after each path; draft and target ask for the same rows within a turn."""
        missing = [key for key in dict.fromkeys(keys.tolist()) if key not in self._noise]
        if missing:
            self._noise.update(zip(missing, dice.coarse(np.array(missing, dtype=np.uint64), vocab), strict=True))
        return np.stack([self._noise[key] for key in keys.tolist()])

    def advance(self, turn: Turn) -> None:
        """Move on to where the verdict leads: ended beams are put aside, the others live on."""
        for step in turn.verdict.steps:
            self.ended += self.retired(turn.forest, step)
            if len(step.beams):
                self.count.widths.append(int(step.beams.counts.sum()))
        verdict = turn.verdict
        common, self.tails = kernels.prolonged(
            self.tails, turn.forest.tokens, turn.forest.parents, verdict.parents, verdict.beams.tokens
        )
        self._text.append(common)
        self.beams = verdict.beams.rooted()
        self.count.accepted += verdict.accepted
        self._noise.clear()
        if verdict.audit is not None:
            self.audit += verdict.audit
        if verdict.certificate is not None:
            self.certificate = (self.certificate or Certificate()) + verdict.certificate
        if self.warp.constraint is not None:
            live = Forest.rooted(self.beams.tokens[:0] if self.over else self.beams.tokens)
            self.warp.constraint.keep(self.new_tokens(live, np.arange(len(live))))

    def leap(
        self,
        live: Beams,
        origins: Int64[np.ndarray, " beams"],
        texts: Int64[np.ndarray, "beams span"],
        ended: list[Ended],
    ) -> None:
        """Move on over several turns at once, to beams that are so much longer than those they began as."""
        tails = np.concatenate([self.tails[origins], texts], axis=1)
        if len(tails):
            common = tails.shape[1]
            if len(tails) > 1 and not (same := (tails == tails[:1]).all(0)).all():
                common = int(same.argmin())
            self._text.append(tails[0, :common])
            tails = tails[:, common:].copy()
        self.tails, self.beams, self.ended = tails, live, [*self.ended, *ended]
        self._noise.clear()

    def retired(self, forest: Forest, step: Step) -> list[Ended]:
        """The beams of a step that ended with it."""
        gone: list[Ended] = []
        if step.ended.any():
            which = np.flatnonzero(step.ended)
            before = self.new_tokens(forest, step.parents[which])
            for path, beam in zip(before, which, strict=True):
                tokens = [*path.tolist(), int(step.beams.tokens[beam])]
                gone += [Ended(tokens, float(step.beams.scores[beam]))] * int(step.beams.counts[beam])
        return gone

    def hypotheses(self) -> Iterator[Ended]:
        """Everything the session can answer with: ended beams, then live ones that were cut off."""
        yield from self.ended
        settled = self.settled
        for tail, score, count in zip(self.tails, self.beams.scores, self.beams.counts, strict=True):
            yield from [Ended([*settled, *tail.tolist()], float(score), finished=False)] * int(count)

    def report(self, tokens: int) -> Report:
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
        )


@contextmanager
def failing_together(sessions: Sequence[Session], who: str = "") -> Iterator[None]:
    """What goes wrong ends these sessions and no other."""
    try:
        yield
    except Exception as error:
        for session in sessions:
            session.fail(error, who)
