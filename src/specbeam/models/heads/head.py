"""The base of all heads: modules that draft from hidden states of a target."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specbeam.core.records import FINAL
from specbeam.models.heads.arrays import Logits, Odds, PerNode, PerRow, Rows, TargetStates, TokenMap
from specbeam.models.heads.layers import BASE, Rotary, View
from specbeam.models.heads.trees import ScoredTrees


class DraftRows(NamedTuple):
    """Logits that a head gives below nodes of trees, as drafts of one depth.

    A draft of depth d is d nodes below the nearest node that the target has scored.
    """

    nodes: PerRow  # row * length + column, ascending
    logits: Logits  # logits of the tokens below
    # Logits of the acceptance probability of a draft below, if the head estimates them.
    confidence: Odds | None = None
    # Estimates of the target's last hidden states there.
    estimates: Rows | None = None


class Head(nn.Module):
    """A draft head.

    Attributes:
        tokens: int64[draft_vocab], the target's token for each of the head's, ascending; None: they are the same.
    """

    tokens: TokenMap = None

    @property
    def taps(self) -> tuple[int, ...]:
        """The hidden states of the target that the head reads, see `Needs.columns`; (): none."""
        return ()

    @property
    def device(self) -> torch.device:
        """The device of the head's weights."""
        return next(self.parameters()).device

    @property
    def described(self) -> dict[str, str]:
        """Descriptions of the head's properties by name, for users."""
        raise NotImplementedError

    @property
    def states_size(self) -> int:
        """The total size of the target's hidden states at all taps."""
        return 0

    def features(self, states: TargetStates) -> Rows:
        """Return the features of scored nodes, from the target's hidden states there."""
        raise NotImplementedError

    def drafts(self, trees: ScoredTrees, depth: int, wanted: PerNode) -> list[DraftRows]:
        """Return the drafts below the wanted nodes of scored trees, 1 to `depth` deep.

        It supports gradients. A draft d deep needs d nodes above, so deeper drafts have fewer nodes.
        """
        raise NotImplementedError

    def other_readings(self, layers: int) -> "Iterator[tuple[str, Head]]":
        """Yield heads with the same weights that differ in one property about which writers of heads disagree.

        Args:
            layers: number of layers of the target.
        """
        return iter(())


class LayeredHead(Head):
    """A head with its own layers, which read features made from hidden states of the target.

    Args:
        shape: has at least `taps`, `target_width` (the size of a hidden state) and `sizes` (of a layer).
        rotary: the rotation by positions.
        embedding: float[vocab, width], the target's or the head's own.
        head: float[draft_vocab, width], the output matrix, the target's or the head's own; None: there is no single
            one.
        tokens: see `Head.tokens`.
    """

    shape: Any
    rotary: Any

    def __init__(
        self, shape: Any, rotary: nn.Module, embedding: nn.Embedding, head: nn.Linear | None, tokens: TokenMap = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = tokens
        self.embed_tokens = embedding
        if head is not None:
            self.lm_head = head
        self.rotary = rotary

    @property
    def taps(self) -> tuple[int, ...]:
        return self.shape.taps

    @property
    def states_size(self) -> int:
        return len(self.taps) * self.shape.target_width

    def changed(self, rope: dict[str, Any] | None = None, **shape: Any) -> Any:
        """Return a head that shares all weights with this one, with another shape or other positions.

        Args:
            rope: the parameters of its positions; None: the same.
            shape: fields of its shape.
        """
        head = copy.copy(self)
        head._modules = dict(self._modules)
        head.shape = replace(self.shape, **shape)
        if rope is not None:
            head.rotary = Rotary(self.shape.sizes, rope, self.rotary.positions).to(self.device)
        return head

    def with_moved_taps(self, layers: int) -> Iterator[tuple[str, Any]]:
        """Yield readings with hidden states of neighbouring layers; see `other_readings`."""
        for offset, name in ((-1, "earlier"), (1, "later")):
            if moved := moved_taps(self.taps, offset, layers):
                yield f"hidden states one layer {name}", self.changed(taps=moved)

    def with_usual_base(self) -> Iterator[tuple[str, Any]]:
        """Yield the reading with positions of the default base, if the head's base differs; see `other_readings`."""
        rope = self.rotary.rope
        if rope["rope_theta"] != BASE:
            yield f"positions of base {BASE:g}", self.changed({**rope, "rope_theta": BASE})


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits whose absolute values a hyperbolic tangent keeps below `cap`; None or 0: unchanged."""
    return torch.tanh(logits / cap) * cap if cap else logits


def moved_taps(taps: tuple[int, ...], offset: int, layers: int) -> tuple[int, ...]:
    """Return the hidden states `offset` layers away; () if there are none. The input of the target's head stays.

    Args:
        layers: number of layers of the target.
    """
    between = [tap + offset for tap in taps if tap != FINAL]
    if not between or min(between) < 0 or max(between) > layers:
        return ()
    return tuple(tap if tap == FINAL else tap + offset for tap in taps)


def described_taps(taps: tuple[int, ...]) -> str:
    """Return a description of the hidden states that a head reads."""
    layers = ", ".join(str(tap) for tap in taps if tap != FINAL)
    read = [f"the inputs of layers {layers}"] if layers else []
    if FINAL in taps:
        read.append("the input of the target's head")
    return ", ".join(read)


def described_rope(rope: Mapping[str, Any]) -> str:
    """Return a description of the positions of a head."""
    scaling = "" if rope["rope_type"] == "default" else f", scaled ({rope['rope_type']})"
    return f"rotated, base {rope['rope_theta']:g}{scaling}"


def described_views(views: Sequence[View]) -> dict[str, str]:
    """Return a description of the views of layers; nothing if all rows attend to everything."""
    if not any(view.within or view.is_causal for view in views):
        return {}
    layers = []
    for number, view in enumerate(views):
        origin = "each row" if view.from_row else "the first row of a draft"
        window = f"a window of {view.within} from {origin}" if view.within else "everything above"
        causal = ", rows of a block those before them" if view.is_causal else ""
        layers.append(f"layer {number} {window}{causal}")
    return {"looks at": "; ".join(layers)}


def wanted_below(trees: ScoredTrees, wanted: PerNode, depth: int) -> PerRow:
    """Return the wanted nodes, row * length + column, that have at least `depth` nodes above them."""
    return (wanted & (trees.depths >= depth)).flatten().nonzero()[:, 0]
