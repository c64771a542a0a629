"""MEMORY: a model that reads a text in segments, and hands memories of them on (HMT)."""
