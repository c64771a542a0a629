"""Controllers of the draft depth: fixed, or with the largest expected gain per second."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from specbeam.core.control.cost import CostCurve, HostCost
from specbeam.core.control.depth import DepthByCost
from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.needs import NodesByNeed, OddsMemory
from specbeam.core.control.pace import PaceMemory
from specbeam.core.control.width import ignores_drafts
from specbeam.core.cycles import READABLE
from specbeam.core.draft.tree import TreeDrafter
from specbeam.core.errors import BadSetting
from specbeam.core.lm import LM
from specbeam.core.measure import saved_figures
from specbeam.core.session import Controller, Drafter, Parts, Rule
from specbeam.core.verify.beams import BeamRule
from specbeam.core.verify.search import SearchRule
from specbeam.core.verify.walk import MatchRule
from specbeam.engines.eligibility import layers_of
from specbeam.models.heads.exit import ExitLM
from specbeam.models.heads.lm import HeadLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.skipping import SkippingLM
from specbeam.recipes.tuning.costs import curve_of, curves_in_turns, host_cost, rest_curve
from specbeam.recipes.tuning.idle_model import IdleLM

Depth = int | Literal["auto"]
DrafterOf = Callable[[LM], Drafter]
UNKNOWN_SHARE = 0.1  # assumed time of a pass of a draft model of unknown size, as a share of the target's
# Seconds of a pass of any size, for models that are not measured.
UNMEASURED_S = {"target": 1.0, "draft": UNKNOWN_SHARE}
ANY_MODEL = IdleLM(1, 0)  # stands for a model where it does not matter which
LAYERS_AT_ONCE = 3  # number of layers that share the cheap rows of a pass
MOST_PER_BEAM = 4  # maximum number of drafts per layer and beam
MEASURED = (HuggingFaceLM, HeadLM, SkippingLM)  # draft models with a key for figures on disk
DEAR = 0.25  # share of the bytes of a target's pass; a draft model that reads more is expensive
MOST_OF_TREES = 4  # largest depth of trees without a draft model
FREE = CostCurve((1,), (0.0,))  # cost of drafts without a draft model
# Assumed time of a pass by number of rows, relative to a single row. It is the same for all engines, because the text of
# a seed may depend on it. The values are those of plain vectors (AVX-512, 100 M parameters) in 8 bits, between those in
# float32 (2.05 for 8 rows, 3.8 for 16) and of tiles and GPUs (1.15 and 1.3): see measurements/methods.md.
ROWS = CostCurve((1, 8, 16), (1.0, 1.5, 2.4))


def check_depth(depth: Depth) -> None:
    """Raise `BadSetting` unless `depth` is "auto" or an integer of at least 1."""
    if depth != "auto" and (not isinstance(depth, int) or depth < 1):
        raise BadSetting(f"depth is {depth!r}; it must be at least 1, or 'auto'")


def depth_control(
    depth: Depth,
    beams: int,
    width: int,
    target: LM | None,
    draft: LM | None,
    drafter: DrafterOf,
    rule: Rule,
    may_widen: bool = False,
) -> Controller:
    """Return the controller of drafts of `width` nodes per layer, made by `drafter` and judged by `rule`.

    Args:
        draft: the draft model; None only for a fixed depth, see `depth_of_trees`.
        may_widen: whether layers may have more nodes where rows are cheap.
    """
    if depth != "auto":
        return FixedShape(depth, width)
    assert draft is not None
    host = _host_cost(target, draft, width, drafter, rule)
    text_depends_on_depth = isinstance(rule, BeamRule) and (rule.tries or not ignores_drafts(rule.width))
    curves = _target_curve(target, draft), _curve(draft, "draft")
    may_be_cut = isinstance(rule, SearchRule) or (isinstance(rule, BeamRule) and not rule.collapse)
    if may_be_cut and not text_depends_on_depth:
        if may_widen:
            width = max(width, min(_cheap_rows(curves[0], beams) // LAYERS_AT_ONCE, MOST_PER_BEAM * beams))
        paces = paces_of(target, draft)
        return NodesByNeed(*curves, beams, width, host=host, memory=_memory_of(target, draft), paces=paces)
    return DepthByCost(*curves, beams, (width,), host=host, alone=text_depends_on_depth)


def depth_of_trees(target: LM | None, drafter: Drafter, beams: int, width: int) -> DepthByCost:
    """Return the controller that chooses the depth of a chain or tree under each beam by the measured costs of passes.

    Rows of drafts are not free even if the drafts are: ten beams with four drafts each are a pass of 50 rows instead of 10.

    Args:
        drafter: its first draft model has the costs of a layer; without one, drafts cost nothing.
        width: number of draft nodes per layer, of all beams.
    """
    models = getattr(drafter, "models", ())
    draft = _curve(models[0], "draft") if models else FREE
    return DepthByCost(_curve(target, "target"), draft, beams, (width,), MOST_OF_TREES)


def depth_by_cost(
    layers: tuple[int, ...],
    most: int,
    target: LM | None,
    draft: LM | None,
    drafter: DrafterOf | None,
    rule: Rule | None,
    width: int | None = None,
) -> DepthByCost:
    """Return the controller that chooses the depth of drafts for one sequence by the measured costs of passes.

    Args:
        layers: number of draft nodes in each layer; the last number also holds for all deeper layers.
        most: maximum depth.
        drafter: makes the drafter from a draft model; None: drafts cost nothing and are matched.
        rule: the rule that judges the drafts.
        width: as in `DepthByCost`.
    """
    if drafter is None or rule is None or draft is None:
        return DepthByCost(_curve(target, "target"), FREE, 1, layers, most, width=width)
    host = _host_cost(target, draft, width or layers[0], drafter, rule)
    if isinstance(target, HuggingFaceLM) and isinstance(draft, HuggingFaceLM) and draft is not target:
        curves = curves_in_turns(target, draft)
    else:
        curves = (_target_curve(target, draft), _curve(draft, "draft"))
    return DepthByCost(*curves, 1, layers, most, host, width, text_depends_on_depth(rule))


def text_depends_on_depth(rule: Rule | None) -> bool:
    """Return whether the text of a seed depends on the draft depth: with all rules except matching by noise."""
    return not (isinstance(rule, MatchRule) and rule.coupling == "noise")


def depth_by_sizes(
    layers: tuple[int, ...],
    most: int,
    target: LM | None,
    draft: LM | None,
    beams: int = 1,
    alone: bool = True,
    width: int | None = None,
    models: int = 1,
) -> DepthByCost:
    """Return the controller that chooses the depth of drafts by the sizes of passes, not by measured times.

    So a seed gives the same text in every engine and whatever the load of the machine; see `depth_by_cost`.

    Args:
        alone, width: as in `DepthByCost`.
        models: number of draft models, of about equal sizes.
    """
    share = models * share_read(draft, target)
    draft_pass = CostCurve(ROWS.nodes, tuple(share * seconds for seconds in ROWS.seconds))
    return DepthByCost(ROWS, draft_pass, beams, layers, most, width=width, alone=alone)


def share_read(draft: LM | None, target: LM | None) -> float:
    """Return the assumed time of a pass of the draft model as a share of the target's; 0 without a draft model.

    This is the share of bytes that it reads (`HuggingFaceLM.bytes_read`), rounded to one digit. It is `UNKNOWN_SHARE` for
    models without known sizes. With a small target it is at most that, because the time of small passes does not follow
    their bytes.
    """
    if draft is None:
        return 0.0
    read: tuple[int | None, int | None] = getattr(draft, "bytes_read", None), getattr(target, "bytes_read", None)
    if read[0] is None or not read[1]:
        return UNKNOWN_SHARE
    share = float(f"{read[0] / read[1]:.1g}")
    return min(share, UNKNOWN_SHARE) if getattr(target, "is_small", False) else share


def cost_of_layer(target: LM | None, draft: LM | None, rows: int, depth: int) -> float | None:
    """Return the cost of a draft layer, with its rows in the target's pass, as a share of a pass without drafts.

    The number is rounded to one digit, so that repeated measurements rarely change texts. None for models that cannot be
    measured.

    Args:
        draft: None for drafts without a draft model.
        rows: number of draft nodes per layer.
        depth: number of layers over which the target's rows are averaged.
    """
    if not isinstance(target, HuggingFaceLM) or not (draft is None or isinstance(draft, MEASURED)):
        return None
    undrafted_s = curve_of(target).pass_s(1)
    curve = _target_curve(target, draft)
    rows_s = (curve.pass_s(1 + depth * rows) - curve.pass_s(1)) / depth
    draft_s = 0.0 if draft is None else curve_of(draft).pass_s(rows)
    share = (draft_s + rows_s) / undrafted_s
    return max(float(f"{share:.1g}"), 0.001)


def is_dear(draft: LM, target: LM | None) -> bool:
    """Return whether drafts may cost more than they save, judged by the sizes of the weights and not by measured times.

    This is the case if a pass of the draft model reads more than `DEAR` of the target's bytes, or if the target is in 4
    bits, where reading is so fast that the arithmetic of each drafted row counts. Small targets are excluded, because
    their passes are not memory-bound.
    """
    if not isinstance(target, HuggingFaceLM) or not isinstance(draft, HuggingFaceLM) or target.is_small:
        return False
    return target.engine == "int4" or share_read(draft, target) > DEAR


def _cheap_rows(curve: CostCurve, beams: int) -> int:
    """Return the number of rows, up to 64, whose pass takes at most a quarter longer than one over `beams` rows."""
    rows = beams
    while rows < 64 and curve.pass_s(rows + 1) <= 1.25 * curve.pass_s(beams):
        rows += 1
    return rows


def _memory_of(target: LM | None, draft: LM) -> OddsMemory:
    """Return the statistics of the drafts of a pair, shared by all methods of the pair."""
    if not isinstance(target, HuggingFaceLM) or not isinstance(draft, MEASURED):
        return OddsMemory()
    return _learnt(target, draft).odds


def paces_of(target: LM | None, draft: LM | None) -> PaceMemory:
    """Return the measured speeds of a pair's sessions with and without drafts, shared by all its methods.

    Args:
        draft: the draft model; None: the drafts come without a model.
    """
    if not isinstance(target, HuggingFaceLM) or not (draft is None or isinstance(draft, MEASURED)):
        return PaceMemory()
    return _learnt(target, draft or target).paces


@dataclass(frozen=True)
class _Learnt:
    """The statistics of a pair from which its controllers plan, updated while decoding."""

    odds: OddsMemory
    paces: PaceMemory


def _learnt(target: HuggingFaceLM, draft: HuggingFaceLM | HeadLM | SkippingLM) -> _Learnt:
    """Return the statistics of a pair.

    Args:
        draft: the draft model; the target itself for drafts without a model.
    """
    if draft not in target.learnt:
        if isinstance(draft, SkippingLM):
            named = [None, str(draft.settings)]
        elif isinstance(draft, HeadLM):
            named = [saved_figures.weights_key(draft.head), "exit" if isinstance(draft, ExitLM) else draft.engine]
        else:
            named = [saved_figures.weights_key(draft.known), draft.engine]
        weights, engine = named
        key = [saved_figures.weights_key(target.known), weights, target.engine, engine]
        target.learnt[draft] = _Learnt(OddsMemory(key), PaceMemory(key))
    found: _Learnt = target.learnt[draft]
    return found


def _host_cost(target: LM | None, draft: LM, width: int, drafter: DrafterOf, rule: Rule) -> HostCost:
    """Return the cost of a turn outside the models; zero if the target is not a transformers model."""

    def parts(lm: LM, depth: int) -> Parts:
        return Parts(drafter(lm), rule, FixedShape(depth, width), "")

    if not isinstance(target, HuggingFaceLM):
        return HostCost()
    in_loops = (
        READABLE
        and isinstance(draft, HuggingFaceLM | HeadLM)
        and target.supports_runs
        and draft.supports_runs
        and _have_compiled_form(drafter(draft), rule)
    )
    key = [repr(rule), repr(drafter(ANY_MODEL)), in_loops]
    return host_cost(target.vocab, parts, width, key, (target, draft) if in_loops else None)


def _have_compiled_form(drafter: Drafter, rule: Rule) -> bool:
    """Return whether turns of this drafter and rule can be one compiled run."""
    if isinstance(drafter, TreeDrafter):
        return hasattr(rule, "spec") and hasattr(drafter.growth, "spec")
    return hasattr(rule, "spec") and hasattr(drafter, "spec")


def _target_curve(target: LM | None, draft: LM | None) -> CostCurve:
    """Return the cost curve of the target's pass after a draft. After drafts of an exit layer only its last layers run."""
    whole = _curve(target, "target")
    if not isinstance(target, HuggingFaceLM) or not isinstance(draft, ExitLM):
        return whole
    return rest_curve(whole, _curve(draft, "draft"), len(layers_of(target.known)), draft.layer.after)


def has_curve(lm: LM | None) -> bool:
    """Return whether the costs of a model's passes are measured, or stated by the model itself."""
    return getattr(lm, "cost_curve", None) is not None or isinstance(lm, (HuggingFaceLM, HeadLM, SkippingLM))


def _curve(lm: LM | None, role: str) -> CostCurve:
    """Return the cost curve of a model; a constant by `role`, "target" or "draft", for models without one.

    A user's own model may have an attribute `cost_curve`.
    """
    own: CostCurve | None = getattr(lm, "cost_curve", None)
    if own is not None:
        return own
    if isinstance(lm, (HuggingFaceLM, HeadLM, SkippingLM)):
        return curve_of(lm)
    return CostCurve((1,), (UNMEASURED_S[role],))
