"""What a turn costs where the target is spread over devices: a model of few numbers, and its fit to measured passes.

A pass reads all weights and the keys and values of its texts once, on each rank its share. Each layer costs the host some
time, and two sums over all ranks if there are several. Draft passes are not spread: they are paid whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbeam.errors import BadSetting

FIT_SIZES = 2  # sizes that a fit needs: it has two numbers for one rank, and two more for several


@dataclass(frozen=True)
class ModelSize:
    """What the cost of a pass depends on.

    Args:
        layers: number of layers.
        width: numbers per row between layers.
        weight_bytes: bytes of weights that a pass reads: the embeddings are not among them, the output matrix is.
        kv_bytes: bytes of keys and values of a stored token.
    """

    layers: int
    width: int
    weight_bytes: float
    kv_bytes: float = 0.0


@dataclass(frozen=True)
class PassPrices:
    """What the parts of a pass cost, for one number of rows, in seconds.

    Args:
        layer_s: host and launches, for each layer.
        byte_s: for each byte that a rank reads.
        reduce_s: a sum over all ranks; there are two of them in each layer.
        tell_s: telling the other ranks what is run, for each pass.
    """

    layer_s: float
    byte_s: float
    reduce_s: float = 0.0
    tell_s: float = 0.0

    def pass_s(self, size: ModelSize, ranks: int, stored: int = 0) -> float:
        """Return the seconds of a pass of a model that is spread over `ranks`, with `stored` tokens in the cache.

        >>> prices = PassPrices(layer_s=1e-3, byte_s=1e-9, reduce_s=1e-4, tell_s=1e-3)
        >>> size = ModelSize(layers=10, width=8, weight_bytes=4e6, kv_bytes=1e3)
        >>> [round(1e3 * prices.pass_s(size, ranks, stored=1000), 3) for ranks in (1, 2)]
        [15.0, 15.5]
        """
        read = (size.weight_bytes + stored * size.kv_bytes) * self.byte_s / ranks
        together = self.tell_s + 2 * size.layers * self.reduce_s if ranks > 1 else 0.0
        return size.layers * self.layer_s + read + together


@dataclass(frozen=True)
class PassSample:
    """A measured pass.

    Args:
        model: what it is called.
        rows: number of rows of the pass.
        stored: number of tokens in the cache.
        seconds: of the pass, the median of the rounds; `low` and `high` are the smallest and the largest.
    """

    model: str
    size: ModelSize
    ranks: int
    rows: int
    stored: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """What the prices fitted to all other models say of a pass.

    Attributes:
        error: predicted over measured seconds, less one.
    """

    sample: PassSample
    seconds: float

    @property
    def error(self) -> float:
        return self.seconds / self.sample.seconds - 1


def fitted_prices(samples: Sequence[PassSample]) -> PassPrices:
    """Fit prices to passes of one number of rows, by least squares of relative errors; no price is below zero.

    Those of one rank give `layer_s` and `byte_s`. Those of several then give `reduce_s` and `tell_s`; without any, both are
    zero.

    Raises `BadSetting` if there are passes of fewer than two models on one rank, or on several.
    """
    alone = [one for one in samples if one.ranks == 1]
    spread = [one for one in samples if one.ranks > 1]
    for part in (alone, spread):
        models = {one.model for one in part}
        if len(models) < FIT_SIZES and (part or part is alone):
            where = "one rank" if part is alone else "several ranks"
            raise BadSetting(
                f"passes of {len(models)} models on {where} are too few for a fit; measure {FIT_SIZES} models at least, "
                f"and {FIT_SIZES + 1} to predict each by the others"
            )
    layer_s, byte_s = _least_squares(
        [(one.size.layers, one.size.weight_bytes + one.stored * one.size.kv_bytes) for one in alone],
        [one.seconds for one in alone],
        [one.seconds for one in alone],
    )
    prices = PassPrices(layer_s, byte_s)
    if not spread:
        return prices
    tell_s, reduce_s = _least_squares(
        [(1.0, 2 * one.size.layers) for one in spread],
        [one.seconds - prices.pass_s(one.size, 1, one.stored) + _saved(prices, one) for one in spread],
        [one.seconds for one in spread],
    )
    return PassPrices(layer_s, byte_s, reduce_s, tell_s)


def _saved(prices: PassPrices, one: PassSample) -> float:
    """Return the seconds that a rank reads less than it would alone."""
    read = (one.size.weight_bytes + one.stored * one.size.kv_bytes) * prices.byte_s
    return read * (1 - 1 / one.ranks)


def _least_squares(
    parts: Sequence[tuple[float, float]], seconds: Sequence[float], scales: Sequence[float]
) -> tuple[float, float]:
    """Return the two prices of the parts that explain the seconds best, each deviation divided by its scale.

    If one of them would be below zero, it is zero, and the other one explains all.
    """
    columns = np.array(parts, dtype=float) / np.array(scales, dtype=float)[:, None]
    values = np.array(seconds, dtype=float) / np.array(scales, dtype=float)
    both = np.linalg.lstsq(columns, values, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    candidates = []
    for kept in (0, 1):
        price = max(float(columns[:, kept] @ values / (columns[:, kept] @ columns[:, kept])), 0.0)
        prices = np.zeros(2)
        prices[kept] = price
        candidates.append((float(((values - columns @ prices) ** 2).sum()), prices))
    best = min(candidates, key=lambda one: one[0])[1]
    return float(best[0]), float(best[1])


def held_out(samples: Sequence[PassSample]) -> list[Prediction]:
    """Predict each pass by the prices that are fitted to passes of as many rows of all other models."""
    found = []
    for sample in samples:
        others = [one for one in samples if one.model != sample.model and one.rows == sample.rows]
        prices = fitted_prices(others)
        found.append(Prediction(sample, prices.pass_s(sample.size, sample.ranks, sample.stored)))
    return found


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, and what decoding needs of them; what nobody has measured here is an assumption.

    Args:
        bytes_per_s: what a device reads of its memory in a second, as reached.
        link_bytes_per_s: what a device sends to others in a second.
        flops: operations of a device per second, as reached.
        reduce_s: seconds of a sum over all devices, however small.
        host_s: seconds of the host in each turn, and in each pass without drafts.
        word_bytes: of a weight and of a number between layers.
    """

    bytes_per_s: float = 0.7 * 3.35e12
    link_bytes_per_s: float = 450e9
    flops: float = 0.5 * 990e12
    reduce_s: float = 10e-6
    host_s: float = 2e-3
    word_bytes: int = 2


