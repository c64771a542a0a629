"""The training loop of a memory (HMT), with a state on disk from which a killed run resumes."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from specbeam.doors import is_integer, require
from specbeam.errors import BadSetting, one_of
from specbeam.lab.train.fitting import rate_factor, set_rates, take_step
from specbeam.lab.train.state import STATE_S, keep_state, resume_from, write_curve
from specbeam.models.memory import MemoryPlan, Recall, SegmentReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LossOn = Literal["all", "last"]
RATE = 1e-5  # usual learning rate for fine-tuning a model
CHECK_BATCH = 16  # texts per pass when held-out texts are checked


class MemoryDocument(NamedTuple):
    """A training text.

    Attributes:
        tokens: at least two.
        weights: the weight of each token in the loss; None: 1 each. A text with weights has an answer, and is read
            whole.
        answer: number of tokens at its end that are an answer; 0: it has none.
    """

    tokens: list[int]
    weights: list[float] | None = None
    answer: int = 0


@dataclass(frozen=True)
class MemorySchedule:
    """Duration and rates of the training of a memory.

    Args:
        stages: pairs (segments, steps), one after the other: the number of segments of a text, and the number of steps.
        previous_steps: number of steps before the stages, with two segments of which the second sees the memory of the
            first (RMT): the first stage of the paper.
        batch: number of texts of a step.
        rate: learning rate of the model; none for a frozen model.
        memory_rate: learning rate of the memory's own weights.
        frozen: train the memory's own weights only.
        loss_on: tokens of the loss: "all", or "last" for the last segment of each text.
        depth: number of segments that gradients go through; None: all of a text.
        warm: share of all steps in which rates rise.
        decay: share of all steps, at the end, in which rates fall to zero.
        check_every: number of steps between two checks on held-out texts.
        seed: the same seed gives the same texts and the same initial weights.
    """

    stages: tuple[tuple[int, int], ...] = ((2, 200), (4, 300))
    previous_steps: int = 0
    batch: int = 8
    rate: float = RATE
    memory_rate: float = 1e-3
    frozen: bool = False
    loss_on: LossOn = "all"
    depth: int | None = None
    warm: float = 0.02
    decay: float = 0.3
    check_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `BadSetting` if a value is wrong."""
        for segments, steps in self.stages:
            are_counts = is_integer(segments) and is_integer(steps) and segments >= 1 and steps >= 1
            require(
                are_counts,
                "stages",
                self.stages,
                "pairs of a number of segments and a number of steps, each at least 1",
            )
        require(len(self.stages) > 0, "stages", self.stages, "at least one")
        for name in ("batch", "check_every"):
            value = getattr(self, name)
            require(is_integer(value) and value >= 1, name, value, "an integer of at least 1")
        is_count = is_integer(self.previous_steps) and self.previous_steps >= 0
        require(is_count, "previous_steps", self.previous_steps, "an integer of at least 0")
        require(self.rate > 0, "rate", self.rate, "above 0")
        if self.frozen and self.rate != RATE:
            raise BadSetting(f"rate is {self.rate}, but the model is frozen; leave it out, or give memory_rate")
        require(self.memory_rate > 0, "memory_rate", self.memory_rate, "above 0")
        one_of("loss_on", self.loss_on, get_args(LossOn))
        is_depth = self.depth is None or (is_integer(self.depth) and self.depth >= 1)
        require(is_depth, "depth", self.depth, "a number of segments of at least 1, or None for all")
        require(0 < self.warm <= 1, "warm", self.warm, "in (0, 1]")
        require(0 < self.decay <= 1, "decay", self.decay, "in (0, 1]")
        require(is_integer(self.seed), "seed", self.seed, "an integer")

    @property
    def steps(self) -> int:
        """The number of steps of all stages."""
        return self.previous_steps + sum(steps for _, steps in self.stages)

    def segments_at(self, step: int) -> int:
        """Return the number of segments of texts at a step."""
        left = step - self.previous_steps
        if left < 0:
            return 2
        for segments, steps in self.stages:
            if left < steps:
                return segments
            left -= steps
        raise IndexError(f"there is no step {step}")

    def rate_factor(self, part: float) -> float:
        """See the function `rate_factor`."""
        return rate_factor(part, self.warm, self.decay)


@dataclass(frozen=True)
class MemoryPoint:
    """A point of the training curve. Held-out figures are means over tokens, in nats."""

    step: int
    seconds: float  # training time so far, summed over all runs
    loss: float  # mean loss since the previous point; NaN at the first
    held_out: float  # negative log-likelihood per token
    later: float  # the same, for tokens after the segment's query tokens
    forgetful: float  # negative log-likelihood per token without recall, with the same weights
    answers: float  # share of answers whose tokens are all the likeliest; NaN without answers


