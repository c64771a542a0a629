"""A small model that drafts for a target: distilled from the laws of the target on trees that its beams drew."""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specbeam.errors import BadPrompt, BadSetting, MissingFile, UnsupportedModel
from specbeam.measure import kept_figures
from specbeam.options.checks import is_integer, require
from specbeam.pair import Pair, load
from specbeam.train.batches import TreeBatch, batches_of
from specbeam.train.drawing import DrawPlan, Prompt, draw_files, drawn_trees
from specbeam.train.fitting import Point, Schedule, Training, check_optimizers
from specbeam.train.losses import draft_loss, overlap
from specbeam.train.trees import Trees, read_or_refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_SIZE = 64  # of each attention head
MOST_HELD_OUT = 512  # prompts

Report = Callable[[str, int, int], None]  # what is under way, how much of it is done, and how much there is


@dataclass(frozen=True)
class Trained:
    """What training gave."""

    folder: Path  # which `load(draft=...)` takes
    weights: int  # number of the draft's parameters
    curve: tuple[Point, ...]

    @property
    def acceptance(self) -> float:
        """The mean odds, on held-out trees, that a draft token is accepted."""
        return self.curve[-1].acceptance


def train_draft(
    target: "Pair | str | Path",
    prompts: Sequence[Prompt],
    out: str | Path,
    *,
    start: str | Path | None = None,
    layers: int = 2,
    hidden: int | None = None,
    draws: DrawPlan | None = None,
    schedule: Schedule | None = None,
    variation: float = 0.5,
    report: Report = lambda *_: None,
) -> Trained:
    """Train a draft model for a target, and write it to a folder that `load(target, draft=folder)` takes.

    The target draws beams below each prompt; the draft learns the target's laws at the beams that had children, each by the
    number of its children. Nothing but prompts is needed. At most 512 prompts, or a tenth, are held out.

    A run that was killed goes on where it was when it is called again with the same arguments: `out/training` holds the
    trees, the state and the curve, and can be deleted afterwards.

    Args:
        target: the target, loaded or a path or hub id.
        prompts: texts, or lists of token ids, that the target is asked to continue, like those that the draft will be used
            for.
        out: the folder to write.
        start: a model with the target's vocabulary to go on from; None: a new Llama with a shared embedding.
        layers: number of blocks of a new model.
        hidden: size of the hidden states of a new model, a multiple of 64; None: half of the target's, at most 512.
        draws: how the target draws; None: four beams at temperature 1.
        schedule: how long and how hard to train.
        variation: the share of total variation in the loss, in [0, 1]; cross-entropy has the rest.
        report: called with what is under way, how much of it is done and how much there is.

    Raises:
        BadSetting: an option is wrong, or `out` holds a training with other options.
        MissingFile: a model cannot be loaded.
        UnsupportedModel: `start` cannot be trained on trees.
        VocabularyMismatch: `start` does not have the target's tokens.
        BadPrompt: the prompts are too few, or the target cannot continue them.
    """
    draws = draws or DrawPlan()
    schedule = schedule or Schedule()
    _check(prompts, layers, hidden, variation)
    pair = target if isinstance(target, Pair) else load(target)
    hidden = hidden or _default_hidden(pair)
    folder = Path(out)
    training = folder / "training"
    torch.manual_seed(schedule.seed)
    model = new_draft(pair, layers, hidden) if start is None else started_draft(pair, start)
    options = {
        "target": f"{type(pair.target_model).__name__} {kept_figures.weights_key(pair.target_model)}, {pair.target.engine}",
        "start": None if start is None else kept_figures.weights_key(model),
        "layers": int(layers),
        "hidden": int(hidden),
        "variation": float(variation),
        "prompts": f"{len(prompts)}, {_digest(prompts)}",
        **{f"draws.{name}": value for name, value in asdict(draws).items()},
        **{f"schedule.{name}": value for name, value in asdict(schedule).items()},
    }
    _open_folder(training, options)
    learnt, held_out = split(prompts, schedule.seed)
    checked = _held_out_trees(pair, held_out, draws, training / "held_out.npz")
    _keep_options(training, options)
    files = []
    drawn = 0
    for path, count in draw_files(pair, learnt, draws, training / "trees"):
        files.append(path)
        drawn += count
        report("drawing", drawn, len(learnt))
    model.to(pair.target.device)
    curve = _fitted(model, files, checked, schedule, variation, folder, report)
    return Trained(folder, sum(weight.numel() for weight in model.parameters()), tuple(curve))


def _fitted(
    model: "PreTrainedModel",
    files: list[Path],
    checked: Trees,
    schedule: Schedule,
    variation: float,
    folder: Path,
    report: Report,
) -> list[Point]:
    """Train a model on files of trees, write it to the folder after each epoch, and return the curve."""
    device = model.device

    def loss(batch: TreeBatch) -> Tensor:
        accepted, surprise = overlap(tree_logits(model, batch), batch.ids, batch.logp)
        return draft_loss(accepted, surprise, batch.weights, variation)

    def check() -> float:
        return acceptance(model, checked, schedule.batch_tokens, device)

    fit = Training(model, loss, check, schedule, files, folder / "training", device)
    fit.resume()
    report("training", fit.done, fit.steps)
    for done in fit.run():
        if fit.file == 0:
            save(model, folder)
        report("training", done, fit.steps)
    save(model, folder)
    return fit.curve


