"""The models of a pair whose target another program runs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.lm import LM
from specbeam.engines.choices import is_rounding
from specbeam.models.chains.lm import ChainLM
from specbeam.models.chains.targets import OpenedTarget, ServedModel
from specbeam.models.checkpoints.hub import hub_lookups
from specbeam.models.heads.read import is_head
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.drafts import DraftOptions, GivenDraft, with_fewer_drafted
from specbeam.models.loading.language_models import by_engine, language_model
from specbeam.models.loading.models import model_of
from specbeam.models.loading.own import changed_options
from specbeam.models.loading.tokenizers import read_tokenizer
from specbeam.models.loading.vocabularies import tokens_in_common
from specbeam.models.skipping import Skipping


class ServedModels(NamedTuple):
    """The models and the tokenizer of a pair whose target another program runs."""

    target_model: ServedModel
    draft_model: Any
    tokenizer: Any
    target: ChainLM
    draft: LM | None


def served_models(
    opened: OpenedTarget,
    draft: Any,
    tokenizer: Any,
    dtype: Any,
    device: torch.device,
    options: DraftOptions,
    **more: Any,
) -> ServedModels:
    """Return the models of `load` for a target that another program runs.

    Args:
        more: `quantize_draft` and `draft_vocab` of `load`.

    Raises the errors of `load`, and `NotSupported` for drafts that read the target's hidden states.
    """
    source = opened.source if tokenizer is None else tokenizer
    own_tokenizer = None if source in (None, False) else read_tokenizer(source)
    scorer = opened.scorer
    target_model = ServedModel(opened.source or scorer.name, scorer.vocab, opened.config, generation_config_of(opened))
    target = ChainLM(scorer)
    _check_draft(draft, scorer.name)
    given = GivenDraft(draft, quantize=more["quantize_draft"])
    if draft is None:
        return ServedModels(target_model, None, own_tokenizer, target, None)
    draft_model = model_of(draft, dtype, device, given.quantize, may_map=True)
    shared = tokens_in_common(target_model, draft_model, own_tokenizer, opened.source or "", draft)
    shared = with_fewer_drafted(shared, more["draft_vocab"], scorer.vocab)
    draft_lm: HuggingFaceLM = language_model(
        draft_model, options.check, by_engine(given.quantize), options.compile, options.share_from, shared=shared,
        role="the draft model ", engine=options.engine,
    )  # fmt: skip
    return ServedModels(target_model, draft_model, own_tokenizer, target, draft_lm)


def check_served_options(options: Mapping[str, Any]) -> None:
    """Raise `BadSetting` for options of `load` that choose how a target is run, if another program runs it.

    Args:
        options: options by name; see `changed_options`.
    """
    wrong = changed_options(options)
    if wrong:
        raise BadSetting(
            f"{', '.join(wrong)} of load() is for targets that specbeam runs; give it to the other program"
        )


def generation_config_of(opened: OpenedTarget) -> Any:
    """Return the generation config of a target, or one with its end tokens only; None if neither is known."""
    from transformers import GenerationConfig

    if opened.eos:
        return GenerationConfig(eos_token_id=[*opened.eos])
    if opened.source is None:
        return None
    try:
        with hub_lookups(opened.source):
            return GenerationConfig.from_pretrained(opened.source)
    except (OSError, ValueError):
        return None


def _check_draft(draft: Any, name: str) -> None:
    """Raise `NotSupported` for a draft that needs the target's weights or hidden states."""
    what = ""
    if isinstance(draft, Skipping) or draft == "swift":
        what = "skipping sublayers"
    elif is_rounding(draft):
        what = f"draft={draft!r}"
    elif draft is not None and is_head(draft):
        what = f"the draft head {draft}"
    if what:
        raise NotSupported(
            f"{what} needs the weights and hidden states of the target, and {name} runs it; draft with a model, or without "
            "one (prompt_lookup, suffix_match)"
        )
