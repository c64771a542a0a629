"""PLAN: the controllers that decide how deep and how wide drafts are, and the widths of layers."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # names are listed in __init__.pyi
