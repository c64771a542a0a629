"""The immutable records that parts and models pass to each other."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from html import escape
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64

from specbeam.core.audit import Audit
from specbeam.core.beams import Beams, Layer, Layers, live_of, live_parents_of
from specbeam.core.errors import BadSetting, counted
from specbeam.core.forest import Forest, unknown_nodes
from specbeam.core.limits import Ended
from specbeam.core.ranked import NO_ROWS, Ranked, rows_between


@dataclass(frozen=True)
class Shape:
    """The size of the draft that a controller plans."""

    depth: int  # number of draft layers; 0 means no draft
    width: int  # number of draft nodes per layer, or of the whole tree for drafters with a budget of nodes


@dataclass(frozen=True, eq=False)
class Trial:
    """A draft node that was judged, or a pair that was drawn in its place, for visualisations."""

    layer: int
    parent: int  # forest node
    token: int
    node: int  # forest node; -1 if the pair was not drafted
    p: float  # probability of the pair under the target's law at its trial
    q: float  # probability under the draft's law; 0 if the pair was not drafted
    fate: str  # "accepted", "rejected", "unused" or "resampled"


@dataclass(frozen=True)
class Certificate:
    """A bound on the likelihoods of the blocks that joint decoding accepted, for any law of the text; sums over blocks.

    For each block log p > `floor`, the draft log-likelihood that the block is compared with plus log(threshold). No block of
    its length has a log p more than `gap` above its own, so `gap` bounds the distance to the most probable block.
    Log-likelihoods are in nats.
    """

    blocks: int = 0  # number of accepted blocks
    tokens: int = 0  # number of their tokens
    logp: float = 0.0  # log-likelihood under the target
    floor: float = 0.0
    gap: float = 0.0

    def __add__(self, other: "Certificate") -> "Certificate":
        """Return the certificate of the blocks of both."""
        return Certificate(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def perplexity(self) -> float:
        """The perplexity of the accepted tokens under the warped target; 1 if there are none."""
        return math.exp(-self.logp / self.tokens) if self.tokens else 1.0

    @property
    def most_perplexity(self) -> float:
        """An upper bound of `perplexity`, from `floor`."""
        return math.exp(-self.floor / self.tokens) if self.tokens else 1.0


class Searched(NamedTuple):
    """The decision of a turn of a best-first search, which decides no layers."""

    live: Beams  # the roots of the turn; none if the search is over
    texts: tuple[Ended, ...]  # the texts that come next, best first
    drafted: int = 0  # number of nodes whose prefixes were scored for the first time


@dataclass(frozen=True, eq=False)
class Verdict:
    """The decision of a turn: its layers. The last layer did not pass, or follows the drafts, or ended the session."""

    layers: Layers
    trials: tuple[Trial, ...] = ()  # only if the method traces
    audit: Audit | None = None  # only if the session is audited
    collapsed: int | None = None  # index of the only live beam that is kept, if the method collapses
    certificate: Certificate | None = None  # only of rules that judge joint likelihoods
    searched: Searched | None = None  # only of best-first searches
    # forest nodes below surviving beams that the next forest starts with, ascending; the loop sets them, except in searches
    kept: Int64[np.ndarray, " kept"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @cached_property
    def steps(self) -> tuple[Layer, ...]:
        """The layers, each by itself."""
        return self.layers.all()

    @property
    def accepted(self) -> int:
        """The number of layers that passed: all their live beams are drafts.

        A turn emits one more layer, unless a layer that passed ended the session.
        """
        return int(self.layers.passed.sum())

    @cached_property
    def beams(self) -> Beams:
        """The beams that are live after the turn."""
        if self.searched is not None:
            return self.searched.live
        live = live_of(self.layers)
        return live if self.collapsed is None else live.pick(np.array([self.collapsed]))

    @cached_property
    def parents(self) -> Int64[np.ndarray, " beams"]:
        """The forest node that each live beam extends."""
        if self.searched is not None:
            return np.full(self.searched.live.size, -1)
        parents = live_parents_of(self.layers)
        return parents if self.collapsed is None else parents[[self.collapsed]]


FINAL = -1  # in `Needs.columns`: the last hidden states after the final norm


@dataclass(frozen=True)
class Needs:
    """The outputs of a model that a part reads, for each row that the model scores.

    A part states them in an attribute `needs`. A rule without this attribute gets logits, a rule with it a `Scored`.
    """

    logits: bool = False
    ranked: int = 0  # number of likeliest tokens; 0: none
    hidden: bool = False  # the last hidden states after the final norm, which the model's head reads
    prompt: bool = False  # the hidden states of the rows before the first root: the prompt without its last token
    # Layer numbers: the hidden states before these layers, without a norm. The number of layers stands for the states
    # after the last layer.
    taps: tuple[int, ...] = ()
    # The exit layer (`engines.cpu.early.ExitLayer`) that drafts after the first layers of the model, from the model's cache;
    # its keys and values are stored for all tokens, including the prompt.
    exit_layer: Any = None

    @property
    def states(self) -> bool:
        """Whether any hidden states are needed."""
        return self.hidden or self.prompt or bool(self.taps)

    @property
    def columns(self) -> tuple[int, ...]:
        """The hidden states of a row of `Scored.hidden`, side by side: FINAL, if needed, and taps."""
        return (FINAL, *self.taps) if self.hidden or not self.taps else self.taps

    def __or__(self, other: "Needs") -> "Needs":
        """Return the needs of both.

        Raises `BadSetting` if both need hidden states, but different columns, or different exit layers.
        """
        if self.states and other.states and self.columns != other.columns:
            raise BadSetting(f"two parts need different hidden states: {self} and {other}")
        exits = [needs.exit_layer for needs in (self, other) if needs.exit_layer is not None]
        if any(one is not exits[0] for one in exits):
            raise BadSetting("two draft models leave the target by different exit layers; give one of them")
        return Needs(
            self.logits or other.logits,
            max(self.ranked, other.ranked),
            self.hidden or other.hidden,
            self.prompt or other.prompt,
            self.taps or other.taps,
            exits[0] if exits else None,
        )


LEARNT = -(2**32)  # the token of an extra row of kind k of `ExtraInputs` is LEARNT - k


class ExtraRows(NamedTuple):
    """Extra rows under nodes of a forest that the target scores for a drafter, such as mask tokens or learnt prompts.

    An extra row attends to the path to its parent, which may be an extra row, too. No draft attends to one, and no rule
    sees one.
    """

    # A negative number stands for an embedding (see `Session.vectors`), one from LEARNT down for a kind of `ExtraInputs`.
    tokens: Int64[np.ndarray, " rows"]
    parents: Int64[np.ndarray, " rows"]  # nodes of the forest, or forest.size + k for row k


NO_EXTRA_ROWS = ExtraRows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class ExtraInputs:
    """Inputs of extra rows other than tokens: learned embeddings, a private prefix, states of other rows.

    They are the same for all sessions of a drafter. The target's law does not depend on them: rows of the text attend to
    neither extra rows nor the prefix, and their positions are unchanged.

    Attributes:
        model: the model of transformers for which they were learned.
        kinds: number of kinds of extra rows.
        embeddings: the input of the first layer for each kind; None: extra rows enter at `layer`.
        keys, values: those of the prefix in each layer, as attention reads them: keys are not rotated. Empty without a
            prefix.
        layer: the layer at which extra rows enter, from 1 on; 0: they have embeddings.
        make: returns the inputs of layer `layer` for extra rows, float[n, width], given its inputs for the forest nodes
            above them, float[n, width], and their kinds, int64[n].
    """

    model: Any
    kinds: int
    embeddings: Float[torch.Tensor, "kinds width"] | None = None
    keys: tuple[Float[torch.Tensor, "kv_heads prefix size"], ...] = ()
    values: tuple[Float[torch.Tensor, "kv_heads prefix size"], ...] = ()
    layer: int = 0
    make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    @property
    def prefix(self) -> int:
        """The number of rows of the prefix."""
        return self.keys[0].shape[1] if self.keys else 0


_NO_LOGITS = torch.zeros(0, 0)


@dataclass(frozen=True, eq=False)
class Scored:
    """The outputs of a model for its new nodes, one row per node. Outputs that no part needs have no rows (see `Needs`)."""

    logits: Float[torch.Tensor, "nodes vocab"] = _NO_LOGITS
    ranked: Ranked = NO_ROWS  # lists of the likeliest tokens
    hidden: Float[torch.Tensor, "states size"] = _NO_LOGITS  # the states that `Needs.columns` names, side by side
    prompt: Float[torch.Tensor, "rows width"] = _NO_LOGITS  # the same, only in the first turn
    extra: "Scored | None" = None  # the rows of the drafter's extra rows, if there are any

    def split(self, nodes: int) -> "Scored":
        """Return the rows of the first `nodes` nodes, with the other rows as `extra`."""
        first, later = (
            Scored(self.logits[start:stop], rows_between(self.ranked, start, stop), self.hidden[start:stop])
            for start, stop in ((0, nodes), (nodes, max(len(self.logits), len(self.ranked.logits), len(self.hidden))))
        )
        return replace(first, prompt=self.prompt, extra=later)


@dataclass(frozen=True, eq=False)
class Turn:
    """One pass of the target for one session."""

    shape: Shape
    forest: Forest
    scored: Scored
    verdict: Verdict
    renamed: Int64[np.ndarray, " scored"] | None = None  # `scored_nodes` on the forest of `on`

    @property
    def scored_nodes(self) -> Int64[np.ndarray, " scored"]:
        """The forest nodes of the rows in `scored`, whose rows were not known before."""
        if self.renamed is not None:
            return self.renamed
        return unknown_nodes(0, self.forest.size, self.forest.known.nodes)

    def on(self, forest: Forest, node_map: Int64[np.ndarray, " nodes"]) -> "Turn":
        """Return the same turn expressed on another forest, in which node k of this turn's forest is node ``node_map[k]``.

        This is for a drafter whose model scored more nodes than the drafter passed on.
        """
        layers = self.verdict.layers
        parents = node_map[layers.parents]
        nodes = forest.find(parents, layers.beams.tokens)
        renamed = layers._replace(parents=parents, beams=layers.beams._replace(nodes=nodes))
        verdict = replace(self.verdict, layers=renamed, kept=node_map[self.verdict.kept])
        return replace(self, forest=forest, verdict=verdict, renamed=node_map[self.scored_nodes])


@dataclass(frozen=True)
class Beam:
    """One text of a generation, finished or cut off."""

    tokens: list[int]
    score: float  # log-likelihood / length ** length_penalty
    text: str = ""
    finished: bool = True  # False: cut off by the length limit or by early stopping
    bound: float | None = None  # of `sb.best`: an upper bound of the scores of all texts that were not given before
    item: Any = None  # the name of the item of a catalogue; None for a text that is none

    @property
    def certain(self) -> bool:
        """Whether no text that was not given before can have a larger score; False outside of `sb.best`."""
        return self.bound is not None and self.score >= self.bound


@dataclass(frozen=True)
class RowCounts:
    """The numbers of rows that the target computed for layers of beams, and of rows that it did not have to compute."""

    scored: int = 0  # number of rows that its passes computed, without those of the prompt
    saved: int = 0  # number of rows of earlier turns that decided layers
    layers: int = 0  # number of layers
    lazy_layers: int = 0  # decided without the rows of some live beams
    free_layers: int = 0  # decided by rows of earlier turns alone
    whole: int = 0  # rows that were read whole, because a list of their best tokens decided nothing

    def __add__(self, other: "RowCounts") -> "RowCounts":
        """Return the counts of both."""
        return RowCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Report:
    """The output law of a generation, and its cost."""

    law: str  # the law of the output, exact or approximate
    tokens: int = 0  # number of new tokens
    target_passes: int = 0
    draft_passes: int = 0  # one per layer of a draft; one for all layers if a head drafts them in one pass
    accepted: int = 0  # number of layers (with one beam: tokens) that came from drafts
    widths: list[int] = field(default_factory=list)  # number of beams that each step drew, including those that ended
    seconds: float = 0.0  # from the first turn to the last; prompts of a batch take it together, so these overlap
    joules: float | None = None  # None without a counter, or if the run is too short for a GPU's counter
    peak_kv_tokens: int = 0  # largest number of tokens stored at once in the target's KV cache
    audit: Audit | None = None  # only if audited
    certificate: Certificate | None = None  # only of joint decoding
    rows: RowCounts = RowCounts()  # of methods that decode beams; of others only `scored`
    other_beams: list[Beam] = field(
        default_factory=list
    )  # texts at the end beyond `Generation.beams`, in the same order

    @property
    def tokens_per_pass(self) -> float:
        """The number of new tokens per pass of the target; NaN without a pass."""
        return self.tokens / self.target_passes if self.target_passes else math.nan

    @property
    def acceptance(self) -> float:
        """The share of the layers of the text (with one beam: of its tokens) that came from drafts; NaN without layers."""
        return self.accepted / len(self.widths) if self.widths else math.nan

    @property
    def passes(self) -> str:
        """The numbers of tokens and of passes of the target in words."""
        return f"{counted(self.tokens, 'token')} in {counted(self.target_passes, 'pass')}"

    def __str__(self) -> str:
        """Return a short line; `repr` has all fields, and `to_dict` returns them."""
        return f"{self.passes}, {self.seconds:.2f} s; {self.law}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, and the figures made of them; nested records are dictionaries, too."""
        return asdict(self) | {"tokens_per_pass": self.tokens_per_pass, "acceptance": self.acceptance}


