"""Drafts for a target: a model, a head, the target without some sublayers, or the target with rounded weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.lm import LM
from specbeam.doors.options.checks import is_integer
from specbeam.engines.cpu.cache_words import KVType
from specbeam.engines.eligibility import reads_sources
from specbeam.engines.shared_tokens import SharedTokens
from specbeam.models.encoder_decoder import EncoderDecoderLM, encoder_for
from specbeam.models.heads.mtp import is_own_modules
from specbeam.models.heads.probe import probed
from specbeam.models.heads.read import head_model, is_head, read_head
from specbeam.models.huggingface import HuggingFaceLM, check_keeps_tokens
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import ShareFrom, by_engine, language_model
from specbeam.models.loading.models import use_a_backend_with_masks
from specbeam.models.loading.tokenizers import first_tokens
from specbeam.models.quantised import BY_LIBRARY, Quantize, is_rounding
from specbeam.models.skipping import Skipping, skipping_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ROLE = "the draft model "  # before the name of a draft model in errors


@dataclass(frozen=True)
class GivenDraft:
    """The draft that `load` was given: a model, a head, the target without sublayers, or none of them."""

    model: Any = None  # a model object, path or hub id
    head: Any = None  # likewise
    skipping: Skipping | None = None
    quantize: "Quantize | None" = None  # of the model


@dataclass(frozen=True)
class DraftOptions:
    """Options of `load` that drafts share with the target; see there."""

    check: bool = True
    compile: bool = False
    share_from: ShareFrom = "auto"
    probe: bool = True
    kv: KVType = "float32"


def given_draft(
    draft: Any,
    quantize_draft: "Quantize | None",
    quantize: "Quantize | None",
    target: Any,
    target_model: "PreTrainedModel",
) -> GivenDraft:
    """Return the draft that `load` was given. Raises `BadSetting` if arguments contradict each other.

    Args:
        target: the target as it was given to `load`, which is `target_model`.
    """
    if isinstance(draft, str) and draft == "swift":
        draft = Skipping()
    if isinstance(draft, Skipping):
        if quantize_draft is not None:
            raise BadSetting("quantize_draft is for draft models, and the target drafts for itself; leave it out")
        return GivenDraft(skipping=draft)
    if is_rounding(draft):
        model, rounding = _rounded_target(draft, quantize, quantize_draft, target, target_model)
        return GivenDraft(model, quantize=rounding)
    if draft is not None and is_head(draft):
        return GivenDraft(head=draft, quantize=quantize_draft)
    return GivenDraft(draft, quantize=quantize_draft)


def draft_of(
    given: GivenDraft,
    model: "PreTrainedModel | None",
    target: HuggingFaceLM,
    tokenizer: "PreTrainedTokenizerBase | None",
    options: DraftOptions,
    shared: SharedTokens | None,
) -> LM | None:
    """Return the language model or head that scores drafts; None if nothing was given.

    Args:
        model: the draft model, if there is one.
        tokenizer: of the target.
        shared: the tokens that the draft model shares with a target of another vocabulary.
    """
    if given.head is not None:
        if given.quantize is not None:
            raise not_for_heads()
        return _head_of(target, given.head, tokenizer, options.probe)
    if given.skipping is not None:
        return skipping_model(target, given.skipping)
    if model is None:
        return None
    rounding = by_engine(given.quantize)
    is_target = model is target.model
    if reads_sources(model):
        kv: KVType = options.kv if is_target else "float32"
        return _reading_draft(model, target, options.check, rounding, kv, shared)
    if is_target:  # it may draft for itself, but it needs a second cache for that
        engine = rounding or ("torch" if target.engine == "torch" else "auto")
        return HuggingFaceLM(model, engine=engine, share_from=options.share_from, kv=options.kv)
    share_from = options.share_from
    return language_model(model, options.check, rounding, options.compile, share_from, shared=shared, role=_ROLE)


def check_draft_of_sources(model: "PreTrainedModel", draft: Any, share_from: ShareFrom) -> None:
    """Raise `NotSupported` or `BadSetting` if a draft or an option is not for a target that reads sources."""
    name = type(model).__name__
    is_skipping = isinstance(draft, Skipping) or draft == "swift"
    if is_skipping or (draft is not None and not is_rounding(draft) and is_head(draft)):
        what = "leaving sublayers out" if is_skipping else f"{draft} is a draft head, which"
        raise NotSupported(
            f"{what} is for decoder-only models, and {name} has an encoder; draft with a smaller model of its family, or "
            "without a model (prompt_lookup, suffix_match)"
        )
    if is_integer(share_from):
        raise BadSetting(
            f"share_from is for long prompts, and the decoder of {name} begins with a few tokens; leave it out"
        )


def _reading_draft(
    model: "PreTrainedModel",
    target: HuggingFaceLM,
    check: bool,
    quantize: "Quantize | None",
    kv: KVType,
    shared: SharedTokens | None,
) -> EncoderDecoderLM:
    """Return the language model of a draft that reads sources. Raises `NotSupported` if the target does not."""
    if not isinstance(target, EncoderDecoderLM):
        raise NotSupported(
            f"the draft is {type(model).__name__}, which reads sources, and the target is {target.model_name}, which "
            "continues prompts; both have to be of one kind"
        )
    encoder = encoder_for(model, target)
    if encoder is None and model is not target.model:
        own = language_model(model, check, quantize, shared=shared, role=_ROLE)
        assert isinstance(own, EncoderDecoderLM)
        if own.input_name != target.input_name:
            raise NotSupported(f"the draft reads {own.input_name}, and the target reads {target.input_name}")
        return own
    check_keeps_tokens(model)
    use_a_backend_with_masks(model)
    model.eval()
    # It needs a cache of its own for each target.
    lm = EncoderDecoderLM(model, encoder=target.encoder, engine=quantize or "auto", kv=kv, shared=shared)
    if check and model is not target.model:
        check_scores_forests(lm, _ROLE)
    return lm


def _rounded_target(
    draft: Any, quantize: "Quantize | None", quantize_draft: "Quantize | None", target: Any, model: "PreTrainedModel"
) -> "tuple[Any, Quantize]":
    """Return the draft model, or from where to load it, and how it is rounded, of a draft that is the target rounded.

    Args:
        draft: the name of a way to round weights.
        target: the target as it was given to `load`, which is `model`.

    Raises `BadSetting` if another option contradicts.
    """
    if quantize_draft is not None:
        raise BadSetting(
            f"draft={draft!r} is the target with rounded weights, and quantize_draft={quantize_draft!r} contradicts it; "
            "leave one of them out"
        )
    if draft in BY_LIBRARY:
        return target, draft
    if quantize in BY_LIBRARY:
        raise BadSetting(
            f"draft={draft!r} rounds the weights of the target, and quantize={quantize!r} has rounded them already; give "
            "the draft as a folder or hub id, with quantize_draft"
        )
    return model, draft


def _head_of(target: HuggingFaceLM, source: Any, tokenizer: "PreTrainedTokenizerBase | None", probe: bool) -> LM:
    """Return the draft model of a head, which is read and tried once for each target."""
    key = (source if isinstance(source, torch.nn.Module) else str(source), probe)
    files = _files_of(target.model.name_or_path if is_own_modules(source) else source)
    known: tuple[Any, LM] | None = target.heads.get(key)
    if known is not None and known[0] == files:
        return known[1]
    found = read_head(source, target.model)
    if probe:
        found = probed(found, target, first_tokens(tokenizer, target.vocab)).head
    read = head_model(found, target)
    target.heads[key] = (files, read)
    return read


def _files_of(source: Any) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of each file of a folder; nothing of a hub id or a module."""
    if isinstance(source, torch.nn.Module) or not Path(source).expanduser().is_dir():
        return ()
    files = sorted(path for path in Path(source).expanduser().iterdir() if path.is_file())
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)


def not_for_heads() -> BadSetting:
    return BadSetting("quantize_draft is for draft models, and the draft is a head; leave it out")
