"""An option of generation that another program adds: texts become likelier to end with each token."""

import torch

from specbeam.doors.options.checks import NUMBER
from specbeam.doors.options.table import Field, Flag, GenerationOption, add_option


class StayShort:
    """A logits processor that raises the end tokens by `weight` for each new token."""

    def __init__(self, weight, eos, prompt_length):
        self.weight = weight
        self.eos = list(eos)
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.eos] += self.weight * (input_ids.shape[1] - self.prompt_length)
        return scores


def add():
    """Add the option `stay_short`."""
    option = GenerationOption(
        "stay_short",
        "How much likelier the end of a text becomes with each token; 0: off.",
        (*NUMBER, (lambda value: value >= 0, ">= 0")),
        off=(0,),
        flag=Flag(),
        field=Field({"ge": 0, "le": 100}),
        kind=float | None,
        make=lambda value, text: StayShort(value, text.eos, text.prompt_length),
    )
    add_option(option)
