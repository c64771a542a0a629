"""Draft heads: small modules on the hidden states of a target, which draft for it. Their files, their shapes, their rows."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
