"""The fast twin of `draws` for candidates of one law (`drawn`): residuals as two numbers instead of vectors.

After refusals since the last taken draw, the residual is (p - c q)^+ / S: c and S say it all. Without
replacement in the draft, q counts only where nothing had been drafted when the present slot began.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from specbeam.dice import Dice
from specbeam.probs import NOTHING
from specbeam.verify.draws import Taken


def draws_fast(
    proposals: Sequence[int],
    masses: Sequence[float],
    q: Float64[np.ndarray, " n"],
    p: Float64[np.ndarray, " n"],
    want: int,
    dice: Dice,
    drafted_with_replacement: bool,
    replacement: bool,
) -> list[Taken]:
    """What ``draws(drawn(proposals, masses, q, ...), p, want, ...)`` does, with one pass over the support per refusal."""
    if not replacement:
        want = min(want, int(np.count_nonzero(p)))
    taken: list[Taken] = []
    slot_p, slot_q = p, q  # target of the present slot, unnormalised; draft law on what was open when it began
    total, c, left = 1.0, 0.0, 1.0  # mass of slot_p; c and S of the residual
    drafted: list[int] = []
    for number, (token, mass) in enumerate(zip(proposals, masses, strict=True)):
        if len(taken) == want:
            break
        here = max(slot_p[token] / total - c * slot_q[token], 0.0) if token >= 0 else 0.0
        accepted = token >= 0 and here > 0 and dice.flip(min(1.0, here * mass / (left * q[token])))
        if token >= 0 and not drafted_with_replacement:
            drafted.append(token)
        if accepted:
            taken.append(Taken(token, number))
            slot_p, total = (p, 1.0) if replacement else _struck(slot_p, total, token)
            slot_q, c, left = _closed(q, drafted), 0.0, 1.0
        else:
            next_c = c + left / mass
            next_left = float(np.maximum(slot_p / total - next_c * slot_q, 0.0).sum())
            if next_left > NOTHING * left:
                c, left = next_c, next_left
    while len(taken) < want:
        token = dice.pick(np.maximum(slot_p / total - c * slot_q, 0.0))
        taken.append(Taken(token, -1))
        slot_p, total = (p, 1.0) if replacement else _struck(slot_p, total, token)
        c = 0.0
    return taken


def _struck(p: Float64[np.ndarray, " n"], total: float, token: int) -> tuple[Float64[np.ndarray, " n"], float]:
    left = p.copy()
    left[token] = 0.0
    return left, max(float(left.sum()), 1e-300)  # not by subtraction: what is left may be tiny


def _closed(q: Float64[np.ndarray, " n"], drafted: list[int]) -> Float64[np.ndarray, " n"]:
    if not drafted:
        return q
    left = q.copy()
    left[drafted] = 0.0
    return left
