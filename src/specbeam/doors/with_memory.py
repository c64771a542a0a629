"""Models with memory (HMT) as the target, the draft or both models of a pair."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.core.arguments import refusing_unknown
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


@refusing_unknown("option")
def hmt(
    pair: "Pair | str | Path | PreTrainedModel",
    memory: "str | Path | tuple[MemoryPlan, Recall] | None" = None,
    *,
    draft_memory: "str | Path | tuple[MemoryPlan, Recall] | None" = None,
    draft_window: int | None = None,
    query: Query | None = None,
) -> Pair:
    """Return a pair whose models read texts in segments and recall memories of them (Hierarchical Memory Transformer).

    Texts may have any length: each pass of a model sees one segment, some tokens of the previous one, and a memory of all
    others. The pair works with every recipe. Texts have the law of the target with its memory, as defined by `MemoryLM`;
    drafts change only the speed.

    Paper: arXiv 2405.06067 (NAACL 2025). See docs/methods/hmt.md.

    Args:
        pair: a pair, or a target for `load`; or the folder of a memory, which is then also the target's memory if `memory`
            is None.
        memory: memory of the target: a folder written by `specbeam train hmt`, or a plan with weights; None: no memory.
        draft_memory: memory of the draft model, likewise.
        draft_window: for a draft model without memory: read segments of this number of tokens, with as many tokens of the
            previous segment. None: it reads the whole text, which then ends at its last position.
        query: the tokens of queries, "previous_tail" or "refresh" (`MemoryPlan`); None: as in the memory's plan, but
            "refresh" in place of "first_half", by which no text can be sampled.

    Raises:
        BadSetting: no memory is given, an option is wrong or would be ignored, or the target gets a memory and the draft
            depends on the target (a head, or layers of the target).
        MissingFile: a folder has no memory.
        BadHead: a memory cannot be read, or does not fit its model.
        NotSupported: a model does not accept embeddings, or is an encoder-decoder model.
    """
    if not isinstance(pair, Pair):
        if holds_memory(pair):
            memory = memory if memory is not None else str(pair)
            pair = _backbone(backbone_of(str(pair)))
        pair = load(pair)
    require_prompts(pair, "a model with memory")
    if memory is None and draft_memory is None:
        raise BadSetting("neither memory nor draft_memory is given; give a folder written by `specbeam train hmt`")
    if isinstance(pair.target, MemoryLM):
        raise BadSetting("the target of this pair already has a memory; give the pair returned by `load`")
    wants_draft = draft_memory is not None or draft_window is not None
    if wants_draft and not isinstance(pair.draft, HuggingFaceLM):
        found = "no draft" if pair.draft is None else type(pair.draft).__name__
        raise BadSetting(
            f"draft_memory and draft_window need a draft model, and the pair has {found}; use load(draft=...)"
        )
    if draft_memory is not None and draft_window is not None:
        raise BadSetting("draft_window is for draft models without memory; leave draft_memory or draft_window out")
    if memory is not None and not isinstance(pair.draft, HuggingFaceLM | MemoryLM | None):
        raise BadSetting(
            f"the draft of this pair is {type(pair.draft).__name__}, which uses states or the cache of the target without "
            "memory; load the pair without this draft, or with a separate draft model"
        )
    target = pair.target if isinstance(pair.target, HuggingFaceLM) else pair.forgetful_target
    remembering = target if memory is None else _remembering(target, memory, query)
    draft: LM | None = pair.draft
    if isinstance(draft, HuggingFaceLM) and draft_memory is not None:
        draft = _remembering(draft, draft_memory, query)
    elif isinstance(draft, HuggingFaceLM) and draft_window is not None:
        draft = MemoryLM(draft, MemoryPlan(draft_window, draft_window, recall="initial"), None)
    return replace(pair, target=remembering, draft=draft)


def load_by_name(model: str, draft: str | None, **options: Any) -> Pair:
    """Load a pair with `specbeam.load`; the folder of a memory stands for its model with this memory.

    Args:
        model, draft: names for `load`, or folders written by `specbeam train hmt`.
        options: options of `load`.
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
    """Return the name of a memory's model, or the model itself if its folder has no tokenizer."""
    if not Path(name).is_dir() or (Path(name) / "tokenizer_config.json").is_file():
        return name
    return load_model(name)


def _remembering(lm: HuggingFaceLM, memory: "str | Path | tuple[MemoryPlan, Recall]", query: Query | None) -> MemoryLM:
    """Return a model with its memory. Transformers' own forward replaces engines that do not accept embeddings."""
    if isinstance(memory, tuple):
        plan, recall = memory
    else:
        plan, recall, key = read_memory(memory)
        warn_of_other_model(memory, key, lm.model)
    if query is not None:
        if plan.recall != "attention":
            raise BadSetting(
                f"query is {query!r}, and this memory is recalled by {plan.recall!r}, without queries; leave it out"
            )
        plan = replace(plan, query=query)
    elif plan.query == "first_half":
        plan = replace(plan, query="refresh")  # trained in the same way, but each token sees earlier tokens only
    if not lm.runner.takes_vectors:
        further_draft = lm.further_draft
        lm = HuggingFaceLM(lm.model, engine="plain", shared=lm.shared)
        lm.further_draft = further_draft
    return MemoryLM(lm, plan, recall)
