"""Laws: the probability distributions that are made from a model's logits. Names with `odds` hold probabilities.

Only this code has work that grows with the vocabulary.
"""

from specbeam.core.lazy import attached

__getattr__, __dir__, __all__ = attached(__name__, __file__)  # the names stand in __init__.pyi
