"""Training batches: rows of similar length, gathered on the device from one flat array."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from corpus import Example
from torch import Tensor
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # int64[rows, length], right-padded with the end token
    answers: Tensor  # bool[rows, length], positions whose NEXT token belongs to the answer


class Rows:
    """All training rows ``<s> prompt <out> answer </s>``, flat on one device."""

    def __init__(self, examples: list[Example], tokenizer: PreTrainedTokenizerFast, device: torch.device) -> None:
        prompts = tokenizer([one.prompt for one in examples for _ in one.answers])["input_ids"]
        answers = tokenizer([text for one in examples for text in one.answers], add_special_tokens=False)["input_ids"]
        rows = [p + a + [tokenizer.eos_token_id] for p, a in zip(prompts, answers, strict=True)]
        self.lengths = np.array([len(row) for row in rows])
        self.pad = tokenizer.eos_token_id
        self.flat = torch.tensor([token for row in rows for token in row], device=device)
        self.starts = torch.tensor(np.cumsum(self.lengths) - self.lengths, device=device)
        self.ends = torch.tensor(self.lengths, device=device)
        self.prompt_lengths = torch.tensor([len(p) for p in prompts], device=device)

    def epoch(self, tokens_per_batch: int, rng: np.random.Generator) -> Iterator[Batch]:
        """Every row once; rows of a batch have nearly equal length, batches come in random order."""
        order = np.argsort(self.lengths + rng.uniform(0, 2, len(self.lengths)), kind="stable")
        widths = np.maximum.accumulate(self.lengths[order])
        batches, start = [], 0
        while start < len(order):
            most = tokens_per_batch // int(widths[start])
            area = widths[start : start + most] * np.arange(1, len(widths[start : start + most]) + 1)
            stop = start + max(1, int(np.searchsorted(area, tokens_per_batch, side="right")))
            batches.append(order[start:stop])
            start = stop
        for index in rng.permutation(len(batches)):
            yield self._gather(batches[index])

    def _gather(self, rows: np.ndarray) -> Batch:
        width = int(self.lengths[rows].max())
        picked = torch.from_numpy(rows).to(self.flat.device)
        steps = torch.arange(width, device=self.flat.device)
        inside = steps < self.ends[picked, None]
        where = torch.where(inside, self.starts[picked, None] + steps, 0)
        tokens = torch.where(inside, self.flat[where], self.pad)
        answers = (steps >= self.prompt_lengths[picked, None] - 1) & (steps < self.ends[picked, None] - 1)
        return Batch(tokens, answers)
