"""How deep a draft is: a number, or what pays for itself."""

from collections.abc import Callable
from typing import Literal

from specbeam.control.cost import CostCurve, HostCost
from specbeam.control.fixed import FixedShape
from specbeam.control.width import FixedWidth, ValuedWidth
from specbeam.control.worth import DepthByCost, ShapeByValue
from specbeam.core.cycles import READABLE
from specbeam.draft.tree import TreeDrafter
from specbeam.errors import BadSetting
from specbeam.lm.base import LM
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.session import Controller, Drafter, Parts, Rule
from specbeam.tuning.costs import curve_of, host_cost
from specbeam.tuning.idle_model import IdleLM
from specbeam.verify.beams import BeamRule
from specbeam.verify.walk import MatchRule

Depth = int | Literal["auto"]
DrafterOf = Callable[[LM], Drafter]
UNMEASURED = {"target": 1.0, "draft": 0.1}  # seconds of a pass of any size, for models whose cost means nothing
NOBODY = IdleLM(1, 0)  # in place of a model, where it is all the same which
FREE = CostCurve((1,), (0.0,))  # drafts that no model makes


def check_depth(depth: Depth) -> None:
    """Raises `BadSetting` unless it is "auto" or at least 1."""
    if depth != "auto" and (not isinstance(depth, int) or depth < 1):
        raise BadSetting(f"depth is {depth!r}; it must be at least 1, or 'auto'")


def depth_control(
    depth: Depth, beams: int, width: int, target: LM | None, draft: LM | None, drafter: DrafterOf, rule: Rule
) -> Controller:
    """The controller of a draft of `width` nodes per layer by `drafter`, judged by `rule`."""
    if depth != "auto":
        return FixedShape(depth, width)
    if draft is None:
        return FixedShape(4, width)
    host = _host(target, draft, width, drafter, rule)
    text_depends = isinstance(rule, BeamRule) and (rule.tries or not isinstance(rule.width, FixedWidth))
    curves = _curve(target, "target"), _curve(draft, "draft")
    return DepthByCost(*curves, beams, (width,), host=host, alone=text_depends)


def shape_by_value(
    width: ValuedWidth,
    sizes: tuple[int, ...],
    target: LM | None,
    draft: LM | None,
    drafter: DrafterOf,
    rule: Rule,
) -> Controller:
    """The controller of depth and drafts per layer where `rule` chooses widths by value."""
    if draft is None:
        return FixedShape(4, sizes[-1])
    host = _host(target, draft, sizes[-1], drafter, rule)
    return ShapeByValue(_curve(target, "target"), _curve(draft, "draft"), width, sizes, host)


def depth_by_cost(
    layers: tuple[int, ...],
    most: int,
    target: LM | None,
    draft: LM | None,
    drafter: DrafterOf | None,
    rule: Rule | None,
) -> Controller:
    """The same for one sequence whose draft has so many nodes in each layer; without `drafter` drafts cost nothing, and are
    matched.
    """
    if drafter is None or rule is None or draft is None:
        return DepthByCost(_curve(target, "target"), FREE, 1, layers, most)
    host = _host(target, draft, layers[0], drafter, rule)
    curves = (_curve(target, "target"), _curve(draft, "draft"))
    alone = not isinstance(rule, MatchRule)
    return DepthByCost(*curves, 1, layers, most, host, alone=alone)


def _host(target: LM | None, draft: LM, width: int, drafter: DrafterOf, rule: Rule) -> HostCost:
    def parts(lm: LM, depth: int) -> Parts:
        return Parts(drafter(lm), rule, FixedShape(depth, width), "")

    if not isinstance(target, HuggingFaceLM):
        return HostCost()
    in_loops = (
        READABLE
        and isinstance(draft, HuggingFaceLM)
        and target.loops
        and draft.loops
        and _are_steps(drafter(draft), rule)
    )
    key = [repr(rule), repr(drafter(NOBODY)), width, in_loops]
    return host_cost(target.vocab, parts, key, (target, draft) if in_loops else None)


def _are_steps(drafter: Drafter, rule: Rule) -> bool:
    """Return whether such turns may be runs."""
    if isinstance(drafter, TreeDrafter):
        return hasattr(rule, "spec") and hasattr(drafter.growth, "spec")
    return hasattr(rule, "spec") and hasattr(drafter, "spec")


def _curve(lm: LM | None, role: str) -> CostCurve:
    return curve_of(lm) if isinstance(lm, HuggingFaceLM) else CostCurve((1,), (UNMEASURED[role],))
