"""Options of beam search in a covering design: any two values of two options meet on some prompt."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from torch import Tensor

from specbeam.evaluate.against_transformers import Comparison, comparisons
from specbeam.generation import Prompt, generate
from specbeam.pair import Pair
from specbeam.recipes.method import Method
from specbeam.recipes.search import beam_search

TRIED = 200  # random rows, the best of which joins the design
Row = dict[str, Any]


def covering(values: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Few rows of options in which every value of one option meets every value of every other: a pairwise covering array.

    Greedy: of many random rows, the one with most pairs that are still missing comes next.
    """
    draw = random.Random(seed)
    missing = {
        (one, a, other, b)
        for one, other in combinations(values, 2)
        for a in range(len(values[one]))
        for b in range(len(values[other]))
    }
    design: list[Row] = []
    while missing:
        rows = [{name: draw.randrange(len(choice)) for name, choice in values.items()} for _ in range(TRIED)]
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        design.append({name: values[name][place] for name, place in best.items() if values[name][place] is not None})
    return design


def _pairs(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
    return {(one, row[one], other, row[other]) for one, other in combinations(row, 2)}


def option_values(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int) -> dict[str, list[Any]]:
    """Values of each option of beam search; tokens that are banned or end texts are those that this pair says most.

    Args:
        prompts: what the pair is asked; the first ones show what it says.
        max_new_tokens: the longer of the two lengths.
    """
    answers = generate(pair, prompts[:20], beam_search(2), max_new_tokens=max_new_tokens)
    said = Counter(token for one in answers for token in one.tokens)
    own_end = pair.target_model.generation_config.eos_token_id
    ends = [own_end] if isinstance(own_end, int) else list(own_end or [])
    frequent = [token for token, _ in said.most_common() if token not in ends]
    frequent += [0] * (3 - len(frequent))
    return {
        "length_penalty": [1.0, 0.0, -0.7, 2.0],
        "early_stopping": [False, True, "never"],
        "eos_token_id": [None, [*ends, frequent[0]]],
        "min_new_tokens": [None, 4, 9],
        "repetition_penalty": [None, 1.3],
        "no_repeat_ngram_size": [None, 2],
        "bad_words_ids": [None, [frequent[0:1], frequent[1:3]]],
        "prefix_allowed_tokens_fn": [None, some_tokens(pair.target.vocab, {*ends, *frequent[:100]})],
        "logits_processor": [None, [AgainstThePast()]],
        "max_new_tokens": [max_new_tokens, max(1, max_new_tokens // 4)],
    }


class AgainstThePast:
    """A processor as users write them: which tokens lose depends on the token before."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Args and result as those of a `transformers.LogitsProcessor`."""
        changed = scores.clone()
        for row, last in zip(changed, input_ids[:, -1].tolist(), strict=True):
            row[last % 7 :: 11] -= 1.5
        return changed


def some_tokens(vocab: int, always: set[int]) -> Callable[[int, Tensor], list[int]]:
    """A `prefix_allowed_tokens_fn`: at two of three places only every other token, and those that are always allowed."""
    everything = list(range(vocab))
    half = sorted({*range(0, vocab, 2), *always})

    def allowed(number: int, tokens: Tensor) -> list[int]:
        return half if len(tokens) % 3 else everything

    return allowed


@dataclass(frozen=True)
class Covered:
    """A comparison, and the options under which it was made."""

    options: Row
    comparison: Comparison


def with_every_option(
    pair: Pair, prompts: Sequence[Prompt], methods: Sequence[Method], batch_size: int = 1, max_new_tokens: int = 64
) -> Iterator[Covered]:
    """`comparisons` with the rows of a covering design, prompt after prompt in turns; with fewer prompts than rows some
    have several turns, so that every row has one.
    """
    design = covering(option_values(pair, prompts, max_new_tokens))
    for start, options in enumerate(design):
        mine = [turn % len(prompts) for turn in range(start, max(len(prompts), len(design)), len(design))]
        asked = [prompts[number] for number in mine]
        found = comparisons(pair, asked, methods, batch_size, **options)
        for number in mine:
            for one in islice(found, len(methods)):
                yield Covered(options, replace(one, prompt=number))
