"""Recipes for one sequence whose drafts come from a draft model: drawn from its law, or its likeliest tokens."""

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
from specbeam.core.session import Controller, Parts, Rule, law_of
from specbeam.models.early_layers import early_layers
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.live_layers import first_layers
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, controller_maker, rule_of, tree_method
from specbeam.recipes.method import Method, require_at_least_one
from specbeam.recipes.tuning.acceptance import GUESS, kept_acceptance
from specbeam.recipes.tuning.costs import curve_of


def speculative_sampling(
    depth: int = 5, rule: "RuleName | Rule" = "path", controller: "ControllerName | Controller" = "auto"
) -> Method:
    """Draft a chain of tokens, and accept or refuse them one by one: speculative sampling.

    Law: exact: plain sampling
    Paper: arXiv 2211.17192 (Leviathan et al.), arXiv 2302.01318 (Chen et al.)

    Steps of the paper: draft (alg. 1, l. 2-6) draft/tree.py; accept and correct (l. 8-16) verify/walk.py, verify/trials.py.

    Args:
        depth: number of draft tokens per pass of the target; the maximum if a controller chooses.
        rule: how drafts are judged. "path" accepts or refuses each token by its probabilities under target and draft, from
            the root on. "traversal" judges them from the end of the draft (block verification). "match" samples from the
            target, and accepts the drafts that equal the sample. Or a part.
        controller: the controller that chooses the length of a draft, at most `depth`: "auto" (`depth` layers; fewer or
            none if the draft model is dear), "fixed", "confidence", "tracked", "thompson", "calibrated", "survival", "cost"
            (docs/methods/controllers.md), or a part.
    """
    require_at_least_one(depth=depth)
    return tree_method(
        DraftKind("speculative_sampling", depth, layers=(1,)), Branching((1,), Independent()), rule, controller
    )


def block_verification(depth: int = 5, controller: "ControllerName | Controller" = "auto") -> Method:
    """Draft a chain of tokens, and judge it from its end: block verification.

    On average it accepts at least as many tokens as `speculative_sampling`.

    Law: exact: plain sampling
    Paper: arXiv 2403.10444 (Sun et al.)

    Steps of the paper: verify/traversal.py, on a chain.

    Args:
        depth: number of draft tokens per pass of the target; the maximum if a controller chooses.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`.
    """
    require_at_least_one(depth=depth)
    drafts = DraftKind("block_verification", depth, layers=(1,))
    return tree_method(drafts, Branching((1,), Independent()), "traversal", controller)


