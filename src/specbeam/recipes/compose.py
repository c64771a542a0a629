"""Methods composed of a drafter, a rule and a controller.

Combinations that cannot work are rejected when the method is made, before any model runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from specbeam.core.control.confidence import SureDraft, TrackedThreshold
from specbeam.core.control.depth import DepthByCost
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.pace import DraftsIfFaster
from specbeam.core.control.size import SizeByLatency
from specbeam.core.control.stopping import stops_between_layers
from specbeam.core.control.survival import Survival
from specbeam.core.control.thompson import Thompson
from specbeam.core.draft.tree import Growth, TreeDrafter
from specbeam.core.errors import BadSetting, LostLaw
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Drafter, Parts, Rule, is_part, lacking, law_of
from specbeam.core.verify.traversal import TraversalRule
from specbeam.core.verify.walk import MatchRule, PathRule
from specbeam.recipes.depth import (
    ANY_MODEL,
    DrafterOf,
    cost_of_layer,
    depth_by_cost,
    depth_by_sizes,
    has_curve,
    is_dear,
    paces_of,
    text_depends_on_depth,
)
from specbeam.recipes.method import Method

RuleName = Literal["path", "traversal", "match"]
ControllerName = Literal[
    "auto", "fixed", "confidence", "tracked", "thompson", "calibrated", "survival", "cost", "latency", "beta_ts",
    "calibration_ts",
]  # fmt: skip
MANY_NODES = 8  # more rows than these cost very different times on different machines
MakeController = Callable[[LM | None, LM | None], Controller]  # takes the target and the draft model
MakeDrafter = Callable[[LM | None, LM | None], Drafter]  # takes the target and the draft model


@dataclass(frozen=True)
class DraftKind:
    """The properties of a recipe's drafts that are known before the first draft.

    Args:
        recipe: name of the recipe, for messages.
        depth: maximum number of layers.
        width: width of the shapes that the controller plans: nodes per layer, or nodes of the whole tree.
        layers: number of nodes of each layer, as far as the settings determine it; the last number also holds for all
            deeper layers. Empty if they do not.
        models: number of draft models.
        has_node_budget: whether `width` counts the nodes of the whole tree.
        no_law_reason: why the law of these drafts is unknown, as the end of a sentence "RECIPE ..."; empty if it is known.
        no_stop_reason: why a draft cannot end between its layers, as the end of a sentence "RECIPE ..."; empty if it can.
    """

    recipe: str
    depth: int
    width: int = 1
    layers: tuple[int, ...] = ()
    models: int = 1
    has_node_budget: bool = False
    no_law_reason: str = ""
    no_stop_reason: str = ""

    @property
    def nodes(self) -> int:
        """The number of nodes of a draft of full depth, as far as the settings determine it."""
        last = len(self.layers) - 1
        return sum(self.layers[min(layer, last)] for layer in range(self.depth)) if self.layers else 0


def layers_within(nodes: int, top: int, depth: int) -> tuple[int, ...]:
    """Return the maximum number of nodes of each layer of a tree of `nodes` nodes with up to `top` below each of them.

    >>> layers_within(24, 4, 5)
    (4, 16, 4, 0, 0)
    """
    layers: list[int] = []
    for layer in range(1, depth + 1):
        layers.append(min(top**layer, nodes - sum(layers)))
    return tuple(layers)


def rule_of(choice: "RuleName | Rule", drafts: DraftKind) -> Rule:
    """Return `choice` if it is a part, or the rule of that name.

    Raises `BadSetting` if `choice` is neither, and `LostLaw` if the rule needs the law of the drafts and it is unknown.
    """
    rules: dict[str, Rule] = {"path": PathRule(), "traversal": TraversalRule(), "match": MatchRule()}
    if choice not in rules if isinstance(choice, str) else not is_part(choice, Rule):
        raise BadSetting(f"rule is {lacking(choice, Rule)}; it must be one of {', '.join(rules)}, or a part")
    rule = rules[choice] if isinstance(choice, str) else choice
    if drafts.no_law_reason and getattr(rule, "tries", False):
        name = repr(choice) if isinstance(choice, str) else type(choice).__name__
        raise LostLaw(
            f"rule {name} tests drafts against the law that they were drawn from, and {drafts.recipe} "
            f"{drafts.no_law_reason}; "
            "such drafts can only be matched: rule='match'"
        )
    return rule


def controller_maker(
    choice: "ControllerName | Controller",
    drafts: DraftKind,
    fixed: FixedShape | None = None,
    drafter_of: DrafterOf | None = None,
    rule: Rule | None = None,
) -> MakeController:
    """Return a function that makes the controller of these drafts from the target and the draft model.

    The controller "auto" plans the depth by past acceptance and by the sizes of passes. If texts do not depend on drafts, it
    takes measured costs for an expensive draft model (`is_dear`), for more than `MANY_NODES` nodes, and without a draft
    model; and with one it stops drafting where decoding without drafts is measured to be faster. Drafts whose layers have
    no sizes keep the fixed shape.

    Raises `BadSetting` if `choice` is neither a name nor a part, or if these drafts cannot follow the controller.

    Args:
        choice: a controller (a part), or the name of one.
        drafts: the drafts that it controls.
        fixed: the controller for the name "fixed"; None: `drafts.depth` layers of `drafts.width` nodes.
        drafter_of: makes the drafter whose layers "cost" measures; None: drafts cost nothing.
        rule: the rule that judges the drafts.
    """
    depth = drafts.depth
    width = drafts.width
    in_one_shape = fixed or FixedShape(depth, width)
    controllers: dict[str, Controller | None] = {
        "auto": in_one_shape,
        "fixed": in_one_shape,
        "confidence": SureDraft(most=depth, width=width),
        "tracked": TrackedThreshold(most=depth, width=width),
        "thompson": Thompson(most=depth, width=width),
        "calibrated": Thompson(calibrated=True, mode="round", most=depth, width=width),
        "survival": Survival(most=depth, width=width),
        "cost": None,
        "latency": SizeByLatency(width, depth),
        "beta_ts": Thompson(mode="step", most=depth, width=width),
        "calibration_ts": Thompson(mode="step", calibrated=True, persistent=False, most=depth, width=width),
    }
    if choice not in controllers if isinstance(choice, str) else not is_part(choice, Controller):
        wrong = lacking(choice, Controller)
        raise BadSetting(f"controller is {wrong}; it must be one of {', '.join(controllers)}, or a part")
    part = controllers[choice] if isinstance(choice, str) else _with_width(choice, width)
    _check_controller(choice, part, drafts)
    budget = width if drafts.has_node_budget else None
    by_cost = partial(depth_by_cost, drafts.layers, depth, drafter=drafter_of, rule=rule, width=budget)
    alone = text_depends_on_depth(rule)
    by_sizes = partial(depth_by_sizes, drafts.layers, depth, alone=alone, width=budget, models=drafts.models)
    if part is None:
        return by_cost
    if choice == "auto":
        drafting = f"{drafts.recipe} of {depth} layers, {width} wide, by {drafter_of and drafter_of(ANY_MODEL)!r}"

        def make(target: LM | None, draft: LM | None) -> Controller:
            planned: FixedShape | DepthByCost = in_one_shape
            if drafts.layers:
                may_be_timed = not alone and has_curve(target)
                varies = drafts.nodes > MANY_NODES or draft is None or is_dear(draft, target)
                planned = by_cost(target, draft) if may_be_timed and varies else by_sizes(target, draft)
            if draft is None:
                return planned
            return DraftsIfFaster(planned, drafting, paces_of(target, draft))

        return make
    if isinstance(choice, str) and isinstance(part, (Thompson, Survival)):
        return lambda target, draft: _with_measured_cost(part, drafts, target, draft)
    return lambda target, draft: part


def _with_measured_cost(
    part: Thompson | Survival, drafts: DraftKind, target: LM | None, draft: LM | None
) -> Thompson | Survival:
    """Return the part with the measured cost of a draft layer, or unchanged if these models are not measured.

    `draft` is None for drafts without a draft model.
    """
    has_sizes = drafts.layers and not drafts.has_node_budget
    rows = max(drafts.layers) if has_sizes else max(drafts.width // drafts.depth, 1)
    cost = cost_of_layer(target, draft, rows, drafts.depth)
    return part if cost is None else replace(part, cost=cost)


def sequence_method(
    drafts: DraftKind,
    make_drafter: MakeDrafter,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
    drafter_of: DrafterOf | None = None,
    needs_draft: bool = True,
) -> Method:
    """Return a method for one sequence.

    Args:
        drafts: properties of the drafts.
        make_drafter: makes the drafter from the target and the draft model.
        rule, controller: a part or its name.
        drafter_of: see `controller_maker`.
        needs_draft: whether a draft model makes the drafts.
    """
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    make_controller = controller_maker(controller, drafts, drafter_of=drafter_of, rule=judge)

    def build(target: LM | None, draft: LM | None) -> Parts:
        drafter = make_drafter(target, draft)
        return Parts(drafter, judge, make_controller(target, draft if needs_draft else None), law)

    return Method(drafts.recipe, law, 1, build, needs_draft=needs_draft)


def tree_method(
    drafts: DraftKind, growth: Growth, rule: "RuleName | Rule", controller: "ControllerName | Controller"
) -> Method:
    """Return a method for one sequence whose drafts are trees that a draft model grows by `growth`."""

    def make_drafter(target: LM | None, draft: LM | None) -> TreeDrafter:
        assert draft is not None
        return TreeDrafter(draft, growth)

    return sequence_method(drafts, make_drafter, rule, controller, lambda lm: TreeDrafter(lm, growth))


def _with_width(part: Controller, width: int) -> Controller:
    """Return `part` with the method's width if it only chooses lengths and its width is the default 1."""
    if isinstance(part, (SureDraft, TrackedThreshold, Thompson, Survival)) and part.width == 1:
        return replace(part, width=width)
    return part


def _check_controller(choice: object, part: Controller | None, drafts: DraftKind) -> None:
    """Raise `BadSetting` if these drafts cannot follow the controller; `part` is None for "cost"."""
    name = repr(choice) if isinstance(choice, str) else type(choice).__name__
    if part is not None and drafts.no_stop_reason and stops_between_layers(part):
        raise BadSetting(
            f"controller {name} ends a draft between its layers by the probabilities of its tokens, and {drafts.recipe} "
            f"{drafts.no_stop_reason}; choose one that plans ahead, such as 'thompson'"
        )
    if isinstance(part, SizeByLatency) and not drafts.has_node_budget:
        raise BadSetting(
            f"controller {name} chooses the size of the whole tree, which for {drafts.recipe} follows from its other "
            "settings; choose one that plans the depth, such as 'thompson', or a method with a node budget, such as opt_tree"
        )
    if choice == "cost" and not drafts.layers:
        raise BadSetting(
            f"controller 'cost' needs the sizes of layers, and the layers of {drafts.recipe} have no fixed sizes; choose "
            "'thompson', or 'latency' for a method with a node budget"
        )
