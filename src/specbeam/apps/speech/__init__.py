"""Speech to text with models that hear: audio, windows, the transcript and its formats."""
