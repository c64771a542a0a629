"""Recipes for one sequence without a draft model: drafts come from the text so far, or from past predictions."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from specbeam.core.draft.lookup import PromptLookup, SuffixMatch
from specbeam.core.draft.recycle import Ranks, Successors, TokenRecycling, likeliest
from specbeam.core.errors import BadSetting, one_of
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Parts, Rule, law_of
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, controller_maker, rule_of
from specbeam.recipes.method import Method, require_at_least_one

NO_STOP_REASON = "finds a whole draft at once, without odds"  # completes "RECIPE ..."


def prompt_lookup(
    depth: int = 8,
    longest: int = 3,
    match: Literal["last", "first"] = "last",
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Find the last tokens earlier in the text, and draft what followed them there; no draft model.

    Law: exact: plain sampling
    Paper: none; prompt lookup decoding (Saxena 2023)

    Steps of the released code: find draft/indexes.py; continue draft/retrieval.py; compare verify/walk.py.

    Args:
        depth: number of draft tokens per pass of the target.
        longest: number of last tokens that are looked up at first; if they have no match, one less, down to one.
        match: which earlier place to continue if there are several, "last" or "first".
        rule: "match" only, because the law of retrieved drafts is unknown; or a part that does not need to know it.
        controller: the controller that chooses the length of a draft: "fixed", "thompson", "cost"
            (docs/methods/controllers.md), or a part that plans the length in advance.
    """
    require_at_least_one(depth=depth, longest=longest)
    one_of("match", match, ("last", "first"))
    return _retrieval_method("prompt_lookup", PromptLookup(longest, match), depth, rule, controller)


def suffix_match(
    depth: int = 16,
    per_match: float = 4.0,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Find the longest end of the text that occurred before, of any length, and draft what followed it there; no draft
    model.

    Law: exact: plain sampling
    Paper: arXiv 2411.10666 (SAM-Decoding)

    Steps of the paper: suffix automaton draft/suffixes.py; compare verify/walk.py.

    Args:
        depth: maximum number of draft tokens per pass of the target.
        per_match: number of draft tokens per matched token, in addition to one that is always drafted.
        rule: "match" only, because the law of retrieved drafts is unknown; or a part that does not need to know it.
        controller: the controller that chooses the length of a draft: "fixed", "thompson", "cost"
            (docs/methods/controllers.md), or a part that plans the length in advance.
    """
    require_at_least_one(depth=depth)
    if per_match < 0:
        raise BadSetting(f"per_match is {per_match}; it must not be negative")
    return _retrieval_method("suffix_match", SuffixMatch(per_match), depth, rule, controller)


def token_recycling(
    depth: int = 6,
    memory: Successors | None = None,
    k: int = 8,
    nodes: int = 80,
    rule: "RuleName | Rule" = "match",
    controller: "ControllerName | Controller" = "fixed",
) -> Method:
    """Keep a table of the tokens that the target last thought likeliest after each token, and draft from it; no draft
    model.

    Law: exact: plain sampling
    Paper: arXiv 2408.08696 (Luo et al.)

    Steps of the paper: adjacency matrix, static tree and update draft/recycle.py; compare verify/walk.py.

    Args:
        depth: number of layers of the static tree that are used.
        memory: a table to start from, which is updated while decoding (`Successors.load` reads one). None: a new table per
            method and vocabulary.
        k: number of likeliest successors per token in a new table.
        nodes: number of nodes of the published tree of 80 that are used, those of the smallest rank sum plus depth. Choose
            fewer where each scored node costs time.
        rule: "match" only, because the law of retrieved drafts is unknown; or a part that does not need to know it.
        controller: the controller that chooses the length of a draft: "fixed", "thompson", "cost"
            (docs/methods/controllers.md), or a part that plans the length in advance.
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
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    make_controller = controller_maker(controller, drafts)
    tables: dict[int, Successors] = {}  # by vocabulary size

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert target is not None
        table = memory or tables.setdefault(target.vocab, Successors.empty(target.vocab, k))
        if len(table.table) != target.vocab:
            raise BadSetting(
                f"memory holds {len(table.table)} tokens, the target knows {target.vocab}; it is another model's table"
            )
        return Parts(TokenRecycling(table, ranks), judge, make_controller(target, None), law)

    return Method("token_recycling", law, 1, build)


def _retrieval_method(
    name: str,
    drafter: PromptLookup | SuffixMatch,
    depth: int,
    rule: "RuleName | Rule",
    controller: "ControllerName | Controller",
) -> Method:
    """Return the method `name` whose drafts are chains that `drafter` retrieves."""
    drafts = DraftKind(name, depth, layers=(1,), no_law_reason=drafter.no_law_reason, no_stop_reason=NO_STOP_REASON)
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    make_controller = controller_maker(controller, drafts)
    return Method(name, law, 1, lambda target, draft: Parts(drafter, judge, make_controller(target, None), law))


def _layers(ranks: Sequence[Ranks]) -> tuple[int, ...]:
    """Return the number of nodes of each layer of a static tree."""
    sizes = Counter(map(len, ranks))
    return tuple(sizes[depth] for depth in range(1, max(sizes) + 1))
