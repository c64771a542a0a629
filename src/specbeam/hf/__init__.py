"""Doors into transformers: functions for ``model.generate(..., custom_generate=...)``.

    model.generate(**inputs, custom_generate=sb.hf.dsbd, draft_model=draft, num_beams=4, do_sample=True)

`generate` never hands `assistant_model`, `streamer` or `tokenizer` to a callable, so the draft comes as `draft_model` and
a streamer as `stream_to`. The repository form (a folder with ``custom_generate/generate.py``; `repository()` gives the
path of ours) does receive `assistant_model`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from specbeam.errors import NotSupported, SpecbeamError
from specbeam.generation import run
from specbeam.pair import load
from specbeam.probs import Warp
from specbeam.recipes.beams import beam_sampling as beam_sampling_recipe
from specbeam.recipes.beams import dsbd as dsbd_recipe
from specbeam.recipes.method import Method
from specbeam.recipes.search import DrafterName
from specbeam.recipes.search import beam_search as beam_search_recipe
from specbeam.recipes.search import speculative_beam_search as speculative_beam_search_recipe
from specbeam.records import Generation
from specbeam.request import Request
from specbeam.settings import Settings, allowed_after
from specbeam.truncation import NO_TRUNCATION, Truncation

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

# What transformers builds of the temperature, top_k, ... of a call: these see the joint law, all others each beam.
_WARPERS = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TopHLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
}  # fmt: skip
_KNOWN_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
_PLACEHOLDERS = {"past_key_values", "use_cache", "logits_to_keep", "cache_position", "position_ids", "token_type_ids"}


def dsbd(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    logits_processor: "LogitsProcessorList | None" = None,
    stopping_criteria: "StoppingCriteriaList | None" = None,
    generation_config: "GenerationConfig | None" = None,
    draft_model: "PreTrainedModel | None" = None,
    draft_beams: int | None = None,
    depth: int = 4,
    width: Literal["dynamic", "fixed"] = "dynamic",
    threshold: float = 0.7,
    min_beams: int = 1,
    coupling: Literal["noise", "rejection"] = "noise",
    seed: int | None = None,
    stream_to: Any = None,
    **model_kwargs: Any,
) -> Any:
    """`sb.dsbd` with ``num_beams`` beams. ``do_sample=False`` is beam search at temperature 0.

    Returns what `generate` returns: int64[rows, length] padded on the right, or with ``return_dict_in_generate=True`` an
    output with `sequences` and `sequences_scores`. ``seed=None`` takes its seed from torch's generator.
    """
    if draft_model is None:
        raise NotSupported(
            "dsbd needs draft_model=...; assistant_model never reaches a custom_generate function, "
            "so pass the draft under the name draft_model, or use the repository form (sb.hf.repository())"
        )
    beams = _beams(generation_config)
    method = dsbd_recipe(beams, draft_beams or beams + 2, depth, width, threshold, min_beams, coupling)
    return _generate(
        model, input_ids, logits_processor, stopping_criteria, generation_config, draft_model, method, seed, stream_to,
        model_kwargs,
    )  # fmt: skip


def beam_sampling(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    logits_processor: "LogitsProcessorList | None" = None,
    stopping_criteria: "StoppingCriteriaList | None" = None,
    generation_config: "GenerationConfig | None" = None,
    seed: int | None = None,
    stream_to: Any = None,
    **model_kwargs: Any,
) -> Any:
    """`sb.beam_sampling` with ``num_beams`` beams: the paper's beam sampling, without a draft."""
    method = beam_sampling_recipe(_beams(generation_config))
    return _generate(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        None,
        method,
        seed,
        stream_to,
        model_kwargs,
    )


def beam_search(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    logits_processor: "LogitsProcessorList | None" = None,
    stopping_criteria: "StoppingCriteriaList | None" = None,
    generation_config: "GenerationConfig | None" = None,
    draft_model: "PreTrainedModel | None" = None,
    draft_beams: int | None = None,
    depth: int = 4,
    drafter: DrafterName = "model",
    seed: int | None = None,
    stream_to: Any = None,
    **model_kwargs: Any,
) -> Any:
    """What `generate` itself returns with ``num_beams``, faster: beams share the prompt, and drafts save passes.

    With `draft_model`, or with a `drafter` that needs none, it is `sb.speculative_beam_search`, else `sb.beam_search`.
    ``do_sample=True`` has the law of transformers' own beam sampling.
    """
    beams = _beams(generation_config)
    if draft_model is None and drafter == "model":
        method = beam_search_recipe(beams)
    else:
        method = speculative_beam_search_recipe(beams, draft_beams or beams + 2, depth, drafter)
    return _generate(
        model, input_ids, logits_processor, stopping_criteria, generation_config, draft_model, method, seed, stream_to,
        model_kwargs,
    )  # fmt: skip


def repository() -> Path:
    """A folder for ``custom_generate=str(sb.hf.repository())``; transformers asks for ``trust_remote_code=True`` with it."""
    return Path(__file__).parent / "hf_repository"


def _beams(config: "GenerationConfig | None") -> int:
    return int(getattr(config, "num_beams", None) or 1)


