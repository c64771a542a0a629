"""PLAN: whether a draft ends between two layers, for steps: what each controller that may end one is asked, and learns.

A controller is asked after each layer that can go on, the last one too. So a compiled loop and Python ask alike, and coins
fall alike.
"""

from typing import Any

from specbeam.core.control.confidence import is_sure, learn_threshold
from specbeam.core.control.stops import BY_COIN, BY_SURVIVAL, BY_THRESHOLD, NO_STOP, StopSpec
from specbeam.core.control.survival import SURVIVAL, is_worth_more, learn_survival
from specbeam.core.control.thompson import learn_rate, toss
from specbeam.core.session import Session
from specbeam.core.steps import step


@step
def begin_draft(stop: StopSpec) -> None:
    """Forget the layers of the last draft."""
    stop.counted[0] = 0
    if stop.kind == BY_SURVIVAL:
        stop.learnt[SURVIVAL] = 1.0


@step
def goes_on(stop: StopSpec, confidence: float) -> bool:
    """Return whether to draft on after a layer whose surest token has this draft probability."""
    if stop.kind == BY_THRESHOLD:
        return is_sure(stop, confidence)
    if stop.kind == BY_COIN:
        return toss(stop, confidence)
    if stop.kind == BY_SURVIVAL:
        return is_worth_more(stop, confidence)
    return True


@step
def learn_stop(stop: StopSpec, drafted: int, accepted: int) -> None:
    """Learn from a turn of which `accepted` of the `drafted` layers passed."""
    if stop.kind == BY_THRESHOLD:
        learn_threshold(stop, drafted, accepted)
    elif stop.kind == BY_COIN:
        learn_rate(stop, drafted, accepted)
    elif stop.kind == BY_SURVIVAL:
        learn_survival(stop, drafted, accepted)


def stops_of(controller: object, session: Session, tosses: int) -> Any:
    """Return the `StopSpec` that ends the drafts of a session in place of a controller; None if only Python can end them.

    A controller that is derived from one of ours and decides in its own way decides in Python.

    Args:
        tosses: the most coins that are tossed before this is called again.
    """
    if not hasattr(controller, "more") or not getattr(controller, "between_layers", True):
        return NO_STOP
    for kind in type(controller).__mro__:
        if "more" in vars(kind):
            return controller.stops(session, tosses) if "stops" in vars(kind) else None  # type: ignore[attr-defined]
    return None
