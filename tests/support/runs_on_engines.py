"""Texts of compiled runs on one engine beside those of another, with the same tiny models."""

import itertools

import numpy as np
import pytest

import specbeam as sb
from specbeam.core import runs
from specbeam.core.ranked import WHOLE
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from tests.support.tiny_models import tiny

CASES = {
    "sampling": (sb.sampling(), {}),
    "beam sampling": (sb.beam_sampling(3), {}),
    "dsbd": (sb.dsbd(3, depth=2), {}),
    "dsbd with a top-k": (sb.dsbd(3, depth=2), {"top_k": 6, "temperature": 0.8}),
    "speculative beam search": (sb.speculative_beam_search(3, depth=2), {}),
    "speculative sampling": (sb.speculative_sampling(2), {}),
}


def prompts(repeats):
    """Three prompts, of which the second one is long."""
    return [[1, 7, 3], [5, 6, 7, 8, 9] * repeats, [2]]


def grid(quick):
    """Name, batch size and list length of each comparison; those that are not quick are slow, as each compiles loops."""
    every = itertools.product(CASES, (1, 3), (3, 0, None))
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in every]


def pair_of(engine, draft_engine, device="cpu"):
    """A target and a draft on these engines."""
    target, draft = (tiny("llama", seed=seed, vocab_size=96, num_hidden_layers=1).to(device) for seed in (1, 2))
    lms = [
        HuggingFaceLM(model, engine=kind, share_from=None) for model, kind in ((target, engine), (draft, draft_engine))
    ]
    return Pair(target, draft, None, *lms)


@pytest.fixture
def loops(monkeypatch):
    """The numbers of sessions of compiled loops."""
    seen = []
    for name in ("run_turns", "run_turns_together"):
        loop = getattr(runs, name)

        def noted(first, *given, loop=loop):
            seen.append(len(first) if isinstance(first, np.ndarray) else 1)
            return loop(first, *given)

        monkeypatch.setattr(runs, name, noted)
    return seen


def listing_of_length(monkeypatch, length):
    """Let lists have this length; 0: as planned; None: whole rows."""

    def listing_for(target, session, width):
        found = runs.listing_of(session, width, 2**40)
        if length is None or found.length == 0:
            return WHOLE
        return found._replace(length=length or found.length)

    monkeypatch.setattr(runs, "_listing_for", listing_for)


def texts(pair, asked, name, batch_size, most):
    """The tokens of each beam of each prompt, and the answers.

    Args:
        name: the case.
        most: the number of new tokens.
    """
    method, options = CASES[name]
    found = sb.generate(
        pair, asked, method, max_new_tokens=most, eos_token_id=[9], seed=3, batch_size=batch_size, **options
    )
    return [[beam.tokens for beam in one.beams] for one in found], found


def check_texts(pairs, asked, loops, monkeypatch, case, most):
    """Compare the texts of two engines: (name, batch size, length of the lists) are as in `grid`."""
    name, batch_size, length = case
    by_first, by_second = pairs
    expected, _ = texts(by_first, asked, name, 1, most)
    loops.clear()
    listing_of_length(monkeypatch, length)
    found, answers = texts(by_second, asked, name, batch_size, most)
    assert found == expected
    assert max(loops) == batch_size
    if length is None:
        assert sum(one.report.rows.whole for one in answers) == 0
