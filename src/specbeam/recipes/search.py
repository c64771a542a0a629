"""Recipes for beam search, token-identical to transformers."""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from specbeam.core.control.fixed import FixedShape
from specbeam.core.control.pace import DraftsIfFaster
from specbeam.core.draft.beams import BeamDrafter, NoDraft
from specbeam.core.draft.items import ItemLevels
from specbeam.core.draft.lookup import PromptLookup, SuffixMatch
from specbeam.core.draft.recycle import Successors, TokenRecycling, likeliest
from specbeam.core.errors import BadSetting, one_of
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Drafter, Parts, Rule, is_part, lacking
from specbeam.core.verify.search import SearchRule
from specbeam.recipes.depth import Depth, check_depth, depth_control, depth_of_trees, paces_of
from specbeam.recipes.method import Build, Method, recipe, refuse_ignored, require_at_least_one

DrafterName = Literal["model", "prompt_lookup", "suffix_match", "token_recycling", "items"]
_CHAINS = ("prompt_lookup", "suffix_match")  # drafters of a single continuation of each beam
LAW = "exact: beam search; the beams and scores of transformers in float32"


@recipe
def beam_search(
    beams: int = 4, *, drafter: Drafter | None = None, rule: Rule | None = None, controller: Controller | None = None
) -> Method:
    """Beam search without a draft: the tokens, beams and scores of transformers'
    ``generate(num_beams=beams, do_sample=False)``.

    Law: exact: beam search; token-identical to transformers' in float32.
    Paper: none.

    Beams share the KV cache of their common past, as a trie: the prompt is computed once, and reordering beams copies
    nothing.

    Args:
        beams: number of live beams per step.
        drafter, rule, controller: your own parts in place of the recipe's (`Method.with_parts`).
    """
    require_at_least_one(beams=beams)
    parts = Parts(NoDraft(), SearchRule(beams), FixedShape(0, 0), LAW)
    method = Method("beam_search", LAW, beams, lambda target, draft: parts, greedy=True, search=True)
    return method.with_parts(drafter, rule, controller)


@recipe
def speculative_beam_search(
    beams: int = 4,
    draft_beams: int | None = None,
    depth: Depth = "auto",
    drafter: "DrafterName | Drafter" = "model",
    *,
    rule: Rule | None = None,
    controller: Controller | None = None,
) -> Method:
    """Beam search with drafts: the same tokens, beams and scores as `beam_search`, in fewer passes of the target.

    Law: exact: beam search; token-identical to transformers' in float32.
    Paper: none; the rule for a layer is that of `dsbd` with shared noise, without the noise.

    A layer extends every beam by one token. It passes if all beams that the target continues are among the drafts. The first
    layer that does not pass is emitted too, and ends the turn.

    Args:
        beams: number of live beams per step.
        draft_beams: number of draft nodes per layer, at least `beams`. A few more let more layers pass. None: `beams` + 2.
        depth: number of draft layers per pass of the target. "auto": maximises the expected gain per second on this
            machine, by the measured cost of a pass and by how often layers pass; at most 4 without a draft model. Drafts
            that do not pay are left out, and are tried again ever more rarely.
        drafter: "model": drafts beams with the draft model. "prompt_lookup", "suffix_match", "token_recycling": draft a
            chain or a tree under each beam, without a draft model. "items": drafts the next levels of a catalogue. Or the
            drafter of another recipe, which drafts a tree under each beam:
            ``sb.opt_tree().parts(pair.target, pair.draft).drafter``.
        rule, controller: your own parts in place of the recipe's (`Method.with_parts`).
    """
    require_at_least_one(beams=beams)
    check_depth(depth)
    draft_beams = checked_draft_beams(beams, draft_beams, drafter)
    build = build_of_search(beams, draft_beams, depth, drafter, LAW)
    needs_draft = drafter == "model"
    method = Method("speculative_beam_search", LAW, beams, build, needs_draft=needs_draft, greedy=True, search=True)
    return method.with_parts(rule=rule, controller=controller)


def checked_draft_beams(beams: int, draft_beams: int | None, drafter: "DrafterName | Drafter" = "model") -> int:
    """Return the number of draft nodes per layer: `draft_beams`, or `beams` + 2 if it is None.

    Raises `BadSetting` if the drafter ignores the number, or if it is too small for any layer to pass.
    """
    refuse_ignored(drafter not in (*_CHAINS, "items"), f"drafter {drafter!r}", draft_beams=draft_beams)
    if draft_beams is None:
        return beams + 2
    require_at_least_one(draft_beams=draft_beams)
    if drafter == "model" and draft_beams < beams:
        raise BadSetting(
            f"draft_beams is {draft_beams}, beams is {beams}; a layer can pass only if draft_beams >= beams"
        )
    return draft_beams


def build_of_search(
    beams: int,
    draft_beams: int,
    depth: Depth,
    drafter: "DrafterName | Drafter",
    law: str,
    rule: Rule | None = None,
) -> Build:
    """Return a function that makes the parts of speculative beam search, or of transformers' beam sampling.

    Args:
        beams: number of live beams.
        draft_beams: number of draft nodes per layer.
        depth: number of draft layers, or "auto".
        drafter: the drafter or its name, as in `speculative_beam_search`.
        law: the law of the output, for reports.
        rule: the rule that judges the drafts; None: `SearchRule(beams)`.
    """
    judge = rule or SearchRule(beams)
    make_drafter = _drafter_maker(drafter, beams, draft_beams, 4 if depth == "auto" else depth)
    by_model = partial(BeamDrafter, beams=beams, search=True)

    nodes_per_layer = beams if drafter in _CHAINS else draft_beams

    def build(target: LM | None, draft: LM | None) -> Parts:
        made = make_drafter(target, draft)
        control: Controller
        if depth == "auto" and drafter != "model":
            planned = depth_of_trees(target, made, beams, nodes_per_layer)
            control = DraftsIfFaster(planned, type(made).__name__, paces_of(target, None))
        else:
            control = depth_control(depth, beams, draft_beams, target, draft, by_model, judge)
        return Parts(made, judge, control, law)

    return build


def _drafter_maker(
    drafter: "DrafterName | Drafter", beams: int, draft_beams: int, depth: int
) -> Callable[[LM | None, LM | None], Drafter]:
    """Return a function that makes the drafter from the target and the draft model.

    Raises `BadSetting` if `drafter` is neither a part nor a name.
    """
    if not isinstance(drafter, str):
        if not is_part(drafter, Drafter):
            names = ", ".join(get_args(DrafterName))
            raise BadSetting(f"drafter is {lacking(drafter, Drafter)}; it must be one of {names}, or a part")
        return lambda target, draft: drafter
    one_of("drafter", drafter, get_args(DrafterName))
    tables: dict[int, Successors] = {}  # by vocabulary size

    def recycling(target: LM | None, draft: LM | None) -> Drafter:
        assert target is not None
        table = tables.setdefault(target.vocab, Successors.empty(target.vocab))
        return TokenRecycling(table, likeliest(max(draft_beams // beams, 1) * depth))

    def by_model(target: LM | None, draft: LM | None) -> Drafter:
        assert draft is not None
        return BeamDrafter(draft, beams, search=True)

    return {
        "model": by_model,
        "prompt_lookup": lambda target, draft: PromptLookup(),
        "suffix_match": lambda target, draft: SuffixMatch(),
        "token_recycling": recycling,
        "items": lambda target, draft: ItemLevels(),
    }[drafter]
