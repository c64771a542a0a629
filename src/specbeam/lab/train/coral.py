"""COrAL's forward window: a target whose last layers also predict the tokens after the next one (arXiv 2410.09675).

A row of the window is a state that enters the last layers once more at a later position: the rotation of its queries
selects the token to predict. No weights are added. The target itself is trained, so it becomes another model with another
law, and verifies the window's drafts like any draft.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from specbeam import Pair, load
from specbeam.core import whole_files_in
from specbeam.doors import WINDOW_KIND
from specbeam.engines import Masks, is_llama_like, layers_of
from specbeam.errors import NotSupported
from specbeam.lab.train.course import Trained, take_course
from specbeam.lab.train.drawing import DrawPlan, Prompt
from specbeam.lab.train.fitting import FilledSchedule, Schedule, check_optimizers
from specbeam.lab.train.folders import keep_options, prefixed, work_folder
from specbeam.lab.train.head_files import write_head
from specbeam.lab.train.heads import ExtraStudent
from specbeam.lab.train.lessons import Lessons, Report, check_prompts, drawn_lessons, lesson_options, warn_of_rounding
from specbeam.lab.train.plan import HeadPlan, plan_of_kind
from specbeam.models import last_norm
from specbeam.models.heads import DraftRows, HiddenTransfer, ScoredTrees, extra_rows_config, logits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = "window"  # folder of the head inside the folder of the model
LAYERS = 2  # number of last layers that are trained by default


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
    """Train a copy of a target to predict a window of tokens ahead, and write it to a folder with the window's head.

    `load(out, draft=Path(out) / "window")` takes both. The written model differs from the target: its last layers, and
    the norm after them, predict the target's law of the next token as before, and also the tokens after it. In the
    training curve, the acceptance at depth 1 is the overlap of the new law with the target's, which shows how far the
    law has moved; deeper values measure the window. Call it again with the same arguments to resume a killed run; see
    `train_draft`.

    Args:
        target: the target, loaded or a path or hub id: a Llama, Mistral or Qwen2.
        prompts: texts, or lists of token ids, that the target is asked to continue.
        out: the folder to write.
        trees: see `train_head`.
        plan: the options `depth`, the number of tokens of the window (3), `enters`, the first trained layer (the last but
            one), `decay` and `variation` of `HeadPlan`.
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
        window = LearntWindow(model, options.depth, options.enters)
        student = CoralStudent(window, pair, options, lessons, schedule)
        return take_course(student, lessons, schedule, folder, pair.target.device, report)


class LearntWindow(HiddenTransfer):
    """The window of a model whose last layers, and the norm after them, are trained.

    It is a Hidden Transfer head whose maps are the identity and are not trained.

    Args:
        enters: the first of these layers.
    """

    def __init__(self, model: "PreTrainedModel", depth: int, enters: int) -> None:
        layers = layers_of(model)
        super().__init__(model, depth, enters, int(model.config.hidden_size))
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

    def _after_last_layers(
        self, trees: ScoredTrees, anchors: Int64[Tensor, "rows anchors"], depth: int
    ) -> tuple[Float[Tensor, "rows length width"], Float[Tensor, "rows anchors depth width"]]:
        """Return the target's last hidden states of trees, and of the window's rows under the anchors."""
        states = trees.states[self.layer]
        rows, length, width = states.shape
        count = anchors.shape[1]
        again = trees.at(states, anchors)[:, :, None].expand(-1, -1, depth, -1).flatten(1, 2)
        ahead = trees.depths.gather(1, anchors)[..., None] + torch.arange(1, depth + 1, device=anchors.device)
        positions = torch.cat([trees.depths, ahead.flatten(1)], 1)
        x = torch.cat([states, again], 1)
        masks = self._masks(trees, anchors, depth, positions)
        angles = self.target.base_model.rotary_emb(x, positions)
        *layers, norm = self.learnt
        for number, layer in enumerate(layers, self.layer):
            mask = masks[self.target.config.layer_types[number]] if isinstance(masks, dict) else masks
            x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        normed = norm(x)
        return normed[:, :length], normed[:, length:].view(rows, count, depth, width)

    def _masks(
        self,
        trees: ScoredTrees,
        anchors: Int64[Tensor, "rows anchors"],
        depth: int,
        positions: Int64[Tensor, "rows all"],
    ) -> Any:
        """Return the mask of trees and window rows, or a dict of masks by layer type.

        Window rows see the path to their anchor, and earlier rows of the same window.
        """
        rows, length = trees.tokens.shape
        count = anchors.shape[1] * depth
        above = trees.sees.gather(1, anchors[..., None].expand(-1, -1, length)).repeat_interleave(depth, 1)
        groups = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device)
        own = torch.kron(groups, torch.ones(depth, depth, dtype=torch.bool, device=anchors.device).tril())
        seen = torch.zeros(rows, length + count, length + count, dtype=torch.bool, device=anchors.device)
        seen[:, :length, :length] = trees.sees
        seen[:, length:, :length] = above
        seen[:, length:, length:] = own
        config = self.target.config
        return Masks(config, config._attn_implementation or "eager", self.target.dtype).of_trees(seen, positions)


class CoralStudent(ExtraStudent):
    """A model with a window in training; see `Student`."""

    module: LearntWindow

    def __init__(
        self, window: LearntWindow, pair: Pair, plan: HeadPlan, lessons: Lessons, schedule: FilledSchedule
    ) -> None:
        self.tokenizer = pair.tokenizer
        super().__init__(window, window.target, plan, self._write, lessons.held_out, schedule.batch_tokens)

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
        head = HiddenTransfer(target, window.depth, window.layer, int(target.config.hidden_size))
        head.ranks = window.ranks[1:]  # the first are of the model's next token
        write_head(head, {**extra_rows_config(head), "base_model_name_or_path": None}, folder / WINDOW, target)
