"""A search on prompts for the sublayers that drafts of a target should skip: `specbeam tune --skip-ratio`."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from specbeam import Pair, Skipping, generate
from specbeam.core import Forest
from specbeam.errors import BadSetting
from specbeam.models import SkippingLM, Sublayers, chosen, skipping_model

SEED = 0x0FF


@dataclass(frozen=True)
class FoundSublayers:
    """The result of a search on prompts.

    Attributes:
        skipped: the best set.
        matchness: the share of the target's tokens that are the likeliest without these sublayers, too.
        first: the matchness of the initial set.
        tries: number of sets that were tried.
        tokens: number of tokens that each set was tried on.
    """

    skipped: Sublayers
    matchness: float
    first: float
    tries: int
    tokens: int


def best_sublayers(
    pair: Pair,
    prompts: Sequence[str | list[int]],
    settings: Skipping | None = None,
    tries: int = 200,
    max_new_tokens: int = 32,
    seed: int = 0,
) -> FoundSublayers:
    """Search for the sublayers to skip in drafts, on the target's answers to these prompts (Draft & Verify).

    The answers are decoded greedily. The result is stored like a finished search on texts: drafts with the same settings
    use it.

    Args:
        settings: settings of a search, "bayes" or "random"; None: the settings of `swift`.
        tries: maximum number of sets to try; the search may end earlier by its own rule.

    Raises `BadSetting` if the settings name a set, or a prompt has no answer of two tokens.
    """
    draft = skipping_model(pair.forgetful_target, settings)
    if draft.memory is None:
        raise BadSetting(f"skip is {draft.settings.skip!r}, which is not a search; give 'bayes' or 'random'")
    answers = generate(pair, list(prompts), "greedy", max_new_tokens=max_new_tokens, seed=seed)
    texts = [StoredAnswer(draft, one.prompt, one.tokens) for one in answers if len(one.tokens) > 1]
    if not texts:
        raise BadSetting(f"none of {len(answers)} prompts has an answer of at least two tokens")
    begun = draft.memory.begin()
    found = begun.copy()
    stream = np.random.Generator(np.random.Philox(key=seed ^ SEED))
    first = 0.0
    try:
        while found.tries - begun.tries < tries and not found.is_over(draft.search):
            choice = found.next(draft.search, stream)
            matchness = mean_matchness(texts, chosen(choice))
            first = first or matchness
            found.learn(choice, matchness)
    finally:
        for text in texts:
            text.close()
    draft.memory.end(begun, found)
    draft.memory.rest(draft.search)
    tokens = sum(len(text) for text in texts)
    return FoundSublayers(chosen(found.best), found.matchness, first, found.tries - begun.tries, tokens)


class StoredAnswer:
    """An answer of the target in its KV cache, on which sets of sublayers are tried."""

    def __init__(self, draft: SkippingLM, prompt: list[int], tokens: list[int]) -> None:
        self.draft = draft
        self.owner: Any = SimpleNamespace(prompt=[*prompt, *tokens], state={})
        self.position = len(prompt) - 1
        self.window = np.array(self.owner.prompt[self.position :])
        draft.lm.extend([self.owner], [Forest.rooted(tokens[-1:])])

    def __len__(self) -> int:
        return len(self.window) - 1

    def matchness(self, skipped: Sublayers) -> float:
        """Return the share of its tokens that are the target's likeliest without these sublayers."""
        cache = self.owner.state[self.draft.lm]
        return self.draft.matchness(cache, cache.trie.leaf(0), self.position, self.window, skipped)

    def close(self) -> None:
        """Free the cache."""
        self.draft.lm.close(self.owner)


def mean_matchness(texts: Sequence[StoredAnswer], skipped: Sublayers) -> float:
    """Return the share of all tokens of some answers that are the target's likeliest without these sublayers."""
    right = sum(text.matchness(skipped) * len(text) for text in texts)
    return right / sum(len(text) for text in texts)
