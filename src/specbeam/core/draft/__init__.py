"""DRAFT: drafters that propose token trees under the live beams, growths of trees, and ways to draw children."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # names are listed in __init__.pyi
