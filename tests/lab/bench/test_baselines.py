"""CTranslate2 writes the texts of the target, whatever its family begins, scales or reads."""

import pytest
import torch
from torch import nn

import specbeam as sb
from specbeam.lab.bench.baselines import ctranslate2
from specbeam.lab.bench.outcome import specbeam
from tests.support import words
from tests.support.tiny_sources import tiny_reader

pytest.importorskip("ctranslate2")

GIVEN = ["abc", "Hello you"]
METHODS = {"greedy": sb.greedy(), "beam_search": sb.beam_search(5)}
FIRST = 40


def pair_of(family, **changes):
    """A pair of a model that speaks the tiny tokenizer; the converter takes for granted that padding is token 1."""
    numbers = {"pad_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 0}
    model = tiny_reader(family, vocab_size=len(words.tokenizer()), **(numbers | changes))
    return sb.load(model, tokenizer=words.tokenizer())


def check_same_texts(pair, given=GIVEN):
    for mode, method in METHODS.items():
        ours = specbeam(pair, mode, method, max_new_tokens=8).run(given, 0).tokens
        theirs = ctranslate2(pair, mode, 5, threads=1, max_new_tokens=8).run(given, 0).tokens
        assert theirs == ours, mode
        assert max(map(len, ours)) > 1, mode
        yield ours


# What mBART's own checkpoints say in their configurations, and transformers has no default for.
OF_MBART = {"normalize_before": True, "normalize_embedding": True}


@pytest.mark.parametrize("family", ["m2m_100", "mbart"])
@pytest.mark.parametrize("forced", [None, FIRST])
def test_texts_begin_with_the_language_that_the_model_is_told(family, forced):
    pair = pair_of(family, **(OF_MBART if family == "mbart" else {}))
    pair.target_model.generation_config.forced_bos_token_id = forced
    for texts in check_same_texts(pair):
        assert all(text[0] == FIRST for text in texts) == (forced is not None)


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_logits_are_scaled_as_those_of_the_model(family, unscaled):
    pair = pair_of(family, **({"tie_word_embeddings": False} if unscaled else {}))
    assert len([*check_same_texts(pair)]) == len(METHODS)


def test_a_head_of_its_own_is_kept():
    pair = pair_of("t5", tie_word_embeddings=False)
    head = pair.target_model.lm_head
    other = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(7))
    head.weight = nn.Parameter(other * head.weight.std())
    pair = sb.load(pair.target_model, tokenizer=pair.tokenizer)
    assert len([*check_same_texts(pair)]) == len(METHODS)


def test_long_sources_are_read_to_their_ends():
    begin = "abc " * 256
    pair = pair_of("t5")
    for texts in check_same_texts(pair, [begin, begin + "Hello you" * 20]):
        assert texts[0] != texts[1]
