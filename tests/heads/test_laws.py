"""Laws of methods that draft with heads, enumerated: drafts whose law depends on how far below scored text they are.

A head's law at a node is not a function of the text alone, as that of a draft model is. It depends on which nodes the target
has scored; in product form it depends on nothing else. And in the first turn there is no draft.
"""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.lm.table import TableLM
from tests.support.exact import beam_sampling_law, distance, exact_law
from tests.support.examples import completed
from tests.support.programs import random_table, run, session_of, texts

ROWS = {
    "by path and distance": lambda far, path, vocab: random_table(50 + far, vocab)(path),
    "product form": lambda far, path, vocab: random_table(60, vocab)((far % vocab,)),
    # As where a recurrent state begins at the first draft (DSpark, Domino): by the drafts below the last scored node.
    "by the drafts so far": lambda far, path, vocab: random_table(80, vocab)(path[-far:]),
    # As where the likeliest tokens alone have odds (DFlash2); here one, by path.
    "few tokens": lambda far, path, vocab: np.eye(vocab)[(far + sum(path)) % vocab],
    "a vocabulary of its own": lambda far, path, vocab: random_table(70 + far, vocab)(path) * (np.arange(vocab) != 1),
}


class TableHead(TableLM):
    """A head whose law at a node is given by its path, and by how far it is below the last scored node."""

    def __init__(self, rows, vocab):
        super().__init__([1.0] * vocab)
        self.rows = rows
        self.seen = set()  # distances that were asked for

    def is_ready(self, session):
        return session.length > 0

    def _rows(self, session, forest):
        found = []
        for node in self.take_new_nodes(session, forest):
            far, above = 1, int(forest.parents[node])
            while above >= 0 and above not in forest.known.nodes:
                far, above = far + 1, int(forest.parents[above])
            self.seen.add(far)
            found.append(self.rows(far, tuple(session.new_tokens(forest, np.array([node]))[0].tolist()), self.vocab))
        with np.errstate(divide="ignore"):
            return torch.from_numpy(np.log(np.array(found, dtype=np.float64).reshape(-1, self.vocab)))


def outcome_of(method, target, head, steps, replacement=False):
    """A program for `exact_law`: decode `steps` tokens, return the texts."""

    def program(dice):
        session = session_of(method, head, dice, steps)
        run(session, TableLM(target))
        ended, live = texts(session, replacement)
        return ended, live

    return program


METHODS = {
    "chain": lambda rule: sb.speculative_sampling(2, rule),
    "drawn without replacement": lambda rule: sb.rsd_c((2, 1), rule),
    "independent draws": lambda rule: sb.specinfer((2, 1), rule),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rule", ["path", "traversal"])
def test_one_sequence_has_the_law_of_sampling(rows, name, rule):
    """Of four tokens: the first turn has no draft, the second one two layers of it."""
    target = random_table(3, 2)
    head = TableHead(ROWS[rows], 2)
    law = {}
    for (ended, live), odds in exact_law(outcome_of(METHODS[name](rule), target, head, 4)).items():
        (text,) = ended or live
        law[text] = law.get(text, 0.0) + odds
    assert distance(law, completed(target, (), 4)) < 1e-12
    assert head.seen == {1, 2}


@pytest.mark.parametrize(
    ("rows", "replacement"),
    [*((rows, False) for rows in ROWS), *((rows, True) for rows in ROWS if rows != "by the drafts so far")],
)
def test_beams_by_rejection_have_the_law_of_beam_sampling(rows, replacement):
    """In product form as well: each beam draws for itself from the law that both have."""
    target = random_table(3, 2)
    method = sb.dsbd(2, 2, 1, coupling="rejection", replacement=replacement)
    law = exact_law(outcome_of(method, target, TableHead(ROWS[rows], 2), 3, replacement))
    expected = beam_sampling_law(target, 2, 3, replacement)
    assert distance(law, expected) < 1e-12


def test_a_draw_that_two_beams_share_has_another_law():
    """What product laws invite to: one draw, hung under both beams. Each beam keeps its law, both together do not."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])

    def judged(dice, token):
        if dice.flip(p[token] / q[token]):
            return token
        rest = np.maximum(p - q, 0)
        return dice.pick(rest / rest.sum())

    def shared(dice):
        token = dice.pick(q)
        return judged(dice, token), judged(dice, token)

    def each_its_own(dice):
        return judged(dice, dice.pick(q)), judged(dice, dice.pick(q))

    expected = {(one, other): p[one] * p[other] for one in range(3) for other in range(3)}
    assert distance(exact_law(each_its_own), expected) < 1e-12
    assert distance(exact_law(shared), expected) > 0.1
    first = {}
    for (one, _), odds in exact_law(shared).items():
        first[one] = first.get(one, 0.0) + odds
    assert distance(first, dict(enumerate(p))) < 1e-12
