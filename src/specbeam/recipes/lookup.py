"""Recipes for one sequence without a draft model: drafts come from the text so far or from past predictions."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from specbeam.core.draft.lookup import PromptLookup, SuffixMatch
from specbeam.core.draft.recycle import Ranks, Successors, TokenRecycling, likeliest
from specbeam.core.errors import BadSetting, one_of
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Rule
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, sequence_method
from specbeam.recipes.method import Method, recipe, require_at_least_one

NO_STOP_REASON = "finds a whole draft at once, without probabilities"  # see `DraftKind`


@recipe
def prompt_lookup(
    depth: int = 8,
    longest: int = 3,
    match: Literal["last", "first"] = "last",
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Find an earlier occurrence of the last tokens of the text, and draft its continuation; no draft model.

    Law: exact: plain sampling
    Paper: none; prompt lookup decoding (Saxena 2023)

    Code: lookup core/draft/indexes.py; continuation core/draft/retrieval.py; the rule core/verify/walk.py.

    Args:
        depth: number of draft tokens per pass of the target.
        longest: maximum number of last tokens to look up; without a match one fewer is tried, down to one.
        match: which of several matches to continue, "last" or "first".
        rule: "match", or a part that does not need the law of drafts, which is unknown for retrieved ones.
        controller: the controller that chooses the length of a draft: "auto" (as many tokens as pay by acceptance and the
            cost of rows), "fixed", "thompson", "cost" (docs/methods/controllers.md), or a part that plans the length in
            advance.
    """
    require_at_least_one(depth=depth, longest=longest)
    one_of("match", match, ("last", "first"))
    return _retrieval_method("prompt_lookup", PromptLookup(longest, match), depth, rule, controller)


@recipe
def suffix_match(
    depth: int = 16,
    per_match: float = 4.0,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Find the longest suffix of the text that occurred before, and draft its continuation; no draft model.

    Law: exact: plain sampling
    Paper: arXiv 2411.10666 (SAM-Decoding)

    Code: suffix automaton core/draft/suffixes.py; the rule core/verify/walk.py.

    Args:
        depth: maximum number of draft tokens per pass of the target.
        per_match: number of draft tokens per matched token, in addition to the first one.
        rule, controller: as in `prompt_lookup`.
    """
    require_at_least_one(depth=depth)
    if per_match < 0:
        raise BadSetting(f"per_match is {per_match}; it must not be negative")
    return _retrieval_method("suffix_match", SuffixMatch(per_match), depth, rule, controller)


@recipe
def token_recycling(
    depth: int = 6,
    memory: Successors | None = None,
    k: int = 8,
    nodes: int = 80,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "auto",
) -> Method:
    """Draft from a table of the target's latest likeliest successors of each token; no draft model.

    Law: exact: plain sampling
    Paper: arXiv 2408.08696 (Luo et al.)

    Code: adjacency matrix, static tree and update core/draft/recycle.py; the rule core/verify/walk.py.

    Args:
        depth: maximum number of layers.
        memory: the initial table, which decoding updates (`Successors.load` reads one). None: a new table per method and
            vocabulary.
        k: number of successors per token in a new table.
        nodes: number of nodes of the published tree of 80 to use: those with the smallest rank sum plus depth. Choose fewer
            where each scored node costs time.
        rule, controller: as in `prompt_lookup`.
    """
    require_at_least_one(depth=depth, k=k, nodes=nodes)
    if nodes > 80:
        raise BadSetting(f"nodes is {nodes}; the published tree has 80")
    ranks = likeliest(nodes)
    drafts = DraftKind(
        "token_recycling",
        depth,
        layers=_layers(ranks),
        no_law_reason=TokenRecycling.no_law_reason,
        no_stop_reason=NO_STOP_REASON,
    )
    tables: dict[int, Successors] = {}  # by vocabulary size

    def make_drafter(target: LM | None, draft: LM | None) -> TokenRecycling:
        assert target is not None
        table = memory or tables.setdefault(target.vocab, Successors.empty(target.vocab, k))
        if len(table.table) != target.vocab:
            raise BadSetting(
                f"memory holds {len(table.table)} tokens, but the target's vocabulary has {target.vocab}; pass a table of "
                "the same vocabulary"
            )
        return TokenRecycling(table, ranks)

    return sequence_method(drafts, make_drafter, rule, controller, needs_draft=False)


def _retrieval_method(
    name: str,
    drafter: PromptLookup | SuffixMatch,
    depth: int,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    """Return the method `name`, whose drafts are chains retrieved by `drafter`."""
    drafts = DraftKind(name, depth, layers=(1,), no_law_reason=drafter.no_law_reason, no_stop_reason=NO_STOP_REASON)
    return sequence_method(drafts, lambda target, draft: drafter, rule, controller, needs_draft=False)


def _layers(ranks: Sequence[Ranks]) -> tuple[int, ...]:
    """Return the number of nodes of each layer of a static tree."""
    sizes = Counter(map(len, ranks))
    return tuple(sizes[depth] for depth in range(1, max(sizes) + 1))
