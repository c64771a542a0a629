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
FILTERED = 2**18  # samples that are made at once where the rate is another one

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
    _check_length(len(mono), int(found), name)
    return resampled(mono, int(found), RATE)


def read_audio_bytes(raw: bytes, most_seconds: float) -> Samples:
    """Return the audio in the bytes of a file, from whoever sent them, as one channel of 16 kHz.

    It is read and resampled block by block, and no further than it may go: what is small as a file may be large as
    samples. Memory grows with the seconds alone, not with rate and channels: 64,000 bytes for each that are kept, twice
    that at the end, besides some blocks.

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
        resampling = Resampling(rate, RATE) if rate != RATE else None
        most = int(most_seconds * rate)
        while count <= most:
            block = sound.read(min(BLOCK, most + 1 - count), dtype="float32", always_2d=True)
            if len(block) == 0:
                break
            count += len(block)
            mono = _one_channel(block.mean(1), "the audio")
            blocks.extend([mono] if resampling is None else resampling.put(mono))
    if count > most:
        raise BadAudio(f"the audio has more than {most_seconds:g} seconds, which are taken; send it in parts")
    _check_length(count, rate, "the audio")
    if resampling is not None:
        blocks.extend(resampling.end())
    return np.concatenate(blocks)


def _check_length(count: int, rate: int, name: str) -> None:
    """Raise `BadAudio` if there are too few samples for any speech."""
    if count < LEAST_S * rate:
        raise BadAudio(f"{name} has {count / rate:.3f} seconds; at least {LEAST_S} are needed")


def _from_file(path: Path) -> tuple[np.ndarray, int]:
    """Return the samples of a file, float32[samples, channels], and how many there are per second."""
    if not path.is_file():
        raise MissingFile(f"there is no file {path}; give an audio file")
    with _opened(path, str(path)) as sound:
        samples: np.ndarray = sound.read(dtype="float32", always_2d=True)
        return samples, int(sound.samplerate)


def check_readable() -> Any:
    """Return the package that reads files. Raises `MissingPackage` if it is not installed."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the library that it wraps
        raise MissingPackage(f"audio files are read by soundfile: pip install '.[speech]' ({error})") from error
    return soundfile


@contextmanager
def _opened(file: Path | io.BytesIO, name: str) -> Iterator[Any]:
    """Open audio for reading. Raises `BadAudio` for what cannot be read, also while it is read."""
    soundfile = check_readable()
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
    resampling = Resampling(rate, wanted)
    return np.concatenate([*resampling.put(samples), *resampling.end()])


class Resampling:
    """Samples at another rate, part by part: those of `resampled`, bit by bit, with little more memory than a part.

    Args:
        rate: samples per second of what is put in.
        wanted: samples per second of what comes out.
    """

    def __init__(self, rate: int, wanted: int) -> None:
        divisor = math.gcd(rate, wanted)
        self._rate = rate
        self._wanted = wanted
        self._step = rate // divisor
        self._phases = wanted // divisor
        self._band = min(self._step, self._phases) * ROLL_OFF
        self._reach = math.ceil(ZEROS * self._step / self._band)
        self._size = _phases_at_once(self._step, self._phases, self._reach)
        self._frames = max(FILTERED // self._phases, 1)  # places of a filter, one step apart, that are filtered at once
        self._filters: list[tuple[int, int, torch.Tensor]] = []  # kept if they are few
        self._rest: Samples = np.zeros(self._reach, dtype=np.float32)  # what is still to be read
        self._read = 0
        self._made = 0

    def put(self, samples: Samples) -> Iterator[Samples]:
        """Yield what follows from samples that come next; all of it must be taken."""
        self._read += len(samples)
        self._rest = np.concatenate([self._rest, samples])
        advance = self._frames * self._step
        while len(self._rest) >= advance + 2 * self._reach:
            made = self._filtered(self._rest[: advance + 2 * self._reach], self._frames)
            self._rest = self._rest[advance:]
            self._made += len(made)
            yield made
        self._rest = self._rest.copy()  # or all that was read would be kept

    def end(self) -> Iterator[Samples]:
        """Yield what is left when no samples follow."""
        frames = self._read // self._step + 1 - self._made // self._phases
        padded = np.concatenate([self._rest, np.zeros(self._reach + self._step, dtype=np.float32)])
        count = math.ceil(self._read * self._wanted / self._rate)
        yield self._filtered(padded, frames)[: count - self._made]

    def _filtered(self, samples: Samples, frames: int) -> Samples:
        """Return all phases at so many places of the filters."""
        padded = torch.from_numpy(samples)[None, None]
        blocks = []
        for start, stop, kernels in self._kernels():
            read = padded[:, :, start : stop + (frames - 1) * self._step]
            blocks.append(torch.nn.functional.conv1d(read, kernels[:, None], stride=self._step)[0])
        flat: Samples = torch.cat(blocks).T.reshape(-1).numpy()
        return flat

    def _kernels(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield filters in blocks of phases, with the first sample that they read from their place on, and the end."""
        yield from self._filters
        if self._filters:
            return
        for first in range(0, self._phases, self._size):
            block = self._made_kernels(first, min(first + self._size, self._phases))
            if self._size >= self._phases:
                self._filters.append(block)
            yield block

    def _made_kernels(self, first: int, last: int) -> tuple[int, int, torch.Tensor]:
        reach = self._reach
        step = self._step
        start = 0
        stop = 2 * reach + step
        if self._size < self._phases:  # the other taps have no weight
            start = first * step // self._phases
            stop = min(-(-(last - 1) * step // self._phases) + 2 * reach + 1, stop)
        taps = torch.arange(start - reach, stop - reach, dtype=torch.float64)[None] / step
        shifts = torch.arange(first, last, dtype=torch.float64)[:, None] / self._phases
        times = ((taps - shifts) * self._band).clamp(-ZEROS, ZEROS)
        window = torch.cos(times * math.pi / ZEROS / 2) ** 2
        kernels = (torch.sinc(times) * window * self._band / step).float()
        return start, stop, kernels


def _phases_at_once(step: int, phases: int, reach: int) -> int:
    """Return how many phases are filtered together, so that their filters have at most `MOST_WEIGHTS` weights, or it is one.

    All of them for the usual rates of audio.
    """
    size = phases
    while size > 1 and size * (2 * reach + step * size // phases) > MOST_WEIGHTS:
        size = (size + 1) // 2
    return size
