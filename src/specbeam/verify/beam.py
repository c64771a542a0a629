"""VERIFY: beams, layer by layer. What survives has the law of beam sampling with the width the layer was given.

Both couplings judge a layer by the same joint law and keep the same books; they differ in how they draw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam import kernels
from specbeam.choice import Choice, choose
from specbeam.control.accepted import (
    odds_by_drafts,
    odds_of_rejection,
    odds_under_shared_noise,
    widths_by,
)
from specbeam.control.width import FixedWidth, Outlook, Width
from specbeam.errors import DeadEnd
from specbeam.forest import Forest, Group
from specbeam.laws import JointLaw, Pairs
from specbeam.limits import Ended
from specbeam.probs import joint_law, picked
from specbeam.records import Audit, Beams, Step, Trial, Verdict
from specbeam.session import Session
from specbeam.verify.beam_fast import steps_at_once
from specbeam.verify.draws import Taken, drawn, draws
from specbeam.verify.draws_fast import draws_fast

Odds = Float64[np.ndarray, " _"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer while it is judged: the live beams above it, the target's law over their pairs, the drafts if any."""

    session: Session
    forest: Forest
    live: Beams
    scored: Float[torch.Tensor, "nodes vocab"]
    group: Group | None  # None behind the last draft layer
    left: int = 1  # layers that were to be drafted from this one on; how many were would tell of draws to come

    @property
    def vocab(self) -> int:
        return self.scored.shape[1]

    @cached_property
    def law(self) -> JointLaw:
        live, rows = self.live, picked(self.scored, self.live.nodes)
        return joint_law(rows, live.scores, live.counts, self.session.warp, self._paths)

    def _paths(self) -> Int64[np.ndarray, "beams length"]:
        return self.session.paths(self.forest, self.live.nodes)

    def chosen(self, count: int) -> Choice:
        """The best pairs of log-law plus noise: draws without replacement (Gumbel-top-k) that do not look at the drafts."""
        session, live = self.session, self.live
        law = self.__dict__.get("law")  # if a width or an audit has asked for it
        return choose(
            self.scored, live, session.warp, self._paths, count, 0, np.ones(len(live), dtype=bool), session.limits,
            lambda: session.coarse_noise(live.keys, self.vocab), live.nodes, law,
        )  # fmt: skip

    @cached_property
    def beam_of(self) -> dict[int, int]:
        """The live beam that ends at a forest node."""
        return {int(node): beam for beam, node in enumerate(self.live.nodes)}

    def laws(self, pairs: Pairs) -> tuple[Odds, Odds]:
        """Target and draft odds of pairs of live beams. What the draft has elsewhere is left out, so its sum may be below
        1: a draft under a dead parent is refused, and the residual learns from the refusal (docs/exactness.md).
        """
        beams, tokens = np.divmod(pairs, self.vocab)
        return np.exp(self.law.logp_at(pairs)), self._q(beams, tokens)

    def outlook(self, most: int, by_noise: bool) -> Outlook:
        """What its width may be chosen by."""
        return Outlook(
            lambda: self.accepted(most, by_noise), lambda drafts: self.accepted_by(drafts, most), self.drafted,
            self.left, self.session.state,
        )  # fmt: skip

    def accepted_by(self, drafts: int, most: int) -> Float64[np.ndarray, "widths counts"]:
        """Odds that 0, 1, 2, ... draws are all drafts, under shared noise, if there were 0, 1, ..., `drafts` of these."""
        draft = self.group.law if self.group is not None else None
        if not isinstance(draft, JointLaw) or not draft.truncation.cuts:
            return odds_by_drafts(*self.laws(self.law.head()), drafts, most)
        found = odds_under_shared_noise(self.law, draft, self.row_of, self.known, drafts, most)
        if found is not None:
            return found
        return self.accepted_of_cut(draft, drafts, most)

    def accepted_of_cut(self, draft: JointLaw, drafts: int, most: int) -> Float64[np.ndarray, "widths counts"]:
        """The same for a draft law that is cut, from its likeliest pairs and the target's."""
        p, q = self._entrants(draft, drafts + most)
        return odds_by_drafts(p, q, drafts, most, np.arange(len(p)))

    def accepted(self, most: int, by_noise: bool) -> Odds:
        """Odds that 0, 1, 2, ... draws are all drafts, from the pairs that carry the target's law."""
        if by_noise:
            return self.accepted_by(self.drafted, most)[:, self.drafted]
        return odds_of_rejection(*self.laws(self.law.head()), self.drafted)

    def _entrants(self, draft: JointLaw, wanted: int) -> tuple[Odds, Odds]:
        """Target and draft odds of the pairs that matter, the `wanted` likeliest drafts first, as the halo is chosen."""
        beyond = self._named(draft.uncut.best(wanted))
        pairs = self.law.head()
        pairs = np.concatenate([beyond, pairs[~np.isin(pairs, beyond)]])
        beams, tokens = np.divmod(pairs, self.vocab)
        return self.law.odds(beams, tokens), self._q(beams, tokens)

    @cached_property
    def known(self) -> Int64[np.ndarray, " rows"]:
        """The live beam of each row of the group's law; -1 if it is dead."""
        parents = [] if self.group is None else self.group.parents.tolist()
        return np.array([self.beam_of.get(node, -1) for node in parents], dtype=np.int64)

    def _named(self, pairs: Pairs) -> Pairs:
        """Pairs of the draft's rows as pairs of live beams; those of others are left out."""
        rows, tokens = np.divmod(pairs, self.vocab)
        beams = self.known[rows]
        return (beams * self.vocab + tokens)[beams >= 0]

    def support(self) -> tuple[Pairs, Odds, Odds]:
        """Every pair with odds under the target, and its odds under target and draft."""
        pairs = self.law.support
        if pairs is not None:
            return (pairs, *self.laws(pairs))
        q = np.zeros_like(self.law.p)
        if self.group is not None and self.group.law is not None:
            for beam, row in enumerate(self.row_of.tolist()):
                if row >= 0:
                    q[beam] = self.group.law.row(row)
        return np.arange(q.size), self.law.p.ravel(), q.ravel()

    @cached_property
    def row_of(self) -> Int64[np.ndarray, " beams"]:
        """Row of each live beam in the group's law; -1 if it has none."""
        if self.group is None:
            return np.full(len(self.live), -1)
        rows = {int(node): row for row, node in enumerate(self.group.parents)}
        return np.array([rows.get(int(node), -1) for node in self.live.nodes], dtype=np.int64)

    def _q(self, beams: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " n"]) -> Odds:
        if self.group is None or self.group.law is None:
            return np.zeros(len(beams))
        return self.group.law.odds(self.row_of[beams], tokens)

    @property
    def drafted(self) -> int:
        """How many drafts there are."""
        return 0 if self.group is None else len(self.group.draw_tokens)

    @property
    def drafts(self) -> list[tuple[int, int]]:
        """(parent node, token) of each draft draw, in draw order."""
        if self.group is None:
            return []
        parents = self.group.parents[self.group.draw_parents]
        return list(zip(parents.tolist(), self.group.draw_tokens.tolist(), strict=True))

    @property
    def proposals(self) -> list[int]:
        """The drafts as pairs; -1 where the parent is dead."""
        beams = ((self.beam_of.get(parent, -1), token) for parent, token in self.drafts)
        return [beam * self.vocab + token if beam >= 0 else -1 for beam, token in beams]

    def outcome(self, choice: Choice, counts: Int64[np.ndarray, " _"], asked: int) -> Step:
        """What becomes of the drawn pairs."""
        tokens, parents, limits = choice.tokens, self.live.nodes[choice.parents], self.session.limits
        nodes, ended = self.forest.find(parents, tokens), choice.ends
        if limits.stop_strings:
            ended = limits.ended(
                tokens, lambda: np.column_stack([self.session.new_tokens(self.forest, parents), tokens])
            )
        passed = self.group is not None and bool((ended | (nodes >= 0)).all())
        return Step(parents, Beams(nodes, tokens, choice.scores, counts, choice.keys), ended, asked, passed)

    def audit(self, choice: Choice) -> Audit:
        """The first pair of a layer has the joint law, whatever the coupling."""
        if not self.session.audited or self.session.warp.greedy:
            return Audit()
        first = int(choice.parents[0]) * self.vocab + int(choice.tokens[0])
        support = self.law.support
        if support is None:
            return Audit.of_draw(self.law.logp.ravel(), first)
        return Audit.of_draw(self.law.logp_at(support), int(np.searchsorted(support, first)))

    def trials(self, depth: int, step: Step, judged: int) -> list[Trial]:
        """Every draft of the layer, of which the first `judged` were looked at, and every pair drawn in place of one."""
        chosen = set(zip(step.parents.tolist(), step.beams.tokens.tolist(), strict=True))
        seen = []
        for number, (parent, token) in enumerate(self.drafts):
            fate = "accepted" if (parent, token) in chosen else "rejected" if number < judged else "unused"
            assert self.group is not None
            q = float(self.group.odds[number]) if self.group.law is not None else 0.0
            seen.append(
                Trial(depth, parent, token, int(self.group.draw_nodes[number]), self._p(parent, token), q, fate)
            )
        for parent, token in sorted(chosen - set(self.drafts)):
            q = float(self._q(np.array([self.beam_of[parent]]), np.array([token]))[0])
            seen.append(Trial(depth, parent, token, -1, self._p(parent, token), q, "resampled"))
        return seen

    def _p(self, parent: int, token: int) -> float:
        beam = self.beam_of.get(parent)
        return 0.0 if beam is None else float(self.law.odds(np.array([beam]), np.array([token]))[0])


