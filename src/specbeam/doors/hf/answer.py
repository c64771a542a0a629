"""Decoding for a custom_generate function, with a result in the form of `generate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.records import Generation
from specbeam.doors.hf.call import Call
from specbeam.doors.hf.processors import warp_of
from specbeam.doors.request import Request
from specbeam.errors import NotSupported, SpecbeamError
from specbeam.generation import run
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.pair import Pair, load
from specbeam.recipes.method import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def answer(
    call: Call,
    draft_model: "PreTrainedModel | str | Path | None",
    method: Method,
    seed: int | None,
    stream_to: Any = None,
    sources: "torch.Tensor | None" = None,
) -> Any:
    """Decode with `method`, and return the tensor or output of `generate`, with its order of rows.

    Args:
        call: the arguments that `generate` passed.
        draft_model: the draft model, or the folder or hub id of one or of a head; None for methods that need none.
        method: the method.
        seed: None: drawn from torch's generator.
        stream_to: a streamer of transformers; None for none.
        sources: the inputs of an encoder-decoder model, for a draft model with an encoder of its own.

    Raises:
        SpecbeamError: the first error of a prompt, because a row of a tensor cannot be missing.
    """
    prompts, paddings = call.prompts()
    if stream_to is not None and len(prompts) * call.answers != 1:
        raise NotSupported(
            f"stream_to follows one prompt with one return sequence; there are {len(prompts) * call.answers}"
        )
    seed = int(torch.randint(2**62, (1,))) if seed is None else seed
    pair = load(call.model, draft_model)
    settings = call.settings()
    if isinstance(pair.target, EncoderDecoderLM):
        read: Any = call.sources(pair.target.encoder, sources)
        _check_draft_reads(pair, sources is not None)
        settings = settings.changed(decoder_input_ids=prompts)
    else:
        read = prompts
        call.sources(None, sources)
    request = Request.of(pair, read, method, settings, seed, completes=False)
    for session in request.sessions:
        number = request.prompt_of[session.place]
        session.pad(paddings[number])
        session.warp = warp_of(call.processors, call.greedy, number, len(prompts), method.search)
    results: dict[int, list[Generation] | SpecbeamError] = dict(request.refused)
    for session in run(request, len(request.sessions) or 1, stream_to):
        results[session.place] = request.result(session)
    return _output(call, [_generations_or_raise(results[place]) for place in sorted(results)])


def _check_draft_reads(pair: Pair, has_sources: bool) -> None:
    """Raise `NotSupported` if a draft has an encoder of its own, and there is nothing for it to read."""
    draft = pair.draft
    assert isinstance(pair.target, EncoderDecoderLM)
    if has_sources or not isinstance(draft, EncoderDecoderLM) or draft.reads_with(pair.target):
        return
    raise NotSupported(
        f"the draft model {draft.model_name} has an encoder of its own, and generate hands over only what the target's "
        'made; give the source too: sources=inputs["input_ids"]'
    )


def _generations_or_raise(result: list[Generation] | SpecbeamError) -> list[Generation]:
    """Return `result` if it holds generations, or raise it if it is an error."""
    if isinstance(result, SpecbeamError):
        raise result
    return result


def _output(call: Call, results: list[list[Generation]]) -> Any:
    """Return the generations of all prompts as `generate` does: as a tensor, or as an output with scores."""
    generations = [generation for result in results for generation in result]
    rows = call.rows
    longest = max(len(generation.tokens) for generation in generations)
    tails = torch.full((len(generations), longest), call.filler, dtype=rows.dtype)
    for tail, generation in zip(tails, generations, strict=True):
        tail[: len(generation.tokens)] = torch.tensor(generation.tokens)
    sequences = torch.cat([rows.repeat_interleave(call.answers, 0), tails.to(rows.device)], 1)
    if not call.config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

    kind = GenerateBeamEncoderDecoderOutput if call.reads else GenerateBeamDecoderOnlyOutput
    scores = torch.tensor([_score(generation) for generation in generations], device=rows.device)
    return kind(sequences=sequences, sequences_scores=scores)


def _score(generation: Generation) -> float:
    """Return the score of the beam that was chosen as the answer."""
    return next(beam.score for beam in generation.beams if beam.tokens == generation.tokens)
