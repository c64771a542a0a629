"""The law of the next token after a node, on the tokens that a truncation keeps."""

from typing import NamedTuple

import numpy as np

from specbeam.core.laws.ranking import Truncation, ascending, cuts, kept_of_rows, kept_pairs
from specbeam.core.laws.reduce import BROKEN, condition_of_row, exponentials, log_norm
from specbeam.core.noise import gumbel
from specbeam.core.ranked import Ranked, are_whole
from specbeam.core.steps import Array, step

NO_SHIFT = np.zeros(1)


class RowLaw(NamedTuple):
    """The law of one token, on the tokens that a truncation keeps, often a few of many thousands.

    >>> law = RowLaw(np.array([3, 7]), np.log([0.25, 0.75]), 10)
    >>> [law.place(token) for token in (3, 7, 4)], law.at([4, 7]).tolist()
    ([0, 1, -1], [0.0, 0.75])
    """

    tokens: Array  # int64[n]: tokens of `logp`, ascending; empty: the whole vocabulary
    logp: Array  # float64[n]: log-probabilities
    vocab: int  # vocabulary size

    @property
    def p(self) -> Array:
        """The probabilities, float64[n]."""
        return exponentials(self.logp)

    @property
    def size(self) -> int:
        """The number of tokens of the law."""
        return len(self.logp)

    @property
    def possible(self) -> bool:
        """Whether any token has a probability above 0."""
        return len(self.logp) > 0 and bool(self.logp.max() > -np.inf)

    def token(self, place: int) -> int:
        """Return the token of `logp[place]`."""
        return int(self.tokens[place]) if len(self.tokens) else int(place)

    def tokens_at(self, places: Array) -> Array:
        """Return the tokens of `logp[places]`, int64[n]."""
        places = np.asarray(places, dtype=np.int64)
        return self.tokens[places] if len(self.tokens) else places

    def place(self, token: int) -> int:
        """Return the index of a token in `logp`; -1 if the law does not include it."""
        return int(place_in(self.tokens, token))

    def at(self, tokens: Array) -> Array:
        """Return the probabilities of tokens, float64[n]."""
        places = np.array([self.place(token) for token in tokens], dtype=np.int64)
        return np.where(places >= 0, self.p[places] if self.size else 0.0, 0.0)

    def spread(self) -> "RowLaw":
        """Return the same law on the whole vocabulary."""
        if len(self.tokens) == 0:
            return self
        logp = np.full(self.vocab, -np.inf)
        logp[self.tokens] = self.logp
        return RowLaw(self.tokens[:0], logp, self.vocab)


@step
def place_in(tokens: Array, token: int) -> int:
    """Return the index of a token in ascending `tokens`, -1 if it is missing; empty `tokens` are the whole vocabulary."""
    if len(tokens) == 0:
        return token
    place = int(np.searchsorted(tokens, token))
    if place < len(tokens) and tokens[place] == token:
        return place
    return -1


@step
def token_at(law: RowLaw, place: int) -> int:
    """Return the token of `law.logp[place]`."""
    return law.tokens[place] if len(law.tokens) > 0 else place


@step
def any_broken(rows: Array) -> bool:
    """Return whether any row of logits, float32 or float64[rows, vocab], is BROKEN."""
    found = False
    for row in rows:
        found |= condition_of_row(row) == BROKEN
    return found


@step
def row_law(row: Array, truncation: Truncation) -> RowLaw:
    """Return the truncated law of a row of logits, float[vocab], which must be SOUND."""
    rows = row.reshape(1, len(row))
    temperature = truncation.temperature
    scaled = rows
    if temperature != 1:
        scaled = rows / row.dtype.type(temperature)
    nothing = np.empty(0, dtype=np.int64)
    if not cuts(truncation):
        return RowLaw(nothing, scaled[0].astype(np.float64) - log_norm(scaled)[0], len(row))
    log_total = np.nan
    if truncation.top_k == 0:
        log_total = log_norm(scaled)[0]
    tokens = ascending(kept_pairs(rows, NO_SHIFT, 0.0, truncation, log_total))
    return RowLaw(tokens, _normalised(row, tokens, temperature), len(row))


