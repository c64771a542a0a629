"""Train a small recommender that writes semantic ids, and measure its recall under a catalogue.

python examples/catalogue/recommender.py

The data are synthetic: no set of real purchases with item ids has a licence that lets it be used here. 2,000 items lie in
40 groups; a customer likes a few groups and walks through each of them in an order that most customers share. An item's
id is three codes from residual quantisation of a vector of the items bought beside it, and a fourth that tells items with
equal codes apart, as in TIGER (arXiv 2305.05065).
"""

import time
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import specbeam as sb

CODES = 32
LEVELS = 4
FIRST = 3  # tokens 0 to 2 are padding, start and end
END = 2
VOCAB = FIRST + LEVELS * CODES
HISTORY = 8  # items of a prompt
GROUPS = 40


def main(
    items: int = 2000,
    customers: int = 20_000,
    steps: int = 600,
    tests: Annotated[int, typer.Option(help="customers whose next item is asked for")] = 200,
    beams: int = 10,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    walks = histories(rng, items, customers)
    ids = semantic_ids(rng, walks, items)
    model = trained(walks[:-tests], ids, steps)
    pair = sb.load(model, tokenizer=False)
    shop = sb.catalogue({f"item {number}": tokens.tolist() for number, tokens in enumerate(ids)})
    methods = {
        "beam search with the catalogue": (sb.beam_search(beams), {"catalogue": shop}),
        "the same, levels drafted": (sb.speculative_beam_search(beams, drafter="items"), {"catalogue": shop}),
        "beam search without it": (sb.beam_search(beams), {"max_new_tokens": LEVELS + 1}),
    }
    print(f"{tests} customers, {beams} beams\n")
    print(
        "| | recall at 5 | recall at 10 | beams that are no item | passes | ms |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name, (method, options) in methods.items():
        print(row(name, pair, shop, walks[-tests:], ids, method, options))
    print(best_row(pair, shop, walks[-tests:], ids))


def histories(rng: np.random.Generator, items: int, customers: int) -> np.ndarray:
    """Return the items that customers bought, int64[customers, HISTORY + 1]."""
    group_of = np.arange(items) % GROUPS
    members = [np.flatnonzero(group_of == group) for group in range(GROUPS)]
    place = np.zeros(GROUPS, dtype=np.int64)
    found = np.empty((customers, HISTORY + 1), dtype=np.int64)
    for customer in range(customers):
        likes = rng.choice(GROUPS, 2, replace=False)
        place[likes] = [rng.integers(len(members[group])) for group in likes]
        for step in range(HISTORY + 1):
            group = likes[step % 2]
            place[group] += rng.choice([1, 2, 5], p=[0.7, 0.2, 0.1])
            found[customer, step] = members[group][place[group] % len(members[group])]
    return found


def semantic_ids(rng: np.random.Generator, walks: np.ndarray, items: int) -> np.ndarray:
    """Return the tokens of each item, int64[items, LEVELS]: codes of its company, and a number among equal ones."""
    beside = np.zeros((items, items), dtype=np.float32)
    for step in range(HISTORY - 2):
        np.add.at(beside, (walks[:, step], walks[:, step + 2]), 1)
    beside += beside.T
    vectors = beside @ rng.normal(size=(items, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-9
    codes = np.zeros((items, LEVELS), dtype=np.int64)
    rest = vectors
    for level in range(LEVELS - 1):
        centres = rest[rng.choice(items, CODES, replace=False)]
        for _ in range(10):
            nearest = ((rest[:, None] - centres) ** 2).sum(2).argmin(1)
            for code in range(CODES):
                if (nearest == code).any():
                    centres[code] = rest[nearest == code].mean(0)
        codes[:, level] = nearest
        rest = rest - centres[nearest]
    seen: dict[tuple[int, ...], int] = {}
    for item in range(items):
        key = tuple(codes[item, :-1].tolist())
        codes[item, -1] = seen.get(key, 0)
        seen[key] = seen.get(key, 0) + 1
    if max(seen.values()) > CODES:
        raise SystemExit(f"{max(seen.values())} items have the same codes, and the last code tells {CODES} apart")
    return FIRST + CODES * np.arange(LEVELS) + codes


def trained(walks: np.ndarray, ids: np.ndarray, steps: int) -> LlamaForCausalLM:
    """Return a Llama of 1 M weights that has learned the next item after each history."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        bos_token_id=1, eos_token_id=END, pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps)
    rng = np.random.default_rng(1)
    began = time.perf_counter()
    for step in range(steps):
        chosen = walks[rng.integers(len(walks), size=64)]
        tokens = ids[chosen].reshape(len(chosen), -1)
        ends = np.full((len(chosen), 1), END)
        batch = torch.from_numpy(np.concatenate([np.ones_like(ends), tokens, ends], 1))
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 250 == 249:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    return model.eval()


def prompt_of(walk: np.ndarray, ids: np.ndarray) -> list[int]:
    """Return the prompt of a history."""
    return [1, *ids[walk[:HISTORY]].reshape(-1).tolist()]


def row(name: str, pair: sb.Pair, shop: sb.Catalogue, walks: np.ndarray, ids: np.ndarray, method, options) -> str:
    """Return a row of the table."""
    hits = {5: 0, 10: 0}
    strange = 0
    texts = 0
    passes = 0
    began = time.perf_counter()
    for walk in walks:
        (answer,) = sb.generate(pair, prompt_of(walk, ids), method, eos_token_id=END, length_penalty=0.0, **options)
        found = [shop.item_of(None, [*one.tokens[:LEVELS], END], (END,)) for one in answer.beams]
        for most in hits:
            hits[most] += f"item {walk[HISTORY]}" in found[:most]
        strange += sum(one is None for one in found)
        texts += len(found)
        passes += answer.report.target_passes
    seconds = time.perf_counter() - began
    recall = " | ".join(f"{hits[most] / len(walks):.3f}" for most in hits)
    share = f"{100 * strange / texts:.1f} %"
    return f"| {name} | {recall} | {share} | {passes / len(walks):.1f} | {1000 * seconds / len(walks):.0f} |"


def best_row(pair: sb.Pair, shop: sb.Catalogue, walks: np.ndarray, ids: np.ndarray) -> str:
    """Return the row of `sb.best`."""
    hits = {5: 0, 10: 0}
    passes = 0
    began = time.perf_counter()
    for walk in walks:
        search = sb.best(pair, prompt_of(walk, ids), 10, catalogue=shop, eos_token_id=END)
        found = [one.item for one in search]
        for most in hits:
            hits[most] += f"item {walk[HISTORY]}" in found[:most]
        passes += search.report.target_passes
    seconds = time.perf_counter() - began
    recall = " | ".join(f"{hits[most] / len(walks):.3f}" for most in hits)
    name = "`sb.best`, the ten best for sure"
    return f"| {name} | {recall} | 0.0 % | {passes / len(walks):.1f} | {1000 * seconds / len(walks):.0f} |"


if __name__ == "__main__":
    typer.run(main)
