"""Laws: the probability distributions that are made from a model's logits. Names with `odds` hold probabilities.

Only this code has work that grows with the vocabulary.
"""
