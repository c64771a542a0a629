"""Nodes that are kept from turn to turn, with the target's rows: what is drawn never depends on it."""

import math

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.decoder import Decoder
from specbeam.core.forest import (
    MOST_KEPT,
    NO_KNOWN_ROWS,
    Forest,
    KnownRows,
    kept_nodes,
    next_start,
    rows_of_nodes,
    rows_with_known,
    turn_rows,
    unknown_nodes,
)
from specbeam.core.laws.evidence import no_evidence
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp
from specbeam.core.ranked import whole_rows
from specbeam.core.verify.trials import Drafts, take_draws
from specbeam.generation import turns_of
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from specbeam.models.table import TableLM
from tests.support.exact import distance, exact_law
from tests.support.programs import random_table, run, session_of, texts
from tests.support.quick import once_each
from tests.support.steps import source_of_steps
from tests.support.tiny_models import tiny

CUTS = [Truncation(), Truncation(0.6), Truncation(top_k=4), Truncation(top_p=0.7)]
METHODS = {
    "fixed": sb.dsbd(3, 4, 3, "fixed"),
    "fixed, few drafts": sb.dsbd(3, 3, 4, "fixed"),
    "one beam": sb.dsbd(1, 2, 3, "fixed"),
    "auto": sb.dsbd(3, 4, 3, "auto", min_beams=1, mass=0.7),
}


def kept(patch, keeps):
    """Let nodes be kept from turn to turn, or not."""
    if not keeps:
        patch.setattr("specbeam.core.decoder.keeps_nodes", lambda target, parts: False)


@pytest.mark.parametrize(("name", "cut"), once_each(METHODS, CUTS), ids=str)
def test_turns_with_kept_rows_draw_what_others_draw_and_are_fewer(name, cut, monkeypatch):
    """Seed by seed, with ends inside of turns, and drafts that know little."""
    method = METHODS[name]
    passes = {}
    for keeps in (True, False):
        found = []
        total = 0
        with monkeypatch.context() as patch:
            kept(patch, keeps)
            for case in range(40):
                target, draft = TableLM(random_table(case, 8)), TableLM(random_table(500 + case, 8))
                session = session_of(method, draft, steps=8, eos=(0,), key=case, warp=Warp(truncation=cut))
                run(session, target)
                assert (session.count.rows.saved > 0) <= keeps
                found.append(texts(session))
                total += session.count.target_passes
        passes[keeps] = found, total
    assert passes[True][0] == passes[False][0]
    if method.beams > 1:
        assert passes[True][1] < passes[False][1]
    else:  # where the only beam was no draft, there is nothing below it
        assert passes[True][1] == passes[False][1]


def test_the_enumerated_decodings_use_kept_rows():
    """Those of `methods/test_dsbd.py`: with three steps and one drafted layer some turns start with known roots."""
    used = 0
    for key in range(20):
        for coupling in ("noise", "rejection"):
            session = session_of(sb.dsbd(2, 2, 1, "fixed", coupling=coupling), TableLM(random_table(9, 3)), key=key)
            run(session, TableLM(random_table(8, 3)))
            used += session.count.rows.saved
    assert used > 20


@pytest.mark.parametrize("engine", ["plain", "auto"])
def test_every_engine_keeps_rows_and_gives_the_beams_of_plain_decoding(engine):
    """Two sessions side by side, turn by turn and in runs."""
    models = tiny("llama", seed=1, vocab_size=64), tiny("llama", seed=2, vocab_size=64)
    pair = Pair(*models, None, *(HuggingFaceLM(model, engine=engine) for model in models))
    options = {"max_new_tokens": 16, "eos_token_id": [], "seed": 3}
    prompts = [[3, 4, 5], [7, 8, 9, 10]]
    for method in (sb.dsbd(3, 4, 3, "fixed"), sb.dsbd(3, 5, 4, "fixed", semantics="hf")):
        plain = sb.beam_sampling(3, semantics="hf" if "transformers" in method.law else "paper")
        for batch_size in (1, 2):
            expected = sb.generate(pair, prompts, plain, batch_size=batch_size, **options)
            found = sb.generate(pair, prompts, method, batch_size=batch_size, **options)
            for one, other in zip(found, expected, strict=True):
                assert [beam.tokens for beam in one.beams] == [beam.tokens for beam in other.beams]


