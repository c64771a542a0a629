"""Hidden Transfer: linear maps turn a token's state between two layers into states of later tokens (arXiv 2404.12022).

The paper's code is not public; where its text leaves a choice, the choice is ours.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from specbeam.core.records import ExtraInputs
from specbeam.models.heads.arrays import AnchorRows, Anchors, PerRow, Rows
from specbeam.models.heads.extra_rows import ExtraHead, StoredTrees
from specbeam.models.heads.trees import ScoredTrees

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HiddenTransfer(ExtraHead):
    """Linear maps, initialised as the identity.

    Args:
        depth: number of maps.
        layer: the layer whose inputs the maps read, and where their outputs enter.
        width: size of a hidden state.
        behind: number of tokens behind that the target has learned to predict likewise, each token itself included: COrAL's
            backward window (see heads/window.py).
    """

    def __init__(self, target: "PreTrainedModel", depth: int, layer: int, width: int, behind: int = 0) -> None:
        super().__init__(target, depth)
        self.layer = layer
        self.behind = behind
        maps = [nn.Linear(width, width) for _ in range(depth)]
        for one in maps:
            nn.init.eye_(one.weight)
            nn.init.zeros_(one.bias)
        self.maps = nn.ModuleList(maps)

    @property
    def inputs(self) -> ExtraInputs:
        return ExtraInputs(model=self.target, kinds=self.depth, layer=self.layer, make=self.make)

    @property
    def described(self) -> dict[str, str]:
        return {
            "kind": "HiddenTransfer: maps states to later tokens' states, in the target's own pass",
            "drafts": str(self.depth),
            "reads": f"the input of layer {self.layer}, where its rows enter",
            **({"predicts behind": f"{self.behind} tokens"} if self.behind else {}),
            **self.described_ranks,
        }

    def make(self, states: Rows, kinds: PerRow) -> Rows:
        """Return the states of extra rows of these kinds, from the states of the nodes above them."""
        if states.device.type == "cuda":  # a captured pass cannot look up which rows have a kind
            made = self.maps[0](states)
            for kind, one in enumerate(self.maps[1:], 1):
                made = torch.where((kinds == kind)[:, None], one(states), made)
            return made
        made = torch.empty_like(states)
        for kind, one in enumerate(self.maps):
            places = (kinds == kind).nonzero()[:, 0]
            made[places] = one(states[places])
        return made

    def rows(self, trees: ScoredTrees, anchors: Anchors, depth: int) -> AnchorRows:
        stored = StoredTrees(self.target, trees, self.layer)
        assert stored.states is not None
        above = trees.at(stored.states, anchors).to(next(self.maps.parameters()).dtype)
        made = torch.stack([one(above) for one in self.maps[:depth]], 2)
        return stored.last_states(anchors, made, self.layer)
