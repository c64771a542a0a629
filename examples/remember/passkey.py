"""Train a small model that recalls a fact from many segments ago, and compare it with the same model without memory.

A text has segments of noise, one of which holds KEY and a value, and a last segment with QUERY in its first half, and ANSWER
and the value in its second. The window of the model holds one segment and four tokens of the one before it, so a
plain model cannot know a value of earlier segments: chance is 1/16.

    python examples/remember/passkey.py --out FOLDER

A few minutes of one idle core for each of four models. What was trained is in FOLDER, the table in FOLDER/table.md.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specbeam as sb
from specbeam.lab.train.hmt import train_hmt
from specbeam.lab.train.remembering import MemoryDocument, MemorySchedule, padded
from specbeam.models.memory.files import read_memory
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.reading import SegmentReader

VALUES, FILLERS = 16, 12
KEY, QUERY, ANSWER = range(VALUES + FILLERS, VALUES + FILLERS + 3)
SEGMENT, SENSORY = 12, 4
DISTANCES = (1, 2, 4, 8, 16, 32)
TEXTS = 256  # for each figure
DECODED = 64  # texts that are decoded with drafts


def passkey(context: int, random: np.random.Generator, place: int | None = None) -> MemoryDocument:
    """Return a text with so many segments of noise before the question.

    Args:
        place: the segment that holds the value; None: by chance.
    """
    tokens = random.integers(VALUES, VALUES + FILLERS, (context + 1, SEGMENT))
    value = int(random.integers(VALUES))
    where = int(random.integers(context)) if place is None else place
    start = int(random.integers(SEGMENT - 1))
    tokens[where, start : start + 2] = KEY, value
    tokens[-1, int(random.integers(SEGMENT // 2))] = QUERY
    start = int(random.integers(SEGMENT // 2, SEGMENT - 1))
    tokens[-1, start : start + 2] = ANSWER, value
    text = tokens.reshape(-1)[: context * SEGMENT + start + 2].tolist()
    return MemoryDocument(text, [0.1] * (len(text) - 1) + [1.0], 1)


def new_model(seed: int) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VALUES + FILLERS + 3,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def accuracy(folder: Path, plan: MemoryPlan, texts: list[MemoryDocument]) -> float:
    """Return how often the likeliest answer is the right one."""
    _, recall, _ = read_memory(folder)
    model = LlamaForCausalLM.from_pretrained(folder / "backbone").eval()
    reader = SegmentReader(model, recall, plan)
    tokens, _ = padded(texts, torch.device("cpu"))
    *_, last = reader.read(tokens)
    asking = torch.tensor([len(text.tokens) - 2 - last.start for text in texts])  # the rows of ANSWER
    logits = model.get_output_embeddings()(last.hidden[torch.arange(len(texts)), asking])
    right = int((logits.argmax(-1) == torch.tensor([text.tokens[-1] for text in texts])).sum())
    return right / len(texts)


ARMS = {
    "memory by attention": MemoryPlan(SEGMENT, SENSORY, 300, 0.5, "attention", "first_half"),
    "memory by attention, learnt with the previous tail": MemoryPlan(
        SEGMENT, SENSORY, 300, 0.5, "attention", "previous_tail"
    ),
    "memory of the segment before (RMT)": MemoryPlan(SEGMENT, SENSORY, 300, 0.5, "previous"),
    "no memory, same window": MemoryPlan(SEGMENT, SENSORY, 300, 0.5, "initial"),
}


def drafts_accepted(folder: Path, texts: list[MemoryDocument]) -> dict[str, float]:
    """Return how often the trained model writes the right answer, decoded, and how often a draft of the answer is accepted.

    The draft is the same model: with its memory, or with what its window holds alone.
    """
    model, draft = (LlamaForCausalLM.from_pretrained(folder / "backbone").eval() for _ in range(2))
    plan, recall, _ = read_memory(folder)
    plan = replace(plan, query="refresh")
    pair = sb.load(model, draft)
    ways: dict[str, dict[str, Any]] = {
        "a draft with memory": {"draft_memory": (plan, recall)},
        "a draft with as long a window and no memory": {"draft_window": SEGMENT},
    }
    prompts = [text.tokens[:-1] for text in texts]
    found = {}
    for who, options in ways.items():
        remembering = sb.hmt(pair, (plan, recall), **options)
        method = sb.speculative_sampling(1)
        answers = sb.generate(remembering, prompts, method, temperature=0, max_new_tokens=2, eos_token_id=[])
        right = [answer.tokens[0] == text.tokens[-1] for answer, text in zip(answers, texts, strict=True)]
        found["right answers, decoded"] = sum(right) / len(right)
        found[f"answers accepted of {who}"] = sum(answer.report.accepted > 0 for answer in answers) / len(answers)
    return found


def folder_name(arm: str) -> str:
    """Return the name of the folder of an arm."""
    return arm.split(" (")[0].replace(" ", "_").replace(",", "")


def main() -> None:
    """Train the four models, measure them, and write the table."""
    reads = argparse.ArgumentParser(description=__doc__)
    reads.add_argument("--out", type=Path, required=True, help="folder to write; a run that was stopped goes on there")
    reads.add_argument("--steps", default="150,300,300", help="steps with 1, 2 and 4 segments of context")
    reads.add_argument("--seed", type=int, default=0)
    asked = reads.parse_args()
    torch.set_num_threads(1)
    steps = [int(part) for part in asked.steps.split(",")]
    random = np.random.default_rng(asked.seed)
    documents = [passkey(1 + number % 4, random) for number in range(8_000)]
    stages = tuple(zip((2, 3, 5), steps, strict=True))
    schedule = MemorySchedule(stages, batch=32, rate=2e-3, memory_rate=2e-3, decay=0.2, check_every=50, seed=asked.seed)
    texts = {
        count: [passkey(count, np.random.default_rng([7, count, one])) for one in range(TEXTS)] for count in DISTANCES
    }
    figures: dict[str, dict[int, float]] = {}
    for name, plan in ARMS.items():
        folder = asked.out / folder_name(name)
        folder.mkdir(parents=True, exist_ok=True)
        trained = train_hmt(sb.load(new_model(asked.seed)), documents, folder, plan, width=64, schedule=schedule)
        print(name, f"{trained.curve[-1].seconds:.0f} s, answers {trained.curve[-1].answers:.3f}", flush=True)
        queries = ("first_half", "refresh", "previous_tail") if plan.query == "first_half" else (plan.query,)
        for query in queries:
            row = name if len(queries) == 1 else f"{name}, query {query}"
            figures[row] = {count: accuracy(folder, replace(plan, query=query), texts[count]) for count in DISTANCES}
            print(row, figures[row], flush=True)
    drafts = drafts_accepted(asked.out / folder_name("memory by attention"), texts[16][:DECODED])
    (asked.out / "figures.json").write_text(json.dumps(figures | {"drafts": drafts}, indent=2) + "\n")
    error = math.sqrt(0.25 / TEXTS)
    lines = ["| segments between | " + " | ".join(map(str, DISTANCES)) + " |", "| --- |" + " --- |" * len(DISTANCES)]
    lines += [
        f"| {row} | " + " | ".join(f"{found[count]:.3f}" for count in DISTANCES) + " |"
        for row, found in figures.items()
    ]
    lines += ["", f"{TEXTS} texts for each figure; a standard error is at most {error:.3f}.", ""]
    lines += [f"{who}: {share:.3f} of {DECODED} with 16 segments between" for who, share in drafts.items()]
    text = "\n".join(lines) + "\n"
    (asked.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
