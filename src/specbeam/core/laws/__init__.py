"""Laws: probability distributions computed from a model's logits. Names with `odds` hold probabilities.

All computations that scale with the vocabulary are in this package.
"""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # names are listed in __init__.pyi
