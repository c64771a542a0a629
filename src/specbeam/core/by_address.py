"""Parts and caches by address: the loop over turns calls their steps by address, and is compiled once for all kinds.

A compiled function contains the types of all records that it passes on, so the loop would be compiled anew for each
combination of a cache, a drafter and a rule, which takes longer than all steps that a new kind brings. Here the loop gets
records of the same five types in their place, with the addresses of the kind's steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specbeam.core.beams import Beams, Finished, Layers, Stop, room_for_ended, room_for_texts
from specbeam.core.compiling.called import Called, ListOf, address_in, caller
from specbeam.core.compiling.compiler import is_borrowed
from specbeam.core.compiling.held import Held, held_at
from specbeam.core.control.needs import NodeOdds
from specbeam.core.control.planning import learn_passed, plan_depth
from specbeam.core.control.width import asked_width, width_of_known
from specbeam.core.dice import Uniforms
from specbeam.core.draft.beams import ChosenLayer, Drafted, LayersSpec, choose_layer
from specbeam.core.draft.turns import (
    Cut,
    DraftTask,
    draft_all,
    draft_one_by_one,
    draft_turn,
    keep_tosses,
    learn_from,
    nodes_of,
    own_spec,
    tosses_of,
    uniforms_of,
)
from specbeam.core.forest import Forest, TurnRows
from specbeam.core.laws.edits import NO_EDITS
from specbeam.core.laws.evidence import Evidence
from specbeam.core.laws.joint import Choice, JointLaw
from specbeam.core.laws.ranking import Truncation
from specbeam.core.passes import (
    Asked,
    SettledTurn,
    blocks_made,
    extend,
    extend_all,
    extend_one_by_one,
    extend_ranked,
    has_pending,
    has_room_for,
    keep_only,
    rewind,
    runs_layers,
    settle_draft,
    settle_target,
    whole_rows_again,
)
from specbeam.core.ranked import NO_ROWS, WHOLE, Ranked
from specbeam.core.steps import Array, Verb, borrowed, step, verb
from specbeam.core.together_steps import RunInputs
from specbeam.core.turn_steps import RunRoom, RunSpec
from specbeam.core.verify.turns import ScoredTurn, verify_turn


@borrowed
class AnyCache(NamedTuple):
    """A cache of a model: the addresses of its record and of the steps of its kind, by `CACHE_VERBS`; 0: it has none."""

    at: int
    steps: tuple[int, ...]


@borrowed
class AnyDrafts(NamedTuple):
    """The spec of a drafter, as `AnyCache`, by `DRAFT_VERBS`."""

    at: int
    steps: tuple[int, ...]


@borrowed
class AnyLayers(NamedTuple):
    """A kind of layers of a drafter of beams, as `AnyCache`, by `LAYER_VERBS`."""

    at: int
    steps: tuple[int, ...]


@borrowed
class AnyRule(NamedTuple):
    """The spec of a rule, as `AnyCache`, by `RULE_VERBS`."""

    at: int
    steps: tuple[int, ...]


@borrowed
class AnyWidths(NamedTuple):
    """A spec of widths, as `AnyCache`, by `WIDTH_VERBS`."""

    at: int
    steps: tuple[int, ...]


@borrowed
class AnyPlan(NamedTuple):
    """The numbers of a controller, as `AnyCache`, by `PLAN_VERBS`."""

    at: int
    steps: tuple[int, ...]
    width: int  # of its drafts


@borrowed
class HeldWidths(NamedTuple):
    """A spec of widths in a record that can be held in memory."""

    widths: Any


# Examples of the arguments, from which their types are taken.
_INTS = np.zeros(1, dtype=np.int64)
_KEYS = np.zeros(1, dtype=np.uint64)
_ODDS = np.zeros(1)
_FLAGS = np.zeros(1, dtype=np.bool_)
_TABLE = np.zeros((1, 1), dtype=np.int64)
_BEAMS = Beams(_INTS, _INTS, _ODDS, _INTS, _KEYS)
_FOREST = Forest(_INTS, _INTS)
_TEXTS = room_for_texts(None, 1, 1)
_FINISHED = Finished(_ODDS, _INTS)
_DICE = Uniforms(_ODDS, _INTS)
_EVIDENCE = Evidence(_ODDS)
_LAYERS = Layers(_INTS, _BEAMS, _FLAGS, _INTS, _INTS, _FLAGS, _TABLE, _ODDS)
_ASKED = Asked(_INTS, _INTS, _INTS, _KEYS)
_NODE_ODDS = NodeOdds(_ODDS, _ODDS, _INTS, _INTS, _INTS, _ODDS, _TABLE, 0.0)
_CUT = Cut(_FOREST, _FOREST, _INTS, _NODE_ODDS)
_TASK = DraftTask(_FOREST, _BEAMS, _TEXTS, 0, 0, NO_EDITS, WHOLE)
_TURN_ROWS = TurnRows(NO_ROWS, NO_ROWS, _INTS)
_SETTLED = SettledTurn(_INTS, _INTS, 0, _INTS, _INTS, _INTS, _INTS, _INTS, _INTS)
_SCORED = ScoredTurn(_TURN_ROWS, _FOREST, _BEAMS, AnyWidths(0, (0, 0)), 0, _FINISHED)
_CACHE = AnyCache(0, (0,) * 12)
_DRAFTS = AnyDrafts(0, (0,) * 7)
_LAW = JointLaw(NO_ROWS, _ODDS, _ODDS, _ODDS, Truncation(), True, _FLAGS)
_DRAFTED = Drafted(_FOREST, _BEAMS, _FLAGS, _NODE_ODDS)
_CHOICE = Choice(_INTS, _INTS, _ODDS, _ODDS, _KEYS, _FLAGS, 0)
_LAYER = ChosenLayer(_CHOICE, _INTS, _INTS, 0, _INTS, _ODDS, 0)
_SPENT = np.zeros((1, 2), dtype=np.int64)


def _inputs() -> RunInputs:
    """Return an example of the inputs of a loop over many sessions."""
    plan = AnyPlan(0, (0, 0), 0)
    rule = AnyRule(0, (0,))
    stop = Stop(0, 0, 0, 0.0, _INTS)
    widths = AnyWidths(0, (0, 0))
    spec = RunSpec(plan, _DRAFTS, False, rule, widths, stop, NO_EDITS, 0, _FLAGS, 0, 0, WHOLE, False)
    ended = room_for_ended(1, 1)
    room = RunRoom(_TEXTS, _FINISHED, ended, _INTS, _EVIDENCE, NO_ROWS, _INTS, _INTS, _INTS, _INTS)
    return RunInputs(_CACHE, _CACHE, spec, room, _DICE, 0)


CACHE_VERBS: dict[Verb[..., Any], Called] = {
    extend: Called(1, (_INTS, _INTS, _INTS), NO_ROWS.logits),
    extend_ranked: Called(1, (_INTS, _INTS, _INTS, _KEYS, False), NO_ROWS),
    extend_all: Called(1, (ListOf(0), ListOf(_ASKED), False, _SPENT), ListOf(NO_ROWS)),
    whole_rows_again: Called(1, (NO_ROWS, _INTS), NO_ROWS),
    has_room_for: Called(1, (0, 0), False),
    rewind: Called(1, (0,), None),
    settle_target: Called(1, ((_INTS, _INTS), _INTS, _INTS, _INTS, _INTS), None),
    settle_draft: Called(2, (_SETTLED,), None),
    has_pending: Called(1, (), False),
    runs_layers: Called(1, (0,), False),
    keep_only: Called(1, (_INTS,), None),
    blocks_made: Called(1, (), 0),
}


def _draft_verbs() -> dict[Verb[..., Any], Called]:
    """Return the verbs of drafters; in a function, because mypy cannot order the modules of this package."""
    return {
        draft_turn: Called(1, (_CACHE, _TASK, _DICE, _INTS), (_CUT, 0)),
        draft_all: Called(1, (_inputs(), _INTS, ListOf(0), ListOf(_TASK), _SPENT), ListOf((_CUT, 0))),
        nodes_of: Called(1, (0, 0, 0), 0),
        uniforms_of: Called(1, (0, 0, 0), 0),
        learn_from: Called(1, (_CUT, _LAYERS, _TURN_ROWS), None),
        tosses_of: Called(1, (), 0),
        keep_tosses: Called(1, (0,), None),
    }


def _layer_verbs() -> dict[Verb[..., Any], Called]:
    """Return the verbs of kinds of layers; see `_draft_verbs`."""
    return {choose_layer: Called(1, (_DRAFTED, _LAW, 0, False, _DICE), _LAYER)}


DRAFT_VERBS = _draft_verbs()
LAYER_VERBS = _layer_verbs()
RULE_VERBS: dict[Verb[..., Any], Called] = {verify_turn: Called(1, (_SCORED, _DICE, _EVIDENCE, None), (_LAYERS, 0))}
WIDTH_VERBS: dict[Verb[..., Any], Called] = {
    asked_width: Called(1, (_LAW, _BEAMS, _FOREST, 0), 0),
    width_of_known: Called(1, (_LAW, _BEAMS), 0),
}
PLAN_VERBS: dict[Verb[..., Any], Called] = {
    plan_depth: Called(1, (0, 0, 0), 0),
    learn_passed: Called(1, (_FLAGS,), None),
}
_OF_MANY = ("extend_all", "draft_all")  # verbs of many sessions, which need no step of a kind
_EXTEND_ALL = [*CACHE_VERBS].index(extend_all)
_DRAFT_ALL = [one.__name__ for one in DRAFT_VERBS].index("draft_all")


def _register(kind: type, verbs: dict[Verb[..., Any], Called]) -> None:
    """Let each of these verbs call the step of a record of this kind by its address."""
    for number, (one, called) in enumerate(verbs.items()):
        if one.__name__ in _OF_MANY:
            continue  # they have steps of their own below
        one.of_address(kind, _step_by_address(caller(one.__name__, called), number, called.records))


def _step_by_address(call: Any, number: int, records: int) -> Any:
    """Return the function that calls step `number` of its first argument with its arguments, the first ones by address."""

    def of_one(record: Any, *given: Any) -> Any:
        return call(record.steps[number], (record.at, *given))

    def of_two(record: Any, other: Any, *given: Any) -> Any:
        return call(record.steps[number], (record.at, other.at, *given))

    return of_one if records == 1 else of_two


_register(AnyCache, CACHE_VERBS)
_register(AnyDrafts, DRAFT_VERBS)
_register(AnyLayers, LAYER_VERBS)
_register(AnyRule, RULE_VERBS)
_register(AnyWidths, WIDTH_VERBS)
_register(AnyPlan, PLAN_VERBS)
_extend_all = caller("extend_all", CACHE_VERBS[extend_all])
_draft_all = caller("draft_all", [*DRAFT_VERBS.values()][_DRAFT_ALL])


@step
def extend_all_by_address(
    like: AnyCache, caches: list[Any], asked: list[Asked], whole: bool, spent: Array
) -> list[Ranked]:
    """Return the rows of all sessions; see `passes.extend_all`."""
    if like.steps[_EXTEND_ALL] == 0:
        return extend_one_by_one(like, caches, asked, whole, spent)
    own = []
    for number in range(len(caches)):
        own.append(held_at(caches[number], like).at)  # noqa: PERF401  # see `compiling.held`
    return _extend_all(like.steps[_EXTEND_ALL], (like.at, own, asked, whole, spent))


@step
def draft_all_by_address(
    drafts: AnyDrafts, like: Any, jobs: Array, models: list[Any], tasks: list[DraftTask], spent: Array
) -> list[tuple[Cut, int]]:
    """Draft the turns of many sessions; see `turns.draft_all`."""
    if drafts.steps[_DRAFT_ALL] == 0:
        return draft_one_by_one(drafts, like, jobs, models, tasks, spent)
    return _draft_all(drafts.steps[_DRAFT_ALL], (drafts.at, like, jobs, models, tasks, spent))


@step
def spec_at_address(drafts: AnyDrafts, like: Any) -> Any:
    """Return the spec itself; see `turns.own_spec`."""
    return held_at(drafts.at, like)


def _register_steps_of_many() -> None:
    extend_all.of(AnyCache)(extend_all_by_address)
    draft_all.of(AnyDrafts)(draft_all_by_address)
    own_spec.of(AnyDrafts)(spec_at_address)


_register_steps_of_many()


@verb(0, by_address=True)
@step
def asked_width_of_held(held: HeldWidths, law: JointLaw, live: Beams, forest: Forest, number: int) -> int:
    """Return the width of a layer; see `control.width.asked_width`."""
    return asked_width(held.widths, law, live, forest, number)


@verb(0, by_address=True)
@step
def width_of_known_of_held(held: HeldWidths, law: JointLaw, unknown: Beams) -> int:
    """Return the width of a layer without some rows; see `control.width.width_of_known`."""
    return width_of_known(held.widths, law, unknown)


class ByAddress:
    """The caches and the spec of a run by address, for one compiled loop of all kinds. Keeps their records in memory.

    If a record is not borrowed, or the steps run as Python, all records stay as they are, and the loop is compiled for them.

    Args:
        target, draft, spec: of the run, as in `run_steps.run_turns`.
        together: whether the run shares its loop with others: then steps for many sessions are compiled, too.
    """

    def __init__(self, target: Any, draft: Any, spec: RunSpec, together: bool = False) -> None:
        self._held: list[Held] = []
        self.target = target
        self.draft = draft
        self.spec = spec
        records = (target, draft, spec.drafts, spec.rule, spec.plan)
        if not hasattr(extend_all_by_address, "py_func") or not all(map(is_borrowed, records)):
            return
        self._together = together
        self.target = self._cache(target)
        self.draft = self.target if draft is target else self._cache(draft)
        rule = self._record(AnyRule, spec.rule, RULE_VERBS)
        own_drafts = spec.drafts
        if isinstance(own_drafts, LayersSpec):
            own_drafts = own_drafts._replace(layers=self._record(AnyLayers, own_drafts.layers, LAYER_VERBS))
        drafts = self._record(AnyDrafts, own_drafts, DRAFT_VERBS)
        plan = self._record(AnyPlan, spec.plan, PLAN_VERBS, spec.plan.width)
        widths = self._record(AnyWidths, HeldWidths(spec.widths), WIDTH_VERBS)
        self.spec = spec._replace(plan=plan, drafts=drafts, rule=rule, widths=widths)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of the records."""
        return tuple(one.kind for one in self._held)

    def _record(self, kind: Any, record: Any, verbs: dict[Verb[..., Any], Called], *more: int) -> Any:
        """Return a record with the addresses of the steps of a spec."""
        held = self._hold(record)
        return kind(held.address, self._addresses([held], verbs), *more)

    def _cache(self, cache: Any) -> AnyCache:
        """Return a record with the addresses of the steps of a cache: first the target's, then that of a draft model."""
        held = self._hold(cache)
        of_target = self._held[0]
        return AnyCache(held.address, self._addresses([held, of_target], CACHE_VERBS))

    def _hold(self, record: Any) -> Held:
        held = Held(record)
        self._held.append(held)
        return held

    def _addresses(self, records: Sequence[Held], verbs: dict[Verb[..., Any], Called]) -> tuple[int, ...]:
        """Return the addresses of the steps of these verbs; 0 for steps that are not needed.

        Raises `UnknownKind` if a step is missing.
        """
        key = (*(one.kind for one in records), *verbs, self._together)
        if key not in _ADDRESSES:
            kind = type(records[0].record)
            found = []
            for one, called in verbs.items():
                if self._goes_without(one, records):
                    found.append(0)
                    continue
                own = _OF_WIDTHS.get(one, one).step_of(kind)
                found.append(address_in(own, records[: called.records], called))
            _ADDRESSES[key] = tuple(found)
        return _ADDRESSES[key]

    def _goes_without(self, one: Verb[..., Any], records: Sequence[Held]) -> bool:
        """Return whether no loop calls the step of a verb of these records."""
        has_step = one.has_step(type(records[0].record))
        if one.__name__ in _OF_MANY:
            return not self._together or not has_step
        if has_step:
            return False
        if one is settle_target:
            return records[0] is not self._held[0]  # only the target's cache is settled so
        return one is extend and extend_ranked.has_step(type(records[0].record))


_ADDRESSES: dict[Any, tuple[int, ...]] = {}  # by the types of the records, and the verbs
_OF_WIDTHS: dict[Any, Any] = {asked_width: asked_width_of_held, width_of_known: width_of_known_of_held}
