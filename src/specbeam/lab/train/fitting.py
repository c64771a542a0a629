"""The training loop: batches from files of trees, two optimizers, and a state on disk from which a killed run resumes."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specbeam.doors import is_integer, require
from specbeam.engines import prefers_bfloat16
from specbeam.errors import NotSupported
from specbeam.lab.train.batches import TreeBatch, batches_of
from specbeam.lab.train.state import STATE_S, keep_state, resume_from, write_curve
from specbeam.lab.train.trees import Trees

HEADS = {"lm_head", "embed_out", "matrices", "markov_w2"}  # names of output matrices, or of lists of them


def rate_factor(part: float, warm: float, decay: float) -> float:
    """Return the factor of the learning rates after a share of all steps: it rises, stays at 1, and falls to zero.

    Args:
        part: share of the steps that are done.
        warm: share of the steps, at the beginning, in which it rises.
        decay: share of the steps, at the end, in which it falls.
    """
    return min(1.0, part / warm, (1 - part) / decay)


@dataclass(frozen=True)
class Schedule:
    """Duration and rates of a training.

    Args:
        epochs: number of times that each tree is learned from.
        rate: learning rate of the blocks' matrices, see `new_optimizers`; None: the default for the kind of model.
        embedding_rate: learning rate of Adam, for embeddings, heads, norms and biases; None: the default.
        batch_tokens: number of tokens of a batch, padding included; None: the default.
        warm: share of all steps in which rates rise.
        decay: share of all steps, at the end, in which rates fall to zero.
        seed: the same seed gives the same batches and the same initial weights.
    """

    epochs: int = 4
    rate: float | None = None
    embedding_rate: float | None = None
    batch_tokens: int | None = None
    warm: float = 0.02
    decay: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `BadSetting` if a value is invalid."""
        require(is_integer(self.epochs) and self.epochs >= 1, "epochs", self.epochs, "an integer of at least 1")
        require(self.rate is None or self.rate > 0, "rate", self.rate, "above 0")
        is_rate = self.embedding_rate is None or self.embedding_rate > 0
        require(is_rate, "embedding_rate", self.embedding_rate, "above 0")
        is_count = self.batch_tokens is None or (is_integer(self.batch_tokens) and self.batch_tokens >= 1)
        require(is_count, "batch_tokens", self.batch_tokens, "an integer of at least 1")
        require(0 < self.warm <= 1, "warm", self.warm, "in (0, 1]")
        require(0 < self.decay <= 1, "decay", self.decay, "in (0, 1]")
        require(is_integer(self.seed), "seed", self.seed, "an integer")

    def filled(self, usual: Mapping[str, Any]) -> "FilledSchedule":
        """Return the schedule completed by defaults."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return FilledSchedule(**{**usual, **given})

    def rate_factor(self, part: float) -> float:
        """See the function `rate_factor`."""
        return rate_factor(part, self.warm, self.decay)


@dataclass(frozen=True, kw_only=True)
class FilledSchedule(Schedule):
    """A schedule with all rates and sizes."""

    rate: float
    embedding_rate: float
    batch_tokens: int


@dataclass(frozen=True)
class Point:
    """A point of the training curve."""

    epoch: int  # finished epochs
    seconds: float  # training time so far, summed over all runs
    loss: float  # mean over the epoch's batches; NaN before the first
    acceptance: float  # weighted mean acceptance probability at depth 1, on held-out trees
    deeper: tuple[float, ...] = ()  # the same at depths 2, 3, ..., for models that draft that deep


class Training:
    """Training of one model.

    Products are in bfloat16 where this is faster (`prefers_bfloat16`); weights, laws and losses stay in float32. A resumed
    training keeps its arithmetic.

    Args:
        model: the model to train.
        loss: returns the loss of a batch.
        check: returns the acceptance on held-out trees, by depth of the draft.
        files: files of trees to learn from.
        folder: folder of the state.
        device: device of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[TreeBatch], Tensor],
        check: Callable[[], tuple[float, ...]],
        schedule: FilledSchedule,
        files: list[Path],
        folder: Path,
        device: torch.device,
    ) -> None:
        self.model = model
        self.loss = loss
        self.check = check
        self.schedule = schedule
        self.files = files
        self.folder = folder
        self.device = device
        self.optimizers = new_optimizers(model, schedule)
        self.in_bfloat16 = prefers_bfloat16(device)
        self.epoch = 0  # finished epochs
        self.file = 0  # finished files of this epoch
        self.losses: list[float] = []  # losses of this epoch
        self.seconds = 0.0
        self.curve: list[Point] = []

    @property
    def steps(self) -> int:
        """The number of files in all epochs."""
        return len(self.files) * self.schedule.epochs

    @property
    def done(self) -> int:
        """The number of files finished in all epochs."""
        return self.epoch * len(self.files) + self.file

    def run(self) -> Iterator[int]:
        """Train to the end; yield the number of finished files after each. The state is saved each minute and each epoch."""
        if not self.curve:
            self._add_point(float("nan"))
        kept = time.monotonic()
        while self.epoch < self.schedule.epochs:
            began = time.monotonic()
            self._learn_file()
            self.seconds += time.monotonic() - began
            if self.file == len(self.files):
                self._finish_epoch()
                self.keep()
            elif time.monotonic() - kept > STATE_S:
                self.keep()
                kept = time.monotonic()
            yield self.done

    def _learn_file(self) -> None:
        """Learn from the next file of this epoch."""
        rng = np.random.default_rng([self.schedule.seed, self.epoch])
        order = rng.permutation(len(self.files))
        trees = Trees.read(self.files[order[self.file]])
        # Losses may draw from torch's global stream: a resumed run must get the same numbers for this file.
        random = np.random.default_rng([self.schedule.seed, self.epoch, self.file, 1])
        torch.manual_seed(int(random.integers(2**62)))
        rng = np.random.default_rng([self.schedule.seed, self.epoch, self.file])
        batches = list(batches_of(trees, self.schedule.batch_tokens, rng))
        for number, batch in enumerate(batches):
            part = (self.done + (number + 0.5) / len(batches)) / self.steps
            set_rates(self.optimizers, self.schedule.rate_factor(part))
            self.losses += self._learn(batch.to(self.device))
        self.file += 1

    def _learn(self, batch: TreeBatch) -> list[float]:
        """Take one step, and return the loss before it; an empty list if the batch has no drafts to learn."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.in_bfloat16):
            value = self.loss(batch)
        if not value.requires_grad:
            return []
        value.backward()
        take_step(self.optimizers, self.model.parameters())
        return [value.item()]

    def _finish_epoch(self) -> None:
        self.epoch += 1
        self.file = 0
        self._add_point(sum(self.losses) / len(self.losses) if self.losses else math.nan)
        self.losses = []

    def _add_point(self, loss: float) -> None:
        acceptance, *deeper = self.check()
        self.curve.append(Point(self.epoch, round(self.seconds, 1), loss, acceptance, tuple(deeper)))
        write_curve(self.folder, self.curve)

    def keep(self) -> None:
        """Write the state to disk, atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "in_bfloat16": self.in_bfloat16,
            "epoch": self.epoch,
            "file": self.file,
            "losses": self.losses,
            "seconds": self.seconds,
            "curve": [asdict(point) for point in self.curve],
        }
        keep_state(self.folder, state)

    def resume(self) -> bool:
        """Resume from the state on disk. Returns False without one; raises `BadSetting` if it is broken."""
        return resume_from(self.folder, self.device, self._restore)

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.in_bfloat16 = state["in_bfloat16"]
        self.epoch = state["epoch"]
        self.file = state["file"]
        self.losses = state["losses"]
        self.seconds = state["seconds"]
        self.curve = [Point(**point) for point in state["curve"]]


