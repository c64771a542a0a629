"""Ranked rows by torch operations, for engines without Triton: the best tokens of each row of logits, in place of the row.

The order value of a token is its logit, or, in noisy rows, logit / temperature + noise, where the noise is
`core.noise.gumbel` of the row's key and the token. Hashes are computed in integers, so they have the bits of `core.noise`;
logarithms are computed in float64, and may differ in their last bits. Order values are compared in float64, and tokens of
equal value are in ascending order. NaN ranks as -inf.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int32, Int64, UInt8
from torch import Tensor

NO_TOKEN = 2**31 - 1  # fills lists of more tokens than the vocabulary has
NO_BANS = -1
SLACK = 1e-9  # added to `rest` of noisy rows, relative to numbers above 1; far above the rounding of float64 logarithms

_MASK = 2**32 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB
_ODD = 0x9E3779B1
_ROUND_1 = 0x21F0AAAD
_ROUND_2 = 0xD35A2D97
_ROUND_3 = 0x85EBCA6B


class RankedRows(NamedTuple):
    """The best tokens of each row of logits. All fields are views of one buffer, in which a row is one piece.

    `buffer[:n]` holds the first n rows, so one copy transfers them.
    """

    buffer: Int32[Tensor, "rows words"]
    tokens: Int32[Tensor, "rows count"]  # ascending; after the last token of the vocabulary: NO_TOKEN
    logits: Float32[Tensor, "rows count"]  # of these tokens, after bans
    norm: Float64[Tensor, " rows"]  # logsumexp of the row; NaN if it has NaN or +inf, -inf if all tokens have -inf
    warm: Float64[Tensor, " rows"]  # the same for logits / temperature
    # The largest order value of the tokens that are not listed, in noisy rows an upper bound of it; -inf if all are listed.
    rest: Float64[Tensor, " rows"]

    def first(self, rows: int) -> "RankedRows":
        """Return the first rows."""
        return RankedRows(*(part[:rows] for part in self))


def room_for_ranked(rows: int, count: int, device: torch.device, pinned: bool = False) -> RankedRows:
    """Return buffers for the ranked rows of `count` tokens.

    Args:
        pinned: whether they are in pinned memory, on the host.
    """
    words = torch.zeros(rows, 6 + 2 * count, dtype=torch.int32, device=device, pin_memory=pinned)
    doubles = words.view(torch.float64)
    return RankedRows(
        buffer=words,
        tokens=words[:, 6 : 6 + count],
        logits=words.view(torch.float32)[:, 6 + count :],
        norm=doubles[:, 0],
        warm=doubles[:, 1],
        rest=doubles[:, 2],
    )


def on_host(rows: RankedRows) -> RankedRows:
    """Return a copy of ranked rows on the host, by one transfer."""
    count, listed = rows.tokens.shape
    room = room_for_ranked(count, listed, torch.device("cpu"))
    room.buffer.copy_(rows.buffer)
    return room


class RowSettings(NamedTuple):
    """The settings by which rows are ranked, on the device."""

    temperatures: Float64[Tensor, " room"]  # above 0
    keys: Int64[Tensor, " room"]  # the bits of the uint64 key of each row's path
    noisy: UInt8[Tensor, " room"]  # 1: order values have noise; 0: they are logits
    ban_sets: Int32[Tensor, " room"]  # the row of `allowed` with the row's bans; NO_BANS: none
    allowed: Int32[Tensor, "sets words"]  # bit t % 32 of word t // 32 is 1 if token t is allowed


def plain_settings(rows: int, vocab: int, device: torch.device, ban_sets: int = 0) -> RowSettings:
    """Return settings of rows at temperature 1 without noise and bans.

    Args:
        ban_sets: number of sets of allowed tokens for which there is room. Without any, kernels read no bans.
    """
    return RowSettings(
        temperatures=torch.ones(rows, dtype=torch.float64, device=device),
        keys=torch.zeros(rows, dtype=torch.int64, device=device),
        noisy=torch.zeros(rows, dtype=torch.uint8, device=device),
        ban_sets=torch.full((rows,), NO_BANS, dtype=torch.int32, device=device),
        allowed=torch.full((ban_sets, -(-vocab // 32)), -1, dtype=torch.int32, device=device),
    )


def _as_signed(number: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: Int64[Tensor, "..."], bits: int) -> Int64[Tensor, "..."]:
    """Return numbers shifted right as if they were uint64."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def scrambled_bits(x: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
    """Return `core.noise.scramble` of uint64 numbers, whose bits `x` and the result have."""
    x = (x ^ _shifted(x, 30)) * _as_signed(_FACTOR_1)
    x = (x ^ _shifted(x, 27)) * _as_signed(_FACTOR_2)
    return x ^ _shifted(x, 31)


def leading_bits(key: Int64[Tensor, "*keys"], tokens: Int64[Tensor, " n"]) -> Int64[Tensor, "..."]:
    """Return `core.noise.leading_bits` of a key and tokens; keys of shape [rows, 1] give [rows, n]."""
    low = key & _MASK
    high = _shifted(key, 32)
    x = (low + (tokens + 1) * _ODD) & _MASK
    x = ((x ^ (x >> 16)) * _ROUND_1) & _MASK
    x = ((x ^ (x >> 15)) + high) & _MASK
    x = (x * _ROUND_2) & _MASK
    x = ((x ^ (x >> 15)) * _ROUND_3) & _MASK
    return x ^ (x >> 16)


