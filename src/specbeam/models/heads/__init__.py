"""Draft heads: small modules that draft for a target from its hidden states; readers of their files, and draft models."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
