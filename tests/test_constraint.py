"""Decoding under a constraint, on tables: the law is the table's, renormalised over what is allowed, exactly."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core.constraint import Constrained
from specbeam.core.decode import decode
from specbeam.models.table import TableLM
from tests.methods.test_sequences import DRAWN, MATCHED, parts_on
from tests.support.constraints import Automaton, renormalised, warp_of
from tests.support.exact import beam_sampling_law, distance, exact_law
from tests.support.examples import PAIRS, completed, law_and_mean, one_turn
from tests.support.programs import outcome_of, random_table, run, session_of, texts
from tests.support.steps import source_of_steps

CLOSE = 1e-12
END = (2,)
# Zeros and ones, no two ones in a row; a text may end after an even number of zeros.
LOOPING = Automaton({0: {0: 1, 1: 2}, 1: {0: 0, 1: 3}, 2: {0: 1}, 3: {0: 0}}, {0, 2}, 3)
# "00", "01", "1" or "11": in the end nothing is left but the end.
FINITE = Automaton({0: {0: 1, 1: 2}, 1: {0: 3, 1: 3}, 2: {1: 3}, 3: {}}, {2, 3}, 3)
CONSTRAINTS = {"looping": LOOPING, "finite": FINITE}
TREES = DRAWN | {
    "sequoia, traversal": lambda: sb.sequoia(3, 2, rule="traversal"),
    "rsd_c, wide": lambda: sb.rsd_c((3, 2)),
}


def random_automaton(seed, vocab, ends, states=5):
    """Every state may end or has at least one way on."""
    rng = np.random.default_rng(seed)
    tokens = [token for token in range(vocab) if token not in ends]
    edges = {}
    for state in range(states):
        some = rng.choice(tokens, size=int(rng.integers(1, len(tokens) + 1)), replace=False)
        edges[state] = {int(token): int(rng.integers(states)) for token in some}
    return Automaton(edges, {int(one) for one in rng.choice(states, 2, replace=False)}, vocab)


@pytest.mark.parametrize(
    ("pair", "constraint"),
    [("EX3M", "finite")] + [pytest.param(pair, "looping", marks=pytest.mark.slow) for pair in PAIRS],
)
@pytest.mark.parametrize("name", TREES)
def test_drawn_trees_have_the_renormalised_law(name, pair, constraint):
    automaton, (target, draft) = CONSTRAINTS[constraint], PAIRS[pair]
    law = renormalised(target, automaton, END)
    program = one_turn(parts_on(TREES[name], target), target, draft, eos=END, warp=lambda: warp_of(automaton, END))
    found, _ = law_and_mean(program, law, 3, END)
    assert distance(found, completed(law, (), 3, END)) < CLOSE


@pytest.mark.parametrize("cases", [range(1), pytest.param(range(1, 20), marks=pytest.mark.slow)])
def test_the_law_on_random_tables_and_automata(cases):
    for seed in cases:
        automaton = random_automaton(seed, 3, END)
        target, draft = random_table(seed, 3), random_table(seed + 50, 3)
        law = renormalised(target, automaton, END)
        for method in (DRAWN["chain"], DRAWN["block"], DRAWN["rsd_c"], TREES["sequoia, traversal"]):
            program = one_turn(
                parts_on(method, target), target, draft, eos=END, warp=lambda a=automaton: warp_of(a, END)
            )
            found, _ = law_and_mean(program, law, 3, END)
            assert distance(found, completed(law, (), 3, END)) < CLOSE


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(
    ("depth", "draft_beams", "steps"),
    [(1, 2, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 2, 2), (1, 3, 3)))],
)
def test_dsbd_has_the_law_of_constrained_beam_sampling(constraint, replacement, depth, draft_beams, steps):
    automaton = CONSTRAINTS[constraint]
    target, draft = random_table(1, 3), random_table(2, 3)
    method = sb.dsbd(2, draft_beams, depth, "fixed", coupling="rejection", replacement=replacement)
    found = exact_law(outcome_of(method, target, draft, steps, END, replacement, lambda: warp_of(automaton, END)))
    expected = beam_sampling_law(renormalised(target, automaton, END), 2, steps, replacement, END)
    assert distance(found, expected) < CLOSE


def test_a_law_that_is_not_renormalised_would_be_noticed():
    """The control: beams that keep the odds they lost to a ban among themselves have another law."""
    target = random_table(1, 3)
    right, wrong = (
        beam_sampling_law(renormalised(target, FINITE, END, normalise), 2, 2, False, END) for normalise in (True, False)
    )
    assert distance(right, wrong) > 0.03


def decoded(method, target, draft, automaton, key, eos, steps=12, **more):
    session = session_of(method, TableLM(draft), steps=steps, eos=eos, key=key, warp=warp_of(automaton, eos, **more))
    run(session, TableLM(target))
    return session


@pytest.mark.parametrize("beams", [1, 3])
def test_same_seed_same_beams_with_and_without_a_draft(beams):
    for seed in range(6):
        automaton = random_automaton(seed, 5, (4,))
        target, draft = random_table(seed, 5), random_table(seed + 50, 5)
        plain = decoded(sb.beam_sampling(beams), target, draft, automaton, seed, (4,))
        fast = decoded(sb.dsbd(beams, beams + 2, 3, "fixed"), target, draft, automaton, seed, (4,))
        assert texts(fast) == texts(plain)
        scores = [[one.loglik for one in session.hypotheses()] for session in (plain, fast)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-12)


@pytest.mark.parametrize("name", MATCHED)
def test_matched_trees_give_the_text_of_plain_sampling(name):
    accepted = 0
    for seed in range(3):
        automaton = random_automaton(seed, 4, (3,))
        target, draft = random_table(seed, 4), random_table(seed + 9, 4)
        plain = decoded(sb.sampling(), target, draft, automaton, seed, (3,), 14)
        fast = decoded(parts_on(MATCHED[name], target)(TableLM(draft)), target, draft, automaton, seed, (3,), 14)
        assert texts(fast) == texts(plain)
        accepted += fast.count.accepted
    assert accepted > 0


@pytest.mark.parametrize("name", [*TREES, *MATCHED])
def test_at_temperature_zero_all_are_greedy(name):
    for seed in range(2):
        automaton = random_automaton(seed, 5, (4,))
        target, draft = random_table(seed, 5), random_table(seed + 9, 5)
        law, path = renormalised(target, automaton, (4,)), ()
        while len(path) < 9 and 4 not in path:
            path = (*path, int(np.argmax(law(path))))
        method = parts_on({**TREES, **MATCHED}[name], target)(TableLM(draft))
        session = decoded(method, target, draft, automaton, 0, (4,), 9, greedy=True)
        assert [one.tokens for one in session.hypotheses()] == [list(path)]


@pytest.mark.parametrize("make", [lambda: sb.beam_search(3), lambda: sb.speculative_beam_search(3, 5, 3)])
def test_beam_search_adds_up_log_probabilities_that_are_not_renormalised(make):
    """As transformers does with `prefix_allowed_tokens_fn`: a ban takes mass away and gives it to nobody."""
    for seed in range(8):
        automaton = random_automaton(seed, 5, (4,))
        target, draft = random_table(seed, 5), random_table(seed + 9, 5)
        session = decoded(make(), target, draft, automaton, 0, (4,), 6, greedy=True, search=True)
        for one in session.hypotheses():
            odds = np.prod([target(tuple(one.tokens[:place]))[token] for place, token in enumerate(one.tokens)])
            assert one.loglik == pytest.approx(np.log(odds))
        plain = decoded(sb.beam_search(3), target, draft, automaton, 0, (4,), 6, greedy=True, search=True)
        assert texts(session) == texts(plain)


@pytest.mark.parametrize(
    "make", [lambda: sb.dsbd(3, 5, 3, "fixed"), lambda: sb.beam_sampling(3), lambda: sb.sampling()]
)
@source_of_steps()
def test_a_path_is_looked_at_once_and_forgotten_when_it_is_dead(make):
    automaton = random_automaton(3, 5, (4,), states=7)
    automaton.ends.clear()  # texts go on to the limit
    session = session_of(make(), TableLM(random_table(4, 5)), steps=20, eos=(4,), key=2, warp=warp_of(automaton, (4,)))
    bans, held = session.warp.constraint, []
    for _ in decode(TableLM(random_table(3, 5)), [session]):
        assert sorted(bans._trails) == sorted({one.tobytes() for one in session.tails} if not session.over else ())
        held.append(len(bans._allowed))
    assert max(automaton.looked.values()) == 1
    assert max(held) <= 3 * 5
    assert len(bans) == 0  # a session that is over holds nothing


def test_one_beam_needs_one_walker():
    automaton = random_automaton(3, 5, (4,), states=7)
    automaton.ends.clear()
    for recipe in (sb.rsd_c((3, 2)), sb.opt_tree(8, 3)):
        decoded(recipe, random_table(3, 5), random_table(4, 5), automaton, 2, (4,), 20)
    assert automaton.copies == 0


def test_ends_are_allowed_where_the_text_may_end_and_only_there():
    bans = Constrained(FINITE, (2,), 2)
    paths = torch.tensor([[7, 7, 0], [7, 7, 1]])
    logits = bans(paths, torch.zeros(2, 5))
    assert (logits > -torch.inf).tolist() == [[True, True, False, False, False], [False, True, True, False, False]]
    wrong = bans(torch.tensor([[7, 7, 1, 0]]), torch.zeros(1, 5))
    assert (wrong == 0).all()  # nobody emits this path, so whoever drafted it gets the plain law
    several = Constrained(FINITE, (2, 4), 0)
    assert several.allowed(np.array([[1, 1]]), 5).tolist() == [[False, False, True, False, True]]


def test_a_long_path_that_nobody_asked_for_before():
    bans = Constrained(LOOPING, (2,), 0)
    assert bans.allowed(np.zeros((1, 3000), dtype=np.int64), 3).tolist() == [[True, True, True]]


def test_walkers_that_move_about_tell_what_fresh_ones_tell():
    rng = np.random.default_rng(0)
    for case in range(20):
        automaton = random_automaton(case, 5, (4,), states=7)
        bans, live = Constrained(automaton, (4,), 0), np.zeros((1, 0), dtype=np.int64)
        for _ in range(6):
            below = rng.integers(0, 5, (12, rng.integers(0, 4)))
            paths = np.concatenate([live[rng.integers(0, len(live), 12)], below], 1)
            found = bans.allowed(paths, 5)
            fresh = [Constrained(automaton, (4,), 0).allowed(path[None], 5)[0] for path in paths]
            assert (found == np.array(fresh)).all()
            wanted = [path for path in paths if 4 not in path and _is_allowed(automaton, path.tolist())]
            if wanted:
                live = np.array(wanted[:3])
                bans.keep(live)
                assert len(bans) == len({tuple(path) for path in live.tolist()})


def _is_allowed(automaton, path):
    return all(token in automaton.after(path[:place])[0] for place, token in enumerate(path))


@pytest.mark.parametrize("name", [*TREES, *MATCHED, "dsbd", "rejection", "search"])
def test_drafts_that_lead_nowhere_cost_nothing(name):
    """Behind "0" nothing is allowed. The target never goes there, the draft does."""
    trap = Automaton({0: {0: 1, 1: 2}, 1: {}, 2: {}}, {2}, 3)
    target, draft = (lambda path: np.array([0.0, 0.6, 0.4])), (lambda path: np.array([0.9, 0.05, 0.05]))
    beams = {
        "dsbd": sb.dsbd(1, 1, 3, "fixed"),
        "rejection": sb.dsbd(1, 2, 3, coupling="rejection", width="dynamic"),
        "search": sb.speculative_beam_search(1, 1, 3),
    }
    method = beams[name] if name in beams else parts_on({**TREES, **MATCHED}[name], target)(TableLM(draft))
    for key in range(3):
        session = decoded(method, target, draft, trap, key, END, search=name == "search", greedy=name == "search")
        assert [one.tokens for one in session.hypotheses()] == [[1, 2]]


@pytest.mark.parametrize("method", [sb.sampling, lambda: sb.beam_sampling(2), lambda: sb.dsbd(2, 3, 2, "fixed")])
def test_without_an_end_token_texts_keep_to_the_form_until_they_are_long_enough(method):
    session = decoded(method(), random_table(0, 3), random_table(1, 3), LOOPING, 0, ())
    found = [*session.hypotheses()]
    assert len(found) >= 1
    for one in found:
        text = "".join(map(str, one.tokens))
        assert len(text) == 12
        assert "11" not in text
        assert "2" not in text  # the token that ends texts in the other tests
