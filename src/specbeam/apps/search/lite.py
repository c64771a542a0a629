"""LiteSearch: value-guided tree search over reasoning steps, with a limit of draws for each node (arXiv 2407.00320)."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from specbeam import Method, Pair
from specbeam.apps.search.grow import (
    GrowingTrees,
    Wish,
    check_options,
    given_seed,
    is_number,
    require_counts,
    require_odds,
)
from specbeam.apps.search.tree import CLOSED, OPEN, BudgetRule, SearchResult, calibrated
from specbeam.apps.search.value import Value, as_value
from specbeam.doors import require
from specbeam.errors import one_of
from specbeam.models import as_pair
from specbeam.recipes import resolve


def lite_search(
    pair: Pair | str | Path,
    prompts: Any,
    value: "Value | str | Path",
    method: Method | str = "sampling",
    *,
    separator: str = "\n",
    ends: Sequence[str] = (),
    budget: int | None = 4096,
    expand: Literal["incremental", "batch"] = "incremental",
    iterations: int = 100,
    children: int = 10,
    confidence: float = 0.9,
    progress: float = 0.0,
    threshold: float = 0.8,
    step_tokens: int = 64,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    batch_size: int = 32,
    on_progress: Callable[[int, SearchResult], None] | None = None,
    **options: Any,
) -> list[SearchResult]:
    """Search step by step for a text of high value: the most promising node is continued, as often as its value suggests.

    Law: each step is drawn from the method's law of the text after the steps before it, independently of other draws. The
    answer is chosen by value, so no plain decoding has its law.
    Paper: arXiv 2407.00320 (Wang et al.)

    First the greedy text is decoded; it is the answer if its value reaches the threshold. Otherwise iterations follow: the
    open node with the largest v' + progress * depth / (steps of the greedy text) gets one draw, or all its draws. v' is
    its value, calibrated by the value of the greedy text. A node of value v' whose children have depth d may have
    ceil(log(1 - confidence) / (d * log(1 - v'))) draws, between 1 and `children`. A search ends at the first finished
    text whose value reaches the threshold.

    Args:
        pair: the models, from `load`; or a name or path for `load`.
        prompts: one prompt or many, as for `generate`. The searches share passes of the models and calls of the value
            function.
        value: a function that takes a list of texts, each a prompt with the steps so far, and returns a number in [0, 1] for
            each: the probability that the text leads to a right answer, or that a finished text is right. A text of value
            0 is not continued. Or the folder of a sequence classifier of transformers (see `classifier_value`).
        method: the recipe that draws steps, or its name; it must sample. Drafts only change the speed.
        separator: a step ends with the token that completes this text.
        ends: a step that contains one of these texts finishes the text, like the model's end token: for models that continue
            with the next question.
        budget: the most new tokens that are drawn for a prompt, the greedy text included; None: no limit. It is a hard
            limit: the last steps may be cut off.
        expand: "incremental" draws one step per iteration, "batch" all steps that the node may have at once.
        iterations: maximum number of iterations per prompt.
        children: maximum number of draws at a node.
        confidence: the probability with which one of the draws at a node should be right, in (0, 1).
        progress: weight of a node's depth in the choice of nodes, at least 0.
        threshold: the value at which a finished text is the answer, in [0, 1].
        step_tokens: maximum number of tokens of a step. A longer step is cut off, and not continued.
        max_new_tokens: maximum number of tokens of a text; None: 256, or fewer if the models have fewer positions left.
        seed: the same seed gives the same search, independent of other prompts in the call. None: a random seed.
        batch_size: maximum number of texts decoded at the same time.
        on_progress: called with (prompt number, result so far) after each iteration of a prompt.
        options: further options of `generate`: temperature, repetition_penalty, ...

    Returns:
        One `SearchResult` per prompt, in their order.

    Raises:
        BadSetting, NotSupported, BadPrompt: a setting or prompt is invalid; nothing was drawn.
        SearchFailed: the value function failed (with `BrokenValue` as its cause), or the searches of some prompts failed.
            Its `results` have everything that was drawn.
    """
    check_options(lite_search, options)
    one_of("expand", expand, ("incremental", "batch"))
    require_counts(iterations=iterations, children=children)
    require(is_number(confidence) and 0 < confidence < 1, "confidence", confidence, "a number between 0 and 1")
    require_odds(threshold=threshold)
    require(is_number(progress) and progress >= 0, "progress", progress, "a number of at least 0")
    growth = GrowingTrees(
        as_pair(pair), as_value(value), resolve(method), separator, budget, step_tokens, max_new_tokens,
        given_seed(seed), batch_size, options, ends,
    )  # fmt: skip
    rule = BudgetRule(confidence, children)
    growth.begin(prompts)
    growth.draw_greedy()
    rounds = [0] * len(growth.results)
    for number in range(len(growth.results)):
        _end_if_over(growth, number, threshold)
    while True:
        wishes = []
        for number, result in enumerate(growth.results):
            if result.ended:
                continue
            wish = _next_wish(growth, number, rule, progress, expand == "batch")
            if wish is None:
                result.ended = "exhausted"
            elif rounds[number] == iterations:
                result.ended = "iterations"
            else:
                rounds[number] += 1
                wishes.append(wish)
        if not wishes:
            return growth.end()
        growth.extend(wishes)
        for wish in wishes:
            _close_if_spent(growth.results[wish.number], wish.node)
            _end_if_over(growth, wish.number, threshold)
            if on_progress is not None:
                on_progress(wish.number, growth.results[wish.number])


def _next_wish(growth: GrowingTrees, number: int, rule: BudgetRule, progress: float, whole: bool) -> Wish | None:
    """Return the draws of the next iteration; None if no node is open."""
    result = growth.results[number]
    greedy_value = 0.0 if math.isnan(result.greedy_value) else result.greedy_value
    best = -1
    best_score = -math.inf
    for place, node in enumerate(result.nodes):
        if node.status != OPEN:
            continue
        worth = calibrated(node.value, greedy_value, node.depth + 1)
        if node.limit == 0:
            node.limit = rule.limit(worth, node.depth + 1)
        score = worth + progress * node.depth / max(result.greedy_steps, 1)
        if score > best_score:
            best = place
            best_score = score
    if best < 0:
        return None
    node = result.nodes[best]
    return Wish(number, best, node.limit - node.draws if whole else 1)


def _close_if_spent(result: SearchResult, place: int) -> None:
    """Close a node whose draws are spent."""
    node = result.nodes[place]
    if node.status == OPEN and node.draws >= node.limit:
        node.status = CLOSED


def _end_if_over(growth: GrowingTrees, number: int, threshold: float) -> None:
    """End a search whose answer reaches the threshold, or that has no tokens left."""
    result = growth.results[number]
    if result.ended:
        return
    if result.value >= threshold:  # not if it is NaN
        result.ended = "value"
    elif growth.left(number) < 1:
        result.ended = "budget"
