"""Training batches: rows of similar length, gathered on the device from flat arrays."""

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


@dataclass(frozen=True)
class SourceBatch:
    sources: Tensor  # int64[rows, source length], right-padded
    is_source: Tensor  # bool[rows, source length], false at the padding
    tokens: Tensor  # int64[rows, length], what the decoder reads: the start token and the answer
    next_tokens: Tensor  # int64[rows, length], the answer and the end token; -100 behind them


class Flat:
    """Texts one after the other in one array on a device."""

    def __init__(self, texts: list[list[int]], device: torch.device) -> None:
        self.lengths = np.array([len(text) for text in texts])
        self.tokens = torch.tensor([token for text in texts for token in text], device=device)
        self.starts = torch.tensor(np.cumsum(self.lengths) - self.lengths, device=device)
        self.ends = torch.tensor(self.lengths, device=device)

    def gather(self, rows: np.ndarray, pad: int) -> tuple[Tensor, Tensor]:
        """Return some texts, int64[rows, longest], right-padded, and where they are text, bool of the same shape."""
        picked = torch.from_numpy(rows).to(self.tokens.device)
        steps = torch.arange(int(self.lengths[rows].max()), device=self.tokens.device)
        inside = steps < self.ends[picked, None]
        where = torch.where(inside, self.starts[picked, None] + steps, 0)
        return torch.where(inside, self.tokens[where], pad), inside


class Rows:
    """All training rows ``<s> prompt <out> answer </s>``."""

    def __init__(self, examples: list[Example], tokenizer: PreTrainedTokenizerFast, device: torch.device) -> None:
        prompts, answers = encoded(examples, tokenizer)
        rows = [p + a + [tokenizer.eos_token_id] for p, a in zip(prompts, answers, strict=True)]
        self.pad = tokenizer.eos_token_id
        self.texts = Flat(rows, device)
        self.prompt_lengths = torch.tensor([len(p) for p in prompts], device=device)

    def epoch(self, tokens_per_batch: int, rng: np.random.Generator) -> Iterator[Batch]:
        """Every row once; rows of a batch have nearly equal length, batches come in random order."""
        for rows in batches_by_length(self.texts.lengths, tokens_per_batch, rng):
            yield self._gather(rows)

    def _gather(self, rows: np.ndarray) -> Batch:
        tokens, inside = self.texts.gather(rows, self.pad)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        begin = self.prompt_lengths[torch.from_numpy(rows).to(tokens.device), None] - 1
        has_next = inside.roll(-1, 1)
        has_next[:, -1] = False
        return Batch(tokens, (steps >= begin) & has_next)


class SourceRows:
    """All training rows of an encoder-decoder model: the prompt for the encoder, the answer for the decoder."""

    def __init__(self, examples: list[Example], tokenizer: PreTrainedTokenizerFast, device: torch.device) -> None:
        prompts, answers = encoded(examples, tokenizer)
        self.pad = tokenizer.pad_token_id
        self.sources = Flat(prompts, device)
        self.answers = Flat([[tokenizer.bos_token_id, *answer, tokenizer.eos_token_id] for answer in answers], device)

    def epoch(self, tokens_per_batch: int, rng: np.random.Generator) -> Iterator[SourceBatch]:
        """Every row once; rows of a batch have nearly equal length, batches come in random order."""
        for rows in batches_by_length(self.sources.lengths + self.answers.lengths, tokens_per_batch, rng):
            yield self._gather(rows)

    def _gather(self, rows: np.ndarray) -> SourceBatch:
        sources, is_source = self.sources.gather(rows, self.pad)
        answers, is_answer = self.answers.gather(rows, self.pad)
        next_tokens = torch.where(is_answer, answers, -100)[:, 1:]
        return SourceBatch(sources, is_source, answers[:, :-1], next_tokens)


def encoded(examples: list[Example], tokenizer: PreTrainedTokenizerFast) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of prompts and answers, a pair for each answer of each example."""
    prompts = tokenizer([one.prompt for one in examples for _ in one.answers])["input_ids"]
    answers = tokenizer([text for one in examples for text in one.answers], add_special_tokens=False)["input_ids"]
    return prompts, answers


def batches_by_length(lengths: np.ndarray, tokens_per_batch: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the numbers of the rows of each batch, in random order."""
    order = np.argsort(lengths + rng.uniform(0, 2, len(lengths)), kind="stable")
    widths = np.maximum.accumulate(lengths[order])
    batches, start = [], 0
    while start < len(order):
        most = tokens_per_batch // int(widths[start])
        area = widths[start : start + most] * np.arange(1, len(widths[start : start + most]) + 1)
        stop = start + max(1, int(np.searchsorted(area, tokens_per_batch, side="right")))
        batches.append(order[start:stop])
        start = stop
    for index in rng.permutation(len(batches)):
        yield batches[index]
