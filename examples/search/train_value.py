"""Train a value function for searches: a head on the target, which tells how often the target wins from here.

python train_value.py --model MODEL --out VALUE

The target plays games of its own. Each beginning of a game learns whether this game was won, so the value is the share of
the target's draws that win, for which the paper's number of draws takes it. VALUE is a sequence classifier of transformers:
the target's layers with one output. `--frozen` trains only this output.
"""

import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from countdown import is_solved, play
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import specbeam as sb

FIRST_SEED = 20_000  # games of other seeds than those of train.py and measure.py
HELD_OUT = 0.1  # share of the games that only measure the value


def played(model: Path, games: int, draws: int, seed: int) -> list[list[tuple[str, float]]]:
    """Return the beginnings of the target's games, each with 1 if its game was won and 0 if not, by game."""
    rng = random.Random(FIRST_SEED + seed)
    prompts = list({play(rng)[0].prompt: None for _ in range(games)})
    pair = sb.load(model / "target", model / "draft")
    asked = [prompt for prompt in prompts for _ in range(draws)]
    method = "speculative_sampling"
    answers = sb.generate(pair, asked, method, max_new_tokens=48, temperature=1.0, seed=seed, batch_size=64)
    found: list[list[tuple[str, float]]] = [[] for _ in prompts]
    for number, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        won = float(is_solved(prompt + answer.text))
        lines = answer.text.splitlines(keepends=True)
        found[number // draws] += [(prompt + "".join(lines[:count]), won) for count in range(len(lines) + 1)]
    return found


def train(classifier: Any, tokenizer: Any, examples: list[tuple[str, float]], epochs: int, rate: float) -> None:
    """Train the weights of a classifier that have gradients."""
    weights = [weight for weight in classifier.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01)
    rng = random.Random(0)
    for epoch in range(epochs):
        rng.shuffle(examples)
        total = 0.0
        for start in range(0, len(examples), 256):
            some = examples[start : start + 256]
            loss = loss_of(classifier, tokenizer, some)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(some)
        print(f"epoch {epoch}: cross-entropy {total / len(examples):.4f}", flush=True)


def loss_of(classifier: Any, tokenizer: Any, examples: list[tuple[str, float]]) -> torch.Tensor:
    """Return the mean cross-entropy of the values of beginnings."""
    texts, won = zip(*examples, strict=True)
    rows = tokenizer(list(texts), return_tensors="pt", padding=True)
    rows.pop("token_type_ids", None)
    return binary_cross_entropy_with_logits(classifier(**rows).logits[:, 0], torch.tensor(won))


def main(
    model: Annotated[Path, typer.Option(help="Folder that train.py has written.")],
    out: Annotated[Path, typer.Option(help="Folder of the value function.")],
    games: Annotated[int, typer.Option(help="Number of games.")] = 3000,
    draws: Annotated[int, typer.Option(help="Number of the target's draws for each game.")] = 4,
    epochs: Annotated[int, typer.Option(help="Number of passes over all beginnings.")] = 2,
    frozen: Annotated[bool, typer.Option("--frozen", help="Leave the target's layers as they are.")] = False,
    seed: int = 0,
) -> None:
    """Play, train, and write the value function."""
    by_game = played(model, games, draws, seed)
    kept = int(len(by_game) * (1 - HELD_OUT))
    examples = [one for game in by_game[:kept] for one in game]
    held_out = [one for game in by_game[kept:] for one in game]
    tokenizer = AutoTokenizer.from_pretrained(model / "target")
    torch.manual_seed(seed)
    classifier = AutoModelForSequenceClassification.from_pretrained(model / "target", num_labels=1)
    classifier.config.pad_token_id = tokenizer.pad_token_id
    if frozen:
        classifier.model.requires_grad_(False)
    train(classifier, tokenizer, examples, epochs, 3e-2 if frozen else 1e-3)
    with torch.no_grad():
        found = loss_of(classifier, tokenizer, held_out).item()
    share = sum(won for _, won in held_out) / len(held_out)
    blind = binary_cross_entropy_with_logits(torch.full((1,), share).logit(), torch.full((1,), share)).item()
    print(
        f"{len(examples)} beginnings; on those of other games cross-entropy {found:.4f}, of their share alone {blind:.4f}"
    )
    classifier.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)