class MemoryTraining:
    """Training of a memory, and of its model unless it is frozen.

    Args:
        documents: texts for training.
        held_out: texts for checks.
        folder: folder of the state.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        recall: Recall,
        plan: MemoryPlan,
        schedule: MemorySchedule,
        documents: Sequence[MemoryDocument],
        held_out: Sequence[MemoryDocument],
        folder: Path,
    ) -> None:
        self.model = model
        self.recall = recall
        self.plan = plan
        self.schedule = schedule
        self.documents = documents
        self.held_out = held_out
        self.folder = folder
        self.device = model.get_input_embeddings().weight.device
        own = [{"params": [*recall.parameters()], "lr": schedule.memory_rate, "peak": schedule.memory_rate}]
        backbone = [weight for weight in model.parameters() if weight.requires_grad]
        if not schedule.frozen:
            own.append({"params": backbone, "lr": schedule.rate, "peak": schedule.rate})
        self.optimizer = torch.optim.AdamW(own, weight_decay=0.0)
        self.step = 0
        self.seconds = 0.0
        self.losses: list[float] = []
        self.curve: list[MemoryPoint] = []

    def run(self) -> Iterator[int]:
        """Train to the end; yield the number of steps after each. The state is saved each minute and at each check."""
        if not self.curve:
            self._add_point()
        kept = time.monotonic()
        while self.step < self.schedule.steps:
            began = time.monotonic()
            self._learn()
            self.seconds += time.monotonic() - began
            is_checked = self.step % self.schedule.check_every == 0 or self.step == self.schedule.steps
            if is_checked:
                self._add_point()
            if is_checked or time.monotonic() - kept > STATE_S:
                self.keep()
                kept = time.monotonic()
            yield self.step

    def _learn(self) -> None:
        """Take one step."""
        schedule = self.schedule
        segments = schedule.segments_at(self.step)
        random = np.random.default_rng([schedule.seed, self.step])
        texts = drawn_documents(self.documents, segments, self.plan.segment, schedule.batch, random)
        plan = self.plan
        if self.step < schedule.previous_steps:
            plan = MemoryPlan(plan.segment, plan.sensory, plan.memories, plan.share, "previous", plan.query)
        factor = schedule.rate_factor((self.step + 0.5) / schedule.steps)
        set_rates([self.optimizer], factor)
        reader = SegmentReader(self.model, self.recall, plan, schedule.depth)
        self.losses.append(learn_texts(reader, texts, schedule.loss_on, self.device))
        learnt = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        take_step([self.optimizer], learnt)
        self.step += 1

    def _add_point(self) -> None:
        figures = check_texts(self.model, self.recall, self.plan, self.held_out)
        loss = sum(self.losses) / len(self.losses) if self.losses else math.nan
        self.losses = []
        self.curve.append(MemoryPoint(self.step, round(self.seconds, 1), loss, *figures))
        write_curve(self.folder, self.curve)

    def keep(self) -> None:
        """Write the state to disk, atomically."""
        state = {
            "recall": self.recall.state_dict(),
            "model": None if self.schedule.frozen else self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "curve": [asdict(point) for point in self.curve],
        }
        keep_state(self.folder, state)

    def resume(self) -> bool:
        """Resume from the state on disk. Returns False without one; raises `BadSetting` if it is broken."""
        return resume_from(self.folder, self.device, self._restore)

    def _restore(self, state: dict[str, Any]) -> None:
        self.recall.load_state_dict(state["recall"])
        if state["model"] is not None:
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.losses = state["losses"]
        self.curve = [MemoryPoint(**point) for point in state["curve"]]


def drawn_documents(
    documents: Sequence[MemoryDocument], segments: int, size: int, count: int, random: np.random.Generator
) -> list[MemoryDocument]:
    """Return `count` random texts of at most `segments` segments of `size` tokens.

    Texts with an answer are taken whole if they fit. From longer texts without an answer, a piece is taken.

    Raises `BadSetting` if no document fits.
    """
    fits = [one for one in documents if one.answer == 0 or len(one.tokens) <= segments * size]
    if not fits:
        shortest = min(len(one.tokens) for one in documents)
        raise BadSetting(
            f"a stage has texts of {segments} segments, {segments * size} tokens, and all documents have answers and are "
            f"longer: the shortest has {shortest}; add shorter documents, or take more segments"
        )
    texts = []
    for number in random.integers(len(fits), size=count).tolist():
        document = fits[number]
        most = segments * size
        if document.answer == 0 and len(document.tokens) > most:
            start = int(random.integers(len(document.tokens) - most + 1))
            weights = None if document.weights is None else document.weights[start : start + most]
            document = MemoryDocument(document.tokens[start : start + most], weights)
        texts.append(document)
    return texts


def learn_texts(reader: SegmentReader, texts: Sequence[MemoryDocument], loss_on: str, device: torch.device) -> float:
    """Add the gradients of the loss of some texts to the weights' gradients, and return the weighted mean loss in nats.

    If gradients go through a limited number of segments, the graph of earlier ones is freed before the next are read.
    """
    tokens, weights = padded(texts, device)
    if loss_on == "last":
        weights = weights * _in_last_segment(texts, tokens.shape[1], reader.plan.segment).to(device)
    whole = weights[:, 1:].sum().clamp_min(1e-9)
    head = reader.model.get_output_embeddings()
    total = torch.zeros((), device=device)
    found = 0.0
    for number, rows in enumerate(reader.read(tokens)):
        stop = min(rows.start + rows.hidden.shape[1], tokens.shape[1] - 1)
        if stop > rows.start:
            logits = head(rows.hidden[:, : stop - rows.start])
            following = slice(rows.start + 1, stop + 1)
            surprise = functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, following].flatten(), reduction="none"
            )
            total = total + (surprise * weights[:, following].flatten()).sum() / whole
        if reader.depth is not None and (number + 1) % reader.depth == 0:
            found += _added_gradients(total)
            total = torch.zeros((), device=device)
    return found + _added_gradients(total)


def _added_gradients(loss: Tensor) -> float:
    """Add the gradients of a loss to the weights' gradients, and return its value."""
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach())


