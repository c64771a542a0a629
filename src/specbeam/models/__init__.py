"""Models of transformers as language models of the core: loading, families, rounded weights, heads, and memory."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
