"""VERIFY: from the leaves to the root. A node is judged when everything below it has failed."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from specbeam.audit import Audit
from specbeam.control.width import FixedWidths
from specbeam.core.beams import Beams, Layers
from specbeam.core.dice import flip, pick
from specbeam.core.forest import Forest, groups_by_node, start_of
from specbeam.core.limits import Stop
from specbeam.core.steps import Array, step
from specbeam.laws.joint import SOUND
from specbeam.laws.rows import RowLaw, greedy_law
from specbeam.laws.truncation import Truncation
from specbeam.records import Verdict
from specbeam.session import Session
from specbeam.verify.trials import NOTHING, Drafts, Watched, law_on_trial, note_trial
from specbeam.verify.walk import (
    ONE_SEQUENCE,
    WalkInputs,
    check_has_laws,
    checked,
    condition_of_norm,
    drafts_under,
    emit_path,
    emitted_layers,
    is_drafted,
    law_at_row,
    norm_of,
    row_at,
    start_walk,
)


class ClimbSpec(NamedTuple):
    """How tokens are taken on the way up."""

    greedy: bool
    truncation: Truncation
    stop: Stop


@step
def climb(
    rows: Any, forest: Forest, live: Beams, spec: ClimbSpec, widths: Any, planned: int, length: int, finished: Any,
    dice: Any, watched: Watched, eye: Any,
) -> tuple[Layers, int]:  # fmt: skip
    """Follow the first drafts down to a leaf and accept the whole path with its odds; if not, drop the leaf, and go on.

    A child's odds are what its parent can still give it. Dropping a leaf takes its law off what its parent still owes.

    Arguments and results as in `walk.walk_down`, but that `watched` notes what each candidate of the first path is worth.
    """
    groups = forest.siblings
    under = groups_by_node(groups, len(forest.tokens))
    no_odds = np.empty(0)
    no_tokens = np.empty(0, dtype=np.int64)
    # An entry for each node of the path from the root down. `owed` is the law of the next token given what has failed, on
    # the tokens `names`; it is empty until drafts are tried. `own` and `on_wanted` are the laws of the group on trial.
    nodes = [0]
    draws = [-1]
    odds = [1.0]
    group_of = [under.first[0]]
    draw_of = [0]
    owed = [no_odds]
    names = [no_tokens]
    own = [no_odds]
    on_wanted = [no_odds]
    # Only the trials of the first path can be audited. What hangs under a draft tells where the others hang if trees grow by
    # what was drawn; so once a leaf was seen, the next candidate has its law on average over trees and not given this one.
    # Where nothing is drawn there is nothing to audit.
    is_audited = not spec.greedy
    while True:
        top = len(nodes) - 1
        while nodes[top] >= 0 and group_of[top] >= 0:
            group = group_of[top]
            if len(owed[top]) == 0:
                row = row_at(rows, nodes[top])
                condition = condition_of_norm(norm_of(row))
                if condition != SOUND:
                    return emitted_layers(start_walk(1)), condition
                law = greedy_law(row) if spec.greedy else law_at_row(rows, row, spec.truncation)
                owed[top] = np.exp(law.logp)
                names[top] = law.tokens
            drafts = drafts_under(groups, group, RowLaw(names[top], owed[top], 0))
            if draw_of[top] == 0:
                own[top] = drafts.own
                on_wanted[top] = drafts.on_wanted
            place = drafts.places[draw_of[top]]
            candidate = law_on_trial(
                _struck(drafts, own[top], on_wanted[top]), place, _mass(drafts, own[top]), len(owed[top])
            )
            share = 0.0  # of a token that the target cannot say
            if place >= 0:
                wanted = odds[top] * owed[top][place]
                share = 1.0 if wanted >= candidate[place] else wanted / candidate[place]
            if is_audited and len(watched.accepted) > 0:
                note_trial(watched, odds[top] * owed[top], candidate, share)
            draw = start_of(groups.draw_ends, group) + draw_of[top]
            child = groups.nodes[draw]
            nodes.append(child)
            draws.append(draw)
            odds.append(share)
            group_of.append(under.first[child] if child >= 0 else -1)
            draw_of.append(0)
            owed.append(no_odds)
            names.append(no_tokens)
            own.append(no_odds)
            on_wanted.append(no_odds)
            top += 1
        if top == 0 or flip(dice, odds[top]):
            break
        is_audited = False
        nodes.pop()
        draws.pop()
        odds.pop()
        group_of.pop()
        draw_of.pop()
        owed.pop()
        names.pop()
        own.pop()
        on_wanted.pop()
        top -= 1
        drafts = drafts_under(groups, group_of[top], RowLaw(names[top], owed[top], 0))
        number = draw_of[top]
        place = drafts.places[number]
        left = _struck(drafts, own[top], on_wanted[top])
        candidate = law_on_trial(left, place, _mass(drafts, own[top]), len(owed[top]))
        missing = np.maximum(odds[top] * owed[top] - candidate, 0.0)
        total = missing.sum()
        if total > NOTHING:
            owed[top] = missing / total
            odds[top] = total / (total + 1.0 - odds[top])
        else:
            odds[top] = 1.0 if top == 0 else 0.0
        if drafts.distinct:
            own[top][drafts.own_places[number]] = 0.0
            if place >= 0:
                on_wanted[top][place] = 0.0
        draw_of[top] = number + 1
        if number + 1 == len(drafts.places):
            draw_of[top] = 0
            group_of[top] = under.after[group_of[top]]
    # The path is accepted: its tokens, and one more after its last node.
    walk = start_walk(len(nodes) + 1)
    count = len(nodes) - 1
    tokens = np.empty(count, dtype=np.int64)
    found = np.empty(count, dtype=np.int64)
    for place in range(count):
        tokens[place] = groups.tokens[draws[place + 1]]
        found[place] = nodes[place + 1]
    stop = spec.stop
    going = emit_path(walk, rows, live, stop, length, tokens, found, np.ones(count, dtype=np.bool_), eye)
    last = nodes[count]
    if not going or last < 0:
        return emitted_layers(walk), SOUND
    rest = owed[count]
    kept = names[count]
    if len(rest) == 0:
        row = row_at(rows, last)
        condition = condition_of_norm(norm_of(row))
        if condition != SOUND:
            return emitted_layers(walk), condition
        law = greedy_law(row) if spec.greedy else law_at_row(rows, row, spec.truncation)
        rest = np.exp(law.logp)
        kept = law.tokens
    place = pick(dice, rest)
    token = kept[place] if len(kept) > 0 else place
    ends = (stop.eos == token).any() and is_drafted(groups, under, last, token)
    emit_path(walk, rows, live, stop, length, np.full(1, token), np.full(1, -1), np.full(1, ends), eye)
    return emitted_layers(walk), SOUND


@step
def _struck(drafts: Drafts, own: Array, on_wanted: Array) -> Drafts:
    """Return drafts whose law is what is left of it, with the draws before struck out."""
    return Drafts(drafts.places, drafts.own_places, own, on_wanted, drafts.distinct, drafts.chosen)


@step
def _mass(drafts: Drafts, own: Array) -> float:
    """Return the mass that is left of the law of drafts."""
    return own.sum() if drafts.distinct and not drafts.chosen else 1.0


@dataclass(frozen=True)
class TraversalRule:
    """Follow the first drafts down to a leaf and accept the whole path with its odds; if not, drop the leaf, update what
    its parent still owes, and try what is left. On a chain this is block verification.

    On chains it accepts at least as many tokens on average as `PathRule`; on trees it was never found to accept fewer.

    Law: exact: the target's. Source: traversal verification (arXiv 2505.12398); block verification (2403.10444).
    """

    tries: ClassVar[bool] = True

    def spec(self, session: Session) -> ClimbSpec:
        """Return how tokens are taken for a session."""
        return ClimbSpec(session.warp.greedy, session.warp.cut, session.limits.stop)

    def widths(self, session: Session) -> FixedWidths:
        """Return that one sequence is decoded."""
        return ONE_SEQUENCE

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        """Return what lives on."""
        check_has_laws(forest, "TraversalRule")
        inputs = WalkInputs.of(session, forest, scored)
        layers, condition = inputs.take_turn(climb, session, forest, self.spec(session))
        audit = None
        if inputs.eye is not None and inputs.eye.audit is not None:
            audit = inputs.eye.audit + _audit_of_worths(inputs.watched)
        return Verdict(checked(layers, condition, session, scored), audit=audit)


def _audit_of_worths(watched: Watched) -> Audit:
    """Return the audit of what candidates were worth; the coin is tossed later."""
    audit = Audit()
    for number in range(int(watched.count[0])):
        audit += Audit.of_odds(watched.wanted[number], watched.drafted[number], float(watched.accepted[number]))
    return audit
