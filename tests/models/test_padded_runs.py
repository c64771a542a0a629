"""Compiled runs with transformers' forward: the texts of the engine for CPUs, alone and together, by lists and by whole rows."""

import itertools

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling, runs
from specbeam.core.answers import ranked_rows
from specbeam.core.ranked import WHOLE, Listing
from specbeam.core.scored_by_call import CalledRows, CallJob
from specbeam.engines.torch import runs as padded_runs
from specbeam.errors import SomeFailed
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import Pair
from tests.support.tiny_models import tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

PROMPTS = [[1, 7, 3], [5, 6, 7, 8, 9] * 8, [2]]
CASES = {
    "sampling": (sb.sampling(), {}),
    "beam sampling": (sb.beam_sampling(3), {}),
    "dsbd": (sb.dsbd(3, depth=2), {}),
    "dsbd with a top-k": (sb.dsbd(3, depth=2), {"top_k": 6, "temperature": 0.8}),
    "speculative beam search": (sb.speculative_beam_search(3, depth=2), {}),
    "speculative sampling": (sb.speculative_sampling(2), {}),
}
QUICK = [("beam sampling", 3, 3), ("dsbd with a top-k", 1, 0), ("speculative beam search", 3, None)]


def pair_of(engine, draft_engine):
    target, draft = (tiny("llama", seed=seed, vocab_size=96, num_hidden_layers=1) for seed in (1, 2))
    lms = [
        HuggingFaceLM(model, engine=kind, share_from=None) for model, kind in ((target, engine), (draft, draft_engine))
    ]
    return Pair(target, draft, None, *lms)


@pytest.fixture(scope="module")
def pairs():
    """The same models by the engine for CPUs and by transformers."""
    return pair_of("compiled", "compiled"), pair_of("plain", "plain")


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


def texts(pair, method, options, batch_size):
    found = sb.generate(
        pair, PROMPTS, method, max_new_tokens=9, eos_token_id=[9], seed=3, batch_size=batch_size, **options
    )
    return [[beam.tokens for beam in one.beams] for one in found], found


@pytest.mark.parametrize(
    ("name", "batch_size", "length"),
    [
        case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(CASES, (1, 3), (3, 0, None))
    ],
)
def test_texts_are_those_of_the_engine_for_cpus(pairs, loops, monkeypatch, name, batch_size, length):
    on_cpu, by_transformers = pairs
    method, options = CASES[name]
    expected, _ = texts(on_cpu, method, options, 1)
    loops.clear()
    listing_of_length(monkeypatch, length)
    found, answers = texts(by_transformers, method, options, batch_size)
    assert found == expected
    assert max(loops) == batch_size
    if length is None:
        assert sum(one.report.rows.whole for one in answers) == 0


def test_a_draft_by_transformers_serves_a_compiled_target_and_the_other_way(pairs, loops):
    method, options = CASES["dsbd"]
    expected, _ = texts(pairs[0], method, options, 1)
    for engines in (("compiled", "plain"), ("plain", "compiled")):
        loops.clear()
        found, _ = texts(pair_of(*engines), method, options, 3)
        assert found == expected
        assert loops


def test_sessions_share_passes(pairs):
    _, by_transformers = pairs
    lm = by_transformers.target
    method, options = CASES["beam sampling"]
    counts = []
    for batch_size in (1, 3):
        before = lm.passes
        texts(by_transformers, method, options, batch_size)
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
    method, options = CASES["beam sampling"]
    expected, _ = texts(on_cpu, method, options, 1)
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
            texts(by_transformers, method, options, 3)
    assert texts(by_transformers, method, options, 3)[0] == expected


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
