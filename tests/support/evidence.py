"""Audits of single outcomes, by the steps that note them."""

import numpy as np

from specbeam.core.audit import Audit
from specbeam.core.laws.evidence import no_evidence, note_acceptance, note_draw, note_trial


def of_draw(logp, token):
    """The audit of a draw from a law, given as logs."""
    evidence = no_evidence(True)
    logp = np.asarray(logp, dtype=np.float64)
    note_draw(evidence, logp, np.exp(logp), token)
    return Audit.of(evidence)


def of_trial(wanted, drafted, accepted):
    """The audit of a candidate that was accepted or refused."""
    evidence = no_evidence(True)
    note_trial(evidence, wanted, drafted, accepted)
    return Audit.of(evidence)


def of_acceptance(wanted, drafted, probability):
    """The audit of a candidate's acceptance probability."""
    evidence = no_evidence(True)
    note_acceptance(evidence, wanted, drafted, probability)
    return Audit.of(evidence)
