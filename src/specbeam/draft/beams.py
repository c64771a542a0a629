"""DRAFT: beams drafted by a small language model, one layer per pass."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from specbeam.core.beams import Beams
from specbeam.core.dice import pick
from specbeam.core.forest import DISTINCT, INDEPENDENT, SHARED, Forest, Siblings, add_front, no_fronts
from specbeam.core.steps import Array, compiled_as, step
from specbeam.engines.pass_steps import run_pass
from specbeam.errors import BrokenLaw, BrokenProcessor, DeadEnd
from specbeam.laws.edits import NO_EDITS, Edits, edited_rows
from specbeam.laws.joint import (
    BROKEN,
    SOUND,
    Choice,
    JointLaw,
    all_pairs,
    choice_of,
    choose,
    condition_of,
    core_and_extra,
    joint_law,
    odds_among,
)
from specbeam.laws.ranking import Truncation, sorted_places
from specbeam.laws.warp import Rows, law_of_beams, on_host, processed_rows
from specbeam.lm.base import LM, fill_prompts
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.records import Shape, Turn
from specbeam.session import Session


class SharedLayers(NamedTuple):
    """Layers are the best pairs of the draft's law, under the noise that the target will use unless at temperature 0."""

    noisy: bool  # False: nothing is drawn
    core: int  # pairs that the draft model itself would keep
    truncation: Truncation
    eos: Array  # int64[ends]
    keeps_rows: bool  # whether widths are chosen by the laws that the layers were drawn from


class SearchedLayers(NamedTuple):
    """The same for transformers' beam modes: the core are those that would go on; ends are not drafted."""

    noisy: bool
    core: int
    truncation: Truncation
    eos: Array


class DrawnLayers(NamedTuple):
    """Layers are drawn by dice from the draft's law, which is stated."""

    again: bool  # independent draws, with replacement
    truncation: Truncation
    eos: Array


class Drafted(NamedTuple):
    """The layers of draft beams so far."""

    forest: Forest
    front: Beams  # the newest layer, without the beams that ended
    core: Array  # bool[front]: beams that the draft model itself would have kept


@step
def candidate_count(beams: int, ends: int) -> int:
    """Return how many pairs a step looks at, so that `beams` of them go on even if each beam could end in every way."""
    return max(2, 1 + ends) * beams


@step
def going_on(scores: Array, ends: Array, beams: int) -> Array:
    """Return which candidates go on, int64[beams]: those of largest score that did not end, best first."""
    alive = np.flatnonzero(~ends)
    return alive[sorted_places(scores[alive])[:beams]]


@step
def _chosen_as_search_does(law: JointLaw, front: Beams, core: Array, width: int, spec: SearchedLayers) -> Choice:
    """Return a layer for transformers' beam modes: the core are those that would go on; ends are not drafted."""
    vocab = law.logits.shape[1]
    keys = front.keys if spec.noisy else front.keys[:0]
    every = np.ones(len(core), dtype=np.bool_)
    looked, _ = core_and_extra(law, keys, core, candidate_count(spec.core, len(spec.eos)), 0)
    candidates = choice_of(law, front.keys, looked, 0, spec.eos)
    best = looked[going_on(candidates.scores, candidates.ends, min(spec.core, width))]
    wider, _ = core_and_extra(law, keys, every, width + len(spec.eos) * len(core), 0)
    pairs = np.empty(max(width, len(best)), dtype=np.int64)
    held = len(best)
    pairs[:held] = best
    for pair in wider:
        is_end = (spec.eos == pair % vocab).any()
        if held < width and not is_end and not (best == pair).any():
            pairs[held] = pair
            held += 1
    return choice_of(law, front.keys, pairs[:held], len(best), spec.eos)


@step
def draw_pairs(odds: Array, count: int, again: bool, dice: Any) -> Array:
    """Return the places of up to `count` draws, int64[draws]; each is struck out once drawn, unless `again`."""
    left = odds.copy()
    places = np.empty(count, dtype=np.int64)
    for draw in range(count):
        if not (left > 0).any():  # what is left has odds too small for a float
            return places[:draw]
        places[draw] = pick(dice, left)
        if not again:
            left[places[draw]] = 0.0
    return places


