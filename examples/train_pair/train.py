"""Train the bundled pair: `tokenizer`, then `target`, then `prompts` for the draft, which specbeam trains itself.

python train.py tokenizer --data DATA --out PAIR
python train.py target    --data DATA --out PAIR
python train.py prompts   --data DATA --out PAIR
specbeam train draft -m PAIR/target --data PAIR/prompts.txt -o PAIR/draft

On two CPU cores an epoch of the target takes about half an hour. Training stopped between epochs goes on with --resume.
"""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from batches import Batch, Rows, SourceRows
from corpus import Example, joined_at_random, sounds, translations
from muon import Muon
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from vocabulary import train_tokenizer

from specbeam.engines import prefers_bfloat16

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Data = Annotated[Path, typer.Option(help="folder that holds tatoeba_deu_eng/ and cmudict/")]
Out = Annotated[Path, typer.Option(help="folder of the pair: tokenizer/, target/ and draft/ are made in it")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@app.command()
def tokenizer(data: Data, out: Out, size: int = 6144) -> None:
    """Learn the vocabulary from the training texts."""
    texts = [text for one in translations(data, "train") + sounds(data, "train") for text in (one.prompt, *one.answers)]
    train_tokenizer(texts, size).save_pretrained(out / "tokenizer")


@dataclass(frozen=True)
class Recipe:
    """How long and how hard to train."""

    epochs: int
    rate: float  # of Muon, for the matrices of the blocks
    embedding_rate: float  # of AdamW, for the embedding and the norms
    tokens_per_batch: int
    part: float  # part of the sentences seen per epoch
    sounds_part: float  # part of the pronunciations seen per epoch; they are learned sooner than translation
    seed: int


@app.command()
def target(
    data: Data,
    out: Out,
    layers: int = 10,
    hidden: int = 256,
    epochs: int = 3,
    rate: float = 0.015,
    embedding_rate: float = 3e-3,
    tokens_per_batch: int = 8_000,
    sounds_part: float = 0.3,
    seed: int = 1,
    name: str = "target",
    start: Annotated[Path | None, typer.Option(help="trained target to begin with, deepened to --layers")] = None,
    part: Annotated[float, typer.Option(help="part of the sentences seen per epoch")] = 1.0,
    resume: bool = False,
) -> None:
    """Train the target on the answers' negative log-likelihood."""
    torch.manual_seed(seed)
    vocabulary = AutoTokenizer.from_pretrained(start or out / "tokenizer")
    model = new_model(vocabulary, layers, hidden) if start is None else deepened(start, layers)
    model.to(DEVICE)

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(answer_logits(model, batch).float(), next_tokens(batch))

    recipe = Recipe(epochs, rate, embedding_rate, tokens_per_batch, part, sounds_part, seed)

    def rows(epoch: int) -> Rows:
        return Rows(training_texts(data, recipe, epoch), vocabulary, DEVICE)

    fit(model, vocabulary, loss, rows, Rows(heldout_texts(data), vocabulary, DEVICE), recipe, out / name, resume)


@app.command()
def prompts(data: Data, out: Out, sentences: int = 54_000, words: int = 8_000, seed: int = 3) -> None:
    """Write prompts of both jobs, of which `specbeam train draft` makes a draft; a part of the sentences in paragraphs."""
    rng = random.Random(seed)
    alone = joined_at_random(rng.sample(translations(data, "train"), sentences), 1 / 6, seed)
    spelled_words = rng.sample(sounds(data, "train"), words)
    texts = [one.prompt for one in alone + spelled_words]
    rng.shuffle(texts)
    (out / "prompts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")


def training_texts(data: Path, recipe: Recipe, epoch: int) -> list[Example]:
    """The texts of one epoch; a sixth of the sentences are joined to paragraphs, others each epoch."""
    rng = random.Random(epoch)
    words = sounds(data, "train")
    words = rng.sample(words, int(recipe.sounds_part * len(words)))
    sentences = translations(data, "train")
    if recipe.part < 1:
        sentences = rng.sample(sentences, int(recipe.part * len(sentences)))
    return joined_at_random(sentences, 1 / 6, epoch) + words


def heldout_texts(data: Path) -> list[Example]:
    return translations(data, "valid") + sounds(data, "valid")[:500]


def new_model(vocabulary: PreTrainedTokenizerFast, layers: int, hidden: int) -> LlamaForCausalLM:
    """A Llama with heads of 64 and a shared embedding."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=vocabulary.bos_token_id,
            eos_token_id=vocabulary.eos_token_id,
            pad_token_id=vocabulary.pad_token_id,
        )
    )


def deepened(folder: Path, layers: int) -> LlamaForCausalLM:
    """Build a deeper model that computes what a trained one does: each layer is followed by copies that add nothing yet.

    The copies keep the trained matrices but for those that write into the residual stream, which begin at zero.
    """
    trained = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = copy.deepcopy(trained.config)
    config.num_hidden_layers = layers
    model = LlamaForCausalLM(config)
    model.load_state_dict(trained.state_dict(), strict=False)
    sources = [number * len(trained.model.layers) // layers for number in range(layers)]
    for number, (layer, source) in enumerate(zip(model.model.layers, sources, strict=True)):
        layer.load_state_dict(trained.model.layers[source].state_dict())
        is_copy = number > 0 and sources[number - 1] == source
        if is_copy:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def answer_logits(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Logits at the positions that predict an answer token, float[answer tokens, vocabulary].

    Rows are padded on the right, so the causal mask alone hides the padding.
    """
    hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    return model.lm_head(hidden[batch.answers])


def next_tokens(batch: Batch) -> Tensor:
    return batch.tokens.roll(-1, 1)[batch.answers]


def fit(
    model: PreTrainedModel,
    vocabulary: PreTrainedTokenizerFast,
    loss: Callable[[Any], Tensor],
    rows_of: Callable[[int], Rows | SourceRows],
    heldout: Rows | SourceRows,
    recipe: Recipe,
    folder: Path,
    resume: bool,
) -> None:
    """Train, print the loss of each epoch on training and held-out rows, save after each epoch.

    `rows_of` makes the rows of an epoch, which is given by its number.
    """
    optimizers = new_optimizers(model, recipe)
    first = restore(folder, model, optimizers) if resume else 0
    began = time.monotonic()
    for epoch in range(first, recipe.epochs):
        rng = np.random.default_rng([recipe.seed, epoch])
        batches = list(rows_of(epoch).epoch(recipe.tokens_per_batch, rng))
        losses = []
        for number, batch in enumerate(batches):
            set_rates(optimizers, trapezoid((epoch + number / len(batches)) / recipe.epochs))
            losses.append(train_step(model, loss, batch, optimizers))
            if number % 50 == 49:
                recent, seconds = sum(losses[-50:]) / 50, time.monotonic() - began
                print(
                    f"epoch {epoch + 1} step {number + 1}/{len(batches)} loss {recent:.4f} {seconds:.0f} s", flush=True
                )
        check = heldout_loss(loss, heldout, recipe.tokens_per_batch)
        print(f"epoch {epoch + 1} train {sum(losses) / len(losses):.4f} held out {check:.4f}", flush=True)
        save(model, vocabulary, optimizers, epoch + 1, folder)


def train_step(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any, optimizers: list) -> float:
    with autocast():
        value = loss(batch)
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return value.item()


@torch.no_grad()
def heldout_loss(loss: Callable[[Any], Tensor], rows: Rows | SourceRows, tokens_per_batch: int) -> float:
    with autocast():
        values = [loss(batch) for batch in rows.epoch(tokens_per_batch, np.random.default_rng(0))]
    return torch.stack(values).mean().item()


def autocast() -> torch.autocast:
    """bfloat16 on a GPU and on processors with tile registers; others gain nothing from it."""
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=prefers_bfloat16(DEVICE))


