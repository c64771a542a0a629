"""What a run of turns counts and times, whatever it decodes."""

from typing import NamedTuple

import numpy as np

from specbeam.kernels.compiling import Array, compiled
from specbeam.kernels.cycles import cycles
from specbeam.lm.compiled.one_lane import OneLane
from specbeam.lm.kv.steps import KNOWN, SIZE, STORED

SPAN = 128  # most tokens of a run
TURNS = 32  # most turns of a run: between runs a user can interrupt
PARTS = ("draft", "draft/model", "score/model", "verify", "settle")  # where the time goes
DRAFT, DRAFT_MODEL, SCORE, VERIFY, SETTLE = range(5)
PASSES, DRAFT_PASSES, SCORED, DRAFT_SCORED, ACCEPTED, STEPS, SPANNED, GONE = range(8)


class Books(NamedTuple):
    """Of a run."""

    # int64[8], see above: passes as a session counts them (PASSES, DRAFT_PASSES), and as the models do (SCORED,
    # DRAFT_SCORED); layers that drafts gave; steps; tokens; beams that ended.
    numbers: Array
    time: Array  # int64[5], see above: cycles


class Live(NamedTuple):
    """Beams between two turns."""

    tokens: Array
    scores: Array
    counts: Array
    keys: Array


@compiled
def opened() -> Books:
    """Before the first turn."""
    return Books(np.zeros(8, dtype=np.int64), np.zeros(5, dtype=np.int64))


@compiled
def runs_layers(one: OneLane, nodes: int) -> bool:
    """Whether a pass over a forest of so many nodes runs the layers."""
    books = one.trie.books
    return books[SIZE] > books[STORED] or nodes > books[KNOWN]


@compiled
def drafted_so(books: Books, began: int, passes: int, share: float, waiting: bool) -> None:
    """Book a draft of so many passes, which took that share of the time since `began`.

    Args:
        waiting: the first pass ran the layers, for a root was not stored.
    """
    books.numbers[DRAFT_PASSES] += passes
    books.numbers[DRAFT_SCORED] += passes - (passes > 0 and not waiting)
    took = cycles() - began
    inside = int(share * took) if passes > 0 else 0
    books.time[DRAFT_MODEL] += inside
    books.time[DRAFT] += took - inside