@step
def _first_places(drawn: Array) -> tuple[Array, Array, Array]:
    """Return the distinct draws in the order of their first coming, which of them each draw is, and how often each came."""
    distinct = np.empty(len(drawn), dtype=np.int64)
    which = np.empty(len(drawn), dtype=np.int64)
    counts = np.zeros(len(drawn), dtype=np.int64)
    held = 0
    for draw in range(len(drawn)):
        place = 0
        while place < held and distinct[place] != drawn[draw]:
            place += 1
        if place == held:
            distinct[held] = drawn[draw]
            held += 1
        which[draw] = place
        counts[place] += 1
    return distinct[:held], which, counts[:held]


@step
def add_drafted_layer(
    drafted: Drafted,
    choice: Choice,
    draws: Array,
    counts: Array,
    kind: int,
    law_pairs: Array,
    law_odds: Array,
    vocab: int,
) -> Drafted:
    """Return a draft with one more layer; ends have no node.

    Args:
        draws: int64[draws], which pair of the choice each draw is; counts: int64[pairs], how often each was drawn.
        kind, law_pairs, law_odds, vocab: see `Siblings`.
    """
    forest = drafted.forest
    front = drafted.front
    groups = forest.siblings
    size = len(forest.tokens)
    nodes = np.full(len(choice.tokens), -1, dtype=np.int64)
    going = np.flatnonzero(~choice.ends)
    for place in range(len(going)):
        nodes[going[place]] = size + place
    siblings = Siblings(
        np.append(groups.kinds, kind),
        np.concatenate((groups.parents, front.nodes)),
        np.append(groups.parent_ends, len(groups.parents) + len(front.nodes)),
        np.append(groups.draw_ends, len(groups.tokens) + len(draws)),
        np.concatenate((groups.rows, choice.parents[draws])),
        np.concatenate((groups.tokens, choice.tokens[draws])),
        np.concatenate((groups.nodes, nodes[draws])),
        np.append(groups.law_ends, len(groups.law_odds) + len(law_odds)),
        np.concatenate((groups.law_pairs, law_pairs)),
        np.concatenate((groups.law_odds, law_odds)),
        vocab,
    )
    grown = Forest(
        np.concatenate((forest.tokens, choice.tokens[going])),
        np.concatenate((forest.parents, front.nodes[choice.parents[going]])),
        siblings,
        forest.logq,
        forest.beams,
        forest.fronts,
    )
    newest = Beams(nodes[going], choice.tokens[going], choice.scores[going], counts[going], choice.keys[going])
    return Drafted(grown, newest, going < choice.core)


def draft_layer(spec: Any, drafted: Drafted, law: JointLaw, width: int, dice: Any) -> Drafted:
    """Return a draft with one more layer, chosen or drawn from the law of its front, which must be sound.

    Args:
        width: number of draft beams in the layer.
    """
    return LAYERS_BY_SPEC[type(spec)](spec, drafted, law, width, dice)


@step
def _add_choice(drafted: Drafted, choice: Choice, vocab: int) -> Drafted:
    """Return a draft with one more layer, whose draws the target can only be compared with."""
    every = np.arange(len(choice.tokens))
    none = np.empty(0, dtype=np.int64)
    return add_drafted_layer(drafted, choice, every, np.ones_like(every), SHARED, none, np.empty(0), vocab)


@step
def draft_shared(spec: SharedLayers, drafted: Drafted, law: JointLaw, width: int, dice: Any) -> Drafted:
    """Return a draft with one more layer of best pairs; see `draft_layer`."""
    front = drafted.front
    if spec.keeps_rows:
        forest = drafted.forest
        fronts = add_front(forest.fronts, front.nodes, front.scores, front.counts, law.logits)
        forest = Forest(forest.tokens, forest.parents, forest.siblings, forest.logq, forest.beams, fronts)
        drafted = Drafted(forest, front, drafted.core)
    core = min(spec.core, width)
    choice = choose(law, front.keys, spec.noisy, drafted.core, core, width, spec.eos)
    return _add_choice(drafted, choice, law.logits.shape[1])


@step
def draft_searched(spec: SearchedLayers, drafted: Drafted, law: JointLaw, width: int, dice: Any) -> Drafted:
    """Return a draft with one more layer for transformers' beam modes; see `draft_layer`."""
    choice = _chosen_as_search_does(law, drafted.front, drafted.core, width, spec)
    return _add_choice(drafted, choice, law.logits.shape[1])


