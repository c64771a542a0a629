"""Beams judged in one loop against the same, layer by layer."""

import pytest

import specbeam as sb
from specbeam import kernels
from tests.support.loops import OPTIONS, assert_same, pair

if not kernels.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["pair"]  # a fixture
METHODS = [
    sb.dsbd(3, 5, 4, "fixed"), sb.dsbd(1, 3, 5, "fixed"), sb.beam_sampling(4), sb.sampling(), sb.dsbd(4, 4, 2),
    sb.dsbd(2, 4, 3, "fixed", collapse=True),
]  # fmt: skip
ENDS = [
    {}, {"early_stopping": True}, {"early_stopping": "never", "length_penalty": 2.0}, {"num_return_sequences": 2},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda one: f"{one.name} {one.beams}")
def test_texts_and_reports_are_the_same(pair, method, options):
    assert_same(pair, method, "rule", options)


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_ends_come_where_they_came(pair, ends):
    """Beams end often, and each of them may be enough."""
    for method in (sb.dsbd(3, 5, 4, "fixed"), sb.beam_sampling(3)):
        assert_same(pair, method, "rule", {"top_k": 12, **ends, "eos_token_id": list(range(0, 60, 6))})


def test_what_is_watched_goes_layer_by_layer(pair):
    """Audits and traces see every layer, and change no text."""
    method = sb.dsbd(3, 5, 4, "fixed")
    plain, audited = (
        sb.generate(pair, [1, 7, 3], method, seed=4, max_new_tokens=12, audit=audit)[0] for audit in (False, True)
    )
    assert audited.tokens == plain.tokens
    assert audited.report.audit.draws == len(audited.report.widths)