def new_optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest: embeddings, tables of positions, norms."""
    inside, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_table = any(part in name for part in ("embed", "shared", "relative"))
        (inside if parameter.dim() == 2 and not is_table else others).append(parameter)
    return [Muon(inside, recipe.rate), torch.optim.AdamW(others, recipe.embedding_rate, (0.9, 0.98), weight_decay=0.0)]


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group.setdefault("peak", group["lr"])


def trapezoid(part: float, warm: float = 0.02, decay: float = 0.5) -> float:
    """Rise, hold, fall to zero in a straight line over the last half."""
    return min(1.0, part / warm, (1 - part) / decay)


def save(
    model: PreTrainedModel,
    vocabulary: PreTrainedTokenizerFast,
    optimizers: list[torch.optim.Optimizer],
    epoch: int,
    folder: Path,
) -> None:
    """The model in bfloat16 with its tokenizer, so that the folder loads by itself; beside it the training state."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    vocabulary.save_pretrained(folder)
    state = {"epoch": epoch, "model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
    torch.save(state, folder.with_suffix(".state"))


def restore(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load what `save` kept; return the number of finished epochs."""
    state = torch.load(folder.with_suffix(".state"), map_location=DEVICE)
    model.load_state_dict(state["model"])
    for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    return state["epoch"]


if __name__ == "__main__":
    app()