def _check(prompts: Sequence[Prompt], layers: int, hidden: int | None, variation: float) -> None:
    """Raise `BadSetting` if an option of `train_draft` is wrong."""
    check_optimizers()
    distinct = len(_distinct(prompts))
    if distinct < 2:
        raise BadSetting(
            f"there are {distinct} distinct prompts; there must be at least 2, one to learn from, one to check with"
        )
    require(is_integer(layers) and layers >= 1, "layers", layers, "an integer of at least 1")
    is_size = hidden is None or (is_integer(hidden) and hidden >= HEAD_SIZE and hidden % HEAD_SIZE == 0)
    require(is_size, "hidden", hidden, f"a multiple of {HEAD_SIZE}, or None for half of the target's")
    require(0 <= variation <= 1, "variation", variation, "in [0, 1]")


def _default_hidden(pair: Pair) -> int:
    half = pair.target_model.config.get_text_config().hidden_size // 2
    return min(max(half // HEAD_SIZE, 1) * HEAD_SIZE, 512)


def _digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the prompts, in their order."""
    texts = [prompt if isinstance(prompt, str) else [int(token) for token in prompt] for prompt in prompts]
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()


def _open_folder(training: Path, options: dict[str, Any]) -> None:
    """Make the folder if it is missing, and clear what a training left there that never began.

    Raises `BadSetting` if it cannot be written, or holds a training with other options.
    """
    path = training / "options.json"
    try:
        training.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            (training / "held_out.npz").unlink(missing_ok=True)
    except OSError as error:
        raise BadSetting(f"{training} cannot be written: {error}; choose another folder") from error
    if not path.exists():
        if (training / "trees").exists():
            raise BadSetting(
                f"{training} holds trees, and no {path.name} says of what; delete it, or choose another folder"
            )
        return
    before = read_or_refuse(path, lambda: json.loads(path.read_text()))
    other = {name: before.get(name) for name in options if before.get(name) != options[name]}
    if other:
        said = ", ".join(f"{name} {value!r} (now {options[name]!r})" for name, value in other.items())
        raise BadSetting(f"{training} holds a training with {said}; choose another folder, or delete this one")


def _keep_options(training: Path, options: dict[str, Any]) -> None:
    """Write the options, once all that can be wrong with them has been tried."""
    path = training / "options.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(options, indent=2) + "\n")
    part.replace(path)


def split(prompts: Sequence[Prompt], seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to learn from and those to check with, at most a tenth, shuffled.

    A prompt that occurs several times counts once, so that none is on both sides.
    """
    distinct = _distinct(prompts)
    order = np.random.default_rng(seed).permutation(len(distinct))
    held = min(MOST_HELD_OUT, max(len(distinct) // 10, 1))
    return [distinct[place] for place in order[held:]], [distinct[place] for place in order[:held]]


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return each prompt once, in the order in which they come first."""
    first: dict[Any, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt if isinstance(prompt, str) else tuple(prompt), prompt)
    return list(first.values())


def _held_out_trees(pair: Pair, prompts: list[Prompt], draws: DrawPlan, path: Path) -> Trees:
    """Return the trees of prompts that are held out; raise `BadPrompt` if the target can continue none of them."""
    if not path.exists():
        trees = drawn_trees(pair, prompts, draws)
        if trees.size == 0:
            raise BadPrompt(f"none of the {len(prompts)} prompts that are held out can be continued by the target")
        trees.save(path)
    return Trees.read(path)


def new_draft(pair: Pair, layers: int, hidden: int) -> "PreTrainedModel":
    """Return a new Llama with the target's vocabulary and a shared embedding.

    The embedding begins as the principal components of the target's, so that words which the target takes for similar are
    similar from the start.
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
    """Return the model to go on from, in float32.

    Raises:
        MissingFile: it cannot be loaded.
        VocabularyMismatch: it does not have the target's tokens.
        UnsupportedModel: its logits are not its head's, of its last hidden states, so that it cannot be trained on trees.
    """
    loaded = load(pair.target_model, draft=start, tokenizer=pair.tokenizer)
    if loaded.draft_model is None:
        raise MissingFile(f"{start} is not a model")
    model = copy.deepcopy(loaded.draft_model).float().eval()  # learns without dropout
    for weight in model.parameters():
        weight.requires_grad_(True)
    tokens = torch.arange(8, device=next(model.parameters()).device)[None]
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
        by_head = model.get_output_embeddings()(model.base_model(input_ids=tokens).last_hidden_state)
    if not torch.allclose(whole, by_head, atol=1e-3 * whole.std().item()):
        raise UnsupportedModel(
            f"{type(model).__name__} changes the logits of its head (a soft cap or a scale); training does not know how"
        )
    return model


def tree_logits(model: "PreTrainedModel", batch: TreeBatch) -> Float[Tensor, "laws vocab"]:
    """Return the logits of a model at the nodes of a batch that have a law."""
    hidden = model.base_model(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
    ).last_hidden_state
    return model.get_output_embeddings()(hidden[batch.learnt])


@torch.no_grad()
def acceptance(model: "PreTrainedModel", trees: Trees, batch_tokens: int, device: torch.device) -> float:
    """Return the mean odds that a draft token is accepted, by the number of children of each node."""
    accepted = 0.0
    weight = 0.0
    for batch in batches_of(trees, batch_tokens, np.random.default_rng(0)):
        here = batch.to(device)
        overlaps, _ = overlap(tree_logits(model, here), here.ids, here.logp)
        accepted += (overlaps * here.weights).sum().item()
        weight += here.weights.sum().item()
    return accepted / weight if weight else math.nan


def save(model: "PreTrainedModel", folder: Path) -> None:
    """Write the model in bfloat16: two bytes for each weight.

    The bundled draft lost 0.00001 of its held-out acceptance by that.
    """
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
