"""Controllers by name, for recipes whose drafts may be of any length."""

from typing import Literal

from specbeam.control.confidence import SureDraft, TrackedThreshold
from specbeam.control.fixed import FixedShape
from specbeam.control.survival import Survival
from specbeam.control.thompson import Thompson
from specbeam.errors import BadSetting
from specbeam.session import Controller

ControllerName = Literal["fixed", "confidence", "tracked", "thompson", "calibrated", "survival"]


def controller_of(
    chosen: "ControllerName | Controller", depth: int, width: int, fixed: FixedShape | None = None
) -> Controller:
    """A part, or the controller of that name for drafts of at most `depth` layers; `fixed` is what that name stands for."""
    known: dict[str, Controller] = {
        "fixed": fixed or FixedShape(depth, width),
        "confidence": SureDraft(most=depth, width=width),
        "tracked": TrackedThreshold(most=depth, width=width),
        "thompson": Thompson(most=depth, width=width),
        "calibrated": Thompson(calibrated=True, mode="round", most=depth, width=width),
        "survival": Survival(most=depth, width=width),
    }
    if isinstance(chosen, Controller):
        return chosen
    if chosen not in known:
        raise BadSetting(f"controller is {chosen!r}; it must be one of {', '.join(known)}, or a part")
    return known[chosen]
