"""Recipes that decode several tokens by their joint likelihood. They change the law of the output, and say so."""

from typing import Literal

from specbeam.control.fixed import FixedShape
from specbeam.draft.joint import EveryBlock, JointBeams
from specbeam.draft.tree import Growth, TreeDrafter
from specbeam.errors import BadSetting
from specbeam.lm.base import LM
from specbeam.lm.own import TargetAsDraft
from specbeam.recipes.method import Method, at_least_one
from specbeam.session import Controller, Parts
from specbeam.verify.blocks import BlockRule
from specbeam.verify.joint import Bonus, JointRule, OnOwnRows
from specbeam.verify.paths import Prefix, Theta

Draft = Literal["sample", "search"]
JointMode = Literal["argmax", "ancestral", "joint_temperature", "joint_topk", "beam_search", "beam_sample"]
CHANGED = "approximate: changes the output law on purpose; "


def mtjd(
    mode: JointMode = "argmax", depth: int = 2, beams: int = 4, block_temperature: float = 1.0, top: int = 10
) -> Method:
    """Multi-token joint decoding: blocks of `depth` tokens, each chosen by its joint probability under the target alone.

    Law: by mode: exact joint decoding for small vocabularies, approximate by beams; not the law of sampling
    Paper: arXiv 2407.09722 (Qin et al.), sec. 2

    What `mtad` approximates. Nothing is gained by merely sampling from the joint law: "ancestral" is plain sampling. Lower
    perplexity comes from seeking the mode; it is not monotone in `depth`.

    Args:
        mode: "argmax": the most probable block. "ancestral": one draw. "joint_temperature": one draw from
            p^(1/block_temperature). "joint_topk": one draw among the `top` most probable blocks. These look at all
            vocabulary^depth blocks. "beam_search", "beam_sample": the best of the target's own beams, ended ones included,
            for any vocabulary.
        depth: tokens of a block.
        beams: of the beam modes.
        block_temperature: of "joint_temperature", in (0, inf).
        top: of "joint_topk".
    """
    at_least_one(depth=depth, beams=beams, top=top)
    if block_temperature <= 0:
        raise BadSetting(f"block_temperature is {block_temperature}; it must be above 0 (mode='argmax' is its limit)")
    blocks = f"blocks of {depth} tokens"
    known = {
        "argmax": f"exact: joint decoding, the most probable {blocks}; not the law of sampling",
        "ancestral": "exact: plain sampling",
        "joint_temperature": f"exact: {blocks} drawn at block temperature {block_temperature}; not the law of sampling",
        "joint_topk": f"exact: {blocks} drawn from the {top} most probable; not the law of sampling",
        "beam_search": f"{CHANGED}the best of {beams} beams of {blocks}",
        "beam_sample": f"{CHANGED}the best of {beams} sampled beams of {blocks}",
    }
    if mode not in known:
        raise BadSetting(f"mode is {mode!r}; it must be one of {', '.join(known)}")
    law = known[mode]

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert target is not None
        if mode == "beam_search" or mode == "beam_sample":
            own = TargetAsDraft(target)
            growth = JointBeams("search" if mode == "beam_search" else "sample", lost_ends=True)
            rule = OnOwnRows(JointRule(0.5, chains=1, bonus="none"), own)  # every path passes against itself
            return Parts(TreeDrafter(own, growth, books=False), rule, FixedShape(depth, beams, beyond=0), law)
        block_rule = BlockRule(mode, block_temperature if mode == "joint_temperature" else 1.0, top)
        return Parts(EveryBlock(target.vocab), block_rule, FixedShape(depth - 1, 0), law)

    return Method("mtjd", law, 1, build)


