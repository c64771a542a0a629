"""Perturbed log-odds of stochastic beam search: the first to arrive in a race, given when the first one did."""

import numpy as np
import pytest

from specbeam.core.draft.stochastic import perturbed
from tests.support.steps import source_of


def perturbed_plainly(logp, path, top, u):
    """Gumbel values of all places, conditioned on their maximum being `top` (Kool et al. 2019, app. B.3)."""
    values = path + logp - np.log(-np.log(u))
    with np.errstate(divide="ignore"):
        below = np.exp(-values) - np.exp(-values.max())  # by itself, as it is nothing for the largest, however small
        return -np.log(np.exp(-top) + below)


@pytest.mark.parametrize("step", [perturbed, source_of(perturbed)], ids=["compiled", "source"])
@pytest.mark.parametrize("size", [2, 3, 70, 2000])
def test_the_first_in_a_race_are_those_of_largest_noisy_odds(size, step):
    rng = np.random.default_rng(size)
    for number in range(50 if size < 2000 or step is perturbed else 5):
        logp = np.log(rng.dirichlet(np.full(size, 0.1)) + 1e-300)
        logp[rng.random(size) < 0.2] = -np.inf
        logp[0] = max(logp[0], -700.0)  # something is always left
        u = rng.random(size)
        order = np.argsort(-(logp - np.log(-np.log(u))), kind="stable")[:3]
        expected = sorted(place for place in order.tolist() if logp[place] > -np.inf)
        places, values = step(logp, -1.5, 0.25, u, 3)
        assert places.tolist() == expected, number
        assert values.max() == 0.25
        near = values > -30  # further down the plain formula loses its digits
        assert values[near] == pytest.approx(perturbed_plainly(logp, -1.5, 0.25, u)[places][near], abs=1e-4)
        order_of_values = np.argsort(-values, kind="stable")
        assert places[order_of_values].tolist() == [place for place in order.tolist() if place in expected]
