"""Functions for transformers' ``model.generate(..., custom_generate=...)``.

    model.generate(**inputs, custom_generate=sb.hf.dsbd, draft_model=draft, num_beams=4, do_sample=True)

`generate` does not pass `assistant_model`, `streamer` and `tokenizer` to a function, so the draft model is given as
`draft_model` and a streamer as `stream_to`. The repository form (a folder with ``custom_generate/generate.py``;
`repository()` returns specbeam's own) receives `assistant_model`.

All functions return the output of `generate`: int64[rows, length], padded on the right; or, with
``return_dict_in_generate=True``, an output with `sequences` and `sequences_scores`. Its other fields are None, because
full rows of scores are not stored. With ``seed=None`` the seed is drawn from torch's generator. Unsupported options raise
`NotSupported` with their names.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.laws.named import EXACT
from specbeam.core.session import Drafter
from specbeam.core.verify.walk import MatchRule
from specbeam.doors.hf.answer import answer
from specbeam.doors.hf.call import Call
from specbeam.errors import NotSupported
from specbeam.recipes.beams import beam_sampling as beam_sampling_recipe
from specbeam.recipes.beams import dsbd as dsbd_recipe
from specbeam.recipes.beams import sampling
from specbeam.recipes.catalogue import resolve
from specbeam.recipes.method import Method, refuse_ignored
from specbeam.recipes.search import DrafterName, build_of_search, checked_draft_beams
from specbeam.recipes.search import beam_search as beam_search_recipe
from specbeam.recipes.search import speculative_beam_search as speculative_beam_search_recipe
from specbeam.recipes.sequence import speculative_sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["beam_sampling", "beam_search", "dsbd", "repository"]

Door = Callable[..., Any]
_NOT_HERE = ("beams", "trace")  # settings of recipes with another name in `generate`, or without use there


def _takes_settings_of(recipe: Callable[..., Method]) -> Callable[[Door], Door]:
    """Return a decorator that adds the settings of a recipe to the signature of a custom_generate function.

    `generate` passes a function only the arguments in its signature.
    """
    known = inspect.signature(recipe).parameters
    settings = [one for name, one in known.items() if name not in _NOT_HERE]

    def add(door: Door) -> Door:
        own = inspect.signature(door)
        *first, given = own.parameters.values()
        added = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in settings]
        door.__signature__ = own.replace(parameters=[*first, *added, given])  # type: ignore[attr-defined]
        return door

    return add


def _split(door: Door, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into settings of the function's recipe and arguments of `generate`."""
    known = inspect.signature(door).parameters
    settings = {name: value for name, value in given.items() if name in known}
    return settings, {name: value for name, value in given.items() if name not in known}


@_takes_settings_of(dsbd_recipe)
def dsbd(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    draft_model: "PreTrainedModel | str | Path | None" = None,
    method: "Method | str | None" = None,
    seed: int | None = None,
    stream_to: Any = None,
    sources: torch.Tensor | None = None,
    **given: Any,
) -> Any:
    """Decode with `sb.dsbd` and ``num_beams`` beams, or with another method, as a custom_generate function.

    ``do_sample=False`` means temperature 0; widths and stop rules remain those of the paper. For the beams of transformers
    use `beam_search`.

    Args:
        model, input_ids: passed by `generate`.
        draft_model: the draft model, or the folder or hub id of a draft model or head; "int8", "int4" or "fp8": the model
            itself with rounded weights. Required unless `method` drafts without a model.
        method: a recipe (``sb.traversal()``) or its name, in place of `sb.dsbd`; it must have ``num_beams`` beams.
        seed: the same seed gives the same text. None: drawn from torch's generator.
        stream_to: a streamer of transformers, for one prompt with one return sequence.
        sources: for an encoder-decoder model whose draft model has its own encoder: the inputs of `generate`.
        given: passed by `generate`; and the settings of `sb.dsbd`, with the same names and defaults, except that
            `num_beams` replaces `beams`.
    """
    settings, passed = _split(dsbd, given)
    chosen = None if method is None else resolve(method)
    if draft_model is None and (chosen is None or chosen.needs_draft):
        raise NotSupported(
            f"{'dsbd' if chosen is None else chosen.name} needs draft_model=...; assistant_model never reaches a "
            "custom_generate function, so pass the draft under the name draft_model, or use the repository form "
            "(sb.hf.repository())"
        )
    call = Call.of(model, input_ids, passed, inspect.signature(dsbd).parameters)
    if chosen is None:
        return answer(call, draft_model, dsbd_recipe(call.beams, **settings), seed, stream_to, sources)
    refuse_ignored(False, f"method {chosen.name}", **settings)
    call.check_method(chosen)
    return answer(call, draft_model, chosen, seed, stream_to, sources)


