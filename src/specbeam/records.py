"""The nouns that pass from room to room. Nobody changes one afterwards."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt64

from specbeam.errors import SpecbeamError
from specbeam.forest import Forest


@dataclass(frozen=True)
class Shape:
    """What the controller asks the drafter for."""

    depth: int  # draft layers; 0 means no draft
    width: int  # draft nodes per layer


@dataclass(frozen=True, eq=False)
class Beams:
    """Live beams of one session: distinct token paths of equal length, best guess of the next roots.

    A path that was drawn several times (draws with replacement) stands here once, with its count.
    """

    nodes: Int64[np.ndarray, " beams"]  # forest nodes; -1 where the last token has no node yet
    tokens: Int64[np.ndarray, " beams"]  # the last token
    scores: Float64[np.ndarray, " beams"]  # log-likelihood of the generated tokens
    counts: Int64[np.ndarray, " beams"]
    keys: UInt64[np.ndarray, " beams"]  # names of the paths, for their noise

    @classmethod
    def start(cls, token: int, key: int) -> "Beams":
        """One empty path after the prompt, whose last token is the root."""
        zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
        return cls(zero, np.array([token]), np.zeros(1), one, np.array([key], dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, which: np.ndarray) -> "Beams":
        """The beams at these indices or where this mask is True."""
        fields = (self.nodes, self.tokens, self.scores, self.counts, self.keys)
        return Beams(*(values[which] for values in fields))

    def rooted(self) -> "Beams":
        """The same beams at the start of the next turn, where beam k is root k."""
        return replace(self, nodes=np.arange(len(self)))


@dataclass(frozen=True, eq=False)
class Step:
    """One layer: what was drawn, and what each drawn pair became."""

    parents: Int64[np.ndarray, " beams"]  # forest nodes
    beams: Beams
    ended: Bool[np.ndarray, " beams"]  # by an end token, a stop string or the length limit
    width: int  # draws that were asked for
    passed: bool  # every live draw was a draft node, so that the next layer can be judged

    @property
    def live(self) -> Beams:
        return self.beams.pick(~self.ended)


@dataclass(frozen=True, eq=False)
class Trial:
    """A draft node that was judged, or a pair that was drawn in its place: for pictures and audits."""

    layer: int
    parent: int  # forest node
    token: int
    node: int  # -1 if it was no draft
    p: float  # target odds of the pair, at its trial
    q: float  # draft odds, 0 if it was no draft
    fate: str  # "accepted", "rejected", "unused" or "resampled"


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a turn decided: one step per layer, the last one not passed or past the drafts."""

    steps: tuple[Step, ...]
    trials: tuple[Trial, ...] = ()
    collapsed: int | None = None  # index of the only live beam that is kept, if the method collapses

    @property
    def accepted(self) -> int:
        """Layers that were emitted from drafts; a turn emits one more layer than passed, unless it ended there."""
        return sum(step.passed for step in self.steps)

    @property
    def beams(self) -> Beams:
        live = self.steps[-1].live
        return live if self.collapsed is None else live.pick(np.array([self.collapsed]))

    @property
    def parents(self) -> Int64[np.ndarray, " beams"]:
        """Forest nodes under which the surviving beams hang."""
        last = self.steps[-1]
        parents = last.parents[~last.ended]
        return parents if self.collapsed is None else parents[[self.collapsed]]


@dataclass(frozen=True, eq=False)
class Turn:
    """One pass of the target for one session."""

    shape: Shape
    forest: Forest
    scored: Float[torch.Tensor, "nodes vocab"]
    verdict: Verdict


@dataclass(frozen=True)
class Beam:
    """One finished or live text of a generation."""

    tokens: list[int]
    score: float  # log-likelihood / length ** length_penalty
    text: str = ""
    finished: bool = True  # False: cut off by the length limit or by early stopping


@dataclass(frozen=True)
class Report:
    """What a generation cost."""

    law: str
    tokens: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    accepted: int = 0  # layers (with one beam: tokens) that drafts supplied
    widths: list[int] = field(default_factory=list)  # live beams after each step
    seconds: float = 0.0
    joules: float | None = None  # None where the machine has no counter
    peak_kv_tokens: int = 0  # most tokens stored at once in the target's KV trie
    audit: dict[str, float] | None = None


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt."""

    text: str
    tokens: list[int]  # new ones only
    beams: list[Beam]  # best first
    report: Report
    prompt: list[int]


@dataclass(frozen=True)
class Failure:
    """Why a session ended without an answer."""

    error: SpecbeamError
