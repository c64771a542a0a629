"""Recipes for draft heads, named after their papers: methods for one sequence with drafts by the heads' laws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from specbeam.core.control.best_tree import depth_of_tree, layers_of, ranked_tree
from specbeam.core.draft.best_first import BestFirst
from specbeam.core.draft.children import Best, Distinct, Independent
from specbeam.core.draft.tree import Branching, FixedTree
from specbeam.core.draft.unmask import ORDERS, Order, Unmasking, no_law_reason
from specbeam.core.errors import NotSupported, one_of
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Parts, Rule
from specbeam.models.heads.bita import Bita
from specbeam.models.heads.chimera import Chimera
from specbeam.models.heads.denoiser import Denoiser
from specbeam.models.heads.exit import ExitHead
from specbeam.models.heads.extra_rows_lm import ExtraLM
from specbeam.models.heads.head import Head
from specbeam.models.heads.hidden_transfer import HiddenTransfer
from specbeam.models.heads.medusa import Medusa
from specbeam.models.heads.modules import ModulesInARow
from specbeam.models.heads.trunk import PairTrunk
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, layers_within, sequence_method, tree_method
from specbeam.recipes.method import (
    Method,
    recipe,
    refuse_ignored,
    require_at_least_one,
    require_counts,
    require_probability,
)

TreeBy = Literal["streamlined", "measured", "odds"]
# Acceptance probabilities of the likeliest tokens by depth, for heads whose training did not measure them.
GUESS = ((0.4, 0.15, 0.08, 0.05, 0.03), (0.3, 0.11, 0.06, 0.04, 0.02), (0.25, 0.09, 0.05, 0.03, 0.02))


def _is_eagle(head: Head) -> bool:
    return isinstance(head, PairTrunk) and head.shape.pairs != "normed projection" and not head.is_fspad


def _is_fspad(head: Head) -> bool:
    return isinstance(head, PairTrunk) and head.is_fspad


def _is_mtp(head: Head) -> bool:
    is_module = isinstance(head, PairTrunk) and head.shape.pairs == "normed projection"
    return is_module or isinstance(head, ModulesInARow)


@dataclass(frozen=True)
class _HeadKind:
    """A kind of draft heads, with texts for the message that rejects pairs without one."""

    recipe: str
    what: str  # a head of this kind with its article, such as "an EAGLE head"
    includes: Callable[[Head], bool]
    advice: str = "load the target with draft=<folder of such a head> (--draft), or train one (`specbeam train`)"


_EAGLE = _HeadKind("eagle", "an EAGLE head", _is_eagle)
_FSPAD = _HeadKind("fspad", "an FSPAD head", _is_fspad)
_MEDUSA = _HeadKind("medusa", "Medusa heads", lambda head: isinstance(head, Medusa))
_MTP = _HeadKind(
    "mtp",
    "modules of multi-token prediction",
    _is_mtp,
    'load the target with draft="mtp" (--draft), if its files hold modules of multi-token prediction',
)
_CHIMERA = _HeadKind("chimera", "a Chimera head", lambda head: isinstance(head, Chimera))
_SPECDIFF = _HeadKind("specdiff", "a SpecDiff head", lambda head: isinstance(head, Denoiser))
_EESD = _HeadKind("eesd", "an EESD head", lambda head: isinstance(head, ExitHead))
_BITA = _HeadKind("bita", "BiTA's masks", lambda head: isinstance(head, Bita))
_HIDDEN_TRANSFER = _HeadKind(
    "hidden_transfer", "maps of Hidden Transfer", lambda head: isinstance(head, HiddenTransfer)
)
_KINDS = (_EAGLE, _FSPAD, _MEDUSA, _MTP, _CHIMERA, _SPECDIFF, _EESD, _BITA, _HIDDEN_TRANSFER)


def paper_of(head: Head) -> str:
    """Return the name of the recipe for a draft head; "" if there is none."""
    return next((kind.recipe for kind in _KINDS if kind.includes(head)), "")


@recipe
def eagle(
    nodes: int = 59,
    depth: int = 8,
    top: int = 10,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of the most probable nodes with an EAGLE head. All EAGLE heads draft EAGLE-2's trees.

    Law: exact: plain sampling
    Paper: arXiv 2401.15077 (EAGLE), arXiv 2406.16858 (EAGLE-2), arXiv 2503.01840 (EAGLE-3), arXiv 2408.15766 (HASS)

    Code: the head models/heads/trunk.py; the tree core/draft/best_first.py; the rule core/verify/walk.py.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers.
        top: number of likeliest tokens considered under each expanded node, and of nodes expanded per layer.
        rule: "match", "path", "traversal" or a part. All three accept equally often, because these drafts are not random.
        controller: as in `opt_tree`.
    """
    return _tree_of_heads(_EAGLE, nodes, depth, top, rule, controller)


