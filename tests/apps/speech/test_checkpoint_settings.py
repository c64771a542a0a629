"""What a checkpoint's own generation config says counts as it does in transformers, or is refused."""

import pytest
import torch
import transformers
from transformers import WhisperFeatureExtractor

import specbeam as sb
from specbeam import errors
from specbeam.apps.speech.transcribe import Ears
from tests.support import words
from tests.support.checking import refused
from tests.test_speech import (
    BEFORE,
    BEGIN,
    END,
    ENGLISH,
    GERMAN,
    NO_TIMES,
    RATE,
    SECONDS,
    TRANSCRIBE,
    TRANSLATE,
    UNCHECKED,
    noise,
    tiny_ears,
)  # fmt: skip

LONG = noise(8.3, seed=3)
MOST = {"max_new_tokens": 12}


@pytest.fixture(autouse=True)
def quiet():
    """Without transformers' warnings about configs of its own."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def ears(seed=0, without=(), **fields):
    """A model with these fields in its generation config."""
    model = tiny_ears(seed)
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    for name in without:
        delattr(model.generation_config, name)
    return sb.load(model, tokenizer=words.tokenizer())


def theirs(pair, sound=LONG, **options):
    """The tokens of the segments that transformers' own long-form `generate` writes."""
    extract = WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    made = extract(sound, sampling_rate=RATE, truncation=False, padding="longest", return_tensors="pt")
    found = pair.target_model.generate(
        made.input_features, return_timestamps=True, return_segments=True, do_sample=False, **options
    )
    return [one["tokens"].tolist() for one in found["segments"][0]]


def ours(pair, method=None, sound=LONG, **options):
    (found,) = sb.transcribe(pair, sound, method or sb.greedy(), **UNCHECKED, **options)
    return [one.tokens for one in found.segments]


OWN = {
    "language": {"language": "de", "task": "translate"},
    "task": {"task": "translate"},
    "forced": {"forced_decoder_ids": [[1, GERMAN], [2, TRANSLATE], [3, NO_TIMES]]},
    "forced, language open": {"forced_decoder_ids": [[1, None], [2, TRANSLATE]]},
    "new names before forced": {"language": "en", "task": "transcribe", "forced_decoder_ids": [[1, GERMAN], [2, TRANSLATE]]},
    "suppressed": {"suppress_tokens": [5, 6, 7, 8, 9, 20, 30, BEGIN, ENGLISH, GERMAN], "language": "en", "task": "transcribe"},
    "first timestamp": {"max_initial_timestamp_index": 3, "language": "en", "task": "transcribe"},
    "no limit of the first timestamp": {"max_initial_timestamp_index": None, "language": "en", "task": "transcribe"},
    "repeated": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "language": "en", "task": "transcribe"},
    "not before": {"min_new_tokens": 8, "language": "en", "task": "transcribe"},
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore:the model's generation_config sets")
def test_what_it_says_counts_as_in_transformers(name):
    pair = ears(**OWN[name])
    assert ours(pair, **MOST) == theirs(pair, **MOST)


@pytest.mark.filterwarnings("ignore:the model's generation_config sets")
def test_what_the_caller_says_goes_before():
    pair = ears(language="de", task="translate", forced_decoder_ids=[[1, GERMAN], [2, TRANSLATE]])
    chosen = {"language": "en", "task": "transcribe", **MOST}
    assert ours(pair, **chosen) == theirs(pair, **chosen) != theirs(pair, **MOST)


def test_an_older_config_without_names_of_languages_begins_as_it_forces():
    pair = ears(
        forced_decoder_ids=[[1, GERMAN], [2, TRANSCRIBE], [3, NO_TIMES]],
        without=("lang_to_id", "task_to_id", "is_multilingual"),
    )
    assert ours(pair, **MOST) == theirs(pair, **MOST)
    with pytest.raises(errors.BadSetting, match="has no lang_to_id, so neither language nor task can be chosen"):
        ours(pair, language="de")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forced_decoder_ids": [[2, TRANSCRIBE]]}, "their places must be 1, 2"),
        ({"forced_decoder_ids": [[1, GERMAN], [2, None]]}, "only the first token may be None"),
        ({"compression_ratio_threshold": 1.35}, "a ratio of token bytes in transformers"),
        ({"language": "french"}, r"language is 'french'.*; this model knows 2 languages, by a code \(de, en\)"),
        ({"task": "sing"}, "task is 'sing'"),
        ({"language": 5}, "language is 5"),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields, message):
    with pytest.raises(errors.SpecbeamError, match=message):
        sb.transcribe(ears(**fields), noise(1), sb.greedy(), temperature=0.0)


