"""Training of a draft model: distilled from the target's laws on trees that the target's beams drew."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from specbeam import Pair, load
from specbeam.core import weights_key, whole_files_in
from specbeam.doors import DRAFT_SCHEDULE, is_integer, require
from specbeam.errors import MissingFile, UnsupportedModel
from specbeam.lab.train.batches import TreeBatch
from specbeam.lab.train.course import Trained, take_course
from specbeam.lab.train.drawing import DrawPlan, Prompt
from specbeam.lab.train.fitting import Schedule, check_optimizers
from specbeam.lab.train.folders import keep_options, prefixed, work_folder
from specbeam.lab.train.lessons import Report, check_prompts, drawn_lessons, lesson_options
from specbeam.lab.train.losses import draft_loss, overlap
from specbeam.models import vocab_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_SIZE = 64  # size of each attention head


def train_draft(
    target: "Pair | str | Path",
    prompts: Sequence[Prompt],
    out: str | Path,
    *,
    trees: str | Path | None = None,
    start: str | Path | None = None,
    layers: int = 2,
    hidden: int | None = None,
    draws: DrawPlan | None = None,
    schedule: Schedule | None = None,
    variation: float = 0.5,
    report: Report = lambda *_: None,
) -> Trained:
    """Train a draft model for a target, and write it to a folder that `load(target, draft=folder)` takes.

    The target draws beams below each prompt; the draft learns the target's laws at beams with children, weighted by their
    number. Only prompts are needed. A tenth of them, at most 512, is held out.

    Call it again with the same arguments to resume a killed run: `out/training` holds the trees, the state and the curve,
    and can be deleted afterwards.

    Args:
        target: the target, loaded or a path or hub id.
        prompts: texts, or lists of token ids, that the target continues; similar to later prompts.
        out: the folder to write.
        trees: the folder of the target's draws, which several trainings with the same prompts, draws and seed may share;
            None: `out/training/trees`.
        start: a model with the target's vocabulary to start from; None: a new Llama with tied embeddings.
        layers: number of blocks of a new model.
        hidden: size of the hidden states of a new model, a multiple of 64; None: half of the target's, at most 512.
        draws: how the target draws; None: four beams at temperature 1.
        schedule: duration and rates; missing rates and batch sizes have the defaults of drafts.
        variation: the share of total variation in the loss, in [0, 1]; cross-entropy has the rest.
        report: called with the current stage, the amount done and the total.

    Raises:
        BadSetting: an option is invalid, or `out` holds a training with other options.
        MissingFile: a model cannot be loaded.
        UnsupportedModel: `start` cannot be trained on trees.
        VocabularyMismatch: `start` does not have the target's tokens.
        BadPrompt: the prompts are too few, or the target cannot continue them.
    """
    draws = draws or DrawPlan()
    schedule = (schedule or Schedule()).filled(DRAFT_SCHEDULE)
    _check(prompts, layers, hidden, variation)
    pair = target if isinstance(target, Pair) else load(target)
    hidden = hidden or _default_hidden(pair)
    folder = Path(out)
    training = folder / "training"
    torch.manual_seed(schedule.seed)
    model = new_draft(pair, layers, hidden) if start is None else started_draft(pair, start)
    options = {
        "start": None if start is None else weights_key(model),
        "layers": int(layers),
        "hidden": int(hidden),
        "variation": float(variation),
        **lesson_options(pair, prompts, draws, schedule.seed),
        **prefixed("schedule", schedule),
    }
    with work_folder(training, options, "state.pt"):
        lessons = drawn_lessons(pair, prompts, draws, schedule.seed, Path(trees or training / "trees"), report)
        keep_options(training, options)
        model.to(pair.target.device)
        return take_course(DraftStudent(model, variation), lessons, schedule, folder, pair.target.device, report)


class DraftStudent:
    """A draft model in training; see `Student`."""

    def __init__(self, model: "PreTrainedModel", variation: float) -> None:
        self.module: PreTrainedModel = model
        self.variation = variation

    def loss(self, batch: TreeBatch) -> Tensor:
        """See `Student.loss`."""
        accepted, surprise = overlap(tree_logits(self.module, batch), batch.ids, batch.logp)
        return draft_loss(accepted, surprise, batch.weights, self.variation)

    def accepted(self, batch: TreeBatch) -> list[tuple[Tensor, Tensor]]:
        """See `Student.accepted`: one figure for all depths."""
        overlaps, _ = overlap(tree_logits(self.module, batch), batch.ids, batch.logp)
        return [(overlaps, batch.weights)]

    def save(self, folder: Path) -> None:
        """Write the model in bfloat16, which cost the bundled draft 0.00001 of its held-out acceptance."""
        with whole_files_in(folder) as parts:
            copy.deepcopy(self.module).to(torch.bfloat16).save_pretrained(parts)


def _check(prompts: Sequence[Prompt], layers: int, hidden: int | None, variation: float) -> None:
    """Raise `BadSetting` if an option of `train_draft` is wrong."""
    check_optimizers()
    check_prompts(prompts)
    require(is_integer(layers) and layers >= 1, "layers", layers, "an integer of at least 1")
    is_size = hidden is None or (is_integer(hidden) and hidden >= HEAD_SIZE and hidden % HEAD_SIZE == 0)
    require(is_size, "hidden", hidden, f"a multiple of {HEAD_SIZE}, or None for half of the target's")
    require(0 <= variation <= 1, "variation", variation, "in [0, 1]")


def _default_hidden(pair: Pair) -> int:
    half = pair.target_model.config.get_text_config().hidden_size // 2
    return min(max(half // HEAD_SIZE, 1) * HEAD_SIZE, 512)


def new_draft(pair: Pair, layers: int, hidden: int) -> "PreTrainedModel":
    """Return a new Llama with the target's vocabulary and tied embeddings.

    The embedding begins as the principal components of the target's, so that similar words of the target are similar from
    the start.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = pair.target_model.config.get_text_config()
    vectors = pair.target_model.get_input_embeddings().weight
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vectors.shape[0],
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // HEAD_SIZE,
            num_key_value_heads=hidden // HEAD_SIZE,
            head_dim=HEAD_SIZE,
            max_position_embeddings=pair.target.max_positions or 2_048,
            tie_word_embeddings=True,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    )
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding.copy_(principal_components(vectors.float().cpu(), hidden, embedding.std().item()))
    return model


