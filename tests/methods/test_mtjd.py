"""Multi-token joint decoding without a draft: blocks by their joint law, exactly on tables and by the target's own beams."""

import itertools
import math

import numpy as np
import pytest

import specbeam as sb
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp
from specbeam.errors import BadSetting, DeadEnd, NotSupported
from tests.support import words
from tests.support.checking import refused
from tests.support.exact import distance, exact_law
from tests.support.examples import completed
from tests.support.joint import WORSE, P, letters, mean_perplexity, odds_of, seated, text_of
from tests.support.programs import random_table, run
from tests.support.tiny_models import tiny


def decoded(method, target, steps, eos=(), key=0, warp=None, dice=None):
    session, lm = seated(method, target, None, dice, steps, eos, key, warp)
    run(session, lm)
    return tuple(text_of(session))


def law_of(method, target, steps, eos=(), warp=None):
    return exact_law(lambda dice: decoded(method, target, steps, eos, warp=warp, dice=dice))


@pytest.mark.parametrize(
    ("depth", "text", "likelihood", "perplexity"),
    [
        (1, "aaaaaa", 0.002272, 2.7581),
        (2, "bababa", 0.031755, 1.7770),
        (3, "abacba", 0.026463, 1.8319),
        (6, "bababa", 0.031755, 1.7770),
    ],
)
def test_worked_texts(depth, text, likelihood, perplexity):
    """Longer blocks are better in the limit, and not at every length: three is worse than two here."""
    found = decoded(sb.mtjd("argmax", depth), P, 6)
    assert letters(found) == text
    assert odds_of(P, found) == pytest.approx(likelihood, abs=1e-6)
    assert odds_of(P, found) ** (-1 / 6) == pytest.approx(perplexity, abs=1e-4)


@pytest.mark.parametrize(
    ("depth", "text", "likelihood", "perplexity"),
    [(1, "abbb", 0.061992, 2.0041), (2, "cccc", 0.034925, 2.3132), (4, "abbb", 0.061992, 2.0041)],
)
def test_two_tokens_at_once_can_be_worse_than_one(depth, text, likelihood, perplexity):
    found = decoded(sb.mtjd("argmax", depth), WORSE, 4)
    assert letters(found) == text
    assert odds_of(WORSE, found) == pytest.approx(likelihood, abs=1e-6)
    assert odds_of(WORSE, found) ** (-1 / 4) == pytest.approx(perplexity, abs=1e-4)


@pytest.mark.parametrize(("size", "text", "odds"), [(1, "a", 0.5), (2, "ba", 0.36), (3, "aba", 0.1485)])
def test_best_blocks(size, text, odds):
    found = decoded(sb.mtjd("argmax", size), P, size)
    assert letters(found) == text
    assert odds_of(P, found) == pytest.approx(odds)


def test_equal_blocks_give_the_first_in_lexicographic_order():
    assert letters(decoded(sb.mtjd("argmax", 2), lambda path: np.full(3, 1 / 3), 4)) == "aaaa"


def test_as_deep_as_the_text_is_the_most_probable_text():
    for seed in range(5):
        target = random_table(seed, 3)
        best = max(itertools.product(range(3), repeat=4), key=lambda text: odds_of(target, text))
        assert decoded(sb.mtjd("argmax", 4), target, 4) == best


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("eos", [(), (1,)])
def test_one_draw_from_the_joint_law_is_plain_sampling(depth, eos):
    for target in (P, random_table(1, 3, zeros=True)):
        assert distance(law_of(sb.mtjd("ancestral", depth), target, 3, eos), completed(target, (), 3, eos)) < 1e-12


def test_joint_temperature_differs_from_temperature_per_token():
    joint = law_of(sb.mtjd("joint_temperature", 2, block_temperature=0.5), P, 2)
    token = law_of(sb.mtjd("ancestral", 1), P, 2, warp=Warp(truncation=Truncation(0.5)))
    ba, aa = (1, 0), (0, 0)
    assert (joint[ba], joint[aa]) == pytest.approx((0.5941, 0.1325), abs=1e-4)
    assert (token[ba], token[aa]) == pytest.approx((0.3786, 0.2064), abs=1e-4)
    assert mean_perplexity(P, joint) == pytest.approx(1.9803, abs=1e-4)
    assert mean_perplexity(P, token) == pytest.approx(2.1533, abs=1e-4)


