"""MEMORY: models that read texts in segments and pass memories on (HMT)."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
