"""The recipe that chooses blocks of tokens by their joint probability under the target, without a draft model."""

import math
from typing import Literal, get_args

from specbeam.core.control.fixed import FixedShape
from specbeam.core.draft.tree import TreeDrafter
from specbeam.core.errors import BadSetting, NotSupported, one_of
from specbeam.core.laws.named import CHANGED, EXACT
from specbeam.core.lm import LM
from specbeam.core.session import Parts
from specbeam.recipes.joint.beam_drafter import JointBeams
from specbeam.recipes.joint.beam_rule import JointRule, OnOwnRows, refuse_audit
from specbeam.recipes.joint.block_drafter import EveryBlock
from specbeam.recipes.joint.block_rule import BlockMode, BlockRule
from specbeam.recipes.joint.target_as_draft import TargetAsDraft
from specbeam.recipes.method import Method, RequestInfo, recipe, refuse_ignored, require_at_least_one

BeamMode = Literal["beam_search", "beam_sample"]


@recipe
def mtjd(
    mode: BlockMode | BeamMode = "argmax",
    depth: int = 2,
    beams: int | None = None,
    block_temperature: float | None = None,
    top: int | None = None,
) -> Method:
    """Choose blocks of `depth` tokens by their joint probability under the target alone: multi-token joint decoding (MTJD).

    Law: by mode: exact joint decoding for small vocabularies, approximate by beams; not the law of sampling
    Paper: arXiv 2407.09722 (Qin et al.), sec. 2

    `mtad` approximates this method. Sampling from the joint law gains nothing: "ancestral" is plain sampling. Choosing the
    most probable block lowers the perplexity, but not steadily with `depth`. Turns run one by one, as in `mtad`.

    Args:
        mode: "argmax": the most probable block. "ancestral": one draw. "joint_temperature": one draw from
            p^(1/block_temperature). "joint_topk": one draw among the `top` most probable blocks. These four modes enumerate
            all vocabulary^depth blocks. "beam_search", "beam_sample": the best of the target's own beams, finished ones
            included; for vocabularies of any size.
        depth: number of tokens of a block.
        beams: number of beams, for "beam_search" and "beam_sample" only; None: 4.
        block_temperature: for "joint_temperature" only, in (0, inf); None: 1.
        top: number of blocks, for "joint_topk" only; None: 10.
    """
    one_of("mode", mode, (*get_args(BlockMode), *get_args(BeamMode)))
    name = f"mode {mode!r}"
    refuse_ignored(mode in get_args(BeamMode), name, beams=beams)
    refuse_ignored(mode == "joint_temperature", name, block_temperature=block_temperature)
    refuse_ignored(mode == "joint_topk", name, top=top)
    beams = 4 if beams is None else beams
    top = 10 if top is None else top
    temperature = 1.0 if block_temperature is None else block_temperature
    require_at_least_one(depth=depth, beams=beams, top=top)
    if not 0 < temperature < math.inf:
        raise BadSetting(
            f"block_temperature is {temperature}; it must be finite and above 0 (mode='argmax' is the limit at 0)"
        )
    if mode == "beam_search" or mode == "beam_sample":
        return _by_beams(mode, depth, beams)
    return _by_blocks(BlockRule(mode, temperature, top), depth)


def _by_blocks(rule: BlockRule, depth: int) -> Method:
    """Return `mtjd` for a mode that enumerates all blocks of `depth` tokens."""
    blocks = f"blocks of {depth} tokens"
    law = {
        "argmax": f"exact: joint decoding, the most probable {blocks}; not the law of sampling",
        "ancestral": EXACT,
        "joint_temperature": f"exact: {blocks} drawn at block temperature {rule.temperature}; not the law of sampling",
        "joint_topk": f"exact: {blocks} drawn from the {rule.top} most probable; not the law of sampling",
    }[rule.mode]

    def check(request: RequestInfo) -> None:
        if rule.mode == "argmax":
            _check_single_answer(request)
        rule.check(request.is_sure, request.audited)
        EveryBlock(request.vocab).check(min(depth, request.longest) - 1, request.eos)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert target is not None
        return Parts(EveryBlock(target.vocab), rule, FixedShape(depth - 1, 0), law)

    return Method("mtjd", law, 1, build, plain=rule.mode == "ancestral", check=check)


def _by_beams(mode: BeamMode, depth: int, beams: int) -> Method:
    """Return `mtjd` for a mode that chooses among the target's own beams."""
    search = mode == "beam_search"
    law = f"{CHANGED}the best of {beams} {'' if search else 'sampled '}beams of blocks of {depth} tokens"

    def check(request: RequestInfo) -> None:
        if search:
            _check_single_answer(request)
        refuse_audit(request.audited)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert target is not None
        own = TargetAsDraft(target)
        growth = JointBeams("search" if search else "sample", lost_ends=True)
        rule = OnOwnRows(JointRule(0.5, chains=1, bonus="none"), own)  # draft and target agree, so every path passes
        return Parts(TreeDrafter(own, growth, counts_passes=False), rule, FixedShape(depth, beams, beyond=0), law)

    return Method("mtjd", law, 1, build, plain=False, check=check)


def _check_single_answer(request: RequestInfo) -> None:
    """Raise `NotSupported` if several return sequences are requested of a mode that draws nothing."""
    if request.answers > 1:
        raise NotSupported(
            f"this mode of mtjd draws nothing and has one answer; num_return_sequences is {request.answers}"
        )
