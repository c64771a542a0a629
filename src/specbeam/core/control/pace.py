"""PLAN: whether sessions draft at all, by the time that their layers really took with drafts and without.

The odds and costs by which drafts are chosen are estimates. Where a draft hardly pays, as with a target that is nearly as
fast as its draft model, their errors are larger than what there is to gain. So sessions of a kind take turns: a phase with
drafts, a phase without, then as it was faster. The slower way is tried again from time to time, and less and less often.
Only for rules whose texts do not depend on the drafts.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from specbeam.core.compiling.threads import allowed_threads
from specbeam.core.control.depth import DepthByCost
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.planning import Plan, plan_of_shape
from specbeam.core.measure.kept_figures import Figures, FlagField, NumberField, RecordFields
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session

LEAST_SESSIONS = 8  # of a phase
SAMPLES = 24  # of each way; older ones are forgotten
FIRST_WAIT = 6  # phases until the slower way is tried again; doubled each time
LONGEST_WAIT = 96
_PACE = Figures(
    "pace",
    RecordFields(
        {
            "drafted": NumberField((None,)),
            "undrafted": NumberField((None,)),
            "drafts": FlagField(),
            "best": FlagField(),
            "wait": NumberField(least=FIRST_WAIT, most=LONGEST_WAIT, is_whole=True),
            "until_trial": NumberField(most=LONGEST_WAIT, is_whole=True),
        },
        lambda record: max(len(record["drafted"]), len(record["undrafted"])) <= SAMPLES,
    ),
)


@dataclass(frozen=True)
class Phase:
    """The way in which a session goes."""

    number: int
    drafts: bool
    is_pure: bool  # whether no session of an earlier phase was running when it began


@dataclass
class Pace:
    """The pace of the sessions of one kind: seconds per layer, with drafts and without."""

    paces: dict[bool, deque[float]] = field(
        default_factory=lambda: {drafts: deque(maxlen=SAMPLES) for drafts in (True, False)}
    )
    number: int = 0  # of the present phase
    drafts: bool = True  # whether its sessions draft
    best: bool = True  # the way that is faster, as far as it is known
    sampled: int = 0  # sessions of this phase that were timed
    wait: int = FIRST_WAIT
    until_trial: int = FIRST_WAIT  # phases
    live: dict[int, int] = field(default_factory=dict)  # number of sessions under way by phase

    def enter(self) -> Phase:
        """Return the way in which a new session goes."""
        others = sum(count for number, count in self.live.items() if number != self.number)
        self.live[self.number] = self.live.get(self.number, 0) + 1
        return Phase(self.number, self.drafts, others == 0)

    def leave(self, phase: Phase, seconds: float, layers: int, sessions: int) -> None:
        """Note the pace of a session that is over.

        Args:
            seconds: those of its turns, by equal shares where several sessions went side by side; NaN if they do not count.
            layers: number of layers that it decided.
            sessions: the least number of sessions of a phase.
        """
        self.live[phase.number] -= 1
        if not self.live[phase.number]:
            del self.live[phase.number]
        if layers == 0 or not phase.is_pure or math.isnan(seconds):
            return
        self.paces[phase.drafts].append(seconds / layers)
        self.sampled += phase.number == self.number
        if self.sampled >= sessions:
            self._begin_phase()

    def _begin_phase(self) -> None:
        was_trial = self.drafts != self.best
        self.number += 1
        self.sampled = 0
        if not self.paces[not self.drafts]:
            self.drafts = not self.drafts
            return
        faster = min((True, False), key=lambda drafts: statistics.median(self.paces[drafts]))
        if faster != self.best:
            self.best = faster
            self.wait = FIRST_WAIT
            self.until_trial = self.wait
        elif was_trial:
            self.wait = min(2 * self.wait, LONGEST_WAIT)
            self.until_trial = self.wait
        else:
            self.until_trial -= 1
        self.drafts = self.best if self.until_trial > 0 else not self.best


class PaceMemory:
    """The paces of the sessions of a pair, by their kind and by how many go side by side.

    They are kept on disk for later processes, if there is a key. They change how fast texts come, and not which texts; but
    where rows of a pass depend in their last bits on how many there are, as in transformers' forward and on GPUs, a near
    tie can go the other way.

    Args:
        key: JSON values that name the pair; None: keep nothing on disk.
    """

    def __init__(self, key: Any = None) -> None:
        self.key = key
        self._paces: dict[str, Pace] = {}
        self._lock = Lock()

    def enter(self, kind: str) -> Phase:
        """Return the way in which a new session goes."""
        with self._lock:
            if kind not in self._paces:
                self._paces[kind] = self._load(kind)
            return self._paces[kind].enter()

    def leave(self, kind: str, phase: Phase, seconds: float, layers: int, batch_size: int) -> None:
        """Note the pace of a session that is over, in a batch of `batch_size`; see `Pace.leave`."""
        with self._lock:
            pace = self._paces[kind]
            before = pace.number
            pace.leave(phase, seconds, layers, max(LEAST_SESSIONS, 2 * batch_size))
            if pace.number != before and self.key is not None:
                record = {
                    "drafted": list(pace.paces[True]),
                    "undrafted": list(pace.paces[False]),
                    "drafts": pace.drafts,
                    "best": pace.best,
                    "wait": pace.wait,
                    "until_trial": pace.until_trial,
                }
                _PACE.keep([self.key, kind], record)

    def _load(self, kind: str) -> Pace:
        """Return what is kept on disk, or a new pace."""
        pace = Pace()
        record = None if self.key is None else _PACE.load([self.key, kind])
        if record is not None:
            pace.paces[True].extend(record["drafted"])
            pace.paces[False].extend(record["undrafted"])
            pace.drafts = record["drafts"]
            pace.best = record["best"]
            pace.wait = record["wait"]
            pace.until_trial = record["until_trial"]
        return pace


def side_by_side(batch_size: int) -> str:
    """Return the name of the size class of a batch: 1, 2 to 3, 4 to 7, ... sessions."""
    return f"2^{batch_size.bit_length() - 1} side by side"


@dataclass(frozen=True)
class Entered:
    """How a session goes: what `enter_pace` decided."""

    kind: str
    batch_size: int  # sessions running when this one began, itself included
    phase: Phase


NO_DRAFTS = plan_of_shape(0, 1)


@dataclass(frozen=True)
class DraftsIfFaster:
    """A controller that plans as another one does, and whose sessions draft only while this is the faster way.

    A session drafts in all of its turns or in none, by how fast those before it were (`Pace`). Only where its rule says that
    the text does not depend on the drafts, as at temperature 0 (`Rule.ignores_drafts`); any other session drafts.

    Args:
        planned: plans the drafts.
        drafts: names the drafts, so that sessions are compared with those that draft in the same way.
        paces: how fast earlier sessions were with drafts and without.
    """

    planned: FixedShape | DepthByCost
    drafts: str
    paces: PaceMemory = field(default_factory=PaceMemory, compare=False)

    def enter(self, session: Session, batch_size: int) -> bool:
        """Return whether a new session drafts, in a batch of `batch_size`. One that is audited always does."""
        rule: Any = session.parts.rule
        if not _speaks_for_itself(rule) or not rule.ignores_drafts(session) or session.audited:
            return True
        warp = session.warp
        return enter_pace(self, session, f"{self.drafts}, {rule!r}, {warp.greedy=}, cuts={warp.cut.cuts}", batch_size)

    def plan(self, session: Session) -> Shape:
        return self.planned.plan(session) if has_drafts(self, session) else Shape(0, 0)

    def numbers(self, session: Session) -> Plan:
        """Return the plan as numbers for steps."""
        return self.planned.numbers(session) if has_drafts(self, session) else NO_DRAFTS

    def settle(self, session: Session, turn: Turn) -> None:
        if has_drafts(self, session):
            self.planned.settle(session, turn)

    def remember(self, session: Session) -> None:
        """Note how fast a session was, which is over."""
        leave_pace(self, session)


def _speaks_for_itself(rule: object) -> bool:
    """Return whether the class that judges drafts says itself whether texts depend on them, and not one above it."""
    judging = next((kind for kind in type(rule).__mro__ if "verify" in vars(kind)), None)
    return judging is not None and "ignores_drafts" in vars(judging)


def enter_pace(controller: Any, session: Session, kind: str, batch_size: int) -> bool:
    """Return whether a new session drafts, as a controller with `paces` has found it faster for sessions of this kind.

    Args:
        batch_size: number of sessions in the batch, itself included.
    """
    kind = f"{kind}, {side_by_side(batch_size)}, {allowed_threads()} threads"
    phase: Phase = controller.paces.enter(kind)
    session.state[controller, Entered] = Entered(kind, batch_size, phase)
    return phase.drafts


def has_drafts(controller: Any, session: Session) -> bool:
    """Return whether a session drafts; one that no pace was asked for does."""
    entered: Entered | None = session.state.get((controller, Entered))
    return entered is None or entered.phase.drafts


def leave_pace(controller: Any, session: Session) -> None:
    """Note the pace of a session that is over, however it ended; only that of a whole text counts."""
    entered: Entered | None = session.state.pop((controller, Entered), None)
    if entered is None:
        return
    is_whole = session.over and session.failure is None
    layers = len(session.count.widths) if is_whole else 0
    controller.paces.leave(entered.kind, entered.phase, session.count.seconds, layers, entered.batch_size)
