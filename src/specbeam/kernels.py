"""The passes over the vocabulary as compiled loops, where numba is installed: the fast twins of what stands in `laws` and
`dice`, which stay as their oracles. Each takes one pass where array code takes ten.

Pairs are beam * vocabulary + token, as in `laws`.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import numba
except ImportError:  # pip install 'specbeam[fast]'
    numba = None

AVAILABLE = numba is not None and os.environ.get("SPECBEAM_KERNELS") != "off"
Array = Any  # numba finds the types by itself


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled at the first call and kept on disk. `unwrap`: tests wrap functions into type checks."""
    if not AVAILABLE:
        return function
    return numba.njit(cache=True, error_model="numpy", boundscheck=False, **options)(inspect.unwrap(function))


def compiled_in_any_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sums may be reordered, so that they become vector instructions; NaN stays NaN."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract"})


def _compiled_loosely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sums may be reordered, so that they become vector instructions; NaN must not come in."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract", "nnan"})


def start_threads() -> int:
    """Most threads that compiled loops may use. To be called before any loop that may be spread: what spreads it is looked
    up when the loop is read from disk.
    """
    numba.get_num_threads()
    return int(numba.config.NUMBA_NUM_THREADS)


def use_threads(count: int) -> None:
    """At most `start_threads()`, for loops that are compiled for several."""
    numba.set_num_threads(count)


