"""Audio from files and arrays: one channel of 16 kHz."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from specbeam.errors import BadAudio, MissingFile, MissingPackage
from specbeam.options.checks import is_integer

RATE = 16_000  # samples per second that speech models are made for
LEAST_S = 0.1  # seconds; a window of less is no speech
SILENCE = 2.0**-15  # the smallest step of 16-bit audio
ZEROS = 24  # zero crossings of the filter on each side: a flat pass band and -80 dB beyond it
MOST_WEIGHTS = 2**20  # of filters at once: 8 MB in float64
ROLL_OFF = 0.945  # share of the lower of both pass bands that is kept

HIGHEST_RATE = 96_000  # samples per second of audio that comes as bytes
MOST_CHANNELS = 8  # of audio that comes as bytes
BLOCK = 2**18  # frames that are read at once

Samples = Float32[np.ndarray, " _"]


def read_audio(audio: Any, rate: int | None = None) -> Samples:
    """Return audio as one channel of 16 kHz.

    Args:
        audio: a file that libsndfile reads (WAV, FLAC, OGG, MP3, ...), or samples in [-1, 1]: [samples], or
            [samples, channels] whose mean is taken.
        rate: samples per second of an array; None: 16,000. Files say it themselves.

    Raises:
        MissingFile: there is no such file.
        MissingPackage: the package soundfile is not installed, which reads files.
        BadAudio: the file cannot be read, or the audio is too short or holds numbers that are no samples.
    """
    if isinstance(audio, (str, Path)):
        name = str(audio)
        samples, found = _from_file(Path(audio))
    else:
        name = "the audio"
        samples = np.asarray(audio)
        found = RATE if rate is None else rate
    if not is_integer(found) or found < 1:
        raise BadAudio(f"rate is {found!r}; it must be a number of samples per second, an integer of at least 1")
    mono = _one_channel(samples, name)
    if len(mono) < LEAST_S * found:
        raise BadAudio(f"{name} has {len(mono) / found:.3f} seconds; at least {LEAST_S} are needed")
    return resampled(mono, int(found), RATE)


def read_audio_bytes(raw: bytes, most_seconds: float) -> Samples:
    """Return the audio in the bytes of a file, from whoever sent them, as one channel of 16 kHz.

    It is read block by block, and no further than it may go: what is small as a file may be large as samples.

    Args:
        raw: a whole file that libsndfile reads.
        most_seconds: the longest audio that is taken.

    Raises:
        MissingPackage: the package soundfile is not installed.
        BadAudio: the bytes cannot be read, or the audio is too long, too short, or has too many channels or samples.
    """
    if not raw:
        raise BadAudio("the audio has no bytes; send the content of a file")
    blocks: list[Samples] = []
    count = 0
    with _opened(io.BytesIO(raw), "the audio") as sound:
        rate = int(sound.samplerate)
        if not 1 <= rate <= HIGHEST_RATE:
            raise BadAudio(f"the audio has {rate} samples per second; at most {HIGHEST_RATE} are taken: resample it")
        if sound.channels > MOST_CHANNELS:
            raise BadAudio(f"the audio has {sound.channels} channels; at most {MOST_CHANNELS} are taken: mix them")
        most = int(most_seconds * rate)
        while count <= most:
            block = sound.read(min(BLOCK, most + 1 - count), dtype="float32", always_2d=True)
            if len(block) == 0:
                break
            count += len(block)
            blocks.append(_one_channel(block, "the audio"))
    if count > most:
        raise BadAudio(f"the audio has more than {most_seconds:g} seconds, which are taken; send it in parts")
    return read_audio(np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32), rate)


def _from_file(path: Path) -> tuple[np.ndarray, int]:
    """Return the samples of a file, float32[samples, channels], and how many there are per second."""
    if not path.is_file():
        raise MissingFile(f"there is no file {path}; give an audio file")
    with _opened(path, str(path)) as sound:
        samples: np.ndarray = sound.read(dtype="float32", always_2d=True)
        return samples, int(sound.samplerate)


@contextmanager
def _opened(file: Path | io.BytesIO, name: str) -> Iterator[Any]:
    """Open audio for reading. Raises `BadAudio` for what cannot be read, also while it is read."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the library that it wraps
        raise MissingPackage(f"audio files are read by soundfile: pip install '.[speech]' ({error})") from error
    try:
        with soundfile.SoundFile(file) as sound:
            yield sound
    except BadAudio:
        raise
    except (RuntimeError, ValueError, TypeError) as error:  # what libsndfile raises is a RuntimeError
        reason = str(error) if isinstance(file, Path) else str(getattr(error, "error_string", error))
        raise BadAudio(
            f"{name} cannot be read as audio: {reason}; convert it to WAV, FLAC, OGG or MP3, which libsndfile reads"
        ) from error


