"""Recipes by the names of the papers on draft heads: what such a head drafts for one sequence, as a tree by its own odds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from specbeam.core.control.best_tree import depth_of_tree, layers_of, ranked_tree
from specbeam.core.draft.best_first import BestFirst
from specbeam.core.draft.children import Best, Distinct, Independent
from specbeam.core.draft.tree import Branching, FixedTree
from specbeam.core.draft.unmask import ORDERS, Order, Unmasking, no_law_reason
from specbeam.core.errors import BadSetting, NotSupported, one_of
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Parts, Rule, law_of
from specbeam.models.heads.bita import Bita
from specbeam.models.heads.chimera import Chimera
from specbeam.models.heads.denoiser import Denoiser
from specbeam.models.heads.exit import ExitHead
from specbeam.models.heads.extra_rows import ExtraHead
from specbeam.models.heads.extra_rows_lm import ExtraLM
from specbeam.models.heads.head import Head
from specbeam.models.heads.hidden_transfer import HiddenTransfer
from specbeam.models.heads.medusa import Medusa
from specbeam.models.heads.modules import ModulesInARow
from specbeam.models.heads.trunk import PairTrunk
from specbeam.recipes.compose import (
    ControllerName,
    DraftKind,
    RuleName,
    controller_maker,
    rule_of,
    tree_method,
)
from specbeam.recipes.method import Method, refuse_ignored, require_at_least_one

# What to do about a pair without such a head.
LOAD_OR_TRAIN = "load the target with draft=<folder of such a head>, or train one (`specbeam train`)"

TreeBy = Literal["streamlined", "measured", "odds"]
# By depth, the odds of the likeliest tokens of a head of which they were not measured.
GUESS = ((0.4, 0.15, 0.08, 0.05, 0.03), (0.3, 0.11, 0.06, 0.04, 0.02), (0.25, 0.09, 0.05, 0.03, 0.02))


def eagle(
    nodes: int = 59,
    depth: int = 8,
    top: int = 10,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft, with an EAGLE head, the tree of the best nodes by the head's own odds: EAGLE-2's trees, for all EAGLE heads.

    Law: exact: plain sampling
    Paper: arXiv 2401.15077 (EAGLE), arXiv 2406.16858 (EAGLE-2), arXiv 2503.01840 (EAGLE-3), arXiv 2408.15766 (HASS)

    Steps of the papers: the head heads/trunk.py; the tree draft/best_first.py; verify/walk.py.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers.
        top: number of likeliest tokens considered under each expanded node, and of nodes expanded in a layer.
        rule: "match", "path", "traversal" or a part. All three accept equally often, because these drafts are not drawn.
        controller: as in `opt_tree`.
    """
    return _of_heads("eagle", "an EAGLE head", _is_eagle, nodes, depth, top, rule, controller)


