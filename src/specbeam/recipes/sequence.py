"""Recipes for one sequence with a draft model. Draft tokens are drawn, or are the most probable ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

from specbeam.core.answers import LOGITS
from specbeam.core.control.best_tree import Topology, depth_of_tree, fastest_tree, layers_of, sequoia_tree
from specbeam.core.control.cost import CostCurve
from specbeam.core.draft.best_first import BestFirst, BestFirstDraws
from specbeam.core.draft.children import AnyChildren, BestAndOne, Children, Distinct, Independent
from specbeam.core.draft.merged import Graph, ManyDrafters, Pruned
from specbeam.core.draft.stochastic import StochasticBeam
from specbeam.core.draft.tree import Branching, FixedTree, TreeDrafter
from specbeam.core.errors import BadSetting, NotSupported, one_of
from specbeam.core.lm import LM, check_same_vocabulary
from specbeam.core.session import Controller, Rule
from specbeam.models.early_layers import early_layers
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.live_layers import first_layers
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, layers_within, sequence_method, tree_method
from specbeam.recipes.method import Method, recipe, require_at_least_one, require_counts
from specbeam.recipes.tuning.acceptance import GUESS, saved_acceptance
from specbeam.recipes.tuning.costs import curve_of


@recipe
def speculative_sampling(
    depth: int = 5, rule: "RuleName | Rule" = "path", controller: "ControllerName | Controller" = "auto"
) -> Method:
    """Draft a chain of tokens and judge them one by one: speculative sampling.

    Law: exact: plain sampling
    Paper: arXiv 2211.17192 (Leviathan et al.), arXiv 2302.01318 (Chen et al.)

    Code: the draft (alg. 1, l. 2-6) core/draft/tree.py; acceptance and correction (l. 8-16) core/verify/walk.py and
    core/verify/trials.py.

    Args:
        depth: number of draft tokens per pass of the target; the maximum if a controller chooses.
        rule: how drafts are judged: "path" (each token by its probabilities under target and draft, from the first to the
            last), "traversal" (from the last token to the first: block verification), "match" (samples from the target, and
            accepts draft tokens that equal the sample), or a part.
        controller: the controller that chooses the length of a draft, up to `depth`: "auto" (as many layers as
            pay by acceptance and sizes), "fixed", "confidence", "tracked", "thompson", "calibrated", "survival", "cost"
            (docs/methods/controllers.md), or a part.
    """
    require_at_least_one(depth=depth)
    drafts = DraftKind("speculative_sampling", depth, layers=(1,))
    return tree_method(drafts, Branching((1,), Independent()), rule, controller)


@recipe
def block_verification(depth: int = 5, controller: "ControllerName | Controller" = "auto") -> Method:
    """Draft a chain of tokens and judge it from its last token to the first: block verification.

    It accepts on average at least as many tokens as `speculative_sampling`.

    Law: exact: plain sampling
    Paper: arXiv 2403.10444 (Sun et al.)

    Code: core/verify/traversal.py, on a chain.

    Args:
        depth, controller: as in `speculative_sampling`.
    """
    require_at_least_one(depth=depth)
    drafts = DraftKind("block_verification", depth, layers=(1,))
    return tree_method(drafts, Branching((1,), Independent()), "traversal", controller)


@recipe
def specinfer(
    counts: Sequence[int] = (3, 2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of independent draws and try the children of each node in order.

    Law: exact: plain sampling
    Paper: arXiv 2305.09781 (Miao et al.)

    Code: expansion (sec. 3) core/draft/tree.py; tree attention (sec. 4.1) engines/kv/masks.py; multi-step sampling (alg. 2)
    core/verify/walk.py.

    Args:
        counts: number of children of each node, by layer.
        rule, controller: as in `speculative_sampling`.
    """
    return _branching_method("specinfer", counts, Independent(), rule, controller)


