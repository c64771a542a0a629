"""Extra rows that enter a pass between two layers, computed from hidden states of the rows above them."""

from dataclasses import dataclass

import numpy as np
import torch

from specbeam.core.errors import NotSupported
from specbeam.core.records import LEARNT, ExtraInputs
from specbeam.engines.arrays import IntegerTensor, RowTensor
from specbeam.engines.kv.trie import Feed


@dataclass(frozen=True, eq=False)
class LateRows:
    """Rows of a session that enter a pass between two layers.

    Attributes:
        inputs: the inputs of these rows.
        places: int64[n], their indices in the pass.
        anchors: int64[n], the indices of the rows that they are computed from.
        kinds: int64[n], see `ExtraInputs.make`.
    """

    inputs: ExtraInputs
    places: IntegerTensor
    anchors: IntegerTensor
    kinds: IntegerTensor

    @property
    def layer(self) -> int:
        """The first layer that processes these rows."""
        return self.inputs.layer

    @torch.inference_mode()
    def write(self, states: RowTensor) -> None:
        """Write the inputs of these rows into the inputs of the layer, which has all rows of the pass."""
        assert self.inputs.make is not None
        device = states.device
        above = states[self.anchors.to(device)].to(self.inputs.model.dtype)
        made = self.inputs.make(above, self.kinds.to(device))
        states[self.places.to(device)] = made.to(states)


def late_rows(inputs: ExtraInputs | None, feed: Feed, start: int) -> LateRows | None:
    """Return the rows of a feed that enter between layers; None if there are none.

    Args:
        start: index of the feed's first row in the pass.

    Raises `NotSupported` if the node above an extra row was stored by an earlier pass.
    """
    if inputs is None or inputs.layer == 0 or not len(feed.learnt):
        return None
    anchors = feed.anchors
    if (anchors < 0).any():
        raise NotSupported(
            "an extra row that enters between layers needs the hidden states of the node above it, and an earlier pass has "
            "scored that node"
        )
    kinds = LEARNT - feed.tokens[feed.learnt]
    numbers = (np.array(feed.learnt + start), np.array(anchors + start), kinds)
    return LateRows(inputs, *(torch.from_numpy(each) for each in numbers))
