"""Doors into transformers: functions for ``model.generate(..., custom_generate=...)``.

    model.generate(**inputs, custom_generate=sb.hf.dsbd, draft_model=draft, num_beams=4, do_sample=True)

`generate` never hands `assistant_model`, `streamer` or `tokenizer` to a callable, so the draft comes as `draft_model` and
a streamer as `stream_to`. The repository form (a folder with ``custom_generate/generate.py``; `repository()` gives the
path of ours) does receive `assistant_model`.

All return what `generate` returns: int64[rows, length] padded on the right, or with ``return_dict_in_generate=True`` an
output with `sequences` and `sequences_scores`, whose other fields are None: whole rows of scores are not kept.
``seed=None`` takes its seed from torch's generator. What is not honoured is refused by name.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from specbeam.errors import NotSupported
from specbeam.hf.answer import answer
from specbeam.hf.call import Call
from specbeam.laws.named import EXACT
from specbeam.recipes.beams import beam_sampling as beam_sampling_recipe
from specbeam.recipes.beams import dsbd as dsbd_recipe
from specbeam.recipes.beams import sampling
from specbeam.recipes.method import Method, refuse_ignored
from specbeam.recipes.search import DrafterName, drafted, speculative
from specbeam.recipes.search import beam_search as beam_search_recipe
from specbeam.recipes.search import speculative_beam_search as speculative_beam_search_recipe
from specbeam.recipes.sequence import speculative_sampling
from specbeam.session import Drafter
from specbeam.verify.walk import MatchRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def dsbd(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    draft_model: "PreTrainedModel | None" = None,
    draft_beams: int | None = None,
    depth: int = 4,
    width: Literal["dynamic", "fixed"] = "dynamic",
    threshold: float = 0.7,
    min_beams: int = 1,
    coupling: Literal["noise", "rejection"] = "noise",
    seed: int | None = None,
    stream_to: Any = None,
    **given: Any,
) -> Any:
    """`sb.dsbd` with ``num_beams`` beams.

    ``do_sample=False`` is the same at temperature 0, with widths and ends as in the paper; for the beams of transformers
    take `beam_search`.
    """
    if draft_model is None:
        raise NotSupported(
            "dsbd needs draft_model=...; assistant_model never reaches a custom_generate function, "
            "so pass the draft under the name draft_model, or use the repository form (sb.hf.repository())"
        )
    call = Call.of(model, input_ids, given)
    method = dsbd_recipe(call.beams, draft_beams, depth, width, threshold, min_beams, coupling)
    return answer(call, draft_model, method, seed, stream_to)


def beam_sampling(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    seed: int | None = None,
    stream_to: Any = None,
    **given: Any,
) -> Any:
    """`sb.beam_sampling` with ``num_beams`` beams: the paper's beam sampling, without a draft."""
    call = Call.of(model, input_ids, given)
    return answer(call, None, beam_sampling_recipe(call.beams), seed, stream_to)


def beam_search(
    model: "PreTrainedModel",
    input_ids: torch.Tensor,
    draft_model: "PreTrainedModel | None" = None,
    draft_beams: int | None = None,
    depth: int | None = None,
    drafter: "DrafterName | Drafter" = "model",
    seed: int | None = None,
    stream_to: Any = None,
    **given: Any,
) -> Any:
    """What `generate` itself returns with ``num_beams``, faster: beams share the prompt, and drafts save passes.

    With `draft_model`, or with a `drafter` that needs none, it is `sb.speculative_beam_search` of 4 layers if no `depth` is
    given, else `sb.beam_search`.
    ``do_sample=True`` has the law of transformers' own beam sampling. One beam is its greedy search, or plain sampling.
    """
    call = Call.of(model, input_ids, given)
    with_drafts = draft_model is not None or drafter != "model"
    refuse_ignored(drafter == "model", f"drafter={drafter!r}", draft_model=draft_model)
    refuse_ignored(with_drafts, "beam search without drafts", draft_beams=draft_beams, depth=depth)
    depth = 4 if depth is None else depth
    if call.beams == 1:
        method = _of_one_beam(drafter, draft_beams, depth) if with_drafts else sampling()
    elif with_drafts:
        method = speculative_beam_search_recipe(call.beams, draft_beams, depth, drafter)
    else:
        method = beam_search_recipe(call.beams)
    return answer(call, draft_model, method, seed, stream_to)


def _of_one_beam(drafter: "DrafterName | Drafter", draft_beams: int | None, depth: int) -> Method:
    """Greedy search, or plain sampling, with drafts."""
    if drafter == "model":
        return speculative_sampling(depth) if draft_beams is None else dsbd_recipe(1, draft_beams, depth, "fixed")
    build = speculative(1, drafted(1, draft_beams, drafter), depth, drafter, EXACT, MatchRule())
    return Method("speculative_beam_search", EXACT, 1, build)


def repository() -> Path:
    """A folder for ``custom_generate=str(sb.hf.repository())``; transformers asks for ``trust_remote_code=True`` with it."""
    return Path(__file__).parent / "repository"
