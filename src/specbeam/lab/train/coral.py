"""COrAL: a target whose last layers also predict the tokens after the next one, and those behind (arXiv 2410.09675).

A row of a window is a state that enters the last layers once more at another position: the rotation of its queries selects
the token to predict (models/heads/window.py). No weights are added. The target itself is trained, so it becomes another
model with another law. It verifies the drafts of the window ahead like any draft (`hidden_transfer`), or refines blocks by
both windows (`coral`), which changes the law again.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from specbeam import Pair, load
from specbeam.core import whole_files_in
from specbeam.doors import WINDOW_KIND
from specbeam.engines import is_llama_like, layers_of
from specbeam.errors import NotSupported
from specbeam.lab.train.course import Trained, take_course
from specbeam.lab.train.drawing import DrawPlan, Prompt
from specbeam.lab.train.fitting import FilledSchedule, Schedule, check_optimizers
from specbeam.lab.train.folders import keep_options, prefixed, work_folder
from specbeam.lab.train.head_files import write_head
from specbeam.lab.train.heads import ExtraStudent
from specbeam.lab.train.lessons import Lessons, Report, check_prompts, drawn_lessons, lesson_options, warn_of_rounding
from specbeam.lab.train.losses import Lesson
from specbeam.lab.train.plan import HeadPlan, plan_of_kind
from specbeam.lab.train.teacher import scored_again
from specbeam.models import last_norm
from specbeam.models.heads import (
    DraftRows,
    Head,
    HiddenTransfer,
    ScoredTrees,
    extra_rows_config,
    logits_of,
    offsets_of,
    seen_in_window,
    through_last_layers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = "window"  # folder of the head inside the folder of the model
LAYERS = 2  # number of last layers that are trained by default
BEHIND = 0.3  # share of the window behind in the loss
ROWS_BEHIND = 3  # rows of each window behind that are learned in a step, of all its rows
# The share of replaced tokens of a tree: mean, spread and maximum of a normal distribution, truncated at 0 as well.
MEAN_SHARE = 0.25
SPREAD = 0.25
MOST_SHARE = 0.5


def train_coral(
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
    """Train a copy of a target to predict windows of tokens ahead and behind, and write it to a folder with their head.

    `load(out, draft=Path(out) / "window")` takes both. The written model differs from the target: its last layers, and
    the norm after them, predict the target's law of the next token as before, and also the tokens after it and those
    behind, on texts with replaced tokens. In the training curve, the acceptance at depth 1 is the overlap of the new law
    with the target's, which shows how far the law has moved; deeper values measure the window ahead. Call it again with
    the same arguments to resume a killed run; see `train_draft`.

    Args:
        target: the target, loaded or a path or hub id: a Llama, Mistral or Qwen2.
        prompts: texts, or lists of token ids, that the target is asked to continue.
        out: the folder to write.
        trees: see `train_head`.
        plan: the options `depth`, the number of tokens of the window ahead (3), `behind`, of the window behind (8; 0: none),
            `enters`, the first trained layer (the last but one), `decay` and `variation` of `HeadPlan`.
        draws: how the target draws; None: four beams at temperature 1.
        schedule: duration and rates.
        report: see `train_head`.

    Raises:
        BadSetting: an option is wrong, or a folder holds work with other options.
        MissingFile: the target cannot be loaded.
        BadPrompt: the prompts are too few, or the target cannot continue them.
        NotSupported: the target is of another family.
    """
    check_optimizers()
    check_prompts(prompts)
    draws = draws or DrawPlan()
    schedule = (schedule or Schedule()).filled(WINDOW_KIND.schedule)
    pair = target if isinstance(target, Pair) else load(target)
    warn_of_rounding(pair)
    if not is_llama_like(pair.target_model):
        raise NotSupported(
            f"windows are for Llama, Mistral and Qwen2 models; this is {type(pair.target_model).__name__}"
        )
    last = max(len(layers_of(pair.target_model)) - LAYERS, 1)
    kind = replace(WINDOW_KIND, usual={**WINDOW_KIND.usual, "enters": last})
    options = plan_of_kind(pair.target_model, kind, plan, "windows")
    folder = Path(out)
    said = {
        "kind": "coral",
        **lesson_options(pair, prompts, draws, schedule.seed),
        **prefixed("plan", options),
        **prefixed("schedule", schedule),
    }
    with work_folder(folder / "training", said, "state.pt"):
        drawn = Path(trees or folder / "training" / "trees")
        lessons = drawn_lessons(pair, prompts, draws, schedule.seed, drawn, report)
        keep_options(folder / "training", said)
        model = copy.deepcopy(pair.target_model).float().eval()
        window = LearntWindow(model, options.depth, options.enters, options.behind)
        student = CoralStudent(window, pair, options, lessons, schedule)
        return take_course(student, lessons, schedule, folder, pair.target.device, report)


class LearntWindow(HiddenTransfer):
    """The window of a model whose last layers, and the norm after them, are trained.

    It is a Hidden Transfer head whose maps are the identity and are not trained.

    Args:
        enters: the first of these layers.
    """

    def __init__(self, model: "PreTrainedModel", depth: int, enters: int, behind: int = 0) -> None:
        layers = layers_of(model)
        super().__init__(model, depth, enters, int(model.config.hidden_size), behind)
        for frozen in (self.maps, model):
            frozen.requires_grad_(False)
        self.learnt = nn.ModuleList([*layers[enters:], last_norm(model)]).requires_grad_(True)
        self.maps.to(next(layers[-1].parameters()).device)

    @property
    def taps(self) -> tuple[int, ...]:
        """The input of the first of these layers."""
        return (self.layer,)

    def drafts(self, trees: ScoredTrees, depth: int, wanted: Bool[Tensor, "rows length"]) -> list[DraftRows]:
        """See `Head.drafts`. The model's laws of the next token come before the window's drafts."""
        nodes = wanted.flatten().nonzero()[:, 0]
        nothing = trees.tokens.new_zeros(len(trees.tokens), 0)
        states, _ = self._after_last_layers(trees, nothing, 0)
        own = DraftRows(nodes, logits_of(self.target, states.flatten(0, 1)[nodes]))
        return [own, *super().drafts(trees, depth, wanted)]

    def rows(
        self, trees: ScoredTrees, anchors: Int64[Tensor, "rows anchors"], depth: int
    ) -> Float[Tensor, "rows anchors depth width"]:
        """See `ExtraHead.rows`. Gradients flow to the layers."""
        _, window = self._after_last_layers(trees, anchors, depth)
        return window

    def behind_loss(self, trees: ScoredTrees, corrupted: ScoredTrees, drawn: Bool[Tensor, "rows length"]) -> Tensor:
        """Return the mean cross-entropy of true tokens by windows behind on corrupted trees.

        Of each node's window `ROWS_BEHIND` rows are taken at random.

        Args:
            trees: trees with their true tokens.
            corrupted: the same trees with some tokens replaced, and the hidden states on these.
            drawn: nodes whose tokens the target drew; others are not learned.
        """
        rows, length = trees.tokens.shape
        device = trees.tokens.device
        back = torch.rand(rows, length, self.behind, device=device).argsort(-1)[..., :ROWS_BEHIND]
        above = trees.columns[..., None].expand_as(back)
        for step in range(1, self.behind):
            parent = trees.above(above.flatten(1)).view_as(above)
            above = torch.where(back >= step, parent, above)
        taught = drawn.gather(1, above.flatten(1)).view_as(above) & (trees.depths[..., None] > back)
        states = corrupted.states[self.layer]
        count = back.shape[-1]
        again = states.repeat_interleave(count, 1)
        moved = (trees.depths[..., None] - 1 - back).clamp_min(0).flatten(1)
        own = torch.eye(length * count, dtype=torch.bool, device=device).expand(rows, -1, -1)
        _, window = self._with_rows(corrupted, again, moved, trees.sees.repeat_interleave(count, 1), own)
        wanted = trees.tokens.gather(1, above.flatten(1))
        taken = taught.flatten(1)
        return functional.cross_entropy(logits_of(self.target, window[taken]).float(), wanted[taken])

    def _after_last_layers(
        self, trees: ScoredTrees, anchors: Int64[Tensor, "rows anchors"], depth: int
    ) -> tuple[Float[Tensor, "rows length width"], Float[Tensor, "rows anchors depth width"]]:
        """Return the target's last hidden states of trees, and of the rows ahead under the anchors."""
        states = trees.states[self.layer]
        rows, length, width = states.shape
        count = anchors.shape[1]
        device = anchors.device
        again = trees.at(states, anchors).repeat_interleave(depth, 1)
        offsets = torch.tensor(offsets_of(depth, 0), dtype=torch.int64, device=device)
        moved = trees.depths.gather(1, anchors)[..., None] + offsets
        above = trees.sees.gather(1, anchors[..., None].expand(-1, -1, length)).repeat_interleave(depth, 1)
        groups = torch.eye(count, dtype=torch.bool, device=device)
        own = torch.kron(groups, seen_in_window(depth, 0).to(device)).expand(rows, -1, -1)
        last, window = self._with_rows(trees, again, moved.flatten(1), above, own)
        return last, window.view(rows, count, depth, width)

    def _with_rows(
        self,
        trees: ScoredTrees,
        again: Float[Tensor, "rows extra width"],
        moved: Int64[Tensor, "rows extra"],
        above: Bool[Tensor, "rows extra length"],
        own: Bool[Tensor, "rows extra extra"],
    ) -> tuple[Float[Tensor, "rows length width"], Float[Tensor, "rows extra width"]]:
        """Return the last hidden states of trees and of window rows.

        Args:
            again: the states of the window rows, at the layer that they enter.
            moved: their positions.
            above: the nodes that each of them sees.
            own: the window rows that each of them sees.
        """
        states = trees.states[self.layer]
        length = states.shape[1]
        positions = torch.cat([trees.depths, moved], 1)
        hidden = torch.zeros(len(own), length, own.shape[1], dtype=torch.bool, device=own.device)
        seen = torch.cat([torch.cat([trees.sees, hidden], 2), torch.cat([above, own], 2)], 1)
        last = through_last_layers(self, torch.cat([states, again], 1), positions, seen, positions)
        return last[:, :length], last[:, length:]


