"""The tool that compares beams with those of transformers."""

import pytest
import torch

import specbeam as sb
from specbeam.evaluate.against_transformers import differences
from tests.support import words

PROMPTS = ["abc", "Hello there", "no"]


def test_no_difference_in_float32():
    pair = words.pair()
    for method in (sb.beam_search(3), sb.speculative_beam_search(3, 5, 3)):
        assert list(differences(pair, PROMPTS, method, max_new_tokens=10, repetition_penalty=1.2)) == [None] * 3


def test_a_real_difference_is_not_called_rounding():
    """The paper's beams at temperature 0 end differently from those of transformers."""
    pair = words.pair()
    found = [
        one
        for one in differences(pair, PROMPTS, sb.beam_sampling(3), max_new_tokens=12, temperature=0.0)
        if one is not None
    ]
    assert found
    assert not any(one.is_rounding for one in found)
    assert all(one.ours[: one.step] == one.theirs[: one.step] and one.ours != one.theirs for one in found)


def test_differences_in_bfloat16_are_rounding():
    target, draft = words.pair().target_model.to(torch.bfloat16), words.pair().draft_model.to(torch.bfloat16)
    pair = sb.load(target, draft, tokenizer=words.tokenizer())
    texts = [chr(97 + n % 26) + chr(97 + n * 7 % 26) for n in range(25)]
    found = list(differences(pair, texts, sb.speculative_beam_search(4, 6, 3), 5, max_new_tokens=10))
    assert all(one.is_rounding for one in found if one is not None)
    assert any(one is not None for one in found), "bfloat16 without any difference tests nothing"


@pytest.mark.parametrize("beams", [2])
def test_options_reach_both_sides(beams):
    pair = words.pair()
    options = {"max_new_tokens": 8, "length_penalty": -1.0, "early_stopping": True, "eos_token_id": [1, 7, 9, 30]}
    assert list(differences(pair, PROMPTS, sb.beam_search(beams), **options)) == [None] * 3
