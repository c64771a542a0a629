"""The recipe for drafts by the target itself with some sublayers skipped: SWIFT and its relatives."""

from typing import Literal

from specbeam.core.control.confidence import SureDraft
from specbeam.core.draft.caterpillar import Caterpillar
from specbeam.core.draft.children import Independent
from specbeam.core.draft.tree import Branching, TreeDrafter
from specbeam.core.errors import NotSupported
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Parts, Rule, law_of
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.skip_search import SkipSearch
from specbeam.models.skipping import Skipping, skipping_model
from specbeam.models.sublayers import Sublayers
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, controller_maker, rule_of
from specbeam.recipes.method import Method, recipe, refuse_ignored, require_at_least_one, require_probability


@recipe
def swift(
    skip: "Literal['bayes', 'random', 'clasp', 'exit'] | Sublayers | str" = "bayes",
    ratio: float | None = None,
    layers: int | None = None,
    every: int | None = None,
    task: str | None = None,
    search: SkipSearch | None = None,
    depth: int = 25,
    siblings: bool = True,
    sure: float | None = None,
    rule: "RuleName | Rule" = "path",
    controller: "ControllerName | Controller" = "confidence",
) -> Method:
    """Draft with the target itself, skipping sublayers that are chosen while decoding; no draft model.

    Law: exact: plain sampling
    Paper: arXiv 2410.06916 (SWIFT), arXiv 2309.08168 (Draft & Verify), CLaSp (ACL 2025)

    Code: the search models/skip_search.py and models/clasp.py; drafts on the target's cache models/skipping.py and
    engines/cpu/; siblings core/draft/caterpillar.py; the rule core/verify/walk.py.

    Args:
        skip: the sublayers to skip. "bayes": found by random search and Bayesian optimisation. "random": found by random
            search. "clasp": whole layers, found by dynamic programming. "exit": all layers after the first `layers`. Or a
            set, such as "a3 m3 m5": the attention of layer 3 and the MLPs of layers 3 and 5.
        ratio: share of sublayers to skip, for "bayes" and "random", or of layers, for "clasp". None: 0.45.
        layers: number of first layers that run, for "exit".
        every: number of turns between two choices of "clasp". None: 16.
        task: a name for the kind of texts. The result of a search is saved on disk for each target and task.
        search: settings of the search (`specbeam.SkipSearch`). None: those of the paper.
        depth: maximum number of layers of a draft.
        siblings: whether each draft token has siblings, up to nine; the less certain the draft, the more.
        sure: for controller="confidence": a draft ends after a token of lower draft probability. None: 0.8.
        rule: as in `speculative_sampling`. With "match" a seed gives the same text whatever earlier searches found; with
            other rules the text also depends on the skipped sublayers.
        controller: the controller that chooses the length of a draft: "confidence", or another one as in
            `speculative_sampling`. Draft & Verify uses "tracked".
    """
    require_at_least_one(depth=depth)
    refuse_ignored(controller == "confidence", f"controller {controller!r}", sure=sure)
    require_probability(sure=sure)
    settings = Skipping(skip, ratio, layers, every, task, search)
    growth = Caterpillar() if siblings else Branching((1,), Independent())
    drafts = DraftKind("swift", depth, layers=() if siblings else (1,))
    judge = rule_of(rule, drafts)
    law = law_of(judge)
    part = SureDraft(0.8 if sure is None else float(sure), most=depth) if controller == "confidence" else controller
    make_controller = controller_maker(part, drafts, drafter_of=lambda lm: TreeDrafter(lm, growth), rule=judge)

    def build(target: LM | None, draft: LM | None) -> Parts:
        if not isinstance(target, HuggingFaceLM):
            raise NotSupported(
                "swift skips sublayers of the target, which needs a transformers model without a memory, and this "
                f"target is a {type(target).__name__}"
            )
        if isinstance(target, EncoderDecoderLM):
            raise NotSupported(
                f"swift skips sublayers of decoder-only models, and {target.model_name} has an encoder; choose another "
                "method"
            )
        model = skipping_model(target, settings)
        return Parts(TreeDrafter(model, growth), judge, make_controller(target, model), law)

    return Method("swift", law, 1, build)
