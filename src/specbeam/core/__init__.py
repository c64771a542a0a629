"""The core: records, random numbers, laws, and the loop of plan, draft, score, verify and settle.

It imports no other part of specbeam.
"""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # names are listed in __init__.pyi
