"""Training of draft heads for a target: one trainer, and for each kind the functions that make and write a head."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from specbeam import Pair, load
from specbeam.core import FINAL
from specbeam.doors import HEAD_KINDS, HeadKind
from specbeam.engines import output_shape
from specbeam.errors import BadSetting
from specbeam.lab.train.batches import TreeBatch, batches_of
from specbeam.lab.train.chimera import new_chimera
from specbeam.lab.train.course import Trained, take_course
from specbeam.lab.train.drawing import DrawPlan, Prompt
from specbeam.lab.train.dspark import new_dspark, save_dspark
from specbeam.lab.train.eagle3 import new_eagle3, save_eagle3
from specbeam.lab.train.eesd import new_eesd
from specbeam.lab.train.exit_choice import chosen_exit
from specbeam.lab.train.extra_rows import RankedDrafts, new_bita, new_hidden_transfer, rank_odds, save_extra_rows
from specbeam.lab.train.fitting import Schedule, check_optimizers
from specbeam.lab.train.folders import keep_options, prefixed, work_folder
from specbeam.lab.train.fspad import new_eagle, new_fspad
from specbeam.lab.train.head_files import as_written, save_own
from specbeam.lab.train.lessons import Lessons, Report, check_prompts, drawn_lessons, lesson_options, warn_of_rounding
from specbeam.lab.train.losses import Lesson, draft_loss, overlap
from specbeam.lab.train.medusa import new_medusa, save_medusa
from specbeam.lab.train.peagle import new_peagle, save_peagle
from specbeam.lab.train.plan import HeadPlan, plan_of_kind
from specbeam.lab.train.specdiff import masked_lesson, new_specdiff
from specbeam.lab.train.teacher import scored
from specbeam.lab.train.trees import Trees
from specbeam.models.heads import DraftRows, ExtraHead, Head, ScoredTrees

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plain_lesson(head: Head, trees: ScoredTrees, learnt: Bool[Tensor, "rows length"], plan: HeadPlan) -> Lesson:
    """Return the drafts of a head at the training nodes of trees: the lesson of most kinds of heads."""
    return Lesson(head.drafts(trees, plan.depth, learnt))


@dataclass(frozen=True)
class Kind:
    """A kind of head that can be trained.

    Attributes:
        options: the defaults of the kind, and the options that it takes.
        new: makes an untrained head from the target, the plan, and the tokens of its vocabulary.
        save: writes a head to a folder.
        lesson: makes the drafts of a batch on which the loss is computed.
    """

    options: HeadKind
    new: "Callable[[PreTrainedModel, HeadPlan, Int64[Tensor, ' tokens'] | None], Head]"
    save: "Callable[[Head, PreTrainedModel, HeadPlan, Path], None]"
    lesson: "Callable[[Head, ScoredTrees, Bool[Tensor, 'rows length'], HeadPlan], Lesson]" = plain_lesson

    @property
    def usual(self) -> Mapping[str, Any]:
        """The defaults of `HeadPlan` for the kind."""
        return self.options.usual

    @property
    def takes(self) -> tuple[str, ...]:
        """The options of `HeadPlan` that the kind uses; all kinds use `variation`."""
        return self.options.takes

    @property
    def schedule(self) -> Mapping[str, Any]:
        """The defaults of `Schedule` for the kind."""
        return self.options.schedule


KINDS = {
    "eagle3": Kind(HEAD_KINDS["eagle3"], new_eagle3, save_eagle3),
    "peagle": Kind(HEAD_KINDS["peagle"], new_peagle, save_peagle),
    "dspark": Kind(HEAD_KINDS["dspark"], new_dspark, save_dspark),
    "eagle": Kind(HEAD_KINDS["eagle"], new_eagle, partial(save_own, "eagle")),
    "fspad": Kind(HEAD_KINDS["fspad"], new_fspad, partial(save_own, "fspad")),
    "medusa": Kind(HEAD_KINDS["medusa"], new_medusa, save_medusa),
    "chimera": Kind(HEAD_KINDS["chimera"], new_chimera, partial(save_own, "chimera")),
    "specdiff": Kind(HEAD_KINDS["specdiff"], new_specdiff, partial(save_own, "specdiff"), masked_lesson),
    "eesd": Kind(HEAD_KINDS["eesd"], new_eesd, partial(save_own, "eesd")),
    "bita": Kind(HEAD_KINDS["bita"], new_bita, save_extra_rows),
    "hidden_transfer": Kind(HEAD_KINDS["hidden_transfer"], new_hidden_transfer, save_extra_rows),
}


def train_head(
    kind: str,
    target: "Pair | str | Path",
    prompts: Sequence[Prompt],
    out: str | Path,
    *,
    trees: str | Path | None = None,
    plan: Mapping[str, Any] | None = None,
    draws: DrawPlan | None = None,
    schedule: Schedule | None = None,
    report: Report = lambda *_: None,
) -> Trained:
    """Train a draft head for a target, and write it to a folder that `load(target, draft=folder)` takes.

    The target draws beams below each prompt; the head learns the target's laws at beams with children, weighted by their
    number, from the target's hidden states above. It learns drafts of all depths at once, the deeper ones from its own
    states, as in drafting. Only prompts are needed. A tenth of them, at most 512, is held out.

    Call it again with the same arguments to resume a killed run; see `train_draft`.

    Args:
        kind: one of `KINDS`.
        target: the target, loaded or a path or hub id.
        prompts: texts, or lists of token ids, that the target continues; similar to later prompts.
        out: the folder to write.
        trees: the folder of the target's draws, which several trainings with the same prompts, draws and seed may share;
            None: `out/training/trees`.
        plan: options of `HeadPlan`, such as {"layers": 2}; the others have the defaults of the kind.
        draws: how the target draws; None: four beams at temperature 1.
        schedule: duration and rates; missing rates and batch sizes have the defaults of the kind.
        report: called with the current stage, the amount done and the total.

    Raises:
        BadSetting: an option is wrong, or a folder holds work with other options.
        MissingFile: the target cannot be loaded.
        BadPrompt: the prompts are too few, or the target cannot continue them.
        NotSupported: the target does not keep its layers in one list.
    """
    check_optimizers()
    check_prompts(prompts)
    if kind not in KINDS:
        raise BadSetting(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    draws = draws or DrawPlan()
    schedule = (schedule or Schedule()).filled(KINDS[kind].schedule)
    pair = target if isinstance(target, Pair) else load(target)
    warn_of_rounding(pair)
    options = plan_of_kind(pair.target_model, KINDS[kind].options, plan, f"{kind} heads")
    folder = Path(out)
    training = folder / "training"
    said = {
        "kind": kind,
        **lesson_options(pair, prompts, draws, schedule.seed),
        **prefixed("plan", options),
        **prefixed("schedule", schedule),
    }
    with work_folder(training, said, "state.pt"):
        lessons = drawn_lessons(pair, prompts, draws, schedule.seed, Path(trees or training / "trees"), report)
        if kind == "eesd" and options.exit_layer is None:
            after = chosen_exit(
                pair,
                lessons,
                lambda tried: HeadStudent(tried, pair.target_model, options, KINDS[kind].save),
                schedule,
                training,
                report,
            )
            options = replace(options, exit_layer=after)
        torch.manual_seed(schedule.seed)
        head = KINDS[kind].new(pair.target_model, options, known_tokens(lessons, options, pair.target.vocab))
        keep_options(training, said)
        head.to(pair.target.device)
        student = HeadStudent(head, pair.target_model, options, KINDS[kind].save, KINDS[kind].lesson)
        if isinstance(head, ExtraHead):
            student = ExtraStudent(
                head, pair.target_model, options, KINDS[kind].save, lessons.held_out, schedule.batch_tokens
            )
        return take_course(student, lessons, schedule, folder, pair.target.device, report)


def known_tokens(lessons: Lessons, plan: HeadPlan, vocab: int) -> Int64[Tensor, " tokens"] | None:
    """Return the tokens of a head's vocabulary, ascending: the likeliest by the target's laws; None: all."""
    count = plan.draft_vocab
    if count >= vocab:
        return None
    mass = torch.zeros(vocab, dtype=torch.float64)
    for path in lessons.files:
        trees = Trees.read(path)
        each = torch.from_numpy(trees.logp).double().exp()
        mass.index_add_(0, torch.from_numpy(trees.ids).long().flatten(), each.flatten())
    order = torch.argsort(mass, descending=True, stable=True)
    return order[:count].sort().values


class HeadStudent:
    """A head in training; see `Student`."""

    def __init__(
        self,
        head: Head,
        target: "PreTrainedModel",
        plan: HeadPlan,
        save: "Callable[[Head, PreTrainedModel, HeadPlan, Path], None]",
        lesson: "Callable[[Head, ScoredTrees, Bool[Tensor, 'rows length'], HeadPlan], Lesson]" = plain_lesson,
    ) -> None:
        self.module: Head = head
        self.target = target
        self.plan = plan
        self.write = save
        self.lesson = lesson
        self.own_number: Tensor | None = None  # place of each of the target's tokens in the head's vocabulary, or -1
        if head.tokens is not None:
            numbers = torch.full((output_shape(target)[0],), -1)
            numbers[head.tokens] = torch.arange(len(head.tokens))
            self.own_number = numbers.to(head.device)

    def loss(self, batch: TreeBatch) -> Tensor:
        """See `Student.loss`: a weighted mean over depths, each `decay` times the one before, and the kind's own loss."""
        total = torch.zeros((), device=batch.tokens.device)
        weight = 0.0
        trees = scored(self.target, batch, self.module.taps)
        lesson = self.lesson(self.module, trees, batch.learnt, self.plan)
        number = numbers_of(batch.learnt)
        for depth, rows in enumerate(lesson.drafts):
            laws = number[rows.nodes]
            if len(laws) == 0:
                continue
            share = self.plan.decay**depth
            total = total + share * self._loss_of(rows, batch, laws, trees)
            weight += share
        total = total / weight if weight else total
        return total if lesson.other is None else (1 - lesson.share) * total + lesson.share * lesson.other

    def _loss_of(self, rows: DraftRows, batch: TreeBatch, laws: Int64[Tensor, " drafts"], trees: ScoredTrees) -> Tensor:
        """Return the loss of the drafts of a depth."""
        weights = batch.weights[laws]
        accepted, surprise = self._overlap(rows.logits, batch, laws)
        lost = draft_loss(accepted, surprise, weights, self.plan.variation)
        if rows.confidence is not None:
            odds = accepted.detach().clamp(0, 1)
            each = functional.binary_cross_entropy_with_logits(rows.confidence.float(), odds, reduction="none")
            lost = lost + (each * weights).sum() / weights.sum()
        if rows.estimates is not None:
            true = trees.states[FINAL].flatten(0, 1)[rows.nodes]
            each = functional.smooth_l1_loss(rows.estimates.float(), true, reduction="none").mean(-1)
            lost = lost + self.plan.regression * (each * weights).sum() / weights.sum()
        return lost

    def accepted(self, batch: TreeBatch) -> list[tuple[Float[Tensor, " laws"], Float[Tensor, " laws"]]]:
        """See `Student.accepted`."""
        trees = scored(self.target, batch, self.module.taps)
        number = numbers_of(batch.learnt)
        found = []
        for rows in self.module.drafts(trees, self.plan.depth, batch.learnt):
            laws = number[rows.nodes]
            overlaps, _ = self._overlap(rows.logits, batch, laws)
            found.append((overlaps, batch.weights[laws]))
        return found

    def save(self, folder: Path) -> None:
        """See `Student.save`."""
        self.write(self.module, self.target, self.plan, folder)

    def _overlap(self, logits: Tensor, batch: TreeBatch, laws: Int64[Tensor, " drafts"]) -> tuple[Tensor, Tensor]:
        ids = batch.ids[laws]
        if self.own_number is None:
            return overlap(logits, ids, batch.logp[laws])
        own = self.own_number[ids]
        return overlap(logits, own.clamp_min(0), batch.logp[laws], own >= 0)


