"""Beams judged in one loop against the same, layer by layer."""

from dataclasses import replace

import pytest

import specbeam as sb
from specbeam import kernels
from tests.draft.test_model_fast import OPTIONS, PROMPTS, known, pair

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


def layer_by_layer(method):
    def build(target, draft):
        parts = method.build(target, draft)
        return replace(parts, rule=replace(parts.rule, at_once=False))

    return replace(method, build=build)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda one: f"{one.name} {one.beams}")
def test_texts_and_reports_are_the_same(pair, method, options):
    same(pair, method, options)


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_ends_come_where_they_came(pair, ends):
    """Beams end often, and each of them may be enough."""
    for method in (sb.dsbd(3, 5, 4, "fixed"), sb.beam_sampling(3)):
        same(pair, method, {"top_k": 12, **ends, "eos_token_id": list(range(0, 60, 6))})


def same(pair, method, options):
    options = {"eos_token_id": [9, 30], **options}
    for prompt in PROMPTS:
        found, expected = (
            known(sb.generate(pair, prompt, one, seed=4, max_new_tokens=12, **options)[0])
            for one in (method, layer_by_layer(method))
        )
        assert found == expected


def test_what_is_watched_goes_layer_by_layer(pair):
    """Audits and traces see every layer, and change no text."""
    method = sb.dsbd(3, 5, 4, "fixed")
    plain, audited = (
        sb.generate(pair, [1, 7, 3], method, seed=4, max_new_tokens=12, audit=audit)[0] for audit in (False, True)
    )
    assert audited.tokens == plain.tokens
    assert audited.report.audit.draws == len(audited.report.widths)
