"""Llama-like models on a CPU: layers as compiled loops over panels of their weights."""
