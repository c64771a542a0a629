"""Recipes for one sequence whose drafts are chosen by a draft model's odds, and not drawn."""

from specbeam.draft.best_first import BestFirst
from specbeam.draft.merged import Graph, Pruned
from specbeam.draft.tree import TreeDrafter
from specbeam.errors import BadSetting, NotSupported
from specbeam.lm.base import LM
from specbeam.lm.early_layers import early_layers
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.recipes.combination import ControllerName, DraftKind, RuleName, control_of, grown, rule_of
from specbeam.recipes.method import Method, at_least_one
from specbeam.session import Controller, Parts, Rule, law_of


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
    drafts = DraftKind("gsd", depth, law_lost=Graph.law_lost)
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
