"""Recipes for one sequence whose drafts come from a draft model, drawn from its law or chosen by its odds."""

from collections.abc import Sequence
from typing import Any, Literal

from specbeam.control.best_tree import Topology, depth_of_tree, fastest_tree, layers_of, sequoia_tree
from specbeam.control.cost import CostCurve
from specbeam.draft.best_first import BestFirst, BestFirstDraws
from specbeam.draft.children import AnyChildren, BestAndOne, Children, Distinct, Independent
from specbeam.draft.merged import Graph, ManyDrafters, Pruned
from specbeam.draft.tree import Branching, FixedTree, StochasticBeam, TreeDrafter
from specbeam.errors import BadSetting, NotSupported, one_of
from specbeam.lm.base import LM
from specbeam.lm.early_layers import early_layers
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, control_of, grown, rule_of
from specbeam.recipes.method import Method, at_least_one
from specbeam.session import Controller, Parts, Rule, law_of


def speculative_sampling(
    depth: int = 5, rule: "RuleName | Rule" = "path", controller: "ControllerName | Controller" = "fixed"
) -> Method:
    """A chain of draft tokens, accepted one by one.

    Law: exact: plain sampling
    Paper: arXiv 2211.17192 (Leviathan et al.), arXiv 2302.01318 (Chen et al.)

    Steps of the paper: draft (alg. 1, l. 2-6) draft/tree.py; accept and correct (l. 8-16) verify/walk.py, verify/trials.py.

    Args:
        depth: draft tokens per pass of the target.
        rule: "path" tries, "traversal" is block verification, "match" samples and compares.
        controller: who chooses the length of a draft, at most `depth`: "fixed", "confidence", "tracked", "thompson",
            "calibrated", "survival", "cost" (docs/methods/controllers.md), or a part.
    """
    at_least_one(depth=depth)
    return grown(
        DraftKind("speculative_sampling", depth, layers=(1,)), Branching((1,), Independent()), rule, controller
    )


def block_verification(depth: int = 5, controller: "ControllerName | Controller" = "fixed") -> Method:
    """A chain of draft tokens, judged from its end: accepts at least as much as speculative sampling on average.

    Law: exact: plain sampling
    Paper: arXiv 2403.10444 (Sun et al.)

    Steps of the paper: verify/traversal.py, on a chain.

    Args:
        depth: draft tokens per pass of the target.
        controller: who chooses the length of a draft, as in `speculative_sampling`.
    """
    at_least_one(depth=depth)
    drafts = DraftKind("block_verification", depth, layers=(1,))
    return grown(drafts, Branching((1,), Independent()), "traversal", controller)


