"""Recipes for beams."""

import math
from functools import partial
from typing import Literal

from specbeam.control.fixed import FixedShape
from specbeam.control.width import FixedWidth, SureWidth, ValuedWidth, Width
from specbeam.draft.beams import BeamDrafter, NoDraft
from specbeam.errors import BadSetting
from specbeam.laws.named import EXACT
from specbeam.lm.base import LM
from specbeam.recipes.depth import Depth, check_depth, depth_control, shape_by_value
from specbeam.recipes.method import Build, Method, at_least_one, refuse_ignored
from specbeam.recipes.search import drafted, speculative
from specbeam.session import Parts
from specbeam.verify.beams import BeamRule
from specbeam.verify.search import SearchRule

Coupling = Literal["noise", "rejection"]
Semantics = Literal["paper", "hf"]
WidthBy = Literal["dynamic", "fixed", "auto"]
HF_LAW = "exact: transformers' beam sampling"


def _is_hf(semantics: str, replacement: bool) -> bool:
    if semantics not in ("paper", "hf"):
        raise BadSetting(f"semantics is {semantics!r}; it must be 'paper' or 'hf'")
    if semantics == "hf" and replacement:
        raise BadSetting("semantics='hf' draws without replacement; leave out replacement=True")
    return semantics == "hf"


def _plain(law: str, beams: int, coupling: str, replacement: bool) -> Build:
    rule = BeamRule(FixedWidth(beams), coupling, replacement)
    return lambda target, draft: Parts(NoDraft(), rule, FixedShape(0, 0), law)


def greedy() -> Method:
    """The most likely token at each step.

    Law: exact: greedy; token-identical to transformers' in float32.
    Paper: none.
    """
    law = "exact: greedy"
    return Method("greedy", law, 1, _plain(law, 1, "noise", False), greedy=True)


def sampling() -> Method:
    """Plain sampling, one token per pass of the target.

    Law: exact: the target's own, after warpers and processors.
    Paper: none.
    """
    return Method("sampling", EXACT, 1, _plain(EXACT, 1, "noise", False))


def beam_sampling(beams: int = 4, replacement: bool = False, semantics: Semantics = "paper") -> Method:
    """Beam sampling: each step draws `beams` (beam, token) pairs from the joint law over all live beams.

    Law: exact by definition; the reference of `dsbd`.
    Paper: arXiv 2409.16560, sec. 2.2.

    Args:
        beams: draws per step.
        replacement: independent draws, which soon collapse to a few distinct beams.
        semantics: "paper"; or "hf", the law of transformers' ``generate(num_beams=beams, do_sample=True)``, which draws
            twice as many pairs from warped, unnormalised scores and keeps the best-scored ones. One beam is plain sampling
            in both.
    """
    at_least_one(beams=beams)
    hf = _is_hf(semantics, replacement)
    if hf and beams > 1:
        parts = Parts(NoDraft(), SearchRule(beams), FixedShape(0, 0), HF_LAW)
        return Method("beam_sampling", HF_LAW, beams, lambda target, draft: parts, search=True)
    law = HF_LAW if hf else f"exact: beam sampling, {beams} beams, {'with' if replacement else 'without'} replacement"
    coupling = "rejection" if replacement else "noise"
    return Method("beam_sampling", law, beams, _plain(law, beams, coupling, replacement))


