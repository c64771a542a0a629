"""What layers have besides what every layer has: the same compiled layers run all families, and look here for the rest."""

from typing import NamedTuple

import numpy as np

from specbeam.engines.families import Activation, Architecture, LayerParts
from specbeam.kernels.compiling import Array, compiled

SILU, GELU_TANH, GELU = range(3)
_NUMBER_OF: dict[Activation, int] = {"silu": SILU, "gelu tanh": GELU_TANH, "gelu": GELU}


class Extras(NamedTuple):
    """What layers have besides matrices and the norms in front of their sublayers; arrays lack columns where they have none.

    What all layers share is no array: a branch on it costs nothing beside a product.
    """

    after_attention: Array  # float32[layers, hidden]: weight of the norm of what attention adds
    after_inner: Array  # float32[layers, hidden]: of what the inner layer adds
    wide_norms: Array  # float32[layers, (heads + kv_heads) * size]: of all queries, and of all keys of a row
    out_bias: Array  # float32[layers, hidden]
    up_bias: Array  # float32[layers, columns] of gate and up
    down_bias: Array  # float32[layers, hidden]
    scales: Array  # float32[layers]: what scores of attention are multiplied with
    ropes: Array  # int64[layers]: the table of rotary angles; -1: no positions
    cap: np.float32  # see `families.Numbers.attention_cap`
    residual: np.float32  # what leaves a sublayer is multiplied with this
    activation: int  # SILU, GELU_TANH or GELU
    gated: bool  # whether the inner layer has a gate
    parallel: bool  # whether the inner layer reads what attention reads


def extras_of(parts: list[LayerParts], of: Architecture) -> Extras:
    """Return the extras of layers, given the weights of each."""

    def stacked(name: str) -> np.ndarray:
        return np.stack([getattr(one, name).detach().contiguous().float().numpy() for one in parts])

    return Extras(
        after_attention=stacked("after_attention"),
        after_inner=stacked("after_inner"),
        wide_norms=stacked("wide_norms"),
        out_bias=stacked("out_bias"),
        up_bias=stacked("up_bias"),
        down_bias=stacked("down_bias"),
        scales=np.array(of.scales, dtype=np.float32),
        ropes=np.array(of.ropes, dtype=np.int64),
        cap=np.float32(of.numbers.attention_cap),
        residual=np.float32(of.numbers.residual),
        activation=_NUMBER_OF[of.activation],
        gated=of.family.gated,
        parallel=of.parallel,
    )


@compiled
def layers_of_extras(extras: Extras, first: int, stop: int) -> Extras:
    """Return the extras of the layers first .. stop, as views."""
    return Extras(
        extras.after_attention[first:stop],
        extras.after_inner[first:stop],
        extras.wide_norms[first:stop],
        extras.out_bias[first:stop],
        extras.up_bias[first:stop],
        extras.down_bias[first:stop],
        extras.scales[first:stop],
        extras.ropes[first:stop],
        extras.cap,
        extras.residual,
        extras.activation,
        extras.gated,
        extras.parallel,
    )
