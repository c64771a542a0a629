"""Speech to text with Whisper shapes of random weights: windows, timestamps, fallback, formats, bad audio."""

import inspect
import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor

import specbeam as sb
from specbeam import errors
from specbeam.apps.speech.audio import RATE, read_audio, resampled
from specbeam.apps.speech.formats import formatted
from specbeam.apps.speech.records import Segment, Transcript
from specbeam.apps.speech.windows import Slice, slices_of
from tests.support import media, words

WORDS = len(words.tokenizer())
END, BEGIN, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, BEFORE, NO_SPEECH, NO_TIMES = range(WORDS, WORDS + 9)
FIRST_TIME = NO_TIMES + 1
SECONDS = 3  # of a window
VOCAB = FIRST_TIME + 50 * SECONDS + 1


def tiny_ears(seed=0, layers=2, scale=6.0):
    """A Whisper model of random weights with windows of three seconds, whose text tokens are those of a small tokenizer."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "whisper", vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=16,
        max_source_positions=50 * SECONDS, max_target_positions=64, bos_token_id=END, eos_token_id=END, pad_token_id=END,
        decoder_start_token_id=BEGIN,
    )  # fmt: skip
    model = AutoModelForSpeechSeq2Seq.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
        model.proj_out.weight[FIRST_TIME:] *= 1.3
    fields = {
        "suppress_tokens": [7, 9, BEGIN, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, BEFORE, NO_SPEECH],
        "begin_suppress_tokens": [11, END],
        "no_timestamps_token_id": NO_TIMES,
        "max_initial_timestamp_index": 50,
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        "prev_sot_token_id": BEFORE,
        "return_timestamps": False,
    }
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False  # or it would be made anew when the model is loaded
    return model


@pytest.fixture(scope="module")
def ears():
    return sb.load(tiny_ears(), tiny_ears(1, 1), tokenizer=words.tokenizer())


def noise(seconds, seed=0):
    """Noise whose loudness and colour change, float32 at 16 kHz."""
    rng = np.random.default_rng(seed)
    samples = rng.normal(size=int(seconds * RATE))
    slow = np.sin(np.arange(len(samples)) / 9000) ** 2
    return (0.1 * slow * np.convolve(samples, np.ones(1 + seed % 5), "same")).astype(np.float32)


def extractor():
    return WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)


UNCHECKED = {
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "log_prob_threshold": None,
    "no_speech_threshold": None,
}


@pytest.mark.parametrize(
    ("seconds", "beams", "language", "task"),
    [(8.3, 3, "en", "transcribe"), (7.0, 1, "german", "translate"), (2 * SECONDS, 2, None, "transcribe")],
)
def test_tokens_and_times_are_those_of_transformers(ears, seconds, beams, language, task):
    """Of audio of several windows, with beams and without, in a language that is given or detected."""
    samples = noise(seconds, seed=3)
    method = sb.greedy() if beams == 1 else sb.speculative_beam_search(beams, depth=2)
    options = {"max_new_tokens": 24}
    (ours,) = sb.transcribe(ears, samples, method, language=language, task=task, **UNCHECKED, **options)
    made = extractor()(samples, sampling_rate=RATE, truncation=False, padding="longest", return_tensors="pt")
    theirs = ears.target_model.generate(
        made.input_features, return_timestamps=True, return_segments=True, language=language,
        task=task, num_beams=beams, do_sample=False, **options,
    )["segments"][0]  # fmt: skip
    assert [one.tokens for one in ours.segments] == [one["tokens"].tolist() for one in theirs]
    for name in ("start", "end"):  # their times go on to the end of the window
        inside = [min(float(one[name]), ours.duration) for one in theirs]
        assert [getattr(one, name) for one in ours.segments] == pytest.approx(inside)
    assert len(ours.segments) > 1
    assert ours.language in ("en", "de")
    assert ours.text == "".join(one.text for one in ours.segments).strip()


def test_the_window_whose_language_is_detected_is_encoded_once(ears, monkeypatch):
    encoder = ears.target.encoder
    read = encoder.read
    windows = []

    def counting(sources):
        windows.extend(sources)
        return read(sources)

    monkeypatch.setattr(encoder, "read", counting)
    samples = noise(7, seed=3)
    (found,) = sb.transcribe(ears, samples, sb.greedy(), max_new_tokens=12, **UNCHECKED)
    spoken = len(windows)
    (told,) = sb.transcribe(ears, samples, sb.greedy(), language=found.language, max_new_tokens=12, **UNCHECKED)
    assert spoken == len(windows) - spoken > 1
    assert told.segments == found.segments


def test_text_without_timestamps_is_that_of_transformers(ears):
    samples = noise(SECONDS, seed=5)
    (ours,) = sb.transcribe(
        ears, samples, sb.beam_search(2), language="en", timestamps=False, max_new_tokens=10, **UNCHECKED
    )
    made = extractor()(samples, sampling_rate=RATE, return_tensors="pt")
    theirs = ears.target_model.generate(
        made.input_features, language="en", num_beams=2, do_sample=False, max_new_tokens=10, return_timestamps=False
    )
    found = [token for segment in ours.segments for token in segment.tokens]
    assert found == [token for token in theirs[0].tolist() if token != END]


def test_audios_side_by_side_are_transcribed_as_each_by_itself(ears):
    sounds = [noise(7, seed=1), noise(2, seed=2), noise(4, seed=4)]
    options = {"language": "en", "max_new_tokens": 12, "seed": 3, **UNCHECKED}
    together = sb.transcribe(ears, sounds, sb.beam_search(2), **options)
    for sound, one in zip(sounds, together, strict=True):
        (alone,) = sb.transcribe(ears, sound, sb.beam_search(2), **options)
        assert [segment.tokens for segment in alone.segments] == [segment.tokens for segment in one.segments]
    assert ears.target.runner.cross.lengths == []


def test_segments_are_handed_over_window_by_window(ears):
    sounds = [noise(7, seed=1), noise(4, seed=4)]
    events = []
    found = sb.transcribe(
        ears, sounds, sb.greedy(), language="en", max_new_tokens=12, seed=3, **UNCHECKED,
        on_segment=lambda number, segment: events.append((number, segment)),
        on_progress=lambda number, done, total: events.append((number, done)),
    )  # fmt: skip
    for number, one in enumerate(found):
        assert [event for which, event in events if which == number and not isinstance(event, float)] == one.segments
    first = next(place for place, (_, event) in enumerate(events) if isinstance(event, float))
    assert 0 < first < len(events) - 1  # the first window's segments come before it is counted, and all others after


def test_texts_that_fail_a_threshold_are_decoded_again_at_the_next_temperature(ears):
    sound = noise(2, seed=2)
    options = {"language": "en", "max_new_tokens": 8, "seed": 3, "no_speech_threshold": None, "best_of": 2}
    for given, expected in (
        ({"log_prob_threshold": None, "compression_ratio_threshold": None}, 0.0),
        ({"log_prob_threshold": 0.0, "compression_ratio_threshold": None}, 0.7),
        ({"log_prob_threshold": None, "compression_ratio_threshold": 0.0}, 0.7),
    ):
        (found,) = sb.transcribe(ears, sound, sb.beam_search(2), temperature=(0.0, 0.7), **given, **options)
        assert {segment.temperature for segment in found.segments} == {expected}
        (again,) = sb.transcribe(ears, sound, sb.beam_search(2), temperature=(0.0, 0.7), **given, **options)
        assert [one.tokens for one in again.segments] == [one.tokens for one in found.segments]
        assert found.target_passes > 0


def test_a_method_that_no_temperature_uses_is_refused(ears):
    """Above temperature 0 texts are sampled, whatever the method."""
    for temperature in (0.7, (0.2, 0.4)):
        with pytest.raises(errors.BadSetting, match="the method is for temperature 0"):
            sb.transcribe(ears, noise(1), sb.dsbd(2), temperature=temperature)
    (found,) = sb.transcribe(ears, noise(1), temperature=0.7, seed=1, language="en", max_new_tokens=4)
    assert found.target_passes > 0


def test_the_command_refuses_a_method_that_no_temperature_uses(ears, tmp_path, capsys, monkeypatch):
    from specbeam.doors.cli.main import main as commands

    save_ears(ears, tmp_path)
    (tmp_path / "one.wav").write_bytes(media.encoded(np.stack([noise(1)] * 2, 1)))
    asked = ["specbeam", "transcribe", str(tmp_path / "one.wav"), "-m", str(tmp_path), "--method", "greedy"]
    monkeypatch.setattr("sys.argv", [*asked, "--temperature", "0.7"])
    with pytest.raises(SystemExit) as ended:
        commands()
    assert ended.value.code == 2
    assert "the method is for temperature 0" in capsys.readouterr().err


def test_a_window_that_is_unlikely_and_probably_silent_is_left_out(ears):
    sound = noise(2, seed=2)
    options = {"language": "en", "max_new_tokens": 8, "temperature": 0.0, "compression_ratio_threshold": None}
    for limit, segments in ((-1.0, 0), (1.1, 1)):
        (found,) = sb.transcribe(ears, sound, sb.greedy(), log_prob_threshold=0.0, no_speech_threshold=limit, **options)
        assert bool(found.segments) == bool(segments)
    made = extractor()(sound, sampling_rate=RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        logits = ears.target_model(input_features=made, decoder_input_ids=torch.tensor([[BEGIN]])).logits[0, -1]
    assert found.segments[0].no_speech_prob == pytest.approx(float(logits.softmax(-1)[NO_SPEECH]), rel=1e-3)


def test_silence_has_no_segments_and_no_pass(ears):
    (found,) = sb.transcribe(ears, np.zeros(2 * RATE, dtype=np.float32))
    assert (found.segments, found.text, found.duration, found.target_passes) == ([], "", 2.0, 0)


def test_a_prompt_is_what_was_said_before(ears):
    sound = noise(2, seed=2)
    texts = [
        sb.transcribe(ears, sound, sb.greedy(), language="en", prompt=prompt, max_new_tokens=8, **UNCHECKED)[0]
        for prompt in (None, "abc")
    ]
    assert texts[0].segments[0].avg_logprob != texts[1].segments[0].avg_logprob
    with pytest.raises(errors.BadSetting, match="prompt has 51 tokens, but the model reads at most 31"):
        sb.transcribe(ears, sound, prompt="a" * 50)


# Timestamps.


@pytest.mark.parametrize(
    ("tokens", "slices", "frames"),
    [
        ([1, 2], [(0, 100, [1, 2])], 200),  # no timestamp: the whole window
        ([100, 1, 2, 130], [(0, 30, [100, 1, 2, 130])], 200),  # one at the end: it ends there, and nothing follows
        ([100, 1, 110, 110, 2, 130], [(0, 10, [100, 1, 110]), (10, 30, [110, 2, 130])], 200),
        ([100, 1, 110, 110, 2, 130, 130], [(0, 10, [100, 1, 110]), (10, 30, [110, 2, 130, 130])], 60),
        ([100, 1, 110, 110, 2, 3], [(0, 10, [100, 1, 110, 110])], 20),  # what is cut off is decoded again
    ],
)
def test_timestamps_cut_a_window_into_slices(tokens, slices, frames):
    expected = [Slice(*one) for one in slices]
    assert slices_of(tokens, 100, 200, 2) == (expected, frames)


def transcript():
    segments = [
        Segment(0.0, 2.5, " Hello --> you", [1], 0.0, -0.5, 1.0, math.nan),
        Segment(3661.5, 3662.25, " Bye", [2], 0.2, -0.5, 1.0, 0.25),
    ]
    return Transcript("Hello --> you Bye", "en", 3663.0, segments)


def test_texts_and_records_hold_what_was_said():
    assert formatted(transcript(), "text") == "Hello --> you\nBye\n"
    assert json.loads(formatted(transcript(), "json")) == {"text": "Hello --> you Bye"}
    record = json.loads(formatted(transcript(), "verbose_json"))
    assert record["segments"][0]["no_speech_prob"] is None
    assert record["segments"][1]["no_speech_prob"] == 0.25


# Audio.


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 44_101, 48_000])
def test_a_tone_is_the_same_tone_at_another_rate(rate):
    """Within the band of both rates to 1e-3; a tone that 16 kHz cannot hold is gone."""
    pytest.importorskip("soxr")
    times = np.arange(rate) / rate
    there = np.arange(RATE) / RATE
    found = resampled(np.sin(2 * np.pi * 1000 * times).astype(np.float32), rate, RATE)
    assert len(found) == RATE
    inner = slice(800, -800)
    assert np.abs(found - np.sin(2 * np.pi * 1000 * there))[inner].max() < 1e-3
    if rate > 20_000:
        high = resampled(np.sin(2 * np.pi * 9_500 * times).astype(np.float32), rate, RATE)
        assert np.abs(high[inner]).max() < 2e-3


def test_audio_that_is_not_mono_or_not_16_khz_is_made_so(ears):
    sound = noise(2, seed=2)
    stereo = np.stack([sound, sound], 1)
    assert np.array_equal(read_audio(stereo), sound)
    options = {"language": "en", "max_new_tokens": 8, **UNCHECKED}
    (mono,) = sb.transcribe(ears, sound, sb.greedy(), **options)
    (both,) = sb.transcribe(ears, stereo, sb.greedy(), **options)
    assert mono == both
    (slow,) = sb.transcribe(ears, resampled(sound, RATE, 8_000), sb.greedy(), rate=8_000, **options)
    assert slow.duration == mono.duration
    row = {"array": resampled(sound, RATE, 8_000), "sampling_rate": 8_000, "path": None}
    assert np.array_equal(read_audio(row), read_audio(row["array"], 8_000.0))
    for given, rate, said in (
        (row, 16_000, "rate is 16000, and the audio's sampling_rate is 8000"),
        ({"raw": sound}, None, "the audio is a mapping of raw; it needs 'array' and 'sampling_rate'"),
    ):
        with pytest.raises(errors.BadAudio, match=said):
            read_audio(given, rate)


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        (np.zeros(100, dtype=np.float32), r"the audio has 0.006 seconds; at least 0.1 are needed"),
        (np.zeros(0, dtype=np.float32), "has 0.000 seconds"),
        (np.full(RATE, np.nan, dtype=np.float32), "has samples that are not finite"),
        (np.zeros(RATE, dtype=np.int16), "int16.* must be floats"),
        (np.full(RATE, 3000, dtype=np.float32), r"as large as 3000; they must be in \[-1, 1\]: divide 16-bit samples"),
        (np.zeros((2, RATE), dtype=np.float32), r"must be \[samples, channels\]"),
    ],
)
def test_audio_that_is_none_is_refused(ears, audio, message):
    with pytest.raises(errors.BadAudio, match=message):
        sb.transcribe(ears, audio)


def test_files_that_are_no_audio_are_refused(tmp_path):
    pytest.importorskip("av")
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF\x00\x00\x00\x00WAVEfmt nothing")
    text = tmp_path / "text.mp3"
    text.write_text("no audio")
    for file in (broken, text):
        with pytest.raises(errors.BadAudio, match="cannot be read as audio"):
            read_audio(file)
    with pytest.raises(errors.MissingFile, match="there is no file"):
        read_audio(tmp_path / "nowhere.wav")


def save_ears(ears, folder):
    ears.target_model.save_pretrained(folder)
    words.tokenizer().save_pretrained(folder)


def transcribed(monkeypatch, *arguments, last=False):
    """Run `specbeam transcribe` on these, before or after the usual options; return its exit code."""
    from specbeam.doors.cli.main import main

    options = [
        "--method", "greedy", "--language", "en", "--max-new-tokens", "8", "--temperature", "0", "--format", "verbose_json",
        "--log-prob-threshold", "-99", "--compression-ratio-threshold", "99",
    ]  # fmt: skip
    given = [str(one) for one in arguments]
    monkeypatch.setattr("sys.argv", ["specbeam", "transcribe", *([*options, *given] if last else [*given, *options])])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_files_and_arrays_give_the_same_text(ears, tmp_path, capsys, monkeypatch):
    sound = noise(4, seed=2)
    (tmp_path / "one.wav").write_bytes(media.encoded(np.stack([sound, sound], 1)))
    (tmp_path / "two.flac").write_bytes(media.encoded(resampled(sound, RATE, 48_000), 48_000, "flac", "flac"))
    options = {"language": "en", "max_new_tokens": 8}
    (array,) = sb.transcribe(ears, sound, sb.greedy(), **UNCHECKED, **options)
    (file,) = sb.transcribe(ears, str(tmp_path / "one.wav"), sb.greedy(), **UNCHECKED, **options)
    assert array == file
    (flac,) = sb.transcribe(ears, [tmp_path / "two.flac"], sb.greedy(), **UNCHECKED, **options)
    assert flac.duration == file.duration
    save_ears(ears, tmp_path / "model")
    (tmp_path / "broken.wav").write_bytes(b"no audio")
    code = transcribed(monkeypatch, tmp_path / "one.wav", tmp_path / "broken.wav", "-m", tmp_path / "model")
    shown = capsys.readouterr()
    assert code == 1, shown.err
    assert "broken.wav cannot be read as audio" in shown.err
    record = json.loads(shown.out)
    assert [one["tokens"] for one in record["segments"]] == [one.tokens for one in array.segments]


def test_several_files_are_told_apart_on_standard_output(ears, tmp_path, capsys, monkeypatch):
    files = [tmp_path / "one.wav", tmp_path / "two.wav"]
    for seed, file in enumerate(files, 1):
        file.write_bytes(media.encoded(noise(2, seed=seed)))
    save_ears(ears, tmp_path / "model")
    assert transcribed(monkeypatch, *files, "-m", tmp_path / "model") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["file"] for record in records] == [str(file) for file in files]
    assert transcribed(monkeypatch, *files, "-m", tmp_path / "model", "--format", "text", last=True) == 0
    assert {f"{file}:" for file in files} <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(("draft", "name"), [(None, "beam_search"), ("draft", "speculative_beam_search")])
def test_settings_without_a_method_are_those_of_the_usual_one(draft, name):
    from specbeam.doors.cli.transcribe import TranscribeArguments, _method_of

    usual = _method_of(TranscribeArguments(method=None, setting=["beams=2"], draft=draft))
    assert (usual.name, usual.law) == (name, getattr(sb, name)(2).law)
    assert _method_of(TranscribeArguments(method=None, setting=[], draft=draft)) is None


@pytest.mark.slow
def test_the_command_hands_over_how_weights_keys_and_values_are_kept(ears, tmp_path, capsys, monkeypatch):
    sound = noise(4, seed=2)
    (tmp_path / "one.wav").write_bytes(media.encoded(sound))
    save_ears(ears, tmp_path / "model")
    rounded = ("--quantize", "int8", "--kv", "bfloat16")
    code = transcribed(monkeypatch, tmp_path / "one.wav", "-m", tmp_path / "model", *rounded)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    pair = sb.load(tmp_path / "model", quantize="int8", kv="bfloat16")
    (expected,) = sb.transcribe(pair, sound, sb.greedy(), language="en", max_new_tokens=8, **UNCHECKED)
    record = json.loads(shown.out)
    assert [one["tokens"] for one in record["segments"]] == [one.tokens for one in expected.segments]


def test_the_command_refuses_files_before_it_loads_a_model(tmp_path, capsys, monkeypatch):
    pytest.importorskip("av")
    (tmp_path / "text.mp3").write_text("no audio")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "whisper"}')
    code = transcribed(monkeypatch, tmp_path / "text.mp3", tmp_path / "none.wav", "-m", tmp_path / "model")
    shown = capsys.readouterr().err
    assert code == 2
    assert "text.mp3 cannot be read as audio" in shown
    assert "there is no file" in shown
    assert "weights" not in shown  # which that folder does not have


def test_the_command_breaks_lines_of_subtitles_alone(ears, tmp_path, capsys, monkeypatch):
    sound = noise(2, seed=2)
    (tmp_path / "one.wav").write_bytes(media.encoded(sound))
    save_ears(ears, tmp_path / "model")
    code = transcribed(monkeypatch, tmp_path / "one.wav", "-m", tmp_path / "model", "--max-line-width", "4")
    assert code != 0
    assert "max_line_width is for subtitles" in capsys.readouterr().err
    lines = ("--format", "srt", "--max-line-width", "4", "--max-line-count", "1", "--logprob-threshold", "-99")
    code = transcribed(monkeypatch, tmp_path / "one.wav", "-m", tmp_path / "model", *lines, last=True)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    (found,) = sb.transcribe(ears, sound, sb.greedy(), language="en", max_new_tokens=8, **UNCHECKED)
    assert shown.out == formatted(found, "srt", 4, 1)


# What is refused.


def test_the_command_refuses_roundings_of_decoder_only_models(ears, tmp_path, capsys, monkeypatch):
    save_ears(ears, tmp_path)
    (tmp_path / "a.wav").write_bytes(media.encoded(noise(1)))
    assert transcribed(monkeypatch, str(tmp_path / "a.wav"), "-m", tmp_path, "--quantize", "fp8") != 0
    assert "engine 'fp8' runs decoder-only models" in capsys.readouterr().err


def test_what_a_model_does_not_know_is_refused(ears):
    sound = noise(1)
    for options, message in (
        ({"language": "french"}, r"language is 'french'.*; this model knows 2 languages, by a code \(de, en\)"),
        ({"language": "Deutsch"}, r"did you mean german\?"),
        ({"timestamps": "word"}, "timestamps is 'word'; it must be True or False"),
        ({"seed": "a"}, "seed is 'a'; it must be an integer"),
        ({"task": "sing"}, "task is 'sing'; this model knows translate, transcribe"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": ()}, r"temperature is \(\)"),
        ({"best_of": 0}, "best_of is 0"),
    ):
        with pytest.raises(errors.BadSetting, match=message):
            inspect.unwrap(sb.transcribe)(ears, sound, **options)
    with pytest.raises(errors.NotSupported, match="LlamaForCausalLM does not transcribe speech"):
        sb.transcribe(words.pair(draft_seed=None), sound)


def test_a_model_of_one_language_takes_no_language():
    model = tiny_ears()
    model.generation_config.is_multilingual = False
    pair = sb.load(model)
    (found,) = sb.transcribe(pair, noise(1), sb.greedy(), max_new_tokens=4, **UNCHECKED)
    assert found.language is None
    with pytest.raises(errors.BadSetting, match="transcribes English only"):
        sb.transcribe(pair, noise(1), language="en")
    model.generation_config.no_timestamps_token_id = None
    with pytest.raises(errors.NotSupported, match="has no no_timestamps_token_id"):
        sb.transcribe(pair, noise(1))
