"""The engine for Llama-like models on a CPU: compiled layers that read the weights in panels."""
