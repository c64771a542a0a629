"""Windows of audio: the features of an encoder, and the cutting of a window's text at its timestamps."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float

from specbeam.apps.speech.audio import RATE, Samples
from specbeam.models import EncoderDecoderLM

STEP_S = 0.02  # seconds between two timestamps
HOP_S = 0.01  # seconds between two frames


@dataclass(frozen=True, eq=False)
class Features:
    """The features of a whole recording.

    Attributes:
        frames: number of frames that are audio; the others are padding.
        window: number of frames of a window.
    """

    values: Float[torch.Tensor, "channels frames"]
    frames: int
    window: int

    def at(self, seek: int) -> Float[torch.Tensor, "channels window"]:
        """Return the window that begins at a frame, padded with zeros after the end."""
        part = self.values[:, seek : seek + self.window]
        return torch.nn.functional.pad(part, (0, self.window - part.shape[1]))

    def left(self, seek: int) -> int:
        """Return the number of frames with audio in the window that begins at a frame."""
        return min(self.frames - seek, self.window)


def features_of(lm: EncoderDecoderLM, extractor: Any, samples: Samples) -> Features:
    """Return the features of audio at 16 kHz, computed as in transformers' Whisper.

    Audio shorter than a window is padded with silence.
    """
    window = lm.most_source
    assert window is not None
    fits = len(samples) <= extractor.n_samples
    made = extractor(
        samples,
        sampling_rate=RATE,
        padding="max_length" if fits else "longest",
        truncation=False,
        return_tensors="pt",
    )
    values = made["input_features"][0]
    frames = min(-(-len(samples) // extractor.hop_length), values.shape[1])
    return Features(values, frames, window)


def within(seconds: float, least: float, most: float) -> float:
    """Return a time clipped to [least, most]; `least` if this is empty."""
    return max(least, min(seconds, most))


@dataclass(frozen=True)
class Slice:
    """A part of a window's text between two timestamps.

    Attributes:
        start, end: timestamp steps from the beginning of the window.
    """

    start: int
    end: int
    tokens: list[int]


def slices_of(tokens: list[int], first_timestamp: int, frames: int, frames_per_step: int) -> tuple[list[Slice], int]:
    """Return the slices of a window's text, and the number of frames after which the next window begins.

    Two timestamps in a row end one slice and begin the next. Text after the last pair is incomplete, so the next window
    begins there; but a single timestamp at the end means that no speech follows.

    Args:
        tokens: tokens of the window, without the end token.
        first_timestamp: the token of 0 seconds.
        frames: number of frames with audio in the window.
        frames_per_step: number of frames between two timestamps.

    Source: section 3.8 of arXiv 2212.04356.
    """
    is_time = [token >= first_timestamp for token in tokens]
    ends_once = is_time[-2:] == [False, True]
    cuts = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    if not cuts:
        return [Slice(0, _last_step(tokens, is_time, first_timestamp, frames, frames_per_step), tokens)], frames
    if ends_once:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the second timestamp of the last pair stays with the last slice
    slices = []
    begin = 0
    for number, cut in enumerate(cuts):
        part = tokens[begin:cut]
        is_last = number == len(cuts) - 1
        end = part[-1] if not is_last or ends_once else part[-2]
        slices.append(Slice(part[0] - first_timestamp, end - first_timestamp, part))
        begin = cut
    if ends_once:
        return slices, frames
    return slices, (tokens[begin - 2] - first_timestamp) * frames_per_step


def _last_step(tokens: list[int], is_time: list[bool], first_timestamp: int, frames: int, frames_per_step: int) -> int:
    """Return the step at which the only slice of a window ends: its last timestamp, or the end of the audio."""
    times = [token for token, is_one in zip(tokens, is_time, strict=True) if is_one]
    if times and times[-1] != first_timestamp:
        return times[-1] - first_timestamp
    return frames // frames_per_step