@step
def _normalised(row: Array, places: Array, temperature: float) -> Array:
    """Return the log-probabilities of the law on these places of a row alone, float64[places]."""
    logp = np.empty(len(places))
    for number in range(len(places)):
        logp[number] = np.float64(row[places[number]]) / temperature
    top = logp.max()
    total = np.exp(logp - top).sum()
    return logp - (top + np.log(total))


@step
def law_of_row(rows: Ranked, number: int, truncation: Truncation) -> RowLaw:
    """Return the truncated law of row `number`, which must be SOUND; a law without tokens if a list does not decide it."""
    if are_whole(rows):
        return row_law(rows.logits[number], truncation)
    none = np.empty(0, dtype=np.int64)
    undecided = RowLaw(none, np.empty(0), rows.vocab)
    if rows.by_noise or not cuts(truncation):
        return undecided
    log_total = np.nan
    if truncation.top_k == 0:
        log_total = rows.warm[number]
    listed = rows.logits[number : number + 1]
    rest = rows.rest[number : number + 1]
    kept, is_decided = kept_of_rows(listed, rest, NO_SHIFT, 0.0, truncation, log_total)
    if not is_decided:
        return undecided
    places = ascending(kept)
    logp = _normalised(listed[0], places, truncation.temperature)
    return RowLaw(rows.tokens[number][places], logp, rows.vocab)


@step
def is_law_decided(law: RowLaw) -> bool:
    """Return whether a law was decided; see `law_of_row`."""
    return len(law.logp) > 0


@step
def logit_of(rows: Ranked, number: int, token: int) -> float:
    """Return the logit of a token in row `number`, which must list it."""
    if are_whole(rows):
        return np.float64(rows.logits[number, token])
    return np.float64(rows.logits[number, place_in(rows.tokens[number], token)])


@step
def best_token(row: Array) -> int:
    """Return the token of the largest logit, the first one if several are equal."""
    return int(row.argmax())


@step
def best_token_of_row(rows: Ranked, number: int) -> int:
    """Return the token of the largest logit of row `number`, the first one if several are equal; -1 if undecided."""
    place = best_token(rows.logits[number])
    if are_whole(rows):
        return place
    if rows.by_noise or not rows.logits[number, place] >= rows.rest[number]:
        return -1
    return rows.tokens[number, place]


@step
def best_under_noise(rows: Ranked, number: int, tokens: Array, temperature: float, key: Array) -> tuple[int, float]:
    """Return the token of largest logit / temperature + noise, and this value; -1 if all logits are -inf.

    Args:
        tokens: int64[n], ascending, tokens of row `number`.
        key: uint64, of the path that the row continues.
    """
    best = -1
    most = -np.inf
    for token in tokens:
        logit = logit_of(rows, number, token)
        if logit > -np.inf:
            value = logit / temperature + gumbel(key, token)
            if value > most:
                most = value
                best = token
    return best, most


@step
def greedy_law(token: int, vocab: int) -> RowLaw:
    """Return the law of temperature 0: probability 1 for the best token."""
    return RowLaw(np.full(1, token), np.zeros(1), vocab)


@step
def odds_on(tokens: Array, size: int, law_tokens: Array, law_p: Array) -> Array:
    """Return the probabilities of `tokens`, float64[size], under a law on other tokens.

    Args:
        tokens: ascending; empty: the whole vocabulary, of `size` tokens.
        law_tokens, law_p: the tokens of the law, ascending, and their probabilities; no tokens: the whole vocabulary.
    """
    if len(law_tokens) == 0:
        return law_p.copy() if len(tokens) == 0 else law_p[tokens]
    p = np.zeros(size)
    if len(tokens) == 0:
        for place in range(len(law_tokens)):
            p[law_tokens[place]] = law_p[place]
        return p
    place = 0
    for wanted in range(size):
        while place < len(law_tokens) and law_tokens[place] < tokens[wanted]:
            place += 1
        if place < len(law_tokens) and law_tokens[place] == tokens[wanted]:
            p[wanted] = law_p[place]
    return p
