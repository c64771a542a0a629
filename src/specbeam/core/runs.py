"""Runs: many turns in one compiled loop, for one session, or for several sessions in parallel."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbeam.core.answers import LOGITS
from specbeam.core.audit import Audit
from specbeam.core.beams import (
    LENGTH,
    Beams,
    is_session_over,
    room_for_ended,
    room_for_texts,
)
from specbeam.core.by_address import ByAddress
from specbeam.core.compiling.held import Held, addresses_of
from specbeam.core.control.planning import NEVER, deepest_of
from specbeam.core.control.stopping import stops_of
from specbeam.core.control.width import FixedWidths, is_for_steps
from specbeam.core.dice import Uniforms
from specbeam.core.draft.batch import models_of
from specbeam.core.draft.turns import draft_turn, nodes_of, rows_kept, uniforms_of
from specbeam.core.errors import BrokenPart, UnknownKind
from specbeam.core.forest import (
    MOST_KEPT,
    KnownRows,
    Start,
)
from specbeam.core.laws.edits import NO_EDITS
from specbeam.core.laws.evidence import no_evidence
from specbeam.core.laws.listing import LISTED_FROM, MOST_LISTED, as_listed, joined_listing
from specbeam.core.laws.reduce import SOUND
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import SPAN, Limits
from specbeam.core.lm import LM, RunLM, runs_turns, shares_passes
from specbeam.core.measure.profiler import apportion
from specbeam.core.passes import whole_rows_again
from specbeam.core.ranked import WHOLE, Listing, are_of_form, are_whole, room_for_listing, rows_for_steps
from specbeam.core.records import RowCounts
from specbeam.core.rows_in_python import RowsOfSession
from specbeam.core.run_steps import run_turns
from specbeam.core.session import Parts, Session, failing_together
from specbeam.core.steps import Array
from specbeam.core.threads import allowed_threads, torch_on_one_thread
from specbeam.core.together_steps import RunInputs, Standing, run_turns_together
from specbeam.core.turn_steps import (
    DONE,
    DRAFT_PASSES,
    DRAFT_SCORED,
    DRAFTED,
    LAYERS,
    LOOK,
    PARTS,
    REFUSED,
    ROWS,
    SCORED,
    RunRoom,
    RunSpec,
    keys_in,
)
from specbeam.core.verify.turns import ends_between_layers, verify_turn

READ_IN_PYTHONS_TIME = 2_000_000  # weights that a processor multiplies in the time that Python spends per session
MOST_UNIFORMS = 2**17  # most uniforms drawn for a run, unless one turn may need more
TURNS = 32  # most turns of a run: between runs a user can interrupt
PATIENCE = 0.5  # seconds of a run of several sessions after which a user can interrupt
_NO_TOKENS = np.zeros(0, dtype=np.bool_)


class _Refused:
    """A key in the state of a session: a turn did not run compiled, so all further turns are taken in Python."""


class _Looking:
    """A key in the state of a session: the turn before which a run stopped, because Python has to look for stop strings."""


def spec_of(part: object, verb: str, session: Session) -> Any:
    """Return the spec with which steps run a verb of a part; None if the part has none.

    A subclass that overrides the verb but not the spec runs in Python.
    """
    for kind in type(part).__mro__:
        if verb in vars(kind):
            return part.spec(session) if "spec" in vars(kind) else None  # type: ignore[attr-defined]
    return None


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """The turns of a session in the form that steps take, and the models that they run."""

    spec: RunSpec
    models: list[RunLM]  # the target, and the draft model if there is one
    makes_rows: bool  # whether Python processes the rows of logits


def planned_run(target: LM, session: Session, most_turns: int) -> PlannedRun | None:
    """Return the turns of a session in the form that steps take; None if a part decides in Python.

    Raises `UnknownKind` if no step is registered for the spec of a part.
    """
    warp = session.warp
    if not getattr(target, "supports_runs", False) or _Refused in session.state:
        return None
    closing = session.limits.closing if session.limits.stop_strings else _NO_TOKENS
    if not warp.is_for_runs or closing is None:
        return None
    if session.state.get(_Looking) == session.count.target_passes:
        return None
    parts = session.parts
    if parts.own_needs != LOGITS:
        return None
    rule = spec_of(parts.rule, "verify", session)
    plan = numbers_of(parts.controller, session)
    if rule is None or plan is None:
        return None
    if len(closing) > 0 and ends_between_layers(rule):
        return None
    widths = widths_of(parts.rule, session)
    if not is_for_steps(widths):
        return None
    drafts = _drafts_of(parts.drafter, parts.controller, session, most_turns * deepest_of(plan))
    drafting = models_of(parts.drafter)
    if drafts is None or drafting is None or len(drafting) > 1:
        return None
    models: list[Any] = [target, *drafting]
    if any(not getattr(lm, "supports_runs", False) or lm.vocab != target.vocab for lm in models):
        return None
    verify_turn.step_of(type(rule))
    draft_turn.step_of(type(drafts))
    edits = warp.edits(session.prompt)
    spec = RunSpec(
        plan, drafts, len(drafting) > 0, rule, widths, session.limits.stop, edits or NO_EDITS, 0, closing, widths.most,
        most_turns, _listing_for(target, session, plan.width), session.keeps_nodes,
    )  # fmt: skip
    return PlannedRun(spec, models, edits is None and not warp.takes_raw_rows)


def listing_of(session: Session, width: int, vocab: int) -> Listing:
    """Return the lists of tokens that serve the rule and the drafter of a session; WHOLE if a part needs whole rows.

    Args:
        width: number of draft beams in a layer.
    """
    found = listing_of_parts(session, width)
    pays = vocab >= LISTED_FROM and found.length <= min(MOST_LISTED, vocab // 4)
    return found if pays else WHOLE


def listing_of_parts(session: Session, width: int) -> Listing:
    """Return the shortest lists that serve the rule and the drafter of a session, even if they do not pay."""
    parts = session.parts
    decides = getattr(parts.rule, "listing", None)
    drafts = getattr(parts.drafter, "listing", None)
    if decides is None or drafts is None:
        return WHOLE
    if session.audited or not session.warp.takes_raw_rows:
        return WHOLE
    return joined_listing(decides(session), drafts(session, width))


def _listing_for(target: LM, session: Session, width: int) -> Listing:
    """Return the lists that a target returns for a session; WHOLE unless its attribute `returns_lists` is True.

    A target that cannot return any lists, or whole rows, has a method `listing_for` that answers what the parts ask for.
    """
    if not getattr(target, "returns_lists", False):
        return WHOLE
    if hasattr(target, "listing_for"):
        found: Listing = target.listing_for(session, listing_of_parts(session, width))
        return found
    return listing_of(session, width, target.vocab)


def widths_of(rule: object, session: Session) -> Any:
    """Return the spec with which steps choose the widths of a rule's layers, or a policy that chooses in Python.

    A rule without a method `widths` judges one sequence.
    """
    widths = getattr(rule, "widths", None)
    return FixedWidths(1) if widths is None else widths(session)


def _drafts_of(drafter: object, controller: object, session: Session, tosses: int) -> Any:
    """Return the spec with which steps draft; None if a part drafts in Python.

    Args:
        tosses: maximum number of coins that a run tosses for the controller.
    """
    drafts = spec_of(drafter, "draft", session)
    stops = stops_of(controller, session, tosses)
    if stops is None or drafts is None:
        return None
    if stops.kind == NEVER:
        return drafts
    return drafts._replace(stops=stops) if "stops" in drafts._fields else None


def numbers_of(controller: object, session: Session) -> Any:
    """Return the record with which steps plan in place of a controller; None if it plans in Python.

    Raises `UnknownKind` if the record has no field `width`.
    """
    for kind in type(controller).__mro__:
        if "plan" in vars(kind):
            plan = controller.numbers(session) if "numbers" in vars(kind) else None  # type: ignore[attr-defined]
            if plan is not None and not hasattr(plan, "width"):
                name = f"{type(plan).__module__}.{type(plan).__qualname__}"
                raise UnknownKind(
                    f"{name} has no field width; the record of a plan holds the draft nodes per layer there"
                )
            return plan
    return None


@dataclass(eq=False)
class Run:
    """Turns of one session as one compiled loop: its arguments and its results."""

    session: Session
    spec: RunSpec
    models: list[RunLM]
    room: RunRoom
    fresh: int  # maximum number of nodes that a turn drafts
    dice: Uniforms
    live: Beams
    start: Start
    python: "RowsOfSession | None" = None  # the callbacks of the run
    condition: int = SOUND

    @classmethod
    def of(cls, target: LM, session: Session, most_turns: int) -> "Run | None":
        """Return a run of at most `most_turns` turns; None if the session cannot be decoded in runs."""
        session.batch_size = 1
        paused: PausedRun | None = session.state.pop(PausedRun, None)
        if paused is not None and paused.fits(session, most_turns):
            return paused.run_of(session)
        planned = planned_run(target, session, most_turns)
        if planned is None:
            return None
        spec = planned.spec
        models = planned.models
        deepest = deepest_of(spec.plan)
        fresh = _most_nodes(spec, session, deepest)
        if any(lm.for_run(session, fresh, spec.most_beams, 0) is None for lm in models):
            return None
        dice = session.dice.ready(_uniforms_of(spec, fresh, session.beams.size, deepest))
        room = _room_for(spec, session, models[-1].vocab)
        spec = spec._replace(edits=spec.edits._replace(texts=room.texts))
        python = None
        if planned.makes_rows:
            python = RowsOfSession(session)
            spec = python.for_run(spec)
        if not are_of_form(session.start.known.rows, spec.listing):
            take_whole_rows(target, session)
        start = session.start
        rows = rows_for_steps(start.known.rows)
        if spec.listing.length > 0 and are_whole(rows):
            keys = keys_in(session.undrafted, session.beams)[start.known.nodes]
            rows = as_listed(rows, keys, spec.listing)
        known = KnownRows(start.known.nodes, rows)
        return cls(session, spec, models, room, fresh, dice, session.beams, start._replace(known=known), python)

    def caches(self, stack: ExitStack) -> list[Any] | None:
        """Return the session's caches in its models, with capacity for the run until the stack is left.

        Returns None if it cannot run now, because a long prompt has to be stored first. The caches are valid until any
        session gets more capacity.
        """
        more = min(self.session.remaining, SPAN) + (MOST_KEPT if self.spec.keeps_nodes else 0)
        needs = [self.session.parts.needs, *(LOGITS for _ in self.models[1:])]
        for lm in self.models:
            if hasattr(lm, "prepare_run"):
                lm.prepare_run(self.session)
        found = []
        for lm, need in zip(self.models, needs, strict=True):
            cache = lm.for_run(self.session, self.fresh, self.spec.most_beams, more, need)
            if cache is None:
                return None
            found.append(with_listing(stack.enter_context(cache), self.spec.listing))
        if any(cache is None for cache in found):
            return None
        return found

    def take(self, caches: list[Any]) -> None:
        """Take the turns. The interpreter lock is released meanwhile, so several runs can proceed in parallel threads."""
        turns = self.session.count.target_passes
        parts = ByAddress(caches[0], caches[-1], self.spec)
        with errors_of(self.models):
            self.live, self.start, self.condition = run_turns(
                parts.target, parts.draft, parts.spec, self.session.beams, self.start, self.room, turns, self.dice
            )
        early_end = self.session.early_end
        if early_end.follows_ends and self.is_over:
            early_end.ask()

    def job(self, caches: list[Any]) -> "HeldRun":
        """Return the run as one of many in `run_turns_together`."""
        turns = self.session.count.target_passes
        parts = ByAddress(caches[0], caches[-1], self.spec, together=True)
        inputs = Held(RunInputs(parts.target, parts.draft, parts.spec, self.room, self.dice, turns))
        return HeldRun(inputs, parts)

    @property
    def is_held_up(self) -> bool:
        """Whether no further turn can follow in the same loop, because Python has to take it or has failed."""
        return self.condition != SOUND or (self.python is not None and self.python.moved.failure is not None)

    @property
    def is_over(self) -> bool:
        """Whether the session is over."""
        length = int(self.room.texts.sizes[LENGTH])
        return bool(is_session_over(self.room.finished, self.spec.stop, self.live.scores, length))

    def keep(self) -> bool:
        """Apply the run to the session. Returns True if any turn ran. Raises the errors of its constraint."""
        _keep(self.session, self.models, self.room, self.live, self.start)
        if self.python is not None:
            self.python.raise_what_remains()
        if self.condition == REFUSED:
            raise IndexError("a token is outside the model's vocabulary, or a position is beyond its last one")
        if self.condition == LOOK:
            self.session.state[_Looking] = self.session.count.target_passes
        elif self.condition != SOUND:
            self.session.state[_Refused] = True
        done = bool(self.room.numbers[DONE])
        goes_on = done and self.condition == SOUND and not self.session.over
        if goes_on and self.python is None and not self.spec.drafting and self.fresh == 0:
            self.session.state[PausedRun] = PausedRun.of(self)
        return done


@dataclass(frozen=True, eq=False)
class HeldRun:
    """A run in memory, as one of many in `run_turns_together`."""

    inputs: Held
    parts: ByAddress

    @property
    def kind(self) -> Any:
        """The types of its records; the runs of one loop have the same."""
        return (self.inputs.kind, *self.parts.kinds)


@contextmanager
def errors_of(models: Sequence[RunLM]) -> Iterator[None]:
    """Raise the error of a model's callback in place of the `RuntimeError` of the step that called it.

    A model whose steps call Python has a method `take_failure() -> BaseException | None`.
    """
    try:
        yield
    except RuntimeError:
        for lm in models:
            failure = lm.take_failure() if hasattr(lm, "take_failure") else None
            if failure is not None:
                raise failure from None
        raise


def with_listing(cache: Any, listing: Listing) -> Any:
    """Return a cache with the lists that it returns; unchanged if it has no field `listing`, for it returns whole rows."""
    return cache._replace(listing=listing) if hasattr(cache, "listing") else cache


@dataclass(frozen=True, eq=False)
class PausedRun:
    """A run that the next run of its session continues, if nothing is drafted and Python processes no rows.

    Planning a run and allocating its buffers take as long as a turn of a small model.
    """

    run: Run
    parts: Parts
    limits: Limits
    warp: Warp

    @classmethod
    def of(cls, run: Run) -> "PausedRun":
        """Return the record of a finished run, with the settings that it was planned from."""
        session = run.session
        return cls(run, session.parts, session.limits, session.warp)

    def fits(self, session: Session, most_turns: int) -> bool:
        """Return whether the session is unchanged since the run, and its buffers have capacity for as many turns again."""
        run = self.run
        texts = run.room.texts
        is_as_before = session.beams is run.live and session.start is run.start
        goes_as_before = session.parts is self.parts and session.limits is self.limits and session.warp is self.warp
        if not is_as_before or not goes_as_before or session.texts is not texts or most_turns != run.spec.most_turns:
            return False
        draws = most_turns * run.spec.most_beams
        has_room = session.length + most_turns <= texts.tokens.shape[1]
        return has_room and session.finished_with_room(2 * draws) is run.room.finished

    def run_of(self, session: Session) -> Run:
        """Return the next run of the session."""
        run = self.run
        room = run.room
        if session.audited:
            room = room._replace(evidence=no_evidence(not session.warp.greedy))
        for written in (room.ended.sizes, room.numbers, room.passed, room.cycles):
            written[:] = 0
        dice = session.dice.ready(_uniforms_of(run.spec, run.fresh, session.beams.size, deepest_of(run.spec.plan)))
        return replace(run, room=room, dice=dice)


def run_ahead(target: LM, session: Session, most_turns: int = TURNS) -> bool:
    """Advance the only live session by a run, to the same state as turn by turn. Returns True if any turn ran."""
    run = Run.of(target, session, most_turns)
    if run is None:
        return False
    with ExitStack() as stack:
        caches = run.caches(stack)
        if caches is None:
            return False
        began = time.perf_counter()
        run.take(caches)
    apportion(dict(zip(PARTS, run.room.cycles.tolist(), strict=True)), began)
    return run.keep()


def run_side_by_side(target: LM, sessions: Sequence[Session], most_turns: int = TURNS) -> list[Session]:
    """Advance several sessions, each by its own run, on as many threads as torch may use.

    Returns the sessions that took a turn or failed. The others are faster with shared passes (`run_together`): sessions
    whose models exceed the processor's caches or are on a GPU, because reading the weights once for all saves more than
    threads do; and, on a single thread, sessions that are not `_faster_separately`.
    """
    if not _is_in_caches(target):
        return _failed(sessions)
    threads = allowed_threads()
    gaining = [session for session in sessions if threads > 1 or _faster_separately(target, session)]
    if not gaining:
        return _failed(sessions)
    with torch_on_one_thread(compiled_threads=1), ExitStack() as stack:  # each run stays on one thread
        every = [_small_run(target, session, most_turns) for session in gaining]
        runs = [run for run in every if run is not None]
        for run in runs:
            _caches_of(run, stack)  # allocate for all first: growing the store moves the arrays of every session
        ready = [(run, caches) for run in runs if (caches := _caches_of(run, stack)) is not None]
        if not ready:
            return _failed(sessions)
        began = time.perf_counter()
        with ThreadPoolExecutor(min(threads, len(ready))) as pool:
            taken = [pool.submit(run.take, caches) for run, caches in ready]
    cycles_of_all = sum((run.room.cycles for run, _ in ready), np.zeros(len(PARTS), dtype=np.int64))
    apportion(dict(zip(PARTS, cycles_of_all.tolist(), strict=True)), began)
    moved = []
    for (run, _), one in zip(ready, taken, strict=True):
        with run.session.failing_alone():
            one.result()
            if run.keep():
                moved.append(run.session)
    return moved + _failed(sessions)


def run_together(
    target: LM, sessions: Sequence[Session], most_turns: int = TURNS, to_the_end: bool = False
) -> list[Session]:
    """Advance sessions by one compiled loop, with passes of the models that all of them share.

    Ends when one of them cannot continue, or after `PATIENCE` seconds. Returns the sessions that took a turn or failed.

    Args:
        to_the_end: whether the others go on when a session is over. False: another session can take its place.
    """
    if len(sessions) < 2 or not shares_passes(target):
        return _failed(sessions)
    runs = [run for session in sessions if (run := _shared_run(target, session, most_turns)) is not None]
    ran: list[Run] = []
    with ExitStack() as stack:
        for together in _runs_of_one_type(runs):
            for run in together:
                _caches_of(run, stack)  # allocate for all first: growing the store moves the arrays of every session
            ready = [(run, caches) for run in together if (caches := _caches_of(run, stack)) is not None]
            if len(ready) > 1:
                ran += _take_together(ready, most_turns, to_the_end)
    moved = []
    for run in ran:
        if run.session.failure is None:
            with run.session.failing_alone():
                if run.keep():
                    moved.append(run.session)
    return moved + _failed(sessions)


def _shared_run(target: LM, session: Session, most_turns: int) -> Run | None:
    """Return a run whose models share passes; None for other sessions, and for failures, which set `failure`."""
    run = None
    with session.failing_alone():
        run = Run.of(target, session, most_turns)
    return run if run is not None and all(shares_passes(lm) for lm in run.models) else None


def _runs_of_one_type(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs grouped by the types of their parts, one compiled loop for each group."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        spec = run.spec
        kinds = tuple(type(part) for part in (spec.plan, spec.drafts, spec.rule, spec.widths))
        groups.setdefault((kinds, *(id(lm) for lm in run.models), spec.listing), []).append(run)
    return list(groups.values())


def _take_together(ready: Sequence[tuple[Run, list[Any]]], most_turns: int, to_the_end: bool) -> list[Run]:
    """Take up to `most_turns` turns of runs of one type, and return them. A failure ends all of their sessions.

    Args:
        to_the_end: see `run_together`.
    """
    began = time.perf_counter()
    left = most_turns
    turns = 1  # then as many as fit into `PATIENCE`
    taking_part = [run for run, _ in ready]
    with failing_together([run.session for run, _ in ready]):
        every = [(run, run.job(caches)) for run, caches in ready]
        of_one_type = [(run, job) for run, job in every if job.kind == every[0][1].kind]
        taking_part = [run for run, _ in of_one_type]
        running = of_one_type
        while left > 0:
            runs = [run for run, _ in running]
            jobs = [job.inputs for _, job in running]
            standings = [Held(Standing(run.live, run.start)) for run in runs]
            started = time.perf_counter()
            with errors_of(ready[0][0].models):
                lives, starts, conditions = run_turns_together(
                    addresses_of(jobs), jobs[0].record, addresses_of(standings), standings[0].record,
                    min(turns, left), to_the_end,
                )  # fmt: skip
            spent = time.perf_counter() - started
            for place, run in enumerate(runs):
                run.live = lives[place]
                run.start = starts[place]
                run.condition = int(conditions[place])
            left -= turns
            turns = max(1, int(PATIENCE / max(spent, 1e-6) * min(turns, left + turns)))
            running = [(run, job) for run, job in running if not run.is_over]
            ends = not running or (len(running) < len(runs) and not to_the_end)
            is_asked = ready[0][0].session.early_end.is_asked
            if ends or is_asked or any(run.is_held_up for run in runs) or time.perf_counter() - began > PATIENCE:
                break
    count_shared_passes([run.room.numbers for run in taking_part])
    cycles_of_all = sum((run.room.cycles for run in taking_part), np.zeros(len(PARTS), dtype=np.int64))
    apportion(dict(zip(PARTS, cycles_of_all.tolist(), strict=True)), began)
    return taking_part


def count_shared_passes(numbers: Sequence[Array]) -> None:
    """Leave the passes that many sessions share in the numbers of one of them, so that a model counts each once."""
    for kind in (SCORED, DRAFT_SCORED):
        most = max(own[kind] for own in numbers)
        for own in numbers:
            own[kind] = 0
        numbers[0][kind] = most


def _drafts_nothing(session: Session) -> bool:
    """Return whether the drafts of a session have no nodes, whatever is planned."""
    if models_of(session.parts.drafter) != ():
        return False
    drafts = spec_of(session.parts.drafter, "draft", session)
    return drafts is not None and nodes_of(drafts, 1, 1, 1) == 0


def _failed(sessions: Sequence[Session]) -> list[Session]:
    return [session for session in sessions if session.failure is not None]


def _faster_separately(target: LM, session: Session) -> bool:
    """Return whether a run of a session is faster than its share of passes of many sessions, on a single thread.

    A shared pass reads the weights once for all, but Python goes from session to session. So separate runs are faster
    for the smallest models, and for sessions with drafts, which would otherwise be decoded turn by turn in Python.
    """
    return not _drafts_nothing(session) or getattr(target, "weights", 0) < READ_IN_PYTHONS_TIME


def _small_run(target: LM, session: Session, most_turns: int) -> Run | None:
    """Return a run of a session whose models are in the processor's caches; None for other sessions and failures."""
    run = None
    with session.failing_alone():
        run = Run.of(target, session, most_turns)
    return run if run is not None and all(_is_in_caches(lm) for lm in run.models) else None


