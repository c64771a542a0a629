"""A pass of a session that is alone, inside a loop, whatever runs the model."""

from typing import Any

from specbeam.core.cycles import cycles
from specbeam.core.steps import Array, compiled_as, step
from specbeam.engines.cpu.cache_steps import CacheArrays, extended
from specbeam.engines.gpu.cache import GpuCacheArrays, gpu_extended

AnyCacheArrays = CacheArrays | GpuCacheArrays


def scored_alone(one: AnyCacheArrays, tokens: Array, parents: Array, answered: int) -> Array:
    """`extended` or `gpu_extended`, by the kind of the cache."""
    by: Any = gpu_extended if isinstance(one, GpuCacheArrays) else extended
    return by(one, tokens, parents, answered)


@compiled_as(scored_alone)
def _of_kind(one: Any, tokens: Any, parents: Any, answered: Any) -> Any:
    by = gpu_extended if one.instance_class is GpuCacheArrays else extended

    def found(one: Any, tokens: Any, parents: Any, answered: Any) -> Any:
        return by(one, tokens, parents, answered)

    return found


PASSES, CYCLES = range(2)  # of what is spent


@step
def run_pass(one: Any, tokens: Array, parents: Array, answered: int, spent: Array) -> Array:
    """Return the logits of the forest nodes from `answered` on, after one pass of a session that is alone.

    Args:
        one: a session in a model.
        tokens, parents: of the forest.
        spent: int64[2], to which the pass and its cycles are added.
    """
    began = cycles()
    rows = scored_alone(one, tokens, parents, answered)
    spent[PASSES] += 1
    spent[CYCLES] += cycles() - began
    return rows


@step
def now() -> int:
    """Return the processor's clock, see `core.cycles`."""
    return cycles()