def test_expected_perplexity_of_two_tokens():
    """Greedy is worse than sampling here, the best block better than both."""
    assert mean_perplexity(P, law_of(sb.mtjd("ancestral", 2), P, 2)) == pytest.approx(2.3934, abs=1e-4)
    assert mean_perplexity(P, law_of(sb.mtjd("argmax", 2), P, 2)) == pytest.approx(1.6667, abs=1e-4)
    assert mean_perplexity(P, {decoded(sb.greedy(), P, 2, warp=Warp(greedy=True)): 1.0}) == pytest.approx(
        2.4254, abs=1e-4
    )


def test_joint_topk_draws_from_the_best_blocks():
    found = law_of(sb.mtjd("joint_topk", 2, top=2), P, 2)
    assert found == pytest.approx({(1, 0): 0.6792, (0, 0): 0.3208}, abs=1e-4)
    every = law_of(sb.mtjd("joint_topk", 2, top=9), P, 2)
    assert distance(every, completed(P, (), 2)) < 1e-12


def test_joint_topk_keeps_no_more_blocks_than_it_says():
    """Of equal blocks the first in lexicographic order; blocks that end are blocks too."""
    uniform = lambda path: np.full(3, 1 / 3)  # noqa: E731
    for top in (1, 2, 5, 9, 20):
        found = law_of(sb.mtjd("joint_topk", 2, top=top), uniform, 2)
        expected = list(itertools.product(range(3), repeat=2))[:top]
        assert found == pytest.approx(dict.fromkeys(expected, 1 / min(top, 9)))
    ends = law_of(sb.mtjd("joint_topk", 2, top=2), uniform, 2, eos=(1,))
    assert ends == pytest.approx({(1,): 3 / 4, (0, 0): 1 / 4})


def test_warpers_shape_the_conditionals():
    """top_k=1 leaves the greedy text alone, whatever the blocks."""
    warp = Warp(truncation=Truncation(top_k=1))
    assert decoded(sb.mtjd("argmax", 3), P, 6, warp=warp) == (0,) * 6


def test_a_block_that_ends_competes_at_its_own_length():
    """b ends: alone it has .4, more than every block of two tokens."""
    assert letters(decoded(sb.mtjd("argmax", 2), P, 6, eos=(1,))) == "b"
    found = law_of(sb.mtjd("joint_temperature", 2, block_temperature=1.0), P, 4, eos=(1,))
    assert distance(found, completed(P, (), 4, eos=(1,))) < 1e-12


def test_a_block_never_exceeds_the_limit():
    for steps in (1, 2, 3, 5):
        for mode in ("argmax", "beam_search", "beam_sample"):
            assert len(decoded(sb.mtjd(mode, 3), P, steps)) == steps


def test_wide_enough_own_beams_are_exact():
    for seed in range(6):
        target = random_table(seed, 3)
        for depth in (2, 3):
            wide = sb.mtjd("beam_search", depth, beams=3 ** (depth - 1))
            for eos in ((), (2,)):
                assert decoded(wide, target, 6, eos) == decoded(sb.mtjd("argmax", depth), target, 6, eos)


def test_own_beams_of_one_token_are_greedy_and_sampling():
    for seed in range(4):
        target = random_table(seed, 4)
        greedy = decoded(sb.greedy(), target, 6, warp=Warp(greedy=True))
        assert decoded(sb.mtjd("beam_search", 3, beams=1), target, 6) == greedy
    assert distance(law_of(sb.mtjd("beam_sample", 2, beams=1), P, 2), completed(P, (), 2)) < 1e-12


def test_own_beams_report_how_far_they_are_from_the_best_blocks():
    target = random_table(7, 3)
    session, lm = seated(sb.mtjd("beam_search", 2, beams=1), target, steps=2)
    run(session, lm)
    best = math.log(odds_of(target, decoded(sb.mtjd("argmax", 2), target, 2)))
    assert best - session.certificate.logp <= session.certificate.gap + 1e-9


def test_own_beams_cost_a_pass_per_token_and_no_draft_pass():
    """The first pass also reads the prompt; after that a block of `depth` tokens costs `depth` passes."""
    pair = words.pair()
    before = pair.target.passes
    (one,) = sb.generate(pair, "Hello", sb.mtjd("beam_search", 3, beams=3), max_new_tokens=9, eos_token_id=[])
    assert one.report.target_passes == pair.target.passes - before == 10
    assert one.report.draft_passes == 0
    assert one.report.accepted == 0  # they are its own
    assert len(one.tokens) == 9


