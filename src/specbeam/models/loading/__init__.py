"""Reading of models, tokenizers and drafts from files, and checks of them before they decode."""
