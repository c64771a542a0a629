"""What all heads are: modules that draft from hidden states of a target."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from specbeam.core.records import FINAL
from specbeam.models.heads.layers import View
from specbeam.models.heads.trees import ScoredTrees


class DraftRows(NamedTuple):
    """What a head makes of the nodes of trees, if the target has scored no more than what is a given number of nodes above.

    Row d of several stands for drafts d + 1 deep: the target has scored the nodes d + 1 or more above, and no others.
    """

    nodes: Int64[Tensor, " drafts"]  # row * length + column, ascending
    logits: Float[Tensor, "drafts draft_vocab"]  # of the tokens below
    # Logits of the odds that a draft below is accepted, if the head has any.
    confidence: Float[Tensor, " drafts"] | None = None
    # What the head takes for the target's last hidden states there.
    estimates: Float[Tensor, "drafts size"] | None = None


class Head(nn.Module):
    """A draft head.

    Attributes:
        tokens: int64[draft_vocab], the target's token for each of the head's, ascending; None: they are the same.
    """

    tokens: Int64[Tensor, " draft_vocab"] | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states of the target that the head reads, see `Needs.columns`."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the head's own weights are."""
        raise NotImplementedError

    @property
    def described(self) -> dict[str, str]:
        """What the head is, as people read it: the name of each thing, and what it is."""
        raise NotImplementedError

    @property
    def states_size(self) -> int:
        """The size of the target's hidden states at all taps together."""
        raise NotImplementedError

    def features(self, states: Float[Tensor, "*rows states"]) -> Float[Tensor, "*rows width"]:
        """Return the features of nodes that the target has scored, from its hidden states there."""
        raise NotImplementedError

    def drafts(self, trees: ScoredTrees, depth: int, wanted: Bool[Tensor, "rows length"]) -> list[DraftRows]:
        """Return what the head drafts below the wanted nodes of scored trees, as drafts 1 to `depth` deep.

        Gradients flow through it. A draft d deep needs d nodes above, so deeper drafts have fewer nodes.
        """
        raise NotImplementedError

    def other_readings(self, layers: int) -> "Iterator[tuple[str, Head]]":
        """Yield heads of the same weights that differ from this one in one thing that writers of heads disagree about.

        Args:
            layers: number of layers of the target.
        """
        return iter(())


def moved_taps(taps: tuple[int, ...], offset: int, layers: int) -> tuple[int, ...]:
    """Return the hidden states `offset` layers from these; () if there are none. What the target's head reads stays.

    Args:
        layers: number of layers of the target.
    """
    between = [tap + offset for tap in taps if tap != FINAL]
    if not between or min(between) < 0 or max(between) > layers:
        return ()
    return tuple(tap if tap == FINAL else tap + offset for tap in taps)


def described_taps(taps: tuple[int, ...]) -> str:
    """Return which hidden states a head reads, as people read it."""
    layers = [str(tap) for tap in taps if tap != FINAL]
    entering = [f"what enters layers {', '.join(layers)}"] if layers else []
    return ", ".join([*entering, *(["what the target's head reads"] if FINAL in taps else [])])


def described_rope(rope: Mapping[str, Any]) -> str:
    """Return the positions of a head, as people read it."""
    scaling = "" if rope["rope_type"] == "default" else f", scaled ({rope['rope_type']})"
    return f"rotated, base {rope['rope_theta']:g}{scaling}"


def described_views(views: Sequence[View]) -> dict[str, str]:
    """Return how far back the rows of layers look, as people read it; nothing if all of them look everywhere."""
    if not any(view.within or view.is_causal for view in views):
        return {}
    layers = []
    for number, view in enumerate(views):
        origin = "each row" if view.from_row else "the first row of a draft"
        window = f"a window of {view.within} from {origin}" if view.within else "everything above"
        causal = ", rows of a block those before them" if view.is_causal else ""
        layers.append(f"layer {number} {window}{causal}")
    return {"looks at": "; ".join(layers)}


def wanted_below(trees: ScoredTrees, wanted: Bool[Tensor, "rows length"], depth: int) -> Int64[Tensor, " nodes"]:
    """Return the wanted nodes, row * length + column, that have at least `depth` nodes above them."""
    return (wanted & (trees.depths >= depth)).flatten().nonzero()[:, 0]
