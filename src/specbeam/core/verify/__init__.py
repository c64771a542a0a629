"""VERIFY: rules that decide which drafts survive, each with the law of its output."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # names are listed in __init__.pyi
