"""Constraints: which tokens may follow each path of a session.

Whether a token is banned depends on the path alone, and draft and target have the same bans. So the law of the output is
the model's own law, renormalised at every step over the allowed tokens (docs/constrained.md).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8

TOKEN = 8  # number of bytes of a token in the name of a path, see `Constrained`
MOST_PATHS = 1024  # paths whose allowed tokens a best-first search remembers
Bits = UInt8[np.ndarray, " bytes"]


class Form(NamedTuple):
    """A form that texts must have: a JSON schema, a regular expression or a grammar."""

    kind: str  # the option of `generate`: "json_schema", "regex" or "grammar"
    text: str  # as the user wrote it


@runtime_checkable
class Walker(Protocol):
    """A position in a constraint after some text, which moves forward and back by tokens."""

    def take(self, token: int) -> None:
        """Move forward by a token, which must be allowed here. Raises `BrokenLaw` if the constraint fails to follow it."""
        ...

    def back(self, tokens: int) -> None:
        """Move back by this number of tokens."""
        ...

    def copy(self) -> "Walker":
        """Return another walker at the same position. The cost may grow with the length of the text."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """A form that texts must have, as a set of allowed next tokens at each position. Sessions may share a constraint.

    An optional attribute `complaints` lists parts of the form that are not enforced; each request issues them as warnings.
    """

    def start(self) -> Walker:
        """Return a walker at the position before the first new token."""
        ...

    def allowed(self, walkers: Sequence[Any]) -> UInt8[np.ndarray, "walkers bytes"]:
        """Return a bit per token, 1 if it is allowed; token 0 is the lowest bit of the first byte.

        The bits of end tokens are ignored: `complete` decides on them.
        """
        ...

    def complete(self, walkers: Sequence[Any]) -> list[bool]:
        """Return whether the text of each walker may end."""
        ...


@dataclass(eq=False)
class Trail:
    """The walker of a live beam, and the tokens that it has taken after the end of that beam."""

    walker: Any
    tokens: list[int] = field(default_factory=list)

    def move_to(self, tokens: list[int]) -> None:
        """Move the walker to the position after the live beam and `tokens`, with as few steps as possible."""
        shared = _common_length(self.tokens, tokens)
        if shared < len(self.tokens):
            self.walker.back(len(self.tokens) - shared)
            del self.tokens[shared:]
        for token in tokens[shared:]:
            self.walker.take(token)
            self.tokens.append(token)

    def copy(self) -> "Trail":
        """Return a trail with its own walker at the same position."""
        return Trail(self.walker.copy(), list(self.tokens))


class Constrained:
    """The constraint of one session, as a logits processor of transformers.

    One walker per live beam visits the drafts under that beam, depth first. The allowed tokens after each visited path are
    stored until the turn ends (`keep`), so draft and target share them.

    An end token is allowed exactly where the text may end. After a banned token nothing is banned: such a path is never
    emitted, but a drafter may request its law.

    Args:
        eos: the end tokens; without any, no text ends when its form is complete.
        prompt_length: number of tokens before the new ones in each path.
        name: the name of the constraint in messages.
    """

    def __init__(
        self, constraint: Constraint, eos: tuple[int, ...], prompt_length: int, name: str = "the constraint"
    ) -> None:
        self.constraint = constraint
        self.eos = eos
        self.prompt_length = prompt_length
        self.name = name
        # The name of a path is the bytes of its new tokens after the prefix that all live beams share.
        self._shared = 0  # length of the shared prefix in tokens
        self._size = 0  # number of bytes in the name of a live beam
        self._live = [b""]  # the names of the live beams
        self._trails = {b"": Trail(constraint.start())}  # by the name of a live beam
        # Allowed tokens by the name of a path, end tokens included; None after a banned token.
        self._allowed: dict[bytes, Bits | None] = {}

    def __call__(
        self, input_ids: Int64[torch.Tensor, "paths length"], scores: Float[torch.Tensor, "paths vocab"]
    ) -> Float[torch.Tensor, "paths vocab"]:
        """Return `scores` with -inf at the tokens that may not follow their path; paths start with the prompt."""
        paths = input_ids[:, self.prompt_length :].cpu().numpy()
        banned = np.unpackbits(
            ~self._bits(self._names(paths), scores.shape[1]), axis=1, count=scores.shape[1], bitorder="little"
        )
        return scores.masked_fill(torch.from_numpy(banned.view(bool)).to(scores.device), -torch.inf)

    def allowed(self, paths: Int64[np.ndarray, "paths length"], vocab: int) -> Bool[np.ndarray, "paths vocab"]:
        """Return which tokens may follow each path of new tokens; each path must start with a live beam."""
        return np.unpackbits(self._bits(self._names(paths), vocab), axis=1, count=vocab, bitorder="little").view(bool)

    def allowed_below(
        self,
        tokens: Int64[np.ndarray, " nodes"],
        parents: Int64[np.ndarray, " nodes"],
        wanted: Int64[np.ndarray, " rows"],
        vocab: int,
    ) -> UInt8[np.ndarray, "rows bytes"]:
        """Return the allowed tokens after each of the `wanted` forest nodes, one bit per token as in `Constraint.allowed`.

        Args:
            tokens, parents: of a forest whose roots are the live beams, in the order in which `keep` got them.
        """
        paths = list(self._live)
        if len(tokens) > len(paths):
            above = parents.tolist()
            for node in range(len(paths), len(tokens)):
                paths.append(paths[above[node]] + tokens[node].tobytes())
        return self._bits([paths[node] for node in wanted.tolist()], vocab)

    def permits(
        self, paths: Int64[np.ndarray, "paths length"], tokens: Int64[np.ndarray, " paths"]
    ) -> Bool[np.ndarray, " paths"]:
        """Return whether each token may follow its path, which starts with the prompt."""
        allowed = self._allowed_after(self._names(paths[:, self.prompt_length :]))
        return np.array(
            [bits is None or _has(bits, token) for bits, token in zip(allowed, tokens.tolist(), strict=True)],
            dtype=bool,
        )

    def keep(self, paths: Int64[np.ndarray, "beams length"]) -> None:
        """Set the live beams to these paths of new tokens; forget all paths that do not start with one of them."""
        names = self._names(paths)
        self._trails = self._trails_of(list(dict.fromkeys(names)))
        fresh = paths[:, self._shared :]
        differs = (fresh != fresh[:1]).any(0)
        shared = int(np.argmax(differs)) if differs.any() else fresh.shape[1]
        size = TOKEN * fresh.shape[1]
        cut = TOKEN * shared
        self._allowed = {path[cut:]: bits for path, bits in self._allowed.items() if path[:size] in self._trails}
        self._trails = {path[cut:]: trail for path, trail in self._trails.items()}
        self._live = [name[cut:] for name in names]
        self._shared = self._shared + shared
        self._size = size - cut

    def forget(self, most: int) -> None:
        """Forget the allowed tokens of all paths if there are more than `most`; they are looked up again when needed."""
        if len(self._allowed) > most:
            self._allowed.clear()

    def __len__(self) -> int:
        """Return the number of walkers, one per live beam."""
        return len(self._trails)

    def _names(self, paths: Int64[np.ndarray, "paths length"]) -> list[bytes]:
        return [path.tobytes() for path in np.ascontiguousarray(paths[:, self._shared :])]

    def _trails_of(self, live: list[bytes]) -> dict[bytes, Trail]:
        """Return a trail per new live beam: the first extension of a former beam gets its walker, the others copies."""
        heirs: dict[bytes, list[bytes]] = {}
        for path in live:
            heirs.setdefault(path[: self._size], []).append(path)
        trails = {}
        for beam, paths in heirs.items():
            trail = self._trails[beam]
            for path, heir in zip(paths, [trail, *(trail.copy() for _ in paths[1:])], strict=True):
                heir.move_to(_tokens(path[self._size :]))
                trails[path] = Trail(heir.walker)
        return trails

    def _bits(self, paths: list[bytes], vocab: int) -> UInt8[np.ndarray, "paths bytes"]:
        """Return the allowed tokens after each path, one bit per token; all of them after a banned token."""
        rows = np.zeros((len(paths), -(-vocab // 8)), dtype=np.uint8)
        for row, bits in zip(rows, self._allowed_after(paths), strict=True):
            if bits is None:
                row[:] = 255
            else:
                row[: len(bits)] = bits[: len(row)]
        return rows

    def _allowed_after(self, paths: list[bytes]) -> list[Bits | None]:
        """Return the allowed tokens after each path; None after a banned token. Asks the constraint about new paths."""
        missing: dict[bytes, None] = {}
        for path in paths:
            while path not in self._allowed and path not in missing:
                missing[path] = None
                if len(path) == self._size:  # a live beam: its tokens were allowed
                    break
                path = path[:-TOKEN]
        if missing:
            self._explore(missing)
        return [self._allowed[path] for path in paths]

    def _explore(self, missing: Iterable[bytes]) -> None:
        """Look up paths depth first (the order of their names), under all live beams in parallel."""
        under: dict[bytes, list[bytes]] = {}
        for path in sorted(missing):
            under.setdefault(path[: self._size], []).append(path)
        for paths in zip_longest(*under.values()):
            self._look_up([path for path in paths if path is not None])

    def _look_up(self, paths: list[bytes]) -> None:
        """Store the allowed tokens after paths under different live beams; their parents have been looked up."""
        reachable = [path for path in paths if self._is_reachable(path)]
        for path in reachable:
            self._trails[path[: self._size]].move_to(_tokens(path[self._size :]))
        if reachable:
            walkers = [self._trails[path[: self._size]].walker for path in reachable]
            rows = self.constraint.allowed(walkers)
            complete = self.constraint.complete(walkers)
            self._allowed.update(zip(reachable, _with_ends(rows, self.eos, np.array(complete)), strict=True))
        self._allowed.update((path, None) for path in paths if path not in self._allowed)

    def _is_reachable(self, path: bytes) -> bool:
        """Return whether a path is a live beam, or continues its parent by an allowed token that is not an end token."""
        if len(path) == self._size:
            return True
        above = self._allowed[path[:-TOKEN]]
        token = _tokens(path[-TOKEN:])[0]
        return above is not None and token not in self.eos and _has(above, token)


def _tokens(name: bytes) -> list[int]:
    return np.frombuffer(name, dtype=np.int64).tolist()


def _has(bits: Bits, token: int) -> bool:
    return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)


def _with_ends(
    rows: UInt8[np.ndarray, "paths some"], eos: tuple[int, ...], complete: Bool[np.ndarray, " paths"]
) -> UInt8[np.ndarray, "paths bytes"]:
    """Return a copy in which the end tokens are allowed where the text is `complete`, and banned elsewhere."""
    width = rows.shape[1]
    copy = np.zeros((len(rows), max(width, max(eos, default=-1) // 8 + 1)), dtype=np.uint8)
    copy[:, :width] = rows
    for token in eos:
        bit = np.uint8(1 << (token & 7))
        column = copy[:, token >> 3]
        copy[:, token >> 3] = np.where(complete, column | bit, column & ~bit)
    return copy


def _common_length(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
