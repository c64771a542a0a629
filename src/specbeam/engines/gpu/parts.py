"""The part of a model that a pass on a GPU runs: skipped sublayers, learned rows, and the hidden states that it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from specbeam.core.records import ExtraInputs
from specbeam.engines.arrays import Integers, IntegerTensor, RowTensor

NO_LAYERS: frozenset[int] = frozenset()
BUFFERS = (64, 256, 1024)  # numbers of rows of buffers that are kept


class LearntRows:
    """The extra rows of a pass whose inputs are learned, in fixed buffers that captured graphs read.

    Args:
        inputs: the inputs of these rows.
        rows: maximum number of rows of a pass.
        like: a tensor on the device of the model.

    Attributes:
        kinds: int64[rows]: 1 plus the kind of each extra row; 0 for all other rows.
        anchors: int64[rows]: for each extra row the row above the chain that it is in.
    """

    def __init__(self, inputs: ExtraInputs, rows: int, like: Tensor) -> None:
        self.inputs = inputs
        self.kinds = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.anchors = torch.zeros(rows, dtype=torch.int64, device=like.device)

    def put(self, kinds: Integers, anchors: Integers) -> None:
        """Write the kinds and anchors of the rows of a pass."""
        for goal, numbers in ((self.kinds, kinds), (self.anchors, anchors)):
            goal[: len(numbers)] = torch.from_numpy(numbers).to(goal.device)

    def entered(self, x: RowTensor, factor: float = 1.0) -> RowTensor:
        """Return the rows of a pass with these rows replaced by their inputs.

        Args:
            x: the inputs of the layer at which these rows enter, with any numbers in these rows.
            factor: factor of embeddings.
        """
        own = self.inputs
        kinds = self.kinds[: len(x)]
        which = (kinds - 1).clamp(min=0)
        if own.embeddings is not None:
            made = own.embeddings.to(x).index_select(0, which) * factor
        else:
            assert own.make is not None
            above = x.index_select(0, self.anchors[: len(x)])
            made = own.make(above.to(own.model.dtype), which)
        return torch.where((kinds > 0)[:, None], made.to(x), x)


@dataclass(frozen=True, eq=False)
class GivenRows:
    """The rows of a pass whose embeddings are given by a session; see `Session.vectors`."""

    places: IntegerTensor
    vectors: Float[Tensor, "n width"]


@dataclass(frozen=True, eq=False)
class PassPart:
    """The part of a model that a pass runs. Captured graphs are kept by object, so equal passes share one.

    Attributes:
        columns: the hidden states that the pass returns, side by side; see `Needs.columns`.
        states: [rows, width], the buffer to which it writes them; None without any.
        edges: the first number of each column in `states`, and the end of the last.
        no_attention, no_inner: the layers whose attention, or inner layer, is skipped.
        learnt: extra rows with learned inputs; None if there are none.
        given: rows with given embeddings; None if there are none. Such passes are not captured.
    """

    columns: tuple[int, ...] = ()
    states: Tensor | None = None
    edges: tuple[int, ...] = (0,)
    no_attention: frozenset[int] = NO_LAYERS
    no_inner: frozenset[int] = NO_LAYERS
    learnt: LearntRows | None = None
    given: GivenRows | None = None

    def keep(self, column: int, x: RowTensor) -> None:
        """Write the hidden states of a column, if the pass returns them."""
        if self.states is None:
            return
        for wanted, (start, stop) in zip(self.columns, pairwise(self.edges), strict=True):
            if wanted == column:
                self.states[: len(x), start:stop] = x

    def embedded(self, x: RowTensor, factor: float) -> RowTensor:
        """Return the embeddings of tokens with the rows replaced that have others.

        Args:
            factor: factor of these embeddings.
        """
        if self.given is not None:
            x[self.given.places] = (self.given.vectors * factor).to(x)
        if self.learnt is not None and self.learnt.inputs.layer == 0:
            x = self.learnt.entered(x, factor)
        return x

    def before_layer(self, x: RowTensor, number: int) -> RowTensor:
        """Return the input of a layer, with extra rows that enter there; keep it if the pass returns it."""
        self.keep(number, x)
        if self.learnt is not None and number > 0 and self.learnt.inputs.layer == number:
            x = self.learnt.entered(x)
        return x

    def with_given(self, places: Sequence[int], vectors: Sequence[Tensor], like: Tensor) -> "PassPart":
        """Return the same part with embeddings for some rows, on the device of `like`."""
        if not places:
            return self
        on_device = torch.tensor(places, device=like.device)
        return replace(self, given=GivenRows(on_device, torch.stack([one.to(like.device) for one in vectors])))


WHOLE = PassPart()  # all sublayers, on tokens


class KnownParts:
    """The parts of a model that its sessions have asked for, each with its buffers.

    Args:
        like: a tensor with the dtype and device of hidden states.
        width_of: returns the width of the hidden states of a column.
        no_attention, no_inner: see `PassPart`.
    """

    def __init__(
        self,
        like: Tensor,
        width_of: Callable[[int], int],
        no_attention: frozenset[int] = NO_LAYERS,
        no_inner: frozenset[int] = NO_LAYERS,
    ) -> None:
        self.like = like
        self.width_of = width_of
        self._first = PassPart(no_attention=no_attention, no_inner=no_inner) if no_attention or no_inner else WHOLE
        self._known: dict[tuple[tuple[int, ...], ExtraInputs | None, int], PassPart] = {}

    def skipping(self, no_attention: frozenset[int], no_inner: frozenset[int]) -> "KnownParts":
        """Return the parts of the model without some sublayers."""
        return KnownParts(self.like, self.width_of, no_attention, no_inner)

    def of(self, columns: tuple[int, ...], inputs: ExtraInputs | None, rows: int) -> PassPart:
        """Return the part that returns these hidden states, with extra rows of these inputs.

        Args:
            rows: number of rows of a pass for which its buffers must have room. Few rows have smaller buffers.
        """
        if not columns and inputs is None:
            return self._first
        size = next((size for size in BUFFERS if rows <= size), rows)
        key = columns, inputs, size
        known = self._known.get(key)
        if known is not None:
            return known
        edges = (*accumulate(map(self.width_of, columns), initial=0),)
        states = self.like.new_empty(size, edges[-1]) if columns else None
        learnt = None if inputs is None else LearntRows(inputs, size, self.like)
        part = replace(self._first, columns=columns, states=states, edges=edges, learnt=learnt)
        if size in BUFFERS:
            self._known[key] = part
        return part


class HiddenRows:
    """The hidden states of a session's forest nodes, on the device.

    Args:
        like: a tensor with the dtype and device of hidden states.
    """

    def __init__(self, like: Tensor) -> None:
        self.rows = like.new_empty(0, 0)

    @torch.inference_mode()
    def make_room(self, nodes: int, width: int) -> None:
        """Make room for `nodes` nodes with states of this width."""
        if nodes > len(self.rows):
            larger = self.rows.new_empty(2 * nodes, width)
            if self.rows.numel():
                larger[: len(self.rows)] = self.rows
            self.rows = larger

    @torch.inference_mode()
    def write(self, nodes: Integers, states: RowTensor, places: Integers) -> None:
        """Copy the states in these places to some nodes."""
        if len(nodes):
            self.rows[self._at(nodes)] = states[self._at(places)]

    def of(self, nodes: Integers) -> Float[Tensor, "nodes width"]:
        """Return a copy of the states of some nodes, in float32."""
        return self.rows[self._at(nodes)].to(torch.float32, copy=True)

    @torch.inference_mode()
    def follow(self, nodes: Integers, before: Integers) -> None:
        """Keep the states of the nodes `before` as the states of `nodes`, which replace them."""
        if len(nodes):
            self.rows[self._at(nodes)] = self.rows[self._at(before)].clone()

    def _at(self, numbers: Integers) -> "slice | Int64[Tensor, ' n']":
        """Return an index of these rows: a slice if they are consecutive."""
        if len(numbers) == 0 or (np.diff(numbers) == 1).all():
            first = int(numbers[0]) if len(numbers) else 0
            return slice(first, first + len(numbers))
        return torch.from_numpy(numbers).to(self.rows.device)