def test_a_maximum_length_does_not_count_what_the_decoder_begins_with():
    sound = noise(SECONDS, seed=2)
    chosen = {"language": "en", "task": "transcribe"}
    for length in (5, 14):
        expected = theirs(ears(max_length=length), sound, **chosen)[0]
        assert ours(ears(max_length=length), sound=sound, **chosen)[0] == expected
        assert ours(ears(), sound=sound, max_length=length, **chosen)[0] == expected
        assert ours(ears(max_length=40), sound=sound, max_length=length, **chosen)[0] == expected
    assert (
        ours(ears(max_new_tokens=5), sound=sound, **chosen)[0] == theirs(ears(), sound, max_new_tokens=5, **chosen)[0]
    )


def test_its_number_of_beams_is_that_of_the_usual_method():
    chosen = {"language": "en", **MOST}
    sound = noise(SECONDS, seed=2)
    for beams in (1, 2):
        (found,) = sb.transcribe(ears(num_beams=beams), sound, **UNCHECKED, **chosen)
        assert [one.tokens for one in found.segments] == theirs(
            ears(), sound, num_beams=beams, task="transcribe", **chosen
        )


def test_its_thresholds_count_unless_the_caller_sets_them():
    sound = noise(2, seed=2)
    options = {"language": "en", "temperature": (0.0, 0.7), "best_of": 1, "seed": 1, "max_new_tokens": 8}
    unlikely = {"compression_ratio_threshold": None, "no_speech_threshold": None}

    def temperatures(pair, **more):
        (found,) = sb.transcribe(pair, sound, sb.greedy(), **options, **more)
        return {one.temperature for one in found.segments}

    assert temperatures(ears(logprob_threshold=0.0), **unlikely) == {0.7}
    assert temperatures(ears(logprob_threshold=-99.0), **unlikely) == {0.0}
    assert temperatures(ears(logprob_threshold=0.0), **unlikely, log_prob_threshold=None) == {0.0}
    assert temperatures(ears(logprob_threshold=0.0), **unlikely, logprob_threshold=-99.0) == {0.0}
    silent = ears(logprob_threshold=0.0, no_speech_threshold=-1.0)
    assert temperatures(silent, compression_ratio_threshold=None) == set()


def test_several_end_tokens_are_all_ends():
    """transformers' own processor for timestamps takes one."""
    pair = ears(eos_token_id=[END, 20])
    for tokens in ours(pair, language="en", **MOST):
        assert END not in tokens
        assert 20 not in tokens


# Text of the windows before.


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("prompt", [None, "abc"])
@pytest.mark.parametrize("seconds", [SECONDS, 8.3, 11.0])
def test_windows_conditioned_on_what_was_said_are_those_of_transformers(beams, prompt, seconds):
    pair = ears()
    sound = noise(seconds, seed=3)
    chosen = {"language": "de", "task": "translate", "max_new_tokens": 16}
    begun = {}
    if prompt is not None:
        ids = words.tokenizer()(f" {prompt}", add_special_tokens=False)["input_ids"]
        begun = {"prompt_ids": torch.tensor([BEFORE, *ids])}
    method = sb.greedy() if beams == 1 else sb.beam_search(beams)
    for conditions in (True, False):
        expected = theirs(pair, sound, num_beams=beams, condition_on_prev_tokens=conditions, **begun, **chosen)
        found = ours(pair, method, sound, prompt=prompt, condition_on_previous_text=conditions, **chosen)
        assert found == expected
        assert ours(ears(condition_on_prev_tokens=conditions), method, sound, prompt=prompt, **chosen) == expected


def test_what_was_said_is_cut_to_half_of_the_positions():
    """Of 20 tokens a window and 31 for what was said before."""
    pair = ears()
    chosen = {"language": "en", "task": "transcribe", "max_new_tokens": 20}
    sound = noise(14, seed=3)
    assert ours(pair, sound=sound, condition_on_previous_text=True, **chosen) == theirs(
        pair, sound, condition_on_prev_tokens=True, **chosen
    )


def test_audios_side_by_side_are_each_conditioned_on_their_own_text():
    pair = ears()
    sounds = [noise(7, seed=1), noise(2, seed=2), noise(9, seed=4)]
    chosen = {"language": "en", "condition_on_previous_text": True, **MOST}
    together = sb.transcribe(pair, sounds, sb.beam_search(2), **UNCHECKED, **chosen)
    for sound, one in zip(sounds, together, strict=True):
        assert [segment.tokens for segment in one.segments] == ours(pair, sb.beam_search(2), sound, **chosen)
    assert pair.target.runner.cross.lengths == []


