"""Recipes for beam search, token-identical to transformers."""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from specbeam.control.fixed import FixedShape
from specbeam.draft.beams import BeamDrafter, NoDraft
from specbeam.draft.lookup import PromptLookup, SuffixMatch
from specbeam.draft.recycle import Successors, TokenRecycling, likeliest
from specbeam.errors import BadSetting, one_of
from specbeam.lm.base import LM
from specbeam.recipes.depth import Depth, check_depth, depth_control
from specbeam.recipes.method import Build, Method, at_least_one, refuse_ignored
from specbeam.session import Drafter, Parts, Rule, is_part
from specbeam.verify.search import SearchRule

DrafterName = Literal["model", "prompt_lookup", "suffix_match", "token_recycling"]
LAW = "exact: beam search; the beams and scores of transformers in float32"


def beam_search(beams: int = 4) -> Method:
    """Beam search: the tokens, beams and scores of transformers' ``generate(num_beams=beams, do_sample=False)``.

    Law: exact: beam search; token-identical to transformers' in float32.
    Paper: none.

    Beams share their past in the KV trie: the prompt is computed once, and nothing is copied when beams reorder.

    Args:
        beams: live beams per step.
    """
    at_least_one(beams=beams)
    parts = Parts(NoDraft(), SearchRule(beams), FixedShape(0, 0), LAW)
    return Method("beam_search", LAW, beams, lambda target, draft: parts, greedy=True, search=True)


def speculative_beam_search(
    beams: int = 4, draft_beams: int | None = None, depth: Depth = "auto", drafter: "DrafterName | Drafter" = "model"
) -> Method:
    """Beam search with drafts: the same tokens, beams and scores as `beam_search`, in fewer passes of the target.

    Law: exact: beam search; token-identical to transformers' in float32.
    Paper: none; the layer rule is that of shared noise in `dsbd` without the noise.

    A layer passes when the target's own next beams are among the drafts; the first layer that does not is emitted all the
    same and ends the turn.

    Args:
        beams: live beams per step.
        draft_beams: draft nodes per layer, at least `beams`; a few more make layers pass. None: `beams` + 2.
        depth: draft layers per pass of the target; "auto": as many as pay for themselves on this machine, by what a pass
            costs and how often layers pass (without a draft model: 4).
        drafter: "model" drafts beams with the draft model; "prompt_lookup", "suffix_match" and "token_recycling" need
            none and draft a chain or a tree under each beam; or the drafter of any other recipe, whose trees then grow
            under each beam: ``sb.opt_tree().parts(pair.target, pair.draft).drafter``.
    """
    at_least_one(beams=beams)
    check_depth(depth)
    draft_beams = drafted(beams, draft_beams, drafter)
    build = speculative(beams, draft_beams, depth, drafter, LAW)
    return Method(
        "speculative_beam_search", LAW, beams, build, needs_draft=drafter == "model", greedy=True, search=True
    )


def drafted(beams: int, draft_beams: int | None, drafter: "DrafterName | Drafter" = "model") -> int:
    """Draft nodes per layer: those that were asked for, or some more than beams. Fewer let no layer pass."""
    chains = drafter in ("prompt_lookup", "suffix_match")
    refuse_ignored(not chains, f"drafter {drafter!r}", draft_beams=draft_beams)
    if draft_beams is None:
        return beams + 2
    at_least_one(draft_beams=draft_beams)
    if drafter == "model" and draft_beams < beams:
        raise BadSetting(
            f"draft_beams is {draft_beams}, beams is {beams}; a layer can pass only if draft_beams >= beams"
        )
    return draft_beams


def speculative(
    beams: int,
    draft_beams: int,
    depth: Depth,
    drafter: "DrafterName | Drafter",
    law: str,
    rule: Rule | None = None,
) -> Build:
    """The parts of a speculative search, also of one that draws; `rule` is that of a search with so many beams."""
    judge = rule or SearchRule(beams)
    make = _drafter_of(drafter, beams, draft_beams, 4 if depth == "auto" else depth)
    by_model = partial(BeamDrafter, beams=beams, search=True)

    def build(target: LM | None, draft: LM | None) -> Parts:
        costly = draft if drafter == "model" else None
        control = depth_control(depth, beams, draft_beams, target, costly, by_model, judge)
        return Parts(make(target, draft), judge, control, law)

    return build


def _drafter_of(
    drafter: "DrafterName | Drafter", beams: int, draft_beams: int, depth: int
) -> Callable[[LM | None, LM | None], Drafter]:
    """The drafter of that name for the target and the draft model, or the part itself."""
    if not isinstance(drafter, str):
        if not is_part(drafter, Drafter):
            what = f"the class {drafter.__name__}" if isinstance(drafter, type) else repr(drafter)
            raise BadSetting(f"drafter is {what}; it must be one of {', '.join(get_args(DrafterName))}, or a part")
        return lambda target, draft: drafter
    one_of("drafter", drafter, get_args(DrafterName))
    memory: dict[int, Successors] = {}

    def recycling(target: LM | None, draft: LM | None) -> Drafter:
        assert target is not None
        table = memory.setdefault(target.vocab, Successors.empty(target.vocab))
        return TokenRecycling(table, likeliest(max(draft_beams // beams, 1) * depth))

    def by_model(target: LM | None, draft: LM | None) -> Drafter:
        assert draft is not None
        return BeamDrafter(draft, beams, search=True)

    return {
        "model": by_model,
        "prompt_lookup": lambda target, draft: PromptLookup(),
        "suffix_match": lambda target, draft: SuffixMatch(),
        "token_recycling": recycling,
    }[drafter]