def mtad(
    beams: int = 4,
    depth: int = 4,
    threshold: float = 0.5,
    draft: "Draft | Growth" = "sample",
    replacement: bool = False,
    prefix: Prefix = "longest",
    bonus: Bonus = "sample",
    controller: "Controller | None" = None,
) -> Method:
    """Multi-token assisted decoding: the best of the draft's beams, cut to the longest prefix whose joint likelihood ratio
    passes the threshold, then one token of the target's own.

    Law: approximate: changes the output law on purpose, for more likely text
    Paper: arXiv 2407.09722 (Qin et al.), ICLR 2025

    What is promised instead, for every accepted block, is in `report.certificate`: its log-likelihood under the target is
    above its draft log-likelihood + log(threshold), and at most `gap` nats below that of the best block of its length.
    At temperature 0 the draft searches and the bonus is the best token: no chance at all.

    Steps of the paper: draft beams draft/joint.py; verification verify/joint.py.

    Args:
        beams: of the draft model.
        depth: draft tokens per pass of the target.
        threshold: least joint likelihood ratio, in [0, 1]. Lower accepts more; at 1 it is plain decoding.
        draft: "sample" draws the beams, "search" takes the best; or a growth of `draft/` that grows one chain.
        replacement: draw beams independently (the authors' commands do); duplicates are one beam.
        prefix: "longest": shorter prefixes may fail. "first_failure": they may not.
        bonus: "sample", "argmax", or "none": no bonus after an accepted draft.
        controller: who chooses depth and beams of a draft; None: always these.
    """
    growth = _growth(draft, replacement, chains=1)
    rule = JointRule(threshold, 1, prefix=prefix, bonus=bonus)
    return _assisted("mtad", beams, depth, growth, rule, controller)


def mjsd(
    chains: int = 2,
    beams: int = 8,
    depth: int = 4,
    threshold: float = 0.5,
    draft: Draft = "sample",
    replacement: bool = False,
    prefix: Prefix = "longest",
    bonus: Bonus = "sample",
    controller: "Controller | None" = None,
) -> Method:
    """Multi-token joint speculative decoding, the first form of `mtad`: several of the draft's beams are scored, and the
    first of those with the longest accepted prefix is kept.

    Law: approximate: changes the output law on purpose, for more likely text
    Paper: arXiv 2407.09722, first version (July 2024)

    Its thresholds cannot be compared with those of the published program, whose draft odds were not those of its paths.

    Args:
        chains: draft beams that the target scores.
        beams, depth, threshold, draft, replacement, prefix, bonus, controller: as in `mtad`.
    """
    at_least_one(chains=chains)
    if chains > beams:
        raise BadSetting(f"chains is {chains}, beams is {beams}; there are no more chains than beams")
    rule = JointRule(threshold, chains, prefix=prefix, bonus=bonus)
    return _assisted("mjsd", beams, depth, _growth(draft, replacement, chains), rule, controller)


def mmtad(
    beams: int = 4,
    depth: int = 4,
    threshold: float = 0.5,
    draft: "Draft | Growth" = "sample",
    replacement: bool = False,
    theta: Theta = "chain",
    prefix: Prefix = "longest",
    bonus: Bonus = "sample",
    controller: "Controller | None" = None,
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
    if theta not in ("chain", "max", "own"):
        raise BadSetting(f"theta is {theta!r}; it must be 'chain', 'max' or 'own'")
    rule = JointRule(threshold, None, theta, prefix, bonus)
    return _assisted("mmtad", beams, depth, _growth(draft, replacement, None), rule, controller)


def _growth(draft: "Draft | Growth", replacement: bool, chains: int | None) -> Growth:
    if not isinstance(draft, str):
        return draft
    if draft not in ("sample", "search"):
        raise BadSetting(f"draft is {draft!r}; it must be 'sample' or 'search', or a growth")
    if replacement and draft == "search":
        raise BadSetting("search takes the best beams and draws nothing; replacement=True needs draft='sample'")
    return JointBeams(draft, replacement, chains)


def _assisted(
    name: str, beams: int, depth: int, growth: Growth, rule: JointRule, controller: "Controller | None"
) -> Method:
    at_least_one(beams=beams, depth=depth)
    if not 0 <= rule.threshold <= 1:
        raise BadSetting(f"threshold is {rule.threshold}; it is a likelihood ratio, in [0, 1] (1: the target alone)")
    for field, value, known in (("prefix", rule.prefix, _PREFIXES), ("bonus", rule.bonus, _BONUSES)):
        if value not in known:
            raise BadSetting(f"{field} is {value!r}; it must be one of {', '.join(known)}")
    shape = FixedShape(depth, beams, beyond=0 if rule.bonus == "none" else 1)
    law = f"{CHANGED}accepted blocks have log p > log q + log {rule.threshold}"

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        return Parts(TreeDrafter(draft, growth), rule, controller or shape, law)

    return Method(name, law, 1, build, needs_draft=True)


_PREFIXES = ("longest", "first_failure")
_BONUSES = ("sample", "argmax", "none")
