"""Speech to text: audio, its windows, the transcript and its formats."""

from specbeam.apps.speech.audio import read_audio

__all__ = ["read_audio"]
