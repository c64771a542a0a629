"""The kernel of draws on small laws: drafts on trial, and what came of them."""

from unittest.mock import patch

import numpy as np

from specbeam.core.laws.evidence import no_evidence
from specbeam.core.verify import trials
from specbeam.core.verify.trials import Drafts, take_draws
from tests.oracles.draws import Taken
from tests.support.steps import source_of_steps


def drawn(tokens, q, size, distinct):
    """Drafts that were drawn from q, independently or each struck out once drawn, against a law over `size` tokens.

    Tokens from `size` on hang under dead parents: the wanted law cannot contain them.
    """
    own_places = np.array(tokens, dtype=np.int64)
    places = np.where(own_places < size, own_places, -1)
    return Drafts(places, own_places, q.copy(), q[:size].copy(), distinct, False)


def sure(tokens, size):
    """Drafts that were chosen and not drawn."""
    places = np.array(tokens, dtype=np.int64)
    return Drafts(places, np.zeros_like(places), np.zeros(0), np.zeros(size), False, True)


def tried(drafts, p, want, dice, replacement):
    """The draws that the kernel's source takes from `p`, as the oracle tells them."""
    fates = []

    def note_trial(evidence, wanted, drafted, accepted):
        fates.append(accepted)

    with source_of_steps(), patch.object(trials, "note_trial", note_trial):
        tokens, _ = take_draws(p, drafts, want, replacement, dice, no_evidence(True))
    accepted = [number for number, fate in enumerate(fates) if fate]
    numbers = accepted + [-1] * (len(tokens) - len(accepted))
    return [Taken(token, number) for token, number in zip(tokens.tolist(), numbers, strict=True)]


def token_of(drafts, p, dice):
    """The token of one draw."""
    return tried(drafts, p, 1, dice, True)[0].token