def principal_components(
    vectors: Float[Tensor, "words size"], count: int, deviation: float
) -> Float[Tensor, "words count"]:
    """Return the coordinates of the vectors on their first components, with this standard deviation.

    If there are fewer components than `count`, the others are noise of the same deviation.
    """
    centred = vectors - vectors.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)  # ascending
    known = min(count, vectors.shape[1])
    coordinates = centred @ axes.flip(1)[:, :known]
    coordinates *= deviation / coordinates.std().clamp_min(1e-12)
    noise = deviation * torch.randn(len(vectors), count - known)
    return torch.cat([coordinates, noise], dim=1)


def started_draft(pair: Pair, start: str | Path) -> "PreTrainedModel":
    """Return the model to start from, in float32.

    Raises:
        MissingFile: it cannot be loaded.
        VocabularyMismatch: it does not have the target's tokens.
        UnsupportedModel: see `check_output`.
    """
    loaded = load(pair.target_model, draft=start, tokenizer=pair.tokenizer)
    if loaded.draft_model is None:
        raise MissingFile(f"{start} is not a model")
    model = trainable_copy(loaded.draft_model)
    if vocab_of(model) != pair.target.vocab:  # `load` has compared the tokens that both have
        model.resize_token_embeddings(pair.target.vocab, mean_resizing=False)
    check_output(model)
    return model


def trainable_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a copy of a model with trainable weights, in float32 and without dropout."""
    copied: PreTrainedModel = copy.deepcopy(model).float().eval().requires_grad_(True)
    return copied


@torch.no_grad()
def check_output(model: "PreTrainedModel") -> None:
    """Raise `UnsupportedModel` unless a model's logits are the output of its head on its last hidden states."""
    words = model.get_input_embeddings().weight
    tokens = torch.arange(8, device=words.device)[None] % words.shape[0]
    whole = model(input_ids=tokens).logits
    by_head = model.get_output_embeddings()(model.base_model(input_ids=tokens).last_hidden_state)
    if not torch.allclose(whole, by_head, atol=1e-3 * whole.std().item()):
        raise UnsupportedModel(
            f"{type(model).__name__} changes the logits of its head (a soft cap or a scale), which training does not support"
        )


def tree_logits(model: "PreTrainedModel", batch: TreeBatch) -> Float[Tensor, "laws vocab"]:
    """Return the logits of a model at the nodes of a batch that have a law."""
    hidden = model.base_model(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
    ).last_hidden_state
    return model.get_output_embeddings()(hidden[batch.learnt])
