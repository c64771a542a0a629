"""A pass of a session that is alone, inside a loop, whatever runs the model."""

import inspect
from typing import Any

from specbeam.kernels.compiling import AVAILABLE, Array
from specbeam.lm.compiled.one_lane import OneLane, extended
from specbeam.lm.gpu.lane import OneGpuLane, gpu_extended

if AVAILABLE:
    from numba.extending import overload

AnyLane = OneLane | OneGpuLane


def scored_alone(one: AnyLane, tokens: Array, parents: Array, answered: int) -> Array:
    """`extended` or `gpu_extended`, by the kind of the lane."""
    by: Any = gpu_extended if isinstance(one, OneGpuLane) else extended
    return by(one, tokens, parents, answered)


if AVAILABLE:

    @overload(scored_alone)
    def _of_kind(one: Any, tokens: Any, parents: Any, answered: Any) -> Any:
        by = gpu_extended if one.instance_class is OneGpuLane else extended

        def found(one: Any, tokens: Any, parents: Any, answered: Any) -> Any:
            return by(one, tokens, parents, answered)

        return inspect.unwrap(found)  # tests wrap functions into type checks
