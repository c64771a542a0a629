"""Recipes for one sequence. Any drafter goes with any controller, and with any rule that its law permits."""

from collections.abc import Sequence
from typing import Any, Literal

from specbeam.control.best_tree import Topology, fastest_tree, sequoia_tree
from specbeam.control.cost import CostCurve
from specbeam.control.fixed import FixedShape
from specbeam.control.size import SizeByLatency
from specbeam.draft.best_first import BestFirst, BestFirstDraws
from specbeam.draft.children import BestAndOne, Children, Distinct, Independent
from specbeam.draft.lookup import PromptLookup, SuffixMatch
from specbeam.draft.merged import Graph, ManyDrafters, Pruned
from specbeam.draft.recycle import Successors, TokenRecycling, likeliest
from specbeam.draft.tree import Branching, FixedTree, Growth, StochasticBeam, TreeDrafter, depth_of
from specbeam.errors import BadSetting, LostLaw, NotSupported, one_of
from specbeam.lm.base import LM
from specbeam.lm.early_layers import early_layers
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.recipes.controllers import ControllerName, controller_of
from specbeam.recipes.method import Method, at_least_one
from specbeam.session import Controller, Drafter, Parts, Rule
from specbeam.verify.match import MatchRule
from specbeam.verify.path import PathRule
from specbeam.verify.traversal import TraversalRule

RuleName = Literal["path", "traversal", "match"]
EXACT = "exact: plain sampling"


def speculative_sampling(
    depth: int = 5, rule: RuleName = "path", controller: "ControllerName | Controller" = "fixed"
) -> Method:
    """A chain of draft tokens, accepted one by one.

    Law: exact: plain sampling
    Paper: arXiv 2211.17192 (Leviathan et al.), arXiv 2302.01318 (Chen et al.)

    Steps of the paper: draft (alg. 1, l. 2-6) draft/tree.py; accept and correct (l. 8-16) verify/path.py, verify/draws.py.

    Args:
        depth: draft tokens per pass of the target.
        rule: "path" tries, "traversal" is block verification, "match" samples and compares.
        controller: who chooses the length of a draft: "fixed", "confidence", "tracked", "thompson", "calibrated",
            "survival", or a part.
    """
    at_least_one(depth=depth)
    return _grown("speculative_sampling", Branching((1,), Independent()), rule, controller, depth, needs_draft=True)


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
    return _grown(
        "block_verification", Branching((1,), Independent()), "traversal", controller, depth, needs_draft=True
    )


def specinfer(counts: Sequence[int] = (3, 2, 1, 1), rule: RuleName = "path") -> Method:
    """A tree of independent draws, tried in order at each node.

    Law: exact: plain sampling
    Paper: arXiv 2305.09781 (Miao et al.)

    Steps of the paper: expansion (sec. 3) draft/tree.py; tree attention (sec. 4.1) lm/; multi-step sampling (alg. 2)
    verify/path.py.

    Args:
        counts: children per node, by layer.
        rule: "path", "traversal" or "match".
    """
    return _branching("specinfer", counts, Independent(), rule, needs_draft=True)


def rsd_c(counts: Sequence[int] = (3, 2, 1, 1), rule: RuleName = "path") -> Method:
    """A tree of draws without replacement, with a constant number of children per layer.

    Law: exact: plain sampling
    Paper: arXiv 2402.14160 (Jeon et al.)

    Steps of the paper: draws without replacement draft/children.py; recursive rejection sampling verify/path.py.

    Args:
        counts: children per node, by layer.
        rule: "path", "traversal" or "match".
    """
    return _branching("rsd_c", counts, Distinct(), rule, needs_draft=True)


def rsd_s(width: int = 4, depth: int = 4, rule: RuleName = "path") -> Method:
    """Stochastic beam search drafts the `width` sequences per layer that are worth most; the others are cut early.

    Law: exact: plain sampling
    Paper: arXiv 2402.14160 (Jeon et al.)

    Steps of the paper: stochastic beams draft/tree.py; recursive rejection sampling verify/path.py.

    Args:
        width: sequences per layer.
        depth: layers.
        rule: "path", "traversal" or "match".
    """
    at_least_one(width=width, depth=depth)
    return _grown("rsd_s", StochasticBeam(), rule, FixedShape(depth, width), depth, needs_draft=True)