def test_on_a_transformer_the_modes_agree_where_they_must():
    pair = words.pair(draft_seed=None)
    exact = sb.generate(pair, ["Hello", "no"], sb.mtjd("argmax", 2), max_new_tokens=6)
    wide = sb.generate(pair, ["Hello", "no"], sb.mtjd("beam_search", 2, beams=61), max_new_tokens=6)
    assert [one.tokens for one in exact] == [one.tokens for one in wide]
    assert exact[0].report.target_passes == 3


def test_what_it_cannot_do_is_refused():
    for temperature in (0, -1.0, math.inf, math.nan):
        with pytest.raises(BadSetting, match=f"block_temperature is {temperature}"):
            sb.mtjd("joint_temperature", block_temperature=temperature)
    with pytest.raises(NotSupported, match="mode='argmax'"):
        decoded(sb.mtjd("joint_topk", 2), P, 2, warp=Warp(greedy=True))
    with pytest.raises(NotSupported, match="'greedy'"):
        decoded(sb.mtjd("ancestral", 2), P, 2, warp=Warp(greedy=True))
    with refused("mode is 'best'; it must be one of argmax, "):
        sb.mtjd("best")


@pytest.mark.parametrize(
    ("settings", "ignored"),
    [
        ({"beams": 9}, "beams=9"),
        ({"block_temperature": 0.3}, "block_temperature=0.3"),
        ({"top": 1}, "top=1"),
        ({"mode": "beam_search", "top": 3}, "top=3"),
        ({"mode": "joint_topk", "block_temperature": 2.0}, "block_temperature=2.0"),
    ],
)
def test_settings_of_other_modes_are_refused(settings, ignored):
    with pytest.raises(BadSetting, match=f"ignores {ignored}; leave it out"):
        sb.mtjd(**settings)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (sb.mtjd("argmax", 4), {}, "mode='beam_search'"),
        (sb.mtjd("joint_topk"), {"temperature": 0}, "mode='argmax'"),
        (sb.mtjd("ancestral"), {"temperature": 0}, "'greedy'"),
        (sb.mtjd("argmax"), {"audit": True}, "leave audit out"),
        (sb.mtjd("beam_sample"), {"audit": True}, "leave audit out"),
        (sb.mtjd("argmax"), {"num_return_sequences": 3}, "has one answer; num_return_sequences is 3"),
        (sb.mtjd("beam_search"), {"num_return_sequences": 3}, "has one answer; num_return_sequences is 3"),
        (sb.mtad(), {"audit": True}, "leave audit out"),
        (sb.mmtad(), {"audit": True}, "leave audit out"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_first_pass(method, options, message):
    """Of several prompts too, of which some might do: nothing is decoded that is lost afterwards."""
    pair = words.pair()
    before = pair.target.passes, pair.draft.passes
    with pytest.raises(sb.SpecbeamError, match=message) as caught:
        sb.generate(pair, [[5] * 255, [5] * 10], method, batch_size=1, **options)
    assert isinstance(caught.value, (BadSetting, NotSupported))
    assert (pair.target.passes, pair.draft.passes) == before


def test_a_short_text_needs_no_large_tree():
    """Of four tokens at once only two are wanted."""
    (one,) = sb.generate(words.pair(), "Hello", sb.mtjd("argmax", 4), max_new_tokens=2)
    assert len(one.tokens) <= 2


def test_laws_are_stated():
    assert sb.mtjd("ancestral").law == "exact: plain sampling"
    assert sb.mtjd("argmax").law.endswith("not the law of sampling")
    assert sb.mtjd("beam_search").law.startswith("approximate: changes the output law")
    lossless = {mode: sb.mtjd(mode).lossless for mode in ("ancestral", "argmax", "joint_temperature", "beam_sample")}
    assert lossless == {"ancestral": True, "argmax": False, "joint_temperature": False, "beam_sample": False}


@pytest.mark.parametrize("mode", ["argmax", "ancestral", "joint_temperature", "joint_topk"])
def test_blocks_of_banned_tokens_are_a_dead_end(mode):
    pair = sb.load(tiny("llama", vocab_size=2, bos_token_id=0, eos_token_id=1, pad_token_id=0))
    method = sb.mtjd(mode, 2, top=2) if mode == "joint_topk" else sb.mtjd(mode, 2)
    with pytest.raises(DeadEnd, match="every token is banned: suppress_tokens left nothing to draw"):
        sb.generate(pair, [[0, 1]], method, suppress_tokens=[0, 1], max_new_tokens=3)
