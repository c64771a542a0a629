"""Decoding for a custom_generate function, with output as from `generate`."""

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
    """Decode with `method`, and return a tensor or output as `generate` does, with the same order of rows.

    Args:
        call: the arguments that `generate` passed.
        draft_model: the draft model, or the folder or hub id of a draft model or head; None for methods without one.
        method: the method.
        seed: None: drawn from torch's generator.
        stream_to: a streamer of transformers, or None.
        sources: the inputs of an encoder-decoder model, for a draft model with its own encoder.

    Raises:
        SpecbeamError: the first error of a prompt, because a tensor cannot have missing rows.
    """
    prompts, paddings = call.prompts()
    if stream_to is not None and len(prompts) * call.answers != 1:
        raise NotSupported(
            f"stream_to needs one prompt with one return sequence; there are {len(prompts) * call.answers}"
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
    """Raise `NotSupported` if a draft has its own encoder and there are no sources for it."""
    draft = pair.draft
    assert isinstance(pair.target, EncoderDecoderLM)
    if has_sources or not isinstance(draft, EncoderDecoderLM) or draft.reads_with(pair.target):
        return
    raise NotSupported(
        f"the draft model {draft.model_name} has its own encoder, and generate passes only the output of the target's "
        'encoder; give the source: sources=inputs["input_ids"]'
    )


def _generations_or_raise(result: list[Generation] | SpecbeamError) -> list[Generation]:
    """Return the generations of a result, or raise its error."""
    if isinstance(result, SpecbeamError):
        raise result
    return result


def _output(call: Call, results: list[list[Generation]]) -> Any:
    """Return the generations of all prompts as a tensor, or as an output with scores."""
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
    """Return the score of the beam that is the answer."""
    return next(beam.score for beam in generation.beams if beam.tokens == generation.tokens)
