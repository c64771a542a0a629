"""Adaptation of the logits processors of `generate`, whose rows are beams of all prompts, to the nodes of one prompt."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from specbeam.core.laws.ranking import NO_TRUNCATION
from specbeam.core.laws.warp import Warp, truncation_of
from specbeam.doors.options.processors import AllowedTokens
from specbeam.errors import NotSupported

# The warpers of transformers: these apply to the joint law, all other processors to each beam.
_WARPERS = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TopHLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
}  # fmt: skip


def warp_of(processors: Sequence[Any] | None, greedy: bool, prompt: int, prompts: int, search: bool) -> Warp:
    """Return the warp of one prompt of a batch.

    Args:
        processors: the logits processors of `generate`, in order.
        greedy: whether do_sample is False.
        prompt: number of the prompt.
        prompts: number of prompts in the batch.
        search: whether scores are those of transformers' beam modes.

    Raises:
        NotSupported: a processor comes after a warper. Here, warpers apply to the joint law after all processors, which
            would reverse the order.
    """
    from transformers import LogitsProcessorList

    adapted = [_for_prompt(processor, prompt, prompts, search) for processor in processors or []]
    if search:
        return Warp(LogitsProcessorList(adapted) or None, NO_TRUNCATION, greedy, search=True)
    warpers = [processor for processor in adapted if _name(processor) in _WARPERS]
    from_warpers_on = adapted[adapted.index(warpers[0]) :] if warpers and not greedy else []
    allowed = (*_WARPERS, "LogitNormalization")
    late = [_name(processor) for processor in from_warpers_on if _name(processor) not in allowed]
    if late:
        raise NotSupported(f"{', '.join(late)} comes after {_name(warpers[0])}; leave one of them out")
    of_each_beam = LogitsProcessorList([processor for processor in adapted if _name(processor) not in _WARPERS])
    truncation, others = (NO_TRUNCATION, ()) if greedy else truncation_of(warpers)
    return Warp(of_each_beam or None, truncation, greedy, others=others)


def _name(processor: Any) -> str:
    """Return the name of a processor's class."""
    return type(processor).__name__


def _for_prompt(processor: Any, prompt: int, prompts: int, search: bool) -> Any:
    """Return a processor that treats every row as a continuation of this prompt.

    Processors that identify prompts by row are replaced, because rows are nodes here. All others are returned unchanged.
    """
    kind = _name(processor)
    if kind == "PrefixConstrainedLogitsProcessor":
        return AllowedTokens(processor._prefix_allowed_tokens_fn, prompt, search)
    changed = copy.copy(processor)
    if kind == "RepetitionPenaltyLogitsProcessor" and isinstance(processor.prompt_ignore_length, torch.Tensor):
        changed.prompt_ignore_length = int(_row_of_prompt(processor.prompt_ignore_length, prompt, prompts)[0])
    elif kind == "EncoderRepetitionPenaltyLogitsProcessor":
        changed.encoder_input_ids = _row_of_prompt(processor.encoder_input_ids, prompt, prompts)
    elif kind == "EncoderNoRepeatNGramLogitsProcessor":
        changed.generated_ngrams = _row_of_prompt(processor.generated_ngrams, prompt, prompts)
        changed.batch_size = 1
    else:
        return processor
    return changed


def _row_of_prompt(rows: Any, prompt: int, prompts: int) -> Any:
    """Return the first of the equal rows of a prompt, as a batch of one row."""
    start = prompt * (len(rows) // prompts)
    return rows[start : start + 1]
