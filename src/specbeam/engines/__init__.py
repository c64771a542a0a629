"""Engines, which run the layers of a model, and the caches of its keys and values."""
