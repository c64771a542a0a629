"""Speech to text: audio, its windows, the transcript and its formats."""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # names are listed in __init__.pyi