@dataclass(frozen=True, repr=False)
class Generation:
    """The answer to one prompt. A notebook shows its beams as a table, and its forest if its turns were recorded."""

    text: str
    tokens: list[int]  # new ones only
    # The best texts, at most as many as the method has beams: finished ones before live ones, each in descending order of
    # scores. At the length limit, texts that were cut off compete with finished ones by score.
    beams: list[Beam]
    report: Report
    prompt: list[int]
    trace: Any = None  # the turns (doors/trace.py), if the method records them, such as `dsbd(trace=True)`
    sequence: int = 0  # number of the answer among those of its prompt, below `num_return_sequences`

    @property
    def beam(self) -> Beam:
        """The beam of this text."""
        return next(beam for beam in self.beams if beam.tokens == self.tokens)

    def __repr__(self) -> str:
        beams = f", {len(self.beams)} beams" if len(self.beams) > 1 else ""
        cost = self.report.passes
        answer = repr(self.text) if self.text else f"'' of tokens {self.tokens}"  # without a tokenizer there is no text
        is_cut = any(beam.tokens == self.tokens and not beam.finished for beam in self.beams)
        end = " (cut off)" if is_cut else ""
        return f"<Generation {answer}{end}{beams}, {cost}; {self.report.law}>"

    def to_dict(self) -> dict[str, Any]:
        """Return text, tokens, beams, report and prompt as dictionaries and lists, and the trace, if there is one."""
        found = asdict(self) | {"report": self.report.to_dict()}
        if self.trace is None:
            del found["trace"]
        return found

    def _repr_html_(self) -> str:
        """Return a table of the beams with their scores, a line of the report, and the forest, for notebooks."""
        rows = [f"<tr><td>{one.score:.3f}</td><td>{escape(one.text)}</td></tr>" for one in self.beams]
        report = self.report
        cost = escape(str(report))
        forest = "" if self.trace is None else self.trace._repr_html_()
        return f"<table><tr><th>score</th><th>text</th></tr>{''.join(rows)}</table><p>{cost}</p>{forest}"
