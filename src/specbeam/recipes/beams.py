"""Recipes for greedy decoding, sampling, beam sampling, and speculative beam sampling (DSBD)."""

from functools import partial
from typing import Literal, get_args

from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.width import FixedWidth, NucleusWidth, SureWidth, Width, ignores_drafts
from specbeam.core.draft.beams import BeamDrafter, NoDraft
from specbeam.core.errors import BadSetting, one_of
from specbeam.core.laws.named import EXACT
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Drafter, Parts, Rule
from specbeam.core.verify.beams import BeamRule
from specbeam.core.verify.search import SearchRule
from specbeam.recipes.depth import Depth, check_depth, depth_by_sizes, depth_control
from specbeam.recipes.method import Build, Method, recipe, refuse_ignored, require_at_least_one, require_probability
from specbeam.recipes.search import DrafterName, build_of_search, checked_draft_beams

Coupling = Literal["noise", "rejection"]
Semantics = Literal["paper", "hf"]
WidthBy = Literal["dynamic", "fixed", "auto"]
PlainWidthBy = Literal["fixed", "auto"]
MASS = 0.9  # default of `mass`
MOST_BY_SIZES = 4  # largest depth where beams depend on it, unless one is given
HF_LAW = "exact: transformers' beam sampling"


def _is_hf(semantics: str, replacement: bool) -> bool:
    """Return whether `semantics` is "hf". Raises `BadSetting` if it is unknown, or "hf" with replacement."""
    if semantics not in ("paper", "hf"):
        raise BadSetting(f"semantics is {semantics!r}; it must be 'paper' or 'hf'")
    if semantics == "hf" and replacement:
        raise BadSetting("semantics='hf' draws without replacement; leave out replacement=True")
    return semantics == "hf"


def _build_without_draft(law: str, width: Width, coupling: str, replacement: bool) -> Build:
    """Return a function that makes the parts of a method without drafts that draws `width` beams per step."""
    rule = BeamRule(width, coupling, replacement)
    return lambda target, draft: Parts(NoDraft(), rule, FixedShape(0, 0), law)


@recipe
def greedy() -> Method:
    """Take the most probable token at each step, without a draft.

    Law: exact: greedy; token-identical to transformers' in float32.
    Paper: none.
    """
    law = "exact: greedy"
    return Method("greedy", law, 1, _build_without_draft(law, FixedWidth(1), "noise", False), greedy=True)


@recipe
def sampling() -> Method:
    """Draw one token per pass of the target, without a draft: plain sampling.

    Law: exact: the target's own, after warpers and processors.
    Paper: none.
    """
    return Method("sampling", EXACT, 1, _build_without_draft(EXACT, FixedWidth(1), "noise", False))


@recipe
def beam_sampling(
    beams: int = 4,
    replacement: bool = False,
    semantics: Semantics = "paper",
    width: PlainWidthBy = "fixed",
    min_beams: int | None = None,
    mass: float | None = None,
    *,
    drafter: Drafter | None = None,
    rule: Rule | None = None,
    controller: Controller | None = None,
) -> Method:
    """Draw `beams` (beam, token) pairs per step from the joint law over all live beams, without a draft: beam sampling.

    Law: exact by definition; the reference of `dsbd`.
    Paper: arXiv 2409.16560, sec. 2.2.

    Args:
        beams: number of pairs drawn per step; with width="auto" the maximum.
        replacement: draw the pairs independently, with replacement. Soon only a few distinct beams are left.
        semantics: "paper": the law above. "hf": the law of transformers' ``generate(num_beams=beams, do_sample=True)``,
            which draws twice as many pairs from warped, unnormalised scores and keeps those with the best scores. With
            beams=1 both are plain sampling.
        width: "fixed": always `beams`. "auto": fewer where the target's law is concentrated, as in `dsbd`.
        min_beams, mass: for width="auto", as in `dsbd`.
        drafter, rule, controller: your own parts in place of the recipe's (`Method.with_parts`).
    """
    require_at_least_one(beams=beams, min_beams=1 if min_beams is None else min_beams)
    one_of("width", width, get_args(PlainWidthBy))
    policy = _width(width, beams, min_beams, None, mass)
    hf = _is_hf(semantics, replacement)
    if hf and width != "fixed":
        raise BadSetting("semantics='hf' needs width='fixed', the only width of transformers' beam sampling")
    if hf and beams > 1:
        parts = Parts(NoDraft(), SearchRule(beams), FixedShape(0, 0), HF_LAW)
        method = Method("beam_sampling", HF_LAW, beams, lambda target, draft: parts, search=True)
        return method.with_parts(drafter, rule, controller)
    law = HF_LAW if hf else _law_of_draws(policy, replacement)
    coupling = "rejection" if replacement else "noise"
    build = _build_without_draft(law, policy, coupling, replacement)
    if isinstance(policy, FixedWidth):
        return Method("beam_sampling", law, beams, build).with_parts(drafter, rule, controller)
    own_least = policy.least

    def keeping(least: int) -> Method:
        return beam_sampling(beams, replacement, semantics, width, max(own_least, least), mass)

    method = Method("beam_sampling", law, beams, build, fills_beams=False, keeping=keeping)
    return method.with_parts(drafter, rule, controller)


