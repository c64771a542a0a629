"""Engines that run the layers of models, and their KV caches."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # names are listed in __init__.pyi
