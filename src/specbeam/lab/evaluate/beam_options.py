"""A covering design of the options of beam search: any two values of two options meet on some prompt."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from torch import Tensor

from specbeam import Method, Pair, beam_search, generate
from specbeam.doors import Prompt
from specbeam.lab.evaluate.against_transformers import Comparison, comparisons

CANDIDATES = 200  # number of random rows, of which the best one joins the design
Row = dict[str, Any]  # a value for each option


def covering(values: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Row]:
    """Return a pairwise covering array: few rows in which any two values of two options meet.

    The search is greedy: of many random rows, the one that covers most of the missing pairs comes next.

    Args:
        values: the values of each option; None: the option is not given.
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
        rows = [{name: draw.randrange(len(choice)) for name, choice in values.items()} for _ in range(CANDIDATES)]
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen = {name: values[name][place] for name, place in best.items()}
        design.append({name: value for name, value in chosen.items() if value is not None})
    return design


def _pairs(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
    """Return the pairs that a row covers, as (option, number of its value, other option, number of its value)."""
    return {(one, row[one], other, row[other]) for one, other in combinations(row, 2)}


def option_values(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int) -> dict[str, list[Any]]:
    """Return several values of each option of beam search.

    Banned tokens and end tokens are the tokens that the pair writes most often.

    Args:
        prompts: the first 20 are answered to count the tokens.
        max_new_tokens: the longer of the two lengths.
    """
    answers = generate(pair, prompts[:20], beam_search(2), max_new_tokens=max_new_tokens)
    counts = Counter(token for answer in answers for token in answer.tokens)
    own_end = pair.target_model.generation_config.eos_token_id
    ends = [own_end] if isinstance(own_end, int) else list(own_end or [])
    frequent = [token for token, _ in counts.most_common() if token not in ends]
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
    """A logits processor as users write them: the tokens that it makes less likely depend on the last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed scores, with the shapes of a `transformers.LogitsProcessor`."""
        changed = scores.clone()
        for row, last in zip(changed, input_ids[:, -1].tolist(), strict=True):
            row[last % 7 :: 11] -= 1.5
        return changed


def some_tokens(vocab: int, always: set[int]) -> Callable[[int, Tensor], list[int]]:
    """Return a `prefix_allowed_tokens_fn` that allows all tokens at every third place.

    At the other places it allows every other token, and the tokens in `always`.
    """
    everything = list(range(vocab))
    half = sorted({*range(0, vocab, 2), *always})

    def allowed(number: int, tokens: Tensor) -> list[int]:
        return half if len(tokens) % 3 else everything

    return allowed


@dataclass(frozen=True)
class ComparedRun:
    """A comparison, with the options of its run."""

    options: Row
    comparison: Comparison


def with_every_option(
    pair: Pair, prompts: Sequence[Prompt], methods: Sequence[Method], batch_size: int = 1, max_new_tokens: int = 64
) -> Iterator[ComparedRun]:
    """Yield `comparisons` with the rows of a covering design: each prompt takes the next row of options.

    With fewer prompts than rows, prompts are used again until every row has had a prompt.
    """
    design = covering(option_values(pair, prompts, max_new_tokens))
    for start, options in enumerate(design):
        numbers = [place % len(prompts) for place in range(start, max(len(prompts), len(design)), len(design))]
        batch = [prompts[number] for number in numbers]
        found = comparisons(pair, batch, methods, batch_size, **options)
        for number in numbers:
            for comparison in islice(found, len(methods)):
                yield ComparedRun(options, replace(comparison, prompt=number))
