"""Optional parts of layers: compiled layers run all families, and this record holds the parts that only some have."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specbeam.core.compiling.compiler import Array, borrowed, borrowed_views
from specbeam.core.steps import open_step, step, verb
from specbeam.engines.arrays import Floats
from specbeam.engines.families import Activation, Architecture, CrossParts, LayerParts

SILU, GELU_TANH, GELU, RELU = range(4)
_NUMBER_OF: dict[Activation, int] = {"silu": SILU, "gelu tanh": GELU_TANH, "gelu": GELU, "relu": RELU}


@borrowed
class Extras(NamedTuple):
    """Parts of layers other than matrices and the norms before sublayers; a missing part is an array without columns.

    Settings shared by all layers are plain numbers: branching on them costs nothing compared with a product.
    """

    # float32[layers, ...]: weight of the norm of attention's output, or of the sum; see `Weights`
    after_attention: Array
    after_inner: Array  # float32[layers, ...]: of the inner layer's output, or of the sum
    wide_norms: Array  # float32[layers, (heads + kv_heads) * size]: of all queries, and of all keys of a row
    out_bias: Array  # float32[layers, hidden]
    up_bias: Array  # float32[layers, columns] of gate and up
    down_bias: Array  # float32[layers, hidden]
    scales: Array  # float32[layers]: factor of scores of attention
    ropes: Array  # int64[layers]: the table of rotary angles; -1: no positions
    # float32[layers, heads, distances], or of one layer for all: see `families.Architecture.biases`
    biases: Array
    by_place: bool  # whether `biases` are by the position of the key instead of its distance
    cap: np.float32  # see `families.Numbers.attention_cap`
    residual: np.float32  # factor of a sublayer's output
    activation: int  # SILU, GELU_TANH, GELU or RELU
    gated: bool  # whether the inner layer has a gate
    parallel: bool  # whether the inner layer reads the input of attention instead of its output
    norm_of_sum: bool  # whether norms after a sublayer are of the sum with its input
    router: Array | None  # float32[layers, panels, words]: the matrix that scores experts; None without experts
    experts: int  # number of experts, whose matrices follow each other in the panels of a layer; 0: none
    chosen: int  # number of experts of a row
    divides: bool  # whether the weights of the chosen experts are divided by their sum


def numbers_of(weight: Tensor) -> Floats:
    """Return a weight as a contiguous array, without a copy if it is contiguous and float32."""
    return weight.detach().contiguous().float().numpy()


def stacked(parts: Sequence[LayerParts] | Sequence[CrossParts], name: str) -> Floats:
    """Return a weight of all layers, stacked."""
    return np.stack([numbers_of(getattr(one, name)) for one in parts])


def extras_of(parts: list[LayerParts], of: Architecture, router: Array | None) -> Extras:
    """Return the extras of layers, given the weights of each layer and the panels of the routers."""
    return Extras(
        after_attention=stacked(parts, "after_attention"),
        after_inner=stacked(parts, "after_inner"),
        wide_norms=stacked(parts, "wide_norms"),
        out_bias=stacked(parts, "out_bias"),
        up_bias=stacked(parts, "up_bias"),
        down_bias=stacked(parts, "down_bias"),
        scales=np.array(of.scales, dtype=np.float32),
        ropes=np.array(of.ropes, dtype=np.int64),
        biases=_biases_of(of, len(parts)),
        by_place=of.by_place,
        cap=np.float32(of.numbers.attention_cap),
        residual=np.float32(of.numbers.residual),
        activation=_NUMBER_OF[of.activation],
        gated=of.family.gated,
        parallel=of.parallel,
        norm_of_sum=of.family.norm_of_sum,
        router=router,
        experts=len(parts[0].router),
        chosen=of.chosen,
        divides=of.divides,
    )


def _biases_of(of: Architecture, layers: int) -> np.ndarray:
    if not of.biases:
        return np.zeros((layers, of.heads, 0), dtype=np.float32)
    return np.stack([numbers_of(one) for one in of.biases])


_extras = borrowed_views(Extras)


@verb(0)
@step
def router_of_layers(router: Array | None, first: int, stop: int) -> Array | None:
    """Return the router of the layers first .. stop; None without experts."""
    return router


@router_of_layers.of(np.ndarray)
@step
def view_of_router(router: Array, first: int, stop: int) -> Array:
    """Return the router of the layers first .. stop, as a view."""
    return router[first:stop]


@open_step
def layers_of_extras(extras: Extras, first: int, stop: int) -> Extras:
    """Return the extras of the layers first .. stop, as views."""
    return _extras(
        extras.after_attention[first:stop],
        extras.after_inner[first:stop],
        extras.wide_norms[first:stop],
        extras.out_bias[first:stop],
        extras.up_bias[first:stop],
        extras.down_bias[first:stop],
        extras.scales[first:stop],
        extras.ropes[first:stop],
        extras.biases if len(extras.biases) == 1 else extras.biases[first:stop],
        extras.by_place,
        extras.cap,
        extras.residual,
        extras.activation,
        extras.gated,
        extras.parallel,
        extras.norm_of_sum,
        router_of_layers(extras.router, first, stop),
        extras.experts,
        extras.chosen,
        extras.divides,
    )
