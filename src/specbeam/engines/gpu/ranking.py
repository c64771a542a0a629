"""Ranked rows on a GPU: the best tokens of each row of logits, in place of the row.

`RowRanker` finds the `count` tokens of largest order value of each row in three launches, whatever the numbers of rows and
of tokens. The order value of a token is its logit, or, in noisy rows, logit / temperature + noise, where the noise is
`core.noise.gumbel` of the row's key and the token. Hashes are computed in integers, so they have the bits of `core.noise`;
logarithms are computed in float64, and may differ in their last bits. Order values are compared in float64, and tokens of
equal value are in ascending order. NaN ranks as -inf.

1. `_summarise` reads a tile of a row: its part of the sums of exponentials, and the largest order value of each block.
2. `_choose_blocks` finds the `count` blocks with the largest maxima. They contain the best tokens: a token in another block
   comes after its block's best token, and that one after the best tokens of the chosen blocks.
3. `_list_tokens` finds the best tokens of the chosen blocks.

Both searches look for the order value of rank `count` by bisection of its bits. So their time is bounded, and ties are
exact. Nothing is allocated or read on the host, shapes depend on the number of rows only, and all settings of rows are read
from device buffers, so the launches can be captured in a CUDA graph.

A row of the result takes 24 + 8 * count bytes: 536 bytes for 64 tokens. Its scratch takes 8 bytes per block of 128 tokens
(64 tokens if more than 32 are listed), 16 bytes per tile of 2,048 tokens, and up to 8 * count + 16 bytes: 17 KB for
128,000 tokens and a list of 64. Its logits take 512 KB.

`ranked_by_topk` of engines/torch/ranking.py gives the same results by torch operations, for engines without Triton.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from specbeam.core.laws.listing import MOST_LISTED
from specbeam.engines.gpu.kernels import step
from specbeam.engines.torch.ranking import NO_TOKEN, SLACK, RankedRows, plain_settings, room_for_ranked

_TILE = 2048  # tokens of a program of `_summarise`
_WIDE = 128  # tokens of a block
_NARROW = 64  # tokens of a block, for lists of more than `_WIDE_LISTS` tokens
_WIDE_LISTS = 32
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LEAST = tl.constexpr(-(2**63) + 1)  # below the ranks of all order values, for missing tokens
_SIGN = tl.constexpr(2**63 - 1)  # the bits other than the sign
_SPACING = tl.constexpr(2**29)  # between the ranks of different float32 numbers
_ULPS = tl.constexpr(4096)  # more than an order value differs between two kernels that compute it
_SLACK = tl.constexpr(SLACK)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_LOW_BITS = tl.constexpr(0xFFFFFFFF)
_ODD = tl.constexpr(0x9E3779B1)
_ROUND_1 = tl.constexpr(0x21F0AAAD)
_ROUND_2 = tl.constexpr(0xD35A2D97)
_ROUND_3 = tl.constexpr(0x85EBCA6B)
_BELOW_1 = tl.constexpr(1 - 2.0**-53)
_PER_UINT32 = tl.constexpr(2.0**-32)


@step
def _scrambled(x):
    """Return `core.noise.scramble` of uint64 numbers."""
    x = (x ^ (x >> 30)) * _FACTOR_1
    x = (x ^ (x >> 27)) * _FACTOR_2
    return x ^ (x >> 31)


@step
def _leading_bits(key, token):
    """Return `core.noise.leading_bits` of a uint64 key and int32 tokens."""
    low = (key & _LOW_BITS).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = low + (token.to(tl.uint32) + 1) * _ODD
    x = (x ^ (x >> 16)) * _ROUND_1
    x = ((x ^ (x >> 15)) + high) * _ROUND_2
    x = (x ^ (x >> 15)) * _ROUND_3
    return x ^ (x >> 16)


@step
def _trailing_bits(key, token):
    """Return the lower half of the 64 bits of `core.noise.gumbel`."""
    return (_scrambled(key + (token.to(tl.uint64) + 1) * _GOLDEN) >> 32).to(tl.uint32)


@step
def _gumbel(key, token):
    """Return `core.noise.gumbel` of a uint64 key and int32 tokens, up to the last bits of logarithms."""
    trailing = _trailing_bits(key, token).to(tl.float64)
    leading = _leading_bits(key, token).to(tl.float64)
    uniform = (leading + (trailing + 0.5) * _PER_UINT32) * _PER_UINT32
    uniform = tl.minimum(uniform, tl.full([], _BELOW_1, tl.float64))
    # log1p(-u) = log(w) * -u / (w - 1) with w = 1 - u as it is rounded; interpreters have no log1p
    rounded = 1.0 - uniform
    is_one = rounded == 1.0
    below = tl.where(is_one, 1.0, rounded - 1.0)
    exponential = tl.where(is_one, uniform, tl.log(rounded) * (uniform / below))
    return -tl.log(exponential)


@step
def _allowed_logits(logits, pitch, row, token, vocab, ban_sets, allowed, words, BANS: tl.constexpr):
    """Return the logits of tokens of a row, without and with its bans; -inf for tokens beyond the vocabulary."""
    inside = token < vocab
    raw = tl.load(logits + row * pitch + token, mask=inside, other=-float("inf")).to(tl.float32)
    x = raw
    if BANS:
        ban_set = tl.load(ban_sets + row).to(tl.int64)
        has_bans = inside & (token * 0 + ban_set >= 0)
        word = tl.load(allowed + ban_set * words + token // 32, mask=has_bans, other=-1)
        x = tl.where(((word >> (token % 32)) & 1) != 0, raw, -float("inf"))
    return raw, x


@step
def _ranks(x, token, row, vocab, temperatures, keys, noisy):
    """Return the order values of tokens as int64 ranks with the same order; _LEAST for tokens beyond the vocabulary."""
    value = x.to(tl.float64)
    if tl.load(noisy + row) != 0:
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        value = value / tl.load(temperatures + row).to(tl.float64) + _gumbel(key, token)
    value = tl.where(value == value, value, -float("inf"))
    value = tl.where(value == 0.0, 0.0, value)  # -0 equals 0
    bits = value.to(tl.int64, bitcast=True)
    ranks = tl.where(bits < 0, bits ^ _SIGN, bits)
    return tl.where(token < vocab, ranks, _LEAST)


@step
def _value_of(rank):
    """Return the order value of a rank; -inf for _LEAST."""
    bits = tl.where(rank < 0, rank ^ _SIGN, rank)
    return tl.where(rank == _LEAST, -float("inf"), bits.to(tl.float64, bitcast=True))


@step
def _rank_of(ranks, low, wanted, noisy):
    """Return the `wanted`-th largest of some ranks, which is at least `low`."""
    spacing = tl.where(noisy != 0, 1, _SPACING)
    high = tl.max(ranks) + 1
    while low + spacing < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        if tl.sum((ranks >= middle).to(tl.int32)) >= wanted:
            low = middle
        else:
            high = middle
    return tl.min(tl.where(ranks >= low, ranks, high))  # ranks from `low` up to `high` are equal


@step
def _first_of(ranks, edge, wanted):
    """Return which ranks are the `wanted` largest, and their places among these; `edge` is the smallest of them.

    Of ranks equal to `edge` the first ones are taken.
    """
    above = ranks > edge
    equal = (ranks == edge) & (ranks > _LEAST)
    missing = wanted - tl.sum(above.to(tl.int32))
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= missing))
    return taken, tl.cumsum(taken.to(tl.int32)) - 1


@step
def _exponential_sum(x):
    """Return the maximum of logits, and the sum of exp(logit - maximum): NaN if any of them is NaN or +inf."""
    is_finite = x < float("inf")
    below = tl.where(is_finite, x, -float("inf"))
    top = tl.max(below)
    total = tl.sum(tl.exp(below - tl.where(top > -float("inf"), top, 0.0)))
    is_broken = tl.sum((is_finite == 0).to(tl.int32)) > 0
    return top, tl.where(is_broken, float("nan"), total)


@step
def _summarise(
    logits, pitch, vocab, temperatures, keys, noisy, ban_sets, allowed, words, maxima, blocks, sums, tiles,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BANS: tl.constexpr, BANS_IN_NORMS: tl.constexpr,
):  # fmt: skip
    """Write the largest rank of each block of a tile of a row to `maxima`, [rows, blocks], and the tile's sums to `sums`.

    The sums, [rows, tiles, 4], are maximum and sum of exponentials (see `_exponential_sum`), at temperature 1 and at the
    row's temperature.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)
    raw, x = _allowed_logits(logits, pitch, row, token, vocab, ban_sets, allowed, words, BANS)
    ranks = _ranks(x, token, row, vocab, temperatures, keys, noisy)
    block = tile * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    highest = tl.max(tl.reshape(ranks, [TILE // BLOCK, BLOCK]), 1)
    tl.store(maxima + row * blocks + block, highest, mask=block < blocks)
    if BANS_IN_NORMS:
        raw = x
    top, total = _exponential_sum(raw)
    goal = sums + (row * tiles + tile) * 4
    tl.store(goal, top)
    tl.store(goal + 1, total)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature != 1.0:
        top, total = _exponential_sum(raw / temperature)
    tl.store(goal + 2, top)
    tl.store(goal + 3, total)


@step
def _norm_of(sums, tile, tiles):
    """Return the logsumexp of a row of which each tile has a maximum and a sum of exponentials."""
    inside = tile < tiles
    tops = tl.load(sums + tile * 4, mask=inside, other=-float("inf"))
    totals = tl.load(sums + tile * 4 + 1, mask=inside, other=0.0)
    top = tl.max(tops)
    safe = tl.where(top > -float("inf"), top, 0.0)
    total = tl.sum(totals * tl.exp(tops - safe)).to(tl.float64)
    norm = tl.log(tl.where(total > 0.0, total, 1.0)) + safe.to(tl.float64)
    norm = tl.where(top > -float("inf"), norm, -float("inf"))
    return tl.where(total == total, norm, float("nan"))


@step
def _choose_blocks(
    maxima, blocks, sums, tiles, noisy, chosen, edges, doubles, double_pitch, count,
    LISTED: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the blocks of a row that contain its best tokens to `chosen`, [rows, LISTED], in ascending order.

    Places without a block get the number of blocks. The two numbers of the row in `edges`, [rows, 2], are a lower bound of
    the rank of its last listed token, and the largest rank in other blocks. Also writes the row's norms.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    ranks = tl.load(maxima + row * blocks + block, mask=block < blocks, other=_LEAST)
    wanted = tl.minimum(count, blocks)
    is_noisy = tl.load(noisy + row)
    edge = _rank_of(ranks, tl.min(tl.where(block < blocks, ranks, tl.max(ranks))), wanted, is_noisy)
    taken, place = _first_of(ranks, edge, wanted)
    tl.store(chosen + row * LISTED + place, block, mask=taken)
    listed = tl.arange(0, LISTED)
    tl.store(chosen + row * LISTED + listed, listed * 0 + blocks, mask=listed >= wanted)
    # Order values with noise may differ in their last bits between kernels.
    lower = tl.where(is_noisy != 0, edge - _ULPS, edge)
    tl.store(edges + row * 2, tl.where(count <= blocks, lower, _LEAST))
    tl.store(edges + row * 2 + 1, tl.max(tl.where(taken, _LEAST, ranks)))
    tile = tl.arange(0, TILES)
    tl.store(doubles + row * double_pitch, _norm_of(sums + row * tiles * 4, tile, tiles))
    tl.store(doubles + row * double_pitch + 1, _norm_of(sums + row * tiles * 4 + 2, tile, tiles))


@step
def _list_tokens(
    logits, pitch, vocab, temperatures, keys, noisy, ban_sets, allowed, words, chosen, edges, tokens, found, out_pitch,
    doubles, double_pitch, count, LISTED: tl.constexpr, BLOCK: tl.constexpr, BANS: tl.constexpr,
):  # fmt: skip
    """Write the best tokens of a row, which are in its chosen blocks, to `tokens`, their logits to `found`, and `rest`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, LISTED * BLOCK)
    token = tl.load(chosen + row * LISTED + at // BLOCK) * BLOCK + at % BLOCK
    _, x = _allowed_logits(logits, pitch, row, token, vocab, ban_sets, allowed, words, BANS)
    ranks = _ranks(x, token, row, vocab, temperatures, keys, noisy)
    wanted = tl.minimum(count, vocab)
    is_noisy = tl.load(noisy + row)
    edge = _rank_of(ranks, tl.load(edges + row * 2), wanted, is_noisy)
    taken, place = _first_of(ranks, edge, wanted)
    tl.store(tokens + row * out_pitch + place, token, mask=taken)
    tl.store(found + row * out_pitch + place, x, mask=taken)
    listed = tl.arange(0, LISTED)
    is_empty = (listed >= wanted) & (listed < count)
    tl.store(tokens + row * out_pitch + listed, listed * 0 + _NO_TOKEN, mask=is_empty)
    tl.store(found + row * out_pitch + listed, listed * 0.0 - float("inf"), mask=is_empty)
    rest = _value_of(tl.maximum(tl.max(tl.where(taken, _LEAST, ranks)), tl.load(edges + row * 2 + 1)))
    is_bound = (is_noisy != 0) & (rest > -float("inf"))
    size = tl.maximum(tl.abs(tl.where(is_bound, rest, 0.0)), 1.0)
    slack = tl.where(is_bound, size * tl.full([], _SLACK, tl.float64), 0.0)
    tl.store(doubles + row * double_pitch + 2, rest + slack)


class RowRanker:
    """Ranks rows of logits on a GPU; all buffers are allocated once.

    Args:
        rows: maximum number of rows.
        count: number of tokens that are listed of each row, up to `MOST_LISTED`.
        ban_sets: maximum number of sets of allowed tokens. Without any, bans cost nothing.
        bans_in_norms: whether banned tokens are left out of norms. They are never listed before allowed ones.

    Attributes:
        settings: how each row is ranked; the caller writes them.
        found: the result, which `rank` writes.
    """

    def __init__(
        self,
        rows: int,
        vocab: int,
        count: int,
        device: torch.device,
        ban_sets: int = 0,
        bans_in_norms: bool = False,
    ) -> None:
        if not 0 < count <= MOST_LISTED:
            raise ValueError(f"a row lists 1 to {MOST_LISTED} tokens, and {count} are wanted")
        self.vocab = vocab
        self.count = count
        self.bans_in_norms = bans_in_norms
        self.settings = plain_settings(rows, vocab, device, ban_sets)
        self.found = room_for_ranked(rows, count, device)
        self._listed = triton.next_power_of_2(count)
        self._block = _WIDE if self._listed <= _WIDE_LISTS else _NARROW
        self._blocks = -(-vocab // self._block)
        self._tiles = -(-vocab // _TILE)
        self._maxima = torch.zeros(rows, self._blocks, dtype=torch.int64, device=device)
        self._sums = torch.zeros(rows, self._tiles, 4, device=device)
        self._chosen = torch.zeros(rows, self._listed, dtype=torch.int32, device=device)
        self._edges = torch.zeros(rows, 2, dtype=torch.int64, device=device)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of the result."""
        return 4 * self.found.buffer.shape[1]

    def rank(self, logits: Float[Tensor, "rows vocab"]) -> RankedRows:
        """Rank rows of logits by the settings of the first rows; return the first rows of `found`."""
        rows = len(logits)
        found = self.found
        settings = self.settings
        words = settings.allowed.shape[1]
        has_bans = len(settings.allowed) > 0
        doubles = found.buffer.view(torch.float64)
        pitch = logits.stride(0)
        out_pitch = found.buffer.shape[1]
        _summarise[(self._tiles, rows)](
            logits, pitch, self.vocab, *settings, words, self._maxima, self._blocks, self._sums, self._tiles,
            _TILE, self._block, has_bans, self.bans_in_norms, num_warps=8,
        )  # fmt: skip
        most_blocks = triton.next_power_of_2(self._blocks)
        _choose_blocks[(rows,)](
            self._maxima, self._blocks, self._sums, self._tiles, settings.noisy, self._chosen, self._edges, doubles,
            doubles.shape[1], self.count, self._listed, most_blocks, triton.next_power_of_2(self._tiles),
            num_warps=_warps_for(most_blocks),
        )  # fmt: skip
        _list_tokens[(rows,)](
            logits, pitch, self.vocab, *settings, words, self._chosen, self._edges, found.tokens, found.logits, out_pitch,
            doubles, doubles.shape[1], self.count, self._listed, self._block, has_bans,
            num_warps=_warps_for(self._listed * self._block),
        )  # fmt: skip
        return found.first(rows)


def _warps_for(numbers: int) -> int:
    """Return the number of warps of a program that holds this many numbers."""
    return min(16, max(4, numbers // 512))