@step
def draft_drawn(spec: DrawnLayers, drafted: Drafted, law: JointLaw, width: int, dice: Any) -> Drafted:
    """Return a draft with one more layer that is drawn by dice; see `draft_layer`."""
    pairs = all_pairs(law)
    odds = odds_among(law, pairs)
    count = width if spec.again else min(width, len(pairs))
    distinct, draws, counts = _first_places(draw_pairs(odds, count, spec.again, dice))
    choice = choice_of(law, drafted.front.keys, pairs[distinct], len(distinct), spec.eos)
    kind = INDEPENDENT if spec.again else DISTINCT
    return add_drafted_layer(drafted, choice, draws, counts, kind, pairs, odds, law.logits.shape[1])


LAYERS_BY_SPEC = {SharedLayers: draft_shared, SearchedLayers: draft_searched, DrawnLayers: draft_drawn}


@compiled_as(draft_layer)
def _compiled_draft_layer(spec: Any, drafted: Any, law: Any, width: Any, dice: Any) -> Any:
    return LAYERS_BY_SPEC[spec.instance_class]


@step
def start_draft(live: Beams, roots: Forest) -> Drafted:
    """Return a draft without layers below these roots, one for each live beam."""
    return Drafted(roots, live, np.ones(len(live.tokens), dtype=np.bool_))


@step
def draft_layers(
    model: Any,
    drafted: Drafted,
    answered: int,
    depth: int,
    width: int,
    spec: Any,
    edits: Edits,
    dice: Any,
    spent: Array,
) -> tuple[Drafted, int]:
    """Return a draft of up to `depth` layers of `width` beams, and SOUND.

    Or DEAD or BROKEN in place of SOUND, if the last pass gave no law to draw from.

    Args:
        model: a session in a model that compiled steps can run (see `lm.any_cache`).
        answered: number of forest nodes whose logits were given in this turn already.
        edits: of the model's rows.
        spent: int64[2], to which passes and the processor's cycles inside the model are added.
    """
    for _ in range(depth):
        front = drafted.front
        if len(front.tokens) == 0:
            break
        forest = drafted.forest
        rows = run_pass(model, forest.tokens, forest.parents, answered, spent)
        rows = edited_rows(rows, answered, forest.tokens, forest.parents, edits)
        answered = len(forest.tokens)
        law = joint_law(rows, front.scores, front.counts, spec.truncation, True)
        condition = condition_of(law)
        if condition != SOUND:
            return drafted, condition
        drafted = draft_layer(spec, drafted, law, width, dice)
    return drafted, SOUND


@dataclass(frozen=True)
class NoDraft:
    """Plain decoding: the roots alone."""

    models: ClassVar[tuple[LM, ...]] = ()

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return the roots of each session."""
        return [Forest.rooted(session.beams.tokens) for session in sessions]

    def settle(self, session: Session, turn: Turn) -> None:
        """Do nothing: there is nothing to remember."""

    def close(self, session: Session) -> None:
        """Do nothing: there is nothing to forget."""


@dataclass(eq=False)
class Growing:
    """One session's draft while it grows layer by layer."""

    session: Session
    shape: Shape
    spec: Any  # SharedLayers, SearchedLayers or DrawnLayers
    drafted: Drafted
    layers: int = 0

    @property
    def wants(self) -> bool:
        """Whether another layer is to be drafted."""
        return self.layers < self.shape.depth and self.drafted.front.size > 0 and self.session.failure is None

    def make_room(self, vocab: int, dtype: Any) -> None:
        """Make room for the rows that layers are drawn from, where they are kept."""
        if isinstance(self.spec, SharedLayers) and self.spec.keeps_rows and self.layers == 0:
            rows = self.drafted.forest.roots + (self.shape.depth - 1) * self.shape.width
            forest = self.drafted.forest._replace(fronts=no_fronts(rows, vocab, dtype))
            self.drafted = self.drafted._replace(forest=forest)

    def grow(self, rows: Rows) -> None:
        """Add a layer that is drawn from these logits of the front. Where there is no law, the draft ends."""
        session = self.session
        front = self.drafted.front
        self.make_room(rows.shape[1], rows.dtype)
        self.layers += 1
        try:
            forest = self.drafted.forest
            rows = processed_rows(rows, session.warp, lambda: session.paths(forest, front.nodes))
            law = law_of_beams(rows, front, session.warp)
        except (DeadEnd, BrokenProcessor):  # on a draft's path; the target need not go there
            self.end()
            return
        width = self.shape.width
        self.drafted = draft_layer(self.spec, self.drafted, law, width, session.dice.ready(width))

    def end(self) -> None:
        """Draft no more layers."""
        self.drafted = self.drafted._replace(front=self.drafted.front.pick(np.zeros(0, dtype=np.int64)))


