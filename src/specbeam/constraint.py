"""Constraints: which tokens may come next, told for every path of a session.

A ban depends on the path and on nothing else, and draft and target are banned alike. So what is decoded is the model's own
law, renormalised at every step over the tokens that are allowed (docs/constrained.md).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8

TOKEN = 8  # bytes of a token in the name of a path


class Form(NamedTuple):
    """What texts have to look like, in words."""

    kind: str  # the option of `generate`: "json_schema", "regex" or "grammar"
    text: str


@runtime_checkable
class Constraint(Protocol):
    """What a text has to look like. It serves many sessions, so a state is never changed: `advance` gives a new one."""

    def root(self) -> Any:
        """The state before the first new token."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """The state after a token that `state` allows. Raises `BrokenLaw` if the constraint gets lost in it."""
        ...

    def allowed(self, states: Sequence[Any]) -> UInt8[np.ndarray, "states bytes"]:
        """One bit per token, token 0 in the lowest bit of the first byte. End tokens are not its business."""
        ...

    def complete(self, states: Sequence[Any]) -> list[bool]:
        """Whether the text may end here."""
        ...


class Place(NamedTuple):
    """A path, as a constraint sees it."""

    state: Any
    allowed: UInt8[np.ndarray, " bytes"]
    complete: bool

    def allows(self, token: int) -> bool:
        return token >> 3 < len(self.allowed) and bool(self.allowed[token >> 3] >> (token & 7) & 1)


class Constrained:
    """The constraint of one session, in the form of a logits processor of transformers.

    A state is made once per path, from the state one token before, so beams share those of their common past and the target
    finds those that the draft made. `keep` drops the states of dead paths.

    An end token is allowed exactly where the text may end. Behind a banned token nothing is banned: such a path is never
    emitted, but who has drafted it may ask for its law.

    Args:
        eos: the end tokens; at least one.
        prompt_length: tokens at the head of each path that are not looked at.
    """

    def __init__(self, constraint: Constraint, eos: tuple[int, ...], prompt_length: int) -> None:
        self.constraint, self.eos, self.prompt_length = constraint, eos, prompt_length
        self._places: dict[bytes, Place | None] = {}  # by path; None behind a banned token

    def __call__(
        self, input_ids: Int64[torch.Tensor, "paths length"], scores: Float[torch.Tensor, "paths vocab"]
    ) -> Float[torch.Tensor, "paths vocab"]:
        paths = input_ids[:, self.prompt_length :].cpu().numpy()
        allowed = self.allowed(paths, scores.shape[1])
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def allowed(self, paths: Int64[np.ndarray, "paths length"], vocab: int) -> Bool[np.ndarray, "paths vocab"]:
        """The tokens that may follow each path, which are new tokens only."""
        allowed = np.ones((len(paths), vocab), dtype=bool)
        ends = [token for token in self.eos if token < vocab]
        for row, place in zip(allowed, self._found(_names(paths)), strict=True):
            if place is not None:
                bits = np.unpackbits(place.allowed, bitorder="little")[:vocab]
                row[: len(bits)], row[len(bits) :] = bits, False
                row[ends] = place.complete
        return allowed

    def keep(self, paths: Int64[np.ndarray, "beams length"]) -> None:
        """Forget all paths but the live beams and what was drafted under them."""
        live, size = set(_names(paths)), TOKEN * paths.shape[1]
        self._found(list(live))  # their states come from paths that are forgotten now
        self._places = {path: place for path, place in self._places.items() if path[:size] in live}

    def __len__(self) -> int:
        """States that are held."""
        return len(self._places)

    def _found(self, paths: list[bytes]) -> list[Place | None]:
        missing = [path for path in dict.fromkeys(paths) if path not in self._places]
        if missing:
            parents = self._found([path[:-TOKEN] for path in missing if path])
            states = dict(zip([path for path in missing if path], parents, strict=True))
            self._look({path: self._state(path, states.get(path)) for path in missing})
        return [self._places[path] for path in paths]

    def _state(self, path: bytes, parent: Place | None) -> Any:
        """None behind a banned token."""
        if not path:
            return self.constraint.root()
        token = int(np.frombuffer(path[-TOKEN:], dtype=np.int64)[0])
        if parent is None or token in self.eos or not parent.allows(token):
            return None
        return self.constraint.advance(parent.state, token)

    def _look(self, states: dict[bytes, Any]) -> None:
        lawful = {path: state for path, state in states.items() if state is not None}
        self._places.update(dict.fromkeys(states))
        if lawful:
            seen = list(lawful.values())
            places = map(Place, seen, self.constraint.allowed(seen), self.constraint.complete(seen))
            self._places.update(zip(lawful, places, strict=True))


def _names(paths: Int64[np.ndarray, "paths length"]) -> list[bytes]:
    return [path.tobytes() for path in np.ascontiguousarray(paths)]
