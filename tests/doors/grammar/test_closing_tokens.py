"""Tokens that can complete a stop string: what completes one is always among them."""

import numpy as np
import pytest

import specbeam as sb
from specbeam.doors.grammar.spelling import closing_tokens
from tests.support import words

STOPS = [(".",), ("en", "\n"), (" ",), ("<pad>",), ("ü", "qq")]


@pytest.fixture(scope="module", params=["bundled", "characters"])
def tokenizer(request):
    return sb.load("bundled").tokenizer if request.param == "bundled" else words.tokenizer()


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_what_completes_a_stop_string_is_among_them(tokenizer, stops):
    closing = closing_tokens(tokenizer, len(tokenizer) + 3, stops)
    assert closing[len(tokenizer) :].all()  # nobody knows what these are
    rng = np.random.default_rng(0)
    completed = 0
    special = rng.random((400, 12)) < 0.1
    texts = np.where(special, rng.integers(0, 4, (400, 12)), rng.integers(0, len(tokenizer), (400, 12)))
    for text in texts.tolist():
        before = ""
        for length in range(1, len(text) + 1):
            now = tokenizer.decode(text[:length])
            if any(now.count(stop) > before.count(stop) for stop in stops):
                assert closing[text[length - 1]], (before, now)
                completed += 1
            before = now
    assert completed or stops == ("ü", "qq")


def test_few_tokens_are_among_them(tokenizer):
    assert closing_tokens(tokenizer, len(tokenizer), ("q~",)).mean() < 0.2
    assert closing_tokens(tokenizer, len(tokenizer), ("e",)).mean() < 0.6


def test_nobody_knows_where_decoding_tidies_up():
    tidying = words.tokenizer()
    tidying.clean_up_tokenization_spaces = True
    assert closing_tokens(tidying, 61, (".",)) is None
