"""Reading of models, tokenizers and drafts from files, and what is checked before they decode."""
