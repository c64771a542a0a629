"""Recipes whose drafts are judged by their joint likelihood. They change the law of the output, and say so."""

from typing import Literal, get_args

from specbeam.control.best_tree import depth_of_tree, size_of
from specbeam.control.fixed import FixedShape
from specbeam.draft.joint_beams import JointBeams
from specbeam.draft.tree import Branching, FixedTree, Growth, TreeDrafter
from specbeam.errors import BadSetting, one_of
from specbeam.laws.named import CHANGED
from specbeam.lm.base import LM
from specbeam.recipes.compose import ControllerName, DraftKind, control_of
from specbeam.recipes.method import Method, RequestInfo, at_least_one, refuse_ignored
from specbeam.session import Controller, Parts
from specbeam.verify.joint_beams import Bonus, JointRule, refuse_audit
from specbeam.verify.joint_paths import Prefix, Theta

Draft = Literal["sample", "search"]


def mtad(
    beams: int | None = None,
    depth: int | None = None,
    threshold: float = 0.5,
    draft: "Draft | Growth" = "sample",
    replacement: bool = False,
    prefix: Prefix = "longest",
    bonus: Bonus = "sample",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Multi-token assisted decoding: the best of the draft's beams, cut to the longest prefix whose joint likelihood ratio
    passes the threshold, then one token of the target's own.

    Law: approximate: changes the output law on purpose, for more likely text
    Paper: arXiv 2407.09722 (Qin et al.), ICLR 2025

    What is promised instead, for every accepted block, is in `report.certificate`: its log-likelihood under the target is
    above its draft log-likelihood + log(threshold), and at most `gap` nats below that of the best block of its length.
    At temperature 0 the draft searches and the bonus is the best token: no chance at all.

    Steps of the paper: draft beams draft/joint_beams.py; verification verify/joint_beams.py.

    Args:
        beams: of the draft model; None: 4.
        depth: draft tokens per pass of the target; None: 4.
        threshold: least joint likelihood ratio, in [0, 1]. Lower accepts more; at 1 it is plain decoding.
        draft: "sample" draws the beams, "search" takes the best; or a growth of `draft/` that grows one chain.
        replacement: draw beams independently (the authors' commands do); duplicates are one beam.
        prefix: "longest": shorter prefixes may fail. "first_failure": they may not.
        bonus: "sample", "argmax", or "none": no bonus after an accepted draft.
        controller: who chooses the length of a draft: "fixed", "confidence", "tracked", "thompson", "calibrated",
            "survival", or a part, which sets depth and beams itself.
    """
    rule = JointRule(threshold, 1, prefix=prefix, bonus=bonus)
    return _assisted("mtad", beams, depth, _growth(draft, replacement, beams, 1), rule, controller)


def mjsd(
    chains: int = 2,
    beams: int | None = None,
    depth: int | None = None,
    threshold: float = 0.5,
    draft: Draft = "sample",
    replacement: bool = False,
    prefix: Prefix = "longest",
    bonus: Bonus = "sample",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Multi-token joint speculative decoding, the first form of `mtad`: several of the draft's beams are scored, and the
    first of those with the longest accepted prefix is kept.

    Law: approximate: changes the output law on purpose, for more likely text
    Paper: arXiv 2407.09722, first version (July 2024)

    Its thresholds cannot be compared with those of the published program, whose draft odds were not those of its paths.

    Args:
        chains: draft beams that the target scores.
        beams: of the draft model; None: 8.
        draft: "sample" or "search".
        depth, threshold, replacement, prefix, bonus, controller: as in `mtad`.
    """
    at_least_one(chains=chains)
    one_of("draft", draft, get_args(Draft))
    most = 8 if beams is None else beams
    if chains > most:
        raise BadSetting(f"chains is {chains}, beams is {most}; there are no more chains than beams")
    rule = JointRule(threshold, chains, prefix=prefix, bonus=bonus)
    return _assisted("mjsd", beams, depth, _growth(draft, replacement, beams, chains), rule, controller, width=8)


def mmtad(
    beams: int | None = None,
    depth: int | None = None,
    threshold: float = 0.5,
    draft: "Draft | Growth" = "sample",
    replacement: bool = False,
    theta: Theta = "chain",
    prefix: Prefix = "longest",
    bonus: Bonus = "sample",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Multi-candidate `mtad`: all draft beams are scored in one pass, and the deepest node that passes is kept.

    Law: approximate: changes the output law on purpose, for more likely text
    Paper: arXiv 2407.09722 (Qin et al.), ICLR 2025, the multi-candidate variant

    Accepts at least as much as `mtad` on the same draft, for more scored nodes: up to beams * depth.

    Args:
        theta: what a node's likelihood is compared with: that of the best draft beam at the same depth ("chain"), the
            largest draft likelihood of that depth ("max"), or the node's own ("own").
        draft: "sample", "search", or any growth of `draft/`.
        beams, depth, threshold, replacement, prefix, bonus, controller: as in `mtad`.
    """
    rule = JointRule(threshold, None, theta, prefix, bonus)
    return _assisted("mmtad", beams, depth, _growth(draft, replacement, beams, None), rule, controller)


def _growth(draft: "Draft | Growth", replacement: bool, beams: int | None, chains: int | None) -> Growth:
    if isinstance(draft, type):
        raise BadSetting(f"draft is the class {draft.__name__}; make one, with its settings")
    if isinstance(draft, Growth):
        who = f"the growth {type(draft).__name__}"
        refuse_ignored(False, who, replacement=replacement or None)
        refuse_ignored(not isinstance(draft, (Branching, FixedTree)), who, beams=beams)
        if chains == 1 and not _is_chain(draft):
            raise BadSetting(f"mtad looks at one chain, and {who} may grow more; mmtad looks at all of a draft")
        return draft
    one_of("draft", draft, get_args(Draft))
    if replacement and draft == "search":
        raise BadSetting("search takes the best beams and draws nothing; replacement=True needs draft='sample'")
    return JointBeams(draft, replacement, chains)


def _is_chain(growth: Growth) -> bool:
    """Whether it is known to grow one chain."""
    if isinstance(growth, FixedTree):
        return depth_of_tree(growth.topology) == size_of(growth.topology)
    if isinstance(growth, Branching):
        return set(growth.counts) == {1}
    return isinstance(growth, JointBeams) and growth.chains == 1


def _assisted(
    name: str, beams: int | None, depth: int | None, growth: Growth, rule: JointRule,
    controller: "ControllerName | Controller", width: int = 4,
) -> Method:  # fmt: skip
    refuse_ignored(isinstance(controller, str), "a controller of one's own", beams=beams, depth=depth)
    beams = width if beams is None else beams
    depth = 4 if depth is None else depth
    at_least_one(beams=beams, depth=depth)
    fixed = FixedShape(depth, beams, beyond=0 if rule.bonus == "none" else 1)
    control = control_of(controller, DraftKind(name, depth, beams), fixed)
    law = _law(rule)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        return Parts(TreeDrafter(draft, growth), rule, control(target, draft), law)

    def check(asked: RequestInfo) -> None:
        refuse_audit(asked.audited)

    return Method(name, law, 1, build, needs_draft=True, plain=False, check=check)


def _law(rule: JointRule) -> str:
    """What is promised of accepted blocks, see `records.Certificate`."""
    if rule.threshold == 1:
        return "approximate: at threshold 1 no draft passes, it is the target alone"
    if rule.threshold == 0:
        return f"{CHANGED}at threshold 0 nothing is promised of accepted blocks"
    compared = {
        "own": "log q",
        "chain": "log q of the best draft beam at their length",
        "max": "the largest log q of that length in the draft",
    }["own" if rule.chains is not None else rule.theta]
    return f"{CHANGED}accepted blocks have log p > {compared} + log {rule.threshold}"
