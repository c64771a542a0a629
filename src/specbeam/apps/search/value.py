"""Value functions, which score texts, and checks of their values."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specbeam.errors import BrokenValue, MissingFile
from specbeam.models import check_weights, name_or_path, open_checkpoint, pretrained, read_tokenizer

Value = Callable[[list[str]], Sequence[float]]


def as_value(value: "Value | str | Path") -> Value:
    """Return a value function: `value` itself, or one made from the classifier in a folder."""
    if isinstance(value, str | Path):
        return classifier_value(value)
    return value


def checked_values(value: Value, texts: list[str]) -> list[float]:
    """Return the values of texts.

    Raises `BrokenValue` if the function raises, or returns anything but one number in [0, 1] for each text.
    """
    if not texts:
        return []
    try:
        found = value(list(texts))
        numbers = [float(number) for number in found]
    except Exception as error:
        raise BrokenValue(f"the value function raised {type(error).__name__}: {error}") from error
    if len(numbers) != len(texts):
        raise BrokenValue(
            f"the value function returned {len(numbers)} values for {len(texts)} texts; it must return one for each"
        )
    for number, text in zip(numbers, texts, strict=True):
        if not 0 <= number <= 1:  # NaN too
            raise BrokenValue(
                f"the value function returned {number} for the text that ends in {text[-40:]!r}; values must be in [0, 1]"
            )
    return numbers


def classifier_value(folder: str | Path, batch_size: int = 16, device: str | None = None) -> Value:
    """Return the value function of a sequence classifier of transformers: a reward or value head on a language model.

    The output of a regression model with one output (`problem_type` "regression" in its config) is the value, clipped to
    [0, 1]. One output of any other model is the log-odds. Of two outputs, the value is the probability of the second.

    Raises `MissingFile` if there is no such model, `BadCheckpoint` if it is broken, `BrokenValue` if it has more than two
    outputs.
    """
    from transformers import AutoModelForSequenceClassification

    what = f"{folder} holds no sequence classifier with its tokenizer"
    try:
        name = name_or_path(folder)
    except MissingFile as error:
        raise MissingFile(f"{what}: {error}") from error
    model: Any = pretrained(open_checkpoint(name, AutoModelForSequenceClassification), what, MissingFile)
    check_weights(name, model)
    tokenizer: Any = read_tokenizer(name)
    outputs = model.config.num_labels
    if outputs > 2:
        raise BrokenValue(f"the classifier in {folder} has {outputs} outputs; a value function has one or two")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:  # the model finds the ends of rows by it
        model.config.pad_token_id = tokenizer.pad_token_id
    model = model.eval().to(device or "cpu")
    is_regression = model.config.problem_type == "regression" and outputs == 1

    def values_of(logits: torch.Tensor) -> list[float]:
        if is_regression:
            return [cut(number) for number in logits[:, 0].tolist()]
        odds = logits.softmax(-1)[:, 1] if outputs == 2 else logits[:, 0].sigmoid()
        return list(odds.tolist())

    def value(texts: list[str]) -> list[float]:
        values: list[float] = []
        for start in range(0, len(texts), batch_size):
            rows = tokenizer(texts[start : start + batch_size], return_tensors="pt", padding=True).to(model.device)
            rows.pop("token_type_ids", None)
            with torch.inference_mode():
                logits = model(**rows).logits.float()
            values += values_of(logits)
        return values

    return value


def cut(number: float) -> float:
    """Return a number clipped to [0, 1]; NaN stays NaN."""
    return number if math.isnan(number) else min(max(number, 0.0), 1.0)
