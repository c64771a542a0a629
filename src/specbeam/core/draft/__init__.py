"""DRAFT: drafters, which propose token trees under the live beams, with growths and ways to draw children."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
