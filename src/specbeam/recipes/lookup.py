"""Recipes for one sequence without a draft model: drafts are found in what was read, written or nearly said before."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from specbeam.draft.lookup import PromptLookup, SuffixMatch
from specbeam.draft.recycle import Ranks, Successors, TokenRecycling, likeliest
from specbeam.errors import BadSetting, one_of
from specbeam.lm.base import LM
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, control_of, rule_of
from specbeam.recipes.method import Method, at_least_one
from specbeam.session import Controller, Parts, Rule, law_of

UNSTOPPABLE = "finds a whole draft at once, without odds"


def prompt_lookup(
    depth: int = 8,
    longest: int = 3,
    match: Literal["last", "first"] = "last",
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Continue an earlier match of the last tokens; no draft model.

    Law: exact: plain sampling
    Paper: none; prompt lookup decoding (Saxena 2023)

    Steps of the released code: find and continue draft/lookup.py; compare verify/walk.py.

    Args:
        depth: draft tokens per pass of the target.
        longest: tokens that are tried to agree, from many to one.
        match: which of several earlier places to continue, "last" or "first".
        rule: "match" alone: nobody knows the law of what was found.
        controller: who chooses the length: "fixed", "thompson", "cost", or a part that plans ahead.
    """
    at_least_one(depth=depth, longest=longest)
    one_of("match", match, ("last", "first"))
    return _retrieving("prompt_lookup", PromptLookup(longest, match), depth, rule, controller)


def suffix_match(
    depth: int = 16,
    per_match: float = 4.0,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Continue the longest earlier match of any length; no draft model.

    Law: exact: plain sampling
    Paper: arXiv 2411.10666 (SAM-Decoding)

    Steps of the paper: suffix automaton draft/lookup.py; compare verify/walk.py.

    Args:
        depth: most draft tokens per pass of the target.
        per_match: draft tokens per matched token, one in any case.
        rule: "match" alone: nobody knows the law of what was found.
        controller: who chooses the length: "fixed", "thompson", "cost", or a part that plans ahead.
    """
    at_least_one(depth=depth)
    if per_match < 0:
        raise BadSetting(f"per_match is {per_match}; it must not be negative")
    return _retrieving("suffix_match", SuffixMatch(per_match), depth, rule, controller)


def token_recycling(
    depth: int = 6,
    memory: Successors | None = None,
    k: int = 8,
    nodes: int = 80,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """What the target nearly said is remembered in a table of successors and drafted again; no draft model.

    Law: exact: plain sampling
    Paper: arXiv 2408.08696 (Luo et al.)

    Steps of the paper: adjacency matrix, static tree and update draft/recycle.py; compare verify/walk.py.

    Args:
        depth: layers of the static tree that are used.
        memory: a table to start from and to go on with (`Successors.load`); by default one per method and vocabulary.
        k: successors per token of a new table.
        nodes: of the published tree of 80 those of smallest rank sum plus depth; fewer where a node costs time.
        rule: "match" alone: nobody knows the law of what was found.
        controller: who chooses the length: "fixed", "thompson", "cost", or a part that plans ahead.
    """
    at_least_one(depth=depth, k=k, nodes=nodes)
    if nodes > 80:
        raise BadSetting(f"nodes is {nodes}; the published tree has 80")
    ranks = likeliest(nodes)
    drafts = DraftKind(
        "token_recycling",
        depth,
        layers=_layers(ranks),
        no_law_reason=TokenRecycling.no_law_reason,
        unstoppable=UNSTOPPABLE,
    )
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    control = control_of(controller, drafts)
    kept: dict[int, Successors] = {}

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert target is not None
        table = memory or kept.setdefault(target.vocab, Successors.empty(target.vocab, k))
        if len(table.table) != target.vocab:
            raise BadSetting(
                f"memory holds {len(table.table)} tokens, the target knows {target.vocab}; it is another model's table"
            )
        return Parts(TokenRecycling(table, ranks), judge, control(target, None), law)

    return Method("token_recycling", law, 1, build)


def _retrieving(
    name: str,
    drafter: PromptLookup | SuffixMatch,
    depth: int,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    drafts = DraftKind(name, depth, layers=(1,), no_law_reason=drafter.no_law_reason, unstoppable=UNSTOPPABLE)
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    control = control_of(controller, drafts)
    return Method(name, law, 1, lambda target, draft: Parts(drafter, judge, control(target, None), law))


def _layers(ranks: Sequence[Ranks]) -> tuple[int, ...]:
    """Nodes of each layer of a static tree."""
    sizes = Counter(map(len, ranks))
    return tuple(sizes[depth] for depth in range(1, max(sizes) + 1))
