"""The laws of outputs, by the words that reports and the catalogue have for them."""

EXACT = "exact: plain sampling"
UNKNOWN = "unknown: a rule of one's own that does not say"
CHANGED = "approximate: changes the output law on purpose; "