@pytest.mark.parametrize(("temperature", "resets"), [(0.4, False), (0.5, False), (0.6, True)])
def test_what_was_said_above_a_temperature_of_one_half_is_no_prompt(temperature, resets, monkeypatch):
    pair = ears()
    starts = []
    window = Ears._window

    def noted(self, listening):
        made = window(self, listening)
        starts.append(made.start)
        return made

    monkeypatch.setattr(Ears, "_window", noted)
    options = {**UNCHECKED, "temperature": temperature, "best_of": 1, "seed": 3, "max_new_tokens": 6, "language": "en"}
    sb.transcribe(pair, noise(7, seed=1), prompt="ab", condition_on_previous_text=True, **options)
    assert len(starts) > 2
    assert {len(start) == len(starts[0]) for start in starts[1:]} == {resets}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "a", "initial_prompt": "b"}, "initial_prompt is an alias of prompt, and both are given"),
        ({"log_prob_threshold": -1.0, "logprob_threshold": -1.0}, "logprob_threshold is an alias"),
        (
            {"condition_on_previous_text": True, "condition_on_prev_tokens": False},
            "condition_on_prev_tokens is an alias",
        ),
        ({"condition_on_previous_text": "yes"}, "condition_on_previous_text is 'yes'"),
        ({"condition_on_previous_text": True, "max_new_tokens": 40}, "there is room for 29"),
        ({"decoder_input_ids": [1]}, "transcribe sets decoder_input_ids itself"),
        ({"num_return_sequences": 2}, "transcribe sets num_return_sequences itself"),
        ({"beam_size": 5}, r"transcribe\(\) has no option beam_size, .* give method=sb\.beam_search\(beams=5\)"),
        ({"langage": "en"}, r"transcribe\(\) has no option langage \(did you mean language\?\)"),
        ({"word_timestamps": True}, "word_timestamps: times of single words are not supported"),
        ({"zzz": 1}, r"no option zzz; it has audio, method, rate, language, .*, max_new_tokens, "),
        ({"prompt": "</s>a"}, "prompt has the special token </s>"),
        ({"max_length": 0}, "max_length is 0"),
    ],
)
def test_options_that_contradict_or_say_nothing_are_refused(options, message):
    with refused(message):
        sb.transcribe(ears(), noise(1), sb.greedy(), language="en", temperature=0.0, **options)


def test_names_of_openai_and_transformers_are_taken():
    sound = noise(7, seed=1)
    usual = {
        "temperature": 0.0,
        "compression_ratio_threshold": None,
        "no_speech_threshold": None,
        "language": "en",
        **MOST,
    }
    ours_named = {"prompt": "ab", "log_prob_threshold": None, "condition_on_previous_text": True}
    openai_named = {"initial_prompt": "ab", "logprob_threshold": None, "condition_on_previous_text": True}
    transformers_named = {"initial_prompt": "ab", "logprob_threshold": None, "condition_on_prev_tokens": True}
    found = [
        sb.transcribe(ears(), sound, sb.greedy(), **named, **usual)
        for named in (ours_named, openai_named, transformers_named)
    ]
    assert found[0] == found[1] == found[2]


def test_logits_processors_of_the_caller_join_those_for_timestamps():
    seen = []

    def note(ids, scores):
        seen.append(ids.shape[1])
        return scores

    pair = ears()
    assert ours(pair, language="en", logits_processor=[note], **MOST) == ours(pair, language="en", **MOST)
    assert seen


@pytest.mark.parametrize("name", ["language", "forced", "new names before forced"])
def test_generate_begins_with_the_language_and_the_task_of_the_checkpoint(name):
    pair = ears(**OWN[name])
    extract = WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    features = extract(noise(SECONDS, seed=3), sampling_rate=RATE, return_tensors="pt").input_features
    expected = pair.target_model.generate(features, do_sample=False, **MOST)[0].tolist()
    (found,) = sb.generate(pair, features[0], "greedy", **MOST)
    length = min(len(found.tokens), len(expected))
    assert length > 3
    assert found.prompt[-1] == NO_TIMES
    assert found.tokens[:length] == expected[-length:] or found.tokens[:length] == expected[:length]


def test_generate_refuses_to_detect_a_language():
    pair = ears(**OWN["task"])
    extract = WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    features = extract(noise(SECONDS, seed=3), sampling_rate=RATE, return_tensors="pt").input_features
    with pytest.raises(errors.NotSupported, match=r"sets task='translate' without a language"):
        sb.generate(pair, features[0], "greedy", **MOST)
    begin = [BEGIN, GERMAN, TRANSLATE, NO_TIMES]
    (found,) = sb.generate(pair, features[0], "greedy", decoder_input_ids=begin, **MOST)
    assert found.prompt == begin
