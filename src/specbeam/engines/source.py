"""Sources: the encoder inputs of one prompt, with the encoder's states."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64

from specbeam.core.errors import NotSupported
from specbeam.engines.arrays import SourceStates

InputName = Literal["input_ids", "input_features"]


@dataclass(eq=False)
class Source:
    """The source of one prompt, shared by all sessions of the prompt and all models that read it.

    Attributes:
        name: the encoder argument for the inputs.
        inputs: token ids or audio features; None if only states are given.
        states: encoded inputs, by encoder.
        given: states computed elsewhere, used for every encoder if there are no inputs.
        keeps: whether the states are kept after a session, for later sessions.
        after: the source that will be read next, if known, so that one pass may read both.
        ahead: cross-attention keys and values that were computed before a session needs them, by decoder.
    """

    name: InputName
    inputs: Int64[torch.Tensor, "1 length"] | Float[torch.Tensor, "1 channels frames"] | None
    states: dict[Hashable, SourceStates] = field(default_factory=dict)
    given: SourceStates | None = None
    keeps: bool = False
    after: "Source | None" = None
    ahead: dict[Hashable, Float32[np.ndarray, "frames columns"]] = field(default_factory=dict)

    @classmethod
    def of_tokens(cls, tokens: list[int]) -> "Source":
        """Return the source of a text."""
        return cls("input_ids", torch.tensor([tokens]))

    @classmethod
    def of_features(cls, features: Float[torch.Tensor, "channels frames"]) -> "Source":
        """Return the source of a window of audio."""
        return cls("input_features", features[None])

    @classmethod
    def of_states(cls, states: Float[torch.Tensor, "frames size"]) -> "Source":
        """Return a source of encoder states."""
        return cls("input_ids", None, given=states[None])

    @torch.inference_mode()
    def states_of(self, encoder: Any) -> SourceStates:
        """Return the encoder's states of the source. The encoder runs at most once, on this source only.

        Raises `NotSupported` if the source has neither inputs nor given states.
        """
        if encoder not in self.states:
            self.states[encoder] = self._encoded_by(encoder)
        return self.states[encoder]

    def _encoded_by(self, encoder: Any) -> torch.Tensor:
        if self.inputs is None:
            if self.given is None:
                raise NotSupported("a source has neither inputs nor states")
            return self.given
        weight = next(encoder.parameters())
        inputs = self.inputs.to(weight.device)
        if self.name == "input_features":
            inputs = inputs.to(weight.dtype)
        output = encoder(**{self.name: inputs})
        states: torch.Tensor = output[0]
        return states

    def forget(self, encoder: Any) -> None:
        """Drop an encoder's states unless `keeps` is set; a later reader encodes the source again."""
        if not self.keeps:
            self.states.pop(encoder, None)


def line_up(sources: Sequence[Source]) -> None:
    """Link each source to the next one, until `part` is called; earlier links are dropped."""
    each = list(dict.fromkeys(sources))
    for source in each:
        source.after = None
    for source, following in pairwise(each):
        source.after = following


def part(sources: Sequence[Source]) -> None:
    """Unlink sources, and drop unused states that were read ahead."""
    for source in sources:
        source.after = None
        source.ahead.clear()
        if not source.keeps:
            source.states.clear()


def in_line(sources: Sequence[Source], more: int) -> Iterator[Source]:
    """Yield sources without duplicates, and then up to `more` sources linked after the last one."""
    seen = dict.fromkeys(sources)
    yield from list(seen)
    following = sources[-1].after if sources else None
    for _ in range(more):
        if following is None:
            return
        if following not in seen:
            seen[following] = None
            yield following
        following = following.after


def grouped(line: Iterable[tuple[Source, int]], asked: Collection[Source], most: int) -> Iterator[list[Source]]:
    """Yield the sources of a line in groups to read together, of up to `most` rows or a single larger source.

    Sources that are not needed now may fill up the last group, but never begin a group.

    Args:
        line: sources with their numbers of rows.
        asked: sources that are needed now.
    """
    group: list[Source] = []
    rows = 0
    for source, own in line:
        if group and rows + own > most:
            yield group
            group = []
            rows = 0
        if not group and source not in asked:
            return
        group.append(source)
        rows += own
    if group:
        yield group
