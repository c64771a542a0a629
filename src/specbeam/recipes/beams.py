"""Recipes for beams."""

from functools import partial
from typing import Literal

from specbeam.control.fixed import FixedShape
from specbeam.control.width import FixedWidth, SureWidth, Width
from specbeam.draft.model import BeamDrafter, NoDraft
from specbeam.errors import BadSetting
from specbeam.lm.base import LM
from specbeam.recipes.depth import Depth, check_depth, depth_control
from specbeam.recipes.method import EXACT, Build, Method, at_least_one
from specbeam.recipes.search import drafted, speculative
from specbeam.session import Parts
from specbeam.verify.beam import BeamRule
from specbeam.verify.search import SearchRule

Coupling = Literal["noise", "rejection"]
Semantics = Literal["paper", "hf"]
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
    width: Literal["dynamic", "fixed"] = "dynamic",
    threshold: float = 0.7,
    min_beams: int = 1,
    coupling: Coupling = "noise",
    replacement: bool = False,
    collapse: bool = False,
    trace: bool = False,
    semantics: Semantics = "paper",
) -> Method:
    """Dynamic-width speculative beam decoding: a small model drafts layers of beams, the target judges them in one pass.

    Law: exact: beam sampling, given the width of each layer.
    With width="fixed" it is that of `beam_sampling(beams)`; with coupling="noise" even its very beams for the same seed.
    Paper: arXiv 2409.16560 (AAAI 2025), with the corrections that make it exact.

    Steps of the paper: draft beams (alg. 1, l. 3-5) draft/model.py; width (eq. 4-5) control/width.py; acceptance (l. 9-21)
    verify/beam.py and verify/draws.py; forest attention (sec. 3.3) lm/kv_trie.py; one-sequence memory (sec. 3.4) `collapse`.

    Args:
        beams: the most beams that live after a step.
        draft_beams: draft beams per layer, at least `beams`; a few more make layers pass. None: `beams` + 2.
        depth: draft layers per pass of the target; "auto": as many as pay for themselves on this machine, by what a pass
            costs (`specbeam tune`) and how often layers pass. None: "auto" where no beam depends on it (fixed width, shared
            noise), else 4, so that a seed gives the same text everywhere.
        width: "dynamic" draws as many beams as will be accepted with `threshold` odds; "fixed" always draws `beams`.
        threshold: odds asked of a dynamic width: higher is narrower and faster.
        min_beams: least dynamic width.
        coupling: "noise": draft and target share Gumbel noise. "rejection": recursive rejection sampling.
        replacement: independent draws (coupling="rejection" only).
        collapse: keep one beam after each turn, the paper's memory variant. Its law belongs to no target-only decoder,
            because when it collapses depends on acceptance.
        trace: record every trial, for `inspect`.
        semantics: "paper"; or "hf", the law of transformers' own beam sampling (width="fixed", coupling="noise").
    """
    at_least_one(beams=beams, min_beams=min_beams)
    draft_beams = drafted(beams, draft_beams)
    if depth is None:
        depth = "auto" if width == "fixed" and coupling == "noise" else 4
    check_depth(depth)
    if min_beams > beams:
        raise BadSetting(f"min_beams is {min_beams}, beams is {beams}; it must not be larger")
    if not 0 <= threshold <= 1:
        raise BadSetting(f"threshold is {threshold}; it is a probability, in [0, 1]")
    if width not in ("dynamic", "fixed"):
        raise BadSetting(f"width is {width!r}; it must be 'dynamic' or 'fixed'")
    if coupling not in ("noise", "rejection"):
        raise BadSetting(f"coupling is {coupling!r}; it must be 'noise' or 'rejection'")
    if coupling == "noise" and replacement:
        raise BadSetting("shared noise draws without replacement; take coupling='rejection' for replacement=True")
    hf = _is_hf(semantics, replacement)
    if hf and (width != "fixed" or coupling != "noise" or collapse or trace):
        raise BadSetting("semantics='hf' needs width='fixed' and coupling='noise', without collapse and trace")
    if hf and beams > 1:
        build_hf = speculative(beams, draft_beams, depth, "model", HF_LAW)
        return Method("dsbd", HF_LAW, beams, build_hf, needs_draft=True, search=True)
    policy: Width = FixedWidth(beams) if width == "fixed" else SureWidth(beams, min_beams, threshold)
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
        drafter = partial(BeamDrafter, beams=beams, coupling=coupling, replacement=replacement)
        control = depth_control(depth, beams, draft_beams, target, draft, drafter, rule)
        return Parts(drafter(draft), rule, control, law)

    return Method("dsbd", law, beams, build, needs_draft=True)
