"""Recipes of all methods: for each its parts, its output law and its paper."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names are listed in __init__.pyi
