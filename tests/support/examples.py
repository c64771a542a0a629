"""The two reference models on three tokens, as exact fractions, and one-turn programs over any pair of tables."""

from fractions import Fraction

import numpy as np

from specbeam.models.table import TableLM
from tests.support.exact import exact_law
from tests.support.programs import session_of

EX3 = ((Fraction(3, 10), Fraction(4, 10), Fraction(3, 10)), (Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)))
EX3M_P = {
    None: (Fraction(3, 10), Fraction(4, 10), Fraction(3, 10)),
    0: (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)),
    1: (Fraction(1, 5), Fraction(1, 5), Fraction(3, 5)),
    2: (Fraction(7, 10), Fraction(1, 5), Fraction(1, 10)),
}
EX3M_Q = {
    None: (Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)),
    0: (Fraction(1, 4), Fraction(1, 2), Fraction(1, 4)),
    1: (Fraction(2, 5), Fraction(2, 5), Fraction(1, 5)),
    2: (Fraction(1, 2), Fraction(1, 10), Fraction(2, 5)),
}


def table(rows):
    """Odds after a path, from its last token."""
    rows = {key: np.array([float(x) for x in row]) for key, row in rows.items()}
    return lambda path: rows[path[-1] if path else None]


def constant(row):
    law = np.array([float(x) for x in row])
    return lambda path: law


PAIRS = {
    "EX3": (constant(EX3[0]), constant(EX3[1])),
    "EX3M": (table(EX3M_P), table(EX3M_Q)),
}


def one_turn(parts_of, target, draft, eos=(), steps=20, warp=None):
    """A program: one turn from the empty path. The outcome is the emitted tokens and how many of them were drafted.

    `warp` makes the warp of a session.
    """

    def program(dice):
        lm = TableLM(draft)
        session = session_of(parts_of(lm), lm, dice, steps, eos, warp=warp and warp())
        forest = session.parts.drafter.draft([session], [session.parts.controller.plan(session)])[0]
        scored = TableLM(target).extend([session], [forest])[0].logits
        verdict = session.parts.rule.verify(session, forest, scored)
        return tuple(int(step.beams.tokens[0]) for step in verdict.steps), verdict.accepted

    return program


def law_and_mean(program, target, length, eos=()):
    """The law of the first `length` tokens, completed by the target, and the mean number of accepted drafts."""
    law: dict[tuple[int, ...], float] = {}
    mean = 0.0
    for (tokens, accepted), odds in exact_law(program).items():
        mean += odds * accepted
        for text, rest in completed(target, tokens[:length], length, eos).items():
            law[text] = law.get(text, 0.0) + odds * rest
    return law, mean


def completed(target, tokens, length, eos=()):
    """Law of texts of that length that begin with `tokens`, by plain sampling; an end token ends a text."""
    if len(tokens) == length or (tokens and tokens[-1] in eos):
        return {tokens: 1.0}
    law: dict[tuple[int, ...], float] = {}
    for token, odds in enumerate(target(tokens)):
        if odds > 0:
            for text, rest in completed(target, (*tokens, token), length, eos).items():
                law[text] = law.get(text, 0.0) + float(odds) * rest
    return law
