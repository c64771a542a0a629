"""Compiled runs with transformers' forward: the texts of the engine for CPUs, alone and together, by lists and by whole rows."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.answers import ranked_rows
from specbeam.core.ranked import Listing
from specbeam.core.scored_by_call import CalledRows, CallJob
from specbeam.engines.torch import runs as padded_runs
from specbeam.errors import SomeFailed
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from tests.support.runs_on_engines import check_texts, grid, loops, pair_of, prompts, texts
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

__all__ = ["loops"]  # a fixture
PROMPTS = prompts(8)
QUICK = [("beam sampling", 3, 3), ("dsbd with a top-k", 1, 0), ("speculative beam search", 3, None)]


@pytest.fixture(scope="module")
def pairs():
    """The same models by the engine for CPUs and by transformers."""
    return pair_of("compiled", "compiled"), pair_of("plain", "plain")


@pytest.mark.parametrize("case", grid(QUICK), ids=str)
def test_texts_are_those_of_the_engine_for_cpus(pairs, loops, monkeypatch, case):
    check_texts(pairs, PROMPTS, loops, monkeypatch, case, 9)


def test_a_draft_by_transformers_serves_a_compiled_target_and_the_other_way(pairs, loops):
    expected, _ = texts(pairs[0], PROMPTS, "dsbd", 1, 9)
    for engines in (("compiled", "plain"), ("plain", "compiled")):
        loops.clear()
        found, _ = texts(pair_of(*engines), PROMPTS, "dsbd", 3, 9)
        assert found == expected
        assert loops


def test_sessions_share_passes(pairs):
    _, by_transformers = pairs
    lm = by_transformers.target
    counts = []
    for batch_size in (1, 3):
        before = lm.passes
        texts(by_transformers, PROMPTS, "beam sampling", batch_size, 9)
        counts.append(lm.passes - before)
    assert counts[1] < counts[0] / 2


def test_turns_in_python_go_on_after_runs(pairs):
    """A stop string is looked for by Python between runs."""
    from tests.support import words

    target = tiny("llama", seed=1, num_hidden_layers=1)
    found = []
    for engine in ("compiled", "plain"):
        pair = Pair(target, None, words.tokenizer(), HuggingFaceLM(target, engine=engine, share_from=None), None)
        out = sb.generate(pair, "abc", sb.beam_sampling(2), seed=2, max_new_tokens=12, stop_strings=["b", "ca"])
        found.append([beam.tokens for beam in out[0].beams])
    assert found[0] == found[1]


def test_a_pass_that_fails_says_why_and_ends_no_later_text(pairs, monkeypatch):
    on_cpu, by_transformers = pairs
    expected, _ = texts(on_cpu, PROMPTS, "beam sampling", 1, 9)
    made = by_transformers.target.runner.runs
    calls = []

    def broken(*given):
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("no memory left")
        made.run(*given)

    with monkeypatch.context() as patch:
        patch.setattr(made.callback, "_function", broken)
        with pytest.raises(SomeFailed, match="no memory left"):
            texts(by_transformers, PROMPTS, "beam sampling", 3, 9)
    assert texts(by_transformers, PROMPTS, "beam sampling", 3, 9)[0] == expected


@pytest.mark.parametrize("by_noise", [False, True], ids=["by logit", "by noise"])
def test_lists_hold_the_best_tokens_and_the_sums_of_their_rows(by_noise):
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    rows[2, 7] = torch.nan
    keys = np.arange(3, dtype=np.uint64)
    none = np.zeros(0, dtype=np.int64)
    job = CallJob(0, none, none, np.arange(3), keys)
    asked = CalledRows(
        [job],
        Listing(4, by_noise, 0.5),
        np.zeros((3, 4), dtype=np.int64),
        np.zeros((3, 4), dtype=np.float32),
        np.zeros((3, 3)),
    )
    padded_runs.write_lists(asked, rows)
    assert np.isnan(asked.sums[0, 2])
    assert np.isnan(asked.logits[2]).all()
    for row in range(2):
        assert asked.sums[0, row] == pytest.approx(float(rows[row].logsumexp(0)), abs=1e-5)
        assert asked.sums[1, row] == pytest.approx(float((rows[row] / 0.5).logsumexp(0)), abs=1e-5)
        np.testing.assert_array_equal(asked.logits[row], rows[row].numpy()[asked.tokens[row]])
        assert (np.diff(asked.tokens[row]) > 0).all()
    if not by_noise:
        expected = ranked_rows(rows[:2], 4).tokens
        np.testing.assert_array_equal(np.sort(expected, axis=1), asked.tokens[:2])
