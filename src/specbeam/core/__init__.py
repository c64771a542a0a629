"""The core: records, chance, laws, and the loop: plan, draft, score, verify, settle. It imports nothing outside itself."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