def _is_in_caches(lm: LM | RunLM) -> bool:
    """Return whether a model is small, and compiled code runs it."""
    return getattr(lm, "is_small", False) and getattr(lm, "is_compiled", True)


def _caches_of(run: Run, stack: ExitStack) -> list[Any] | None:
    """Return `run.caches`; None if the session fails, which sets its `failure`."""
    with run.session.failing_alone():
        return run.caches(stack)
    return None


def _most_nodes(spec: RunSpec, session: Session, deepest: int) -> int:
    """Return the maximum number of nodes that a turn drafts."""
    return int(nodes_of(spec.drafts, session.beams.size, deepest, spec.plan.width))


def _uniforms_of(spec: RunSpec, fresh: int, roots: int, deepest: int) -> int:
    """Return the number of uniforms to draw for the turns of a run.

    If a turn may consume thousands of them, they are drawn for fewer turns, at least one, and the run ends when they
    are used up.
    """
    draws = fresh + spec.most_beams * (deepest + 1)
    of_turn = 2 * draws + uniforms_of(spec.drafts, roots, deepest, spec.plan.width)
    return max(min(spec.most_turns * of_turn, MOST_UNIFORMS), of_turn)


def _room_for(spec: RunSpec, session: Session, vocab: int) -> RunRoom:
    """Return buffers for the turns of a run.

    Args:
        vocab: number of tokens of the draft model.
    """
    length = session.length + SPAN
    session.texts = room_for_texts(session.texts, max(spec.most_beams, session.beams.size), length)
    draws = spec.most_beams * SPAN
    deepest = deepest_of(spec.plan)
    ended = 2 * spec.most_beams * (deepest + 2) + 64
    rows = rows_kept(spec.drafts, spec.most_beams, deepest, spec.plan.width)
    return RunRoom(
        texts=session.texts,
        finished=session.finished_with_room(2 * draws + 2 * ended),
        ended=room_for_ended(ended, length),
        widths=np.empty(SPAN, dtype=np.int64),
        evidence=no_evidence(session.audited and not session.warp.greedy),
        frontier_rows=room_for_listing(rows, vocab if rows else 0, spec.listing),
        numbers=np.zeros(12, dtype=np.int64),
        passed=np.zeros(SPAN, dtype=np.int64),
        cycles=np.zeros(5, dtype=np.int64),
        asked=session.early_end.asked,
    )


