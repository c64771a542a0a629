"""Constraints: which tokens may come next, told for every path of a session.

A ban depends on the path and on nothing else, and draft and target are banned alike. So what is decoded is the model's own
law, renormalised at every step over the tokens that are allowed (docs/constrained.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8

TOKEN = 8  # bytes of a token in the name of a path
Bits = UInt8[np.ndarray, " bytes"]


class Form(NamedTuple):
    """What texts have to look like, in words."""

    kind: str  # the option of `generate`: "json_schema", "regex" or "grammar"
    text: str


@runtime_checkable
class Walker(Protocol):
    """Stands behind a text and moves on and back."""

    def take(self, token: int) -> None:
        """One token on, which is allowed here. Raises `BrokenLaw` if the constraint gets lost in it."""
        ...

    def back(self, tokens: int) -> None:
        """Undo the last tokens."""
        ...

    def copy(self) -> "Walker":
        """Another one in the same place. Its cost may grow with the text."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """What a text has to look like. It serves many sessions."""

    def start(self) -> Walker:
        """A walker before the first new token."""
        ...

    def allowed(self, walkers: Sequence[Any]) -> UInt8[np.ndarray, "walkers bytes"]:
        """One bit per token, token 0 in the lowest bit of the first byte. End tokens are not its business."""
        ...

    def complete(self, walkers: Sequence[Any]) -> list[bool]:
        """Whether the text may end here."""
        ...


@dataclass(eq=False)
class Trail:
    """A walker, and how far it has gone behind the live path that it belongs to."""

    walker: Any
    behind: list[int] = field(default_factory=list)

    def go(self, tokens: list[int]) -> None:
        """To the place that many tokens behind the live path, by the shortest way."""
        shared = _agreement(self.behind, tokens)
        if shared < len(self.behind):
            self.walker.back(len(self.behind) - shared)
            del self.behind[shared:]
        for token in tokens[shared:]:
            self.walker.take(token)
            self.behind.append(token)

    def copy(self) -> "Trail":
        return Trail(self.walker.copy(), list(self.behind))


class Constrained:
    """The constraint of one session, in the form of a logits processor of transformers.

    One walker per live beam goes through what is drafted under it, depth first. Of each path that it was at, the allowed
    tokens are kept until the session moves on (`keep`), so the target finds what the draft asked for.

    An end token is allowed exactly where the text may end. Behind a banned token nothing is banned: such a path is never
    emitted, but who has drafted it may ask for its law.

    Args:
        eos: the end tokens; at least one.
        prompt_length: tokens at the head of each path that are not looked at.
        name: what to call it in messages.
    """

    def __init__(
        self, constraint: Constraint, eos: tuple[int, ...], prompt_length: int, name: str = "the constraint"
    ) -> None:
        self.constraint = constraint
        self.eos = eos
        self.prompt_length = prompt_length
        self.name = name
        # Paths have names: the bytes of their tokens, without those that all live beams share.
        # tokens left out; bytes of the name of a live beam
        self._shared = 0
        self._size = 0
        self._trails = {b"": Trail(constraint.start())}  # of each live beam
        self._allowed: dict[bytes, Bits | None] = {}  # ends included; None behind a banned token

    def __call__(
        self, input_ids: Int64[torch.Tensor, "paths length"], scores: Float[torch.Tensor, "paths vocab"]
    ) -> Float[torch.Tensor, "paths vocab"]:
        paths = input_ids[:, self.prompt_length :].cpu().numpy()
        banned = np.unpackbits(~self._bits(paths, scores.shape[1]), axis=1, count=scores.shape[1], bitorder="little")
        return scores.masked_fill(torch.from_numpy(banned.view(bool)).to(scores.device), -torch.inf)

    def allowed(self, paths: Int64[np.ndarray, "paths length"], vocab: int) -> Bool[np.ndarray, "paths vocab"]:
        """The tokens that may follow each path of new tokens, each of which begins with a live beam."""
        return np.unpackbits(self._bits(paths, vocab), axis=1, count=vocab, bitorder="little").view(bool)

    def permits(
        self, paths: Int64[np.ndarray, "paths length"], tokens: Int64[np.ndarray, " paths"]
    ) -> Bool[np.ndarray, " paths"]:
        """Whether each token may follow its path, which has the prompt at its head."""
        found = self._found(self._names(paths[:, self.prompt_length :]))
        return np.array(
            [bits is None or _has(bits, token) for bits, token in zip(found, tokens.tolist(), strict=True)], dtype=bool
        )

    def keep(self, paths: Int64[np.ndarray, "beams length"]) -> None:
        """Forget all paths but the live beams and what was drafted under them."""
        live = list(dict.fromkeys(self._names(paths)))
        self._trails = self._inherited(live)
        fresh = paths[:, self._shared :]
        differs = (fresh != fresh[:1]).any(0)
        shared = int(np.argmax(differs)) if differs.any() else fresh.shape[1]
        size = TOKEN * fresh.shape[1]
        cut = TOKEN * shared
        kept = {path[cut:]: bits for path, bits in self._allowed.items() if path[:size] in self._trails}
        self._allowed = kept
        self._trails = {path[cut:]: trail for path, trail in self._trails.items()}
        self._shared = self._shared + shared
        self._size = size - cut

    def __len__(self) -> int:
        """Walkers that are held."""
        return len(self._trails)

    def _names(self, paths: Int64[np.ndarray, "paths length"]) -> list[bytes]:
        return [path.tobytes() for path in np.ascontiguousarray(paths[:, self._shared :])]

    def _inherited(self, live: list[bytes]) -> dict[bytes, Trail]:
        """The first heir of a beam gets its walker, the others copies."""
        heirs: dict[bytes, list[bytes]] = {}
        for path in live:
            heirs.setdefault(path[: self._size], []).append(path)
        trails = {}
        for beam, paths in heirs.items():
            trail = self._trails[beam]
            for path, one in zip(paths, [trail, *(trail.copy() for _ in paths[1:])], strict=True):
                one.go(_tokens(path[self._size :]))
                trails[path] = Trail(one.walker)
        return trails

    def _bits(self, paths: Int64[np.ndarray, "paths length"], vocab: int) -> UInt8[np.ndarray, "paths bytes"]:
        rows = np.zeros((len(paths), -(-vocab // 8)), dtype=np.uint8)
        for row, bits in zip(rows, self._found(self._names(paths)), strict=True):
            if bits is None:
                row[:] = 255
            else:
                row[: len(bits)] = bits[: len(row)]
        return rows

    def _found(self, paths: list[bytes]) -> list[Bits | None]:
        missing: dict[bytes, None] = {}
        for path in paths:
            while path not in self._allowed and path not in missing:
                missing[path] = None
                if len(path) == self._size:  # a live beam: the way to it was allowed
                    break
                path = path[:-TOKEN]
        if missing:
            self._explore(missing)
        return [self._allowed[path] for path in paths]

    def _explore(self, missing: Iterable[bytes]) -> None:
        """Depth first under each live beam, which is the order of the names, and side by side for all of them."""
        under: dict[bytes, list[bytes]] = {}
        for path in sorted(missing):
            under.setdefault(path[: self._size], []).append(path)
        for paths in zip_longest(*under.values()):
            self._look([path for path in paths if path is not None])

    def _look(self, paths: list[bytes]) -> None:
        """At places under different live beams whose parents are known."""
        lawful = [path for path in paths if self._lawful(path)]
        for path in lawful:
            self._trails[path[: self._size]].go(_tokens(path[self._size :]))
        if lawful:
            walkers = [self._trails[path[: self._size]].walker for path in lawful]
            rows = self.constraint.allowed(walkers)
            complete = self.constraint.complete(walkers)
            for path, bits, ends in zip(lawful, rows, complete, strict=True):
                self._allowed[path] = _with_ends(bits, self.eos, ends)
        self._allowed.update((path, None) for path in paths if path not in self._allowed)

    def _lawful(self, path: bytes) -> bool:
        if len(path) == self._size:
            return True
        above = self._allowed[path[:-TOKEN]]
        token = _tokens(path[-TOKEN:])[0]
        return above is not None and token not in self.eos and _has(above, token)


def _tokens(name: bytes) -> list[int]:
    return np.frombuffer(name, dtype=np.int64).tolist()


def _has(bits: Bits, token: int) -> bool:
    return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)


def _with_ends(bits: Bits, eos: tuple[int, ...], complete: bool) -> Bits:
    """A copy in which the end tokens are allowed or banned."""
    size = max(len(bits), *(token // 8 + 1 for token in eos))
    made = np.zeros(size, dtype=np.uint8)
    made[: len(bits)] = bits
    for token in eos:
        bit = np.uint8(1 << (token & 7))
        made[token >> 3] = made[token >> 3] | bit if complete else made[token >> 3] & ~bit
    return made


def _agreement(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    shared = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(shared) if one != other), min(len(first), len(second)))
