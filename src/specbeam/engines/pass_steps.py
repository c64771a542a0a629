"""Steps that run a pass of one session by itself, with the engine for CPUs or the one for GPUs."""

from typing import Any

from specbeam.core.cycles import cycles
from specbeam.core.steps import Array, compiled_as, step
from specbeam.engines.cpu.cache_steps import CacheArrays, extend_cache
from specbeam.engines.gpu.cache import GpuCacheArrays, extend_gpu_cache

AnyCacheArrays = CacheArrays | GpuCacheArrays


def extend_any_cache(cache: AnyCacheArrays, tokens: Array, parents: Array, wanted: Array) -> Array:
    """Call `extend_cache` or `extend_gpu_cache`, by the type of the cache."""
    extend: Any = extend_gpu_cache if isinstance(cache, GpuCacheArrays) else extend_cache
    return extend(cache, tokens, parents, wanted)


@compiled_as(extend_any_cache)
def _compiled_extend_any_cache(cache: Any, tokens: Any, parents: Any, wanted: Any) -> Any:
    extend = extend_gpu_cache if cache.instance_class is GpuCacheArrays else extend_cache

    def call(cache: Any, tokens: Any, parents: Any, wanted: Any) -> Any:
        return extend(cache, tokens, parents, wanted)

    return call


PASSES, CYCLES = range(2)  # indices of `spent`


@step
def run_pass(cache: Any, tokens: Array, parents: Array, wanted: Array, spent: Array) -> Array:
    """Run one pass of a single session, and return the logits of the `wanted` nodes, float32[wanted, vocab].

    Args:
        cache: the session's cache in the model, `CacheArrays` or `GpuCacheArrays`.
        tokens, parents: int64[nodes] of the forest.
        wanted: int64[wanted], forest nodes, ascending.
        spent: int64[2]; 1 is added to the passes, and the pass's duration to the cycles.
    """
    began = cycles()
    rows = extend_any_cache(cache, tokens, parents, wanted)
    spent[PASSES] += 1
    spent[CYCLES] += cycles() - began
    return rows


@step
def now() -> int:
    """Return the present count of the processor's clock, in cycles; see `core.cycles`."""
    return cycles()