def both_windows(head: Head, trees: ScoredTrees, learnt: Bool[Tensor, "rows length"], plan: HeadPlan) -> Lesson:
    """Return the drafts of a window ahead, and the loss of the window behind on corrupted trees.

    A share of the tokens that the target drew is replaced by draws from the window ahead, which are the errors that
    refinement meets. The share is drawn for each tree, from a normal distribution truncated to [0, 0.5].
    Draws from torch's own stream of random numbers.
    """
    assert isinstance(head, LearntWindow)
    drafts = head.drafts(trees, plan.depth, learnt)
    drawn = learnt.gather(1, trees.parents.clamp_min(0)) & (trees.parents >= 0)
    share = nn.init.trunc_normal_(torch.empty(len(drawn), 1), MEAN_SHARE, SPREAD, 0.0, MOST_SHARE).to(drawn.device)
    is_replaced = drawn & (torch.rand(drawn.shape, device=drawn.device) < share)
    guesses = drafted_tokens(trees, drafts[1:])
    tokens = torch.where(is_replaced & (guesses >= 0), guesses, trees.tokens)
    corrupted = scored_again(head.target, trees, tokens)
    return Lesson(drafts, head.behind_loss(trees, corrupted, drawn), BEHIND)


@torch.no_grad()
def drafted_tokens(trees: ScoredTrees, drafts: list[DraftRows]) -> Int64[Tensor, "rows length"]:
    """Return for each node a draw from the laws of its token in a window ahead, of a random depth; -1: there is none."""
    shape = trees.tokens.shape
    below = torch.full((trees.tokens.numel(),), -1, device=trees.tokens.device)
    for rows in drafts:
        drawn = torch.multinomial(rows.logits.float().softmax(-1), 1)[:, 0]
        is_first = below[rows.nodes] < 0
        is_taken = is_first | (torch.rand(len(drawn), device=drawn.device) < 1 / len(drafts))
        below[rows.nodes] = torch.where(is_taken, drawn, below[rows.nodes])
    found = below.view(shape).gather(1, trees.parents.clamp_min(0))
    return torch.where(trees.parents >= 0, found, -1)


class CoralStudent(ExtraStudent):
    """A model with a window in training; see `Student`."""

    module: LearntWindow

    def __init__(
        self, window: LearntWindow, pair: Pair, plan: HeadPlan, lessons: Lessons, schedule: FilledSchedule
    ) -> None:
        self.tokenizer = pair.tokenizer
        super().__init__(window, window.target, plan, self._write, lessons.held_out, schedule.batch_tokens)
        if window.behind:
            self.lesson = both_windows

    def save(self, folder: Path) -> None:
        """Write the model in bfloat16, its tokenizer, and the head of its window."""
        written = copy.deepcopy(self.target).to(torch.bfloat16)
        with whole_files_in(folder) as parts:
            written.save_pretrained(parts)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(parts)
        super().save(folder)

    def _write(self, window: Any, target: "PreTrainedModel", plan: HeadPlan, folder: Path) -> None:
        """Write identity maps, with the probabilities of the window's likeliest tokens."""
        width = int(target.config.hidden_size)
        head = HiddenTransfer(target, window.depth, window.layer, width, window.behind)
        head.ranks = window.ranks[1:]  # the first are of the model's next token
        write_head(head, {**extra_rows_config(head), "base_model_name_or_path": None}, folder / WINDOW, target)