@recipe
def rsd_c(
    counts: Sequence[int] = (3, 2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of draws without replacement, with a constant number of children per node in each layer.

    Law: exact: plain sampling
    Paper: arXiv 2402.14160 (Jeon et al.)

    Code: draws without replacement core/draft/children.py; recursive rejection sampling core/verify/walk.py.

    Args:
        counts: number of children of each node, by layer.
        rule, controller: as in `speculative_sampling`.
    """
    return _branching_method("rsd_c", counts, Distinct(), rule, controller)


@recipe
def rsd_s(
    width: int = 4,
    depth: int = 4,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree by stochastic beam search, which draws `width` sequences per layer without replacement.

    Law: exact: plain sampling
    Paper: arXiv 2402.14160 (Jeon et al.)

    Code: stochastic beams core/draft/stochastic.py; recursive rejection sampling core/verify/walk.py.

    Args:
        width: number of sequences per layer.
        depth: number of layers; the maximum if a controller chooses.
        rule, controller: as in `speculative_sampling`.
    """
    require_at_least_one(width=width, depth=depth)
    drafts = DraftKind("rsd_s", depth, width, layers=(width,))
    return tree_method(drafts, StochasticBeam(), rule, controller)


@recipe
def sequoia(
    nodes: int = 16,
    depth: int = 6,
    acceptance: Sequence[float] | None = None,
    rule: "RuleName | Rule" = "path",
    cost: 'CostCurve | Literal["auto"] | None' = "auto",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft the fixed tree that is best for measured acceptance rates, with tokens drawn without replacement.

    Law: exact: plain sampling
    Paper: arXiv 2402.12374 (Chen et al.)

    Code: dynamic programme (sec. 3.1) core/control/best_tree.py; sampling with fallback (alg. 2) core/draft/children.py.

    Args:
        nodes: maximum number of nodes of the tree, without the root.
        depth: maximum number of layers.
        acceptance: for k = 1, 2, ...: the probability that the accepted child of a node is the k-th one tried. None:
            measured by `specbeam tune` for this pair; if it has not run, 0.7, 0.12, 0.05, 0.03, 0.02.
        cost: seconds of a pass by number of nodes, to choose the tree of up to `nodes` nodes with the least time per token.
            "auto": as measured on this machine (`specbeam tune`), so a seed may give different texts on different machines.
            None: the tree of `nodes` nodes with the most expected tokens per pass.
        rule, controller: as in `speculative_sampling`.
    """
    require_at_least_one(nodes=nodes, depth=depth)
    if acceptance is not None and (not acceptance or min(acceptance) < 0 or sum(acceptance) > 1 + 1e-6):
        raise BadSetting(
            f"acceptance is {list(acceptance)}; it must hold at least one probability, with a sum of at most 1"
        )
    if cost not in ("auto", None) and not isinstance(cost, CostCurve):
        raise BadSetting(f"cost is {cost!r}; it must be a CostCurve, 'auto' or None")

    def method_of(target: LM | None, draft: LM | None) -> Method:
        odds = tuple(acceptance or saved_acceptance(target, draft) or GUESS)
        curve = _measured_cost(target, draft, max(nodes // depth, 1)) if cost == "auto" else cost
        assert not isinstance(curve, str)
        if curve is not None:
            curve = replace(curve, nodes=tuple(curve.nodes), seconds=tuple(curve.seconds))
        tree = _sequoia_tree_for(odds, curve, nodes, depth)
        drafts = DraftKind("sequoia", depth_of_tree(tree), layers=layers_of(tree))
        return tree_method(drafts, FixedTree(tree, Distinct(fallback=True)), rule, controller)

    unmeasured = method_of(None, None)
    return replace(unmeasured, build=lambda target, draft: method_of(target, draft).build(target, draft))


@lru_cache(maxsize=64)
def _sequoia_tree_for(odds: tuple[float, ...], cost: CostCurve | None, nodes: int, depth: int) -> Topology:
    """Return the best tree of at least one node below the root."""
    if cost is None:
        return sequoia_tree(odds, nodes + 1, depth)[0]
    return fastest_tree(odds, cost, nodes + 1, depth, range(1, nodes + 2))[0] or ((),)


def _measured_cost(target: LM | None, draft: LM | None, rows: int) -> CostCurve | None:
    """Return the target's measured cost curve, with the cost of draft layers of `rows` nodes; None if it is not measured."""
    if not isinstance(target, HuggingFaceLM) or not isinstance(draft, HuggingFaceLM):
        return None
    return replace(curve_of(target), draft_layer_s=curve_of(draft).pass_s(rows))


@recipe
def spechub(
    depth: int = 4,
    children: int = 2,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree whose nodes have their likeliest tokens and one draw from the rest as children. With two children per
    node this is the published SpecHub.

    Law: exact: plain sampling
    Paper: arXiv 2411.05289 (Sun et al.), arXiv 2502.18779 (Hu et al.)

    Code: candidates core/draft/children.py; the rule core/verify/walk.py, which is optimal for these candidates.

    Args:
        depth: number of layers; the first three branch, deeper ones are chains.
        children: number of children of each node in branching layers.
        rule, controller: as in `speculative_sampling`.
    """
    require_at_least_one(depth=depth, children=children)
    counts = (children,) * min(depth, 3) + (1,) * max(depth - 3, 0)
    return _branching_method("spechub", counts, BestAndOne(), rule, controller)


@recipe
def traversal(
    counts: Sequence[int] = (3, 2, 1, 1),
    children: "Literal['distinct', 'independent', 'best_and_one'] | Children" = "distinct",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree and judge it from its leaves to its root: a node is judged after all nodes below it were rejected.

    Law: exact: plain sampling
    Paper: arXiv 2505.12398 (Weng et al.)

    Code: core/verify/traversal.py.

    Args:
        counts: number of children of each node, by layer.
        children: how the children of a node are drawn: "distinct" (without replacement), "independent", "best_and_one" (the
            likeliest tokens and one draw from the rest), or a part.
        controller: as in `speculative_sampling`.
    """
    ways: dict[str, AnyChildren] = {"distinct": Distinct(), "independent": Independent(), "best_and_one": BestAndOne()}
    if isinstance(children, str):
        one_of("children", children, ways)
    way = ways[children] if isinstance(children, str) else children
    return _branching_method("traversal", counts, way, "traversal", controller)


@recipe
def dyspec(
    nodes: int = 16,
    depth: int = 6,
    least: float | None = None,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of draws that is wide where the draft model is uncertain and deep where it is certain.

    Law: exact: plain sampling
    Paper: arXiv 2410.11744 (Xiong et al.)

    Code: the variant with a threshold core/draft/best_first.py; the rule core/verify/walk.py.

    Args:
        nodes: maximum number of nodes.
        depth: maximum number of layers.
        least: minimum probability, as estimated by the draft model, that the next draw is reached and accepted; below it
            the draft ends. None: 1 / `nodes`.
        rule: as in `speculative_sampling`.
        controller: as in `opt_tree`.
    """
    require_at_least_one(nodes=nodes, depth=depth)
    least = 1 / nodes if least is None else least
    if not 0 < least <= 1:
        raise BadSetting(f"least is {least}; it is a probability, in (0, 1]")
    drafts = DraftKind("dyspec", depth, nodes, layers_within(nodes, nodes, depth), has_node_budget=True)
    return tree_method(drafts, BestFirstDraws(least), rule, controller)


@recipe
def multi_draft(
    others: Sequence[Any] = (),
    counts: Sequence[int] = (2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree with each of several draft models, without replacement; the target scores the union of the trees.

    Law: exact: plain sampling
    Paper: arXiv 2305.09781 (SpecInfer, merged trees)

    Turns run one by one in Python, because a compiled run has one draft model.

    Code: merge-based construction (sec. 3) core/draft/merged.py; multi-step sampling (alg. 2) core/verify/walk.py.

    Args:
        others: draft models in addition to the pair's own: model objects, folders or hub ids, which are loaded and checked
            like the pair's draft, or language models of specbeam. Empty: the pair's draft model drafts two trees.
        counts: number of children of each node of a tree, by layer.
        rule: as in `speculative_sampling`.
        controller: the controller that chooses the depth of all trees in advance: "auto" (as many layers as pay by
            acceptance and sizes), "fixed", "thompson", "cost" (docs/methods/controllers.md), or a part.
    """
    require_counts(counts)
    if not isinstance(others, (list, tuple)):
        raise BadSetting(f"others is {others!r}; it must be a list of draft models")
    number = 1 + max(len(others), 1)
    growth = Branching(tuple(counts), Distinct())
    drafts = DraftKind(
        "multi_draft",
        len(counts),
        layers=tuple(number * nodes for nodes in growth.layers),
        models=number,
        no_stop_reason="drafts several trees at once, which share no newest token",
    )
    loaded: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # models by target, for further calls

    def make_drafter(target: LM | None, draft: LM | None) -> ManyDrafters:
        assert draft is not None
        models = [draft, *_further_models(others, target, draft, loaded)]
        return ManyDrafters(tuple(TreeDrafter(lm, growth) for lm in models))

    return sequence_method(drafts, make_drafter, rule, controller)


def _further_models(
    others: Sequence[Any], target: LM | None, draft: LM, loaded: "WeakKeyDictionary[Any, dict[Any, Any]]"
) -> list[LM]:
    """Return the language models of the additional drafts, each with its own caches.

    Args:
        others: see `multi_draft`.
        loaded: models loaded for earlier calls, by target; changed in place.
    """
    if not others and not isinstance(draft, HuggingFaceLM):
        raise NotSupported("multi_draft needs other draft models: multi_draft(others=[...])")
    given: list[LM | None] = [target, draft]
    models = []
    for other in others or [draft]:
        lm = other if isinstance(other, LM) else _loaded_draft(other, target, loaded)
        if target is not None:
            check_same_vocabulary(lm, target)
            if isinstance(lm, EncoderDecoderLM) and not isinstance(target, EncoderDecoderLM):
                raise NotSupported(
                    f"{lm.model_name} has an encoder, and the target is decoder-only; draft with decoder-only models"
                )
        before = sum(one is lm for one in given)
        given.append(lm)
        models.append(_twin_of(lm, before - 1) if before else lm)
    return models


def _loaded_draft(source: Any, target: LM | None, loaded: "WeakKeyDictionary[Any, dict[Any, Any]]") -> LM:
    """Return the language model of a draft given as a model object, a folder or a hub id."""
    load = getattr(target, "further_draft", None)
    if load is None:
        raise NotSupported(
            f"multi_draft can load {source!r} only for a target made by `load`; pass language models (HuggingFaceLM) instead"
        )
    lm: LM = load(source, loaded.setdefault(target, {}))
    return lm


def _twin_of(lm: LM, number: int) -> LM:
    """Return a language model of the same model with its own caches."""
    if not isinstance(lm, HuggingFaceLM):
        raise NotSupported(
            f"multi_draft got the same {type(lm).__name__} twice, but it keeps one cache per text; pass another one"
        )
    return lm.twin(number)


def _branching_method(
    name: str,
    counts: Sequence[int],
    children: AnyChildren,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    """Return the method `name` whose tree has counts[k] children under each node of layer k, drawn by `children`."""
    require_counts(counts)
    growth = Branching(tuple(counts), children)
    return tree_method(DraftKind(name, len(counts), layers=growth.layers), growth, rule, controller)


@recipe
def opt_tree(
    nodes: int = 24,
    depth: int = 6,
    top: int = 8,
    within_layer: bool = False,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft, for each context, the tree with the most expected accepted tokens within a node budget.

    Law: exact: plain sampling
    Paper: arXiv 2406.17276 (OPT-Tree), arXiv 2406.16858 (EAGLE-2: within_layer=True), arXiv 2406.02532 (SpecExec)

    Code: core/draft/best_first.py; core/verify/walk.py.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers.
        top: number of likeliest tokens considered under each expanded node.
        within_layer: expand only the best nodes of the newest layer (EAGLE-2), instead of the best nodes of the tree.
        rule: "match", "path", "traversal" or a part. All three accept equally often, because these drafts are not random.
        controller: the controller that chooses depth and number of nodes (docs/methods/controllers.md): "auto" (as many
            layers as pay by acceptance and sizes), "fixed", "latency" (chooses the number of nodes by the times
            of past turns), "thompson", one that ends drafts between layers ("confidence", "tracked", "calibrated",
            "survival"), or a part.
    """
    require_at_least_one(nodes=nodes, depth=depth, top=top)
    layers = layers_within(nodes, top, depth)
    drafts = DraftKind("opt_tree", depth, nodes, layers, has_node_budget=True)
    return tree_method(drafts, BestFirst(top, within_layer=within_layer), rule, controller)


@recipe
def gsd(
    depth: int = 4,
    top: int = 3,
    context: int = 0,
    nodes: int = 32,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a graph that merges repeated runs of tokens, and unroll it into a tree.

    Law: exact: plain sampling
    Paper: arXiv 2407.16207 (Gong et al.)

    Turns run one by one in Python, which merges and unrolls the graph.

    Code: core/draft/merged.py, without the cycles of the paper; core/verify/walk.py.

    Args:
        depth: number of passes of the draft model; the maximum if a controller chooses.
        top: number of candidates per node.
        context: number of preceding tokens that must agree, in addition to the token itself, to merge two nodes; -1: merge
            none.
        nodes: maximum number of nodes of the unrolled tree, without the root.
        rule: "match", or a part that does not need the law of drafts, which is unknown for merged ones.
        controller: as in `speculative_sampling`.
    """
    require_at_least_one(depth=depth, top=top, nodes=nodes)
    if context < -1:
        raise BadSetting(f"context is {context}; it must be at least 0, or -1 to merge nothing")
    layers = layers_within(nodes, top, depth)
    drafts = DraftKind("gsd", depth, layers=layers, no_law_reason=Graph.no_law_reason)
    return tree_method(drafts, Graph(top, context, most_nodes=nodes + 1), rule, controller)


@recipe
def propd(
    nodes: int = 24,
    depth: int = 5,
    early: int = 2,
    top: int = 16,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree, prune nodes that are unlikely under the target's first layers, and score the others with the target.

    Law: exact: plain sampling
    Paper: arXiv 2402.13485 (Zhong et al.)

    Turns run one by one in Python: a compiled run has one draft model, and the first layers are a second one.

    Code: early pruning core/draft/merged.py; tree size by a latency model core/control/size.py.

    Args:
        nodes: maximum number of draft nodes per turn.
        depth: number of layers of the draft.
        early: number of first layers of the target that prune the draft.
        top: number of likeliest tokens of these layers; other draft tokens are pruned.
        rule: as in `opt_tree`.
        controller: "auto" as in `opt_tree`; "latency", as in the paper, chooses the number of nodes by the times of past
            turns; or another one as in `opt_tree`.
    """
    require_at_least_one(nodes=nodes, depth=depth, early=early, top=top)
    drafts = DraftKind("propd", depth, nodes, (max(nodes // depth, 1),), has_node_budget=True)

    def make_drafter(target: LM | None, draft: LM | None) -> Pruned:
        assert draft is not None
        if not isinstance(target, HuggingFaceLM):
            raise NotSupported("propd prunes drafts with the target's first layers, which needs a transformers model")
        needs = getattr(draft, "needs_of_target", LOGITS)
        inputs = getattr(draft, "extra_inputs", None)
        enters_late = inputs is not None and inputs.layer > 0
        # First layers on the target's own cache cannot also serve taps, exit layers or rows that enter late.
        is_live = not needs.taps and needs.exit_layer is None and not enters_late
        pruner = first_layers(target, early) if is_live else early_layers(target.model, early)
        return Pruned(TreeDrafter(draft, BestFirst()), pruner, top)

    return sequence_method(drafts, make_drafter, rule, controller)
