"""The logits processors that `generate` has prepared, for rows of ours: nodes of one prompt, not beams of all."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from specbeam.errors import NotSupported
from specbeam.laws.ranking import NO_TRUNCATION
from specbeam.laws.warp import Warp, truncation_of
from specbeam.options.settings import allowed_after

# What transformers builds of the temperature, top_k, ... of a call: these see the joint law, all others each beam.
_WARPERS = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TopHLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
}  # fmt: skip


def warp_of(processors: Sequence[Any] | None, greedy: bool, prompt: int, prompts: int, search: bool) -> Warp:
    """The warp of one prompt of a batch.

    Args:
        processors: as `generate` prepared them.
        greedy: nothing is drawn.
        prompt, prompts: its number, and how many there are.
        search: scores as in transformers' beam modes.

    Raises:
        NotSupported: something stands behind the warpers, which see the joint law here, and so would come before them.
    """
    from transformers import LogitsProcessorList

    mine = [_for_prompt(one, prompt, prompts, search) for one in processors or []]
    if search:
        return Warp(LogitsProcessorList(mine) or None, NO_TRUNCATION, greedy, search=True)
    joint = [one for one in mine if type(one).__name__ in _WARPERS]
    behind = mine[mine.index(joint[0]) :] if joint and not greedy else []
    late = [type(one).__name__ for one in behind if type(one).__name__ not in (*_WARPERS, "LogitNormalization")]
    if late:
        raise NotSupported(f"{', '.join(late)} comes after {type(joint[0]).__name__}; leave one of them out")
    each = LogitsProcessorList([one for one in mine if type(one).__name__ not in _WARPERS])
    truncation, others = (NO_TRUNCATION, ()) if greedy else truncation_of(joint)
    return Warp(each or None, truncation, greedy, others=others)


def _for_prompt(processor: Any, prompt: int, prompts: int, search: bool) -> Any:
    """Those that look up their prompt by the number of the row would take our rows for other prompts."""
    kind = type(processor).__name__
    if kind == "PrefixConstrainedLogitsProcessor":
        return allowed_after(processor._prefix_allowed_tokens_fn, prompt, together=search)
    changed = copy.copy(processor)
    if kind == "RepetitionPenaltyLogitsProcessor" and isinstance(processor.prompt_ignore_length, torch.Tensor):
        changed.prompt_ignore_length = int(_own(processor.prompt_ignore_length, prompt, prompts)[0])
    elif kind == "EncoderRepetitionPenaltyLogitsProcessor":
        changed.encoder_input_ids = _own(processor.encoder_input_ids, prompt, prompts)
    elif kind == "EncoderNoRepeatNGramLogitsProcessor":
        changed.generated_ngrams = _own(processor.generated_ngrams, prompt, prompts)
        changed.batch_size = 1
    else:
        return processor
    return changed


def _own(rows: Any, prompt: int, prompts: int) -> Any:
    """The row of a prompt, of which there may be several alike."""
    start = prompt * (len(rows) // prompts)
    return rows[start : start + 1]
