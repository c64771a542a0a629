"""Draft heads: small modules on the hidden states of a target, which draft for it. Their files, their shapes, their rows."""