_ODD, _ROUND_1, _ROUND_2, _ROUND_3 = (np.uint32(n) for n in (0x9E3779B1, 0x21F0AAAD, 0xD35A2D97, 0x85EBCA6B))
_S15, _S16, _ONE = np.uint32(15), np.uint32(16), np.uint32(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_L1, _L27, _L30, _L31, _L32 = (np.uint64(n) for n in (1, 27, 30, 31, 32))
_LN2 = np.float32(0.6931472)
_PER_OCTAVE = np.float32(_LN2 / 2**23)  # the bits of a float32, read as a number, grow by 2^23 per doubling
_TOP = np.float32((31 + 127) * _LN2 + 1e-5)


@compiled
def _mixed(key: Array, token: Array) -> Array:
    """`dice._mixed` of one place."""
    u32 = np.uint32  # numba widens every sum and product to 64 bits
    x = u32(u32(key) + u32(u32(u32(token) + _ONE) * _ODD))
    x = u32(u32(x ^ u32(x >> _S16)) * _ROUND_1)
    x = u32(u32(x ^ u32(x >> _S15)) + u32(key >> _L32))
    x = u32(x * _ROUND_2)
    x = u32(u32(x ^ u32(x >> _S15)) * _ROUND_3)
    return u32(x ^ u32(x >> _S16))


@compiled
def _gumbel(key: Array, token: Array) -> Array:
    """`dice.gumbel_at` of one place."""
    x = key + (np.uint64(token) + _L1) * _GOLDEN
    x = (x ^ (x >> _L30)) * _FACTOR_1
    x = (x ^ (x >> _L27)) * _FACTOR_2
    trailing = (x ^ (x >> _L31)) >> _L32
    uniform = (np.float64(_mixed(key, token)) + (np.float64(trailing) + 0.5) * 2.0**-32) * 2.0**-32
    return -np.log(-np.log1p(-min(uniform, 1 - 2.0**-53)))


@compiled
def child_keys(keys: Array, tokens: Array) -> Array:
    """`dice.child_keys`."""
    out = np.empty_like(keys)
    for place in range(len(keys)):
        x = keys[place] ^ _GOLDEN
        x = (x ^ (x >> _L30)) * _FACTOR_1
        x = (x ^ (x >> _L27)) * _FACTOR_2
        x = (x ^ (x >> _L31)) + np.uint64(tokens[place])
        x = (x ^ (x >> _L30)) * _FACTOR_1
        x = (x ^ (x >> _L27)) * _FACTOR_2
        out[place] = x ^ (x >> _L31)
    return out


@compiled
def _put(values: Array, pairs: Array, held: int, value: float, pair: int) -> int:
    """Into a list that is sorted by value, descending, then pair; gives how many it holds."""
    place = held
    if held == len(values):
        place -= 1
        if value < values[place] or (value == values[place] and pair > pairs[place]):
            return held
    else:
        held += 1
    while place > 0 and (values[place - 1] < value or (values[place - 1] == value and pairs[place - 1] > pair)):
        values[place], pairs[place] = values[place - 1], pairs[place - 1]
        place -= 1
    values[place], pairs[place] = value, pair
    return held


@compiled
def _noise_bounds(key: Array, bound: Array) -> None:
    """Not below the noise of each token: noise <= -log(u) where u begins with the bits of `_mixed`, and log2 of a float32
    is at least its bits, read as a number.
    """
    u32, bits = np.uint32, bound.view(np.int32)
    low, high = u32(key), u32(key >> _L32)
    for token in range(len(bound)):  # `_mixed`, written out: loops over plain arithmetic become vector instructions
        x = u32(low + u32(u32(u32(token) + _ONE) * _ODD))
        x = u32(u32(x ^ u32(x >> _S16)) * _ROUND_1)
        x = u32(u32(x ^ u32(x >> _S15)) + high)
        x = u32(x * _ROUND_2)
        x = u32(u32(x ^ u32(x >> _S15)) * _ROUND_3)
        x = u32(x ^ u32(x >> _S16))
        bound[token] = np.float32(np.int32(x >> _ONE))
    for token in range(len(bound)):
        bound[token] = _TOP - np.float32(bits[token]) * _PER_OCTAVE


_BLOCK = 64  # values that are looked at together


@compiled
def _in_blocks(size: int) -> Array:
    """Room for float32[size], of whole blocks; -inf behind what is used."""
    return np.full((size + _BLOCK - 1) // _BLOCK * _BLOCK, np.float32(-np.inf))


@compiled
def _reached(block: Array, edge: float) -> Any:
    """Whether a value of the block is at least `edge`; looking at all of them becomes vector instructions."""
    some = np.uint8(0)
    for place in range(_BLOCK):
        some |= np.uint8(block[place] >= edge)
    return some > 0


@_compiled_loosely
def _sum(block: Array) -> Array:
    """The sum of a block."""
    some = 0.0
    for place in range(_BLOCK):
        some += block[place]
    return some


@compiled
def pick(law: Array, uniform: float) -> int:
    """`Dice.pick` of a long law: blocks are summed, and tokens only in the one that is hit."""
    blocks = (len(law) + _BLOCK - 1) // _BLOCK
    sums = np.zeros(blocks)
    for number in range(len(law) // _BLOCK):
        sums[number] = _sum(law[number * _BLOCK : (number + 1) * _BLOCK])
    for place in range(len(law) // _BLOCK * _BLOCK, len(law)):
        sums[blocks - 1] += law[place]
    left, number = uniform * sums.sum(), 0
    while number < blocks - 1 and left >= sums[number]:
        left -= sums[number]
        number += 1
    last = -1
    for place in range(number * _BLOCK, min((number + 1) * _BLOCK, len(law))):
        if law[place] > 0:
            last = place
            left -= law[place]
            if left < 0:
                break
    place = len(law)
    while last < 0:  # the product was rounded up, and the last block holds nothing
        place -= 1
        last = place if law[place] > 0 else -1
    return last


@compiled
def best(
    logits: Array, shift: Array, temperature: float, log_counts: Array, keys: Array, among: Array, count: int
) -> Array:
    """`JointLaw.best` without truncation: the pairs of largest (logit + shift) / temperature + log count + noise.

    Args:
        keys: of the beams' noise; empty for none.
        among: beams that count.
    """
    beams, vocab = logits.shape
    values, pairs = np.full(count, -np.inf), np.full(count, -1, dtype=np.int64)
    bound, upper = np.zeros(vocab, dtype=np.float32), _in_blocks(vocab)
    offset = shift.max() / temperature  # so that bounds are small numbers, which float32 holds finely
    noisy, held = len(keys) > 0, 0
    edge = np.float32(-np.inf)
    for beam in range(beams):
        if not among[beam]:
            continue
        row, base, extra = logits[beam], shift[beam], log_counts[beam]
        key = keys[beam] if noisy else np.uint64(0)
        if noisy:
            _noise_bounds(key, bound)
        slack = 1e-3 + 4e-7 * (abs(base / temperature) + abs(offset))
        scale, add = np.float32(1 / temperature), np.float32(base / temperature + extra - offset + slack)
        for token in range(vocab):
            upper[token] = np.float32(row[token]) * scale + bound[token] + add
        for start in range(0, len(upper), _BLOCK):
            if not _reached(upper[start : start + _BLOCK], edge):
                continue
            for token in range(start, min(start + _BLOCK, vocab)):
                if upper[token] >= edge and row[token] > -np.inf:
                    value = (row[token] + base) / temperature + extra
                    if noisy:
                        value += _gumbel(key, token)
                    held = _put(values, pairs, held, value, beam * vocab + token)
                    if held == count:
                        edge = np.float32(values[count - 1] - offset)
    return pairs[:held]


@compiled
def ranked(
    pairs: Array, logits: Array, shift: Array, temperature: float, log_counts: Array, keys: Array, count: int
) -> Array:
    """`best` among the given pairs."""
    vocab = logits.shape[1]
    values, chosen = np.full(count, -np.inf), np.full(count, -1, dtype=np.int64)
    held = 0
    for pair in pairs:
        beam, token = pair // vocab, pair % vocab
        value = (logits[beam, token] + shift[beam]) / temperature + log_counts[beam]
        if len(keys):
            value += _gumbel(keys[beam], token)
        held = _put(values, chosen, held, value, pair)
    return chosen[:held]


@compiled
def largest(x: Array, shift: Array, count: int) -> Array:
    """The pairs of the `count` largest x + shift, best first, without those of -inf; and all that equal the last."""
    beams, vocab = x.shape
    values, pairs = np.full(count, -np.inf), np.full(count, -1, dtype=np.int64)
    if count == 0:
        return pairs
    held, edge = 0, x.dtype.type(-np.inf)
    for beam in range(beams):
        row, base = x[beam], shift[beam]
        for token in range(vocab):
            value = row[token] + base
            if value > edge:
                held = _put(values, pairs, held, value, beam * vocab + token)
                if held == count:
                    edge = x.dtype.type(values[count - 1])
    if held < count:
        return pairs[:held]
    equals = 0
    for beam in range(beams):
        for token in range(vocab):
            equals += x[beam, token] + shift[beam] == edge
    better = np.searchsorted(-values, -edge)
    every = np.empty(better + equals, dtype=np.int64)
    every[:better] = pairs[:better]
    if better + equals == count:
        every[better:] = pairs[better:]
        return every
    place = better
    for beam in range(beams):
        for token in range(vocab):
            if x[beam, token] + shift[beam] == edge:
                every[place] = beam * vocab + token
                place += 1
    return every


@compiled
def head(values: Array, log_total: float, top_p: float, min_p: float, least: int) -> int:
    """How many of `values`, log-odds that descend, top-p and min-p keep (see `Truncation`); -1 if more have to be known.

    `log_total`: their logsumexp with those that follow; NaN if none do.
    """
    kept = len(values)
    if top_p < 1 and kept:
        whole = log_total
        if np.isnan(whole):
            whole = values[0] + np.log(np.exp(values - values[0]).sum())
        mass, needed = 0.0, 0
        while needed < kept and mass < top_p:
            mass += np.exp(values[needed] - whole)
            needed += 1
        if mass < top_p and not np.isnan(log_total):
            return -1
        kept = min(max(needed, least), kept)
    if min_p > 0 and kept:
        edge = min(values[0] + np.log(min_p), values[min(least, kept) - 1])
        while values[kept - 1] < edge:
            kept -= 1
    return kept


@compiled
def first_ones(
    logits: Array, shift: Array, offset: float, temperature: float, top_k: int, top_p: float, min_p: float, least: int,
    log_total: float, looked: int,
) -> tuple[Array, bool]:  # fmt: skip
    """The support of a joint law, (logit + shift) / temperature truncated, best first; and whether the `looked` best ones
    tell it.

    Args:
        offset: the largest score, taken out so that float32 holds what is compared finely.
        log_total: of all warped log-odds less the offset; NaN where a top-k cuts first.
    """
    near = np.empty(len(shift), dtype=logits.dtype)
    for beam in range(len(shift)):
        near[beam] = shift[beam] - offset
    pairs, vocab = largest(logits, near, looked), logits.shape[1]
    values = np.empty(len(pairs))
    for place in range(len(pairs)):
        beam = pairs[place] // vocab
        values[place] = (logits[beam, pairs[place] % vocab] + shift[beam] - offset) / temperature
    found = head(values, log_total, top_p, min_p, least)
    return pairs[: max(found, 0)], found >= 0


@compiled
def shifts(scores: Array, log_norm: Array) -> Array:
    """What log-likelihoods are above logits. A beam from which everything is banned has logits of -inf, and needs none."""
    shift = np.empty(len(scores))
    for beam in range(len(scores)):
        shift[beam] = scores[beam] - (log_norm[beam] if log_norm[beam] > -np.inf else 0.0)
    return shift


@compiled
def core_and_halo(
    logits: Array, scores: Array, log_norm: Array, log_counts: Array, keys: Array, among: Array, temperature: float,
    top_k: int, top_p: float, min_p: float, least: int, log_total: float, looked: int, count: int, width: int,
) -> tuple[Array, int, Array]:  # fmt: skip
    """`JointLaw.core_and_halo`: the pairs, how many of them are core, and their log-likelihoods; -1 of core where the best
    `looked` ones do not tell the support.

    Args:
        looked: 0: nothing is cut. log_total: see `first_ones`.
    """
    shift, every = shifts(scores, log_norm), np.ones(len(among), dtype=np.bool_)
    vocab, some, most = logits.shape[1], not among.all(), logits.size
    if looked > 0:
        by = (temperature, top_k, top_p, min_p, least)
        support, known = first_ones(logits, shift, scores.max(), *by, log_total, looked)
        if not known:
            return support, -1, shift
        if some:
            support = support[among[support // vocab]]
        core = ranked(support, logits, shift, temperature, log_counts, keys, count)
        halo = core[:0]
        if width > len(core):
            halo = best(logits, shift, temperature, log_counts, keys[:0], every, min(width, most))
    else:
        halo = best(logits, shift, temperature, log_counts, keys, every, min(max(width, count), most))
        core = halo[among[halo // vocab]][:count]
        if len(core) < count and some:  # the others are further down
            core = best(logits, shift, temperature, log_counts, keys, among, min(count, most))
    pairs, held = np.empty(max(width, len(core)), dtype=np.int64), len(core)
    pairs[:held] = core
    for pair in halo:
        if held < width and not (core == pair).any():
            pairs[held] = pair
            held += 1
    logj = np.empty(held)
    for place in range(held):
        beam = pairs[place] // vocab
        logj[place] = logits[beam, pairs[place] % vocab] + shift[beam]
    return pairs[:held], len(core), logj


@compiled
def kept(row: Array, temperature: float, top_k: int, top_p: float, min_p: float, least: int, most: int) -> Array:
    """`truncation.Truncation.support` of a row of float32 logits: its tokens, best first; [-1] if the `most` best ones do
    not tell. There is a `top_k` or a `top_p`.
    """
    rows, nothing = row.reshape(1, len(row)), np.zeros(1, dtype=np.float32)
    looked, total = max(top_k, least), np.nan
    if top_k == 0:
        looked, total = max(_BLOCK, least), log_norm(rows / np.float32(temperature))[0]
    while looked <= most:
        tokens = largest(rows, nothing, looked)
        values = np.empty(len(tokens))
        for place in range(len(tokens)):
            values[place] = row[tokens[place]] / temperature
        found = head(values, np.nan if looked >= len(row) else total, top_p, min_p, least)
        if found >= 0:
            return tokens[:found]
        looked *= 4
    return np.full(1, -1, dtype=np.int64)


@compiled
def truncated(
    logits: Array, temperature: float, top_k: int, top_p: float, min_p: float, least: int, most: int
) -> tuple[Array, Array, Array]:
    """The laws that `kept` leaves of float32 rows: their tokens, ascending, and log-odds, one row behind the other; and how
    many each row has: 0 where all is banned, -1 where `kept` does not tell, -2 where there is NaN or +inf.
    """
    rows = len(logits)
    tokens, logp = np.empty(rows * most, dtype=np.int64), np.empty(rows * most)
    counts, start = np.empty(rows, dtype=np.int64), 0
    for number in range(rows):
        low, high = _extremes(logits[number].view(np.int32))
        if low < _MINUS_INF_RANK or high >= _INF_RANK:
            counts[number] = -2
            continue
        found = kept(logits[number], temperature, top_k, top_p, min_p, least, most)
        if len(found) > most or (len(found) == 1 and found[0] < 0):
            counts[number] = -1
            continue
        found.sort()
        counts[number], top, total = len(found), -np.inf, 0.0
        for place in range(len(found)):
            logp[start + place] = logits[number, found[place]] / temperature
            top = max(top, logp[start + place])
        for place in range(len(found)):
            total += np.exp(logp[start + place] - top)
        for place in range(len(found)):
            tokens[start + place] = found[place]
            logp[start + place] -= top + np.log(total)
        start += len(found)
    return tokens[:start], logp[:start], counts


_LOG2E, _LN2_HIGH = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720))
_F1, _HALF, _LEAST = np.float32(1), np.float32(0.5), np.float32(-126)
_SIGN, _MAGNITUDE, _BIAS, _FRACTION = np.int32(31), np.int32(0x7FFFFFFF), np.int32(127), np.int32(23)
_INF_RANK = int(np.float32(np.inf).view(np.int32))
_MINUS_INF_RANK = -_INF_RANK - 1


@_compiled_loosely
def _rank(bits: Array) -> Array:
    """Integers in the order of the float32 numbers with these bits, and its own inverse. NaN is outside -inf and +inf."""
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN) & _MAGNITUDE))


@_compiled_loosely
def _extremes(bits: Array) -> tuple[Array, Array]:
    """The least and the largest `_rank`: by their bits, for NaN must not come into arithmetic."""
    low = high = _rank(bits[0])
    for place in range(len(bits)):
        low, high = min(low, _rank(bits[place])), max(high, _rank(bits[place]))
    return low, high


@compiled_in_any_order
def exp_near_0(x: Array) -> Array:
    """exp(x), float32, to 2e-7 of it for |x| < 0.35: what is left of an exponent when its powers of two are taken out."""
    return _F1 + x * (_F1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))


@_compiled_loosely
def _exponentials(row: Array, top: float, part: Array, powers: Array) -> None:
    """exp(row - top) as part * 2^powers, the latter as the bits of a float32."""
    for token in range(len(row)):
        y = max((row[token] - top) * _LOG2E, _LEAST)
        whole = np.floor(y + _HALF)
        f = (y - whole) * _LN2_HIGH
        part[token] = exp_near_0(f)
        powers[token] = (np.int32(whole) + _BIAS) << _FRACTION


@_compiled_loosely
def _product(block: Array, other: Array) -> Array:
    """The inner product of two blocks."""
    some: Any = np.float32(0)
    for place in range(_BLOCK):
        some += block[place] * other[place]
    return some


@_compiled_loosely
def log_norm(logits: Array) -> Array:
    """`laws.log_norm` of float32 rows, with an exponential of its own that becomes vector instructions.

    NaN for rows that hold NaN or +inf.
    """
    rows, vocab = logits.shape
    out = np.empty(rows)
    part = np.zeros((vocab + _BLOCK - 1) // _BLOCK * _BLOCK, dtype=np.float32)  # whole blocks, zeros at the end
    powers = np.zeros(len(part), dtype=np.int32)
    scale = powers.view(np.float32)
    for number in range(rows):
        bits = logits[number].view(np.int32)
        low, high = _extremes(bits)
        if low < _MINUS_INF_RANK or high >= _INF_RANK:
            out[number] = np.nan
            continue
        if high == _MINUS_INF_RANK:
            out[number] = -np.inf
            continue
        powers[0] = _rank(high)
        top = scale[0]
        _exponentials(logits[number], top, part, powers)
        total = 0.0
        for start in range(0, len(part), _BLOCK):
            total += _product(part[start : start + _BLOCK], scale[start : start + _BLOCK])
        out[number] = top + np.log(total)
    return out
