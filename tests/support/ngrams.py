"""Letter n-grams of this repository's licence: a target of order 6 and a draft of order 4 (Witten-Bell smoothing)."""

from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import numpy as np

TEXT = Path(__file__).parent.parent.parent / "LICENSE"


@cache
def ngram_tables(target_order=6, draft_order=4):
    """Odds of the next letter after a path, from its last letters."""
    text = " ".join(TEXT.read_text(encoding="utf-8").lower().split())
    letters = sorted(set(text))
    tokens = [letters.index(letter) for letter in text]
    return _table(tokens, len(letters), target_order), _table(tokens, len(letters), draft_order)


def _table(tokens, vocab, order):
    counts = defaultdict(Counter)
    for size in range(order):
        for place in range(size, len(tokens)):
            counts[tuple(tokens[place - size : place])][tokens[place]] += 1

    @cache
    def law(context):
        lower = law(context[1:]) if context else np.full(vocab, 1 / vocab)
        seen = counts.get(context)
        if seen is None:
            return lower
        total, kinds = sum(seen.values()), len(seen)
        odds = kinds * lower
        for token, count in seen.items():
            odds[token] += count
        return odds / (total + kinds)

    return lambda path: law(tuple(path[-(order - 1) :]) if order > 1 else ())
