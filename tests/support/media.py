"""Files of sound and video, made by PyAV."""

import io

import numpy as np
import pytest

RATE = 16_000
# Names of containers and codecs, and the rate at which the codec may write.
KINDS = {
    "wav": ("wav", "pcm_s16le", 44_100),
    "flac": ("flac", "flac", 44_100),
    "mp3": ("mp3", "mp3", 44_100),
    "ogg": ("ogg", "libopus", 48_000),
    "opus": ("opus", "libopus", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "mkv": ("matroska", "aac", 44_100),
    "m4a": ("ipod", "aac", 44_100),
    "mp4": ("mp4", "aac", 44_100),
}


def av():
    return pytest.importorskip("av", reason="PyAV reads and writes audio")


def encoded(samples, rate=RATE, container="wav", codec="pcm_f32le"):
    """The bytes of a file with these samples, [samples] or [samples, channels], at a rate."""
    library = av()
    try:
        library.Codec(codec, "w")
    except library.codec.codec.UnknownCodecError:
        pytest.skip(f"this PyAV does not write {codec}")
    columns = np.asarray(samples, dtype=np.float32).reshape(len(samples), -1)
    channels = columns.shape[1]
    layout = {1: "mono", 2: "stereo", 8: "7.1"}.get(channels, f"{channels} channels")
    file = io.BytesIO()
    with library.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout=layout)
        frame = library.AudioFrame.from_ndarray(columns.reshape(1, -1), format="flt", layout=layout)
        frame.sample_rate = rate
        frame.pts = 0
        converted = library.AudioResampler(format=stream.format, layout=layout, rate=rate)
        for part in converted.resample(frame):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


def kind(samples, name):
    """The bytes of a file of one of `KINDS`, whose samples are at the rate of the kind."""
    container, codec, rate = KINDS[name]
    return encoded(samples, rate, container, codec)


def video(pictures=3):
    """The bytes of a film without sound."""
    library = av()
    file = io.BytesIO()
    with library.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width = 32
        stream.height = 32
        stream.pix_fmt = "yuv420p"
        for number in range(pictures):
            picture = np.full((32, 32, 3), 80 * number, dtype=np.uint8)
            output.mux(stream.encode(library.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()
