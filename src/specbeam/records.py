"""The nouns that pass from room to room. Nobody changes one afterwards."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.audit import Audit
from specbeam.core.beams import Beams, Layer, Layers, live_of, live_parents_of
from specbeam.core.forest import Forest


@dataclass(frozen=True)
class Shape:
    """What the controller asks the drafter for."""

    depth: int  # draft layers; 0 means no draft
    width: int  # draft nodes per layer


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


@dataclass(frozen=True)
class Certificate:
    """What joint decoding can prove of the blocks that it accepted, whatever the law of its text; sums over blocks, in nats.

    Each block has log p > `floor`: its threshold by the draft model plus log(threshold). And no block of its length has a
    log p more than `gap` above its own: that is how far it can be from the most probable block.
    """

    blocks: int = 0
    tokens: int = 0
    logp: float = 0.0
    floor: float = 0.0
    gap: float = 0.0

    def __add__(self, other: "Certificate") -> "Certificate":
        return Certificate(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def perplexity(self) -> float:
        """Of the accepted tokens, under the target as it was warped."""
        return math.exp(-self.logp / self.tokens) if self.tokens else 1.0

    @property
    def most_perplexity(self) -> float:
        """What `perplexity` is sure to stay below."""
        return math.exp(-self.floor / self.tokens) if self.tokens else 1.0


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a turn decided: layers, of which the last one did not pass or lies past the drafts."""

    layers: Layers
    trials: tuple[Trial, ...] = ()
    audit: Audit | None = None  # only if the session is audited
    collapsed: int | None = None  # index of the only live beam that is kept, if the method collapses
    certificate: Certificate | None = None  # only by rules of joint likelihood

    @cached_property
    def steps(self) -> tuple[Layer, ...]:
        """Each layer by itself."""
        return self.layers.all()

    @property
    def accepted(self) -> int:
        """The number of layers that were emitted from drafts; a turn emits one more than passed, unless it ended there."""
        return int(self.layers.passed.sum())

    @cached_property
    def beams(self) -> Beams:
        """The survivors."""
        live = live_of(self.layers)
        return live if self.collapsed is None else live.pick(np.array([self.collapsed]))

    @cached_property
    def parents(self) -> Int64[np.ndarray, " beams"]:
        """The forest nodes under which the survivors hang."""
        parents = live_parents_of(self.layers)
        return parents if self.collapsed is None else parents[[self.collapsed]]


@dataclass(frozen=True)
class Needs:
    """What a part asks of each row that a model scores.

    A part says so in an attribute `needs`. A rule that has none is given logits; a rule that has one is given `Scored`.
    """

    logits: bool = False
    ranked: int = 0  # so many of the likeliest tokens
    hidden: bool = False  # what the model's head reads: the last hidden states, normed
    prompt: bool = False  # the same of the rows before the first root: at first the prompt without its last token

    @property
    def states(self) -> bool:
        """Whether any hidden states are asked for."""
        return self.hidden or self.prompt

    def __or__(self, other: "Needs") -> "Needs":
        """Return what serves both."""
        return Needs(
            self.logits or other.logits,
            max(self.ranked, other.ranked),
            self.hidden or other.hidden,
            self.prompt or other.prompt,
        )


class Probes(NamedTuple):
    """Rows that the target scores for a drafter below nodes of a forest; no draft sees them, and no rule.

    They see the path to their parent, and each other where one hangs under the other: mask tokens, learnt prompts.
    """

    tokens: Int64[np.ndarray, " probes"]  # a negative one is given by embedding (see `Session.vectors`)
    parents: Int64[
        np.ndarray, " probes"
    ]  # nodes of the forest, or probes: number k of them is the node forest.size + k


@dataclass(frozen=True, eq=False)
class Ranked:
    """The likeliest tokens of each row, best first; of equally likely ones the first in the vocabulary comes first."""

    log_norm: Float[torch.Tensor, " nodes"]  # log of the sum of exp(logit) over the whole vocabulary
    tokens: Int64[torch.Tensor, "nodes ranked"]
    logits: Float[torch.Tensor, "nodes ranked"]


_NOT_ASKED = torch.zeros(0, 0)
_NOT_RANKED = Ranked(torch.zeros(0), torch.zeros(0, 0, dtype=torch.int64), _NOT_ASKED)


@dataclass(frozen=True, eq=False)
class Scored:
    """What a model says of the nodes that are new to it, a row each; of no rows where nobody asked for it (see `Needs`)."""

    logits: Float[torch.Tensor, "nodes vocab"] = _NOT_ASKED
    ranked: Ranked = _NOT_RANKED
    hidden: Float[torch.Tensor, "states size"] = _NOT_ASKED
    prompt: Float[torch.Tensor, "rows width"] = _NOT_ASKED  # in the first turn; later ones have none
    probes: "Scored | None" = None  # of a drafter's probes, where there are any

    def split(self, nodes: int) -> "Scored":
        """Return the rows of the first nodes, and those of the others as `probes`."""
        first, later = (
            Scored(
                self.logits[some],
                Ranked(self.ranked.log_norm[some], self.ranked.tokens[some], self.ranked.logits[some]),
                self.hidden[some],
            )
            for some in (slice(nodes), slice(nodes, None))
        )
        return replace(first, prompt=self.prompt, probes=later)


@dataclass(frozen=True, eq=False)
class Turn:
    """One pass of the target for one session."""

    shape: Shape
    forest: Forest
    scored: Scored
    verdict: Verdict

    def on(self, forest: Forest, names: Int64[np.ndarray, " nodes"]) -> "Turn":
        """Return the same turn told on another forest, in which node k of this one is node ``names[k]``.

        For a drafter whose model scored more nodes than it handed on.
        """
        layers = self.verdict.layers
        drafts = layers.beams.nodes
        nodes = np.where(drafts >= 0, names[drafts], -1)
        renamed = layers._replace(parents=names[layers.parents], beams=layers.beams._replace(nodes=nodes))
        return replace(self, forest=forest, verdict=replace(self.verdict, layers=renamed))


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
    widths: list[int] = field(default_factory=list)  # beams that each step took, those that ended with it included
    seconds: float = 0.0
    joules: float | None = None  # None without a counter, or if that of a GPU is too slow for so short a run
    peak_kv_tokens: int = 0  # most tokens stored at once in the target's KV trie
    audit: Audit | None = None
    certificate: Certificate | None = None  # of joint decoding


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt."""

    text: str
    tokens: list[int]  # new ones only
    beams: list[Beam]  # best first
    report: Report
    prompt: list[int]
