"""Train a small model on books, with memories and without, and compare perplexities by place in the text.

A model that sees 64 tokens is trained on books; then it goes on in four ways for as many tokens: with HMT's memory, with the
memory of the segment before (RMT), with the same segments without memory, and on plain windows. The last is read twice:
in blocks, as the paper's baseline, and in windows that overlap by half, which is what a model without memory should be
compared with.

    python examples/remember/books.py --train children_train.txt.xz --held-out children_valid.txt.xz --out FOLDER

The files hold books, joined by lines of <|endofbook|>. About an hour on one idle core for three seeds. A run that was
stopped goes on; the table is in FOLDER/table.md.
"""

import argparse
import json
import lzma
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import specbeam as sb
from specbeam.lab.train.hmt import train_hmt
from specbeam.lab.train.remembering import MemorySchedule
from specbeam.models.memory.files import read_memory
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.reading import SegmentReader

WORDS = 2048
SEGMENT, SENSORY = 48, 14
WINDOW = SEGMENT + SENSORY + 2
SEGMENTS = 32  # of a held-out piece
PIECES = 64  # of each file
BATCH = 16  # pieces of a pass
STAGES = ((2, 150), (4, 350))  # segments of a text, and steps
TEXTS = 8  # of a step with memory
WINDOWS = 32  # of a step without
RATE = 1e-3
PLACES = {"all": (0, SEGMENTS), "1": (0, 1), "2 to 4": (1, 4), "5 to 8": (4, 8), "9 to 32": (8, SEGMENTS)}
ARMS = {
    "HMT": MemoryPlan(SEGMENT, SENSORY, 300, 0.5, "attention", "refresh"),
    "memory of the segment before (RMT)": MemoryPlan(SEGMENT, SENSORY, 300, 0.5, "previous"),
    "the same segments, no memory": MemoryPlan(SEGMENT, SENSORY, 300, 0.5, "initial"),
}


def books_in(path: Path) -> list[str]:
    """Return the texts of a file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [text.strip() for text in file.read().split("<|endofbook|>") if text.strip()]


def words_of(folder: Path, texts: list[str]) -> ByteLevelBPETokenizer:
    """Return the tokenizer of a folder; train it on texts if there is none."""
    names = [folder / "vocab.json", folder / "merges.txt"]
    if not all(name.exists() for name in names):
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(texts, vocab_size=WORDS, show_progress=False)
        made.save_model(str(folder))
    return ByteLevelBPETokenizer(*map(str, names))


def new_model(seed: int) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def trained_on_windows(model: LlamaForCausalLM, stream: torch.Tensor, steps: int, seed: int, decays: bool) -> None:
    """Train a model on windows of a stream of tokens, int64[n]."""
    random = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    model.train()
    for step in range(steps):
        left = (steps - step) / steps if decays else 1.0
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 50, 1.0) * min(left / 0.3, 1.0)
        starts = random.integers(len(stream) - WINDOW, size=WINDOWS)
        rows = torch.stack([stream[start : start + WINDOW] for start in starts.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step} of {steps}: loss {float(loss.detach()):.3f}", flush=True)
    model.eval()


@torch.no_grad()
def by_windows(model: LlamaForCausalLM, pieces: torch.Tensor, stride: int) -> torch.Tensor:
    """Return the negative log-likelihood of each token but the first, float[pieces, length - 1], in windows.

    Args:
        stride: tokens by which a window moves; it decides only those that the one before did not.
    """
    length = pieces.shape[1]
    found = torch.zeros(len(pieces), length - 1)
    decided = 0
    for start in range(0, length - 1, stride):
        stop = min(start + WINDOW, length - 1)
        each = surprise_of(model(input_ids=pieces[:, start:stop]).logits, pieces[:, start + 1 : stop + 1])
        found[:, decided:stop] = each[:, decided - start :]
        decided = stop
        if stop == length - 1:
            break
    return found


@torch.no_grad()
def by_segments(folder: Path, pieces: torch.Tensor) -> torch.Tensor:
    """Return the same for a model with its memory."""
    plan, recall, _ = read_memory(folder)
    model = LlamaForCausalLM.from_pretrained(folder / "backbone").eval()
    reader = SegmentReader(model, recall, plan)
    found = torch.zeros(len(pieces), pieces.shape[1] - 1)
    for rows in reader.read(pieces):
        stop = min(rows.start + rows.hidden.shape[1], pieces.shape[1] - 1)
        logits = model.get_output_embeddings()(rows.hidden[:, : stop - rows.start])
        found[:, rows.start : stop] = surprise_of(logits, pieces[:, rows.start + 1 : stop + 1])
    return found


def surprise_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of tokens, float[texts, length]."""
    return functional.cross_entropy(logits.transpose(1, 2).float(), tokens, reduction="none")


def in_batches(score: Callable[[torch.Tensor], torch.Tensor], pieces: torch.Tensor) -> torch.Tensor:
    """Return what a function returns for pieces, a few at a time."""
    return torch.cat([score(pieces[start : start + BATCH]) for start in range(0, len(pieces), BATCH)])


