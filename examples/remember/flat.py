"""Measure what a model with memory stores while it reads long texts, and how long a new token takes after them.

    python examples/remember/flat.py

The memory is not trained: neither rows nor seconds depend on its weights. Seconds are those of the processor.
"""

import time

import numpy as np

import specbeam as sb
from specbeam.generation import turns_of
from specbeam.models.memory.plan import MemoryPlan, segment_of_window
from specbeam.models.memory.recall import new_recall

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
        began = time.process_time()
        turns = turns_of(remembering, prompt, sb.greedy(), max_new_tokens=1 + NEW, eos_token_id=[])
        ends = [time.process_time() for _ in turns]
        (answer,) = sb.generate(remembering, [prompt], sb.greedy(), max_new_tokens=1, eos_token_id=[])
        each = 1000 * (ends[-1] - ends[0]) / NEW
        slots = pair.target.runner.store.caches * pair.target.runner.store.slots
        print(
            f"| {length:,} | {answer.report.peak_kv_tokens} | {slots} | {ends[0] - began:.1f} | {each:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
