"""Which controllers loops know."""

from specbeam import kernels
from specbeam.control.fixed import FixedShape
from specbeam.control.worth import DepthByCost, ShapeByValue
from specbeam.session import Session


def plan_of(session: Session) -> kernels.Plan | None:
    """What a session's controller decides by. None unless loops know it: one that is derived may decide otherwise."""
    controller = session.parts.controller
    if type(controller) is FixedShape or type(controller) is DepthByCost or type(controller) is ShapeByValue:
        return controller.for_loops(session)
    return None


def deepest_of(plan: kernels.Plan) -> int:
    """The most layers that it may draft."""
    return int(plan.depth if plan.depth >= 0 else plan.seconds.shape[1] - 1)