@recipe
def fspad(
    nodes: int = 59,
    depth: int = 8,
    top: int = 10,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of the most probable nodes with an FSPAD head.

    Law: exact: plain sampling
    Paper: arXiv 2408.15562 (FSPAD)

    Code: feature sampling and partial alignment models/heads/trunk.py; the tree core/draft/best_first.py; the rule
    core/verify/walk.py.

    Args:
        nodes, depth, top, rule, controller: as in `eagle`.
    """
    return _tree_of_heads(_FSPAD, nodes, depth, top, rule, controller)


@recipe
def medusa(
    nodes: int = 63,
    depth: int = 4,
    top: int = 10,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of the most probable nodes with Medusa heads, by the product of the heads' probabilities.

    Law: exact: plain sampling
    Paper: arXiv 2401.10774 (Medusa)

    Differences from the paper: typical acceptance is left out, because it changes the law; and the tree is the best one for
    each context, not a fixed one.

    Code: the heads models/heads/medusa.py; the tree core/draft/best_first.py; the rule core/verify/walk.py.

    Args:
        depth: maximum number of layers. The last head also drafts all deeper layers.
        nodes, top, rule, controller: as in `eagle`.
    """
    return _tree_of_heads(_MEDUSA, nodes, depth, top, rule, controller)


@recipe
def mtp(
    nodes: int = 3,
    depth: int = 3,
    top: int = 1,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a chain, or a tree of the most probable nodes, with the checkpoint's modules of multi-token prediction.

    Law: exact: plain sampling
    Paper: arXiv 2404.19737 (multi-token prediction), arXiv 2412.19437 (DeepSeek-V3)

    Load the target with draft="mtp". Only sequential modules, as in DeepSeek-V3, can be loaded; the parallel heads of the
    first paper cannot.

    Code: a module models/heads/trunk.py, sequential modules models/heads/modules.py; the draft core/draft/best_first.py; the
    rule core/verify/walk.py.

    Args:
        depth: maximum number of layers. Module k drafts layer k; the last module also drafts all deeper layers.
        top: number of likeliest tokens considered under each expanded node, and of nodes expanded per layer. 1: a chain, as
            in the papers.
        nodes, rule, controller: as in `eagle`.
    """
    return _tree_of_heads(_MTP, nodes, depth, top, rule, controller)


@recipe
def chimera(
    nodes: int = 25,
    depth: int = 4,
    top: int = 10,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a tree of the most probable nodes with a Chimera head.

    Law: exact: plain sampling
    Paper: arXiv 2402.15758 (Chimera)

    The sampling of the paper's code is not exact and is left out.

    Code: trigram encoder, full-context layer and read-outs models/heads/chimera.py; the tree core/draft/best_first.py; the
    rule core/verify/walk.py.

    Args:
        depth: maximum number of layers. The last read-out also drafts all deeper layers.
        nodes, top, rule, controller: as in `eagle`.
    """
    return _tree_of_heads(_CHIMERA, nodes, depth, top, rule, controller)


@recipe
def specdiff(
    steps: int = 1,
    depth: int = 5,
    order: Order = "confidence",
    tokens: Literal["drawn", "best"] = "drawn",
    rule: "RuleName | Rule | None" = None,
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft a chain of tokens with a SpecDiff head, which unmasks them in one or several steps.

    Law: exact: plain sampling
    Paper: arXiv 2408.05636 (SpecDiff)

    Code: the denoiser models/heads/denoiser.py; diffusion steps core/draft/unmask.py; the rule core/verify/walk.py and
    core/verify/trials.py.

    Args:
        steps: number of steps, each of which is a pass of the head. More steps than tokens gain nothing.
        depth: number of draft tokens per pass of the target. With several steps at most the block size of the head.
        order: the order in which several steps unmask tokens: "confidence" (the most certain tokens first), "random", or
            "left to right".
        tokens: "drawn" from their laws, or the "best" ones.
        rule: "path", "traversal", "match" or a part, as in `speculative_sampling`. Tokens drawn in several steps in another
            order than left to right need "match", because their law is unknown. None: "match" for these and for
            tokens="best", otherwise "path".
        controller: the controller that chooses the length of a draft, as in `speculative_sampling`. With several steps, or
            tokens="best", it must plan the length in advance.
    """
    require_at_least_one(steps=steps, depth=depth)
    one_of("order", order, ORDERS)
    one_of("tokens", tokens, ("drawn", "best"))
    is_drawn = tokens == "drawn"
    reason = no_law_reason(steps, order, is_drawn)
    if rule is None:
        rule = "match" if reason or not is_drawn else "path"
    if steps == 1 and is_drawn:
        drafts = DraftKind("specdiff", depth, layers=(1,))
        return _for_heads(_SPECDIFF, tree_method(drafts, Branching((1,), Independent()), rule, controller))
    no_stop_reason = "unmasks all tokens of a draft together"
    drafts = DraftKind("specdiff", depth, layers=(1,), no_law_reason=reason, no_stop_reason=no_stop_reason)

    def make_drafter(target: LM | None, draft: LM | None) -> Unmasking:
        return Unmasking(draft, steps, order, is_drawn)

    return _for_heads(_SPECDIFF, sequence_method(drafts, make_drafter, rule, controller))


@recipe
def eesd(
    depth: int = 8,
    counts: Sequence[int] = (1,),
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "calibration_ts",
) -> Method:
    """Draft with the target's first layers and a trained exit layer; past turns determine the length of drafts.

    Law: exact: plain sampling
    Paper: arXiv 2406.03853 (EESD)

    Code: the exit layer models/heads/exit.py; the shared KV cache models/huggingface.py (`extend_early`) and engines/cpu/;
    Beta-TS and Calibration-TS core/control/thompson.py; the rule core/verify/walk.py.

    Args:
        depth: maximum number of layers of a draft; with controller="fixed" always this number.
        counts: number of children of each node, by layer; the last number also holds for all deeper layers. (1,) is a chain.
            Several children are drawn without replacement.
        rule: as in `speculative_sampling`.
        controller: the controller that chooses the length of a draft, by its name in the paper: "beta_ts" (continues with
            the past acceptance rate as probability) or "calibration_ts" (mixes this rate with the draft probability of the
            newest token); or another one as in `speculative_sampling`.
    """
    require_at_least_one(depth=depth)
    require_counts(counts)
    growth = Branching(tuple(counts), Independent() if max(counts) == 1 else Distinct())
    layers = tuple(np.cumprod([growth.count(layer) for layer in range(depth)]).tolist())
    drafts = DraftKind("eesd", depth, layers=layers)
    return _for_heads(_EESD, tree_method(drafts, growth, rule, controller))


@recipe
def bita(
    nodes: int = 12,
    depth: int = 3,
    top: int | None = None,
    tree: TreeBy = "streamlined",
    least: float = 0.0,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft with mask tokens in the target's own pass: each pass of the target judges a tree and drafts the next one.

    Law: exact: plain sampling
    Paper: arXiv 2401.12522 (BiTA)

    The released code accepts by the ratio of both laws, and after a rejection draws from the target's law instead of
    the residual. This changes the law of the output, so it is left out.

    Code: soft prompts and masks models/heads/bita.py; their rows in the pass models/heads/extra_rows_lm.py; the streamlined
    tree core/control/best_tree.py; the rule core/verify/walk.py.

    Args:
        nodes: number of nodes of the tree.
        depth: maximum number of layers. The last mask also drafts all deeper layers.
        top: for tree="odds": number of likeliest tokens considered under each expanded node, and of nodes expanded per
            layer. None: 10.
        tree: "streamlined": a fixed tree, by acceptance measured in training, in which only the likeliest node of each
            layer branches. "measured": the best fixed tree by this acceptance. "odds": the best tree for each context,
            by the product of the masks' own probabilities.
        least: minimum draft probability of the path to a node that gets masks of its own. If a turn ends at a node without
            masks, the next turn has no draft.
        rule: as in `eagle`.
        controller: as in `opt_tree`; "latency" for tree="odds" only.
    """
    return _tree_of_extra_rows(_BITA, nodes, depth, top, tree, least, rule, controller)


@recipe
def hidden_transfer(
    nodes: int = 12,
    depth: int = 3,
    top: int | None = None,
    tree: TreeBy = "measured",
    least: float = 0.0,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft with predicted hidden states of future tokens, which enter the target's own pass between two layers.

    Law: exact: plain sampling
    Paper: arXiv 2404.12022 (Hidden Transfer); implemented from the paper, because its code is not public

    Code: the maps models/heads/hidden_transfer.py; their rows in the pass models/heads/extra_rows_lm.py and
    engines/kv/late.py; the tree core/control/best_tree.py; the rule core/verify/walk.py.

    Args:
        depth: maximum number of layers. The last map also drafts all deeper layers.
        nodes, top, tree, least, rule, controller: as in `bita`, with predicted states in place of masks.
    """
    return _tree_of_extra_rows(_HIDDEN_TRANSFER, nodes, depth, top, tree, least, rule, controller)


def _tree_of_heads(
    kind: _HeadKind,
    nodes: int,
    depth: int,
    top: int,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    """Return the method of a kind of heads that drafts the tree of the most probable nodes."""
    require_at_least_one(nodes=nodes, depth=depth, top=top)
    drafts = DraftKind(kind.recipe, depth, nodes, layers_within(nodes, top, depth), has_node_budget=True)
    return _for_heads(kind, tree_method(drafts, BestFirst(top, widest=top, within_layer=True), rule, controller))


def _for_heads(kind: _HeadKind, method: Method) -> Method:
    """Return the method restricted to pairs whose draft is a head of this kind."""

    def build(target: LM | None, draft: LM | None) -> Parts:
        _check_kind(kind, draft)
        return method.build(target, draft)

    return replace(method, build=build, head=kind.what)


def _check_kind(kind: _HeadKind, draft: LM | None) -> None:
    """Raise `NotSupported` unless the draft is a head of this kind."""
    head: Head | None = getattr(draft, "head", None)
    if head is None or not kind.includes(head):
        found = type(draft).__name__ if head is None else head.described["kind"].split(":")[0]
        raise NotSupported(
            f"{kind.recipe} drafts with {kind.what}, and the draft of this pair is of kind {found}: {kind.advice}"
        )


def _tree_of_extra_rows(
    kind: _HeadKind,
    nodes: int,
    depth: int,
    top: int | None,
    tree: str,
    least: float,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    """Return the method of a kind of heads that drafts with extra rows in the target's pass."""
    top_or_default = 10 if top is None else top
    require_at_least_one(nodes=nodes, depth=depth, top=top_or_default)
    one_of("tree", tree, get_args(TreeBy))
    refuse_ignored(tree == "odds", f"tree {tree!r}", top=top)
    require_probability(least=least)

    def method_of(ranks: Sequence[Sequence[float]], extra: int) -> Method:
        """Return the method for heads that add `extra` rows below each node."""
        if tree == "odds":
            layers = [size * (1 + extra) for size in layers_within(nodes, top_or_default, depth)]
            drafts = DraftKind(kind.recipe, depth, nodes, tuple(layers), has_node_budget=True)
            growth = BestFirst(top_or_default, widest=top_or_default, within_layer=True)
            return tree_method(drafts, growth, rule, controller)
        rows = [ranks[min(layer, len(ranks) - 1)] for layer in range(depth)]
        topology = ranked_tree(rows, nodes, spine=tree == "streamlined")
        layers = [size * (1 + extra) for size in layers_of(topology)]
        drafts = DraftKind(kind.recipe, depth_of_tree(topology), layers=tuple(layers))
        return tree_method(drafts, FixedTree(topology, Best()), rule, controller)

    def build(target: LM | None, draft: LM | None) -> Parts:
        _check_kind(kind, draft)
        assert isinstance(draft, ExtraLM)
        return method_of(draft.head.ranks or GUESS, draft.head.depth).build(target, draft.choosing(least))

    return replace(method_of(GUESS, depth), build=build, head=kind.what)
