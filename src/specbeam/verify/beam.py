"""VERIFY: beams, layer by layer. What survives has the law of beam sampling with the width the layer was given.

Both couplings judge a layer by the same joint law and keep the same books; they differ in one function each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from specbeam.control.width import Width
from specbeam.dice import child_keys
from specbeam.forest import Forest, Group
from specbeam.probs import JointLaw, best, joint_law
from specbeam.records import Beams, Step, Trial, Verdict
from specbeam.session import Session
from specbeam.verify.draws_fast import draws_fast

Pairs = Int64[np.ndarray, " draws"]  # (beam, token) as beam * vocab + token


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
    (dsbd.md, theorem A). With a fixed width this is beam sampling.
    """

    width: Width
    coupling: str = "noise"
    replacement: bool = False
    collapse: bool = False
    trace: bool = False
    kernel: Callable[..., list] = field(default=draws_fast, repr=False)

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        live, length = session.beams, session.length
        ended = list(session.ended)
        steps: list[Step] = []
        trials: list[Trial] = []
        while not steps or (steps[-1].passed and not session.limits.enough(ended, live.scores, length)):
            law = joint_law(
                scored[live.nodes], live.scores, live.counts, session.warp, lambda: session.paths(forest, live.nodes)
            )
            group = forest.groups[len(steps)] if len(steps) < len(forest.groups) else None
            step, seen = self._layer(session, forest, live, law, group)
            steps.append(step)
            trials += [Trial(len(steps), *one) for one in seen]
            live, length = step.live, length + 1
            ended += session.retired(forest, step)
        return Verdict(tuple(steps), tuple(trials), self._kept(live))

    def _layer(
        self, session: Session, forest: Forest, live: Beams, law: JointLaw, group: Group | None
    ) -> tuple[Step, list]:
        q = _lifted(group, live.nodes, law) if group is not None else None
        asked = self.width.most if group is None else self.width.choose(law.p.ravel(), q.ravel(), len(group.draw_tokens))
        if self.coupling == "noise":
            pairs, counts = self._by_noise(session, live, law, asked)
            drafts = None
        else:
            pairs, counts, drafts = self._by_rejection(session, live, law, group, q, asked)
        step = _outcome(session, forest, live, law, pairs, counts, asked, drafted=group is not None)
        return step, _trials(forest, live, law, group, q, step, drafts) if self.trace else []

    def _by_noise(self, session: Session, live: Beams, law: JointLaw, asked: int) -> tuple[Pairs, Pairs]:
        """The best pairs of log-law plus noise: a draw without replacement (Gumbel-top-k), the same for every draft."""
        value = law.logp if session.warp.greedy else law.logp + session.noise(live.keys, law.logp.shape[1])
        pairs = best(value.ravel(), asked)
        return pairs, np.ones_like(pairs)

    def _by_rejection(
        self,
        session: Session,
        live: Beams,
        law: JointLaw,
        group: Group | None,
        q: Float64[np.ndarray, "beams vocab"] | None,
        asked: int,
    ) -> tuple[Pairs, Pairs, list]:
        proposals, odds, with_replacement = [], [], True
        if group is not None:
            beam_of = {int(node): beam for beam, node in enumerate(live.nodes)}
            vocab = law.logp.shape[1]
            beams = [beam_of.get(int(node), -1) for node in group.parents[group.draw_parents]]
            proposals = [
                beam * vocab + int(token) if beam >= 0 else -1 for beam, token in zip(beams, group.draw_tokens, strict=True)
            ]
            odds, with_replacement = group.odds.tolist(), group.replacement
        p = law.p.ravel()
        draft_law = np.zeros_like(p) if q is None else q.ravel()
        taken = self.kernel(
            proposals, odds, draft_law, p, asked, session.dice, with_replacement, self.replacement
        )
        pairs, first, counts = np.unique([one.token for one in taken], return_index=True, return_counts=True)
        order = np.argsort(first)
        return pairs[order], counts[order], taken

    def _kept(self, live: Beams) -> int | None:
        return int(np.argmax(live.scores)) if self.collapse and len(live) else None


def _lifted(group: Group, nodes: Int64[np.ndarray, " beams"], law: JointLaw) -> Float64[np.ndarray, "beams vocab"]:
    """The draft law on the live beams' pairs. What lies on dead parents is left out, so the sum may be below 1.

    This is the treatment "ext" of dsbd.md 4.1: a dead draft is refused, and the residual learns from the refusal.
    """
    lifted = np.zeros_like(law.logp)
    if group.law is None:
        return lifted
    place = {int(node): row for row, node in enumerate(group.parents)}
    for beam, node in enumerate(nodes.tolist()):
        if node in place:
            lifted[beam] = group.law[place[node]]
    return lifted


def _outcome(
    session: Session, forest: Forest, live: Beams, law: JointLaw, pairs: Pairs, counts: Pairs, asked: int, drafted: bool
) -> Step:
    parents, tokens = np.divmod(pairs, law.logp.shape[1])
    nodes = forest.find(live.nodes[parents], tokens)
    ended = session.limits.ended(
        tokens, lambda: np.column_stack([session.new_tokens(forest, live.nodes[parents]), tokens])
    )
    beams = Beams(nodes, tokens, law.logj.ravel()[pairs], counts, child_keys(live.keys[parents], tokens))
    return Step(live.nodes[parents], beams, ended, asked, passed=drafted and bool((nodes[~ended] >= 0).all()))


def _trials(
    forest: Forest,
    live: Beams,
    law: JointLaw,
    group: Group | None,
    q: Float64[np.ndarray, "beams vocab"] | None,
    step: Step,
    taken: list | None,
) -> list[tuple]:
    """(parent, token, node, p, q, fate) of every draft of the layer and of every pair drawn in place of one."""
    p, vocab = law.p.ravel(), law.logp.shape[1]
    row = {int(node): beam for beam, node in enumerate(live.nodes)}
    chosen = set(zip(step.parents.tolist(), step.beams.tokens.tolist(), strict=True))
    judged = len(group.draw_tokens) if group is not None else 0
    if taken is not None and len(taken) == step.width and all(one.draft >= 0 for one in taken):
        judged = taken[-1].draft + 1
    seen, drafted = [], set()
    for number in range(len(group.draw_tokens) if group is not None else 0):
        parent, token = int(group.parents[group.draw_parents[number]]), int(group.draw_tokens[number])
        odds = float(group.law[group.draw_parents[number], token]) if group.law is not None else 0.0
        target = float(p[row[parent] * vocab + token]) if parent in row else 0.0
        fate = "accepted" if (parent, token) in chosen else "rejected" if number < judged else "unused"
        seen.append((parent, token, int(group.draw_nodes[number]), target, odds, fate))
        drafted.add((parent, token))
    for parent, token in chosen - drafted:
        beam = row[parent]
        odds = float(q[beam, token]) if q is not None else 0.0
        seen.append((parent, token, -1, float(p[beam * vocab + token]), odds, "resampled"))
    return seen
