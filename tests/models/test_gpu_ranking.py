"""Ranked rows, by Triton's kernels and by torch, against the steps of the core: the same tokens, ties, hashes and norms.

Without a GPU the kernels run in Triton's interpreter.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from specbeam.core.laws.ranking import WHOLE_ROWS, pairs_of_best_value
from specbeam.core.laws.reduce import log_norm
from specbeam.core.noise import gumbel, leading_bits, scramble
from specbeam.engines.gpu import ranking
from specbeam.engines.gpu.ranking import RowRanker
from specbeam.engines.torch import ranking as by_torch
from specbeam.engines.torch.ranking import NO_TOKEN, SLACK, ranked_by_topk
from tests.models.test_gpu import DEVICE, ON_GPU

NO_KEYS = np.zeros(0, dtype=np.uint64)
KEYS = np.array([0, 2**64 - 1, 0x9E3779B97F4A7C15, 12345, 2**63], dtype=np.uint64)
RANKERS = ["kernels", "torch"]


@dataclass
class Row:
    """A row of logits, and how it is ranked."""

    logits: torch.Tensor
    temperature: float = 1.0
    key: int | None = None  # of its noise; None: no noise
    allowed: torch.Tensor | None = None  # bool[vocab]


def ranked(kind, rows, count, bans_in_norms=False):
    """Return these rows as ranked rows, on the host."""
    logits = torch.stack([row.logits for row in rows]).float().to(DEVICE)
    ban_sets = [row.allowed for row in rows if row.allowed is not None]
    ranker = RowRanker(len(rows) + 2, logits.shape[1], count, torch.device(DEVICE), len(ban_sets), bans_in_norms)
    set_up(ranker.settings, rows, ban_sets)
    if kind == "torch":
        return ranked_by_topk(logits.cpu(), on_host(ranker.settings), count, bans_in_norms)
    return on_host(ranker.rank(logits))


def on_host(record):
    return type(record)(*(part.cpu() for part in record))


def set_up(settings, rows, ban_sets):
    for place, row in enumerate(rows):
        settings.temperatures[place] = row.temperature
        settings.noisy[place] = row.key is not None
        settings.keys[place] = int(np.array(row.key or 0, dtype=np.uint64).view(np.int64))
    with_bans = [place for place, row in enumerate(rows) if row.allowed is not None]
    for number, (place, allowed) in enumerate(zip(with_bans, ban_sets, strict=True)):
        settings.ban_sets[place] = number
        words = np.zeros(32 * settings.allowed.shape[1], dtype=np.uint8)
        words[: len(allowed)] = allowed.numpy()
        settings.allowed[number] = torch.from_numpy(np.packbits(words, bitorder="little").view(np.int32))


def best_of(row, logits, count):
    """Return the best tokens by the steps of the core, best first, and their order values."""
    keys = NO_KEYS if row.key is None else np.array([row.key], dtype=np.uint64)
    temperature = 1.0 if row.key is None else row.temperature
    every = np.ones(1, dtype=np.bool_)
    return pairs_of_best_value(logits[None], WHOLE_ROWS, np.zeros(1), temperature, np.zeros(1), keys, every, count)


def check(kind, rows, count, bans_in_norms=False):
    """Rank rows, and compare all fields with the steps of the core."""
    found = ranked(kind, rows, count, bans_in_norms)
    for place, row in enumerate(rows):
        raw = row.logits.float().numpy()
        banned = raw if row.allowed is None else np.where(row.allowed.numpy(), raw, np.float32(-np.inf))
        ordered = np.where(np.isnan(banned), np.float32(-np.inf), banned)
        vocab = len(raw)
        listed = min(count, vocab)
        tokens, values = best_of(row, ordered, min(count + 1, vocab))
        rest = values[listed] if len(values) > listed else -np.inf
        tokens = tokens[:listed]
        others = np.setdiff1d(np.arange(vocab), tokens)[: listed - len(tokens)]  # of -inf, in ascending order
        tokens = np.sort(np.concatenate([tokens, others]))
        padding = [NO_TOKEN] * (count - listed)
        assert found.tokens[place].tolist() == [*tokens.tolist(), *padding]
        np.testing.assert_array_equal(found.logits[place, :listed], banned[tokens])
        assert bool((found.logits[place, listed:] == -torch.inf).all())
        is_noisy = row.key is not None
        bound = rest + SLACK * max(1, abs(rest)) if is_noisy and rest > -np.inf else rest
        np.testing.assert_allclose(found.rest[place], bound, rtol=0, atol=1e-13 if is_noisy else 0)
        normed = banned if bans_in_norms else raw
        temperature = np.float32(row.temperature)
        near = {"rtol": 1e-6, "atol": 1e-6}
        np.testing.assert_allclose(found.norm[place], log_norm(normed[None].copy())[0], **near)
        np.testing.assert_allclose(found.warm[place], log_norm(normed[None] / temperature)[0], **near)
    return found


def normal(vocab, seed=0, scale=3.0):
    return scale * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def quantised(vocab, seed=0):
    """Logits of bfloat16, among which ties are frequent."""
    return normal(vocab, seed).bfloat16().float()


@pytest.mark.parametrize("kind", RANKERS)
@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (3, 8), (61, 8), (129, 128), (2049, 2), (4111, 40)])
def test_the_best_tokens_of_rows_are_listed(kind, vocab, count):
    rows = [
        Row(normal(vocab, 1), temperature=0.7),
        Row(normal(vocab, 2), temperature=0.7, key=5),
        Row(quantised(vocab, 3)),
        Row(quantised(vocab, 4), temperature=1.3, key=2**64 - 3),
    ]
    check(kind, rows, count)


@pytest.mark.parametrize("kind", RANKERS)
def test_long_rows_are_ranked(kind):
    rows = [Row(quantised(70_001, 1)), Row(normal(70_001, 2), key=7)]
    check(kind, rows, 128)


@pytest.mark.parametrize("kind", RANKERS)
def test_of_equal_logits_the_first_tokens_are_listed(kind):
    zeros = torch.zeros(3000)
    zeros[::2] = -0.0
    few = torch.full((3000,), -2.0)
    few[[7, 130, 131, 2999]] = 1.0
    many = torch.zeros(3000)
    many[2900:] = 1.0
    found = check(kind, [Row(zeros), Row(few), Row(many), Row(torch.full((3000,), -torch.inf))], 20)
    assert found.tokens[0].tolist() == [*range(20)]
    assert found.rest.tolist() == [0.0, -2.0, 1.0, -torch.inf]


@pytest.mark.parametrize("kind", RANKERS)
def test_rows_with_infinite_numbers_and_nan(kind):
    broken, infinite, few = normal(700, 1), normal(700, 2), torch.full((700,), -torch.inf)
    broken[[3, 600]] = torch.nan
    infinite[650] = torch.inf
    few[[4, 500, 699]] = torch.tensor([1.0, -3.0, 2.0])
    dead = torch.full((700,), -torch.inf)
    rows = [
        Row(broken),
        Row(infinite),
        Row(few),
        Row(dead),
        Row(dead, key=3),
        Row(few, 0.5, key=3),
        Row(broken, 0.5, key=3),
    ]
    found = check(kind, rows, 8)
    assert found.norm.isnan().tolist() == [True, True, False, False, False, False, True]
    assert found.norm[3] == -torch.inf
    assert found.rest[2] == -torch.inf
    assert found.tokens[2].tolist() == [0, 1, 2, 3, 4, 5, 500, 699]


@pytest.mark.parametrize("kind", RANKERS)
@pytest.mark.parametrize("bans_in_norms", [False, True], ids=["whole norms", "norms of allowed tokens"])
def test_banned_tokens_are_not_listed(kind, bans_in_norms):
    vocab = 1001
    some = torch.rand(vocab, generator=torch.Generator().manual_seed(3)) < 0.5
    none, last = torch.zeros(vocab, dtype=torch.bool), torch.zeros(vocab, dtype=torch.bool)
    last[[0, 31, 32, vocab - 1]] = True
    rows = [
        Row(normal(vocab, 1), allowed=some),
        Row(normal(vocab, 2)),
        Row(normal(vocab, 3), 0.8, key=9, allowed=some),
        Row(quantised(vocab, 4), allowed=last),
        Row(normal(vocab, 5), allowed=none),
    ]
    found = check(kind, rows, 16, bans_in_norms)
    assert bool(some[found.tokens[0].long()].all())
    assert bool((found.norm[4] == -torch.inf) == bans_in_norms)


@triton.jit
def _write_noise(key, leading, trailing, noise, first, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    own = tl.load(key).to(tl.uint64, bitcast=True)
    tl.store(leading + at, ranking._leading_bits(own, first + at).to(tl.int64))
    tl.store(trailing + at, ranking._trailing_bits(own, first + at).to(tl.int64))
    tl.store(noise + at, ranking._gumbel(own, first + at))


@pytest.mark.parametrize("kind", RANKERS)
@pytest.mark.parametrize("key", KEYS)
def test_hashes_have_the_bits_of_the_core(kind, key):
    signed = torch.tensor(int(key.view(np.int64)), device=DEVICE)
    for first in (0, 259_000):
        tokens = torch.arange(first, first + 1024, device=DEVICE)
        if kind == "torch":
            leading = by_torch.leading_bits(signed, tokens)
            trailing = by_torch.trailing_bits(signed, tokens)
            noise = by_torch.gumbel_noise(signed, tokens)
        else:
            leading, trailing = tokens.new_zeros(2, 1024)
            noise = torch.zeros(1024, dtype=torch.float64, device=DEVICE)
            _write_noise[(1,)](signed, leading, trailing, noise, first, 1024)
        golden = np.uint64(0x9E3779B97F4A7C15)
        with np.errstate(over="ignore"):
            expected = [scramble(key + np.uint64(token + 1) * golden) >> np.uint64(32) for token in tokens.tolist()]
        assert leading.tolist() == [int(leading_bits(key, token)) for token in tokens.tolist()]
        assert trailing.tolist() == [int(bits) for bits in expected]
        exact = [gumbel(key, token) for token in tokens.tolist()]
        np.testing.assert_allclose(noise.cpu().numpy(), exact, rtol=1e-14, atol=1e-14)


def test_a_row_is_one_piece_of_few_bytes():
    ranker = RowRanker(3, 500, 64, torch.device(DEVICE))
    assert ranker.row_bytes == 24 + 8 * 64
    found = ranker.rank(torch.randn(2, 500, device=DEVICE))
    copy = by_torch.room_for_ranked(3, 64, torch.device("cpu"))
    copy.buffer[:2].copy_(found.buffer)
    for one, other in zip(copy.first(2), found, strict=True):
        assert torch.equal(one, other.cpu())
    assert bool((ranker.found.buffer[2] == 0).all())


def test_rows_need_not_be_contiguous_and_may_have_16_bits():
    logits = torch.randn(3, 700, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).half()
    ranker = RowRanker(3, 600, 8, torch.device(DEVICE))
    found = ranker.rank(logits[:, :600]).tokens.cpu()
    expected = ranked_by_topk(logits[:, :600], ranker.settings, 8).tokens.cpu()
    assert torch.equal(found, expected)


def test_lists_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match="1 to 128 tokens, and 129"):
        RowRanker(1, 500, 129, torch.device(DEVICE))


@ON_GPU
@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are captured on GPUs")
def test_a_captured_ranking_follows_its_settings_and_allocates_nothing():
    device = torch.device(DEVICE)
    ranker = RowRanker(8, 128_256, 64, device, ban_sets=1)
    logits = torch.randn(8, 128_256, device=device)
    ranker.rank(logits)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    ranker.rank(logits)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranker.rank(logits)
    for turn in range(3):
        logits.normal_()
        ranker.settings.noisy[turn:] = 1
        ranker.settings.keys.random_()
        ranker.settings.temperatures.uniform_(0.5, 2)
        ranker.settings.ban_sets[turn] = 0
        ranker.settings.allowed.random_()
        graph.replay()
        check_against_torch(ranker, logits)


@ON_GPU
@pytest.mark.skipif(DEVICE == "cpu", reason="it takes the interpreter minutes")
@pytest.mark.parametrize("count", [4, 32, 128])
def test_many_rows_of_large_vocabularies(count):
    device = torch.device(DEVICE)
    ranker = RowRanker(1024, 260_000, count, device)
    logits = torch.randn(1024, 260_000, device=device)
    logits[::3] = logits[::3].bfloat16().float()
    ranker.settings.noisy[::2] = 1
    ranker.settings.keys.random_()
    ranker.rank(logits)
    check_against_torch(ranker, logits)


def check_against_torch(ranker, logits):
    expected = ranked_by_topk(logits, ranker.settings, ranker.count)
    assert torch.equal(ranker.found.tokens, expected.tokens)
    assert torch.equal(ranker.found.logits, expected.logits)
    for found, wanted in zip(ranker.found[3:], expected[3:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
