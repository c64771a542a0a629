"""Decode what was asked for, and hand it back as `generate` does."""

from typing import TYPE_CHECKING, Any

import torch

from specbeam.errors import NotSupported, SpecbeamError
from specbeam.generation import run
from specbeam.hf.call import Call
from specbeam.hf.processors import warp_of
from specbeam.pair import load
from specbeam.recipes.method import Method
from specbeam.records import Generation
from specbeam.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def answer(
    call: Call, draft_model: "PreTrainedModel | None", method: Method, seed: int | None, stream_to: Any = None
) -> Any:
    """The tensor or output of `generate`, in the order of its rows."""
    prompts, paddings = call.prompts()
    if stream_to is not None and len(prompts) * call.answers != 1:
        raise NotSupported(
            f"stream_to follows one prompt with one return sequence; there are {len(prompts) * call.answers}"
        )
    seed = int(torch.randint(2**62, (1,))) if seed is None else seed
    request = Request(load(call.model, draft_model), prompts, method, call.settings(), seed)
    for session in request.sessions:
        number = request.prompt_of[session.place]
        session.pad(paddings[number])
        session.warp = warp_of(call.processors, call.greedy, number, len(prompts), method.search)
    found: dict[int, list[Generation] | SpecbeamError] = dict(request.refused)
    for session in run(request, len(request.sessions) or 1, stream_to):
        found[session.place] = request.result(session)
    return _output(call, [_fine(found[place]) for place in sorted(found)])


def _fine(result: list[Generation] | SpecbeamError) -> list[Generation]:
    """Rows of a tensor say by their place which prompt they answer, so none may be missing."""
    if isinstance(result, SpecbeamError):
        raise result
    return result


def _output(call: Call, results: list[list[Generation]]) -> Any:
    answers = [one for result in results for one in result]
    rows = call.rows
    longest = max(len(one.tokens) for one in answers)
    tails = torch.full((len(answers), longest), call.filler, dtype=rows.dtype)
    for tail, one in zip(tails, answers, strict=True):
        tail[: len(one.tokens)] = torch.tensor(one.tokens)
    sequences = torch.cat([rows.repeat_interleave(call.answers, 0), tails.to(rows.device)], 1)
    if not call.config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateBeamDecoderOnlyOutput

    scores = torch.tensor([_score(one) for one in answers], device=rows.device)
    return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=scores)


def _score(one: Generation) -> float:
    return next(beam.score for beam in one.beams if beam.tokens == one.tokens)
