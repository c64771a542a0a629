"""Speech to text: audio, its windows, the transcript and its formats."""