def means(surprise: torch.Tensor) -> dict[str, list[float]]:
    """Return the mean of each piece by segments, and for the second halves of all segments but the first."""
    found = {}
    tokens = torch.arange(1, surprise.shape[1] + 1)
    for name, (first, last) in PLACES.items():
        inside = (tokens >= first * SEGMENT) & (tokens < last * SEGMENT)
        found[name] = surprise[:, inside].mean(1).tolist()
    late = (tokens % SEGMENT >= SEGMENT // 2) & (tokens >= SEGMENT)
    return found | {"second halves": surprise[:, late].mean(1).tolist()}


def pieces_of(path: Path, words: ByteLevelBPETokenizer) -> torch.Tensor:
    """Return pieces of a file, evenly spaced, int64[PIECES, length]."""
    stream = [token for text in books_in(path) for token in words.encode(text).ids]
    length = SEGMENTS * SEGMENT
    starts = np.linspace(0, len(stream) - length, PIECES).astype(int)
    return torch.tensor([stream[start : start + length] for start in starts.tolist()])


def train_models(folder: Path, seed: int, books: list[list[int]], steps: int) -> None:
    """Train the models of a seed that are not in the folder yet."""
    stream = torch.tensor([token for book in books for token in book])
    base = folder / f"base_{seed}"
    if not (base / "config.json").exists():
        model = new_model(seed)
        trained_on_windows(model, stream, steps, seed, decays=False)
        model.save_pretrained(base)
    pair = sb.load(base, tokenizer=False)
    schedule = MemorySchedule(STAGES, batch=TEXTS, rate=RATE, memory_rate=RATE, seed=seed)
    for name, plan in ARMS.items():
        train_hmt(pair, books, folder / f"{plan.recall}_{seed}", plan, width=96, schedule=schedule)
        print(f"seed {seed}: {name} is trained", flush=True)
    plain = folder / f"plain_{seed}"
    if not (plain / "config.json").exists():
        model = LlamaForCausalLM.from_pretrained(base)
        tokens = sum(segments * count for segments, count in STAGES) * TEXTS * SEGMENT
        trained_on_windows(model, stream, tokens // (WINDOWS * WINDOW), seed + 1000, decays=True)
        model.save_pretrained(plain)


def figures_of(folder: Path, seed: int, held_out: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the means of the models of a seed, by arm, file and place."""
    plain = LlamaForCausalLM.from_pretrained(folder / f"plain_{seed}").eval()
    ways = {name: partial(by_segments, folder / f"{plan.recall}_{seed}") for name, plan in ARMS.items()}
    ways["plain model, windows that overlap by half"] = partial(by_windows, plain, stride=WINDOW // 2)
    ways["plain model, blocks (the paper's baseline)"] = partial(by_windows, plain, stride=WINDOW)
    return {
        name: {file: means(in_batches(score, pieces)) for file, pieces in held_out.items()}
        for name, score in ways.items()
    }


def table_of(seeds: list[dict[str, Any]], file: str) -> list[str]:
    """Return the table of a file: perplexities, and nats per token more than HMT's with their standard errors."""
    names = [*PLACES, "second halves"]
    lines = [f"| {file} | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for arm in seeds[0]:
        cells = []
        for name in names:
            own = np.array([found[arm][file][name] for found in seeds])  # by seed and piece
            more = own - np.array([found["HMT"][file][name] for found in seeds])
            error = more.mean(0).std(ddof=1) / math.sqrt(more.shape[1])
            by_seed = ", ".join(f"{value:+.3f}" for value in more.mean(1))
            cells.append(
                f"{math.exp(own.mean()):.1f}"
                + ("" if arm == "HMT" else f"; {more.mean():+.3f} ± {error:.3f} ({by_seed})")
            )
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Train and measure all models, and write the table."""
    reads = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reads.add_argument("--train", type=Path, required=True, help="books to learn from, .xz")
    reads.add_argument(
        "--held-out", type=Path, action="append", required=True, help="texts to measure, .xz; repeatable"
    )
    reads.add_argument("--out", type=Path, required=True, help="folder to write")
    reads.add_argument("--steps", type=int, default=1000, help="steps of the model before any memory")
    reads.add_argument("--seeds", type=int, default=3)
    asked = reads.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    texts = books_in(asked.train)
    words = words_of(asked.out, texts)
    books = [one.ids for one in words.encode_batch(texts)]
    held_out = {path.name.split(".")[0]: pieces_of(path, words) for path in asked.held_out}
    seeds = []
    for seed in range(asked.seeds):
        done = asked.out / f"figures_{seed}.json"
        if not done.exists():
            train_models(asked.out, seed, books, asked.steps)
            done.write_text(json.dumps(figures_of(asked.out, seed, held_out)))
        seeds.append(json.loads(done.read_text()))
        lines = [line for file in held_out for line in [*table_of(seeds, file), ""]]
        (asked.out / "table.md").write_text("\n".join(lines))
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
