"""What a pass of a model costs on this machine: measured once, kept on disk, read by controllers."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specbeam import measured
from specbeam.control.cost import CostCurve
from specbeam.forest import Forest
from specbeam.lm.huggingface import HuggingFaceLM

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
QUICK = (1, 4, 8, 16, 32)  # what is measured when somebody needs a curve now
CONTEXT = 64  # tokens before the nodes


def curve_of(lm: HuggingFaceLM, context: int = CONTEXT) -> CostCurve:
    """The cost curve of a model: from disk, or measured quickly and kept. It stays the same as long as the model is loaded,
    or equal seeds could give unequal widths.
    """
    if context not in lm.curves:
        known = known_curve(lm, context)
        lm.curves[context] = measure(lm, QUICK, context, 5, 1.0) if known is None else known
    return lm.curves[context]


def known_curve(lm: HuggingFaceLM, context: int = CONTEXT) -> CostCurve | None:
    """The curve that was measured before; None if there is none."""
    record = measured.load("cost", _key(lm, context))
    return None if record is None else CostCurve(tuple(record["nodes"]), tuple(record["seconds"]))


def measure(
    lm: HuggingFaceLM,
    nodes: Sequence[int] = NODES,
    context: int = CONTEXT,
    repeats: int = 9,
    budget_s: float = 60.0,
) -> CostCurve:
    """Seconds of a pass by scored nodes, the best of interleaved repeats; kept on disk.

    Args:
        nodes: sizes, ascending.
        context: tokens in the cache.
        repeats: passes of each size.
        budget_s: seconds after which no further round begins.
    """
    samples: dict[int, list[float]] = {size: [] for size in nodes}
    prompt = [(7 * place + 3) % lm.vocab for place in range(context)]
    seat: Any = SimpleNamespace(prompt=prompt, state={})
    forest, began = Forest.rooted([prompt[-1]]), time.perf_counter()
    try:
        lm.extend([seat], [forest])
        for number in range(repeats + 1):
            for size in nodes:
                forest = forest.grown([place % lm.vocab for place in range(size)], [0] * size)
                seconds = _timed(lm, seat, forest)
                if number:  # the first round is warm-up
                    samples[size].append(seconds)
            if number >= 1 and time.perf_counter() - began > budget_s:
                break
    finally:
        lm.close(seat)
    least = [min(values) for values in samples.values()]  # what other work on the machine disturbed least
    curve = CostCurve(tuple(nodes), tuple(np.maximum.accumulate(least).tolist()))  # more nodes never cost less
    measured.keep("cost", _key(lm, context), {"nodes": curve.nodes, "seconds": curve.seconds})
    return curve


def _timed(lm: HuggingFaceLM, seat: Any, forest: Forest) -> float:
    _wait(lm)
    began = time.perf_counter()
    lm.extend([seat], [forest])
    _wait(lm)
    return time.perf_counter() - began


def _wait(lm: HuggingFaceLM) -> None:
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)


def _key(lm: HuggingFaceLM, context: int) -> list[Any]:
    return [measured.model_key(lm.model), lm.engine, context]
