"""Windows of a model with memory, one for each segment of each branch of a text tree, and the places of nodes in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from specbeam.core.forest import Forest, KnownRows
from specbeam.core.ranked import whole_rows

Vector = Float[Tensor, " size"]  # a memory or an embedding row


@dataclass(eq=False)
class WindowOwner:
    """The session of a window in the model's caches.

    Attributes:
        prompt: tokens; -1 stands for the single row of `vectors`.
        failure: the error of the text's session.
    """

    prompt: list[int]
    vectors: Mapping[Any, Float[Tensor, "1 size"]]
    state: dict[Any, Any] = field(default_factory=dict)
    failure: Exception | None = None


@dataclass(frozen=True, eq=False)
class Past:
    """The state that a segment inherits from earlier ones. Branches share the memories of their common past.

    Attributes:
        memories: the last memories, float[size] each, oldest first.
        tail: the last tokens of the previous segment, enough for sensory tokens and queries.
    """

    memories: tuple[Vector, ...] = ()
    tail: tuple[int, ...] = ()


class Opening(NamedTuple):
    """The start of the segment after a full one."""

    past: Past
    recalled: Vector | None  # by a query of the tail; None without memory


class Ask(NamedTuple):
    """A request for the rows of the new nodes in a window's forest."""

    owner: WindowOwner
    forest: Forest


class Answer(NamedTuple):
    """The rows of the new nodes of an `Ask`."""

    logits: Float[Tensor, "nodes vocab"]
    hidden: Float[Tensor, "nodes size"]


class Window:
    """One segment of a branch of a text tree, or of several branches that diverge inside the segment.

    Args:
        owner: the window's session in the model.
        past: the state that the segment inherits.
        root: the token of the last row of the owner's prompt.

    Attributes:
        forest: the window's nodes of this turn; roots are nodes whose rows are known or not needed.
        asked: number of these nodes that the model has scored.
        nodes: the text place of each node; None for rows that are not text.
        is_open: whether the model holds its cache.
    """

    def __init__(self, owner: WindowOwner, past: Past, root: int) -> None:
        self.owner = owner
        self.past = past
        self.forest = with_known_roots([root])
        self.nodes: list[TextPlace | None] = [None]
        self.asked = 0
        self.is_open = True

    def add(self, token: int, parent: int, place: "TextPlace | None") -> int:
        """Add a node, and return its number."""
        self.forest = self.forest.grown([token], [parent])
        self.nodes.append(place)
        return self.forest.size - 1

    @property
    def is_behind(self) -> bool:
        """Whether some of its nodes are not scored yet."""
        return self.forest.size > max(self.asked, len(self.forest.known.nodes))

    def restart(self, roots: "Sequence[TextPlace]") -> None:
        """Begin a new turn with these places as roots."""
        self.forest = with_known_roots([place.tokens[-1] for place in roots])
        self.nodes = [*roots]
        self.asked = len(roots)
        for number, place in enumerate(roots):
            place.node = number


def with_known_roots(tokens: list[int]) -> Forest:
    """Return a forest of roots that the model need not score."""
    roots = np.arange(len(tokens))
    return Forest.rooted(tokens)._replace(
        known=KnownRows(roots, whole_rows(np.zeros((len(tokens), 0), dtype=np.float32)))
    )


@dataclass(eq=False)
class TextPlace:
    """The place of a text node in a window.

    Attributes:
        window, node: the window, and the node's number in it.
        tokens: the tokens of its segment up to and including the node.
        row: the logits after it; None until they are computed.
        opening: the start of the segment after it; None until it is known, or if its segment is not full.
        next: the window of that segment, if this turn has one.
    """

    window: Window
    node: int
    tokens: tuple[int, ...]
    row: Float[Tensor, " vocab"] | None = None
    opening: Opening | None = None
    next: Window | None = None


class Anchor(NamedTuple):
    """A live beam: the last place on its path, and the tokens after it that have no place yet."""

    place: TextPlace
    pending: tuple[int, ...]

    def followed_by(self, token: int) -> "Anchor":
        """Return the anchor with one more token."""
        return Anchor(self.place, (*self.pending, token))


@dataclass(eq=False)
class TextNode:
    """A node of the text tree, which gets its place as soon as its window is open.

    Attributes:
        above: its parent; None if its place is known from the start.
    """

    above: "TextNode | None"
    token: int
    place: TextPlace | None = None


@dataclass(eq=False)
class TextTree:
    """The state of a session: the windows of live beams, and the nodes of this turn.

    Attributes:
        beams: the live beams, which are the roots of the turn's forest.
        nodes: one for each known node of the turn's forest, in its order.
        passed: nodes between the beams' places and the turn's roots: tokens of turns that this model did not score.
        peak: the largest number of rows that all windows together have stored at the same time.
    """

    beams: list[Anchor]
    nodes: list[TextNode] = field(default_factory=list)
    passed: list[TextNode] = field(default_factory=list)
    peak: int = 0

    @property
    def windows(self) -> list[Window]:
        """The windows of all nodes and beams, without duplicates; some may be closed."""
        places = [node.place for node in (*self.passed, *self.nodes) if node.place is not None]
        found = [beam.place.window for beam in self.beams]
        found += [place.window for place in places]
        found += [place.next for place in places if place.next is not None]
        return [*dict.fromkeys(found)]

    @property
    def stored(self) -> list[WindowOwner]:
        """The sessions of these windows that the model holds caches for."""
        return [window.owner for window in self.windows if window.is_open and window.owner.state]

    def enter(self, forest: Forest) -> list[TextNode]:
        """Add the new nodes of a forest, and return the nodes that have no place yet, parents first.

        The pending tokens of a beam become nodes above its root.
        """
        fresh: list[TextNode] = []
        for number in range(len(self.nodes), forest.size):
            parent = int(forest.parents[number])
            if parent >= 0:
                node = TextNode(self.nodes[parent], int(forest.tokens[number]))
                fresh.append(node)
            else:
                anchor = self.beams[number]
                node = TextNode(None, anchor.place.tokens[-1], anchor.place)
                for token in anchor.pending:
                    node = TextNode(node, token)
                    fresh.append(node)
                    self.passed.append(node)
            self.nodes.append(node)
        return fresh

    def anchor_of(self, forest: Forest, node: int) -> Anchor:
        """Return the anchor of a node of a forest, which need not have been entered."""
        if node < len(self.nodes):
            place = self.nodes[node].place
            assert place is not None
            return Anchor(place, ())
        parent = int(forest.parents[node])
        if parent < 0:
            return self.beams[node]
        return self.anchor_of(forest, parent).followed_by(int(forest.tokens[node]))
