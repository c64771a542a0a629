"""What the encoder of a model reads for a prompt: the source, with the states that encoders have made of it."""

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
    """The source of one prompt. All sessions of the prompt, and all models that read it, hold the same object.

    Attributes:
        name: the argument of an encoder that takes the inputs.
        inputs: token ids, or what a feature extractor makes of audio; None if only states are given.
        states: what encoders have made of the inputs, by encoder.
        given: states of an encoder that ran elsewhere; every encoder without inputs takes them for its own.
        keeps: whether the states are kept when a session is over, for further sessions.
        after: the source that is read next, if it is known: both may be read in one pass.
        ahead: keys and values of decoders that were made of the states before a session looks at them, by whose they are.
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
        """Return a source that an encoder has read already."""
        return cls("input_ids", None, given=states[None])

    @torch.inference_mode()
    def states_of(self, encoder: Any) -> SourceStates:
        """Return what an encoder makes of the source, which runs once.

        A source is encoded by itself: the states do not depend on what else is decoded.

        Raises `NotSupported` if the source holds states of another encoder alone.
        """
        if encoder not in self.states:
            self.states[encoder] = self._encoded_by(encoder)
        return self.states[encoder]

    def _encoded_by(self, encoder: Any) -> torch.Tensor:
        if self.inputs is None:
            if self.given is None:
                raise NotSupported("a source holds neither what an encoder reads nor what it has made of it")
            return self.given
        weight = next(encoder.parameters())
        inputs = self.inputs.to(weight.device)
        if self.name == "input_features":
            inputs = inputs.to(weight.dtype)
        output = encoder(**{self.name: inputs})
        states: torch.Tensor = output[0]
        return states

    def forget(self, encoder: Any) -> None:
        """Drop what an encoder has made of the source, unless it is kept; it reads the source again if that is needed."""
        if not self.keeps:
            self.states.pop(encoder, None)


def line_up(sources: Sequence[Source]) -> None:
    """Let each source know which one is read after it, until they `part`; what was known before is forgotten."""
    each = list(dict.fromkeys(sources))
    for source in each:
        source.after = None
    for source, following in pairwise(each):
        source.after = following


def part(sources: Sequence[Source]) -> None:
    """End what `line_up` began: nothing is read ahead any more, and what was read for nobody is dropped."""
    for source in sources:
        source.after = None
        source.ahead.clear()
        if not source.keeps:
            source.states.clear()


def in_line(sources: Sequence[Source], more: int) -> Iterator[Source]:
    """Yield sources, each once, and then up to `more` of those that are read after the last of them."""
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
    """Yield the sources of a line in groups that are read together, of up to `most` rows, or one source that has more.

    What room the last group has is for those that are read later: none of them begins a group.

    Args:
        line: sources with their numbers of rows.
        asked: those that are read now.
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
