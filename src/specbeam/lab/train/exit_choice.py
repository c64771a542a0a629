"""The choice of an exit layer's depth, by short trials of a few depths and measured pass costs.

More of the target's layers before it make drafts better and slower. The best number depends on the target and the machine.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbeam import Pair
from specbeam.core import NumberField, RecordFields, write_whole
from specbeam.engines import layers_of
from specbeam.lab.train.batches import TreeBatch, batches_of
from specbeam.lab.train.course import Student, acceptances
from specbeam.lab.train.fitting import FilledSchedule, new_optimizers, set_rates, take_step
from specbeam.lab.train.lessons import Lessons, Report
from specbeam.lab.train.trees import Trees, read_or_refuse
from specbeam.models import HuggingFaceLM
from specbeam.models.heads import ExitHead, ExitLM, exit_model
from specbeam.recipes import curve_of, rest_curve

TRIAL_BATCHES = 24  # batches of the training of a trial
HELD_OUT_TREES = 64  # trees of the check of a trial
DEEPEST = 16  # length of the longest chain of drafts that is considered
FILE = "exits.json"


@dataclass(frozen=True)
class ExitFigures:
    """The figures of a short trial of an exit layer after a number of the target's layers.

    Attributes:
        after: number of the target's layers before it.
        acceptance: mean acceptance probability of a draft token, on held-out trees.
        draft_s: seconds of a draft step.
        rest_s: seconds of the target's pass over one row, without the layers that drafting has run.
        depth: the chain length with the most tokens per second.
        speed: tokens per second at that length, relative to decoding without drafts.
    """

    after: int
    acceptance: float
    draft_s: float
    rest_s: float
    depth: int
    speed: float


def chosen_exit(
    pair: Pair,
    lessons: Lessons,
    student_of: Callable[[ExitHead], Student],
    schedule: FilledSchedule,
    folder: Path,
    report: Report,
) -> int:
    """Return the number of layers after which an exit layer is expected to give most tokens per second.

    The figures are stored in the folder, so that a resumed training uses the same number.

    Args:
        report: called with "choosing", the number of finished trials, and of all trials.
    """
    path = folder / FILE
    if path.exists():
        return read_or_refuse(path, lambda: _best(_figures_in(json.loads(path.read_text()))))
    numbers = candidates(len(layers_of(pair.target_model)))
    figures = []
    for done, after in enumerate(numbers):
        report("choosing", done, len(numbers))
        figures.append(tried_exit(pair, ExitHead(pair.target_model, after), lessons, student_of, schedule))
    report("choosing", len(numbers), len(numbers))
    write_whole(path, (json.dumps([asdict(one) for one in figures], indent=2) + "\n").encode())
    return _best(figures)


_FIGURES = RecordFields(
    {
        "after": NumberField(least=1, is_whole=True),
        "acceptance": NumberField(most=1.0),
        "draft_s": NumberField(),
        "rest_s": NumberField(),
        "depth": NumberField(least=1, most=DEEPEST, is_whole=True),
        "speed": NumberField(),
    }
)


def _figures_in(kept: Any) -> list[ExitFigures]:
    """Return the figures in a file. Raises `ValueError` if they are invalid."""
    if not isinstance(kept, list) or not all(_FIGURES.accepts(one) for one in kept):
        raise ValueError("it does not hold figures of exit layers")
    return [ExitFigures(**one) for one in kept]


def _best(figures: list[ExitFigures]) -> int:
    return max(figures, key=lambda one: one.speed).after


def candidates(layers: int) -> list[int]:
    """Return the exit depths to try for a target: up to half of its layers, denser near the first layers.

    >>> candidates(10), candidates(32), candidates(2)
    ([1, 2, 3, 5], [1, 2, 4, 8, 16], [1])
    """
    wanted = {1, 2, layers // 8, layers // 4, layers // 2}
    if layers < 16:
        wanted.add(layers // 3)
    return sorted(number for number in wanted if 1 <= number < layers)


def tried_exit(
    pair: Pair, head: ExitHead, lessons: Lessons, student_of: Callable[[ExitHead], Student], schedule: FilledSchedule
) -> ExitFigures:
    """Train an exit layer for a few batches, and return its expected figures."""
    head.to(pair.target.device)
    student = student_of(head)
    trees = Trees.read(lessons.files[0])
    batches = list(batches_of(trees, schedule.batch_tokens, np.random.default_rng(schedule.seed)))[:TRIAL_BATCHES]
    _teach(student, [batch.to(pair.target.device) for batch in batches], schedule)
    held_out = lessons.held_out.first(HELD_OUT_TREES)
    acceptance, *_ = acceptances(student, held_out, schedule.batch_tokens, pair.target.device)
    head.requires_grad_(False).to(
        pair.target_model.dtype
    )  # runs as it would in drafting: one model with the target's first layers
    draft = exit_model(head, pair.forgetful_target)
    return expected_speed(pair.forgetful_target, draft, head.after, acceptance)


def _teach(student: Student, batches: list[TreeBatch], schedule: FilledSchedule) -> None:
    """Take one step with each batch; the rates rise and fall as in a whole training."""
    optimizers = new_optimizers(student.module, schedule)
    for number, batch in enumerate(batches):
        set_rates(optimizers, schedule.rate_factor((number + 0.5) / len(batches)))
        loss = student.loss(batch)
        if loss.requires_grad:
            loss.backward()
            take_step(optimizers, student.module.parameters())


def expected_speed(target: HuggingFaceLM, draft: Any, after: int, acceptance: float) -> ExitFigures:
    """Return the best chain of drafts of an exit layer by the measured cost of passes, at a constant acceptance rate.

    It is the length K with the most expected tokens, 1 + a + ... + a^K, per second of a turn: K draft steps and the
    target's pass over K + 1 rows. Time outside the models is left out.

    Args:
        draft: the exit layer as a draft model.
        acceptance: a.
    """
    whole = curve_of(target)
    steps = curve_of(draft)
    layers = len(layers_of(target.model))
    rest = rest_curve(whole, steps, layers, after) if isinstance(draft, ExitLM) else whole
    speeds = []
    for length in range(1, DEEPEST + 1):
        tokens = float((acceptance ** np.arange(length + 1)).sum())
        seconds = length * steps.pass_s(1) + rest.pass_s(length + 1)
        speeds.append(tokens / seconds * whole.pass_s(1))
    best = int(np.argmax(speeds))
    return ExitFigures(after, acceptance, steps.pass_s(1), rest.pass_s(1), best + 1, speeds[best])
