"""Descriptions of output laws, as reports and the catalogue of methods print them."""

EXACT = "exact: plain sampling"
UNKNOWN = "unknown: the rule does not state the law of its output"
CHANGED = "approximate: changes the output law on purpose; "
