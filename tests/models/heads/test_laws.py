"""Laws of methods that draft with heads, enumerated: drafts whose law depends on how far below scored text they are.

A head's law at a node is not a function of the text alone, as that of a draft model is. It depends on which nodes the target
has scored; in product form it depends on nothing else. And in the first turn there is no draft.
"""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.models.table import TableLM
from tests.support.exact import beam_sampling_law, distance, exact_law
from tests.support.examples import completed
from tests.support.programs import random_table, run, session_of, texts
from tests.support.quick import first_quick


def without_some_rows(far, path, vocab):
    """Product form, of rows under scored nodes: a node that has none leaves no token any odds below it."""
    anchor = path[: len(path) - far]
    has_rows = sum(anchor) % 3 != 1
    return random_table(80, vocab)((far % vocab, len(anchor))) * has_rows


ROWS = {
    "rows under some nodes": without_some_rows,
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
    first_quick(
        [*((rows, False) for rows in ROWS), *((rows, True) for rows in ROWS if rows != "by the drafts so far")], 6
    ),
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


def block_of_two(rule):
    """A program: two drafts of a product law, of which the second is judged by the rule if the first was kept."""

    def program(dice):
        token, is_kept = rule(dice, ())
        if not is_kept:
            return token, dice.pick(TARGET((token,)))
        return token, rule(dice, (token,))[0]

    return program


TARGET = random_table(3, 3)
LAYERS = (np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6]))  # the law of each layer, whatever is above


def drawn_and_tried(dice, path):
    """R3: the token of the layer's law, tried against the target's law after the path."""
    p, q = TARGET(path), LAYERS[len(path)]
    token = dice.pick(q)
    if dice.flip(p[token] / q[token]):
        return token, True
    rest = np.maximum(p - q, 0)
    return dice.pick(rest / rest.sum()), False


def chosen_and_matched(dice, path):
    """R1: the likeliest token, which is kept if the target draws it."""
    token = dice.pick(TARGET(path))
    return token, token == int(LAYERS[len(path)].argmax())


def chosen_but_tried_as_if_drawn(dice, path):
    """T1: tokens were chosen, and are tried against the soft law."""
    p, q = TARGET(path), LAYERS[len(path)]
    token = int(q.argmax())
    if dice.flip(p[token] / q[token]):
        return token, True
    rest = np.maximum(p - q, 0)
    return dice.pick(rest / rest.sum()), False


def refused_and_drawn_from_the_target(dice, path):
    """T2: in place of a refused token one of the target's law, not of the residual (BiTA's release)."""
    p, q = TARGET(path), LAYERS[len(path)]
    token = dice.pick(q)
    return (token, True) if dice.flip(p[token] / q[token]) else (dice.pick(p), False)


def one_draw_per_candidate(dice):
    """T3: each path of the tree of the two best tokens per layer is compared with draws of its own; the longest match wins."""
    best = [list(np.argsort(-law)[:2]) for law in LAYERS]
    longest = ()
    for first in best[0]:
        for second in best[1]:
            path = (int(first), int(second))
            matched = 0
            while matched < 2 and dice.pick(TARGET(path[:matched])) == path[matched]:
                matched += 1
            longest = max(longest, path[:matched], key=len)
    while len(longest) < 2:
        longest = (*longest, dice.pick(TARGET(longest)))
    return longest


def pairs_of_target():
    return {(one, other): TARGET(())[one] * TARGET((one,))[other] for one in range(3) for other in range(3)}


@pytest.mark.parametrize("rule", [drawn_and_tried, chosen_and_matched])
def test_blocks_of_a_product_law_have_the_law_of_the_target(rule):
    assert distance(exact_law(block_of_two(rule)), pairs_of_target()) < 1e-12


@pytest.mark.parametrize("trap", [chosen_but_tried_as_if_drawn, refused_and_drawn_from_the_target])
def test_traps_of_product_laws_are_seen(trap):
    assert distance(exact_law(block_of_two(trap)), pairs_of_target()) > 0.05
    assert distance(exact_law(one_draw_per_candidate), pairs_of_target()) > 0.05
