"""Train a small model, and a smaller one that drafts for it, on games of numbers that were solved at random.

python train.py --out MODEL --minutes 2

Both are written in the formats of transformers: MODEL/target and MODEL/draft. Minutes are of the processor's time.
"""

import random
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from countdown import play
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<s>", "</s>", "<pad>", "numbers ", " to ", ":\n", " left ", "\n", " ", "=", "+", "-", "*"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each number up to 99, and for each sign and word of the game."""
    vocab = {word: number for number, word in enumerate([*WORDS, *map(str, range(100))])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    pieces = Regex(r"numbers | to |:\n| left |\n| |=|\+|-|\*|\d+")
    inner.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def new_model(layers: int, width: int) -> LlamaForCausalLM:
    """Return a model with random weights."""
    config = LlamaConfig(
        vocab_size=len(WORDS) + 100,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def batch(rng: random.Random, speaker: PreTrainedTokenizerFast, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return games with their solutions: token ids, and the same with -100 where nothing is learnt."""
    texts = []
    heads = []
    for _ in range(rows):
        game, solution = play(rng)
        head = speaker(game.prompt)["input_ids"]
        texts.append([*head, *speaker(solution)["input_ids"], 1])
        heads.append(len(head))
    length = max(map(len, texts))
    ids = torch.tensor([text + [2] * (length - len(text)) for text in texts])
    learnt = ids.clone()
    learnt[ids == 2] = -100
    for row, head in enumerate(heads):
        learnt[row, :head] = -100
    return ids, learnt


def train(model: LlamaForCausalLM, speaker: PreTrainedTokenizerFast, seconds: float, seed: int, rows: int = 32) -> None:
    """Train a model on new games for this many seconds of the processor's time."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.process_time()
    step = 0
    while (spent := time.process_time() - began) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 100) * (1 - 0.95 * spent / seconds)
        ids, learnt = batch(rng, speaker, rows)
        logits = model(ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), learnt[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}, {spent:.0f} s, loss {loss.item():.3f}", flush=True)
        step += 1


def main(
    out: Annotated[Path, typer.Option(help="Folder of the models.")],
    minutes: Annotated[float, typer.Option(help="Minutes of the processor's time for the target.")] = 2.0,
    seed: int = 0,
) -> None:
    """Train the target, then the draft model for a fifth of its time, and write both."""
    speaker = tokenizer()
    for name, layers, width, share in (("target", 2, 96, 1.0), ("draft", 1, 64, 0.2)):
        torch.manual_seed(seed)
        model = new_model(layers, width)
        train(model, speaker, 60 * minutes * share, seed)
        model.save_pretrained(out / name)
        speaker.save_pretrained(out / name)


if __name__ == "__main__":
    typer.run(main)
