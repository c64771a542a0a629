"""Drafts for a target: a model, a head, the target without some sublayers, or the target with rounded weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.lm import LM
from specbeam.doors.model_files import require_place_of_model
from specbeam.doors.options.checks import is_integer
from specbeam.engines.choices import BY_LIBRARY, OWN_ROUNDINGS, Quantize, is_rounding
from specbeam.engines.cpu.cache_words import KVType
from specbeam.engines.cpu.decoder import misfit_of_bfloat16
from specbeam.engines.eligibility import reads_sources
from specbeam.engines.shared_tokens import SharedTokens
from specbeam.models.encoder_decoder import EncoderDecoderLM, encoder_for
from specbeam.models.heads.mtp import is_own_modules
from specbeam.models.heads.probe import probed
from specbeam.models.heads.read import head_model, is_head, read_head
from specbeam.models.huggingface import HuggingFaceLM, prepare_to_score
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import ShareFrom, by_engine, language_model
from specbeam.models.loading.tokenizers import text_starts
from specbeam.models.skipping import Skipping, skipping_model
from specbeam.models.stand_ins import StandInModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ROLE = "the draft model "  # prefix of a draft model's name in errors


@dataclass(frozen=True)
class GivenDraft:
    """The draft arguments of `load`: a model, a head, the target without sublayers, or nothing."""

    model: Any = None  # a model object, path or hub id
    head: Any = None  # a path, hub id or module
    skipping: Skipping | None = None
    quantize: "Quantize | None" = None  # rounding of the model


@dataclass(frozen=True)
class DraftOptions:
    """Options of `load` for drafts."""

    check: bool = True
    compile: bool = False
    share_from: ShareFrom = "auto"
    probe: bool = True
    kv: KVType = "float32"
    engine: str = "auto"


def given_draft(
    draft: Any,
    quantize_draft: "Quantize | None",
    quantize: "Quantize | None",
    target: Any,
    target_model: "PreTrainedModel",
) -> GivenDraft:
    """Return the draft arguments of `load`. Raises `BadSetting` if they contradict each other.

    Args:
        target: the `target` argument of `load`.
        target_model: the model loaded from it.
    """
    if isinstance(draft, str) and draft == "swift":
        draft = Skipping()
    if isinstance(draft, Skipping):
        return GivenDraft(skipping=draft)
    if is_rounding(draft):
        model, rounding = _rounded_target(draft, quantize, quantize_draft, target, target_model)
        return GivenDraft(model, quantize=rounding)
    if draft is not None and is_head(draft):
        return GivenDraft(head=draft)
    return GivenDraft(draft, quantize=quantize_draft)


def draft_of(
    given: GivenDraft,
    model: "PreTrainedModel | None",
    target: HuggingFaceLM,
    tokenizer: "PreTrainedTokenizerBase | None",
    options: DraftOptions,
    shared: SharedTokens | None,
) -> LM | None:
    """Return the language model or head that scores drafts; None for no draft.

    Args:
        model: the draft model, if there is one.
        tokenizer: the target's tokenizer.
        shared: the tokens that the draft model shares with a target of another vocabulary.
    """
    if given.head is not None:
        return _head_of(target, given.head, tokenizer, options.probe)
    if given.skipping is not None:
        return skipping_model(target, given.skipping)
    if model is None:
        return None
    rounding = by_engine(given.quantize)
    is_target = model is target.given_model
    if options.engine == "bfloat16" and misfit_of_bfloat16(model):
        options = replace(options, engine="auto")
    if reads_sources(model):
        kv: KVType = options.kv if is_target else "float32"
        return _reading_draft(model, target, options.check, rounding or options.engine, kv, shared)
    if is_target:  # a target that drafts for itself needs a second cache
        engine = rounding or ("torch" if target.engine == "torch" else options.engine)
        return HuggingFaceLM(model, engine=engine, share_from=options.share_from, kv=options.kv, shared=shared)
    share_from = options.share_from
    return language_model(
        model, options.check, rounding, options.compile, share_from, shared=shared, role=_ROLE, engine=options.engine
    )


def check_draft_options(draft: Any, quantize_draft: Any, draft_vocab: Any) -> None:
    """Raise `BadSetting` if an option of `load` for draft models is wrong, or if the draft is no model.

    Args:
        draft, quantize_draft, draft_vocab: see `load`.

    Raises `MissingFile` for a path with nothing there.
    """
    if draft_vocab is not None and (not is_integer(draft_vocab) or draft_vocab < 1):
        raise BadSetting(f"draft_vocab is {draft_vocab!r}; it is a number of tokens, at least 1")
    given = {"quantize_draft": quantize_draft, "draft_vocab": draft_vocab}
    if isinstance(draft, (str, Path)) and not is_rounding(draft):
        require_place_of_model(str(draft))
    names = [name for name, value in given.items() if value is not None]
    what = _instead_of_model(draft) if names else ""
    if what:
        raise BadSetting(f"{names[0]} is for draft models, and {what}; leave it out")


def _instead_of_model(draft: Any) -> str:
    """Return what the argument `draft` of `load` is, if it is no model; "" if it is one."""
    if draft is None:
        return "there is none"
    if isinstance(draft, Skipping) or (isinstance(draft, str) and draft == "swift"):
        return "the draft is the target without some sublayers"
    return "the draft is a head" if not is_rounding(draft) and is_head(draft) else ""


def with_fewer_drafted(shared: SharedTokens | None, draft_vocab: int | None, vocab: int) -> SharedTokens | None:
    """Return the tokens that a draft model shares with a target, of which it drafts only the first `draft_vocab`.

    Args:
        shared: None: all of the target's `vocab` tokens.
        draft_vocab: see `load`.
    """
    if draft_vocab is None or draft_vocab >= vocab:
        return shared
    found = SharedTokens(np.ones(vocab, dtype=bool), 0) if shared is None else shared
    return replace(found, below=int(draft_vocab))


def check_draft_of_sources(model: "PreTrainedModel", draft: Any, share_from: ShareFrom) -> None:
    """Raise `NotSupported` or `BadSetting` if a draft or an option does not fit an encoder-decoder target."""
    name = type(model).__name__
    is_skipping = isinstance(draft, Skipping) or draft == "swift"
    if is_skipping or (draft is not None and not is_rounding(draft) and is_head(draft)):
        what = "skipping sublayers" if is_skipping else f"the draft head {draft}"
        raise NotSupported(
            f"{what} needs a decoder-only target, and {name} has an encoder; draft with a smaller model of its family, or "
            "without a model (prompt_lookup, suffix_match)"
        )
    if is_integer(share_from):
        raise BadSetting(f"share_from is for long prompts, and the decoder prompts of {name} are short; leave it out")


def _reading_draft(
    model: "PreTrainedModel",
    target: HuggingFaceLM,
    check: bool,
    engine: str,
    kv: KVType,
    shared: SharedTokens | None,
) -> EncoderDecoderLM:
    """Return the language model of an encoder-decoder draft. Raises `NotSupported` for a decoder-only target.

    Args:
        engine: the engine or rounding of the draft.
    """
    if not isinstance(target, EncoderDecoderLM):
        raise NotSupported(
            f"the draft {type(model).__name__} reads sources, and the target {target.model_name} continues prompts; give "
            "two models of the same kind"
        )
    encoder = encoder_for(model, target)
    is_target = model is target.given_model
    if encoder is None and not is_target:
        rounding: Any = engine if engine in OWN_ROUNDINGS else None
        own = language_model(model, check, rounding, shared=shared, role=_ROLE, engine=engine)
        assert isinstance(own, EncoderDecoderLM)
        if own.input_name != target.input_name:
            raise NotSupported(f"the draft reads {own.input_name}, and the target reads {target.input_name}")
        return own
    prepare_to_score(model)
    # Each target needs its own draft cache.
    lm = EncoderDecoderLM(model, encoder=target.encoder, engine=engine, kv=kv, shared=shared)
    if check and not is_target and not isinstance(model, StandInModel):  # its folder was checked before
        check_scores_forests(lm, _ROLE)
    return lm


def _rounded_target(
    draft: Any, quantize: "Quantize | None", quantize_draft: "Quantize | None", target: Any, model: "PreTrainedModel"
) -> "tuple[Any, Quantize]":
    """Return the model object or source of a draft that is the rounded target, and its rounding.

    Args:
        draft: the name of a rounding.
        target: the `target` argument of `load`.
        model: the model loaded from it.

    Raises `BadSetting` if another option contradicts `draft`.
    """
    if quantize_draft is not None:
        raise BadSetting(
            f"draft={draft!r} already rounds the draft's weights, and quantize_draft is {quantize_draft!r}; leave one of "
            "them out"
        )
    if draft in BY_LIBRARY:
        return target, draft
    if quantize in BY_LIBRARY:
        raise BadSetting(
            f"draft={draft!r} rounds the target's weights, which quantize={quantize!r} has already rounded; give the draft "
            "as a folder or hub id, with quantize_draft"
        )
    return model, draft


def _head_of(target: HuggingFaceLM, source: Any, tokenizer: "PreTrainedTokenizerBase | None", probe: bool) -> LM:
    """Return the draft model of a head, which is read and probed once for each target."""
    key = (source if isinstance(source, torch.nn.Module) else str(source), probe)
    files = _files_of(target.model.name_or_path if is_own_modules(source) else source)
    known: tuple[Any, LM] | None = target.heads.get(key)
    if known is not None and known[0] == files:
        return known[1]
    found = read_head(source, target.model)
    if probe:
        found = probed(found, target, text_starts(target.model, tokenizer, target.vocab)).head
    read = head_model(found, target)
    target.heads[key] = (files, read)
    return read


def _files_of(source: Any) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and modification time of each file of a folder; nothing for a hub id or a module."""
    if isinstance(source, torch.nn.Module) or not Path(source).expanduser().is_dir():
        return ()
    files = sorted(path for path in Path(source).expanduser().iterdir() if path.is_file())
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
