"""The costs on this machine of a model's passes and of a turn outside the models, measured once and saved on disk."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import count
from typing import Any

import numpy as np

from specbeam.core import compiling
from specbeam.core.control.cost import CostCurve, HostCost
from specbeam.core.decode import decode
from specbeam.core.errors import BrokenLaw
from specbeam.core.laws.ranking import Truncation
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.lm import LM
from specbeam.core.measure import saved_figures
from specbeam.core.measure.profiler import profiled
from specbeam.core.measure.saved_figures import Figures, NumberField, RecordFields
from specbeam.core.session import Parts, Session
from specbeam.core.verify.search import SearchRule
from specbeam.engines.cpu.tiles import available as uses_tiles
from specbeam.models.heads.lm import HeadLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.skipping import SkippingLM
from specbeam.recipes.tuning.idle_model import IdleLM
from specbeam.recipes.tuning.stored_prompt import StoredPrompt, made_up_context

NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
QUICK = (1, 2, 4, 6, 8, 12, 16, 24, 32)  # numbers of nodes to measure while a request waits for the curve
LEAST_S = 3.0  # minimum seconds of measuring a curve, so that a short load on the machine does not affect it
QUICK_S = 0.5  # the same while a request waits for the curve
CONTEXT = 64  # number of tokens before the nodes
DEEP = 3  # number of layers of timed drafts
ALONE_S = 0.4  # seconds of successive target passes that fill the processor's caches with its weights
TURNS = 12  # maximum number of timed turns
LEAST_TURNS = 3  # minimum number; the first has a single live beam, and a head drafts nothing in it
TIMED_NODES = 1000  # maximum number of draft nodes in the timed turns, if they are more than the minimum
PartsOf = Callable[[LM, int], Parts]  # makes the parts of a session from a draft model and a depth
_CURVE_FIELDS = {"nodes": NumberField((None,), least=1, is_whole=True), "seconds": NumberField((None,), least=1e-12)}


def _is_curve(record: dict[str, Any]) -> bool:
    """Return whether a record has ascending numbers of nodes and, for each, seconds that do not descend."""
    nodes = record["nodes"]
    seconds = record["seconds"]
    return len(nodes) == len(seconds) > 0 and nodes == sorted(set(nodes)) and seconds == sorted(seconds)


_CURVE = RecordFields({**_CURVE_FIELDS, "draft_layer_s": NumberField()}, _is_curve)
_PASS = Figures("pass", RecordFields(_CURVE_FIELDS, _is_curve))
_TURNS = Figures("turns", RecordFields({"target": _CURVE, "draft": _CURVE}))
_HOST_COST = Figures(
    "host", RecordFields({"turn_s": NumberField(), "draft_s": NumberField(), "judge_s": NumberField()})
)


def curve_of(lm: HuggingFaceLM | HeadLM | SkippingLM, context: int = CONTEXT) -> CostCurve:
    """Return the cost curve of a model, from disk, or measured quickly and then saved.

    Curves of heads, and of targets with skipped sublayers, are not saved on disk.

    The curve does not change while the model is loaded; otherwise equal seeds could give different widths.

    Args:
        context: number of tokens in the cache, limited to half of the model's positions.
    """
    if lm.max_positions is not None:
        context = max(min(context, lm.max_positions // 2), 1)
    if context not in lm.curves and isinstance(lm, (HeadLM, SkippingLM)):
        lm.curves[context] = measure_head(lm, context, least_s=QUICK_S)
    elif context not in lm.curves and isinstance(lm, HuggingFaceLM):
        known = known_curve(lm, context)
        lm.curves[context] = measure(lm, QUICK, context, 5, QUICK_S, 1.0) if known is None else known
    found: CostCurve = lm.curves[context]
    return found


def curves_in_turns(target: HuggingFaceLM, draft: HuggingFaceLM) -> tuple[CostCurve, CostCurve]:
    """Return the cost curves of alternating passes of a target and its draft model, from disk, or measured and then saved.

    Each model evicts the other's weights from the processor's caches, so a turn with drafts takes longer than separate
    measurements of its passes: a target that fits the caches is twice as fast alone as after a draft. For chains of one
    sequence. The target's pass over one node is that of successive turns without drafts. The additional time of the first
    pass of a draft is added to the target's passes over several nodes.
    """
    found: tuple[CostCurve, CostCurve] | None = target.curves_in_turns.get(draft)
    if found is None:
        context = max(min([CONTEXT, *(lm.max_positions // 2 for lm in (target, draft) if lm.max_positions)]), 1)
        key = [_key(target, context), _key(draft, context)]
        record = _TURNS.load(key)
        if record is None:
            curves = measure_in_turns(target, draft, context, least_s=QUICK_S)
            record = {"target": asdict(curves[0]), "draft": asdict(curves[1])}
            _TURNS.keep(key, record)
        found = (_curve_in(record["target"]), _curve_in(record["draft"]))
        target.curves_in_turns[draft] = found
    return found


def _curve_in(kept: dict[str, Any]) -> CostCurve:
    """Return the curve in a record from disk."""
    return CostCurve(tuple(kept["nodes"]), tuple(kept["seconds"]))


def measure_in_turns(
    target: HuggingFaceLM, draft: HuggingFaceLM, context: int = CONTEXT, repeats: int = 5, least_s: float = QUICK_S
) -> tuple[CostCurve, CostCurve]:
    """Measure the curves of `curves_in_turns`, as the minimum of interleaved repeats.

    Args:
        context: number of tokens before the nodes.
        repeats: minimum number of passes of each size.
        least_s: minimum seconds of measuring.
    """
    drafts: dict[int, list[float]] = {size: [] for size in QUICK}
    drafted: dict[int, list[float]] = {size: [] for size in QUICK}
    with closing(StoredPrompt(target, context)) as prompt, closing(StoredPrompt(draft, context)) as drafting:
        alone_s = prompt.turn(1).pass_s
        began = time.perf_counter()
        while time.perf_counter() - began < ALONE_S:
            alone_s = min(alone_s, prompt.turn(1).pass_s)
        began = time.perf_counter()
        for number in count():
            if number > repeats and time.perf_counter() - began > least_s:
                break
            for size in QUICK:
                target_s = prompt.turn(size).pass_s
                first_s = drafting.turn(1).pass_s
                draft_s = drafting.turn(size).pass_s
                if number:  # the first round is warm-up
                    drafts[size].append(draft_s)
                    drafted[size].append(first_s + target_s)
    draft_curve = _ascending(drafts)
    whole = _ascending(drafted)
    rest = [max(seconds - draft_curve.seconds[0], alone_s) for seconds in whole.seconds]
    return CostCurve(whole.nodes, (alone_s, *rest[1:])), draft_curve


def measure_head(
    lm: HeadLM | SkippingLM, context: int = CONTEXT, repeats: int = 5, least_s: float = QUICK_S
) -> CostCurve:
    """Measure the seconds of a pass by number of rows, for a head or a target with skipped sublayers; see `measure`.

    Args:
        context: number of tokens before the rows.
        repeats: minimum number of passes of each size.
        least_s: minimum seconds of measuring.
    """
    samples: dict[int, list[float]] = {size: [] for size in QUICK}
    began = time.perf_counter()
    with lm.stored(context) as prompt:
        for number in count():
            if number > repeats and time.perf_counter() - began > least_s:
                break
            for size in QUICK:
                seconds = prompt.pass_s(size)
                if number:  # the first round is warm-up
                    samples[size].append(seconds)
    return _ascending(samples)


def _ascending(samples: dict[int, list[float]]) -> CostCurve:
    """Return the curve of the minimum seconds of each size; no size costs more than a larger one."""
    least = [min(values) for values in samples.values()]
    ascending = np.minimum.accumulate(least[::-1])[::-1]
    return CostCurve(tuple(samples), tuple(ascending.tolist()))


def rest_curve(whole: CostCurve, early: CostCurve, layers: int, after: int) -> CostCurve:
    """Return the cost of a target pass over nodes that its first layers have already processed, for drafts of an exit layer.

    Args:
        whole: the cost of a pass of all `layers` layers and the head.
        early: the cost of a pass of the first `after` layers, the exit layer and the head.
    """
    seconds = []
    for nodes in whole.nodes:
        all_s = whole.pass_s(nodes)
        others = max(layers - after - 1, 1)
        layer_s = min(max((all_s - early.pass_s(nodes)) / others, 0.0), all_s / layers)
        seconds.append(all_s - after * layer_s)
    return CostCurve(whole.nodes, tuple(seconds))


def known_curve(lm: HuggingFaceLM, context: int = CONTEXT) -> CostCurve | None:
    """Return the saved curve of a model; None if there is none."""
    record = _PASS.load(_key(lm, context))
    return None if record is None else _curve_in(record)


def measure(
    lm: HuggingFaceLM,
    nodes: Sequence[int] = NODES,
    context: int = CONTEXT,
    repeats: int = 9,
    least_s: float = LEAST_S,
    budget_s: float = 60.0,
) -> CostCurve:
    """Measure the seconds of a pass by number of scored nodes, and save the curve on disk.

    The seconds are the minimum of interleaved repeats, because other load of the machine can only add to them. If a size
    took longer than a larger one, it gets the time of the larger one.

    Args:
        nodes: numbers of scored nodes, ascending.
        context: number of tokens in the cache.
        repeats: minimum number of passes of each size.
        least_s: minimum seconds of measuring.
        budget_s: seconds after which no further round begins. There is at least one round after the warm-up.
    """
    samples: dict[int, list[float]] = {size: [] for size in nodes}
    began = time.perf_counter()
    with closing(StoredPrompt(lm, context)) as prompt:
        for number in count():
            for size in nodes:
                cost = prompt.turn(size)
                if number:  # the first round is warm-up
                    samples[size].append(cost.pass_s)
            spent = time.perf_counter() - began
            is_enough = number >= repeats and spent > least_s
            if number and (is_enough or spent > budget_s):
                break
    curve = _ascending(samples)
    _PASS.keep(_key(lm, context), {"nodes": curve.nodes, "seconds": curve.seconds})
    return curve


def host_cost(vocab: int, parts: PartsOf, width: int, key: list[Any], models: tuple[LM, LM] | None = None) -> HostCost:
    """Return the cost of a session's parts outside the models.

    The cost is read from disk, or measured in a few tenths of a second, more for hundreds of beams, and saved.

    Args:
        vocab: vocabulary size of the models.
        parts: makes the parts of a session from a draft model and a depth.
        width: number of draft nodes per layer, or of a whole tree.
        key: further JSON values that identify everything on which the cost depends.
        models: target and draft model, to measure compiled runs with them; None: measure turns in Python.
    """
    full_key = [vocab, compiling.AVAILABLE, width, *key]
    turns = max(min(TURNS, TIMED_NODES // (DEEP * width)), LEAST_TURNS)
    if (known := _HOST.get(repr(full_key))) is None:
        record = _HOST_COST.load(full_key)
        if record is not None:
            known = HostCost(**record)
        else:
            measured = measure_host(vocab, parts, turns) if models is None else measure_loops(*models, parts, turns)
            if measured is None:  # the user's prompt may be decodable even if made-up texts are not
                return measure_host(vocab, parts, turns)
            known = measured
        _HOST_COST.keep(full_key, asdict(known))
    return _HOST.setdefault(repr(full_key), known)


_HOST: dict[str, HostCost] = {}  # costs by key, so that even without a writable disk each is measured only once


def measure_host(vocab: int, parts: PartsOf, turns: int = TURNS, rounds: int = 3) -> HostCost:
    """Measure the cost of turns outside the models, with models that compute nothing.

    It times turns without drafts, with drafts that always pass, and with drafts that never pass. The times are medians over
    turns, and the minimum of interleaved rounds. Without compiled steps a single turn is timed, because turns are slow.
    """
    best: dict[tuple[int, bool], float] = {}
    for number in range(rounds + 1 if compiling.AVAILABLE else 1):
        for kind in ((0, True), (DEEP, True), (DEEP, False)):
            seconds = _turn_s(vocab, parts, *kind, turns if compiling.AVAILABLE else 1)
            if number or not compiling.AVAILABLE:  # the first round of compiled steps is warm-up
                best[kind] = min(seconds, best.get(kind, seconds))
    undrafted, passing, failing = best.values()
    judge_s = max(passing - failing, 0.0) / DEEP
    draft_s = max(failing - undrafted, 0.0) / DEEP
    return HostCost(max(undrafted - judge_s, 0.0), draft_s, judge_s)


def measure_loops(target: LM, draft: LM, parts: PartsOf, turns: int = TURNS, budget_s: float = 1.0) -> HostCost | None:
    """Measure the cost of compiled runs with these models outside the models, by the spans that the runs record.

    Returns None if the logits of a model are NaN or infinite on some of the made-up texts.

    The times are the minimum of up to four rounds after a warm-up.

    Args:
        turns: number of turns after which a round ends, or after the first that drafts if this comes later.
        budget_s: seconds after which no further round begins.
    """
    best = [np.inf] * 3
    began = time.perf_counter()
    for number in range(5):
        session_parts = parts(draft, DEEP)
        warp = _warp_of(session_parts, min(20, target.vocab))
        session = Session([0], session_parts, warp, Limits(turns + DEEP), number)
        session.context = made_up_context(target, draft)
        with profiled() as profile:
            for _ in decode(target, [session], ahead=turns):
                if session.count.target_passes >= turns and session.count.draft_passes > 0:
                    break
        if session.failure is not None:
            if isinstance(session.failure, BrokenLaw):
                return None
            raise session.failure
        passes = session.count.target_passes
        layers = len(session.count.widths)
        drafted = session.count.draft_passes * (DEEP if getattr(draft, "drafts_blocks", False) else 1)
        seconds = profile.seconds
        if number:  # the first round is warm-up
            costs = (
                seconds.get("settle", 0.0) / passes,
                seconds.get("draft", 0.0) / drafted,
                seconds.get("verify", 0.0) / layers,
            )
            best = [min(pair) for pair in zip(best, costs, strict=True)]
        if number and time.perf_counter() - began > budget_s:
            break
    return HostCost(*best)


def _turn_s(vocab: int, parts: PartsOf, depth: int, agree: bool, turns: int) -> float:
    """Return the median seconds of a turn outside the models, with models that compute nothing.

    Args:
        depth: number of draft layers.
        agree: whether the target accepts all drafts (True) or none (False).
        turns: number of turns.
    """
    target = IdleLM(vocab, 0)
    draft = IdleLM(vocab, 0 if agree else 1)
    session_parts = parts(draft, depth)
    limits = Limits((turns + 1) * (depth + 1))
    session = Session([0], session_parts, _warp_of(session_parts, min(50, vocab)), limits, 0)
    seconds = list[float]()
    before = 0.0
    began = time.perf_counter()
    for _ in decode(target, [session]):
        inside = target.seconds + draft.seconds
        seconds.append(time.perf_counter() - began - (inside - before))
        began = time.perf_counter()
        before = inside
        if len(seconds) == turns:
            break
    return float(np.median(seconds))


def _warp_of(parts: Parts, top_k: int) -> Warp:
    """Return a warp with this top-k for these parts; rules of transformers' beam modes need `search`."""
    return Warp(truncation=Truncation(top_k=top_k), search=isinstance(parts.rule, SearchRule))


def _key(lm: HuggingFaceLM, context: int) -> list[Any]:
    return [
        saved_figures.model_key(lm.known),
        lm.engine,
        context,
        saved_figures.source_key("engines", "core/compiling"),
        uses_tiles(),
    ]