def set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set all learning rates to this multiple of their peaks, the rates that the optimizers were made with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group.setdefault("peak", group["lr"])


def take_step(optimizers: Sequence[torch.optim.Optimizer], weights: Iterable[Tensor]) -> None:
    """Take one step with the gradients of the weights, clipped to a norm of 1, and clear the gradients."""
    nn.utils.clip_grad_norm_(weights, 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def check_optimizers() -> None:
    """Raise `NotSupported` if torch is older than 2.9, which has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise NotSupported(
            f"training needs the optimizer Muon of torch 2.9 or newer; this is torch {torch.__version__}"
        )


def new_optimizers(model: nn.Module, schedule: FilledSchedule) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the blocks, and AdamW for all other weights.

    Matrices under a parametrisation, which round, are learnt by AdamW at the rate of matrices: Muon moves all directions of
    a matrix alike, but a step changes a rounded weight only near the border of two numbers.
    """
    outside = {id(weight) for weight in _embeddings(model)}
    learnt = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    rounded = [weight for name, weight in learnt.items() if name.endswith(".original")]
    outside |= {id(weight) for weight in rounded}
    inside = [weight for weight in learnt.values() if weight.ndim == 2 and id(weight) not in outside]
    apart = {id(weight) for weight in (*inside, *rounded)}
    others = [weight for weight in learnt.values() if id(weight) not in apart]
    found: list[torch.optim.Optimizer] = []
    if rounded:
        found.append(torch.optim.AdamW(rounded, lr=schedule.rate, betas=(0.9, 0.98), weight_decay=0.0))
    if inside:
        found.append(torch.optim.Muon(inside, lr=schedule.rate, weight_decay=0.0))
    if others:
        found.append(torch.optim.AdamW(others, lr=schedule.embedding_rate, betas=(0.9, 0.98), weight_decay=0.0))
    return found


def _embeddings(model: nn.Module) -> list[Tensor]:
    """Return the weights of embeddings and of output matrices."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = [module for name, module in model.named_modules() if HEADS & set(name.split(".")[-2:])]
    return [weight for module in (*modules, *heads) for weight in module.parameters()]
