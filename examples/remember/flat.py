"""Measure what a model with memory stores while it reads long texts, and how long a new token takes after them.

    python examples/remember/flat.py

The memory is not trained: neither rows nor seconds depend on its weights.
"""

import time

import numpy as np

import specbeam as sb
from specbeam.memory.plan import MemoryPlan, segment_of_window
from specbeam.memory.recall import new_recall

SENSORY, WINDOW, NEW = 16, 128, 64
LENGTHS = (1_000, 4_000, 16_000)


def main() -> None:
    """Print a row for each length of a text."""
    pair = sb.load("bundled")
    plan = MemoryPlan(segment_of_window(WINDOW, SENSORY), SENSORY, memories=100)
    recall = new_recall(pair.target_model.get_input_embeddings().weight, 256, 0)
    remembering = sb.hmt(pair, (plan, recall))
    random = np.random.default_rng(0)
    print(
        "| tokens of the prompt | rows stored at most | slots of the store | seconds to read it | ms for each new token |"
    )
    print("| --- | --- | --- | --- | --- |")
    sb.generate(remembering, [[5] * (WINDOW + 1)], sb.greedy(), max_new_tokens=2)  # compiles
    for length in LENGTHS:
        prompt = random.integers(10, 1_000, length).tolist()
        seconds = []
        for count in (1, 1 + NEW):
            began = time.perf_counter()
            (answer,) = sb.generate(remembering, [prompt], sb.greedy(), max_new_tokens=count, eos_token_id=[])
            seconds.append(time.perf_counter() - began)
        each = 1000 * (seconds[1] - seconds[0]) / NEW
        slots = pair.target.runner.store.caches * pair.target.runner.store.slots
        print(f"| {length:,} | {answer.report.peak_kv_tokens} | {slots} | {seconds[0]:.1f} | {each:.1f} |", flush=True)


if __name__ == "__main__":
    main()
