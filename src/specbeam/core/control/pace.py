"""PLAN: whether sessions draft at all, by the measured time per layer with and without drafts.

The odds and costs that determine drafts are estimates. If drafts hardly pay, for example with a target that is nearly as
fast as its draft model, the errors of these estimates exceed the possible gain. So sessions of a kind alternate: one phase
with drafts, one without, then the faster mode. The slower mode is tried again at growing intervals. This is only for
rules whose texts do not depend on the drafts.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from specbeam.core.control.depth import DepthByCost
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.planning import Plan, plan_of_shape
from specbeam.core.measure.saved_figures import Figures, FlagField, NumberField, RecordFields
from specbeam.core.records import Shape, Turn
from specbeam.core.session import Session
from specbeam.core.threads import allowed_threads

LEAST_SESSIONS = 8  # minimum number of sessions of a phase
# Sessions and seconds after which a trial without drafts ends earlier: its pace varies little from text to text.
FEW_SESSIONS = 3
FEW_S = 1.0
SAMPLES = 24  # latest samples kept of each mode
FIRST_WAIT = 6  # phases until the slower mode is tried again; doubled each time
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
    """The phase to which a session belongs."""

    number: int
    drafts: bool
    is_pure: bool  # whether no session of another phase was running when the session began


@dataclass
class Pace:
    """The pace of the sessions of one kind: seconds per layer, with drafts and without."""

    paces: dict[bool, deque[float]] = field(
        default_factory=lambda: {drafts: deque(maxlen=SAMPLES) for drafts in (True, False)}
    )
    number: int = 0  # number of the current phase
    drafts: bool = True  # whether sessions of the current phase draft
    best: bool = True  # whether the faster mode known so far drafts
    sampled: int = 0  # timed sessions of the current phase
    spent_s: float = 0.0  # seconds of these
    wait: int = FIRST_WAIT
    until_trial: int = FIRST_WAIT  # phases until the slower mode is tried again
    live: dict[int, int] = field(default_factory=dict)  # number of running sessions by phase

    def enter(self) -> Phase:
        """Return the phase of a new session."""
        others = sum(count for number, count in self.live.items() if number != self.number)
        self.live[self.number] = self.live.get(self.number, 0) + 1
        return Phase(self.number, self.drafts, others == 0)

    def leave(self, phase: Phase, seconds: float, layers: int, sessions: int) -> None:
        """Record the pace of a finished session.

        Args:
            seconds: time of its turns; in a batch, its equal share; NaN if the session does not count.
            layers: number of layers that it decided.
            sessions: number of sessions of a phase; of one without drafts, fewer if they are long.
        """
        self.live[phase.number] -= 1
        if not self.live[phase.number]:
            del self.live[phase.number]
        if layers == 0 or not phase.is_pure or math.isnan(seconds):
            return
        self.paces[phase.drafts].append(seconds / layers)
        if phase.number == self.number:
            self.sampled += 1
            self.spent_s += seconds
        is_known = self.best and not self.drafts and self.sampled >= FEW_SESSIONS and self.spent_s >= FEW_S
        if self.sampled >= sessions or is_known:
            self._begin_phase()

    def _begin_phase(self) -> None:
        was_trial = self.drafts != self.best
        self.number += 1
        self.sampled = 0
        self.spent_s = 0.0
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
    """The paces of the sessions of a pair, by kind of session and batch size.

    With a key they are saved on disk for later processes. They change the speed and not the texts; but where the last bits
    of a pass depend on its number of rows, as in transformers' forward and on GPUs, near ties can be decided differently.

    Args:
        key: JSON values that identify the pair; None: save nothing on disk.
    """

    def __init__(self, key: Any = None) -> None:
        self.key = key
        self._paces: dict[str, Pace] = {}
        self._lock = Lock()

    def enter(self, kind: str) -> Phase:
        """Return the phase of a new session."""
        with self._lock:
            if kind not in self._paces:
                self._paces[kind] = self._load(kind)
            return self._paces[kind].enter()

    def leave(self, kind: str, phase: Phase, seconds: float, layers: int, batch_size: int) -> None:
        """Record the pace of a finished session; see `Pace.leave`."""
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
        """Return the pace on disk, or a new one."""
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
    """The decision of `enter_pace` for a session."""

    kind: str
    batch_size: int  # number of sessions running when this one began, including it
    phase: Phase


NO_DRAFTS = plan_of_shape(0, 1)


@dataclass(frozen=True)
class DraftsIfFaster:
    """A controller that plans as another one does, but only for sessions that are faster with drafts.

    A session drafts in all of its turns or in none, depending on the pace of earlier sessions (`Pace`). This applies
    only if its rule states that the text does not depend on the drafts, for example at temperature 0
    (`Rule.ignores_drafts`). Other sessions always draft.

    Args:
        planned: plans the drafts.
        drafts: name of the kind of drafts; sessions are compared only with sessions of the same kind.
        paces: the paces of earlier sessions with and without drafts.
    """

    planned: FixedShape | DepthByCost
    drafts: str
    paces: PaceMemory = field(default_factory=PaceMemory, compare=False)

    def enter(self, session: Session, batch_size: int) -> bool:
        """Return whether a new session drafts. An audited session always does."""
        rule: Any = session.parts.rule
        if not _speaks_for_itself(rule) or not rule.ignores_drafts(session) or session.audited:
            return True
        warp = session.warp
        return enter_pace(self, session, f"{self.drafts}, {rule!r}, {warp.greedy=}, cuts={warp.cut.cuts}", batch_size)

    @property
    def largest(self) -> Shape:
        """The largest shape that it plans."""
        return self.planned.largest

    def plan(self, session: Session) -> Shape:
        return self.planned.plan(session) if has_drafts(self, session) else Shape(0, 0)

    def numbers(self, session: Session) -> Plan:
        """Return the plan for steps."""
        return self.planned.numbers(session) if has_drafts(self, session) else NO_DRAFTS

    def settle(self, session: Session, turn: Turn) -> None:
        if has_drafts(self, session):
            self.planned.settle(session, turn)

    def remember(self, session: Session) -> None:
        """Record the pace of a finished session."""
        leave_pace(self, session)


def _speaks_for_itself(rule: object) -> bool:
    """Return whether the class that defines `verify` also defines `ignores_drafts`, instead of inheriting it."""
    judging = next((kind for kind in type(rule).__mro__ if "verify" in vars(kind)), None)
    return judging is not None and "ignores_drafts" in vars(judging)


def enter_pace(controller: Any, session: Session, kind: str, batch_size: int) -> bool:
    """Return whether a new session drafts: whether sessions of this kind are faster with drafts, by `controller.paces`.

    Args:
        batch_size: number of sessions in the batch, including the new one.
    """
    kind = f"{kind}, {side_by_side(batch_size)}, {allowed_threads()} threads"
    phase: Phase = controller.paces.enter(kind)
    session.state[controller, Entered] = Entered(kind, batch_size, phase)
    return phase.drafts


def has_drafts(controller: Any, session: Session) -> bool:
    """Return whether a session drafts; sessions without `enter_pace` do."""
    entered: Entered | None = session.state.get((controller, Entered))
    return entered is None or entered.phase.drafts


def leave_pace(controller: Any, session: Session) -> None:
    """Record the pace of a finished session. It counts only if the text is complete."""
    entered: Entered | None = session.state.pop((controller, Entered), None)
    if entered is None:
        return
    is_whole = session.over and session.failure is None
    layers = len(session.count.widths) if is_whole else 0
    controller.paces.leave(entered.kind, entered.phase, session.count.seconds, layers, entered.batch_size)