def trailing_bits(key: Int64[Tensor, "*keys"], tokens: Int64[Tensor, " n"]) -> Int64[Tensor, "..."]:
    """Return the lower half of the 64 bits of `core.noise.gumbel`."""
    return _shifted(scrambled_bits(key + (tokens + 1) * _as_signed(_GOLDEN)), 32)


def gumbel_noise(key: Int64[Tensor, "*keys"], tokens: Int64[Tensor, " n"]) -> Float64[Tensor, "..."]:
    """Return `core.noise.gumbel` of a key and tokens, up to the last bits of logarithms."""
    trailing = trailing_bits(key, tokens)
    leading = leading_bits(key, tokens)
    uniform = (leading.double() + (trailing.double() + 0.5) * 2.0**-32) * 2.0**-32
    return -(-(-uniform.clamp(max=1 - 2.0**-53)).log1p()).log()


def ranked_by_topk(
    logits: Float[Tensor, "rows vocab"], settings: RowSettings, count: int, bans_in_norms: bool = False
) -> RankedRows:
    """Return rows of logits as ranked rows of `count` tokens.

    The result is on the device of the settings: the CPU for logits on devices without float64, such as Apple's GPUs.

    Args:
        bans_in_norms: whether banned tokens are left out of norms. They are never listed before allowed ones.
    """
    device = settings.temperatures.device
    rows, vocab = logits.shape
    temperatures, keys, noisy, ban_sets, allowed = settings
    raw = logits.to(device, torch.float32)
    x = raw
    if len(allowed):
        x = raw.masked_fill(~_is_allowed(ban_sets[:rows], allowed, vocab), -torch.inf)
    found = room_for_ranked(rows, count, device)
    normed = x if bans_in_norms else raw
    found.norm.copy_(_log_norms(normed))
    warms = bool((temperatures[:rows] != 1).any())
    found.warm.copy_(_log_norms(normed / temperatures[:rows, None].float()) if warms else found.norm)
    listed = min(count, vocab)
    ordered = x.masked_fill(x.isnan(), -torch.inf) if bool(found.norm.isnan().any()) else x
    tokens, rest = _best_of(ordered, listed)
    found.rest.copy_(rest)
    with_noise = noisy[:rows].nonzero().flatten()
    if len(with_noise):
        noise = gumbel_noise(keys[with_noise, None], torch.arange(vocab, device=device))
        tokens[with_noise], rest = _best_of(
            ordered[with_noise].double() / temperatures[with_noise, None] + noise, listed
        )
        found.rest[with_noise] = torch.where(rest > -torch.inf, rest + SLACK * rest.abs().clamp(min=1), rest)
    found.tokens.fill_(NO_TOKEN)
    found.logits.fill_(-torch.inf)
    found.tokens[:, :listed].copy_(tokens)
    found.logits[:, :listed].copy_(x.gather(1, tokens))
    return found


def _best_of(
    order: Float[Tensor, "rows vocab"], count: int
) -> tuple[Int64[Tensor, "rows count"], Float[Tensor, " rows"]]:
    """Return the `count` tokens of largest order value, ascending, and the largest value of the others."""
    rows, vocab = order.shape
    if count == vocab:
        every = torch.arange(vocab, device=order.device).repeat(rows, 1)
        return every, order.new_full((rows,), -torch.inf)
    values, tokens = order.topk(count + 1, 1)
    tokens = tokens[:, :count].sort(1).values
    edges = values[:, count - 1]
    rest = values[:, count]
    for row in (edges == rest).nonzero().flatten().tolist():  # topk takes any of several equal values
        above = order[row] > edges[row]
        equal = order[row] == edges[row]
        missing = count - above.sum()
        tokens[row] = (above | (equal & (equal.cumsum(0) <= missing))).nonzero().flatten()
    return tokens, rest


def _is_allowed(
    ban_sets: Int32[Tensor, " rows"], allowed: Int32[Tensor, "sets words"], vocab: int
) -> Bool[Tensor, "rows vocab"]:
    """Return which tokens are allowed in each row, bool[rows, vocab]."""
    places = torch.arange(32, device=allowed.device, dtype=torch.int32)
    bits = ((allowed[:, :, None] >> places) & 1).flatten(1)[:, :vocab].bool()
    return bits[ban_sets.clamp(min=0).long()] | (ban_sets < 0)[:, None]


def _log_norms(x: Float32[Tensor, "rows vocab"]) -> Float64[Tensor, " rows"]:
    """Return the logsumexp of each row; NaN if it has NaN or +inf, -inf if all of it is -inf."""
    tops = x.amax(1)  # NaN if any number is NaN
    safe = tops.masked_fill(tops == -torch.inf, 0.0)
    totals = (x - safe[:, None]).exp_().sum(1)
    norms = totals.double().log() + safe.double()
    return norms.masked_fill(tops == torch.inf, torch.nan)
