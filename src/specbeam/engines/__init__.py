"""Engines, which run the layers of a model, and the caches of its keys and values."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