def test_a_decoder_keeps_nodes_only_if_all_parts_can():
    """A target that does not say so gets forests of roots and new drafts."""

    class Plain(TableLM):
        keeps_nodes = False

    for lm in (TableLM, Plain):
        for other in (TableLM, Plain):
            target, draft = lm([0.5, 0.5]), other([0.5, 0.5])
            session = session_of(sb.dsbd(2, 2, 2, "fixed"), draft, steps=4)
            with Decoder(target) as decoder, source_of_steps():
                decoder.add(session)
            assert session.keeps_nodes == (lm is TableLM and other is TableLM)
    session = session_of(sb.sampling(), None)
    with Decoder(TableLM([0.5, 0.5])) as decoder:
        decoder.add(session)
    assert not session.keeps_nodes


# The forest that a turn starts with.


def random_forest(rng, nodes):
    forest = Forest.rooted(rng.integers(0, 9, 3))
    for _ in range(nodes):
        forest = forest.grown([int(rng.integers(0, 9))], [int(rng.integers(0, forest.size))])
    return forest


def test_the_next_forest_starts_with_what_was_below_the_survivors():
    rng = np.random.default_rng(0)
    for _ in range(50):
        forest = random_forest(rng, 20)
        known = np.sort(rng.choice(forest.size, 5, replace=False))
        rows = rng.normal(size=(forest.size, 4))
        forest = forest._replace(known=KnownRows(known, whole_rows(rows[known])))
        fresh = unknown_nodes(0, forest.size, known)
        every = turn_rows(whole_rows(rows[fresh]), forest.size, forest.known)
        np.testing.assert_array_equal(rows_of_nodes(every, np.arange(forest.size)).logits, rows)
        nodes = np.append(rng.choice(np.flatnonzero(forest.depths() == 1), 2), -1)
        kept_ones = kept_nodes(forest.parents, nodes)
        newest = np.append(forest.tokens[nodes[:2]], 7)
        start = next_start(forest.tokens, forest.parents, every, nodes, newest, kept_ones)
        assert start.known.nodes.tolist() == [0, 1, *range(3, len(start.tokens))]
        after = Forest(start.tokens, start.parents)
        sources = [*nodes[:2], *kept_ones]
        np.testing.assert_array_equal(start.known.rows.logits, rows[sources])
        for place, source in zip(start.known.nodes, sources, strict=True):
            assert [int(newest[after.root_of(np.array([place]))[0]]), *after.path(place)] == forest.path(source)


def test_of_many_nodes_the_shallow_ones_are_kept_with_their_parents():
    forest = random_forest(np.random.default_rng(1), 300)
    found = kept_nodes(forest.parents, np.arange(3))
    depths = forest.depths()
    assert len(found) == MOST_KEPT
    others = np.setdiff1d(np.arange(3, forest.size), found)
    assert depths[found].max() <= depths[others].min()
    assert set(forest.parents[found]) <= {0, 1, 2, *found}


def test_rows_of_some_nodes_are_known():
    known = KnownRows(np.array([1, 4]), whole_rows(np.array([[1], [4]], dtype=np.float32)))
    others = whole_rows(np.array([[2], [9]], dtype=np.float32))
    found = rows_with_known(np.array([4, 2, 1, 9]), known, others)
    assert found.logits.ravel().tolist() == [4, 2, 1, 9]
    own = whole_rows(np.array([[2]], dtype=np.float32))
    assert rows_with_known(np.array([2]), NO_KNOWN_ROWS, own).logits.tolist() == [[2]]


# Mistakes.

