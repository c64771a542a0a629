"""DRAFT: the parts that hang guesses under the live beams, and the ways to draw and to shape them."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
