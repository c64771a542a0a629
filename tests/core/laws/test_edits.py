"""What options change in rows, against transformers' processors: the same numbers, to the last bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from specbeam.core.beams import room_for_texts
from specbeam.core.laws.edits import NO_EDITS, edited_rows
from specbeam.core.laws.warp import Warp
from specbeam.core.ranked import whole_rows
from specbeam.doors.options.processors import TextFacts
from specbeam.doors.options.settings import Settings
from tests.support.seats import random_forest
from tests.support.steps import source_of_steps

VOCAB = 23
PROMPT = [4, 7, 7, 22]
EOS = (2, 11, 99)  # one is beyond the model's tokens
SETTINGS = {
    "penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "least": {"min_new_tokens": 5},
    "both": {"repetition_penalty": 1.2, "min_new_tokens": 4},
    "bad words": {"bad_words_ids": [[7], [22], [2]]},
    "suppressed": {"suppress_tokens": [20, 7]},
    "all": {"repetition_penalty": 0.7, "bad_words_ids": [[8]], "min_new_tokens": 4, "suppress_tokens": [9, 7]},
}
TIMES = 15  # the first timestamp
LEFT = {
    "no repeats": {"no_repeat_ngram_size": 2},
    "bad words of several tokens": {"bad_words_ids": [[3], [5, 8]]},
    "one that can and one that cannot": {"suppress_tokens": [3], "no_repeat_ngram_size": 2},
    "a user's own": {"logits_processor": [lambda ids, scores: scores]},
}


def warp_of(**settings):
    return Settings(**settings).warp(TextFacts(EOS, len(PROMPT)))


def turn_of(rng, dtype):
    """Texts of three beams, a forest below them, and a row of each node, of which some are none."""
    lived = rng.integers(0, VOCAB, (3, 3))
    texts = room_for_texts(None, 4, 8)
    texts.tokens[:3, :3] = lived
    texts.sizes[:] = (3, 3, 0)
    forest = random_forest(rng, lived[:, -1].tolist(), VOCAB, 8)
    rows = rng.normal(0, 2, (forest.size, VOCAB)).astype(dtype)
    rows[rng.random(rows.shape) < 0.1] = -np.inf
    rows[-1, 3:5] = (np.nan, np.inf)
    return lived, texts, forest, rows


def processed(warp, lived, forest, rows):
    """What transformers' processors make of each row, after its path."""
    found = []
    for node in range(forest.size):
        path = [*PROMPT, *lived[forest.root_of(np.array([node]))[0]].tolist(), *forest.path(node)]
        found.append(warp.processors(torch.tensor([path]), torch.from_numpy(rows[node : node + 1]))[0].numpy())
    return np.array(found)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_are_those_of_transformers_processors(name, dtype):
    rng = np.random.default_rng(5)
    warp = warp_of(**SETTINGS[name])
    for _ in range(10):
        lived, texts, forest, rows = turn_of(rng, dtype)
        edits = warp.edits(PROMPT)._replace(texts=texts)
        expected = processed(warp, lived, forest, rows)
        before = rows.copy()
        every = np.arange(forest.size)
        for nodes in (every, every[forest.roots :], every[::2]):
            found = edited_rows(whole_rows(rows[nodes]), nodes, forest.tokens, forest.parents, edits).logits
            with source_of_steps():
                plain = edited_rows(whole_rows(rows[nodes]), nodes, forest.tokens, forest.parents, edits).logits
            np.testing.assert_array_equal(found, expected[nodes])
            np.testing.assert_array_equal(plain, expected[nodes])
        np.testing.assert_array_equal(rows, before)


BEGIN = len(PROMPT)


def rules_of_whisper(begin=BEGIN, **settings):
    """The rules of timestamps, after the tokens that are suppressed."""
    given = {"no_timestamps_token_id": TIMES - 1, "eos_token_id": 11, "max_initial_timestamp_index": 3} | settings
    return WhisperTimeStampLogitsProcessor(SimpleNamespace(**given, bos_token_id=11), begin)


