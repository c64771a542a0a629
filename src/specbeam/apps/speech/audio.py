"""Audio from files and arrays, as one channel of 16 kHz. PyAV decodes files, soxr resamples."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from specbeam.errors import BadAudio, MissingFile, MissingPackage

RATE = 16_000  # samples per second of the input of speech models
LEAST_S = 0.1  # length of the shortest audio in seconds
SILENCE = 2.0**-15  # the smallest step of 16-bit audio
LOUDEST = 16.0  # the largest sample; above it are integers of 8 or more bits, not floats in [-1, 1]

HIGHEST_RATE = 96_000  # samples per second of untrusted files
MOST_CHANNELS = 8  # channels of untrusted files
BLOCK = 2**18  # frames that are mixed and resampled at once

# Containers that include their sound. Others, such as playlists, name files and addresses, which would be opened.
_FORMATS = (
    "wav,w64,aiff,caf,au,voc,flac,wv,tta,ape,mp3,aac,ac3,eac3,dts,amr,amrnb,amrwb,ogg,matroska,webm,mov,mp4,m4a,3gp,avi,asf,"
    "flv,mpeg,mpegts,nut"
)
_OPENING = {"format_whitelist": _FORMATS, "protocol_whitelist": ""}
# Containers whose header has the length of each stream. In others it is estimated from the file size, or missing.
_STATING = ("wav", "w64", "aiff", "caf", "au", "flac", "wv", "tta", "ape", "mov,mp4,m4a,3gp,3g2,mj2")
_LOST_S = 0.12  # seconds by which audio may be shorter than stated, because encoders pad and round to frames
_LONGEST_PAGE = 65_307  # bytes of a page of Ogg
_UNKNOWN_BYTES = 0x7FFFF000  # size in the header of a WAV file that was written as a stream

Samples = Float32[np.ndarray, " _"]


def read_audio(audio: Any, rate: float | None = None) -> Samples:
    """Return audio as one channel of 16 kHz.

    Args:
        audio: a file in a format that FFmpeg reads (WAV, FLAC, MP3, OGG, M4A, MP4, WebM, ...), or samples in [-1, 1]:
            [samples], or [samples, channels], which are averaged; or both as {"array": ..., "sampling_rate": ...}, as
            in a row of datasets.
        rate: samples per second of an array; None: 16,000.

    Raises:
        MissingFile: there is no such file.
        MissingPackage: the package av, which reads files, or soxr, which resamples, is not installed.
        BadAudio: the file cannot be read or is cut off, or the audio is too short or has invalid samples.
    """
    if isinstance(audio, (str, Path)):
        with _file(Path(audio)) as file:
            return _read(file, str(audio))
    if isinstance(audio, Mapping):
        audio, rate = _array_and_rate(audio, rate)
    found = RATE if rate is None else rate
    if isinstance(found, bool) or not isinstance(found, Real) or found < 1 or found != int(found):
        raise BadAudio(f"rate is {found!r}; it must be a number of samples per second, an integer of at least 1")
    mono = _one_channel(_array(audio), "the audio")
    _check_length(len(mono), int(found), "the audio")
    return resampled(mono, int(found), RATE)


def read_audio_bytes(raw: bytes, most_seconds: float) -> Samples:
    """Return the audio in the bytes of an untrusted file as one channel of 16 kHz.

    It is read and resampled in blocks, up to the limit, because a small file may expand to many samples. Memory grows
    with
    the duration only, not with rate and channels: 64,000 bytes per second, twice that at the end, and some blocks.

    Args:
        raw: a whole file in a format that FFmpeg reads.
        most_seconds: maximum duration.

    Raises:
        MissingPackage: the package av or soxr is not installed.
        BadAudio: the bytes cannot be read, or the audio is cut off, too long or too short, or has too many channels or
            samples.
    """
    if not raw:
        raise BadAudio("the audio is empty; send the content of a file")
    return _read(io.BytesIO(raw), "the audio", most_seconds)


def check_file(path: Path) -> None:
    """Read a file to its end, in blocks. Raises the errors of `read_audio`."""
    name = str(path)
    with _file(path) as file, _opened(file, name) as sound:
        count = 0
        for block in sound.blocks():
            _one_channel(block, name)
            count += len(block)
        sound.check_whole(count)
        _check_length(count, sound.rate, name)


def check_readable() -> Any:
    """Return the package that reads files. Raises `MissingPackage` if it or the package that resamples is not installed."""
    try:
        import av
    except (ImportError, OSError) as error:  # OSError: its libraries are missing
        raise MissingPackage(f"audio files need the package PyAV: pip install 'specbeam[speech]' ({error})") from error
    _soxr()
    return av


def _soxr() -> Any:
    """Return the package that resamples. Raises `MissingPackage` if it is not installed."""
    try:
        import soxr
    except (ImportError, OSError) as error:
        raise MissingPackage(f"resampling needs the package soxr: pip install 'specbeam[speech]' ({error})") from error
    return soxr


@contextmanager
def _file(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file. Raises `MissingFile` if there is none, and `BadAudio` if it is empty or may not be read."""
    if not path.is_file():
        found = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise MissingFile(f"{found}; give an audio file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise _unreadable(str(path), error.strerror or str(error)) from error
    with file:
        if path.stat().st_size == 0:
            raise _unreadable(str(path), "it is empty")
        yield file


def _read(file: io.BufferedIOBase, name: str, most_seconds: float | None = None) -> Samples:
    """Return the audio of an open file as one channel of 16 kHz.

    Args:
        most_seconds: maximum duration; rate and channels are then limited, too. None: no limits.
    """
    blocks: list[Samples] = []
    count = 0
    with _opened(file, name) as sound:
        resampling = None
        for block in sound.blocks(is_limited=most_seconds is not None):
            if resampling is None:
                resampling = _soxr().ResampleStream(sound.rate, RATE, 1)
            count += len(block)
            if most_seconds is not None and count > most_seconds * sound.rate:
                raise BadAudio(f"the audio is longer than {most_seconds:g} seconds, the limit; send it in parts")
            mono = _one_channel(block, name)
            blocks.append(mono if sound.rate == RATE else resampling.resample_chunk(mono))
        sound.check_whole(count)
        _check_length(count, sound.rate, name)
        if sound.rate != RATE:
            nothing = np.zeros(0, dtype=np.float32)
            blocks.append(resampling.resample_chunk(nothing, last=True))  # type: ignore[union-attr]
    return np.concatenate(blocks)


def _check_limits(rate: int, channels: int) -> None:
    """Raise `BadAudio` if an untrusted file has too high a rate or too many channels."""
    if rate > HIGHEST_RATE:
        raise BadAudio(f"the audio has {rate} samples per second; the limit is {HIGHEST_RATE}: resample it")
    if channels > MOST_CHANNELS:
        raise BadAudio(f"the audio has {channels} channels; the limit is {MOST_CHANNELS}: mix them")


def _check_length(count: int, rate: int, name: str) -> None:
    """Raise `BadAudio` if there are too few samples for any speech."""
    if count < LEAST_S * rate:
        raise BadAudio(f"{name} has {count / rate:.3f} seconds; at least {LEAST_S} are needed")


@contextmanager
def _opened(file: io.BufferedIOBase, name: str) -> Iterator["_Sound"]:
    """Open audio for reading. Raises `BadAudio` if it cannot be read, also later in the context."""
    av = check_readable()
    head = file.read(12)
    file.seek(0)
    try:
        with av.open(file, options=_OPENING) as container:
            stream = container.streams.best("audio")
            if stream is None:
                kinds = sorted({one.type for one in container.streams})
                raise _unreadable(name, f"it has no sound, only {', '.join(kinds) or 'nothing'}")
            if stream.codec_context is None:
                raise _unreadable(name, "FFmpeg does not know its codec")
            yield _Sound(av, container, stream, file, head, name)
    except BadAudio:
        raise
    except (av.FFmpegError, ValueError, TypeError, IndexError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = f"{reason[:1].lower()}{reason[1:]} (another kind of file, or it is damaged or cut off)"
        raise _unreadable(name, reason) from error


def _unreadable(name: str, reason: str) -> BadAudio:
    return BadAudio(f"{name} cannot be read as audio: {reason}; convert it to WAV, FLAC, MP3, OGG, M4A, MP4 or WebM")


class _Sound:
    """The best audio stream of an open file.

    Args:
        file: the file to decode.
        head: the first bytes of the file.

    Attributes:
        rate: samples per second; known with the first block.
    """

    def __init__(self, av: Any, container: Any, stream: Any, file: io.BufferedIOBase, head: bytes, name: str) -> None:
        self.rate = int(stream.rate or RATE)
        self._av = av
        self._container = container
        self._stream = stream
        self._file = file
        self._head = head
        self._name = name

    def blocks(self, is_limited: bool = False) -> Iterator[Float32[np.ndarray, "frames channels"]]:
        """Yield the samples in blocks of about `BLOCK` frames.

        Args:
            is_limited: whether rate and channels are limited.
        """
        # Packed samples, because PyAV reads beyond the planes of frames with eight planes or more.
        packing = self._av.AudioResampler(format="flt")
        waiting: list[Float32[np.ndarray, "frames channels"]] = []
        count = 0
        shape: tuple[int, int, str] | None = None
        for frame in self._container.decode(self._stream):
            found = (int(frame.sample_rate), int(frame.layout.nb_channels), str(frame.format.name))
            if shape is None:
                shape = found
                if is_limited:
                    _check_limits(*shape[:2])
            if found != shape:
                raise _unreadable(self._name, "its rate or its channels change in the middle")
            self.rate, channels, _ = shape  # the header of AAC may have half of the rate
            for packed in packing.resample(frame):
                waiting.append(packed.to_ndarray().reshape(-1, channels))
                count += len(waiting[-1])
            if count >= BLOCK:
                yield np.concatenate(waiting)
                waiting = []
                count = 0
        if waiting:
            yield np.concatenate(waiting)

    def check_whole(self, count: int) -> None:
        """Raise `BadAudio` if fewer frames were read than the file promises."""
        promised = self._promised_seconds(count)
        found = count / self.rate
        advice = "get the whole file, or convert its content to another file"
        if found + max(_LOST_S, 0.01 * promised) < promised:
            raise BadAudio(
                f"{self._name} is cut off: its header promises {promised:.2f} seconds, but it has {found:.2f}; {advice}"
            )
        if self._head[:4] == b"OggS" and _ends_within_a_page(self._file):
            raise BadAudio(f"{self._name} is cut off after {found:.2f} seconds; {advice}")

    def _promised_seconds(self, count: int) -> float:
        """Return the length in the header of the file; 0 if the header has none.

        Args:
            count: number of frames that were read.
        """
        stream = self._stream
        format = self._container.format.name
        size = max(int(self._container.size), 1)
        if self._head[:4] == b"RIFF" and self._head[8:] == b"WAVE":
            stated = int.from_bytes(self._head[4:8], "little") + 8
            return count / self.rate * stated / size if stated < _UNKNOWN_BYTES else 0.0
        if format == "matroska,webm":
            return _clock_seconds(stream.metadata.get("DURATION", ""))
        length = 0.0 if stream.duration is None else float(stream.duration * stream.time_base)
        if format == "mp3":  # a length that fits the size of the file may be a guess from it
            fits = length * (stream.bit_rate or 0) / 8 <= 1.02 * size
            return 0.0 if fits else length
        return length if format in _STATING else 0.0


def _clock_seconds(clock: str) -> float:
    """Return the seconds of a time like "00:01:02.5"; 0 for any other text."""
    try:
        hours, minutes, seconds = clock.split(":")
        return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    except ValueError:
        return 0.0


def _ends_within_a_page(file: io.BufferedIOBase) -> bool:
    """Return whether an Ogg file is cut off within its last page, by the length in the header of the page."""
    file.seek(0, io.SEEK_END)
    file.seek(max(file.tell() - _LONGEST_PAGE, 0))
    tail = file.read()
    start = tail.rfind(b"OggS")
    page = tail[start:]
    if start < 0 or len(page) < 27:
        return True
    segments = page[26]
    return len(page) < 27 + segments + sum(page[27 : 27 + segments])


def _array_and_rate(audio: Mapping[str, Any], rate: float | None) -> tuple[Any, Any]:
    """Return the samples and their rate. Raises `BadAudio` if one of them is missing, or there are two rates."""
    if not {"array", "sampling_rate"} <= set(audio):
        raise BadAudio(f"the audio is a mapping of {', '.join(map(str, audio))}; it needs 'array' and 'sampling_rate'")
    found = audio["sampling_rate"]
    if rate is not None and rate != found:
        raise BadAudio(f"rate is {rate}, and the audio's sampling_rate is {found}; give one of them")
    return audio["array"], found


def _array(audio: Any) -> np.ndarray:
    """Return samples as an array. Raises `BadAudio` for anything but an array or a list of numbers."""
    held = audio.detach().cpu() if hasattr(audio, "detach") else audio
    try:
        return np.asarray(held)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadAudio(
            f"the audio is a {type(audio).__name__}, which is not an array: {error}; give the path of a file, or float32 "
            "samples"
        ) from error


def _one_channel(samples: np.ndarray, name: str) -> Samples:
    """Return the mean of the channels. Raises `BadAudio` for arrays of other shapes."""
    if samples.ndim not in (1, 2) or not np.issubdtype(samples.dtype, np.floating):
        raise BadAudio(
            f"{name} is {samples.dtype}{[*samples.shape]}; it must be floats in [-1, 1], [samples] or [samples, channels]"
        )
    if samples.ndim == 2 and samples.shape[1] > max(samples.shape[0], 1):
        raise BadAudio(f"{name} is {[*samples.shape]}; it must be [samples, channels]: transpose it")
    mono = samples if samples.ndim == 1 else samples.mean(1)
    if not np.isfinite(mono).all():
        raise BadAudio(f"{name} has samples that are not finite; remove NaN and infinity")
    loudest = float(np.abs(mono).max(initial=0.0))
    if loudest > LOUDEST:
        raise BadAudio(
            f"{name} has samples as large as {loudest:g}; they must be in [-1, 1]: divide 16-bit samples by 32768"
        )
    return np.ascontiguousarray(mono, dtype=np.float32)


def is_silent(samples: Samples) -> bool:
    """Return whether no sample is louder than the smallest step of 16-bit audio."""
    return bool(np.abs(samples).max(initial=0.0) <= SILENCE)


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Return samples at another rate. Raises `MissingPackage` if soxr is not installed."""
    if rate == wanted:
        return samples
    found: Samples = _soxr().resample(samples, rate, wanted)
    return found