def numbers_of(learnt: Bool[Tensor, "rows length"]) -> Int64[Tensor, " nodes"]:
    """Return for each node, in reading order, the number of its law; meaningless for nodes without a law."""
    numbers: Tensor = learnt.flatten().cumsum(0) - 1
    return numbers


class ExtraStudent(HeadStudent):
    """A head of extra rows in the target's pass, in training; the probabilities of its likeliest tokens are saved with
    it.

    Args:
        held_out: trees on which these probabilities are measured.
        batch_tokens: number of tokens of a batch.
    """

    module: ExtraHead

    def __init__(
        self,
        head: ExtraHead,
        target: "PreTrainedModel",
        plan: HeadPlan,
        save: "Callable[[Head, PreTrainedModel, HeadPlan, Path], None]",
        held_out: Trees,
        batch_tokens: int,
    ) -> None:
        super().__init__(head, target, plan, save)
        self.held_out = held_out
        self.batch_tokens = batch_tokens

    def save(self, folder: Path) -> None:
        """See `Student.save`."""
        learnt = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}
        with torch.no_grad():
            for weight in self.module.parameters():  # acceptance is measured with the weights that are written
                weight.copy_(as_written(weight))
        self.module.ranks = rank_odds(self._ranked_batches())
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                weight.copy_(learnt[name])
        super().save(folder)

    @torch.no_grad()
    def _ranked_batches(self) -> "Iterator[list[RankedDrafts]]":
        """Yield the drafts of each batch of held-out trees, by depth."""
        for batch in batches_of(self.held_out, self.batch_tokens, np.random.default_rng(0)):
            here = batch.to(self.module.device)
            trees = scored(self.target, here, self.module.taps)
            number = numbers_of(here.learnt)
            drafts = []
            for rows in self.module.drafts(trees, self.plan.depth, here.learnt):
                laws = number[rows.nodes]
                drafts.append(RankedDrafts(rows.logits, here.ids[laws], here.logp[laws], here.weights[laws]))
            yield drafts
