"""Whole decodings on tables, as programs for the exact-law tool."""

import numpy as np

from specbeam.core.decode import decode
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.session import Session
from specbeam.models.table import TableLM
from tests.support.steps import source_of_steps


def random_table(seed, vocab, depth=6, zeros=False):
    """Odds of the next token after every path, by a hash of the path."""
    laws = {}

    def table(path):
        if path not in laws:
            rng = np.random.default_rng([seed, *[token + 1 for token in path]])
            law = rng.dirichlet(np.ones(vocab))
            if zeros:
                law[rng.integers(vocab)] = 0
            laws[path] = law / law.sum()
        return laws[path]

    return table


def session_of(method, draft, dice=None, steps=3, eos=(), key=0, warp=None, **limits):
    session = Session([0], method.parts(None, draft), warp or Warp(), Limits(steps, tuple(eos), keep=99, **limits), key)
    if dice is not None:
        session.dice = dice
    return session


def run(session, target):
    turns = []
    with source_of_steps():  # nothing is compiled for tables of a few float64 numbers
        for rounds in decode(target, [session]):
            turns += [turn for _, turn in rounds]
    if session.failure:
        raise session.failure
    return turns


def texts(session, replacement=False):
    """(ended texts, live texts) in the form of `beam_sampling_law`."""
    ended = [tuple(one.tokens) for one in session.ended]
    live = [tuple(one.tokens) for one in session.hypotheses() if not one.finished]
    return tuple(ended), tuple(sorted(live)) if replacement else tuple(live)


def outcome_of(method, target, draft, steps, eos=(), replacement=False, warp=None):
    """A program for `exact_law`: decode `steps` tokens, return the texts. `warp` makes the warp of a session."""

    def program(dice):
        session = session_of(method, TableLM(draft), dice, steps, eos, warp=warp and warp())
        run(session, TableLM(target))
        ended, live = texts(session, replacement)
        return _by_step(ended) if replacement else ended, live

    return program


def _by_step(ended):
    return tuple(sorted(ended, key=lambda text: (len(text), text)))
