"""VERIFY: from the leaves to the root. A node is judged after all nodes below it were rejected."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from specbeam.core.beams import Layers, Stop
from specbeam.core.dice import flip, pick
from specbeam.core.forest import Forest, GroupsUnder, Siblings, groups_by_node, start_of
from specbeam.core.laws.evidence import Evidence, gathers, note_acceptance
from specbeam.core.laws.named import EXACT
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.reduce import SOUND, UNDECIDED, condition_of_norm, exponentials
from specbeam.core.laws.rows import RowLaw, best_token_of_row, greedy_law, is_law_decided
from specbeam.core.ranked import Listing
from specbeam.core.records import Verdict
from specbeam.core.session import Session
from specbeam.core.steps import Array, borrowed, open_step, step
from specbeam.core.verify.trials import NOTHING, Drafts, law_on_trial
from specbeam.core.verify.turns import ScoredTurn, verify_turn
from specbeam.core.verify.walk import (
    TokenPath,
    WalkInputs,
    check_has_laws,
    checked,
    drafts_under,
    emit_path,
    emitted_layers,
    is_drafted,
    law_at_row,
    listing_of_law,
    norm_of,
    row_at,
    start_walk,
)


@borrowed
class ClimbSpec(NamedTuple):
    """The numbers of a rule that judges a tree from its leaves."""

    greedy: bool
    truncation: Truncation
    stop: Stop


class PathNode(NamedTuple):
    """A node of the path from the root to the newest node on trial.

    The path is a list of them, which only open steps change, because lists do not pass between Python and compiled steps.
    """

    node: int  # forest node; -1 for a draft that ends its text and has none
    draw: int  # index of the draw; -1 for the root
    odds: float  # of accepting the path up to it, given the drafts that have failed
    group: int  # the group of drafts on trial under it; -1 if none is left
    failed: int  # number of draws of that group that have failed
    owed: (
        Array  # float64[n]: the law of the next token, given the drafts that have failed; empty until drafts are tried
    )
    tokens: Array  # int64[n]: the tokens of `owed`; empty: the whole vocabulary
    own: Array  # float64[...]: the law of the group on trial, without its failed draws
    on_wanted: Array  # float64[n]: the same on the tokens of `owed`


@open_step
def new_node(node: int, draw: int, odds: float, group: int) -> PathNode:
    """Return a node under which no draft has been tried."""
    no_odds = np.empty(0)
    return PathNode(node, draw, odds, group, 0, no_odds, np.empty(0, dtype=np.int64), no_odds, no_odds)


@open_step
def owe(path: Any, rows: Any, spec: ClimbSpec) -> int:
    """Compute the law after the newest node, unless it is known. Returns SOUND, DEAD, BROKEN or UNDECIDED."""
    top = path[-1]
    if len(top.owed) > 0:
        return SOUND
    row = row_at(rows, top.node)
    condition = condition_of_norm(norm_of(row))
    if condition == SOUND:
        if spec.greedy:
            token = best_token_of_row(row, 0)
            if token < 0:
                return UNDECIDED
            law = greedy_law(token, row.vocab)
        else:
            law = law_at_row(rows, row, spec.truncation)
        if not is_law_decided(law):
            return UNDECIDED
        owed = exponentials(law.logp)
        path[-1] = PathNode(
            top.node, top.draw, top.odds, top.group, top.failed, owed, law.tokens, top.own, top.on_wanted
        )
    return condition


@open_step
def drafts_at(path: Any, groups: Siblings) -> Drafts:
    """Return the group on trial under the newest node, with its law without the failed draws."""
    top = path[-1]
    drafts = drafts_under(groups, top.group, RowLaw(top.tokens, top.owed, 0))
    own = top.own
    on_wanted = top.on_wanted
    if top.failed == 0:
        own = drafts.own
        on_wanted = drafts.on_wanted
        path[-1] = PathNode(top.node, top.draw, top.odds, top.group, 0, top.owed, top.tokens, own, on_wanted)
    return Drafts(drafts.places, drafts.own_places, own, on_wanted, drafts.distinct, drafts.chosen)


@open_step
def candidate_of(top: PathNode, drafts: Drafts) -> Array:
    """Return the law of the draw on trial under a node, on the tokens that are owed."""
    mass = drafts.own.sum() if drafts.distinct and not drafts.chosen else 1.0
    return law_on_trial(drafts, drafts.places[top.failed], mass, len(top.owed))


@open_step
def share_of(top: PathNode, drafts: Drafts, candidate: Array) -> float:
    """Return the odds of accepting the path to the draw on trial, given the odds and the owed law of its parent."""
    place = drafts.places[top.failed]
    if place < 0:  # the target's law lacks the token
        return 0.0
    wanted = top.odds * top.owed[place]
    return 1.0 if wanted >= candidate[place] else wanted / candidate[place]


@open_step
def drop(path: Any, groups: Siblings, under: GroupsUnder) -> None:
    """Subtract the law of the draw on trial, which has failed, from the law that the newest node owes."""
    drafts = drafts_at(path, groups)
    top = path[-1]
    missing = np.maximum(top.odds * top.owed - candidate_of(top, drafts), 0.0)
    total = missing.sum()
    owed = top.owed
    odds = 1.0 if len(path) == 1 else 0.0
    if total > NOTHING:
        owed = missing / total
        odds = total / (total + 1.0 - top.odds)
    if drafts.distinct:
        drafts.own[drafts.own_places[top.failed]] = 0.0
        if drafts.places[top.failed] >= 0:
            drafts.on_wanted[drafts.places[top.failed]] = 0.0
    group = top.group
    failed = top.failed + 1
    if failed == len(drafts.places):
        group = under.after[group]
        failed = 0
    path[-1] = PathNode(top.node, top.draw, odds, group, failed, owed, top.tokens, top.own, top.on_wanted)


@open_step
def descend(
    path: Any, rows: Any, groups: Siblings, under: GroupsUnder, spec: ClimbSpec, evidence: Evidence, is_audited: bool
) -> int:
    """Follow the first drafts that have not failed to a leaf. Returns SOUND, or the condition of a node without a law."""
    while path[-1].node >= 0 and path[-1].group >= 0:
        condition = owe(path, rows, spec)
        if condition != SOUND:
            return condition
        drafts = drafts_at(path, groups)
        top = path[-1]
        candidate = candidate_of(top, drafts)
        share = share_of(top, drafts, candidate)
        if is_audited and gathers(evidence):
            note_acceptance(evidence, top.odds * top.owed, candidate, share)
        draw = start_of(groups.draw_ends, top.group) + top.failed
        child = groups.nodes[draw]
        path.append(new_node(child, draw, share, under.first[child] if child >= 0 else -1))
    return SOUND


@step
def climb(spec: ClimbSpec, turn: ScoredTurn, dice: Any, evidence: Evidence, observer: Any) -> tuple[Layers, int]:
    """Follow the first drafts to a leaf and accept the whole path with its odds; if rejected, drop the leaf; repeat.

    The odds of a child follow from its parent's odds; dropping a leaf subtracts its law from the law that its parent owes.

    Arguments and results as in `walk.walk_down`, but `evidence` is of the trials of the first path only.
    """
    rows = turn.rows
    groups = turn.forest.siblings
    under = groups_by_node(groups, len(turn.forest.tokens))
    path = [new_node(0, -1, 1.0, under.first[0])]
    # Only the trials of the first path can be audited. If the shape of a tree depends on its draws, the nodes under one
    # draft are evidence of the other drafts: after a leaf was seen, the next candidate has its law on average over trees,
    # not given this tree.
    is_audited = True
    while True:
        condition = descend(path, rows, groups, under, spec, evidence, is_audited)
        if condition != SOUND:
            return emitted_layers(start_walk(1)), condition
        count = len(path) - 1
        if count == 0 or flip(dice, path[-1].odds):
            break
        is_audited = False
        path.pop()
        drop(path, groups, under)
    walk = start_walk(count + 2)
    tokens = np.empty(count, dtype=np.int64)
    found = np.empty(count, dtype=np.int64)
    for place in range(count):
        tokens[place] = groups.tokens[path[place + 1].draw]
        found[place] = path[place + 1].node
    accepted = TokenPath(tokens, found, np.ones(count, dtype=np.bool_))
    going = emit_path(walk, rows, turn.live, spec, turn.length, accepted, evidence, observer)
    last = path[-1].node
    if not going or last < 0:
        return emitted_layers(walk), SOUND
    condition = owe(path, rows, spec)
    if condition != SOUND:
        return emitted_layers(walk), condition
    top = path[-1]
    place = pick(dice, top.owed)
    token = top.tokens[place] if len(top.tokens) > 0 else place
    ends = (spec.stop.eos == token).any() and is_drafted(groups, under, last, token)
    drawn = TokenPath(np.full(1, token), np.full(1, -1), np.full(1, ends))
    emit_path(walk, rows, turn.live, spec, turn.length, drawn, evidence, observer)
    return emitted_layers(walk), SOUND


verify_turn.of(ClimbSpec)(climb)


@dataclass(frozen=True)
class TraversalRule:
    """Follow the first drafts to a leaf and accept the whole path with its odds; if rejected, drop the leaf and repeat.

    On a chain this is block verification, which on average accepts at least as many tokens as `PathRule`; on trees it
    has never been found to accept fewer.

    Law: exact: the target's. Source: traversal verification (arXiv 2505.12398); block verification (2403.10444).
    """

    law: ClassVar[str] = EXACT
    most_beams: ClassVar[int] = 1
    tries: ClassVar[bool] = True

    def ignores_drafts(self, session: Session) -> bool:
        """Return whether texts are independent of the drafts: at temperature 0, where nothing is drawn."""
        return session.warp.greedy

    def spec(self, session: Session) -> ClimbSpec:
        """Return the spec by which steps judge the trees of a session."""
        return ClimbSpec(session.warp.greedy, session.warp.cut, session.limits.stop)

    def listing(self, session: Session) -> Listing:
        """Return the lists of tokens by which laws are decided; see `Rule`."""
        return listing_of_law(session)

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        """Return the verdict on a tree. Raises `LostLaw` if the law of a draft is unknown."""
        check_has_laws(forest, "TraversalRule")
        inputs = WalkInputs.of(session, forest, scored)
        layers, condition = inputs.take_turn(climb, session, forest, self.spec(session))
        return Verdict(checked(layers, condition, session, scored), audit=inputs.audit(session))
