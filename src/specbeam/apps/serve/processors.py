"""Logits processors of OpenAI's API: presence and frequency penalties, and logit biases."""

from collections.abc import Mapping

import torch


class CountPenalty:
    """OpenAI's presence and frequency penalties of generated tokens.

    Args:
        prompt_length: number of tokens of the prompt, which do not count.
        presence: penalty of a token that has occurred.
        frequency: penalty per occurrence.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length = prompt_length
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generated = input_ids[:, self.prompt_length :].to(scores.device)
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class TokenBias:
    """Adds biases to the logits of tokens; -100 bans a token.

    Args:
        biases: bias by token id.
    """

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.tokens = torch.tensor([*biases], dtype=torch.int64)
        values = torch.tensor([*biases.values()], dtype=torch.float64)
        self.values = values.masked_fill(values <= -100, -torch.inf).float()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        changed = scores.clone()
        changed[:, self.tokens.to(scores.device)] += self.values.to(scores)
        return changed