def specinfer(
    counts: Sequence[int] = (3, 2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of independent draws, and try the children of each node in order.

    Law: exact: plain sampling
    Paper: arXiv 2305.09781 (Miao et al.)

    Steps of the paper: expansion (sec. 3) draft/tree.py; tree attention (sec. 4.1) lm/; multi-step sampling (alg. 2)
    verify/walk.py.

    Args:
        counts: number of children of each node, by layer.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`.
    """
    return _branching_method("specinfer", counts, Independent(), rule, controller)


def rsd_c(
    counts: Sequence[int] = (3, 2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of draws without replacement, with a constant number of children per node in each layer.

    Law: exact: plain sampling
    Paper: arXiv 2402.14160 (Jeon et al.)

    Steps of the paper: draws without replacement draft/children.py; recursive rejection sampling verify/walk.py.

    Args:
        counts: number of children of each node, by layer.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`.
    """
    return _branching_method("rsd_c", counts, Distinct(), rule, controller)


def rsd_s(
    width: int = 4,
    depth: int = 4,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree by stochastic beam search: `width` sequences per layer, drawn without replacement; the others are cut.

    Law: exact: plain sampling
    Paper: arXiv 2402.14160 (Jeon et al.)

    Steps of the paper: stochastic beams draft/stochastic.py; recursive rejection sampling verify/walk.py.

    Args:
        width: number of sequences per layer.
        depth: number of layers; the maximum if a controller chooses.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`.
    """
    require_at_least_one(width=width, depth=depth)
    return tree_method(DraftKind("rsd_s", depth, width, layers=(width,)), StochasticBeam(), rule, controller)


def sequoia(
    nodes: int = 16,
    depth: int = 6,
    acceptance: Sequence[float] | None = None,
    rule: "RuleName | Rule" = "path",
    cost: 'CostCurve | Literal["auto"] | None' = "auto",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft the fixed tree that is best for measured acceptance rates, filled by draws without replacement.

    Law: exact: plain sampling
    Paper: arXiv 2402.12374 (Chen et al.)

    Steps of the paper: dynamic programme (sec. 3.1) control/best_tree.py; sampling with fallback (alg. 2) draft/children.py.

    Args:
        nodes: maximum number of nodes of the tree, without the root.
        depth: maximum number of layers.
        acceptance: for k = 1, 2, ...: the probability that the child accepted at a node is the k-th one tried. None: what
            `specbeam tune` has measured of this pair; if it has not run, 0.7, 0.12, 0.05, 0.03, 0.02.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part.
        cost: seconds of a pass by number of nodes, of which follows the tree of at most `nodes` nodes with the least time
            per token. "auto": as measured on this machine (`specbeam tune`), so a seed may give another text on another
            machine. None: the tree of `nodes` nodes with the most expected tokens per pass.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`.
    """
    require_at_least_one(nodes=nodes, depth=depth)
    if acceptance is not None and (not acceptance or min(acceptance) < 0 or sum(acceptance) > 1 + 1e-6):
        raise BadSetting(f"acceptance is {list(acceptance)}; it must hold odds, at least one, in sum at most 1")
    if cost not in ("auto", None) and not isinstance(cost, CostCurve):
        raise BadSetting(f"cost is {cost!r}; it must be a CostCurve, 'auto' or None")

    def method_of(target: LM | None, draft: LM | None) -> Method:
        odds = tuple(acceptance or kept_acceptance(target, draft) or GUESS)
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
    """Return the target's cost of passes here, with that of a draft layer of `rows` nodes; None if nothing is measured."""
    if not isinstance(target, HuggingFaceLM) or not isinstance(draft, HuggingFaceLM):
        return None
    return replace(curve_of(target), draft_layer_s=curve_of(draft).pass_s(rows))


def spechub(
    depth: int = 4,
    children: int = 2,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree with the likeliest tokens and one draw from the rest at each node; with two children per node this is
    the published SpecHub.

    Law: exact: plain sampling
    Paper: arXiv 2411.05289 (Sun et al.), arXiv 2502.18779 (Hu et al.)

    Steps of the paper: candidates draft/children.py; the verifier that attains their optimum is verify/walk.py.

    Args:
        depth: number of layers; the first three branch, deeper ones are chains.
        children: number of children of each node in the layers that branch.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`.
    """
    require_at_least_one(depth=depth, children=children)
    counts = (children,) * min(depth, 3) + (1,) * max(depth - 3, 0)
    return _branching_method("spechub", counts, BestAndOne(), rule, controller)


def traversal(
    counts: Sequence[int] = (3, 2, 1, 1),
    children: "Literal['distinct', 'independent', 'best_and_one'] | Children" = "distinct",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree, and judge it from its leaves to its root: a node is judged after all nodes below it were refused.

    Law: exact: plain sampling
    Paper: arXiv 2505.12398 (Weng et al.)

    Steps of the paper: verify/traversal.py.

    Args:
        counts: number of children of each node, by layer.
        children: how the children of a node are drawn: "distinct" (without replacement), "independent", "best_and_one" (the
            likeliest and one draw from the rest), or a part.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`.
    """
    ways: dict[str, AnyChildren] = {"distinct": Distinct(), "independent": Independent(), "best_and_one": BestAndOne()}
    if isinstance(children, str):
        one_of("children", children, ways)
    way = ways[children] if isinstance(children, str) else children
    return _branching_method("traversal", counts, way, "traversal", controller)


def dyspec(
    nodes: int = 24,
    depth: int = 6,
    least: float | None = None,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of draws that is wide where the draft model is unsure and deep where it is sure.

    Law: exact: plain sampling
    Paper: arXiv 2410.11744 (Xiong et al.)

    Steps of the paper: the variant with a threshold draft/best_first.py; verify/walk.py.

    Args:
        nodes: maximum number of nodes.
        depth: maximum number of layers.
        least: draws continue while the probability that the next one is reached and accepted, as estimated by the draft
            model, is at least this. None: 1 / `nodes`.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part.
        controller: the controller that chooses depth and number of nodes, as in `opt_tree`.
    """
    require_at_least_one(nodes=nodes, depth=depth)
    least = 1 / nodes if least is None else least
    if not 0 < least <= 1:
        raise BadSetting(f"least is {least}; it is a probability, in (0, 1]")
    return tree_method(DraftKind("dyspec", depth, nodes, has_node_budget=True), BestFirstDraws(least), rule, controller)


def multi_draft(
    others: Sequence[Any] = (),
    counts: Sequence[int] = (2, 1, 1),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft trees with several draft models, without replacement, and let the target score the union of the trees.

    Law: exact: plain sampling
    Paper: arXiv 2305.09781 (SpecInfer, merged trees)

    Its turns are taken one by one in Python, since a compiled run has one draft model.

    Steps of the paper: merge-based construction (sec. 3) draft/merged.py; multi-step sampling (alg. 2) verify/walk.py.

    Args:
        others: draft models besides the pair's own: model objects, folders or hub ids, each loaded and checked as the
            pair's draft is, or language models of specbeam. Empty: the pair's draft model grows two trees.
        counts: number of children of each node of a tree, by layer.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part.
        controller: the controller that chooses the depth of all trees before they grow: "fixed", "thompson"
            (docs/methods/controllers.md), or a part.
    """
    _check_counts(counts)
    if not isinstance(others, (list, tuple)):
        raise BadSetting(f"others is {others!r}; it must be a list of draft models")
    drafts = DraftKind(
        "multi_draft",
        len(counts),
        no_stop_reason="grows several trees side by side, which have no newest token in common",
    )
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    make_controller = controller_maker(controller, drafts)
    kept: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # what was loaded, by target

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        models = [draft, *_further_models(others, target, draft, kept)]
        drafters = tuple(TreeDrafter(lm, Branching(tuple(counts), Distinct())) for lm in models)
        return Parts(ManyDrafters(drafters), judge, make_controller(target, draft), law)

    return Method("multi_draft", law, 1, build, needs_draft=True)


def _further_models(
    others: Sequence[Any], target: LM | None, draft: LM, kept: "WeakKeyDictionary[Any, dict[Any, Any]]"
) -> list[LM]:
    """Return the language models of other drafts than the pair's, each with caches of its own.

    Args:
        others: see `multi_draft`.
        kept: what was loaded for earlier calls, by target; changed in place.
    """
    if not others and not isinstance(draft, HuggingFaceLM):
        raise NotSupported("multi_draft needs other draft models: multi_draft(others=[...])")
    given: list[LM | None] = [target, draft]
    models = []
    for other in others or [draft]:
        lm = other if isinstance(other, LM) else _loaded_draft(other, target, kept)
        if target is not None:
            check_same_vocabulary(lm, target)
            if isinstance(lm, EncoderDecoderLM) and not isinstance(target, EncoderDecoderLM):
                raise NotSupported(
                    f"{lm.model_name} reads sources, and the target continues prompts; draft with decoder-only models"
                )
        before = sum(one is lm for one in given)
        given.append(lm)
        models.append(_twin_of(lm, before - 1) if before else lm)
    return models


def _loaded_draft(source: Any, target: LM | None, kept: "WeakKeyDictionary[Any, dict[Any, Any]]") -> LM:
    """Return the language model of a draft that is given as a model object, a folder or a hub id."""
    load = getattr(target, "further_draft", None)
    if load is None:
        raise NotSupported(
            f"multi_draft is given {source!r}, and a target that `load` has not made; give language models (HuggingFaceLM)"
        )
    lm: LM = load(source, kept.setdefault(target, {}))
    return lm


def _twin_of(lm: LM, number: int) -> LM:
    """Return a language model of the same model with caches of its own."""
    if not isinstance(lm, HuggingFaceLM):
        raise NotSupported(
            f"multi_draft is given the same {type(lm).__name__} twice, and it keeps one cache for each text; give another"
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
    _check_counts(counts)
    growth = Branching(tuple(counts), children)
    return tree_method(DraftKind(name, len(counts), layers=growth.layers), growth, rule, controller)


def _check_counts(counts: Sequence[int]) -> None:
    """Raise `BadSetting` unless there is at least one layer, and each count is at least 1."""
    if not counts or min(counts) < 1:
        raise BadSetting(f"counts is {list(counts)}; it must name at least one layer, each with at least one child")


def opt_tree(
    nodes: int = 24,
    depth: int = 6,
    top: int = 8,
    within_layer: bool = False,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft, for each context anew, the tree with the largest expected number of accepted tokens under a budget of nodes.

    Law: exact: plain sampling
    Paper: arXiv 2406.17276 (OPT-Tree), arXiv 2406.16858 (EAGLE-2: within_layer=True), arXiv 2406.02532 (SpecExec)

    Steps of the papers: draft/best_first.py; verify/walk.py.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers.
        top: number of likeliest tokens considered under each expanded node.
        within_layer: expand the best nodes of the newest layer only (EAGLE-2), instead of the best nodes anywhere.
        rule: "match", "path", "traversal" or a part. All three accept equally often, because these drafts are not drawn.
        controller: the controller that chooses depth and number of nodes: "auto" (all nodes, or none where that is faster
            and no text shows it), "fixed", "latency" (sets the number of nodes from the times of past turns), "thompson", or
            one that stops a draft between layers: "confidence", "tracked", "calibrated", "survival". Or a part. See
            docs/methods/controllers.md.
    """
    require_at_least_one(nodes=nodes, depth=depth, top=top)
    drafts = DraftKind("opt_tree", depth, nodes, has_node_budget=True)
    return tree_method(drafts, BestFirst(top, within_layer=within_layer), rule, controller)


def gsd(
    depth: int = 4,
    top: int = 3,
    context: int = 0,
    nodes: int = 32,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a graph in which repeated runs of tokens are drafted only once, and unroll it into a tree.

    Law: exact: plain sampling
    Paper: arXiv 2407.16207 (Gong et al.)

    Its turns are taken one by one, since the graph is merged and unrolled in Python.

    Steps of the paper: draft/merged.py, without its cycles; verify/walk.py.

    Args:
        depth: number of passes of the draft model; the maximum if a controller chooses.
        top: number of candidates per node.
        context: a candidate repeats an earlier node if their tokens and this number of tokens before them agree; -1 merges
            nothing.
        nodes: maximum number of nodes of the unrolled tree, without the root.
        rule: "match" only, because the law of merged drafts is unknown; or a part that does not need to know it.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`.
    """
    require_at_least_one(depth=depth, top=top, nodes=nodes)
    if context < -1:
        raise BadSetting(f"context is {context}; it must be at least 0, or -1 to merge nothing")
    drafts = DraftKind("gsd", depth, no_law_reason=Graph.no_law_reason)
    return tree_method(drafts, Graph(top, context, most_nodes=nodes + 1), rule, controller)


def propd(
    nodes: int = 24,
    depth: int = 5,
    early: int = 2,
    top: int = 16,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "latency",
) -> Method:
    """Draft a tree, drop the nodes that the target's first layers find unlikely, and let the whole target score the rest.

    Law: exact: plain sampling
    Paper: arXiv 2402.13485 (Zhong et al.)

    Its turns are taken one by one in Python: a compiled run has one draft model, and the early layers are a second one.

    Steps of the paper: early pruning draft/merged.py; tree size by a latency model control/size.py.

    Args:
        nodes: maximum number of nodes drafted per turn; with "latency" fewer, where the time of a pass grows with them.
        depth: number of layers of the draft.
        early: number of first layers of the target that judge the drafts early.
        top: a draft stays if its token is among this number of likeliest tokens in the prediction of those layers.
        rule: "match", "path", "traversal" or a part. All three accept equally often, because these drafts are not drawn.
        controller: the controller that chooses the number of nodes: "latency" (from the times of past turns), "fixed"
            (always `nodes`), or another one as in `opt_tree`.
    """
    require_at_least_one(nodes=nodes, depth=depth, early=early, top=top)
    drafts = DraftKind("propd", depth, nodes, has_node_budget=True)
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    make_controller = controller_maker(controller, drafts)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        if not isinstance(target, HuggingFaceLM):
            raise NotSupported("propd looks through the target's first layers; that needs a transformers model")
        needs = getattr(draft, "needs_of_target", LOGITS)
        inputs = getattr(draft, "extra_inputs", None)
        enters_late = inputs is not None and inputs.layer > 0
        # Layers on the target's own cache serve nothing beside.
        is_live = not needs.taps and needs.exit_layer is None and not enters_late
        looker = first_layers(target, early) if is_live else early_layers(target.model, early)
        drafter = Pruned(TreeDrafter(draft, BestFirst()), looker, top)
        return Parts(drafter, judge, make_controller(target, draft), law)

    return Method("propd", law, 1, build, needs_draft=True)
