"""Heads that draft from the last hidden state of a scored node and the tokens after it."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from specbeam.core.records import FINAL
from specbeam.models.heads.arrays import Logits, PerNode, PerRow, Rows, States, StatesAbove, TargetStates
from specbeam.models.heads.head import DraftRows, Head, described_taps, wanted_below
from specbeam.models.heads.trees import ScoredTrees

UNLIMITED = 1_000  # depth of heads that make all drafts by one network


class FeatureSizes(NamedTuple):
    """The sizes of a head on one feature."""

    width: int  # size of the target's hidden states
    vocab: int  # tokens of the target
    draft_vocab: int  # tokens that the head gives logits for
    depth: int  # number of successive drafts with laws of their own; deeper drafts use the last law


class FeatureHead(Head):
    """A head that drafts from the feature of the nearest scored node above and the tokens below that node.

    It passes a state from node to node, which begins as the output of `start` for the feature.
    """

    def __init__(self, sizes: FeatureSizes) -> None:
        super().__init__()
        self.sizes = sizes

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Head.taps`: the input of the target's head."""
        return (FINAL,)

    @property
    def described(self) -> dict[str, str]:
        return {
            "kind": f"{type(self).__name__}: reads one hidden state",
            "drafts": str(self.sizes.depth) if self.sizes.depth < UNLIMITED else "of any depth, by one network",
            "reads": described_taps(self.taps),
        }

    @property
    def states_size(self) -> int:
        return self.sizes.width

    def features(self, states: TargetStates) -> Rows:
        """See `Head.features`: the states themselves."""
        return states.to(next(self.parameters()).dtype)

    def start(self, features: Rows) -> States:
        """Return the states at scored nodes."""
        return features

    def step(self, far: int, states: StatesAbove, tokens: PerRow) -> States:
        """Return the states at nodes `far` below a scored one, from their parents' states and their own tokens."""
        raise NotImplementedError

    def logits(self, far: int, states: States) -> Logits:
        """Return the logits of the token below nodes `far` below a scored one, 1 to `depth`, from their states."""
        raise NotImplementedError

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        parents = trees.above(trees.columns)
        states = self.start(self.features(trees.states_at(self.taps)))
        found = []
        for far in range(1, min(depth, self.sizes.depth) + 1):
            states = self.step(far, trees.at(states, parents), trees.tokens)
            nodes = wanted_below(trees, wanted, far)
            found.append(DraftRows(nodes, self.logits(far, states.flatten(0, 1)[nodes])))
        return found


class Residual(nn.Module):
    """A residual layer: x + silu(W x + b); with `shrinks`, the skip connection has a linear map, too."""

    def __init__(self, reads: int, width: int, shrinks: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(reads, width)
        self.res_connection = nn.Linear(reads, width) if shrinks else nn.Identity()

    def forward(self, x: Float[Tensor, "*rows reads"]) -> Rows:
        """Return the rows after the layer."""
        return self.res_connection(x) + nn.functional.silu(self.linear(x))
