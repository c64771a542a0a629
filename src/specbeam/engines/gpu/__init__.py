"""The engine for Llama-like models on a GPU: few kernels per layer, captured passes, and steps that launch these."""
