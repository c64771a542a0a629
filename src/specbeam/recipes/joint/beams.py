"""Recipes that judge drafts by their joint likelihood. They change the law of the output on purpose."""

from typing import Literal, get_args

from specbeam.core.control.best_tree import depth_of_tree, size_of
from specbeam.core.control.fixed import FixedShape
from specbeam.core.draft.tree import Branching, FixedTree, Growth, TreeDrafter
from specbeam.core.errors import BadSetting, one_of
from specbeam.core.laws.named import CHANGED
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Parts
from specbeam.recipes.compose import ControllerName, DraftKind, controller_maker
from specbeam.recipes.joint.beam_drafter import JointBeams
from specbeam.recipes.joint.beam_rule import Bonus, JointRule, refuse_audit
from specbeam.recipes.joint.paths import Prefix, Theta
from specbeam.recipes.method import Method, RequestInfo, recipe, refuse_ignored, require_at_least_one

Draft = Literal["sample", "search"]


@recipe
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
    """Draft beams with a small model, and accept the longest prefix of the best beam whose joint likelihood ratio passes a
    threshold: multi-token assisted decoding (MTAD).

    Law: approximate: changes the output law on purpose, for more likely text
    Paper: arXiv 2407.09722 (Qin et al.), ICLR 2025

    The joint likelihood ratio of a block of tokens is its probability under the target divided by its probability under the
    draft model. The target alone chooses the token after the accepted prefix, the bonus.

    In place of a law, `report.certificate` guarantees for every accepted block: its log-likelihood under the target exceeds
    its draft log-likelihood + log(threshold), and is at most `gap` nats below that of the best block of its length. At
    temperature 0 nothing is drawn: the draft beams come from beam search, and the bonus is the best token.

    Turns run one by one in Python, which compares and certifies the joint likelihoods.

    Code: draft beams recipes/joint/beam_drafter.py; verification recipes/joint/beam_rule.py.

    Args:
        beams: number of beams of the draft model; None: 4.
        depth: number of draft tokens per pass of the target; None: 4.
        threshold: minimum joint likelihood ratio, in [0, 1]. A lower threshold accepts more; at 1 this is plain decoding.
        draft: "sample" draws the beams, "search" takes the best ones; or a growth of core/draft/ that drafts one chain.
        replacement: draw beams independently, with replacement, as in the commands of the authors. Duplicates become
            one beam.
        prefix: "longest" accepts the longest passing prefix, even if a shorter one fails. "first_failure" stops at the first
            failing prefix.
        bonus: "sample" (drawn), "argmax", or "none" (no bonus after an accepted draft).
        controller: the controller that chooses the length of a draft: "fixed", "confidence", "tracked", "thompson",
            "calibrated", "survival" (docs/methods/controllers.md), or a part, which sets both depth and beams.
    """
    rule = JointRule(threshold, 1, prefix=prefix, bonus=bonus)
    return _assisted("mtad", beams, depth, _growth(draft, replacement, beams, 1), rule, controller)


@recipe
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
    """Score several draft beams with the target and keep the beam with the longest accepted prefix: multi-token joint
    speculative decoding (MJSD), the first version of `mtad`.

    Law: approximate: changes the output law on purpose, for more likely text
    Paper: arXiv 2407.09722, first version (July 2024)

    Of beams with equally long accepted prefixes the first is kept. Thresholds are not comparable with those of the published
    program, whose draft probabilities are not those of its paths. Turns run one by one, as in `mtad`.

    Args:
        chains: number of draft beams that the target scores.
        beams: number of beams of the draft model; None: 8.
        draft: "sample" draws the beams, "search" takes the best ones.
        depth, threshold, replacement, prefix, bonus, controller: as in `mtad`.
    """
    require_at_least_one(chains=chains)
    one_of("draft", draft, get_args(Draft))
    most = 8 if beams is None else beams
    if chains > most:
        raise BadSetting(f"chains is {chains}, beams is {most}; chains must be at most beams")
    rule = JointRule(threshold, chains, prefix=prefix, bonus=bonus)
    return _assisted("mjsd", beams, depth, _growth(draft, replacement, beams, chains), rule, controller, width=8)