@pytest.mark.parametrize(
    "settings", [{}, {"max_initial_timestamp_index": None}, {"_detect_timestamp_from_logprob": False}]
)
@pytest.mark.parametrize("lived", [0, 1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rules_of_whispers_timestamps_are_those_of_transformers(settings, lived, dtype):
    rng = np.random.default_rng(7)
    warp = Warp(
        LogitsProcessorList(
            [
                SuppressTokensLogitsProcessor([3, 9]),
                SuppressTokensAtBeginLogitsProcessor([5, 11, 16], len(PROMPT)),
                rules_of_whisper(**settings),
            ]
        )
    )
    for _ in range(40):
        before, texts, forest, rows = turn_of(rng, dtype)
        rows[:, TIMES:] += rng.normal(0, 2)
        before = np.where(rng.random(before.shape) < 0.5, rng.integers(TIMES, VOCAB, before.shape), before)
        texts.tokens[:3, :3] = before
        texts.sizes[1] = lived
        edits = warp.edits(PROMPT)._replace(texts=texts)
        expected = processed(warp, before[:, :lived], forest, rows)
        every = np.arange(forest.size)
        found = edited_rows(whole_rows(rows), every, forest.tokens, forest.parents, edits).logits
        with source_of_steps():
            plain = edited_rows(whole_rows(rows), every, forest.tokens, forest.parents, edits).logits
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(plain, expected)


def test_rows_of_a_draft_without_timestamps_keep_their_text():
    """A draft model of the first tokens alone has no row of timestamps to compare."""
    edits = Warp(LogitsProcessorList([rules_of_whisper()])).edits(PROMPT)
    texts = room_for_texts(None, 1, 8)
    texts.tokens[0, :3] = (TIMES, 4, 5)
    texts.sizes[:] = (1, 3, 0)
    rows = np.random.default_rng(3).normal(0, 2, (1, TIMES - 2)).astype(np.float32)
    roots = np.array([5]), np.array([-1])
    found = edited_rows(whole_rows(rows), np.array([0]), *roots, edits._replace(texts=texts)).logits
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("begin", [len(PROMPT) - 1, len(PROMPT) + 1])
def test_rules_of_another_beginning_and_processors_after_them_are_left_to_python(begin):
    assert Warp(LogitsProcessorList([rules_of_whisper(begin)])).edits(PROMPT) is None
    assert Warp(LogitsProcessorList([SuppressTokensAtBeginLogitsProcessor([5], begin)])).edits(PROMPT) is None
    later = LogitsProcessorList([rules_of_whisper(), SuppressTokensLogitsProcessor([3])])
    assert Warp(later).edits(PROMPT) is None


def test_rows_without_edits_are_handed_on():
    _, _, forest, rows = turn_of(np.random.default_rng(1), np.float32)
    whole = whole_rows(rows)
    with source_of_steps():
        assert edited_rows(whole, np.arange(forest.size), forest.tokens, forest.parents, NO_EDITS) is whole


@pytest.mark.parametrize("settings", LEFT.values(), ids=LEFT)
def test_what_steps_cannot_do_is_left_to_python(settings):
    assert warp_of(**settings).edits(PROMPT) is None


def test_a_penalty_that_leaves_out_the_prompt_is_left_to_python():
    from transformers import RepetitionPenaltyLogitsProcessor

    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2)])
    assert Warp(processors).edits(PROMPT) is None
    assert Warp().edits(PROMPT).penalty == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", SETTINGS)
def test_in_transformers_beam_modes_log_probabilities_are_processed(name, dtype):
    """Theirs are made by torch in another order of sums, so the last bits may differ."""
    rng = np.random.default_rng(6)
    warp = Settings(**SETTINGS[name]).warp(TextFacts(EOS, len(PROMPT), search=True))
    for _ in range(10):
        lived, texts, forest, rows = turn_of(rng, dtype)
        rows[-1, 3:5] = 1.0, -2.0
        edits = warp.edits(PROMPT)._replace(texts=texts)
        expected = processed(warp, lived, forest, torch.from_numpy(rows).log_softmax(-1).numpy())
        found = edited_rows(whole_rows(rows), np.arange(forest.size), forest.tokens, forest.parents, edits).logits
        with source_of_steps():
            plain = edited_rows(whole_rows(rows), np.arange(forest.size), forest.tokens, forest.parents, edits).logits
        close = 4e-6 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(found, expected, rtol=0, atol=close)
        np.testing.assert_allclose(plain, expected, rtol=0, atol=close)


def test_rows_that_are_none_stay_none_in_transformers_beam_modes():
    warp = Settings(repetition_penalty=1.2).warp(TextFacts(EOS, len(PROMPT), search=True))
    _, texts, forest, rows = turn_of(np.random.default_rng(2), np.float32)
    rows[0] = -np.inf
    edits = warp.edits(PROMPT)._replace(texts=texts)
    found = edited_rows(whole_rows(rows), np.arange(forest.size), forest.tokens, forest.parents, edits).logits
    assert (found[0] == -np.inf).all()
    assert np.isnan(found[-1, 3])
