"""The engine for any transformers model: batches of sessions, padded to the longest session."""
