"""VERIFY: by joint likelihood. A draft path is accepted if its likelihood under the target is close to that under the draft.

This trades the law of the text for likelihood and length: the output does not follow the target's law.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float

from specbeam.core.errors import BadSetting, LostLaw, NotSupported, one_of
from specbeam.core.forest import Forest
from specbeam.core.laws.reduce import SOUND, condition_of_norm
from specbeam.core.records import Certificate, Verdict
from specbeam.core.session import Rule, Session
from specbeam.core.verify.walk import (
    MATCH_BY_DICE,
    MATCH_BY_NOISE,
    NODE,
    Emitted,
    WalkInputs,
    WalkSpec,
    checked,
    drawn_token,
    emitted_layers,
    norm_of,
    row_at,
    start_walk,
)
from specbeam.recipes.joint.layers import layers
from specbeam.recipes.joint.paths import Paths, Prefix, Theta, deepest_in_chains, deepest_in_tree
from specbeam.recipes.joint.target_as_draft import TargetAsDraft

Coupling = Literal["noise", "dice"]
Bonus = Literal["sample", "argmax", "none"]


@dataclass(frozen=True)
class JointRule:
    """Accept the longest draft path whose joint likelihood ratio passes a threshold, then add a token from the target.

    Works with all drafts whose forest has the draft log-likelihoods of its paths (`Forest.logq`). The decision is
    deterministic; only the bonus token is drawn.

    Args:
        threshold: in [0, 1]. 0 accepts all paths that are possible under the target; 1 accepts none: plain decoding.
        chains: number of final draft beams to judge (1: MTAD, more: MJSD). None: all nodes (MMTAD).
        theta: with chains=None: the draft likelihood to compare nodes with, see `Paths.theta`.
        prefix: "longest": shorter prefixes may fail. "first_failure": they may not.
        bonus: "sample" from the warped law (at temperature 0 its best token), "argmax", or "none" after an accepted draft.
        coupling: "noise": the bonus is drawn by the noise of its position, so with threshold 1 the text is that of plain
            sampling with the same seed. "dice": by the session's random numbers.

    Law: approximate: none is stated; accepted blocks have a `Certificate`.
    Source: arXiv 2407.09722 (MTAD, sec. 3; MJSD in v1; MMTAD in the final version).
    """

    most_beams: ClassVar[int] = 1
    threshold: float
    chains: int | None = None
    theta: Theta = "chain"
    prefix: Prefix = "longest"
    bonus: Bonus = "sample"
    coupling: Coupling = "noise"

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise BadSetting(
                f"threshold is {self.threshold}; it is a likelihood ratio, in [0, 1] (1: the target alone)"
            )
        for name, words in (("theta", Theta), ("prefix", Prefix), ("bonus", Bonus), ("coupling", Coupling)):
            one_of(name, getattr(self, name), get_args(words))

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Verdict:
        refuse_audit(session.audited)
        inputs = WalkInputs.of(session, forest, scored)
        walk = start_walk(forest.size + 1)
        node = 0
        paths = None
        if forest.size > 1:
            paths = judged_paths(session, forest, scored)
            node = self.accepted(paths)
        nodes = np.array([] if paths is None else paths.path(node), dtype=np.int64)
        going = inputs.emit(walk, session, forest.tokens[nodes], nodes, np.ones(len(nodes), dtype=bool))
        certificate = None
        if paths is not None and node and walk.state[NODE] == node:
            certificate = self._certificate(paths, node)
        if going and (node == 0 or self.bonus != "none"):
            condition = self._emit_bonus(inputs, walk, session)
            checked(emitted_layers(walk), condition, session, scored)
        return Verdict(emitted_layers(walk), certificate=certificate)

    def accepted(self, paths: Paths) -> int:
        """Return the last accepted node; 0 if no path is accepted."""
        if self.chains is not None:
            return deepest_in_chains(paths, self.threshold, self.chains, self.prefix)
        return deepest_in_tree(paths, self.threshold, self.theta, self.prefix)

    def _emit_bonus(self, inputs: WalkInputs, walk: Emitted, session: Session) -> int:
        """Emit a token from the target's law. Returns SOUND, or the condition of a row without a law."""
        warp = session.warp
        way = MATCH_BY_NOISE if self.coupling == "noise" else MATCH_BY_DICE
        spec = WalkSpec(way, warp.greedy or self.bonus == "argmax", warp.cut, session.limits.stop)
        row = row_at(inputs.rows, int(walk.state[NODE]))
        condition = condition_of_norm(norm_of(row))
        if condition != SOUND:
            return int(condition)
        token = inputs.run(drawn_token, walk, inputs.rows, row, session.beams, spec, inputs.dice)
        tokens = np.array([token])
        # The bonus is not a draft, even if the same token was drafted.
        inputs.emit(walk, session, tokens, np.array([-1]), np.array([False]))
        return SOUND

    def _certificate(self, paths: Paths, node: int) -> Certificate | None:
        if self.threshold == 0:  # no guarantee
            return None
        theta = paths.logq if self.chains is not None else paths.theta(self.theta)
        length = int(paths.depths[node])
        logp = float(paths.logp[node])
        gap = max(paths.best_possible(length) - logp, 0.0)
        return Certificate(1, length, logp, float(theta[node]) + math.log(self.threshold), gap)


@dataclass(frozen=True)
class OnOwnRows:
    """A rule for drafts by the target itself, which scored their rows while drafting.

    These drafts save no pass, so their layers do not count as accepted.
    """

    rule: Rule
    lm: TargetAsDraft
    most_beams: ClassVar[int] = 1

    def verify(self, session: Session, forest: Forest, scored: Float[torch.Tensor, "new vocab"]) -> Verdict:
        verdict = self.rule.verify(session, forest, self.lm.all_rows(session, scored))
        layers = verdict.layers
        return replace(verdict, layers=layers._replace(passed=np.zeros_like(layers.passed)))


def judged_paths(session: Session, forest: Forest, scored: Float[torch.Tensor, "nodes vocab"]) -> Paths:
    """Return the draft paths of a forest with their likelihoods under both models, each conditional warped separately.

    Without `forest.beams`, the final beams are the leaves that are deepest or have ended.
    """
    if len(forest.logq) == 0 or not np.isfinite(forest.logq).all():
        raise LostLaw(
            "JointRule compares paths by their joint draft likelihood, which these drafts lack (retrieved, merged or "
            "pruned drafts, or drafts without probabilities); draft with a model, or use MatchRule"
        )
    depths = forest.depths()
    logp = np.zeros(forest.size)
    escape = np.full(forest.size, -np.inf)
    for nodes, known, children, rows in layers(session, forest, scored, int(depths.max())):
        logp[children] = known[rows, forest.tokens[children]]
        known[rows, forest.tokens[children]] = -np.inf
        escape[nodes] = known.max(1)
    ended = np.isin(forest.tokens, session.limits.eos) & (depths > 0)
    if len(forest.beams):
        return Paths(forest.parents, logp, forest.logq, forest.beams, ended, escape)
    leaves = ~np.isin(np.arange(forest.size), forest.parents) & (ended | (depths == depths.max()))
    chains = np.flatnonzero(leaves)[np.argsort(-forest.logq[leaves], kind="stable")]
    return Paths(forest.parents, logp, forest.logq, chains, ended, escape)


def refuse_audit(audited: bool) -> None:
    """Raise `NotSupported` if the request is audited."""
    if audited:
        raise NotSupported(
            "an audit tests that the text follows the target's law, and joint decoding changes it on purpose; "
            "leave audit out, and see the certificate in the report"
        )
