"""What a pass of a model costs on this machine, and a turn beside it: measured once, kept on disk, read by controllers."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from specbeam import kernels
from specbeam.control.cost import CostCurve, HostCost
from specbeam.core.limits import Limits
from specbeam.decode import decode
from specbeam.laws.ranking import Truncation
from specbeam.laws.warp import Warp
from specbeam.lm.base import LM
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.measure import kept_figures as measured
from specbeam.measure.profiler import profiled
from specbeam.session import Parts, Session
from specbeam.tuning.idle_model import IdleLM
from specbeam.tuning.stored_prompt import Context
from specbeam.verify.search import SearchRule

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
QUICK = (1, 4, 8, 12, 16, 24, 32)  # what is measured when somebody needs a curve now
CONTEXT = 64  # tokens before the nodes
# layers of the deeper draft that is timed, and turns of each draft
DEEP = 3
TURNS = 12
PartsOf = Callable[[LM, int], Parts]  # by draft model and depth


def curve_of(lm: HuggingFaceLM, context: int = CONTEXT) -> CostCurve:
    """The cost curve of a model: from disk, or measured quickly and kept. It stays the same as long as the model is loaded,
    or equal seeds could give unequal widths.
    """
    if lm.max_positions is not None:
        context = max(min(context, lm.max_positions // 2), 1)
    if context not in lm.curves:
        known = known_curve(lm, context)
        lm.curves[context] = measure(lm, QUICK, context, 5, 1.0) if known is None else known
    return lm.curves[context]


def known_curve(lm: HuggingFaceLM, context: int = CONTEXT) -> CostCurve | None:
    """The curve that was measured before; None if there is none."""
    record = measured.load("pass", _key(lm, context))
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
    began = time.perf_counter()
    with closing(Context(lm, context)) as place:
        for number in range(repeats + 1):
            for size in nodes:
                cost = place.turn(size)
                if number:  # the first round is warm-up
                    samples[size].append(cost.pass_s)
            if number >= 1 and time.perf_counter() - began > budget_s:
                break
    least = [min(values) for values in samples.values()]  # what other work on the machine disturbed least
    curve = CostCurve(tuple(nodes), tuple(np.maximum.accumulate(least).tolist()))  # more nodes never cost less
    measured.keep("pass", _key(lm, context), {"nodes": curve.nodes, "seconds": curve.seconds})
    return curve


def host_cost(vocab: int, parts: PartsOf, key: list[Any], models: tuple[LM, LM] | None = None) -> HostCost:
    """What these parts cost outside the models: from disk, or measured in some tenths of a second and kept.

    Args:
        vocab: tokens of the models.
        parts: of a session that drafts so many layers with this model.
        key: names what the cost depends on.
        models: target and draft, where loops run them: then it is what these loops do beside them.
    """
    name = [vocab, kernels.AVAILABLE, *key]
    if (known := _HOST.get(repr(name))) is None:
        record = measured.load("host", name)
        if record is not None:
            known = HostCost(**record)
        else:
            known = measure_host(vocab, parts) if models is None else measure_loops(*models, parts)
        measured.keep("host", name, asdict(known))
    return _HOST.setdefault(repr(name), known)


_HOST: dict[str, HostCost] = {}  # a disk that keeps nothing must not cost a measurement per request


def measure_host(vocab: int, parts: PartsOf, rounds: int = 3) -> HostCost:
    """Time whole turns around models that cost nothing: without drafts, with drafts that always pass, that never pass.

    Medians of turns, the best of interleaved rounds.
    """
    best: dict[tuple[int, bool], float] = {}
    for number in range(rounds + 1):
        for kind in ((0, True), (DEEP, True), (DEEP, False)):
            seconds = _turn_s(vocab, parts, *kind)
            if number:  # the first round is warm-up
                best[kind] = min(seconds, best.get(kind, seconds))
    alone, passing, failing = best.values()
    judge_s = max(passing - failing, 0.0) / DEEP
    draft_s = max(failing - alone, 0.0) / DEEP
    return HostCost(max(alone - judge_s, 0.0), draft_s, judge_s)


def measure_loops(target: LM, draft: LM, parts: PartsOf, budget_s: float = 1.0) -> HostCost:
    """Time runs of turns ahead on the models themselves, by the laps that the loops keep. The best of rounds."""
    best = [np.inf] * 3
    began = time.perf_counter()
    for number in range(5):
        made = parts(draft, DEEP)
        session = Session([0], made, _warp_of(made, min(20, target.vocab)), Limits(TURNS), number)
        with profiled() as profile:
            for _ in decode(target, [session], ahead=TURNS):
                pass
        turns = session.count.target_passes
        layers = len(session.count.widths)
        seconds = profile.seconds
        costs = (seconds.get(name, 0.0) / count for name, count in
                 (("settle", turns), ("draft", session.count.draft_passes), ("verify", layers)))  # fmt: skip
        if number:  # the first round is warm-up
            best = [min(pair) for pair in zip(best, costs, strict=True)]
        if number and time.perf_counter() - began > budget_s:
            break
    return HostCost(*best)


def _turn_s(vocab: int, parts: PartsOf, depth: int, agree: bool) -> float:
    """Seconds of a turn outside the models, the draft of which is so deep and always or never what the target wants."""
    target = IdleLM(vocab, 0)
    draft = IdleLM(vocab, 0 if agree else 1)
    made = parts(draft, depth)
    limits = Limits((TURNS + 1) * (depth + 1))
    session = Session([0], made, _warp_of(made, min(50, vocab)), limits, 0)
    seconds = list[float]()
    before = 0.0
    began = time.perf_counter()
    for _ in decode(target, [session]):
        inside = target.seconds + draft.seconds
        seconds.append(time.perf_counter() - began - (inside - before))
        began = time.perf_counter()
        before = inside
        if len(seconds) == TURNS:
            break
    return float(np.median(seconds))


def _warp_of(parts: Parts, top_k: int) -> Warp:
    """Return the warp by which these parts decode: rules of transformers' beam modes go with laws of these modes."""
    return Warp(truncation=Truncation(top_k=top_k), search=isinstance(parts.rule, SearchRule))


def _key(lm: HuggingFaceLM, context: int) -> list[Any]:
    return [measured.model_key(lm.model), lm.engine, context]
