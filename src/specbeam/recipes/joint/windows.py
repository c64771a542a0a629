"""The recipe that refines blocks by a target's windows ahead and behind. It changes the law of the output on purpose."""

from specbeam.core.control.fixed import FixedShape
from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.laws.named import CHANGED
from specbeam.core.lm import LM
from specbeam.core.session import Parts
from specbeam.models.heads.hidden_transfer import HiddenTransfer
from specbeam.recipes.joint.refined_block import BlockOfGuesses, RefinementRule
from specbeam.recipes.method import Method, RequestInfo, recipe, require_at_least_one, require_probability

LAW = f"{CHANGED}windows ahead and behind vote on each token of a block"


@recipe
def coral(
    size: int = 16,
    ahead: int | None = None,
    behind: int | None = None,
    threshold: float = 0.5,
    refinements: int = 0,
) -> Method:
    """Refine a block of tokens pass by pass, by votes of the target's windows ahead and behind: COrAL.

    Law: approximate: changes the output law on purpose, for fewer passes
    Paper: arXiv 2410.09675 (COrAL)

    The target is one that `specbeam train coral` has taught, with its window as draft; its windows are rows of its last
    layers, which a turn runs after the pass. Each pass emits at least one token. Nothing is drawn: tokens are the likeliest
    by the votes, and accepted by a fixed threshold. Turns run one by one in Python, where the windows run.

    Code: windows models/heads/window.py; blocks, votes and acceptance recipes/joint/refined_block.py.

    Args:
        size: maximum number of tokens of a block.
        ahead: number of window rows ahead; None: all that the target has learned.
        behind: number of tokens behind, each token itself included; None: all that the target has learned; 0: none.
        threshold: minimum share of the votes, by weight, that must support a token for it to be accepted, in [0, 1]. A lower
            threshold accepts more.
        refinements: minimum number of passes that an accepted token has survived unchanged. With more, each token is looked
            at more often, and fewer are accepted per pass.
    """
    require_at_least_one(size=size)
    if ahead is not None:
        require_at_least_one(ahead=ahead)
    require_probability(threshold=threshold)
    for name, value in (("behind", behind), ("refinements", refinements)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise BadSetting(f"{name} is {value!r}; it must be an integer of at least 0")

    def build(target: LM | None, draft: LM | None) -> Parts:
        head = _head_of(draft)
        rule = RefinementRule(
            head,
            size,
            _at_most("ahead", ahead, head.depth),
            _at_most("behind", behind, head.behind),
            threshold,
            refinements,
        )
        return Parts(BlockOfGuesses(), rule, FixedShape(size, 1), LAW)

    def check(request: RequestInfo) -> None:
        if request.audited:
            raise NotSupported("an audit tests that the text follows the target's law, and coral changes it on purpose")

    needed = "windows behind, trained with the target"
    return Method("coral", LAW, 1, build, needs_draft=True, head=needed, greedy=True, plain=False, check=check)


def _head_of(draft: LM | None) -> HiddenTransfer:
    """Return the head of the windows. Raises `NotSupported` if the draft is none."""
    head = getattr(draft, "head", None)
    if not isinstance(head, HiddenTransfer) or not head.behind:
        found = type(draft).__name__ if head is None else head.described["kind"].split(":")[0]
        raise NotSupported(
            f"coral needs a target with windows behind, and the draft of this pair is of kind {found}: train a target "
            "(`specbeam train coral`), and load it with its folder `window` as draft (--draft)"
        )
    return head


def _at_most(name: str, asked: int | None, learnt: int) -> int:
    """Return a number of window rows, by default all. Raises `BadSetting` if the target has learned fewer."""
    if asked is not None and asked > learnt:
        raise BadSetting(f"{name} is {asked}, but the target has learned {learnt}; give at most this number")
    return learnt if asked is None else asked
