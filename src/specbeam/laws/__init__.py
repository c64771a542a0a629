"""Laws: what is made of a model's logits. The only code whose work grows with the vocabulary."""