def _one_channel(samples: np.ndarray, name: str) -> Samples:
    """Return the mean of the channels. Raises `BadAudio` for what is no audio."""
    if samples.ndim not in (1, 2) or not np.issubdtype(samples.dtype, np.floating):
        raise BadAudio(
            f"{name} is {samples.dtype}{[*samples.shape]}; it must be floats in [-1, 1], [samples] or [samples, channels]"
        )
    if samples.ndim == 2 and samples.shape[1] > max(samples.shape[0], 1):
        raise BadAudio(f"{name} is {[*samples.shape]}; the first dimension is that of samples: transpose it")
    mono = samples if samples.ndim == 1 else samples.mean(1)
    if not np.isfinite(mono).all():
        raise BadAudio(f"{name} holds samples that are not finite")
    return np.ascontiguousarray(mono, dtype=np.float32)


def is_silent(samples: Samples) -> bool:
    """Return whether no sample is louder than the smallest step of 16-bit audio."""
    return bool(np.abs(samples).max(initial=0.0) <= SILENCE)


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Return samples at another rate, by a windowed sinc filter for each phase; ceil(samples * wanted / rate) of them.

    Frequencies above the lower of both pass bands are removed, so that nothing is mirrored into it. Rates with few common
    factors have as many phases as samples per second; these are made in blocks of at most `MOST_WEIGHTS`.
    """
    if rate == wanted:
        return samples
    divisor = math.gcd(rate, wanted)
    step = rate // divisor
    phases = wanted // divisor
    band = min(step, phases) * ROLL_OFF
    reach = math.ceil(ZEROS * step / band)
    padded = torch.nn.functional.pad(torch.from_numpy(samples)[None, None], (reach, reach + step))
    frames = len(samples) // step + 1  # places of a filter, one step apart
    size = _phases_at_once(step, phases, reach)
    blocks = []
    for first in range(0, phases, size):
        last = min(first + size, phases)
        start = 0
        stop = 2 * reach + step
        if size < phases:  # the other taps have no weight
            start = first * step // phases
            stop = min(-(-(last - 1) * step // phases) + 2 * reach + 1, stop)
        taps = torch.arange(start - reach, stop - reach, dtype=torch.float64)[None] / step
        shifts = torch.arange(first, last, dtype=torch.float64)[:, None] / phases
        times = ((taps - shifts) * band).clamp(-ZEROS, ZEROS)
        window = torch.cos(times * math.pi / ZEROS / 2) ** 2
        kernels = (torch.sinc(times) * window * band / step).float()
        read = padded[:, :, start : stop + (frames - 1) * step]
        blocks.append(torch.nn.functional.conv1d(read, kernels[:, None], stride=step)[0])
    count = math.ceil(len(samples) * wanted / rate)
    flat: Samples = torch.cat(blocks).T.reshape(-1)[:count].numpy()
    return flat


def _phases_at_once(step: int, phases: int, reach: int) -> int:
    """Return how many phases are filtered together, so that their filters have at most `MOST_WEIGHTS` weights, or it is one.

    All of them for the usual rates of audio.
    """
    size = phases
    while size > 1 and size * (2 * reach + step * size // phases) > MOST_WEIGHTS:
        size = (size + 1) // 2
    return size
