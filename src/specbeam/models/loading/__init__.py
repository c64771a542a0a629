"""Loading of models, tokenizers and drafts, with checks before they decode."""
