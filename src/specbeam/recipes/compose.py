"""Which drafts, rules and controllers go together. What does not is refused with the reason, before a model is asked."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from specbeam.control.confidence import SureDraft, TrackedThreshold, stops_between_layers
from specbeam.control.fixed import FixedShape
from specbeam.control.size import SizeByLatency
from specbeam.control.survival import Survival
from specbeam.control.thompson import Thompson
from specbeam.draft.tree import Growth, TreeDrafter
from specbeam.errors import BadSetting, LostLaw
from specbeam.lm.base import LM
from specbeam.recipes.depth import DrafterOf, depth_by_cost
from specbeam.recipes.method import Method
from specbeam.session import Controller, Parts, Rule, is_part, law_of
from specbeam.verify.traversal import TraversalRule
from specbeam.verify.walk import MatchRule, PathRule

RuleName = Literal["path", "traversal", "match"]
ControllerName = Literal[
    "fixed", "confidence", "tracked", "thompson", "calibrated", "survival", "cost", "latency"
]  # fmt: skip
Control = Callable[[LM | None, LM | None], Controller]  # from the target and the draft model


@dataclass(frozen=True)
class DraftKind:
    """What a recipe knows of its drafts before the first is made.

    Args:
        who: the recipe.
        depth: most layers.
        width: of the shapes that it is asked for; what it counts is the growth's affair.
        layers: nodes of each layer, the last number for all deeper ones; () where depth does not settle them.
        budget: `width` counts the nodes of a whole tree.
        no_law_reason: why nobody knows the law of a draft.
        unstoppable: why nobody can stop a draft between its layers.
    """

    who: str
    depth: int
    width: int = 1
    layers: tuple[int, ...] = ()
    budget: bool = False
    no_law_reason: str = ""
    unstoppable: str = ""


def rule_of(chosen: "RuleName | Rule", drafts: DraftKind) -> Rule:
    """Return a part, or the rule of that name. Raises `LostLaw` where drafts without a law would be tried."""
    known: dict[str, Rule] = {"path": PathRule(), "traversal": TraversalRule(), "match": MatchRule()}
    if chosen not in known if isinstance(chosen, str) else not is_part(chosen, Rule):
        raise BadSetting(f"rule is {chosen!r}; it must be one of {', '.join(known)}, or a part")
    rule = known[chosen] if isinstance(chosen, str) else chosen
    if drafts.no_law_reason and getattr(rule, "tries", False):
        name = repr(chosen) if isinstance(chosen, str) else type(chosen).__name__
        raise LostLaw(
            f"rule {name} tries drafts against the law they were drawn from, and {drafts.who} {drafts.no_law_reason}; "
            "such drafts can only be matched: rule='match'"
        )
    return rule


def control_of(
    chosen: "ControllerName | Controller",
    drafts: DraftKind,
    fixed: FixedShape | None = None,
    drafter_of: DrafterOf | None = None,
    rule: Rule | None = None,
) -> Control:
    """A part, or the controller of that name for such drafts; `fixed` is what that name stands for.

    "cost" needs to know whose layers it weighs: `drafter_of` (None: drafts cost nothing), judged by `rule`.
    """
    depth = drafts.depth
    width = drafts.width
    known: dict[str, Controller | None] = {
        "fixed": fixed or FixedShape(depth, width),
        "confidence": SureDraft(most=depth, width=width),
        "tracked": TrackedThreshold(most=depth, width=width),
        "thompson": Thompson(most=depth, width=width),
        "calibrated": Thompson(calibrated=True, mode="round", most=depth, width=width),
        "survival": Survival(most=depth, width=width),
        "cost": None,
        "latency": SizeByLatency(width, depth),
    }
    if chosen not in known if isinstance(chosen, str) else not is_part(chosen, Controller):
        raise BadSetting(f"controller is {chosen!r}; it must be one of {', '.join(known)}, or a part")
    part = known[chosen] if isinstance(chosen, str) else _as_wide(chosen, width)
    _check(chosen, part, drafts)
    if part is not None:
        return lambda target, draft: part
    return lambda target, draft: depth_by_cost(drafts.layers, depth, target, draft, drafter_of, rule)


def grown(
    drafts: DraftKind, growth: Growth, rule: "RuleName | Rule", controller: "ControllerName | Controller"
) -> Method:
    """Return the method whose drafts are grown like that by a draft model."""
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    control = control_of(controller, drafts, drafter_of=lambda lm: TreeDrafter(lm, growth), rule=judge)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        return Parts(TreeDrafter(draft, growth), judge, control(target, draft), law)

    return Method(drafts.who, law, 1, build, needs_draft=True)


def _as_wide(part: Controller, width: int) -> Controller:
    """A part that sets lengths and says nothing of the width gets the method's own."""
    if isinstance(part, (SureDraft, TrackedThreshold, Thompson, Survival)) and part.width == 1:
        return replace(part, width=width)
    return part


def _check(chosen: object, part: Controller | None, drafts: DraftKind) -> None:
    """Refuse a controller that these drafts would not listen to."""
    name = repr(chosen) if isinstance(chosen, str) else type(chosen).__name__
    if part is not None and drafts.unstoppable and stops_between_layers(part):
        raise BadSetting(
            f"controller {name} ends a draft between its layers by the odds of its tokens, and {drafts.who} "
            f"{drafts.unstoppable}; take one that plans ahead, like 'thompson'"
        )
    if isinstance(part, SizeByLatency) and not drafts.budget:
        raise BadSetting(
            f"controller {name} sets the nodes of a whole tree, and those of {drafts.who} follow from its other "
            "settings; take one that sets the depth, like 'thompson', or a method with a budget of nodes, like opt_tree"
        )
    if chosen == "cost" and not drafts.layers:
        raise BadSetting(
            f"controller 'cost' weighs the price of each layer, and the layers of {drafts.who} have no size of their "
            "own; take 'thompson', or 'latency' for a method with a budget of nodes"
        )