@_takes_settings_of(beam_sampling_recipe)
def beam_sampling(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    seed: int | None = None,
    stream_to: Any = None,
    sources: torch.Tensor | None = None,
    **given: Any,
) -> Any:
    """Decode with `sb.beam_sampling` and ``num_beams`` beams, as a custom_generate function: beam sampling without a draft.

    Args:
        model, input_ids: passed by `generate`.
        seed, stream_to, sources: as in `dsbd`.
        given: passed by `generate`; and the settings of `sb.beam_sampling`, with the same names and defaults.
    """
    settings, passed = _split(beam_sampling, given)
    call = Call.of(model, input_ids, passed, inspect.signature(beam_sampling).parameters)
    return answer(call, None, beam_sampling_recipe(call.beams, **settings), seed, stream_to, sources)


def beam_search(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    draft_model: "PreTrainedModel | str | Path | None" = None,
    draft_beams: int | None = None,
    depth: int | None = None,
    drafter: "DrafterName | Drafter" = "model",
    seed: int | None = None,
    stream_to: Any = None,
    sources: torch.Tensor | None = None,
    **given: Any,
) -> Any:
    """Return the output of `generate` itself with ``num_beams``, but faster: beams share the prompt, drafts save passes.

    With a `draft_model`, or a `drafter` without a model, this is `sb.speculative_beam_search`, with 4 draft layers if
    `depth` is None; otherwise it is `sb.beam_search`. ``do_sample=True`` has the law of transformers' beam sampling. With
    one beam, it is transformers' greedy search or plain sampling.

    Args:
        model, input_ids: passed by `generate`.
        draft_model: the draft model, or the folder or hub id of a draft model or head; None: no drafts, or a drafter
            without a model.
        draft_beams, depth, drafter: as in `sb.speculative_beam_search`.
        seed, stream_to, sources: as in `dsbd`.
        given: passed by `generate`.
    """
    call = Call.of(model, input_ids, given, inspect.signature(beam_search).parameters)
    with_drafts = draft_model is not None or drafter != "model"
    refuse_ignored(drafter == "model", f"drafter={drafter!r}", draft_model=draft_model)
    refuse_ignored(with_drafts, "beam search without drafts", draft_beams=draft_beams, depth=depth)
    depth = 4 if depth is None else depth
    if call.beams == 1:
        method = _one_beam_with_drafts(drafter, draft_beams, depth) if with_drafts else sampling()
    elif with_drafts:
        method = speculative_beam_search_recipe(call.beams, draft_beams, depth, drafter)
    else:
        method = beam_search_recipe(call.beams)
    return answer(call, draft_model, method, seed, stream_to, sources)


def _one_beam_with_drafts(drafter: "DrafterName | Drafter", draft_beams: int | None, depth: int) -> Method:
    """Return the method for greedy search or plain sampling with drafts."""
    if drafter == "model":
        return speculative_sampling(depth) if draft_beams is None else dsbd_recipe(1, draft_beams, depth, "fixed")
    build = build_of_search(1, checked_draft_beams(1, draft_beams, drafter), depth, drafter, EXACT, MatchRule())
    return Method("speculative_beam_search", EXACT, 1, build)


def repository() -> Path:
    """Return the folder for ``custom_generate=str(sb.hf.repository())``.

    transformers requires ``trust_remote_code=True`` with it.
    """
    return Path(__file__).parent / "repository"


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