def take_whole_rows(target: LM, session: Session) -> None:
    """Replace the lists of the nodes that a session keeps by whole rows, for a turn that Python decides.

    Raises `BrokenPart` if the target does not let steps read its cache; lists come from such targets only.
    """
    known = session.start.known
    if are_whole(known.rows):
        return
    context = target.for_run(session, 0, 0, 0) if runs_turns(target) else None
    with context or nullcontext() as cache:
        if cache is None:
            raise BrokenPart(f"{type(target).__name__} returned lists of tokens, and cannot return whole rows")
        with errors_of([target]):  # type: ignore[list-item]
            rows = whole_rows_again(cache, known.rows, known.nodes)
    session.start = session.start._replace(known=known._replace(rows=rows))


def _keep(session: Session, models: list[RunLM], room: RunRoom, live: Beams, start: Start) -> None:
    """Apply a run to the session and its models, and add its counters."""
    numbers = room.numbers
    count = session.count
    for lm, passes in zip(models, (numbers[SCORED], numbers[DRAFT_SCORED]), strict=False):
        lm.finish_run(session, int(passes), live.size)
    count.target_passes += int(numbers[DONE])
    count.draft_passes += int(numbers[DRAFT_PASSES])
    count.drafted += int(numbers[DRAFTED])
    count.add_passed(room.passed)
    count.widths += room.widths[: numbers[LAYERS]].tolist()
    count.peak_kv_tokens = models[0].peak(session)
    if session.audited:
        session.audit += Audit.of(room.evidence)
    count.rows += RowCounts(*numbers[ROWS:].tolist())
    session.put_aside(room.ended)
    session.beams = live
    session.start = start
