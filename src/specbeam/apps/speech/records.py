"""The result of a transcription: segments with times, and the whole text."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """A stretch of speech and its text.

    Attributes:
        start, end: seconds from the beginning of the audio.
        text: without timestamps; "" if the model has no tokenizer.
        tokens: all tokens, timestamps included.
        temperature: temperature at which its window was decoded.
        avg_logprob: log-likelihood of the window's text divided by its number of tokens, including the end.
        compression_ratio: bytes of the window's text divided by its size after zlib; high for repetitive texts. NaN without
            a tokenizer.
        no_speech_prob: the model's probability that the window has no speech; NaN if not computed.
        seek: the frame, of 10 ms, at which its window begins.
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    seek: int = 0


@dataclass(frozen=True)
class Transcript:
    """The transcript of one recording.

    Attributes:
        text: the text of all segments.
        language: the code of the language, such as "en"; None for a model of one language.
        duration: seconds of audio.
        segments: in the order of time.
        target_passes, draft_passes: passes of the decoders.
        law: law of the windows decoded at the first temperature; "" if nothing was decoded.
    """

    text: str
    language: str | None
    duration: float
    segments: list[Segment] = field(default_factory=list)
    target_passes: int = 0
    draft_passes: int = 0
    law: str = ""
