"""The recipe for one sequence whose drafts come from the target without some of its sublayers: SWIFT and its relatives."""

from typing import Literal

from specbeam.core.control.confidence import SureDraft
from specbeam.core.draft.caterpillar import Caterpillar
from specbeam.core.draft.children import Independent
from specbeam.core.draft.tree import Branching, TreeDrafter
from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.lm import LM
from specbeam.core.session import Controller, Parts, Rule, law_of
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.skip_search import SkipSearch
from specbeam.models.skipping import Skipping, skipping_model
from specbeam.models.sublayers import Sublayers
from specbeam.recipes.compose import ControllerName, DraftKind, RuleName, controller_maker, rule_of
from specbeam.recipes.method import Method, refuse_ignored, require_at_least_one


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
    """Draft with the target itself without some of its sublayers, which are found while texts are decoded; no draft model.

    Law: exact: plain sampling
    Paper: arXiv 2410.06916 (SWIFT), arXiv 2309.08168 (Draft & Verify), CLaSp (ACL 2025)

    Steps of the papers: the search lm/skip_search.py, lm/clasp.py; drafts on the target's cache lm/skipping.py,
    engines/cpu/; siblings draft/caterpillar.py; verify/walk.py.

    Args:
        skip: which sublayers drafts do without. "bayes": those that a search finds, by random sets and Bayesian
            optimisation. "random": the same by random sets alone. "clasp": whole layers, by dynamic programming. "exit": all
            after the first `layers`. Or a set, such as "a3 m3 m5": the attention of layer 3 and the inner layers of 3 and 5.
        ratio: share of sublayers that are left out, for "bayes", "random" and "clasp" (there of layers). None: 0.45.
        layers: number of first layers that run, for "exit".
        every: number of turns after which "clasp" chooses anew. None: 16.
        task: a name for the kind of texts; of each kind a target keeps on disk what a search has found.
        search: settings of a search (`specbeam.SkipSearch`). None: those of the paper.
        depth: maximum number of layers of a draft.
        siblings: whether each token of a draft has siblings, the more the less sure the draft is (at most nine).
        sure: for controller="confidence": a draft ends after a token of lower odds. None: 0.8.
        rule: "path", "traversal" or "match", as in `speculative_sampling`; or a part. With "match" a seed gives the same
            text whatever a search has found before; otherwise a text also depends on the sets in use.
        controller: the controller that chooses the length of a draft: "confidence", or another one as in
            `speculative_sampling`; "tracked" is that of Draft & Verify.
    """
    require_at_least_one(depth=depth)
    refuse_ignored(controller == "confidence", f"controller {controller!r}", sure=sure)
    if sure is not None and not 0 <= sure <= 1:
        raise BadSetting(f"sure is {sure!r}; it is a probability, in [0, 1]")
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
                "swift leaves sublayers of the target out; that needs a transformers model without a memory, and this is "
                f"{type(target).__name__}"
            )
        if isinstance(target, EncoderDecoderLM):
            raise NotSupported(
                f"swift leaves sublayers of decoder-only models out, and {target.model_name} has an encoder; take a method "
                "with a draft model, or one that needs none"
            )
        model = skipping_model(target, settings)
        return Parts(TreeDrafter(model, growth), judge, make_controller(target, model), law)

    return Method("swift", law, 1, build)
