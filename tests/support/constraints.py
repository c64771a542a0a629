"""Constraints by hand: a small automaton over token numbers, and the laws that it makes of tables."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from transformers import LogitsProcessorList

from specbeam.constraint import Constrained
from specbeam.probs import Warp


@dataclass
class Automaton:
    """`edges[state]` gives the state behind each allowed token; a text may end in one of `ends`. The first state is 0."""

    edges: dict[int, dict[int, int]]
    ends: set[int]
    vocab: int
    advanced: Counter = field(default_factory=Counter)

    def root(self):
        return 0, ()

    def advance(self, state, token):
        name, path = state
        assert token in self.edges[name], "asked to go where it does not allow to"
        self.advanced[*path, token] += 1
        return self.edges[name][token], (*path, token)

    def allowed(self, states):
        rows = np.zeros((len(states), self.vocab), dtype=bool)
        for row, (name, _) in zip(rows, states, strict=True):
            row[list(self.edges[name])] = True
        return np.packbits(rows, axis=1, bitorder="little")

    def complete(self, states):
        return [name in self.ends for name, _ in states]

    def after(self, path):
        """Tokens that may follow a path, and whether it may end."""
        state = 0
        for token in path:
            state = self.edges[state][token]
        return list(self.edges[state]), state in self.ends


def warp_of(constraint, eos, prompt_length=1, **more):
    bans = Constrained(constraint, eos, prompt_length)
    return Warp(LogitsProcessorList([bans]), constraint=bans, **more)


def renormalised(table, automaton, eos, normalise=True):
    """The law of the next token after a path: the table's, over what the automaton allows. Straight from the definition."""

    def law(path):
        tokens, complete = automaton.after(path)
        kept = np.zeros(automaton.vocab)
        some = [token for token in tokens if token not in eos] + list(eos if complete else ())
        kept[some] = np.asarray(table(path))[some]
        return kept / kept.sum() if normalise else kept

    return law