def _law_of_draws(width: FixedWidth | NucleusWidth | SureWidth, replacement: bool) -> str:
    """Return the description of the law of beam sampling with these widths."""
    if isinstance(width, FixedWidth):
        widths = f"{width.most} beams"
    elif isinstance(width, NucleusWidth):
        least = f", at least {width.least}" if width.least > min(2, width.most) else ""
        widths = f"up to {width.most} beams that hold {width.mass:g} of its law{least}"
    else:
        widths = f"given the widths ({width.least} to {width.most} beams)"
    return f"exact: beam sampling, {widths}, {'with' if replacement else 'without'} replacement"


@recipe
def dsbd(
    beams: int = 4,
    draft_beams: int | None = None,
    depth: Depth | None = None,
    width: WidthBy = "fixed",
    threshold: float | None = None,
    min_beams: int | None = None,
    coupling: Coupling = "noise",
    replacement: bool = False,
    collapse: bool = False,
    trace: bool = False,
    semantics: Semantics = "paper",
    mass: float | None = None,
    *,
    drafter: "DrafterName | Drafter" = "model",
    rule: Rule | None = None,
    controller: Controller | None = None,
) -> Method:
    """Draft layers of beams with a small model and judge them in one pass of the target: dynamic-width speculative beam
    decoding (DSBD).

    Law: exact: that of `beam_sampling` with the same beams and width, "fixed" or "auto"; with a dynamic width beam sampling,
    given the width of each layer. With coupling="noise", as by default, the same seed gives exactly the same beams, too.
    Paper: arXiv 2409.16560 (AAAI 2025), with the corrections that make it exact.

    A layer extends every beam by one token. It passes if all beams that the target continues are among the drafts. The first
    layer that does not pass is emitted too, and ends the turn.

    Code: draft beams (alg. 1, l. 3-5) core/draft/beams.py; width (eq. 4-5) core/control/width.py; acceptance (l. 9-21)
    core/verify/beams.py and core/verify/trials.py; forest attention (sec. 3.3) engines/kv/trie.py; the variant that
    keeps one beam (sec. 3.4) `collapse`.

    Args:
        beams: maximum number of live beams after a step.
        draft_beams: number of draft beams per layer, at least `beams`. A few more let more layers pass. None: `beams` + 2,
            or more where rows are cheap and beams do not depend on drafts. If beams do not depend on drafts and the depth is
            "auto", this is a maximum: the target scores only drafts whose expected gain exceeds their cost.
        depth: number of draft layers per pass of the target. "auto": maximises the expected gain per second on this
            machine, by the measured cost of a pass (`specbeam tune`) and by how often layers pass or drafts are needed
            (docs/methods/dsbd.md). None: "auto" if beams do not depend on the depth (width "fixed" or "auto" with shared
            noise, without `collapse`); otherwise up to 4, as many as pay by the acceptance in this text and by the sizes of
            passes, so that a seed gives the same text at any load; with `collapse` 4.
        width: number of beams that the target draws in a layer. "fixed": always `beams`. "dynamic": the largest number that
            is accepted in full with a probability of at least `threshold`, as in the paper. "auto": the smallest number of
            most probable pairs that hold `mass` of the target's joint law, so few where this law is concentrated. With
            "dynamic" and "auto" a text may end with fewer than `beams` finished beams: as soon as there are
            `num_return_sequences` and no live beam is better.
        threshold: for width="dynamic": the required acceptance probability. A higher threshold makes layers narrower.
            None: 0.7.
        min_beams: minimum width, for width="dynamic" and "auto". None: 1, with "auto" 2. It is raised to
            `num_return_sequences`.
        coupling: "noise": draft and target share Gumbel noise. "rejection": recursive rejection sampling.
        replacement: draw independently, with replacement (coupling="rejection" only).
        collapse: keep one beam after each turn, the paper's variant that saves memory. Its law differs from that of every
            decoder without drafts, because the time of the collapse depends on acceptance.
        trace: record every turn and every trial of a draft: the answer has a `trace`, and a notebook shows its forest.
            Recording runs turn by turn, slower.
        semantics: "paper"; or "hf": the law of transformers' own beam sampling, which needs width="fixed" and
            coupling="noise".
        mass: for width="auto": a probability; a larger one makes layers wider. None: 0.9.
        drafter: "model": drafts beams with the draft model. Other names, as in `speculative_beam_search`, need no draft
            model, and need beams that do not depend on drafts. Or your own part (`Method.with_parts`).
        rule, controller: your own parts in place of the recipe's (`Method.with_parts`).
    """
    require_at_least_one(beams=beams, min_beams=1 if min_beams is None else min_beams)
    given_draft_beams = draft_beams
    named = drafter if isinstance(drafter, str) else "model"
    own_drafter = None if isinstance(drafter, str) else drafter
    one_of("drafter", named, get_args(DrafterName))
    draft_beams = checked_draft_beams(beams, draft_beams, named)
    by_sizes = depth is None and (width == "dynamic" or coupling == "rejection") and not collapse
    given_depth = depth
    if depth is None:
        depth = MOST_BY_SIZES if collapse or by_sizes else "auto"
    check_depth(depth)
    one_of("width", width, get_args(WidthBy))
    policy = _width(width, beams, min_beams, threshold, mass)
    _check_coupling(coupling, replacement)
    if named != "model" and (coupling != "noise" or collapse or not ignores_drafts(policy)):
        raise BadSetting(
            f"drafter is {named!r}, which needs beams that do not depend on drafts: width='fixed' or 'auto' and "
            "coupling='noise', without collapse"
        )
    hf = _is_hf(semantics, replacement)
    if hf and (width != "fixed" or coupling != "noise" or collapse or trace):
        raise BadSetting("semantics='hf' needs width='fixed' and coupling='noise', without collapse and trace")
    if hf and beams > 1:
        build_hf = build_of_search(beams, draft_beams, depth, named, HF_LAW)
        method = Method("dsbd", HF_LAW, beams, build_hf, needs_draft=named == "model", search=True)
        return method.with_parts(own_drafter, rule, controller)
    law = _law_of_draws(policy, replacement)
    if hf:
        law = HF_LAW
    if collapse:
        law = "approximate: beam sampling that collapses to one beam whenever a turn ends"
    judge = BeamRule(policy, coupling, replacement, collapse, trace)

    def build_with_model(target: LM | None, draft: LM | None) -> Parts:
        assert draft is not None
        drafter_of = partial(
            BeamDrafter,
            beams=beams,
            coupling=coupling,
            replacement=replacement,
            keeps_rows=trace or not ignores_drafts(policy),
            width=policy,
        )
        may_widen = given_draft_beams is None
        if by_sizes:
            control: Controller = depth_by_sizes((draft_beams,), MOST_BY_SIZES, target, draft, beams)
        else:
            control = depth_control(depth, beams, draft_beams, target, draft, drafter_of, judge, may_widen)
        return Parts(drafter_of(draft), judge, control, law)

    build: Build = build_with_model
    if named != "model":
        build = build_of_search(beams, draft_beams, depth, named, law, judge)
    if isinstance(policy, FixedWidth):
        method = Method("dsbd", law, beams, build, needs_draft=named == "model")
        return method.with_parts(own_drafter, rule, controller)
    own_least = policy.least

    def keeping(least: int) -> Method:
        wider = max(own_least, least)
        return dsbd(
            beams, given_draft_beams, given_depth, width, threshold, wider, coupling, replacement, collapse, trace,
            semantics, mass, drafter=named,
        )  # fmt: skip

    method = Method("dsbd", law, beams, build, needs_draft=named == "model", fills_beams=False, keeping=keeping)
    return method.with_parts(own_drafter, rule, controller)