def specinfer(
    counts: Sequence[int] = (3, 2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """A tree of independent draws, tried in order at each node.

    Law: exact: plain sampling
    Paper: arXiv 2305.09781 (Miao et al.)

    Steps of the paper: expansion (sec. 3) draft/tree.py; tree attention (sec. 4.1) lm/; multi-step sampling (alg. 2)
    verify/walk.py.

    Args:
        counts: children per node, by layer.
        rule: "path", "traversal" or "match".
        controller: who chooses the length of a draft, as in `speculative_sampling`.
    """
    return _branching("specinfer", counts, Independent(), rule, controller)


def rsd_c(
    counts: Sequence[int] = (3, 2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """A tree of draws without replacement, with a constant number of children per layer.

    Law: exact: plain sampling
    Paper: arXiv 2402.14160 (Jeon et al.)

    Steps of the paper: draws without replacement draft/children.py; recursive rejection sampling verify/walk.py.

    Args:
        counts: children per node, by layer.
        rule: "path", "traversal" or "match".
        controller: who chooses the length of a draft, as in `speculative_sampling`.
    """
    return _branching("rsd_c", counts, Distinct(), rule, controller)


def rsd_s(
    width: int = 4,
    depth: int = 4,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Stochastic beam search drafts the `width` sequences per layer that are worth most; the others are cut early.

    Law: exact: plain sampling
    Paper: arXiv 2402.14160 (Jeon et al.)

    Steps of the paper: stochastic beams draft/tree.py; recursive rejection sampling verify/walk.py.

    Args:
        width: sequences per layer.
        depth: layers.
        rule: "path", "traversal" or "match".
        controller: who chooses the length of a draft, as in `speculative_sampling`.
    """
    at_least_one(width=width, depth=depth)
    return grown(DraftKind("rsd_s", depth, width, layers=(width,)), StochasticBeam(), rule, controller)


def sequoia(
    nodes: int = 16,
    depth: int = 6,
    acceptance: Sequence[float] = (0.7, 0.12, 0.05, 0.03, 0.02),
    rule: "RuleName | Rule" = "path",
    cost: CostCurve | None = None,
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """The fixed tree that is best for measured acceptance odds, filled by draws without replacement.

    Law: exact: plain sampling
    Paper: arXiv 2402.12374 (Chen et al.)

    Steps of the paper: dynamic programme (sec. 3.1) control/best_tree.py; sampling with fallback (alg. 2) draft/children.py.

    Args:
        nodes: of the tree, without the root.
        depth: most layers.
        acceptance: odds that the child accepted at a node is the k-th one tried; `specbeam bench acceptance` measures it.
        rule: "path", "traversal" or "match".
        cost: seconds per pass; with it the tree of least time per token is taken, of at most `nodes` nodes.
        controller: who chooses the length of a draft, as in `speculative_sampling`.
    """
    at_least_one(nodes=nodes, depth=depth)
    if not acceptance or min(acceptance) < 0 or sum(acceptance) > 1 + 1e-6:
        raise BadSetting(f"acceptance is {list(acceptance)}; it must hold odds, at least one, in sum at most 1")
    if cost is None:
        tree: Topology = sequoia_tree(acceptance, nodes + 1, depth)[0]
    else:
        tree = fastest_tree(acceptance, cost, nodes + 1, depth)[0]
    drafts = DraftKind("sequoia", depth_of_tree(tree), layers=layers_of(tree))
    return grown(drafts, FixedTree(tree, Distinct(fallback=True)), rule, controller)


def spechub(
    depth: int = 4,
    children: int = 2,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """The likeliest tokens and one draw from the rest at each node; with two children the published SpecHub.

    Law: exact: plain sampling
    Paper: arXiv 2411.05289 (Sun et al.), arXiv 2502.18779 (Hu et al.)

    Steps of the paper: candidates draft/children.py; the verifier that attains their optimum is verify/walk.py.

    Args:
        depth: layers; the first three branch, deeper ones are chains.
        children: per node.
        rule: "path", "traversal" or "match".
        controller: who chooses the length of a draft, as in `speculative_sampling`.
    """
    at_least_one(depth=depth, children=children)
    counts = (children,) * min(depth, 3) + (1,) * max(depth - 3, 0)
    return _branching("spechub", counts, BestAndOne(), rule, controller)


def traversal(
    counts: Sequence[int] = (3, 2, 1, 1),
    children: "Literal['distinct', 'independent', 'best_and_one'] | Children" = "distinct",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """A tree judged from its leaves to its root: a node is judged when everything below it has failed.

    Law: exact: plain sampling
    Paper: arXiv 2505.12398 (Weng et al.)

    Steps of the paper: verify/traversal.py.

    Args:
        counts: children per node, by layer.
        children: how they are drawn: "distinct" (without replacement), "independent", "best_and_one" (the likeliest and one
            draw from the rest), or a part.
        controller: who chooses the length of a draft, as in `speculative_sampling`.
    """
    known: dict[str, AnyChildren] = {"distinct": Distinct(), "independent": Independent(), "best_and_one": BestAndOne()}
    if isinstance(children, str):
        one_of("children", children, known)
    chosen = known[children] if isinstance(children, str) else children
    return _branching("traversal", counts, chosen, "traversal", controller)


def dyspec(
    nodes: int = 24,
    depth: int = 6,
    least: float | None = None,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """A tree of draws that widens where the draft is unsure and deepens where it is sure.

    Law: exact: plain sampling
    Paper: arXiv 2410.11744 (Xiong et al.)

    Steps of the paper: the variant with a threshold draft/best_first.py; verify/walk.py.

    Args:
        nodes: most nodes.
        depth: most layers.
        least: a draw is made while its odds of being reached and accepted are at least this, as far as the draft knows;
            by default 1 / `nodes`.
        rule: "path", "traversal" or "match".
        controller: who chooses depth and nodes, as in `opt_tree`.
    """
    at_least_one(nodes=nodes, depth=depth)
    least = 1 / nodes if least is None else least
    if not 0 < least <= 1:
        raise BadSetting(f"least is {least}; it is a probability, in (0, 1]")
    return grown(DraftKind("dyspec", depth, nodes, budget=True), BestFirstDraws(least), rule, controller)


def multi_draft(
    others: Sequence[Any] = (),
    counts: Sequence[int] = (2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Several draft models at once: the target scores the union of their trees, which draw without replacement.

    Law: exact: plain sampling
    Paper: arXiv 2305.09781 (SpecInfer, merged trees)

    Steps of the paper: merge-based construction (sec. 3) draft/merged.py; multi-step sampling (alg. 2) verify/walk.py.

    Args:
        others: draft models besides the pair's own; with none the pair's draft grows two trees.
        counts: children per node, by layer, of each tree.
        rule: "path", "traversal" or "match".
        controller: who chooses the depth of all trees before they grow: "fixed", "thompson", or a part.
    """
    _check_counts(counts)
    drafts = DraftKind(
        "multi_draft", len(counts), unstoppable="grows several trees side by side, which have no newest token in common"
    )
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    control = control_of(controller, drafts)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        if not others and not isinstance(draft, HuggingFaceLM):
            raise NotSupported("multi_draft needs other draft models: multi_draft(others=[...])")
        more = others or [draft.model]  # type: ignore[attr-defined]
        models = [draft, *(one if isinstance(one, LM) else HuggingFaceLM(one) for one in more)]
        drafters = tuple(TreeDrafter(lm, Branching(tuple(counts), Distinct())) for lm in models)
        return Parts(ManyDrafters(drafters), judge, control(target, draft), law)

    return Method("multi_draft", law, 1, build, needs_draft=True)


def _branching(
    name: str,
    counts: Sequence[int],
    children: AnyChildren,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    _check_counts(counts)
    growth = Branching(tuple(counts), children)
    return grown(DraftKind(name, len(counts), layers=growth.layers), growth, rule, controller)


def _check_counts(counts: Sequence[int]) -> None:
    if not counts or min(counts) < 1:
        raise BadSetting(f"counts is {list(counts)}; it must name at least one layer, each with at least one child")


def opt_tree(
    nodes: int = 24,
    depth: int = 6,
    top: int = 8,
    within_layer: bool = False,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """The tree of largest expected acceptance under a budget of nodes, made anew for each context.

    Law: exact: plain sampling
    Paper: arXiv 2406.17276 (OPT-Tree), arXiv 2406.16858 (EAGLE-2: within_layer=True), arXiv 2406.02532 (SpecExec)

    Steps of the papers: draft/best_first.py; verify/walk.py.

    Args:
        nodes: of the tree.
        depth: most layers.
        top: likeliest tokens looked at under each expanded node.
        within_layer: expand the best nodes of the newest layer only (EAGLE-2), not the best anywhere.
        rule: "match"; "path" and "traversal" accept as often, as nothing is drawn.
        controller: who chooses depth and nodes: "fixed", "latency" (nodes by the times of past turns), or one that stops
            between layers as in `speculative_sampling`.
    """
    at_least_one(nodes=nodes, depth=depth, top=top)
    drafts = DraftKind("opt_tree", depth, nodes, budget=True)
    return grown(drafts, BestFirst(top, within_layer=within_layer), rule, controller)


def gsd(
    depth: int = 4,
    top: int = 3,
    context: int = 0,
    nodes: int = 32,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Runs that repeat are drafted once: the draft is a graph, unrolled into a tree.

    Law: exact: plain sampling
    Paper: arXiv 2407.16207 (Gong et al.)

    Steps of the paper: draft/merged.py, without its cycles; verify/walk.py.

    Args:
        depth: draft passes.
        top: candidates per node.
        context: tokens before a candidate that must agree too for it to be a repeat; -1 never merges.
        nodes: of the unrolled tree.
        rule: "match" alone: the law of merged drafts is lost.
        controller: who chooses the length of a draft, as in `speculative_sampling`.
    """
    at_least_one(depth=depth, top=top, nodes=nodes)
    if context < -1:
        raise BadSetting(f"context is {context}; it must be at least 0, or -1 to merge nothing")
    drafts = DraftKind("gsd", depth, no_law_reason=Graph.no_law_reason)
    return grown(drafts, Graph(top, context, most_nodes=nodes + 1), rule, controller)


def propd(
    nodes: int = 24,
    depth: int = 5,
    early: int = 2,
    top: int = 16,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "latency",
) -> Method:
    """Drafts that the target's first layers find hopeless are dropped before the others are scored.

    Law: exact: plain sampling
    Paper: arXiv 2402.13485 (Zhong et al.)

    Steps of the paper: early pruning draft/merged.py; tree size by a latency model control/size.py.

    Args:
        nodes: most drafted per turn; fewer where the time of a pass grows with them.
        depth: layers.
        early: first layers of the target that look at the drafts.
        top: a draft stays if it is among this many likeliest tokens there.
        rule: "match"; "path" and "traversal" accept as often, as nothing is drawn.
        controller: who chooses the number of nodes: "latency", by the times of past passes; "fixed", always the most; or
            one that stops between layers as in `speculative_sampling`.
    """
    at_least_one(nodes=nodes, depth=depth, early=early, top=top)
    drafts = DraftKind("propd", depth, nodes, budget=True)
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    control = control_of(controller, drafts)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        if not isinstance(target, HuggingFaceLM):
            raise NotSupported("propd looks through the target's first layers; that needs a transformers model")
        drafter = Pruned(TreeDrafter(draft, BestFirst()), early_layers(target.model, early), top)
        return Parts(drafter, judge, control(target, draft), law)

    return Method("propd", law, 1, build, needs_draft=True)