@dataclass(frozen=True)
class BeamRule:
    """Judge the drafts of each layer until one of the drawn beams is no draft; then, or behind the last layer, stop.

    Args:
        width: how many draws a layer gets; fixed before its drafts are looked at.
        coupling: "noise": the target takes its own best pairs under the noise of (seed, path, token), and the layer
            passes if they are drafts. "rejection": draft draws are accepted or refused one by one.
        replacement: draws with replacement (coupling "rejection" only).
        collapse: keep only the live beam of highest likelihood after each turn (arXiv 2409.16560, sec. 3.4).
        trace: record every trial in the verdict, for pictures.

    Law: given the widths, every layer is `width` draws from the target's joint law over (live beam, token) pairs
    (docs/exactness.md, trajectory theorem). With a fixed width this is beam sampling.
    """

    width: Width
    coupling: str = "noise"
    replacement: bool = False
    collapse: bool = False
    trace: bool = False
    kernel: Callable[..., list[Taken]] = field(default=draws_fast, repr=False)
    at_once: bool = field(default=True, repr=False)  # False: layer by layer, as the oracle of the loop

    @property
    def tries(self) -> bool:
        return self.coupling == "rejection"

    def for_loops(self, session: Session) -> kernels.Widths | None:
        """How it chooses widths, if loops can judge by it."""
        fine = self.at_once and not (self.trace or self.collapse or session.audited or session.limits.stop_strings)
        warp, width = session.warp, self.width
        if not fine or not (self.coupling == "noise" or warp.greedy) or not (warp.for_loops and warp.cut.told_at_once):
            return None
        if warp.greedy:
            width = FixedWidth(width.most)
        return widths_by(width, session.state) if warp.cut.cuts or type(width) is FixedWidth else None

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        live, ended = session.beams, list(session.ended)
        steps: list[Step] = []
        trials: list[Trial] = []
        audit = Audit() if session.audited else None
        while not steps or steps[-1].passed:
            try:
                more = self._ahead(session, forest, live, scored, len(steps), len(ended))
                if not more:
                    group = forest.groups[len(steps)] if len(steps) < len(forest.groups) else None
                    layer = Layer(session, forest, live, scored, group, max(session.shape.depth - len(steps), 1))
                    step, judged, seen = self._step(layer)
                    more = [step]
                    if audit is not None:
                        audit += seen
                    if self.trace:
                        trials += layer.trials(len(steps) + 1, step, judged)
            except DeadEnd as error:
                steps += dead_end(error, steps, ended)
                live = steps[-1].live
                break
            steps += more
            live = steps[-1].live
            ended += session.retired(forest, steps[-1])
            if session.limits.enough(ended, live.scores, session.length + len(steps)):
                break
        return Verdict(tuple(steps), tuple(trials), audit, self._kept(live))

    def _ahead(
        self,
        session: Session,
        forest: Forest,
        live: Beams,
        scored: Float[torch.Tensor, "nodes vocab"],
        done: int,
        ended: int,
    ) -> list[Step]:
        """Steps that a loop can make: nobody looks at what is between them, and no beam ends before the last of them."""
        greedy = session.warp.greedy
        watched = self.trace or session.audited or not self.at_once
        fixed = greedy or (self.coupling == "noise" and type(self.width) is FixedWidth)
        if watched or not fixed or ended >= session.limits.keep:  # then scores alone may say that it is enough
            return []
        return steps_at_once(session, forest, live, scored, self.width.most, done)

    def _step(self, layer: Layer) -> tuple[Step, int, Audit]:
        """The layer's outcome, how many drafts were looked at, and what an audit makes of it."""
        asked = self.width.most
        if layer.group is not None and not layer.session.warp.greedy:
            asked = self.width.choose(layer.outlook(self.width.most, self.coupling == "noise"))
        if self.coupling == "noise" or layer.session.warp.greedy:  # nothing is drawn at temperature 0
            choice = layer.chosen(asked)
            return layer.outcome(choice, np.ones_like(choice.tokens), asked), layer.drafted, layer.audit(choice)
        taken, seen = self._by_rejection(layer, asked)
        pairs, first, counts = np.unique([one.token for one in taken], return_index=True, return_counts=True)
        order = np.argsort(first)
        complete = all(one.draft >= 0 for one in taken)
        judged = taken[-1].draft + 1 if complete else layer.drafted
        choice = Choice.of(pairs[order], layer.law, layer.live.keys, layer.session.limits, len(pairs))
        return layer.outcome(choice, counts[order], asked), judged, seen + layer.audit(choice)

    def _by_rejection(self, layer: Layer, asked: int) -> tuple[list[Taken], Audit]:
        group, dice = layer.group, layer.session.dice
        masses = group.masses.tolist() if group is not None else []
        with_replacement = group.replacement if group is not None else self.replacement
        pairs, p, q = layer.support()
        proposals = _places(pairs, layer.proposals)
        seen: list[Audit] = []
        if layer.session.audited:
            candidates = drawn(proposals, masses, q, with_replacement)
            watch = lambda r, law, accepted: seen.append(Audit.of_trial(r, law, accepted))  # noqa: E731
            taken = draws(candidates, p, asked, dice, self.replacement, watch)
        else:
            taken = self.kernel(proposals, masses, q, p, asked, dice, with_replacement, self.replacement)
        return [Taken(int(pairs[one.token]), one.draft) for one in taken], sum(seen, Audit())

    def _kept(self, live: Beams) -> int | None:
        return int(np.argmax(live.scores)) if self.collapse and len(live) else None


def dead_end(error: DeadEnd, steps: Sequence[Step], ended: Sequence[Ended]) -> list[Step]:
    """What to add to the steps of a turn when no live beam has a way on.

    Layers that were made stand, and the next turn meets the dead end again. If there are none, the beams that ended before
    are the answer; only if there are none of these either has the prompt failed.
    """
    if steps:
        return []
    if ended:
        return [Step.dead_end()]
    raise error


def _places(pairs: Pairs, wanted: list[int]) -> list[int]:
    """Where each wanted pair stands among the ascending `pairs`; -1 if it does not."""
    places = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    return np.where(pairs[places] == wanted, places, -1).tolist()
