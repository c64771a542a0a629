"""Passes of a model as a whole and spread over the processes that torchrun has started, timed in turn."""

import os
from collections.abc import Sequence
from pathlib import Path

from specbeam.lab.bench.scale import ModelSize, PassSample
from specbeam.lab.bench.speed import Spread
from specbeam.lab.bench.transformers_cache import token_bytes
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.models import load_model
from specbeam.models.pair import Pair, load
from specbeam.recipes.tuning.stored_prompt import StoredPrompt


def size_of(lm: HuggingFaceLM, weight_bytes: float) -> ModelSize:
    """Return the size of a model whose passes read so many bytes of weights."""
    config = lm.model.config.get_text_config()
    return ModelSize(config.num_hidden_layers, config.hidden_size, weight_bytes, token_bytes(lm.model))


def read_bytes(lm: HuggingFaceLM) -> float:
    """Return the bytes of weights that a pass of a whole model reads: all but embeddings that are no output matrix."""
    model = lm.model
    every = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    embedded = model.get_input_embeddings().weight
    shared = model.get_output_embeddings().weight is embedded
    return float(every if shared else every - embedded.numel() * embedded.element_size())


def scale_passes(model: str, rows: Sequence[int], stored: int, repeats: int) -> list[PassSample]:
    """Time passes of a model on one rank, and on all ranks if torchrun has started this process; rounds take turns.

    Both are run by transformers' forward. Other ranks than the first do not return from here.

    Args:
        model: a folder.
        rows: numbers of rows of a pass.
        stored: tokens in the cache.
        repeats: rounds that count; two warm-up rounds run before them.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    spread: Pair | None = load(model, tensor_parallel=True) if ranks > 1 else None
    alone = HuggingFaceLM(load_model(model), engine="plain")
    prompts = {1: StoredPrompt(alone, stored)}
    if spread is not None:
        assert isinstance(spread.target, HuggingFaceLM)
        prompts[ranks] = StoredPrompt(spread.target, stored)
    seconds: dict[tuple[int, int], list[float]] = {}
    for number in range(repeats + 2):
        for count, prompt in prompts.items():
            for width in rows:
                prompt.turn(width)  # not timed: the other one has driven its weights from the CPU's caches
                cost = prompt.turn(width)
                if number >= 2:
                    seconds.setdefault((count, width), []).append(cost.pass_s)
    size = size_of(alone, read_bytes(alone))
    name = Path(model).name
    found = []
    for (count, width), values in seconds.items():
        times = Spread.of(values)
        found.append(PassSample(name, size, count, width, stored, times.median, times.low, times.high))
    return found
