"""Doors: from what users write, in Python, at the command line or to transformers, to the records of the core and back."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