@dataclass(frozen=True)
class TurnPlan:
    """A turn of beams with drafts.

    Args:
        rows: nodes that the target scores.
        depth: draft passes.
        kept: layers of text that a turn adds.
        stored: tokens in the cache.
        requests: texts that are decoded side by side.
    """

    rows: int = 20
    depth: int = 4
    kept: float = 3.0
    stored: int = 2048
    requests: int = 1


@dataclass(frozen=True)
class TurnParts:
    """The parts of a turn, in seconds, of a target over `ranks` devices.

    Attributes:
        weights, cache: reading them.
        arithmetic: what multiplying takes beyond reading, which goes on meanwhile.
        sums: two in each layer.
        drafts: passes of the draft model, which is whole on one device.
        plain: a pass without drafts, one row for each beam.
        kept: layers of text that the turn adds.
    """

    ranks: int
    weights: float
    cache: float
    arithmetic: float
    sums: float
    drafts: float
    host: float
    plain: float
    kept: float
    requests: int

    @property
    def turn(self) -> float:
        return self.weights + self.cache + self.arithmetic + self.sums + self.drafts + self.host

    @property
    def speedup(self) -> float:
        """How much sooner a layer of text is there than without drafts."""
        return self.kept * self.plain / self.turn

    def layers_per_s(self, devices: int) -> float:
        """Return the layers of text per second of as many replicas as the devices hold."""
        return devices // self.ranks * self.requests * self.kept / self.turn


def turn_parts(
    target: ModelSize, draft: ModelSize, ranks: int, beams: int, plan: TurnPlan, cluster: Cluster
) -> TurnParts:
    """Return what a turn of beams costs with a target over `ranks` devices and a whole draft model on one of them."""
    weights, cache, arithmetic, sums = _target_pass(target, ranks, plan.rows * plan.requests, plan, cluster)
    plain = sum(_target_pass(target, ranks, beams * plan.requests, plan, cluster)) + cluster.host_s
    alone = _target_pass(draft, 1, beams * plan.requests, plan, cluster)
    drafts = plan.depth * sum(alone)
    return TurnParts(
        ranks, weights, cache, arithmetic, sums, drafts, cluster.host_s, plain, plan.kept, plan.requests
    )  # fmt: skip


def _target_pass(
    size: ModelSize, ranks: int, rows: int, plan: TurnPlan, cluster: Cluster
) -> tuple[float, float, float, float]:
    """Return the seconds of a pass: weights, cache, arithmetic beyond them, sums."""
    weights = size.weight_bytes / ranks / cluster.bytes_per_s
    cache = plan.requests * plan.stored * size.kv_bytes / ranks / cluster.bytes_per_s
    multiplying = 2 * rows * size.weight_bytes / cluster.word_bytes / ranks / cluster.flops
    sent = rows * size.width * cluster.word_bytes * 2 * (ranks - 1) / ranks
    sums = 2 * size.layers * (cluster.reduce_s + sent / cluster.link_bytes_per_s) if ranks > 1 else 0.0
    return weights, cache, max(multiplying - weights, 0.0), sums