P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.2, 0.6])


def layer_of_one_draw(stated):
    """A token that an earlier turn drafted from Q, tried against P as if it had been drawn from `stated`."""

    def program(dice):
        token = dice.pick(Q)
        places = np.array([token])
        drafts = Drafts(places, places, stated.copy(), stated.copy(), False, False)
        taken, _ = take_draws(P.copy(), drafts, 1, False, dice, no_evidence(False))
        return int(taken[0])

    with source_of_steps():
        return exact_law(program)


def test_a_draft_of_an_earlier_turn_has_not_the_law_that_is_known_now():
    """Since then its parent's row is known, and drafts are drawn from it. Those of before were not."""
    law = dict(enumerate(P))
    assert distance(layer_of_one_draw(Q), law) < 1e-12
    assert distance(layer_of_one_draw(P), law) == pytest.approx(0.4)


def layer_whose_width_looks_at_children(looks):
    """An earlier turn has drafted the first draw of this layer under the same noise, if its own law had that token."""

    def program(dice):
        first = dice.pick(P)
        is_known = first != 2  # the draft model does not know token 2
        width = 1 if looks and not is_known else 2
        drawn = [first]
        if width == 2:
            left = P.copy()
            left[first] = 0.0
            drawn.append(dice.pick(left))
        return width, tuple(drawn)

    return exact_law(program)


def test_a_width_that_looks_at_which_children_are_known_leaks_the_noise():
    expected = {}
    for first in range(3):
        for second in range(3):
            if first != second:
                expected[first, second] = P[first] * P[second] / (1 - P[first])

    def of_two(law):
        drawn = {one: odds for (width, one), odds in law.items() if width == 2}
        total = math.fsum(drawn.values())
        return {one: odds / total for one, odds in drawn.items()}

    assert distance(of_two(layer_whose_width_looks_at_children(False)), expected) < 1e-12
    assert distance(of_two(layer_whose_width_looks_at_children(True)), expected) > 0.15


def test_the_number_of_drafts_does_not_tell_which_children_are_known():
    """Where widths look at drafts, each layer has as many of them as were planned, known or not."""
    counts = set()
    for key in range(30):
        session = session_of(sb.dsbd(3, 4, 3, "dynamic"), TableLM(random_table(2, 9)), steps=9, key=key)
        for turn in run(session, TableLM(random_table(1, 9))):
            ends = turn.forest.siblings.draw_ends
            counts |= {*np.diff(ends, prepend=0).tolist()}
    assert counts == {4}


@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix_match", "token_recycling"])
@pytest.mark.parametrize("audited", [False, True])
def test_drafters_without_a_model_keep_nodes_too(drafter, audited):
    """Guesses that were scored before are not scored again, and get no second node; the beams stay those of a search."""
    pair = sb.load(tiny("llama"))
    prompts = [[5, 9, 5, 9, 5, 9, 5], [3, 1, 4, 1, 5, 9, 2, 6]]
    plain = sb.generate(pair, prompts, sb.beam_search(4), max_new_tokens=24)
    settings = {} if drafter != "token_recycling" else {"draft_beams": 12, "depth": 3}
    method = sb.speculative_beam_search(4, drafter=drafter, **settings)
    found = sb.generate(pair, prompts, method, max_new_tokens=24, audit=audited)
    for one, other in zip(plain, found, strict=True):
        assert one.tokens == other.tokens
        assert [beam.score for beam in one.beams] == pytest.approx([beam.score for beam in other.beams], abs=1e-4)
    assert sum(one.report.rows.saved for one in found) > 0
    for turn in turns_of(pair, prompts[0], method, max_new_tokens=24):
        forest = turn.forest
        pairs = list(zip(forest.parents.tolist(), forest.tokens.tolist(), strict=True))
        below = [one for one in pairs if one[0] >= 0]
        assert len(set(below)) == len(below)
        assert len(turn.scored.logits) == forest.size - len(forest.known.nodes)
