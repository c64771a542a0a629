"""The likelihood of a window's text, which thresholds decide by: per token, whatever decoded it."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

import specbeam as sb
from specbeam import errors
from specbeam.apps.speech.transcribe import Thresholds, thresholds_of
from specbeam.doors import speech_tokens_of
from tests.support import words
from tests.test_speech import (
    BEGIN,
    END,
    ENGLISH,
    FIRST_TIME,
    NO_SPEECH,
    RATE,
    SECONDS,
    TRANSCRIBE,
    UNCHECKED,
    extractor,
    noise,
    tiny_ears,
)  # fmt: skip

START = [BEGIN, ENGLISH, TRANSCRIBE]
SOUND = noise(SECONDS, seed=2)


def ears(seed=0, ends=0.0, **fields):
    """A model that is inclined to end its texts, with fields of its generation config."""
    model = tiny_ears(seed)
    with torch.no_grad():
        model.proj_out.weight[END] += ends * model.model.decoder.layer_norm.bias.new_ones(32)
        model.model.decoder.layer_norm.bias += ends / 4
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return sb.load(model, tokenizer=words.tokenizer())


def heard(pair, method=None, sound=SOUND, **options):
    options = {"language": "en", "max_new_tokens": 12, **UNCHECKED, **options}
    if method is None and np.min(options.get("temperature", 0.0)) == 0:
        method = sb.greedy()
    return sb.transcribe(pair, sound, method, **options)[0].segments


@torch.inference_mode()
def average(pair, tokens, sound=SOUND):
    """The sum of the log-probabilities of tokens and, if it was written, the end; by the number of tokens and one more.

    By transformers' own forward, with its own processors.
    """
    config = pair.target_model.generation_config
    features = extractor()(sound, sampling_rate=RATE, return_tensors="pt").input_features
    processors = LogitsProcessorList(
        [
            SuppressTokensLogitsProcessor(config.suppress_tokens),
            SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, len(START)),
            *speech_tokens_of(pair).processors(len(START), True),
        ]
    )
    total = 0.0
    for place, token in enumerate(tokens):
        path = torch.tensor([START + tokens[:place]])
        logits = pair.target_model(input_features=features, decoder_input_ids=path).logits[:, -1].float()
        total += float(processors(path, logits).log_softmax(-1)[0, token])
    return total / (len(tokens) + (tokens[-1] != END))


METHODS = {"greedy": sb.greedy(), "beams": sb.beam_search(3)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ends", [0.0, 0.6])
def test_it_is_that_of_the_law_after_the_processors_per_token(method, ends):
    """As openai/whisper computes it: the end counts as a token, even where a limit cut the text off."""
    pair = ears(ends=ends)
    segments = heard(pair, METHODS[method])
    tokens = [token for segment in segments if segment.seek == 0 for token in segment.tokens]
    complete = tokens if len(tokens) == 12 else [*tokens, END]
    assert (complete[-1] == END) == (ends > 0)
    assert segments[0].avg_logprob == pytest.approx(average(pair, complete), abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("penalty", [0.0, 0.5, 2.0, -1.0])
def test_it_does_not_depend_on_the_length_penalty(method, penalty):
    """Neither on that of the caller nor on the checkpoint's own."""
    usual = heard(ears(), METHODS[method])
    for found in (
        heard(ears(), METHODS[method], length_penalty=penalty),
        heard(ears(length_penalty=penalty), METHODS[method]),
    ):
        assert [one.tokens for one in found] == [one.tokens for one in usual]
        assert [one.avg_logprob for one in found] == pytest.approx([one.avg_logprob for one in usual], abs=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_thresholds_decide_by_it_whatever_the_length_penalty(penalty):
    pair = ears(length_penalty=penalty)
    value = heard(pair)[0].avg_logprob
    for limit, expected in ((value - 0.01, 0.0), (value + 0.01, 0.7)):
        found = heard(pair, temperature=(0.0, 0.7), log_prob_threshold=limit, seed=1, best_of=2)
        assert {segment.temperature for segment in found if segment.seek == 0} == {expected}
        silence = heard(pair, log_prob_threshold=limit, no_speech_threshold=-1.0)
        assert bool(silence) == (expected == 0.0)


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_drawn_texts_have_the_likelihood_at_temperature_1(temperature):
    pair = ears()
    found = heard(pair, temperature=temperature, seed=1, best_of=3, max_new_tokens=6)
    tokens = [token for segment in found if segment.seek == 0 for token in segment.tokens]
    assert len(tokens) == 6  # what follows the last pair of timestamps would not be kept
    assert found[0].avg_logprob == pytest.approx(average(pair, tokens), abs=1e-4)


def test_drafts_and_the_engine_of_transformers_change_nothing():
    model = tiny_ears()
    alone = heard(sb.load(model, tokenizer=words.tokenizer()), sb.beam_search(2))
    together = heard(sb.load(tiny_ears(), tiny_ears(1, 1), tokenizer=words.tokenizer()), sb.speculative_beam_search(2))
    assert [one.tokens for one in alone] == [one.tokens for one in together]
    assert [one.avg_logprob for one in alone] == pytest.approx([one.avg_logprob for one in together], abs=1e-4)


def test_silence_is_decided_by_its_own_threshold_where_there_is_none_for_texts():
    pair = ears()
    (first, *_) = heard(pair, no_speech_threshold=1.1)
    features = extractor()(SOUND, sampling_rate=RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        logits = pair.target_model(input_features=features, decoder_input_ids=torch.tensor([[BEGIN]])).logits[0, -1]
    assert first.no_speech_prob == pytest.approx(float(logits.softmax(-1)[NO_SPEECH]), rel=1e-3)
    assert heard(pair, no_speech_threshold=first.no_speech_prob - 1e-6) == []
    assert heard(pair, no_speech_threshold=first.no_speech_prob + 1e-6)


def test_thresholds_are_numbers_or_none():
    for name in ("compression_ratio_threshold", "log_prob_threshold", "no_speech_threshold"):
        with pytest.raises(errors.BadSetting, match=f"{name} is nan"):
            heard(ears(), **{name: float("nan")})
    assert thresholds_of(None) == Thresholds(2.4, -1.0, 0.6)


# Times.


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.01, 2.0, 2.995, 3.0, 3.4, 7.3])
@pytest.mark.parametrize("timestamps", [True, False])
def test_no_time_is_beyond_the_end_of_the_audio(seconds, timestamps):
    """Also of texts without timestamps, or with timestamps in no order."""
    for seed in range(3):
        model = tiny_ears(seed)
        with torch.no_grad():
            model.proj_out.weight[FIRST_TIME:] *= 1.3
        sound = noise(seconds, seed)
        options = {"language": "en", "max_new_tokens": 16, "timestamps": timestamps, **UNCHECKED}
        (found,) = sb.transcribe(sb.load(model, tokenizer=words.tokenizer()), sound, sb.greedy(), **options)
        assert found.segments
        for segment in found.segments:
            assert 0 <= segment.start <= segment.end <= found.duration


def test_progress_ends_with_the_audio():
    seen = []
    options = {"max_new_tokens": 12, "language": "en", **UNCHECKED}
    sb.transcribe(ears(), noise(4.2, 5), sb.greedy(), on_progress=lambda *said: seen.append(said), **options)
    assert seen[-1] == (0, 4.2, 4.2)
    assert all(done <= whole for _, done, whole in seen)
