"""VERIFY: the rules that decide which drafts live on, each with the law of what it gives."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
