"""Where a text paints itself into a corner: this vocabulary has no ö."""

import contextlib
import itertools

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam import errors
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp, dense_logp
from tests.doors.grammar.forms import characters

BEAMS = {
    "search": lambda: sb.beam_search(2),
    "speculative search": lambda: sb.speculative_beam_search(2, 4, 3),
    "sampling": lambda: sb.beam_sampling(2),
    "noise": lambda: sb.dsbd(2, 4, 3, "fixed"),
    "rejection": lambda: sb.dsbd(2, 4, 3, "fixed", coupling="rejection"),
    "replacement": lambda: sb.dsbd(60, 60, 3, "fixed", coupling="rejection", replacement=True),
    "dynamic": lambda: sb.dsbd(2, 4, 3, min_beams=2, width="dynamic"),
    "collapse": lambda: sb.dsbd(2, 2, 1, "fixed", coupling="rejection", collapse=True),
    "hf sampling": lambda: sb.beam_sampling(2, semantics="hf"),
    "hf speculative": lambda: sb.dsbd(2, 4, 3, "fixed", semantics="hf"),
}


@pytest.mark.parametrize("name", BEAMS)
def test_texts_that_are_finished_survive_the_dead_end_of_the_others(name):
    pair, seen = characters(), set()
    for seed in range(4):
        for one in sb.generate(pair, ["abc", "abcabc"], BEAMS[name](), seed=seed, regex="x|yaö"):
            seen.add(one.text)
            assert one.beams[0].finished
            assert 0 not in one.report.widths
    assert seen == {"x"}


@pytest.mark.parametrize("name", ["search", "noise", "rejection"])
def test_a_prompt_of_which_no_beam_has_a_way_on_has_failed(name):
    with pytest.raises(errors.DeadEnd, match="step 2: every token is banned: regex left nothing to draw"):
        sb.generate(characters(), "abc", BEAMS[name](), seed=0, regex="(x|y)aö")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"regex": "[a-c]{2}", "min_new_tokens": 5}, "min_new_tokens and regex"),
        ({"regex": "abcabc", "no_repeat_ngram_size": 2}, "no_repeat_ngram_size and regex"),
        ({"grammar": 'start: "x"', "bad_words_ids": [[27]], "temperature": 0.5}, "bad_words_ids and grammar"),
        ({"regex": "yö", "repetition_penalty": 1.2}, "banned: regex left"),
    ],
)
def test_a_dead_end_names_the_options_that_can_have_made_it(options, cause):
    assert characters().tokenizer.convert_ids_to_tokens(27) == "x"
    with pytest.raises(errors.DeadEnd, match=cause):
        sb.generate(characters(), "abc", "sampling", seed=0, **options)


CUTS = [
    dict(zip(("top_k", "top_p", "min_p"), cuts, strict=True))
    for cuts in itertools.product((0, 5), (1.0, 0.9), (0.0, 0.1))
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_draft_row_of_which_all_is_banned_stays_so(cuts):
    logits = torch.randn(3, 20)
    logits[1] = -torch.inf
    rows = dense_logp(logits.numpy(), Warp(truncation=Truncation(0.7, **cuts)))
    assert (rows[1] == -np.inf).all()
    assert np.exp(rows[[0, 2]]).sum(1) == pytest.approx(1.0)


@pytest.mark.parametrize("cuts", [{"top_k": 5, "min_p": 0.1}, {"top_k": 5, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("method", [sb.rsd_s, sb.traversal, sb.speculative_sampling, sb.sequoia, sb.opt_tree])
def test_drafts_that_lead_nowhere_do_no_harm_under_truncation(method, cuts):
    """The prompts whose own text goes there fail as a dead end, the others are answered."""
    results = []
    options = {"seed": 0, "regex": "[a-xz]|yö", "on_result": lambda _, one: results.append(one)}
    with contextlib.suppress(errors.SomeFailed):
        sb.generate(characters(), ["abc", "abd", "b", "hello"], method(), **options, **cuts)
    assert all(isinstance(one, errors.DeadEnd) or len(one.text) == 1 for one in results)
    assert any(isinstance(one, sb.Generation) for one in results)
