"""New EAGLE heads (arXiv 2401.15077), and FSPAD heads: the same with feature sampling and partial alignment (2408.15562).

EAGLE-1 and EAGLE-2 differ in the tree that is drafted, not in the head. No code of FSPAD is public. Its two modules are our
reading of the paper's text: the drawn token changes the feature through a gate, and a small network separates the states
that estimate the target's from the states that make logits, so that the two goals interfere less.
"""

from typing import TYPE_CHECKING

from jaxtyping import Int64
from torch import Tensor

from specbeam.core import FINAL
from specbeam.lab.train.eagle3 import first_weights, layer_sizes, own_embedding, shared_head
from specbeam.lab.train.head_files import target_rope
from specbeam.lab.train.plan import ALIGNMENT, SAMPLING, HeadPlan
from specbeam.models.heads import PairTrunk, Rotary, TrunkShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_GRADIENT = 0.5  # share of the logits' gradient that reaches the states


def new_fspad(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> PairTrunk:
    """Return a new FSPAD head with the modules of the plan; see `new_eagle`."""
    return _with_modules(target, plan, tokens, plan.modules != ALIGNMENT, plan.modules != SAMPLING)


def new_eagle(target: "PreTrainedModel", plan: HeadPlan, tokens: Int64[Tensor, " draft_vocab"] | None) -> PairTrunk:
    """Return a new EAGLE head as wide as the target; its states estimate the target's last hidden states.

    Its embedding is the target's, and so is the matrix that makes logits, unless the head has a separate vocabulary.
    """
    return _with_modules(target, plan, tokens, has_sampling=False, has_alignment=False)


def _with_modules(
    target: "PreTrainedModel",
    plan: HeadPlan,
    tokens: Int64[Tensor, " draft_vocab"] | None,
    has_sampling: bool,
    has_alignment: bool,
) -> PairTrunk:
    sizes = layer_sizes(target, plan)
    shape = TrunkShape(
        sizes=sizes,
        layers=plan.layers,
        taps=(FINAL,),
        target_width=sizes.width,
        pairs="projection",
        draft_vocab=plan.draft_vocab,
        norms_output=False,
        sampling=2 * sizes.width if has_sampling else 0,
        alignment=sizes.width if has_alignment else 0,
        logit_gradient=LOGIT_GRADIENT if has_alignment else 1.0,
    )
    logits = shared_head(target, tokens)
    trunk = PairTrunk(shape, Rotary(sizes, *target_rope(target)), own_embedding(target), logits, tokens)
    first_weights(trunk)
    return trunk