def fspad(
    nodes: int = 59,
    depth: int = 8,
    top: int = 10,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft, with an FSPAD head, the tree of the best nodes by the head's own odds.

    Law: exact: plain sampling
    Paper: arXiv 2408.15562 (FSPAD)

    Steps of the paper: feature sampling and partial alignment heads/trunk.py; the tree draft/best_first.py; verify/walk.py.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers.
        top: number of likeliest tokens considered under each expanded node, and of nodes expanded in a layer.
        rule: as in `eagle`.
        controller: as in `opt_tree`.
    """
    return _of_heads("fspad", "an FSPAD head", _is_fspad, nodes, depth, top, rule, controller)


def medusa(
    nodes: int = 63,
    depth: int = 4,
    top: int = 10,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft, with Medusa heads, the tree of the best nodes by the product of the heads' odds.

    Law: exact: plain sampling
    Paper: arXiv 2401.10774 (Medusa)

    Steps of the paper: the heads heads/medusa.py; the tree draft/best_first.py; verify/walk.py. The paper's typical
    acceptance changes the law and is left out; its fixed tree is replaced by the best one for the context.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers. Layers deeper than there are heads draft by the last head.
        top: number of likeliest tokens considered under each expanded node, and of nodes expanded in a layer.
        rule: as in `eagle`.
        controller: as in `opt_tree`.
    """
    return _of_heads("medusa", "Medusa heads", _is_medusa, nodes, depth, top, rule, controller)


def mtp(
    nodes: int = 3,
    depth: int = 3,
    top: int = 1,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft with modules of multi-token prediction, which many checkpoints hold: a chain, or the best tree by their odds.

    Law: exact: plain sampling
    Paper: arXiv 2404.19737 (multi-token prediction), arXiv 2412.19437 (DeepSeek-V3)

    Steps of the papers: a module heads/trunk.py, modules in a row heads/modules.py (those of DeepSeek-V3, one after the
    other; the first paper's heads stand side by side and are not read); the drafts draft/best_first.py; verify/walk.py.
    Load the target with draft="mtp".

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers. Module k drafts layer k, and the last module the layers below.
        top: number of likeliest tokens considered under each expanded node, and of nodes expanded in a layer. 1: a chain, as
            in the papers.
        rule: as in `eagle`.
        controller: as in `opt_tree`.
    """
    how = 'load the target with draft="mtp", if its files hold modules of multi-token prediction'
    return _of_heads("mtp", "modules of multi-token prediction", _is_mtp, nodes, depth, top, rule, controller, how)


def chimera(
    nodes: int = 25,
    depth: int = 4,
    top: int = 10,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft, with a Chimera head, the tree of the best nodes by the head's own odds.

    Law: exact: plain sampling
    Paper: arXiv 2402.15758 (Chimera)

    Steps of the paper: trigram encoder, full-context layer and read-outs heads/chimera.py; the tree draft/best_first.py;
    verify/walk.py. The sampling of the paper's code is not exact and is left out.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers. Layers deeper than there are read-outs draft by the last one.
        top: number of likeliest tokens considered under each expanded node, and of nodes expanded in a layer.
        rule: as in `eagle`.
        controller: as in `opt_tree`.
    """
    return _of_heads("chimera", "a Chimera head", _is_chimera, nodes, depth, top, rule, controller)


def specdiff(
    steps: int = 1,
    depth: int = 5,
    order: Order = "confidence",
    tokens: Literal["drawn", "best"] = "drawn",
    rule: "RuleName | Rule | None" = None,
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft a chain of tokens with a SpecDiff head, which unmasks them in one step or in several.

    Law: exact: plain sampling
    Paper: arXiv 2408.05636 (SpecDiff)

    Steps of the paper: the denoiser heads/denoiser.py; steps of diffusion draft/unmask.py; accept and correct
    verify/walk.py, verify/trials.py.

    Args:
        steps: number of steps, each of which is a pass of the head; at most one for each token is of use.
        depth: number of draft tokens per pass of the target; in several steps at most as many as the head's blocks have.
        order: which tokens are unmasked first in several steps: "confidence", those of which the head is surest, "random",
            or "left to right".
        tokens: "drawn" from their laws, or the "best" ones.
        rule: "path", "traversal", "match" or a part, as in `speculative_sampling`. Tokens that are drawn in several steps
            and not from left to right can only be matched. None: "path", or "match" for these and for the best ones.
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`; drafts of several steps,
            and of the best tokens, take one that plans the length in advance.
    """
    require_at_least_one(steps=steps, depth=depth)
    one_of("order", order, ORDERS)
    one_of("tokens", tokens, ("drawn", "best"))
    is_drawn = tokens == "drawn"
    reason = no_law_reason(steps, order, is_drawn)
    judge = rule if rule is not None else "match" if reason or not is_drawn else "path"
    if steps == 1 and is_drawn:
        drafts = DraftKind("specdiff", depth, layers=(1,))
        method = tree_method(drafts, Branching((1,), Independent()), judge, controller)
    else:
        drafts = DraftKind(
            "specdiff", depth, no_law_reason=reason, no_stop_reason="unmasks all tokens of a draft together"
        )
        method = _unmasking(drafts, steps, order, is_drawn, judge, controller)
    return _for_heads(method, "a SpecDiff head", _is_specdiff)


def _unmasking(
    drafts: DraftKind,
    steps: int,
    order: Order,
    is_drawn: bool,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    """Return a method for one sequence whose drafts are chains that a denoiser unmasks."""
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    make_controller = controller_maker(controller, drafts, rule=judge)

    def build(target: LM | None, draft: LM | None) -> Parts:
        return Parts(Unmasking(draft, steps, order, is_drawn), judge, make_controller(target, draft), law)

    return Method(drafts.recipe, law, 1, build, needs_draft=True)


def eesd(
    depth: int = 8,
    counts: Sequence[int] = (1,),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "calibration_ts",
) -> Method:
    """Draft with the target's first layers and one trained layer behind them, by the length that past turns suggest.

    Law: exact: plain sampling
    Paper: arXiv 2406.03853 (EESD)

    Steps of the paper: the exit layer heads/exit.py; the shared KV cache lm/huggingface.py (`extend_early`), engines/cpu/;
    Beta-TS and Calibration-TS control/thompson.py; verify/walk.py.

    Args:
        depth: maximum number of layers of a draft; all of them with "fixed".
        counts: number of children of each node, by layer; the last number holds for deeper layers. (1,) is a chain; several
            children are drawn without replacement.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part.
        controller: the controller that chooses the length of a draft, by the names of the paper "beta_ts" (goes on with the
            odds that past drafts were accepted) or "calibration_ts" (weighs these against the odds of the newest draft); or
            another one as in `speculative_sampling`.
    """
    require_at_least_one(depth=depth)
    if not counts or min(counts) < 1:
        raise BadSetting(f"counts is {list(counts)}; it must name at least one layer, each with at least one child")
    growth = Branching(tuple(counts), Independent() if max(counts) == 1 else Distinct())
    layers = tuple(np.cumprod([growth.count(layer) for layer in range(depth)]).tolist())
    drafts = DraftKind("eesd", depth, layers=layers)
    return _for_heads(tree_method(drafts, growth, rule, controller), "an EESD head", _is_exit)


def _is_exit(head: Head) -> bool:
    return isinstance(head, ExitHead)


def bita(
    nodes: int = 12,
    depth: int = 3,
    top: int | None = None,
    tree: TreeBy = "streamlined",
    least: float = 0.0,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft with mask tokens in the target's own pass: one pass of the target judges a tree and drafts the next one.

    Law: exact: plain sampling
    Paper: arXiv 2401.12522 (BiTA)

    Steps of the paper: soft prompts and masks heads/bita.py; their rows in the pass heads/extra_rows_lm.py; the streamlined
    tree control/best_tree.py; verify/walk.py. The release accepts by the ratio of both laws and draws a refused token from
    the target's law instead of the residual, which is another law than the target's; that is left out.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers. Layers deeper than there are masks draft by the last one.
        top: for tree="odds": number of likeliest tokens considered under each expanded node, and of nodes expanded in a
            layer. None: 10.
        tree: "streamlined": a fixed tree in which only the likeliest node of each layer branches, from the odds that
            training has measured. "measured": the best fixed tree by these odds. "odds": the best tree for each context, by
            the product of the masks' own odds.
        least: a node gets masks of its own if the draft's odds of the path to it are at least this. Where the text goes on
            from a node that has none, the next turn has no draft.
        rule: as in `eagle`.
        controller: as in `opt_tree`; "latency" for tree="odds" only.
    """
    return _of_extra_rows("bita", "BiTA's masks", Bita, nodes, depth, top, tree, least, rule, controller)


def hidden_transfer(
    nodes: int = 12,
    depth: int = 3,
    top: int | None = None,
    tree: TreeBy = "measured",
    least: float = 0.0,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Draft with states of tokens to come, made between two layers in the target's own pass of the states there.

    Law: exact: plain sampling
    Paper: arXiv 2404.12022 (Hidden Transfer), as we read it: its code is not public

    Steps of the paper: the maps heads/hidden_transfer.py; their rows in the pass heads/extra_rows_lm.py, engines/kv/late.py;
    the tree control/best_tree.py; verify/walk.py.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers. Layers deeper than there are maps draft by the last one.
        top, tree, least: as in `bita`, with made states in place of masks.
        rule: as in `eagle`.
        controller: as in `bita`.
    """
    return _of_extra_rows(
        "hidden_transfer", "maps of Hidden Transfer", HiddenTransfer, nodes, depth, top, tree, least, rule, controller
    )


def _is_eagle(head: Head) -> bool:
    return isinstance(head, PairTrunk) and head.shape.pairs != "normed projection" and not head.shape.sampling


def _is_fspad(head: Head) -> bool:
    return isinstance(head, PairTrunk) and bool(head.shape.sampling)


def _is_medusa(head: Head) -> bool:
    return isinstance(head, Medusa)


def _is_mtp(head: Head) -> bool:
    is_module = isinstance(head, PairTrunk) and head.shape.pairs == "normed projection"
    return is_module or isinstance(head, ModulesInARow)


def _is_chimera(head: Head) -> bool:
    return isinstance(head, Chimera)


def _is_specdiff(head: Head) -> bool:
    return isinstance(head, Denoiser)


def paper_of(head: Head) -> str:
    """Return the name of the recipe for heads of this kind; "" if there is none."""
    kinds: dict[str, Callable[[Head], bool]] = {
        "eagle": _is_eagle,
        "fspad": _is_fspad,
        "medusa": _is_medusa,
        "mtp": _is_mtp,
        "chimera": _is_chimera,
        "specdiff": _is_specdiff,
        "eesd": _is_exit,
        "bita": lambda head: isinstance(head, Bita),
        "hidden_transfer": lambda head: isinstance(head, HiddenTransfer),
    }
    return next((name for name, is_kind in kinds.items() if is_kind(head)), "")


def _of_heads(
    name: str,
    what: str,
    is_kind: Callable[[Head], bool],
    nodes: int,
    depth: int,
    top: int,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
    how: str = LOAD_OR_TRAIN,
) -> Method:
    """Return a method for one sequence that drafts with heads of one kind, a tree by their odds; see `_for_heads`."""
    require_at_least_one(nodes=nodes, depth=depth, top=top)
    drafts = DraftKind(name, depth, nodes, has_node_budget=True)
    method = tree_method(drafts, BestFirst(top, widest=top, within_layer=True), rule, controller)
    return _for_heads(method, what, is_kind, how)


def _for_heads(method: Method, what: str, is_kind: Callable[[Head], bool], how: str = LOAD_OR_TRAIN) -> Method:
    """Return a method that drafts with heads of one kind alone, and refuses pairs without such a head.

    Args:
        what: such a head, for the message.
        how: what to do about a pair without one, for the message.
    """

    def build(target: LM | None, draft: LM | None) -> Parts:
        _check_kind(method.name, what, is_kind, draft, how)
        return method.build(target, draft)

    return replace(method, build=build)


def _check_kind(name: str, what: str, is_kind: Callable[[Head], bool], draft: LM | None, how: str) -> None:
    """Raise `NotSupported` unless the draft is a head of the kind that a recipe drafts with; see `_for_heads`."""
    head: Head | None = getattr(draft, "head", None)
    if head is None or not is_kind(head):
        found = type(draft).__name__ if head is None else head.described["kind"].split(":")[0]
        raise NotSupported(f"{name} drafts with {what}, and the draft of this pair is of kind {found}: {how}")


def _of_extra_rows(
    name: str,
    what: str,
    kind: type[ExtraHead],
    nodes: int,
    depth: int,
    top: int | None,
    tree: str,
    least: float,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    """Return a method for one sequence that drafts with rows in the target's pass, and refuses pairs without such a head."""
    require_at_least_one(nodes=nodes, depth=depth, top=1 if top is None else top)
    one_of("tree", tree, get_args(TreeBy))
    refuse_ignored(tree == "odds", f"tree {tree!r}", top=top)
    is_number = isinstance(least, (int, float)) and not isinstance(least, bool)
    if not (is_number and 0 <= least <= 1):
        raise BadSetting(f"least is {least!r}; it is a probability, in [0, 1]")

    def method_of(ranks: Sequence[Sequence[float]]) -> Method:
        if tree == "odds":
            drafts = DraftKind(name, depth, nodes, has_node_budget=True)
            return tree_method(drafts, BestFirst(top or 10, widest=top or 10, within_layer=True), rule, controller)
        rows = [ranks[min(layer, len(ranks) - 1)] for layer in range(depth)]
        topology = ranked_tree(rows, nodes, spine=tree == "streamlined")
        drafts = DraftKind(name, depth_of_tree(topology), layers=layers_of(topology))
        return tree_method(drafts, FixedTree(topology, Best()), rule, controller)

    def build(target: LM | None, draft: LM | None) -> Parts:
        _check_kind(name, what, lambda head: isinstance(head, kind), draft, LOAD_OR_TRAIN)
        assert isinstance(draft, ExtraLM)
        return method_of(draft.head.ranks or GUESS).build(target, draft.choosing(least))

    return replace(method_of(GUESS), build=build)
