"""Models that remember (HMT), as the target, the draft or both of a pair that every recipe takes."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.core.lm import LM
from specbeam.doors.sources import require_prompts
from specbeam.errors import BadSetting
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.models import load_model
from specbeam.models.memory.files import backbone_of, holds_memory, read_memory, warn_of_other_model
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.memory.plan import MemoryPlan, Query
from specbeam.models.memory.recall import Recall
from specbeam.models.pair import Pair, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hmt(
    pair: "Pair | str | Path | PreTrainedModel",
    memory: "str | Path | tuple[MemoryPlan, Recall] | None" = None,
    *,
    draft_memory: "str | Path | tuple[MemoryPlan, Recall] | None" = None,
    draft_window: int | None = None,
    query: Query | None = None,
) -> Pair:
    """Return a pair whose models read texts in segments and recall memories of them: Hierarchical Memory Transformer.

    Texts may then be of any length: each pass of the model sees one segment, some tokens of the one before, and what the
    segment recalls of all others. Every recipe takes the pair, and its texts have the law of the model with its memory, as
    `MemoryLM` defines it. Drafts change nothing but the speed.

    Paper: arXiv 2405.06067 (NAACL 2025). See docs/methods/hmt.md.

    Args:
        pair: what `load` returned, or what it takes for a target; or the folder of a memory, which then is the memory of the
            target too, if `memory` is None.
        memory: of the target: a folder that `specbeam train hmt` wrote, or a plan with weights; None: the target has none.
        draft_memory: of the draft model, likewise.
        draft_window: for a draft model without memory: read in segments of this many tokens, with as many of the segment
            before. None: it reads the whole text, and the text ends where its positions do.
        query: what queries are made of, "previous_tail" or "refresh" (`MemoryPlan`); None: as the memory's plan says, and
            "refresh" where that says "first_half", which no text can be drawn with.

    Raises:
        BadSetting: nothing is given a memory, an option is wrong or would be ignored, or the target is given one and the
            pair's draft is no model of its own (a head, or layers of the target).
        MissingFile: a folder holds no memory.
        BadHead: a memory cannot be read, or does not fit its model.
        NotSupported: a model takes no rows by embedding, or reads sources.
    """
    if not isinstance(pair, Pair):
        if holds_memory(pair):
            memory = memory if memory is not None else str(pair)
            pair = _backbone(backbone_of(str(pair)))
        pair = load(pair)
    require_prompts(pair, "a model with memory")
    if memory is None and draft_memory is None:
        raise BadSetting("neither memory nor draft_memory is given; give the folder that `specbeam train hmt` wrote")
    if isinstance(pair.target, MemoryLM):
        raise BadSetting("the target of this pair has a memory already; give the pair that `load` returned")
    wants_draft = draft_memory is not None or draft_window is not None
    if wants_draft and not isinstance(pair.draft, HuggingFaceLM):
        found = "no draft" if pair.draft is None else type(pair.draft).__name__
        raise BadSetting(
            f"draft_memory and draft_window are for draft models, and the pair has {found}; load(draft=...)"
        )
    if draft_memory is not None and draft_window is not None:
        raise BadSetting(
            "draft_window is for draft models without memory; leave out one of draft_memory and draft_window"
        )
    if memory is not None and not isinstance(pair.draft, HuggingFaceLM | MemoryLM | None):
        raise BadSetting(
            f"the draft of this pair is {type(pair.draft).__name__}, which works on states or on the cache of the target "
            "without its memory; load the pair without this draft, or with a draft model of its own"
        )
    target = pair.target
    remembering = target if memory is None else _remembering(target, memory, query)
    draft: LM | None = pair.draft
    if isinstance(draft, HuggingFaceLM) and draft_memory is not None:
        draft = _remembering(draft, draft_memory, query)
    elif isinstance(draft, HuggingFaceLM) and draft_window is not None:
        draft = MemoryLM(draft, MemoryPlan(draft_window, draft_window, recall="initial"), None)
    return replace(pair, target=remembering, draft=draft)


def load_by_name(model: str, draft: str | None, **options: Any) -> Pair:
    """Load a pair as `specbeam.load` does; the folder of a memory stands for its model with this memory.

    Args:
        model, draft: names for `load`, or folders that `specbeam train hmt` wrote.
        options: of `load`.
    """
    memory = model if holds_memory(model) else None
    draft_memory = draft if draft is not None and holds_memory(draft) else None
    target_name = model if memory is None else backbone_of(memory)
    draft_name = draft if draft_memory is None else backbone_of(draft_memory)
    pair = load(target_name, draft_name, **options)
    if memory is None and draft_memory is None:
        return pair
    return hmt(pair, memory, draft_memory=draft_memory)


def _backbone(name: str) -> "str | PreTrainedModel":
    """Return what `load` takes for the model of a memory: its name, or the model itself if its folder has no tokenizer."""
    if not Path(name).is_dir() or (Path(name) / "tokenizer_config.json").is_file():
        return name
    return load_model(name)


def _remembering(lm: HuggingFaceLM, memory: "str | Path | tuple[MemoryPlan, Recall]", query: Query | None) -> MemoryLM:
    """Return a model with its memory. An engine that takes no rows by embedding is replaced by transformers' own forward."""
    if isinstance(memory, tuple):
        plan, recall = memory
    else:
        plan, recall, key = read_memory(memory)
        warn_of_other_model(memory, key, lm.model)
    if query is not None:
        if plan.recall != "attention":
            raise BadSetting(
                f"query is {query!r}, and this memory is recalled by {plan.recall!r}, without one; leave it out"
            )
        plan = replace(plan, query=query)
    elif plan.query == "first_half":
        plan = replace(plan, query="refresh")  # what "first_half" has learnt, without a look ahead
    if not lm.runner.takes_vectors:
        further_draft = lm.further_draft
        lm = HuggingFaceLM(lm.model, engine="plain", shared=lm.shared)
        lm.further_draft = further_draft
    return MemoryLM(lm, plan, recall)
