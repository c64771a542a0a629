"""Audio from files of all kinds: what they hold, or a sentence that says why not."""

import sys

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam import errors
from specbeam.apps.speech import audio
from specbeam.apps.speech.audio import RATE, check_file, read_audio, read_audio_bytes, resampled
from tests.support import media
from tests.test_speech import noise

pytest.importorskip("av")
pytest.importorskip("soxr")
LOSSLESS = ("wav", "flac")


def tone(seconds, rate):
    return 0.3 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)


@pytest.mark.parametrize("name", media.KINDS)
def test_the_sound_of_a_file_is_read_from_every_usual_kind(name, tmp_path):
    raw = media.kind(tone(2, media.KINDS[name][2]), name)
    file = tmp_path / f"a.{name}"
    file.write_bytes(raw)
    found = read_audio(file)
    assert np.array_equal(found, read_audio_bytes(raw, 10))
    assert len(found) / RATE == pytest.approx(2, abs=0.03)
    inner = slice(1600, len(found) - 3200)
    expected = tone(3, RATE)[inner]
    assert np.abs(found[inner] - expected).max() < (1e-4 if name in LOSSLESS else 0.05)


@pytest.mark.parametrize("name", media.KINDS)
@pytest.mark.parametrize("share", [0.8, 0.5, 0.1])
def test_a_file_that_is_cut_off_is_refused(name, share):
    raw = media.kind(noise(4, seed=1), name)
    with pytest.raises(errors.BadAudio, match=r"the audio is cut off|the audio cannot be read as audio"):
        read_audio_bytes(raw[: int(share * len(raw))], 10)


@pytest.mark.parametrize("name", media.KINDS)
def test_a_spoilt_file_is_read_or_refused(name):
    """Bytes changed at random: samples or `BadAudio`, and nothing else."""
    good = media.kind(noise(0.5, seed=1), name)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(40):
        raw = bytearray(good)
        for place in rng.integers(0, min(len(raw), 400), size=4):
            raw[place] = int(rng.integers(256))
        try:
            assert np.isfinite(read_audio_bytes(bytes(raw), 10)).all()
        except errors.BadAudio:
            refused += 1
    assert refused > 0


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_101, 96_000, 192_000])
def test_every_rate_becomes_16_khz(rate, tmp_path):
    (tmp_path / "a.wav").write_bytes(media.encoded(tone(1, rate), rate))
    found = read_audio(tmp_path / "a.wav")
    assert len(found) == RATE
    assert np.abs(found - tone(1, RATE))[800:-800].max() < 1e-3


@pytest.mark.parametrize("channels", [1, 2, 3, 8, 9, 24])
def test_the_mean_of_all_channels_is_taken(channels, tmp_path):
    """Eight and more too, whose planes are not read one by one."""
    sound = tone(0.5, RATE)
    parts = np.linspace(0, 2, channels) if channels > 1 else np.ones(1)
    (tmp_path / "a.wav").write_bytes(media.encoded(sound[:, None] * parts))
    assert np.abs(read_audio(tmp_path / "a.wav") - sound).max() < 1e-6


def test_float_samples_are_read_bit_by_bit():
    sound = noise(1, seed=2)
    assert np.array_equal(read_audio_bytes(media.encoded(sound), 10), sound)


def unreadable(folder):
    """Files without audio, by the words of the sentence that refuses them."""
    contents = {
        "it is empty": ("empty.wav", b""),
        "another kind of file": ("text.mp3", b"This is a text.\nIt has lines.\n" * 100),
        "or it is damaged": ("broken.wav", b"RIFF\x00\x00\x00\x00WAVEfmt nothing"),
        "no sound, only video": ("film.mp4", media.video()),
        "at least 0.1 are needed": ("short.wav", media.encoded(noise(0.05))),
        "damaged or cut off": ("nothing.wav", media.encoded(noise(1))[:44]),
    }
    for words_of, (name, content) in contents.items():
        (folder / name).write_bytes(content)
        yield words_of, folder / name
    yield "is a folder", folder
    yield "there is no file", folder / "nowhere.wav"


def test_what_holds_no_sound_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    def load(path):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("specbeam.apps.speech.transcribe.as_pair", load)
    for words_of, file in unreadable(tmp_path):
        with pytest.raises(errors.SpecbeamError, match=words_of):
            sb.transcribe("somewhere/whisper", file)


@pytest.mark.parametrize("seconds", [0.05, 2])
def test_a_file_that_is_short_or_cut_off_is_refused_before_a_model_is_loaded(seconds, tmp_path):
    raw = media.encoded(noise(seconds))
    file = tmp_path / "bad.wav"
    file.write_bytes(raw if seconds < 1 else raw[: len(raw) // 2])
    with pytest.raises(errors.BadAudio, match=r"at least 0\.1 are needed" if seconds < 1 else "is cut off"):
        check_file(file)


def test_a_list_of_files_is_refused_for_one_of_them(tmp_path):
    (tmp_path / "good.wav").write_bytes(media.encoded(noise(1)))
    (tmp_path / "bad.wav").write_bytes(b"nothing")
    with pytest.raises(errors.BadAudio, match=r"bad\.wav cannot be read as audio"):
        sb.transcribe("somewhere/whisper", [tmp_path / "good.wav", tmp_path / "bad.wav"])


def test_files_that_name_other_files_are_not_followed(tmp_path):
    (tmp_path / "good.wav").write_bytes(media.encoded(noise(1)))
    playlists = {
        "a.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{tmp_path}/good.wav\n#EXT-X-ENDLIST\n",
        "a.wav": f"ffconcat version 1.0\nfile {tmp_path}/good.wav\n",
    }
    for name, content in playlists.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(errors.BadAudio, match="cannot be read as audio"):
            read_audio(tmp_path / name)


def test_parts_are_resampled_as_the_whole(monkeypatch):
    sound = noise(3.0, seed=1)
    monkeypatch.setattr(audio, "BLOCK", 777)
    for rate in (8_000, 44_100, 96_000):
        raw = media.encoded(sound, rate)
        assert np.array_equal(read_audio_bytes(raw, 10), resampled(sound, rate, RATE))


def test_arrays_and_tensors_of_any_kind_are_read_or_refused():
    sound = noise(1)
    for same in (torch.from_numpy(sound), torch.from_numpy(sound).requires_grad_(), sound.tolist(), sound.astype("f8")):
        assert np.array_equal(read_audio(same), sound)
    for wrong in ([[0.1], [0.2, 0.3]], torch.zeros(RATE, dtype=torch.bfloat16), {"array": sound}, None, b"RIFF", 5):
        with pytest.raises(errors.BadAudio, match="the audio is"):
            read_audio(wrong)


@pytest.mark.parametrize("package", ["av", "soxr"])
def test_arrays_need_no_further_package(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    sound = noise(1)
    assert np.array_equal(read_audio(sound), sound)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(errors.MissingPackage, match=r"pip install 'specbeam\[speech\]'"):
        read_audio(tmp_path / "a.wav")
    if package == "soxr":
        with pytest.raises(errors.MissingPackage, match="soxr"):
            read_audio(sound, rate=8_000)
