"""What a width is chosen by, in one loop, against array code."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam import kernels
from specbeam.control.accepted import odds_under_shared_noise
from specbeam.control.fixed import FixedShape
from specbeam.control.width import FixedWidth
from specbeam.draft.beams import NoDraft
from specbeam.forest import Forest, Group
from specbeam.core.limits import Limits
from specbeam.probs import Warp, joint_law
from specbeam.records import Beams
from specbeam.session import Parts, Session
from specbeam.laws.truncation import Truncation
from specbeam.verify.beams import BeamRule, Layer
from tests.test_laws import NO_PATHS

if not kernels.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)


def random_layer(rng, truncation, beams, rows, vocab, drafts, agreement):
    """Live beams and rows of the draft that share some nodes; the draft's logits are more or less those of the target."""
    nodes = 12
    scored = torch.from_numpy(rng.normal(0, 2, (nodes, vocab)).astype(np.float32))
    live = Beams(
        rng.choice(nodes, beams, replace=False), np.zeros(beams, dtype=np.int64), rng.normal(-9, 1, beams),
        rng.integers(1, 3, beams), rng.integers(0, 2**60, beams, dtype=np.uint64),
    )  # fmt: skip
    parents, warp = rng.choice(nodes, rows, replace=False), Warp(truncation=truncation)
    own = torch.from_numpy(rng.normal(0, 2, (rows, vocab)).astype(np.float32))
    mixed = agreement * scored[torch.from_numpy(parents)] + (1 - agreement) * own
    draft = joint_law(mixed, rng.normal(-9, 1, rows), np.ones(rows, dtype=np.int64), warp, NO_PATHS)
    drawn = np.zeros(drafts, dtype=np.int64)
    parts = Parts(NoDraft(), BeamRule(FixedWidth(4)), FixedShape(0, 0), "")
    session = Session([0], parts, warp, Limits(9), key=0)
    return Layer(session, Forest.rooted([0]), live, scored, Group(parents, drawn, drawn, drawn, draft))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    truncation=st.builds(
        Truncation,
        temperature=st.sampled_from([1.0, 0.3, 1.7]),
        top_k=st.sampled_from([0, 1, 3, 20]),
        top_p=st.sampled_from([0.9, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.02]),
    ),
    beams=st.integers(1, 5),
    rows=st.integers(1, 6),
    vocab=st.sampled_from([5, 60, 700]),
    drafts=st.integers(1, 8),
    agreement=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_the_loop_estimates_what_array_code_does(seed, truncation, beams, rows, vocab, drafts, agreement):
    layer = random_layer(np.random.default_rng(seed), truncation, beams, rows, vocab, drafts, agreement)
    draft = layer.group.law
    found = odds_under_shared_noise(layer.law, draft, layer.row_of, layer.known, layer.drafted, 4)
    expected = layer.accepted_of_cut(draft, layer.drafted, 4)
    assert layer.accepted(4, by_noise=True).tolist() == (expected if found is None else found)[:, -1].tolist()
    if found is not None:
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_loop_decides_usual_truncations():
    rng = np.random.default_rng(0)
    for truncation in (Truncation(top_k=10, top_p=0.9), Truncation(temperature=0.7, top_k=50), Truncation(top_p=0.1)):
        layer = random_layer(rng, truncation, 4, 6, 700, 6, 0.7)
        odds = odds_under_shared_noise(layer.law, layer.group.law, layer.row_of, layer.known, 6, 4)
        assert odds is not None
        assert len(odds) == 1 + min(4, layer.law.size)
        assert (odds[0] == 1).all()


def test_more_pairs_than_run_are_left_to_array_code():
    flat = Truncation(top_k=400)
    layer = random_layer(np.random.default_rng(0), flat, 4, 6, 700, 6, 0.7)
    assert odds_under_shared_noise(layer.law, layer.group.law, layer.row_of, layer.known, 6, 4) is None
    assert layer.accepted(4, by_noise=True)[0] == 1
