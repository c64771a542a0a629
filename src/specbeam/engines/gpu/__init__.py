"""Llama-like models on a GPU: few kernels a layer, captured passes, loops that start them."""
