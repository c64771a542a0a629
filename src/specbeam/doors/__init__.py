"""Doors: translation of user input (Python, command line, transformers) to records of the core, and back."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names are listed in __init__.pyi
