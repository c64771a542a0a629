"""PLAN: ending a draft between two layers: the interface of controllers that do so, and their decisions as steps.

After each layer that could be continued, including the last one, the controller is asked whether to continue. Compiled runs
and Python ask at the same points, so controllers consume their random numbers alike.
"""

from typing import Any, Protocol, runtime_checkable

from specbeam.core.control.confidence import is_sure, learn_threshold
from specbeam.core.control.planning import BY_COIN, BY_SURVIVAL, BY_THRESHOLD, NO_STOP, StopSpec
from specbeam.core.control.survival import SURVIVAL, gains_by_drafting, learn_survival
from specbeam.core.control.thompson import learn_rate, toss
from specbeam.core.session import Session
from specbeam.core.steps import step


@runtime_checkable
class Stopping(Protocol):
    """A controller that may end a draft between layers.

    Optional members: the property `between_layers`, False if the controller's settings rule this out; and the method
    `stops`, which returns a `StopSpec` with which steps decide in its place (see `stops_of`).
    """

    def more(self, session: Session, depth: int, confidence: float) -> bool:
        """Return whether to draft another layer after the `depth` layers so far.

        Args:
            confidence: the largest draft probability of a token of the newest layer.
        """
        ...


def stops_between_layers(controller: object) -> bool:
    """Return whether a controller with its settings may end a draft between layers."""
    return isinstance(controller, Stopping) and getattr(controller, "between_layers", True)


@step
def begin_draft(stop: StopSpec) -> None:
    """Forget the layers of the last draft."""
    stop.counted[0] = 0
    if stop.kind == BY_SURVIVAL:
        stop.learnt[SURVIVAL] = 1.0


@step
def goes_on(stop: StopSpec, confidence: float) -> bool:
    """Return whether to continue the draft after a layer whose likeliest token has this draft probability."""
    if stop.kind == BY_THRESHOLD:
        return is_sure(stop, confidence)
    if stop.kind == BY_COIN:
        return toss(stop, confidence)
    if stop.kind == BY_SURVIVAL:
        return gains_by_drafting(stop, confidence)
    return True


@step
def learn_stop(stop: StopSpec, drafted: int, accepted: int) -> None:
    """Learn from a turn that accepted `accepted` of `drafted` layers."""
    if stop.kind == BY_THRESHOLD:
        learn_threshold(stop, drafted, accepted)
    elif stop.kind == BY_COIN:
        learn_rate(stop, drafted, accepted)
    elif stop.kind == BY_SURVIVAL:
        learn_survival(stop, drafted, accepted)


def stops_of(controller: object, session: Session, tosses: int) -> Any:
    """Return the `StopSpec` with which steps end the drafts of a session; None if only Python can end them.

    A subclass of a built-in controller that overrides `more` decides in Python, unless it also overrides `stops`.

    Args:
        tosses: maximum number of random decisions until the next call.
    """
    if not stops_between_layers(controller):
        return NO_STOP
    for kind in type(controller).__mro__:
        if "more" in vars(kind):
            return controller.stops(session, tosses) if "stops" in vars(kind) else None  # type: ignore[attr-defined]
    return None
