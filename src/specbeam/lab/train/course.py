"""Training on trees that the target drew, with a saved state from which a killed run resumes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from specbeam.core import delete_leftovers
from specbeam.lab.train.batches import TreeBatch, batches_of
from specbeam.lab.train.fitting import FilledSchedule, Point, Training
from specbeam.lab.train.lessons import Lessons, Report
from specbeam.lab.train.trees import Trees


@runtime_checkable
class Student(Protocol):
    """A model or head in training."""

    @property
    def module(self) -> nn.Module:
        """The weights; those that require gradients are trained."""
        ...

    def loss(self, batch: TreeBatch) -> Tensor:
        """Return the loss of a batch, with gradients."""
        ...

    def accepted(self, batch: TreeBatch) -> list[tuple[Float[Tensor, " laws"], Float[Tensor, " laws"]]]:
        """Return the acceptance probabilities of drafts, and their weights, by depth."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained weights to a folder that `load(draft=...)` takes."""
        ...


@dataclass(frozen=True)
class Trained:
    """The result of training."""

    folder: Path  # give it to `load(draft=...)`
    weights: int  # number of trained weights
    curve: tuple[Point, ...]

    @property
    def acceptance(self) -> float:
        """The mean probability that a draft token at depth 1 is accepted, on held-out trees."""
        return self.curve[-1].acceptance


def take_course(
    student: Student, lessons: Lessons, schedule: FilledSchedule, folder: Path, device: torch.device, report: Report
) -> Trained:
    """Train to the end, write the student to the folder after each epoch, and return the curve.

    Args:
        folder: folder of the student; the state is kept in its folder `training`.
        report: called with "training", the number of finished files over all epochs, and of all files.
    """

    def check() -> tuple[float, ...]:
        return acceptances(student, lessons.held_out, schedule.batch_tokens, device)

    fit = Training(student.module, student.loss, check, schedule, lessons.files, folder / "training", device)
    fit.resume()
    delete_leftovers(folder)
    report("training", fit.done, fit.steps)
    for done in fit.run():
        if fit.file == 0:
            student.save(folder)
        report("training", done, fit.steps)
    student.save(folder)
    weights = sum(weight.numel() for weight in student.module.parameters() if weight.requires_grad)
    return Trained(folder, weights, tuple(fit.curve))


@torch.no_grad()
def acceptances(student: Student, trees: Trees, batch_tokens: int, device: torch.device) -> tuple[float, ...]:
    """Return the mean acceptance probability of a draft token by depth; nodes are weighted by their number of children."""
    sums: list[tuple[float, float]] = []
    for batch in batches_of(trees, batch_tokens, np.random.default_rng(0)):
        found = student.accepted(batch.to(device))
        sums += [(0.0, 0.0)] * (len(found) - len(sums))
        for depth, (overlaps, weights) in enumerate(found):
            accepted, weight = sums[depth]
            sums[depth] = (accepted + (overlaps * weights).sum().item(), weight + weights.sum().item())
    return tuple(accepted / weight if weight else math.nan for accepted, weight in sums) or (math.nan,)
