"""The tool that compares beams with those of transformers."""

import torch

import specbeam as sb
from specbeam.evaluate.against_transformers import by_transformers, comparisons
from tests.support import words

PROMPTS = ["abc", "Hello there", "no"]
METHODS = [sb.beam_search(3), sb.speculative_beam_search(3, 5, 3)]


def test_no_difference_in_float32():
    found = list(comparisons(words.pair(), PROMPTS, METHODS, max_new_tokens=10, repetition_penalty=1.2))
    assert [(one.prompt, one.method) for one in found] == [
        (number, method.name) for number in range(3) for method in METHODS
    ]
    assert all(one.difference is None and one.off < 1e-4 for one in found)


def test_a_real_difference_is_not_called_rounding():
    """The paper's beams at temperature 0 end differently from those of transformers."""
    options = {"max_new_tokens": 12, "temperature": 0.0}
    found = [one.difference for one in comparisons(words.pair(), PROMPTS, [sb.beam_sampling(3)], **options)]
    found = [one for one in found if one is not None]
    assert found
    assert not any(one.is_rounding for one in found)
    assert all(one.ours[: one.step] == one.theirs[: one.step] and one.ours != one.theirs for one in found)


def test_a_score_that_is_off_is_a_difference(monkeypatch):
    """The same texts under scores that no rounding explains."""

    def halved(*given):
        return [(tokens, score / 2) for tokens, score in by_transformers(*given)]

    monkeypatch.setattr("specbeam.evaluate.against_transformers.by_transformers", halved)
    for one in comparisons(words.pair(), PROMPTS, METHODS, max_new_tokens=10):
        assert one.difference.step is None
        assert not one.difference.is_rounding
        assert one.difference.gap == one.off > 1e-2


def test_differences_in_bfloat16_are_rounding():
    target, draft = words.pair().target_model.to(torch.bfloat16), words.pair().draft_model.to(torch.bfloat16)
    pair = sb.load(target, draft, tokenizer=words.tokenizer())
    texts = [chr(97 + n % 26) + chr(97 + n * 7 % 26) for n in range(25)]
    found = list(comparisons(pair, texts, [sb.speculative_beam_search(4, 6, 3)], 5, max_new_tokens=10))
    assert all(one.difference.is_rounding for one in found if one.difference is not None)
    assert any(one.difference is not None for one in found), "bfloat16 without any difference tests nothing"