def _generate(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    logits_processor: "LogitsProcessorList | None",
    stopping_criteria: "StoppingCriteriaList | None",
    config: "GenerationConfig | None",
    draft_model: "PreTrainedModel | None",
    method: Method,
    seed: int | None,
    stream_to: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    assert config is not None, "transformers hands over a generation config"
    _check(config, stopping_criteria, model_kwargs)
    answers = config.num_return_sequences or 1
    prompts, paddings = _prompts(input_ids, model_kwargs.get("attention_mask"), max(method.beams, answers))
    pair = load(model, draft_model)
    if seed is None:
        seed = int(torch.randint(2**62, (1,)))
    settings = Settings(
        max_new_tokens=_room(config, input_ids),
        num_return_sequences=answers,
        eos_token_id=config.eos_token_id,
        length_penalty=1.0 if config.length_penalty is None else config.length_penalty,
        early_stopping=bool(config.early_stopping) if config.early_stopping is None else config.early_stopping,
    )
    request = Request(pair, prompts, method, settings, seed)
    for session in request.sessions:
        session.pad(paddings[request.prompt_of[session.place]])
        session.warp = _warp(logits_processor, not config.do_sample, request.prompt_of[session.place], method.search)
    found: dict[int, list[Generation] | SpecbeamError] = dict(request.refused)
    for session in run(request, len(request.sessions) or 1, stream_to):
        found[session.place] = session.failure or request.answers(session)
    return _output(found, input_ids, max(method.beams, answers), config)


def _check(config: "GenerationConfig", criteria: Any, model_kwargs: dict[str, Any]) -> None:
    strange = [type(one).__name__ for one in criteria or [] if type(one).__name__ not in _KNOWN_CRITERIA]
    if strange:
        raise NotSupported(
            f"stopping criteria {', '.join(strange)} are not honoured; use max_new_tokens and eos_token_id"
        )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise NotSupported(f"{name} is not honoured; leave it out")
    for name in (
        "guidance_scale",
        "num_beam_groups",
        "diversity_penalty",
        "penalty_alpha",
        "constraints",
        "force_words_ids",
    ):
        if getattr(config, name, None) not in (None, 0, 0.0, 1):
            raise NotSupported(f"{name} is not honoured; leave it out")
    unknown = {name for name, value in model_kwargs.items() if value is not None} - _PLACEHOLDERS - {"attention_mask"}
    if unknown:
        raise NotSupported(f"{', '.join(sorted(unknown))} would be ignored; leave it out")


def _prompts(
    input_ids: torch.Tensor, mask: torch.Tensor | None, repeats: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Rows without padding, and their padding. `generate` has repeated each row `repeats` times before it calls us."""
    if len(input_ids) % repeats == 0 and bool(
        (input_ids.view(-1, repeats, input_ids.shape[1]) == input_ids[::repeats, None]).all()
    ):
        input_ids = input_ids[::repeats]
        mask = mask[::repeats] if mask is not None and len(mask) != len(input_ids) else mask
    if mask is None:
        return [row.tolist() for row in input_ids], [[] for _ in input_ids]
    rows = list(zip(input_ids, mask.bool(), strict=True))
    return [row[keep].tolist() for row, keep in rows], [row[~keep].tolist() for row, keep in rows]


def _room(config: "GenerationConfig", input_ids: torch.Tensor) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return int(config.max_length) - input_ids.shape[1]


def _warp(processors: Sequence[Any] | None, greedy: bool, prompt: int, search: bool) -> Warp:
    from transformers import LogitsProcessorList

    processors = [_for_prompt(one, prompt) for one in processors or []]
    if search:
        return Warp(LogitsProcessorList(processors) or None, NO_TRUNCATION, greedy, search=True)
    joint = [one for one in processors or [] if type(one).__name__ in _WARPERS]
    each = LogitsProcessorList([one for one in processors or [] if type(one).__name__ not in _WARPERS])
    return Warp(each or None, NO_TRUNCATION if greedy else Truncation.of(joint), greedy)


def _for_prompt(processor: Any, prompt: int) -> Any:
    """The one processor that counts rows: it would take our rows, which are nodes, for other prompts."""
    if type(processor).__name__ != "PrefixConstrainedLogitsProcessor":
        return processor
    return allowed_after(processor._prefix_allowed_tokens_fn, prompt)


def _output(
    found: dict[int, list[Generation] | SpecbeamError],
    input_ids: torch.Tensor,
    repeats: int,
    config: "GenerationConfig",
) -> Any:
    answers: list[Generation] = []
    per_prompt: list[int] = []
    for place in sorted(found):
        result = found[place]
        if isinstance(result, SpecbeamError):
            raise result
        answers += result
        per_prompt.append(len(result))
    eos = config.eos_token_id
    pad = config.pad_token_id if config.pad_token_id is not None else eos[0] if isinstance(eos, list) else eos
    longest = max(len(one.tokens) for one in answers)
    if len(per_prompt) == len(input_ids) // repeats:  # with one beam each return sequence is a session of its own
        _check_complete(per_prompt, config.num_return_sequences or 1)
    heads = input_ids[::repeats].repeat_interleave(len(answers) // (len(input_ids) // repeats), 0)
    tails = torch.full((len(answers), longest), pad if pad is not None else 0, dtype=input_ids.dtype)
    for row, one in enumerate(answers):
        tails[row, : len(one.tokens)] = torch.tensor(one.tokens)
    sequences = torch.cat([heads, tails.to(input_ids.device)], 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateBeamDecoderOnlyOutput

    scores = torch.tensor([_score(one) for one in answers], device=input_ids.device)
    return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=scores)


def _check_complete(per_prompt: list[int], wanted: int) -> None:
    """Rows of a tensor say by their place which prompt they answer, so none may be missing."""
    short = [number for number, count in enumerate(per_prompt) if wanted > 1 and count < wanted]
    if short:
        raise NotSupported(
            f"prompt {short[0]} has {per_prompt[short[0]]} answers, num_return_sequences is {wanted}: top-k, top-p or a "
            "dynamic width left fewer beams; ask for fewer, or take width='fixed' and less truncation"
        )


def _score(one: Generation) -> float:
    return next(beam.score for beam in one.beams if beam.tokens == one.tokens)