@dataclass(frozen=True)
class BeamDrafter:
    """Beam sampling on the draft model, from the target's carried scores, in the session's own warp.

    Args:
        lm: the draft model.
        beams: how many beams the target keeps. With shared noise, that many draft pairs per layer are what the draft
            model would keep by itself (core); the rest of the layer are the likeliest others, whatever its truncation cut.
        coupling: "noise" drafts by the noise that the target will use; "rejection" draws and states its law.
        replacement: independent draws instead of draws without replacement (coupling "rejection" only).
        search: draft for transformers' beam modes, in which a beam that ends makes room for the next one: ends are not
            drafted.
        keeps_rows: hand on the laws that layers were drawn from, for rules that choose widths by them.
    """

    lm: LM
    beams: int
    coupling: str = "noise"
    replacement: bool = False
    search: bool = False
    keeps_rows: bool = True

    @property
    def models(self) -> tuple[LM, ...]:
        """The models that it runs."""
        return (self.lm,)

    def draft(self, sessions: list[Session], shapes: list[Shape]) -> list[Forest]:
        """Return a forest per session: layers of `shape.width` draft beams, `shape.depth` deep where beams go on."""
        growing = [self._start(session, shape) for session, shape in zip(sessions, shapes, strict=True)]
        if len(growing) == 1:
            self._grow_alone(growing[0])
        while active := [one for one in growing if one.wants]:
            for one in active:
                one.session.count.draft_passes += 1
            scored = self.lm.extend([one.session for one in active], [one.drafted.forest for one in active])
            for one, found in zip(active, scored, strict=True):
                with one.session.failing_alone("draft model: "):
                    one.grow(on_host(found.logits))
        return [one.drafted.forest for one in growing]

    def spec(self, session: Session) -> Any:
        """Return how layers are chosen for a session."""
        warp = session.warp
        ends = session.limits.ending
        if self.search:
            return SearchedLayers(not warp.greedy, self.beams, warp.cut, ends)
        if self.coupling == "rejection" and not warp.greedy:
            return DrawnLayers(self.replacement, warp.cut, ends)
        return SharedLayers(not warp.greedy, self.beams, warp.cut, ends, self.keeps_rows and not warp.greedy)

    def _start(self, session: Session, shape: Shape) -> Growing:
        roots = Forest.rooted(session.beams.tokens)
        return Growing(session, shape, self.spec(session), start_draft(session.beams, roots))

    def _grow_alone(self, one: Growing) -> None:
        """Draft all layers by one compiled call, where steps can run the model and nothing in Python sees a row."""
        session = one.session
        depth = one.shape.depth
        nodes = depth * one.shape.width
        if not isinstance(self.lm, HuggingFaceLM) or not session.warp.takes_raw_rows or not one.wants:
            return
        with self.lm.alone(session, nodes) as alone:
            if alone is None:
                return
            one.make_room(self.lm.vocab, np.float32)
            spent = np.zeros(2, dtype=np.int64)
            with alone.booked(spent):
                dice = session.dice.ready(nodes)
                one.drafted, condition = draft_layers(
                    alone.arrays,
                    one.drafted,
                    alone.cache.answered,
                    depth,
                    one.shape.width,
                    one.spec,
                    NO_EDITS,
                    dice,
                    spent,
                )
        session.count.draft_passes += int(spent[0])
        one.layers = depth
        if condition == BROKEN:
            with session.failing_alone("draft model: "):
                raise BrokenLaw(
                    "the model returned NaN or +inf logits; try float32, or look for overflow in the weights"
                )

    def fill(self, sessions: list[Session], most: int) -> list[bool]:
        """Store a chunk of up to `most` prompts that are long; return which have no more to store."""
        return fill_prompts(self.lm, sessions, None, most)

    def settle(self, session: Session, turn: Turn) -> None:
        """Keep what the surviving beams need in the model's cache."""
        self.lm.settle(session, turn)

    def close(self, session: Session) -> None:
        """Forget the session."""
        self.lm.close(session)
