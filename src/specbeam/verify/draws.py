"""VERIFY: the kernel. Take draws from the target's law, reusing draft draws where possible.

One lemma serves everything: a candidate of law q is accepted with odds min(1, r/q); after a refusal the missing mass is
norm((r - q)^+). Whatever is emitted in the end has law r (docs/exactness.md).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from specbeam.dice import Dice
from specbeam.probs import residual

Law = Float64[np.ndarray, " n"]


Watch = Callable[[Law, Law, bool], None]


class Candidate(NamedTuple):
    """A draft draw on trial."""

    token: int  # index into the target law; -1 for one that it cannot contain, because its parent is dead
    law: Law  # the law it was drawn from, given all draws before it; sums to at most 1 on the target's indices


@dataclass(frozen=True)
class Taken:
    """What came of one draw."""

    token: int  # index into the law
    draft: int  # which candidate it was; -1 if it was drawn in place of the refused ones


def draws(
    candidates: Iterable[Candidate],
    p: Law,
    want: int,
    dice: Dice,
    replacement: bool = True,
    watch: Watch | None = None,
) -> list[Taken]:
    """`want` draws from `p`, with or without `replacement`, in order.

    Candidates are looked at one by one and only as far as needed. `p` is float64[n] and sums to 1. `watch` is told of every
    trial: the law still wanted, the candidate's law, whether it was accepted.

    Law: `want` independent draws from p, or successive draws without replacement (fewer if p's support is smaller).
    Source: speculative sampling (arXiv 2211.17192) for one candidate and one draw; SpecInfer (2305.09781) and RSD
    (2402.14160) for several candidates; DSBD (2409.16560, alg. 1), corrected, for several draws.
    """
    if not replacement:
        want = min(want, int(np.count_nonzero(p)))
    taken: list[Taken] = []
    rest, open_p = p, p
    for number, (token, law) in enumerate(candidates):
        if len(taken) == want:
            break
        accepted = bool(token >= 0 and rest[token] > 0 and dice.flip(_ratio(rest[token], law[token])))
        if watch is not None:
            watch(rest, law, accepted)
        if accepted:
            taken.append(Taken(token, number))
            open_p = rest = p if replacement else _without(open_p, token)
        else:
            rest = residual(rest, law)
    while len(taken) < want:
        token = dice.pick(rest)
        taken.append(Taken(token, -1))
        open_p = rest = p if replacement else _without(open_p, token)
    return taken


def drawn(tokens: Sequence[int], masses: Sequence[float], q: Law, replacement: bool) -> Iterator[Candidate]:
    """Candidates that were drawn from `q`, independently or each struck out once drawn.

    Args:
        tokens: in draw order; -1 where the parent is dead.
        masses: of the draft law before each draw, without those drawn before; dead ones count, which `q` does not show. 1
            with replacement.
        q: draft law on the target's indices, float64[n]; sums to 1 less the odds of dead pairs.
    """
    law = q
    for token, mass in zip(tokens, masses, strict=True):
        yield Candidate(token, law if mass == 1.0 else law / mass)
        if not replacement and token >= 0:
            law = _struck(law, token)


def _struck(q: Law, token: int) -> Law:
    left = q.copy()
    left[token] = 0.0
    return left


def sure(tokens: Sequence[int], size: int) -> Iterator[Candidate]:
    """Candidates that were not drawn but chosen: each has all the mass of its law."""
    for token in tokens:
        law = np.zeros(size)
        if token >= 0:
            law[token] = 1.0
        yield Candidate(token, law)


def _ratio(r: float, q: float) -> float:
    """Odds of acceptance. A draw whose odds were rounded away to 0 is judged as if they were tiny."""
    return min(1.0, r / q) if q > 0.0 else 1.0


def _without(p: Law, token: int) -> Law:
    """p after `token` was drawn from it for good."""
    left = p.copy()
    left[token] = 0.0
    total = left.sum()
    return left / total if total > 0 else left
