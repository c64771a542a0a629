"""Models of transformers as language models of the core: loading, families, rounded weights, heads, and memory."""
