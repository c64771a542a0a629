"""Descriptions of output laws in reports and in the catalogue of methods."""

EXACT = "exact: plain sampling"
UNKNOWN = "unknown: the class of the rule does not state the law of its output, which is not inherited"
CHANGED = "approximate: changes the output law on purpose; "
