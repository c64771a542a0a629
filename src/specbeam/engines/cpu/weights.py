"""The weights of the layers of a compiled model."""

from typing import NamedTuple

from specbeam.core.compiling.compiler import Array, borrowed, borrowed_views
from specbeam.core.steps import open_step
from specbeam.engines.cpu.extras import Extras, layers_of_extras


@borrowed
class CrossWeights(NamedTuple):
    """The weights of the cross-attention sublayers, stacked as in `Weights`; no panels if the layers have none."""

    before: Array  # float32[layers, ...]: weights of the norm before the sublayer
    after: Array  # float32[layers, ...]: of the norm after it, see `Extras.norm_of_sum`
    query: Array  # in panels
    query_bias: Array  # float32[layers, heads * size], or of no columns
    out: Array  # in panels
    out_bias: Array  # float32[layers, hidden], or of no columns


@borrowed
class Weights(NamedTuple):
    """The weights of all layers, stacked. Matrices are in panels; matrices that read the same rows are joined.

    The weight of an RMSNorm is float32[hidden]; of a LayerNorm float32[2 * hidden], the weight and then the bias; of a
    missing norm float32[0].
    """

    before_attention: Array  # float32[layers, ...]: weights of the norm before attention
    before_inner: Array  # float32[layers, ...]: weights of the norm before the inner layer
    bias: Array  # float32[layers, columns] of qkv; no columns if the model has no bias
    # float32[layers, 2, size]: weights of the norms of each head's queries and keys; of no size if there are none
    head_norms: Array
    qkv: Array  # float32, uint32, uint16, int32, int16 or int8[layers, panels, words], see `in_panels`
    out: Array
    gate_up: Array  # without a gate: up alone
    down: Array
    inner: int  # columns of the inner layer
    extras: Extras
    cross: CrossWeights

    @property
    def matrices(self) -> tuple[Array, Array, Array, Array]:
        """The panels of all matrices except cross-attention's."""
        return self.qkv, self.out, self.gate_up, self.down


_weights = borrowed_views(Weights)
_cross_weights = borrowed_views(CrossWeights)


@open_step
def layers_of_weights(weights: Weights, first: int, stop: int) -> Weights:
    """Return the weights of the layers first .. stop, as views."""
    return _weights(
        weights.before_attention[first:stop],
        weights.before_inner[first:stop],
        weights.bias[first:stop],
        weights.head_norms[first:stop],
        weights.qkv[first:stop],
        weights.out[first:stop],
        weights.gate_up[first:stop],
        weights.down[first:stop],
        weights.inner,
        layers_of_extras(weights.extras, first, stop),
        _cross_weights(
            weights.cross.before[first:stop],
            weights.cross.after[first:stop],
            weights.cross.query[first:stop],
            weights.cross.query_bias[first:stop],
            weights.cross.out[first:stop],
            weights.cross.out_bias[first:stop],
        ),
    )
