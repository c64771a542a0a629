"""What a layer goes on with: the compiled loop against the law itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam import kernels
from specbeam.choice import choose
from specbeam.dice import child_keys, coarse
from specbeam.errors import BrokenLaw, DeadEnd
from specbeam.laws import JointLaw
from specbeam.core.limits import Limits
from specbeam.probs import Warp, joint_law
from specbeam.records import Beams
from specbeam.laws.truncation import Truncation
from tests.test_laws import NO_PATHS, TRUNCATIONS

LIMITS = Limits(10, eos=(2, 40))


def beams_of(rng, count, nodes):
    tokens, keys = rng.integers(0, 50, count), rng.integers(0, 2**63, count, dtype=np.uint64)
    places = rng.choice(nodes, count, replace=False)
    return Beams(places, tokens, rng.normal(-20, 5, count), rng.integers(1, 4, count), keys)


@settings(max_examples=300)
@given(
    truncation=TRUNCATIONS,
    seed=st.integers(0, 10**6),
    beams=st.integers(1, 5),
    vocab=st.sampled_from([50, 700]),
    count=st.integers(1, 6),
    width=st.integers(0, 12),
    banned=st.sampled_from([0.0, 0.5, 0.99]),
    greedy=st.booleans(),
    drafting=st.booleans(),
)
def test_the_compiled_loop_chooses_as_the_law_does(
    truncation, seed, beams, vocab, count, width, banned, greedy, drafting
):
    rng = np.random.default_rng(seed)
    nodes = beams if drafting else beams + 3
    logits = torch.from_numpy(rng.normal(0, 3, (nodes, vocab)).astype(np.float32))
    logits[torch.from_numpy(rng.random((nodes, vocab)) < banned)] = -torch.inf
    logits[:, 7] = 0.5
    live, some = beams_of(rng, beams, nodes), np.arange(beams) % 2 == 0
    places = None if drafting else live.nodes
    warp = Warp(truncation=truncation, greedy=greedy)

    def chosen(law):
        noise = lambda: coarse(live.keys, vocab)  # noqa: E731
        return choose(logits, live, warp, NO_PATHS, count, width, some, LIMITS, noise, places, law)

    rows = logits if drafting else logits[torch.from_numpy(places)]
    law = joint_law(rows, live.scores, live.counts, warp, NO_PATHS)
    slow = JointLaw(law.logits, law.scores, law.log_norm, law.counts, law.truncation, compiled=False)
    found, expected = chosen(None), chosen(slow)
    for name in ("parents", "tokens", "scores", "keys", "ends"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert found.core == expected.core
    assert found.keys.tolist() == child_keys(live.keys[found.parents], found.tokens).tolist()
    assert found.ends.tolist() == [token in LIMITS.eos for token in found.tokens]
    if found.law is not None:
        np.testing.assert_allclose(found.law.logp, law.logp, rtol=1e-9)


@pytest.mark.parametrize("kind", ["nan", "inf", "dead"])
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_k=5), Truncation(top_p=0.9)])
def test_logits_that_are_none(kind, truncation):
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (3, 50)).astype(np.float32))
    logits[1, 4] = {"nan": torch.nan, "inf": torch.inf, "dead": 0.0}[kind]
    if kind == "dead":
        logits[:] = -torch.inf
    live, every = beams_of(rng, 3, 3), np.ones(3, dtype=bool)
    with pytest.raises(DeadEnd if kind == "dead" else BrokenLaw):
        choose(
            logits,
            live,
            Warp(truncation=truncation),
            NO_PATHS,
            2,
            4,
            every,
            LIMITS,
            lambda: coarse(live.keys, 50),
            None,
        )


@pytest.mark.skipif(not kernels.AVAILABLE, reason="needs numba")
def test_a_beam_without_a_way_on_is_left_out():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (3, 50)).astype(np.float32))
    logits[1] = -torch.inf
    live, every = beams_of(rng, 3, 3), np.ones(3, dtype=bool)
    found = choose(
        logits, live, Warp(truncation=Truncation(top_p=0.9)), NO_PATHS, 6, 12, every, LIMITS,
        lambda: coarse(live.keys, 50),
    )  # fmt: skip
    assert 1 not in found.parents
    assert np.isfinite(found.scores).all()
