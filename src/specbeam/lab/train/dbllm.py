"""DB-LLM: a copy of a target with weights of two bits, trained by distillation (arXiv 2402.11960).

Flexible dual binarisation: each matrix of the layers is the sum of two binary matrices with scales (`DualBinary`), at first
those of a grid of 2 bits. Training moves the scales, and the full weights of which the binary matrices are the rounding.

Deviation-aware distillation: the loss is the cross-entropy to the target's law, and laws of which target and copy are
unsure count more, because rounding moves these the most.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specbeam import Pair, load
from specbeam.core import whole_files_in
from specbeam.doors import DBLLM_SCHEDULE, require
from specbeam.engines import BINARY_GROUP, DBLLM, dual_binary_of, family_of, rounded_binaries
from specbeam.errors import UnsupportedModel
from specbeam.lab.train.batches import TreeBatch
from specbeam.lab.train.course import Trained, take_course
from specbeam.lab.train.draft import check_output, trainable_copy, tree_logits
from specbeam.lab.train.drawing import DrawPlan, Prompt
from specbeam.lab.train.fitting import Schedule, check_optimizers
from specbeam.lab.train.folders import keep_options, prefixed, work_folder
from specbeam.lab.train.lessons import Report, check_prompts, drawn_lessons, lesson_options, warn_of_rounding
from specbeam.lab.train.losses import draft_loss, overlap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAST = 1e-6  # nats, so that a batch of sure laws does not divide by zero


@dataclass(frozen=True)
class DeviationLoss:
    """The loss of deviation-aware distillation.

    Args:
        deviation: how much more a law of average uncertainty counts; 0: all laws count alike.
        power: exponent of the uncertainty; see `uncertainty`.
        variation: the share of total variation in the loss, in [0, 1]; cross-entropy has the rest.
    """

    deviation: float = 1.0
    power: float = 1.0
    variation: float = 0.0

    def __post_init__(self) -> None:
        """Raise `BadSetting` if a value is invalid."""
        require(self.deviation >= 0, "deviation", self.deviation, "at least 0")
        require(self.power >= 0, "power", self.power, "at least 0")
        require(0 <= self.variation <= 1, "variation", self.variation, "in [0, 1]")


def train_dbllm(
    target: "Pair | str | Path",
    prompts: Sequence[Prompt],
    out: str | Path,
    *,
    trees: str | Path | None = None,
    loss: DeviationLoss | None = None,
    draws: DrawPlan | None = None,
    schedule: Schedule | None = None,
    report: Report = lambda *_: None,
) -> Trained:
    """Train a copy of a target with layers of 2 bits, and write it to a folder that `load` takes as target or as draft.

    Embedding, head and norms keep 16 bits; norms are trained. In the training curve, the acceptance is the overlap of the
    copy's law with the target's; that before the first epoch is the grid's. Call it again with the same arguments to resume
    a killed run; see `train_draft`.

    Args:
        target: the target, loaded or a path or hub id.
        prompts: texts, or lists of token ids, that the target continues.
        out: the folder to write.
        trees: see `train_draft`.
        loss: how much each law counts; None: the defaults.
        draws: how the target draws; None: four beams at temperature 1.
        schedule: duration and rates.
        report: see `train_draft`.

    Raises:
        BadSetting: an option is wrong, or a folder holds work with other options.
        MissingFile: the target cannot be loaded.
        BadPrompt: the prompts are too few, or the target cannot continue them.
        UnsupportedModel: the matrices of the target cannot have 2 bits.
    """
    check_optimizers()
    check_prompts(prompts)
    loss = loss or DeviationLoss()
    draws = draws or DrawPlan()
    schedule = (schedule or Schedule()).filled(DBLLM_SCHEDULE)
    pair = target if isinstance(target, Pair) else load(target)
    warn_of_rounding(pair)
    names = names_of_matrices(pair.target_model)
    folder = Path(out)
    training = folder / "training"
    options = {
        "kind": DBLLM,
        **prefixed("loss", loss),
        **lesson_options(pair, prompts, draws, schedule.seed),
        **prefixed("schedule", schedule),
    }
    with work_folder(training, options, "state.pt"):
        lessons = drawn_lessons(pair, prompts, draws, schedule.seed, Path(trees or training / "trees"), report)
        keep_options(training, options)
        student = DualBinaryStudent(pair, names, loss)
        return take_course(student, lessons, schedule, folder, pair.target.device, report)


def names_of_matrices(model: "PreTrainedModel") -> list[str]:
    """Return the names of the modules whose matrices get 2 bits: those of the layers.

    Raises `UnsupportedModel` if the compiled forward would not run them.
    """
    family = family_of(model)
    kind = type(model).__name__
    if family is None or family.transposed or family.mixture or family.cross:
        raise UnsupportedModel(
            f"{kind} cannot have weights of 2 bits; they are for decoders of the families in docs/models.md without "
            "experts, except GPT-2"
        )
    head = model.get_output_embeddings()
    projections = tuple(f".{name.rpartition('.')[2]}" for name in (family.enter, family.leave) if name)
    found = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module is head or (projections and name.endswith(projections)):
            continue
        if module.in_features % BINARY_GROUP:
            raise UnsupportedModel(
                f"{name} of this {kind} has {module.in_features} inputs; for weights of 2 bits it must be a multiple of "
                f"{BINARY_GROUP}"
            )
        found.append(name)
    if not found:
        raise UnsupportedModel(f"{kind} has no matrices of layers that are plain nn.Linear; give the unrounded model")
    return found


def uncertainty(logits: Float[Tensor, "laws vocab"], logp: Float[Tensor, "laws kept"]) -> Float[Tensor, " laws"]:
    """Return the geometric mean of the entropies of target and copy, relative to its mean over all laws.

    Args:
        logits: of the copy.
        logp: log-probabilities of the target's likeliest tokens; all others count as one token.
    """
    logq = logits.float().log_softmax(-1)
    of_copy = -(logq.exp() * logq).sum(-1)
    p = logp.exp()
    rest = (1 - p.sum(-1)).clamp_min(0)
    of_target = -(p * logp).sum(-1) - torch.special.xlogy(rest, rest)
    both = (of_copy * of_target.clamp_min(0)).sqrt()
    return both / both.mean().clamp_min(_LEAST)


class Binarised(nn.Module):
    """A parametrisation of a matrix as two binary matrices with scales.

    The binary matrices choose the nearest of the four sums of scales for each weight. Gradients reach the scales, and the
    weight as if it were not rounded.

    Args:
        weight: the matrix, float[columns, depth], from which the scales start.
    """

    def __init__(self, weight: Float[Tensor, "columns depth"]) -> None:
        super().__init__()
        grid = rounded_binaries(weight.detach().float().cpu().numpy())
        self.scales = nn.Parameter(torch.from_numpy(grid.scales).transpose(1, 2).contiguous())

    def bits(self, weight: Float[Tensor, "columns depth"]) -> Bool[Tensor, "2 columns depth"]:
        """Return the binary matrices of a weight."""
        with torch.no_grad():
            groups = weight.unflatten(1, (-1, BINARY_GROUP))
            first, second = self._stored()[..., None]
            without = torch.minimum(groups.abs(), (groups - second).abs())
            rest = groups - first
            has_first = torch.minimum(rest.abs(), (rest - second).abs()) < without
            rest = torch.where(has_first, rest, groups)
            has_second = (rest - second).abs() < rest.abs()
            return torch.stack([has_first.flatten(1), has_second.flatten(1)])

    def forward(self, weight: Float[Tensor, "columns depth"]) -> Float[Tensor, "columns depth"]:
        """Return the rounded matrix."""
        first, second = self.bits(weight).unflatten(2, (-1, BINARY_GROUP)).to(weight.dtype)
        scales = self.scales + (self._stored() - self.scales).detach()
        rounded = scales[0, ..., None] * first + scales[1, ..., None] * second
        return rounded.flatten(1) + (weight - weight.detach())

    def _stored(self) -> Float[Tensor, "2 columns groups"]:
        """Return the scales as the files hold them."""
        return self.scales.detach().bfloat16().float()


class DualBinaryStudent:
    """A copy of a target with matrices of 2 bits in training; see `Student`.

    Args:
        names: names of the modules with these matrices.
        weighing: see `train_dbllm`.
    """

    def __init__(self, pair: Pair, names: list[str], weighing: DeviationLoss) -> None:
        self.module: PreTrainedModel = trainable_copy(pair.target_model)
        check_output(self.module)
        self.target = pair.target_model
        self.tokenizer = pair.tokenizer
        self.names = names
        self.weighing = weighing
        for outer in (self.module.get_input_embeddings(), self.module.get_output_embeddings()):
            outer.requires_grad_(False)
        for name in names:
            module = self.module.get_submodule(name)
            binarised = Binarised(module.weight).to(module.weight.device)
            parametrize.register_parametrization(module, "weight", binarised)

    def loss(self, batch: TreeBatch) -> Tensor:
        """See `Student.loss`."""
        with parametrize.cached():
            logits = tree_logits(self.module, batch)
        accepted, surprise = overlap(logits, batch.ids, batch.logp)
        of = self.weighing
        weights = batch.weights * (1 + of.deviation * uncertainty(logits.detach(), batch.logp) ** of.power)
        return draft_loss(accepted, surprise, weights, of.variation)

    def accepted(self, batch: TreeBatch) -> list[tuple[Tensor, Tensor]]:
        """See `Student.accepted`: one figure for all depths."""
        with parametrize.cached():
            overlaps, _ = overlap(tree_logits(self.module, batch), batch.ids, batch.logp)
        return [(overlaps, batch.weights)]

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write the binary matrices and their scales, all other weights in bfloat16, and the tokenizer."""
        from safetensors.torch import load_file, save_file

        stored: dict[str, Tensor] = {}
        for name in self.names:
            module: Any = self.module.get_submodule(name)
            stored |= _tensors_of(name, module.parametrizations.weight)
        learnt = {name: one for name, one in self.module.state_dict().items() if "parametrizations" not in name}
        plain = copy.deepcopy(self.target)  # torch cannot remove the parametrisations of a copy alone
        plain.load_state_dict(learnt, strict=False)
        plain.config.quantization_config = {"quant_method": DBLLM, "bits": 2, "group_size": BINARY_GROUP}
        with whole_files_in(folder) as parts:
            plain.to(torch.bfloat16).save_pretrained(parts, max_shard_size="1TB")
            file = Path(parts) / "model.safetensors"
            others = {
                name: one for name, one in load_file(file).items() if name.removesuffix(".weight") not in self.names
            }
            save_file({**others, **stored}, file, metadata={"format": "pt"})
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(parts)


def _tensors_of(name: str, parametrised: Any) -> dict[str, Tensor]:
    """Return the tensors of a matrix in files; see `DualBinaryMatrix`."""
    (binarised,) = parametrised
    bits = binarised.bits(parametrised.original).cpu().numpy()
    numbers = dual_binary_of(bits, binarised.scales.bfloat16().float().cpu().numpy())
    planes = torch.from_numpy(numbers.planes.view("int32"))
    return {f"{name}.planes": planes, f"{name}.scales": torch.from_numpy(numbers.scales).bfloat16()}
