"""Engines: what runs a model, and the caches of its keys and values."""
