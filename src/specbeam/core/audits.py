"""The evidence of several texts against their declared law."""

from collections.abc import Sequence

from specbeam.core.audit import Audit


def evidence_of(audits: Sequence[Audit]) -> float:
    """Return the mean of the evidence of all texts together and of each, which is evidence: one text far off is seen."""
    each = [audit.evidence for audit in audits]
    return (sum(audits, Audit()).evidence + sum(each) / max(len(each), 1)) / 2
