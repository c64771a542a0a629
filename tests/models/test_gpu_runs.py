"""Compiled runs on the engine for GPUs: the texts of the engine for CPUs, alone and together, by lists and by whole rows."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import specbeam as sb
from specbeam.core import compiling, runs
from specbeam.core.decode import decode
from specbeam.core.decoder import Decoder
from specbeam.core.ranked import WHOLE, are_whole
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.gpu import runs as gpu_runs
from specbeam.errors import SomeFailed
from tests.support.runs_on_engines import check_texts, grid, listing_of_length, loops, pair_of, prompts, texts

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
__all__ = ["loops"]  # a fixture
PROMPTS = prompts(3)
QUICK = [("beam sampling", 3, 3), ("dsbd with a top-k", 3, 0)]  # each method compiles loops of its own


@pytest.fixture(scope="module")
def pairs():
    """The same models by the engine for CPUs and by the one for GPUs."""
    return pair_of("compiled", "compiled"), pair_of("gpu", "gpu", DEVICE)


@pytest.mark.parametrize("case", grid(QUICK), ids=str)
def test_texts_are_those_of_the_engine_for_cpus(pairs, loops, monkeypatch, case):
    check_texts(pairs, PROMPTS, loops, monkeypatch, case, 5)


def test_many_sessions_go_in_as_few_passes_as_the_staging_allows(pairs, monkeypatch):
    _, on_gpu = pairs
    run, passes = gpu_runs.RunPasses.run, []

    def noted(self, rows, sessions, *given):
        passes.append((rows, sessions))
        return run(self, rows, sessions, *given)

    made = on_gpu.target.runner.runs
    monkeypatch.setattr(made.callback, "_function", lambda *given: noted(made, *given))
    settings = Settings(max_new_tokens=3, eos_token_id=[])
    sessions = [*Request.of(on_gpu, [[1, 2, 3 + k] for k in range(5)], sb.beam_sampling(3), settings, 3).sessions]
    for _ in decode(on_gpu.target, sessions, ahead=32):
        pass
    assert all(one.failure is None for one in sessions)
    assert len(passes) == 3
    assert {count for _, count in passes} == {5}
    assert max(rows for rows, _ in passes) <= made.passes.staging.rows


def test_a_pass_that_fails_ends_its_sessions_and_no_later_ones(pairs, monkeypatch):
    on_cpu, on_gpu = pairs
    expected, _ = texts(on_cpu, PROMPTS, "beam sampling", 1, 5)
    made = on_gpu.target.runner.runs
    calls = []

    def broken(*given):
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("no device")
        made.run(*given)

    with monkeypatch.context() as patch:
        patch.setattr(made.callback, "_function", broken)
        with pytest.raises(SomeFailed, match=r"3 prompts failed.*no device"):
            texts(on_gpu, PROMPTS, "beam sampling", 3, 5)
    assert texts(on_gpu, PROMPTS, "beam sampling", 3, 5)[0] == expected


def test_rows_of_stored_nodes_are_computed_again(pairs, monkeypatch):
    """Turns in Python between runs ask for whole rows of kept nodes; roots that were not drafted wait to be stored."""
    _, on_gpu = pairs
    listing_of_length(monkeypatch, 3)
    settings = Settings(max_new_tokens=10, eos_token_id=[])
    plain, mixed = (
        one for _ in range(2) for one in Request.of(on_gpu, PROMPTS[:1], sb.dsbd(3, depth=2), settings, 3).sessions
    )
    for _ in decode(on_gpu.target, [plain], ahead=0):
        pass
    compared = 0
    with Decoder(on_gpu.target, ahead=1) as decoder:
        decoder.add(mixed)
        while decoder.busy:
            lists = mixed.start.known.rows
            if len(lists.logits) and not are_whole(lists):
                runs.take_whole_rows(on_gpu.target, mixed)
                rows = mixed.start.known.rows.logits
                listed = np.take_along_axis(rows, lists.tokens, axis=1)
                np.testing.assert_allclose(listed, lists.logits, atol=1e-4)
                np.testing.assert_allclose(np.log(np.exp(rows.astype(float)).sum(axis=1)), lists.norms, atol=1e-4)
                compared += len(rows)
            decoder.ahead = 1 - decoder.ahead
            decoder.step()
    assert compared >= 3
    assert [one.tokens for one in mixed.hypotheses()] == [one.tokens for one in plain.hypotheses()]


def test_long_lists_are_whole_rows(pairs):
    """A kernel lists a limited number of tokens; a law may need more."""
    _, on_gpu = pairs
    (session,) = Request.of(on_gpu, [[1, 2]], sb.beam_sampling(3), Settings(max_new_tokens=3, top_k=200), 3).sessions
    assert runs.listing_of(session, 3, 128_000) == WHOLE
    (session,) = Request.of(on_gpu, [[1, 2]], sb.beam_sampling(3), Settings(max_new_tokens=3, top_k=100), 3).sessions
    assert runs.listing_of(session, 3, 128_000).length == 106


def test_a_session_with_a_large_mask_gets_a_larger_staging(pairs):
    on_cpu, on_gpu = pairs
    made = on_gpu.target.runner.runs
    before = made.staging
    try:
        made.make_room(before.mask_bytes)
        assert made.staging is before
        made.make_room(before.mask_bytes + 1)
        assert made.staging.mask_bytes > before.mask_bytes
        expected, _ = texts(on_cpu, PROMPTS, "beam sampling", 1, 5)
        assert texts(on_gpu, PROMPTS, "beam sampling", 3, 5)[0] == expected
    finally:
        made.staging = before
        made.rankers = {}