@recipe
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
    """Score all draft beams in one pass of the target and accept the path to the deepest passing node: multi-candidate
    `mtad` (MMTAD).

    Law: approximate: changes the output law on purpose, for more likely text
    Paper: arXiv 2407.09722 (Qin et al.), ICLR 2025, the multi-candidate variant

    On the same draft it accepts at least as many tokens as `mtad`, but the target scores more nodes: up to beams * depth.
    Turns run one by one, as in `mtad`.

    Args:
        theta: the draft likelihood to compare a node's target likelihood with: that of the best draft beam at the same depth
            ("chain"), the largest one at this depth ("max"), or the node's own ("own").
        draft: "sample" draws the beams, "search" takes the best ones; or any growth of core/draft/.
        beams, depth, threshold, replacement, prefix, bonus, controller: as in `mtad`.
    """
    rule = JointRule(threshold, None, theta, prefix, bonus)
    return _assisted("mmtad", beams, depth, _growth(draft, replacement, beams, None), rule, controller)


def _growth(draft: "Draft | Growth", replacement: bool, beams: int | None, chains: int | None) -> Growth:
    """Return the growth of the drafts; `chains` is the number of final beams that the rule judges, None for all nodes.

    Raises `BadSetting` if a setting is wrong or would be ignored.
    """
    if isinstance(draft, type):
        raise BadSetting(f"draft is the class {draft.__name__}; pass an instance, {draft.__name__}(...)")
    if isinstance(draft, Growth):
        name = f"the growth {type(draft).__name__}"
        refuse_ignored(False, name, replacement=replacement or None)
        refuse_ignored(not isinstance(draft, (Branching, FixedTree)), name, beams=beams)
        if chains == 1 and not _is_chain(draft):
            raise BadSetting(f"mtad judges one chain, and {name} may draft several; mmtad judges whole trees")
        return draft
    one_of("draft", draft, get_args(Draft))
    if replacement and draft == "search":
        raise BadSetting("draft='search' draws nothing; replacement=True needs draft='sample'")
    return JointBeams(draft, replacement, chains)


def _is_chain(growth: Growth) -> bool:
    """Return whether `growth` is known to grow a single chain."""
    if isinstance(growth, FixedTree):
        return depth_of_tree(growth.topology) == size_of(growth.topology)
    if isinstance(growth, Branching):
        return set(growth.counts) == {1}
    return isinstance(growth, JointBeams) and growth.chains == 1


def _assisted(
    name: str, beams: int | None, depth: int | None, growth: Growth, rule: JointRule,
    controller: "ControllerName | Controller", width: int = 4,
) -> Method:  # fmt: skip
    """Return the method `name` with these drafts and this rule; `width` is the default of `beams`."""
    refuse_ignored(isinstance(controller, str), "a controller of one's own", beams=beams, depth=depth)
    beams = width if beams is None else beams
    depth = 4 if depth is None else depth
    require_at_least_one(beams=beams, depth=depth)
    fixed = FixedShape(depth, beams, beyond=0 if rule.bonus == "none" else 1)
    make_controller = controller_maker(controller, DraftKind(name, depth, beams), fixed)
    law = _law(rule)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        return Parts(TreeDrafter(draft, growth), rule, make_controller(target, draft), law)

    def check(request: RequestInfo) -> None:
        refuse_audit(request.audited)

    return Method(name, law, 1, build, needs_draft=True, plain=False, check=check)


def _law(rule: JointRule) -> str:
    """Return the description of the law: the guarantee for accepted blocks (see `records.Certificate`)."""
    if rule.threshold == 1:
        return "approximate: at threshold 1 no draft is accepted, and the target decodes alone"
    if rule.threshold == 0:
        return f"{CHANGED}at threshold 0 accepted blocks have no guarantee"
    compared = {
        "own": "log q",
        "chain": "log q of the best draft beam at their length",
        "max": "the largest log q of that length in the draft",
    }["own" if rule.chains is not None else rule.theta]
    return f"{CHANGED}accepted blocks have log p > {compared} + log {rule.threshold}"
