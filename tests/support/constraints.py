"""Constraints by hand: a small automaton over token numbers, and the laws that it makes of tables."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from transformers import LogitsProcessorList

from specbeam.core.constraint import Constrained
from specbeam.core.laws.warp import Warp


@dataclass
class Automaton:
    """`edges[state]` gives the state behind each allowed token; a text may end in one of `ends`. The first state is 0."""

    edges: dict[int, dict[int, int]]
    ends: set[int]
    vocab: int
    looked: Counter = field(default_factory=Counter)  # by path
    copies: int = 0

    def start(self):
        return Walker(self, [0])

    def allowed(self, walkers):
        rows = np.zeros((len(walkers), self.vocab), dtype=bool)
        for row, walker in zip(rows, walkers, strict=True):
            self.looked[walker.path] += 1
            row[list(self.edges[walker.states[-1]])] = True
        return np.packbits(rows, axis=1, bitorder="little")

    def complete(self, walkers):
        return [walker.states[-1] in self.ends for walker in walkers]

    def after(self, path):
        """Tokens that may follow a path, and whether it may end."""
        state = 0
        for token in path:
            state = self.edges[state][token]
        return list(self.edges[state]), state in self.ends


@dataclass
class Walker:
    automaton: Automaton
    states: list[int]
    path: tuple[int, ...] = ()

    def take(self, token):
        assert token in self.automaton.edges[self.states[-1]], "asked to go where it does not allow to"
        self.states.append(self.automaton.edges[self.states[-1]][token])
        self.path = (*self.path, token)

    def back(self, tokens):
        assert 0 < tokens <= len(self.path)
        self.states, self.path = self.states[:-tokens], self.path[:-tokens]

    def copy(self):
        self.automaton.copies += 1
        return Walker(self.automaton, list(self.states), self.path)


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
