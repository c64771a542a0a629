"""What tests of drafts compare: forests with all that is known of their siblings, and rows that a loop was given."""

from contextlib import contextmanager

import numpy as np
import pytest

from specbeam.core.laws.warp import on_host
from specbeam.core.ranked import whole_rows

NAMED = ("kinds", "parents", "parent_ends", "draw_ends", "rows", "tokens", "nodes", "law_ends")


def assert_same_forests(found, expected, near=0.0):
    """Check that two forests are the same, and odds to a share of `near`."""
    for name in ("tokens", "parents", "beams"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.logq, expected.logq, rtol=near, atol=near)
    for name in NAMED:
        np.testing.assert_array_equal(getattr(found.siblings, name), getattr(expected.siblings, name), name)
    np.testing.assert_array_equal(found.siblings.law_pairs, expected.siblings.law_pairs)
    np.testing.assert_allclose(found.siblings.law_odds, expected.siblings.law_odds, rtol=near)
    assert found.siblings.vocab == expected.siblings.vocab
    for name in ("nodes", "counts", "row_ends"):
        np.testing.assert_array_equal(getattr(found.frontier_rows, name), getattr(expected.frontier_rows, name), name)
    np.testing.assert_allclose(found.frontier_rows.scores, expected.frontier_rows.scores, rtol=near, atol=near)
    held = len(expected.frontier_rows.nodes)
    np.testing.assert_array_equal(found.frontier_rows.rows.logits[:held], expected.frontier_rows.rows.logits[:held])


@contextmanager
def recorded_rows(lm):
    """Collect the rows of logits that a model gives, pass by pass."""
    rows = []
    extend = lm.extend

    def noting(sessions, forests):
        scored = extend(sessions, forests)
        rows.extend(on_host(found.logits).copy() for found in scored)
        return scored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "extend", noting)
        yield rows


@contextmanager
def passes_that_give(module, rows):
    """Let the passes inside of a step of this module give these rows, one after the other. For steps that run as source."""
    line = iter(rows)

    def run_ranked_pass(model, tokens, parents, wanted, keys, whole, spent):
        spent[0] += 1
        return whole_rows(next(line))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_ranked_pass", run_ranked_pass)
        yield