def _width(
    width: str, beams: int, min_beams: int | None, threshold: float | None, mass: float | None
) -> FixedWidth | NucleusWidth | SureWidth:
    """Return the width policy. Raises `BadSetting` if a setting is wrong or would be ignored."""
    refuse_ignored(width == "auto", f"width {width!r}", mass=mass)
    refuse_ignored(width == "dynamic", f"width {width!r}", threshold=threshold)
    refuse_ignored(width != "fixed", f"width {width!r}", min_beams=min_beams)
    if min_beams is not None and min_beams > beams:
        raise BadSetting(f"min_beams is {min_beams}, beams is {beams}; min_beams must be at most beams")
    require_probability(threshold=threshold, mass=mass)
    if width == "auto":
        return NucleusWidth(beams, min_beams or min(2, beams), MASS if mass is None else float(mass))
    if width == "dynamic":
        return SureWidth(beams, min_beams or 1, 0.7 if threshold is None else threshold)
    return FixedWidth(beams)


def _check_coupling(coupling: str, replacement: bool) -> None:
    """Raise `BadSetting` if the coupling is unknown or incompatible with `replacement`."""
    if coupling not in ("noise", "rejection"):
        raise BadSetting(f"coupling is {coupling!r}; it must be 'noise' or 'rejection'")
    if coupling == "noise" and replacement:
        raise BadSetting("shared noise draws without replacement; replacement=True needs coupling='rejection'")
