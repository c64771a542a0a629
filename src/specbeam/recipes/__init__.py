"""Recipes, one for each method: the parts that it consists of, its output law, and its paper."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
