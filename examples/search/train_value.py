"""Train a value function for searches: a head on the target, which tells how often the target wins from here.

python train_value.py --model MODEL --out VALUE
python train_value.py --model CHAT_MODEL --task sums --games 100 --frozen --out VALUE

The target solves problems of its own. Each beginning of a solution learns whether it was right in the end, so the value is
the share of the target's draws that are, for which the paper's number of draws takes it. VALUE is a sequence classifier of
transformers: the target's layers with one output. `--frozen` trains only this output, by the layers' states.
"""

import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from task import Task, TaskName, models_in, task_of
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import specbeam as sb

FIRST_SEED = 20_000  # problems of other seeds than those of train.py and measure.py
HELD_OUT = 0.1  # share of the problems that only measure the value


def solved(model: Path, task: Task, games: int, draws: int, seed: int) -> list[list[tuple[str, float]]]:
    """Return the beginnings of the target's solutions, each with 1 if its solution was right and 0 if not, by problem."""
    target, draft = models_in(model)
    pair = sb.load(target, draft)
    prompts = task.prompts(random.Random(FIRST_SEED + seed), games, pair.tokenizer)
    asked = [prompt for prompt in prompts for _ in range(draws)]
    method = "speculative_sampling" if draft else "sampling"
    answers = sb.generate(
        pair, asked, method, max_new_tokens=task.max_new_tokens, temperature=task.temperature, seed=seed, batch_size=64
    )
    found: list[list[tuple[str, float]]] = [[] for _ in prompts]
    for number, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        won = float(task.is_solved(prompt + answer.text))
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


def states_of(classifier: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Return the last layer's states at the ends of texts, float[texts, hidden]; equal texts are read once."""
    unique = sorted(set(texts), key=len)
    states: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for start in range(0, len(unique), 32):
            some = unique[start : start + 32]
            rows = tokenizer(some, return_tensors="pt", padding=True)
            rows.pop("token_type_ids", None)
            ends = rows["attention_mask"].sum(-1) - 1  # padding is on the right
            found = classifier.model(**rows).last_hidden_state[torch.arange(len(some)), ends].float()
            states.update(zip(some, found, strict=True))
    return torch.stack([states[text] for text in texts]).clone()


def train_output(classifier: Any, states: torch.Tensor, won: torch.Tensor) -> None:
    """Train the output of a classifier by the states of its layers."""
    optimizer = torch.optim.AdamW(classifier.score.parameters(), lr=3e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        for places in torch.randperm(len(states), generator=generator).split(256):
            loss = binary_cross_entropy_with_logits(classifier.score(states[places])[:, 0], won[places])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def loss_of(classifier: Any, tokenizer: Any, examples: list[tuple[str, float]]) -> torch.Tensor:
    """Return the mean cross-entropy of the values of beginnings."""
    texts, won = zip(*examples, strict=True)
    rows = tokenizer(list(texts), return_tensors="pt", padding=True)
    rows.pop("token_type_ids", None)
    return binary_cross_entropy_with_logits(classifier(**rows).logits[:, 0], torch.tensor(won))


def main(
    model: Annotated[Path, typer.Option(help="Folder that train.py has written, or of any model.")],
    out: Annotated[Path, typer.Option(help="Folder of the value function.")],
    task_name: Annotated[TaskName, typer.Option("--task", help="The game, or sums for chat models.")] = "countdown",
    games: Annotated[int, typer.Option(help="Number of problems.")] = 3000,
    draws: Annotated[int, typer.Option(help="Number of the target's draws for each problem.")] = 4,
    epochs: Annotated[int, typer.Option(help="Number of passes over all beginnings.")] = 2,
    frozen: Annotated[bool, typer.Option("--frozen", help="Leave the target's layers as they are.")] = False,
    seed: int = 0,
) -> None:
    """Solve problems, train, and write the value function."""
    by_problem = solved(model, task_of(task_name), games, draws, seed)
    kept = int(len(by_problem) * (1 - HELD_OUT))
    examples = [one for problem in by_problem[:kept] for one in problem]
    held_out = [one for problem in by_problem[kept:] for one in problem]
    target, _ = models_in(model)
    tokenizer = AutoTokenizer.from_pretrained(target, padding_side="right")
    torch.manual_seed(seed)
    classifier = AutoModelForSequenceClassification.from_pretrained(target, num_labels=1, dtype=torch.float32)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    classifier.config.pad_token_id = tokenizer.pad_token_id
    if frozen:
        texts, won = zip(*examples, strict=True)
        train_output(classifier, states_of(classifier, tokenizer, list(texts)), torch.tensor(won))
        texts, won = zip(*held_out, strict=True)
        with torch.no_grad():
            values = classifier.score(states_of(classifier, tokenizer, list(texts)))[:, 0]
        found = binary_cross_entropy_with_logits(values, torch.tensor(won)).item()
    else:
        train(classifier, tokenizer, examples, epochs, 1e-3)
        with torch.no_grad():
            found = loss_of(classifier, tokenizer, held_out).item()
    share = sum(won for _, won in held_out) / len(held_out)
    blind = binary_cross_entropy_with_logits(torch.full((1,), share).logit(), torch.full((1,), share)).item()
    print(
        f"{len(examples)} beginnings; on those of other problems cross-entropy {found:.4f}, of their share alone {blind:.4f}"
    )
    classifier.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    typer.run(main)