def sequoia(
    nodes: int = 16,
    depth: int = 6,
    acceptance: Sequence[float] = (0.7, 0.12, 0.05, 0.03, 0.02),
    rule: RuleName = "path",
    cost: CostCurve | None = None,
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
    """
    at_least_one(nodes=nodes, depth=depth)
    if not acceptance or min(acceptance) < 0 or sum(acceptance) > 1 + 1e-6:
        raise BadSetting(f"acceptance is {list(acceptance)}; it must hold odds, at least one, in sum at most 1")
    if cost is None:
        tree: Topology = sequoia_tree(acceptance, nodes + 1, depth)[0]
    else:
        tree = fastest_tree(acceptance, cost, nodes + 1, depth)[0]
    growth = FixedTree(tree, Distinct(fallback=True))
    return _grown("sequoia", growth, rule, "fixed", depth_of(tree), needs_draft=True)


def spechub(depth: int = 4, children: int = 2, rule: RuleName = "path") -> Method:
    """The likeliest tokens and one draw from the rest at each node; with two children the published SpecHub.

    Law: exact: plain sampling
    Paper: arXiv 2411.05289 (Sun et al.), arXiv 2502.18779 (Hu et al.)

    Steps of the paper: candidates draft/children.py; the verifier that attains their optimum is verify/path.py.

    Args:
        depth: layers; the first three branch, deeper ones are chains.
        children: per node.
        rule: "path", "traversal" or "match".
    """
    at_least_one(depth=depth, children=children)
    counts = (children,) * min(depth, 3) + (1,) * max(depth - 3, 0)
    return _branching("spechub", counts, BestAndOne(), rule, needs_draft=True)


def traversal(
    counts: Sequence[int] = (3, 2, 1, 1),
    children: "Literal['distinct', 'independent', 'best_and_one'] | Children" = "distinct",
) -> Method:
    """A tree judged from its leaves to its root: a node is judged when everything below it has failed.

    Law: exact: plain sampling
    Paper: arXiv 2505.12398 (Weng et al.)

    Steps of the paper: verify/traversal.py.

    Args:
        counts: children per node, by layer.
        children: how they are drawn: "distinct" (without replacement), "independent", "best_and_one" (the likeliest and one
            draw from the rest), or a part.
    """
    known: dict[str, Children] = {"distinct": Distinct(), "independent": Independent(), "best_and_one": BestAndOne()}
    if isinstance(children, str):
        one_of("children", children, known)
    chosen = known[children] if isinstance(children, str) else children
    return _branching("traversal", counts, chosen, "traversal", needs_draft=True)


def opt_tree(
    nodes: int = 24,
    depth: int = 6,
    top: int = 8,
    within_layer: bool = False,
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """The tree of largest expected acceptance under a budget of nodes, made anew for each context.

    Law: exact: plain sampling
    Paper: arXiv 2406.17276 (OPT-Tree), arXiv 2406.16858 (EAGLE-2: within_layer=True), arXiv 2406.02532 (SpecExec)

    Steps of the papers: draft/best_first.py; verify/match.py.

    Args:
        nodes: of the tree.
        depth: most layers.
        top: likeliest tokens looked at under each expanded node.
        within_layer: expand the best nodes of the newest layer only (EAGLE-2), not the best anywhere.
        controller: as in `speculative_sampling`.
    """
    at_least_one(nodes=nodes, depth=depth, top=top)
    growth = BestFirst(top, within_layer=within_layer)
    chosen = FixedShape(depth, nodes) if controller == "fixed" else controller
    return _grown("opt_tree", growth, "match", chosen, depth, needs_draft=True, width=nodes)


def dyspec(nodes: int = 24, depth: int = 6, least: float | None = None, rule: RuleName = "path") -> Method:
    """A tree of draws that widens where the draft is unsure and deepens where it is sure.

    Law: exact: plain sampling
    Paper: arXiv 2410.11744 (Xiong et al.)

    Steps of the paper: the variant with a threshold draft/best_first.py; verify/path.py.

    Args:
        nodes: most nodes.
        depth: most layers.
        least: a draw is made while its odds of being reached and accepted are at least this, as far as the draft knows;
            by default 1 / `nodes`.
        rule: "path", "traversal" or "match".
    """
    at_least_one(nodes=nodes, depth=depth)
    least = 1 / nodes if least is None else least
    if not 0 < least <= 1:
        raise BadSetting(f"least is {least}; it is a probability, in (0, 1]")
    return _grown("dyspec", BestFirstDraws(least), rule, FixedShape(depth, nodes), depth, needs_draft=True)


def gsd(depth: int = 4, top: int = 3, context: int = 0, nodes: int = 32) -> Method:
    """Runs that repeat are drafted once: the draft is a graph, unrolled into a tree.

    Law: exact: plain sampling
    Paper: arXiv 2407.16207 (Gong et al.)

    Steps of the paper: draft/merged.py, without its cycles; verify/match.py.

    Args:
        depth: draft passes.
        top: candidates per node.
        context: tokens before a candidate that must agree too for it to be a repeat; -1 never merges.
        nodes: of the unrolled tree.
    """
    at_least_one(depth=depth, top=top, nodes=nodes)
    if context < -1:
        raise BadSetting(f"context is {context}; it must be at least 0, or -1 to merge nothing")
    return _grown("gsd", Graph(top, context, most_nodes=nodes + 1), "match", "fixed", depth, needs_draft=True)


def propd(
    nodes: int = 24,
    depth: int = 5,
    early: int = 2,
    top: int = 16,
    controller: "Literal['latency', 'fixed'] | Controller" = "latency",
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
        controller: who chooses the number of nodes: "latency", by the times of past passes; "fixed", always the most.
    """
    at_least_one(nodes=nodes, depth=depth, early=early, top=top)
    known: dict[str, Controller] = {"latency": SizeByLatency(nodes, depth), "fixed": FixedShape(depth, nodes)}
    if isinstance(controller, str):
        one_of("controller", controller, known)
    chosen = known[controller] if isinstance(controller, str) else controller

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        if not isinstance(target, HuggingFaceLM):
            raise NotSupported("propd looks through the target's first layers; that needs a transformers model")
        drafter = Pruned(TreeDrafter(draft, BestFirst()), early_layers(target.model, early), top)
        return Parts(drafter, MatchRule(), chosen, EXACT)

    return Method("propd", EXACT, 1, build, needs_draft=True)


def prompt_lookup(depth: int = 8, longest: int = 3, match: Literal["last", "first"] = "last") -> Method:
    """Continue an earlier match of the last tokens; no draft model.

    Law: exact: plain sampling
    Paper: none; prompt lookup decoding (Saxena 2023)

    Args:
        depth: draft tokens per pass of the target.
        longest: tokens that are tried to agree, from many to one.
        match: which of several earlier places to continue, "last" or "first".
    """
    at_least_one(depth=depth, longest=longest)
    one_of("match", match, ("last", "first"))
    return _retrieving("prompt_lookup", PromptLookup(longest, match), depth)


def suffix_match(depth: int = 16, per_match: float = 4.0) -> Method:
    """Continue the longest earlier match of any length; no draft model.

    Law: exact: plain sampling
    Paper: arXiv 2411.10666 (SAM-Decoding)

    Args:
        depth: most draft tokens per pass of the target.
        per_match: draft tokens per matched token, one in any case.
    """
    at_least_one(depth=depth)
    if per_match < 0:
        raise BadSetting(f"per_match is {per_match}; it must not be negative")
    return _retrieving("suffix_match", SuffixMatch(per_match), depth)


def token_recycling(depth: int = 6, memory: Successors | None = None, k: int = 8, nodes: int = 80) -> Method:
    """What the target nearly said is remembered in a table of successors and drafted again; no draft model.

    Law: exact: plain sampling
    Paper: arXiv 2408.08696 (Luo et al.)

    Args:
        depth: layers of the static tree that are used.
        memory: a table to start from and to go on with (`Successors.load`); by default one per method and vocabulary.
        k: successors per token of a new table.
        nodes: of the published tree of 80 those of smallest rank sum plus depth; fewer where a node costs time.
    """
    at_least_one(depth=depth, k=k, nodes=nodes)
    if nodes > 80:
        raise BadSetting(f"nodes is {nodes}; the published tree has 80")
    kept: dict[int, Successors] = {}

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert target is not None
        table = memory or kept.setdefault(target.vocab, Successors.empty(target.vocab, k))
        if len(table.table) != target.vocab:
            raise BadSetting(
                f"memory holds {len(table.table)} tokens, the target knows {target.vocab}; it is another model's table"
            )
        return Parts(TokenRecycling(table, likeliest(nodes)), MatchRule(), FixedShape(depth, 0), EXACT)

    return Method("token_recycling", EXACT, 1, build)


def multi_draft(others: Sequence[Any] = (), counts: Sequence[int] = (2, 1, 1), rule: RuleName = "path") -> Method:
    """Several draft models at once: the target scores the union of their trees, which draw without replacement.

    Law: exact: plain sampling
    Paper: arXiv 2305.09781 (SpecInfer, merged trees)

    Args:
        others: draft models besides the pair's own; with none the pair's draft grows two trees.
        counts: children per node, by layer, of each tree.
        rule: "path", "traversal" or "match".
    """
    _check_counts(counts)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        if not others and not isinstance(draft, HuggingFaceLM):
            raise NotSupported("multi_draft needs other draft models: multi_draft(others=[...])")
        more = others or [draft.model]  # type: ignore[attr-defined]
        models = [draft, *(one if isinstance(one, LM) else HuggingFaceLM(one) for one in more)]
        drafters = tuple(TreeDrafter(lm, Branching(tuple(counts), Distinct())) for lm in models)
        return Parts(ManyDrafters(drafters), _rule(rule), FixedShape(len(counts), 0), EXACT)

    return Method("multi_draft", EXACT, 1, build, needs_draft=True)


def auto() -> Method:
    """The fastest exact method for one sequence, by measurement on the first prompts; the choice is kept on disk.

    Law: exact: plain sampling
    Paper: none

    What it depends on: both models, the sampling settings, the machine. Approximate methods are never chosen.
    """

    def build(target: LM | None, draft: LM | None) -> Parts:
        raise NotSupported("auto has to be measured first; it works in generate() and on the command line")

    return Method("auto", EXACT, 1, build)


def _branching(name: str, counts: Sequence[int], children: Children, rule: RuleName, needs_draft: bool) -> Method:
    _check_counts(counts)
    return _grown(name, Branching(tuple(counts), children), rule, "fixed", len(counts), needs_draft)


def _grown(
    name: str,
    growth: Growth,
    rule: RuleName,
    controller: "ControllerName | Controller",
    depth: int,
    needs_draft: bool,
    width: int = 1,
) -> Method:
    chosen, judge = controller_of(controller, depth, width), _rule(rule)
    if isinstance(growth, Graph) and not isinstance(judge, MatchRule):
        raise LostLaw(f"{name} merges its drafts, so their law is lost; they can only be matched: rule='match'")

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        return Parts(TreeDrafter(draft, growth), judge, chosen, EXACT)

    return Method(name, EXACT, 1, build, needs_draft)


def _retrieving(name: str, drafter: Drafter, depth: int) -> Method:
    parts = Parts(drafter, MatchRule(), FixedShape(depth, 0), EXACT)
    return Method(name, EXACT, 1, lambda target, draft: parts)


def _rule(name: RuleName) -> Rule:
    known: dict[str, Rule] = {"path": PathRule(), "traversal": TraversalRule(), "match": MatchRule()}
    if name not in known:
        raise BadSetting(f"rule is {name!r}; it must be one of {', '.join(known)}")
    return known[name]


def _check_counts(counts: Sequence[int]) -> None:
    if not counts or min(counts) < 1:
        raise BadSetting(f"counts is {list(counts)}; it must name at least one layer, each with at least one child")