def dsbd(
    beams: int = 4,
    draft_beams: int | None = None,
    depth: Depth | None = None,
    width: WidthBy = "dynamic",
    threshold: float = 0.7,
    min_beams: int = 1,
    coupling: Coupling = "noise",
    replacement: bool = False,
    collapse: bool = False,
    trace: bool = False,
    semantics: Semantics = "paper",
    worth: float | None = None,
) -> Method:
    """Dynamic-width speculative beam decoding: a small model drafts layers of beams, the target judges them in one pass.

    Law: exact: beam sampling, given the width of each layer.
    With width="fixed" it is that of `beam_sampling(beams)`; with coupling="noise" even its very beams for the same seed.
    Paper: arXiv 2409.16560 (AAAI 2025), with the corrections that make it exact.

    Steps of the paper: draft beams (alg. 1, l. 3-5) draft/beams.py; width (eq. 4-5) control/width.py; acceptance
    (l. 9-21) verify/beams.py and verify/trials.py; forest attention (sec. 3.3) engines/kv/trie.py; one-sequence memory
    (sec. 3.4) `collapse`.

    Args:
        beams: the most beams that live after a step.
        draft_beams: draft beams per layer, at least `beams`; a few more make layers pass. None: `beams` + 2; where width and
            depth are "auto", what pays for itself.
        depth: draft layers per pass of the target; "auto": as many as pay for themselves on this machine, by what a pass
            costs (`specbeam tune`) and how often layers pass. None: "auto" where no beam depends on it (fixed width, shared
            noise) and with width="auto", else 4, so that a seed gives the same text everywhere.
        width: "dynamic" draws as many beams as will be accepted with `threshold` odds; "fixed" always draws `beams`; "auto"
            draws what gains most per second, by these odds, by what lies behind the layer and by what passes cost.
        threshold: odds asked of a dynamic width: higher is narrower and faster.
        min_beams: least width that is not fixed.
        coupling: "noise": draft and target share Gumbel noise. "rejection": recursive rejection sampling.
        replacement: independent draws (coupling="rejection" only).
        collapse: keep one beam after each turn, the paper's memory variant. Its law belongs to no target-only decoder,
            because when it collapses depends on acceptance.
        trace: record every trial, for `inspect`.
        semantics: "paper"; or "hf", the law of transformers' own beam sampling (width="fixed", coupling="noise").
        worth: for width="auto", what twice the beams of a layer are worth, in layers of one beam (2): higher is wider.
    """
    at_least_one(beams=beams, min_beams=min_beams)
    asked = draft_beams
    draft_beams = drafted(beams, draft_beams)
    if depth is None:
        depth = "auto" if width == "auto" or (width == "fixed" and coupling == "noise") else 4
    check_depth(depth)
    policy = _width(width, beams, min_beams, threshold, worth, max(draft_beams, beams + 4))
    _check_coupling(coupling, replacement, policy)
    hf = _is_hf(semantics, replacement)
    if hf and (width != "fixed" or coupling != "noise" or collapse or trace):
        raise BadSetting("semantics='hf' needs width='fixed' and coupling='noise', without collapse and trace")
    if hf and beams > 1:
        build_hf = speculative(beams, draft_beams, depth, "model", HF_LAW)
        return Method("dsbd", HF_LAW, beams, build_hf, needs_draft=True, search=True)
    law = "exact: beam sampling, " + (
        f"{beams} beams" if width == "fixed" else f"given the widths (1 to {beams} beams)"
    )
    law += ", with replacement" if replacement else ", without replacement"
    if hf:
        law = HF_LAW
    if collapse:
        law = "approximate: beam sampling that collapses to one beam whenever a turn ends"
    rule = BeamRule(policy, coupling, replacement, collapse, trace)

    def build(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        keeps_rows = trace or not isinstance(policy, FixedWidth)
        drafter = partial(BeamDrafter, beams=beams, coupling=coupling, replacement=replacement, keeps_rows=keeps_rows)
        if isinstance(policy, ValuedWidth) and depth == "auto":
            sizes = _sizes(beams) if asked is None else (draft_beams,)
            control = shape_by_value(policy, sizes, target, draft, drafter, rule)
        else:
            control = depth_control(depth, beams, draft_beams, target, draft, drafter, rule)
        return Parts(drafter(draft), rule, control, law)

    return Method("dsbd", law, beams, build, needs_draft=True)


def _width(
    width: str, beams: int, least: int, threshold: float, worth: float | None, drafts: int
) -> FixedWidth | SureWidth | ValuedWidth:
    """Raises `BadSetting` for what is wrong, or would be ignored."""
    if width not in ("dynamic", "fixed", "auto"):
        raise BadSetting(f"width is {width!r}; it must be 'dynamic', 'fixed' or 'auto'")
    if least > beams:
        raise BadSetting(f"min_beams is {least}, beams is {beams}; it must not be larger")
    refuse_ignored(width == "auto", f"width {width!r}", worth=worth)
    if not 0 <= threshold <= 1:
        raise BadSetting(f"threshold is {threshold}; it is a probability, in [0, 1]")
    if worth is not None and not 0 <= worth < math.inf:
        raise BadSetting(f"worth is {worth}; it must be at least 0")
    if width == "auto":
        return ValuedWidth(beams, least, 2.0 if worth is None else worth, drafts)
    return FixedWidth(beams) if width == "fixed" else SureWidth(beams, least, threshold)


def _check_coupling(coupling: str, replacement: bool, width: Width) -> None:
    if coupling not in ("noise", "rejection"):
        raise BadSetting(f"coupling is {coupling!r}; it must be 'noise' or 'rejection'")
    if coupling == "noise" and replacement:
        raise BadSetting("shared noise draws without replacement; take coupling='rejection' for replacement=True")
    if coupling == "rejection" and isinstance(width, ValuedWidth):
        raise BadSetting("width='auto' knows the odds of shared noise; take coupling='noise', or width='dynamic'")


def _sizes(beams: int) -> tuple[int, ...]:
    """Drafts per layer that are worth considering."""
    near = {beams // 2, 3 * beams // 4, beams - 1, beams, beams + 1, beams + 2, beams + 4}
    return tuple(sorted(size for size in near if size > 0))