def padded(
    texts: Sequence[MemoryDocument], device: torch.device
) -> tuple[Int64[Tensor, "texts length"], Float[Tensor, "texts length"]]:
    """Return the tokens of texts, with zeros after the shorter ones, and the weight of each token, 0 after the end."""
    length = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    weights = torch.zeros(len(texts), length)
    for row, text in enumerate(texts):
        size = len(text.tokens)
        tokens[row, :size] = torch.tensor(text.tokens)
        weights[row, :size] = 1.0 if text.weights is None else torch.tensor(text.weights)
    return tokens.to(device), weights.to(device)


def _in_last_segment(texts: Sequence[MemoryDocument], length: int, size: int) -> Tensor:
    """Return whether each token is in the last segment of its text, bool[texts, length]."""
    starts = torch.tensor([(len(text.tokens) - 1) // size * size for text in texts])
    return torch.arange(length)[None] >= starts[:, None]


@torch.no_grad()
def check_texts(
    model: "PreTrainedModel", recall: Recall, plan: MemoryPlan, texts: Sequence[MemoryDocument]
) -> tuple[float, float, float, float]:
    """Return the held-out figures of a `MemoryPoint`: `held_out`, `later`, `forgetful` and `answers`."""
    forgetful = MemoryPlan(plan.segment, plan.sensory, plan.memories, plan.share, "initial", plan.query)
    whole, later, tokens, later_tokens, right, answered = _sums(model, recall, plan, texts)
    without, *_ = _sums(model, recall, forgetful, texts)
    return (
        whole / max(tokens, 1),
        later / later_tokens if later_tokens else math.nan,
        without / max(tokens, 1),
        right / answered if answered else math.nan,
    )


def _sums(
    model: "PreTrainedModel", recall: Recall, plan: MemoryPlan, texts: Sequence[MemoryDocument]
) -> tuple[float, float, int, int, int, int]:
    """Return the negative log-likelihoods of all and of later tokens, their counts, and counts of right and all answers."""
    device = model.get_input_embeddings().weight.device
    reader = SegmentReader(model, recall, plan)
    head = model.get_output_embeddings()
    surprise = later = 0.0
    tokens_seen = later_seen = right = answered = 0
    ordered = sorted(texts, key=lambda text: len(text.tokens))
    for start in range(0, len(ordered), CHECK_BATCH):
        batch = ordered[start : start + CHECK_BATCH]
        tokens, _ = padded(batch, device)
        sizes = torch.tensor([len(text.tokens) for text in batch], device=device)
        is_right = [True] * len(batch)
        for rows in reader.read(tokens):
            stop = min(rows.start + rows.hidden.shape[1], tokens.shape[1] - 1)
            if stop <= rows.start:
                continue
            logits = head(rows.hidden[:, : stop - rows.start]).float()
            places = torch.arange(rows.start + 1, stop + 1, device=device)
            following = tokens[:, rows.start + 1 : stop + 1]
            each = -logits.log_softmax(-1).gather(-1, following[..., None])[..., 0]
            is_text = places[None] < sizes[:, None]
            is_later = is_text & (places % plan.segment >= plan.summarised)[None]
            surprise += float(each[is_text].sum())
            later += float(each[is_later].sum())
            tokens_seen += int(is_text.sum())
            later_seen += int(is_later.sum())
            misses = (logits.argmax(-1) != following) & is_text
            for row, text in enumerate(batch):
                if text.answer:
                    first = len(text.tokens) - text.answer
                    is_right[row] &= not bool((misses[row] & (places >= first)).any())
        for row, text in enumerate(batch):
            if text.answer:
                answered += 1
                right += is_right[row]
    return surprise, later, tokens_seen, later_seen, right, answered
