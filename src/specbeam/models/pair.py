"""The pair of a target and a draft model, with their tokenizer, and `load`, which makes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.core.garbage import rarely_collected
from specbeam.core.lm import LM
from specbeam.engines.cpu.cache_words import KVType
from specbeam.engines.eligibility import reads_sources
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.drafts import DraftOptions, check_draft_of_sources, draft_of, given_draft
from specbeam.models.loading.further import FurtherDrafts
from specbeam.models.loading.language_models import (
    ShareFrom,
    by_engine,
    check_options,
    language_model,
    placed_language_model,
)
from specbeam.models.loading.models import device_of, model_of, name_or_path
from specbeam.models.loading.spread import check_before_spreading, check_spread, has_encoder
from specbeam.models.loading.tokenizers import read_tokenizer
from specbeam.models.loading.vocabularies import tokens_in_common
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.quantised import Quantize, check_is_model, check_kv
from specbeam.models.skipping import Skipping
from specbeam.models.spread import end_together, spread_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = Path(__file__).parents[1] / "bundled"


@dataclass(frozen=True, eq=False)
class Pair:
    """A target model, an optional draft model, and their tokenizer."""

    target_model: "PreTrainedModel"
    draft_model: "PreTrainedModel | None"
    tokenizer: "PreTrainedTokenizerBase | None"
    target: HuggingFaceLM | MemoryLM = field(repr=False)  # scores forests with `target_model`, see `hmt` for memory
    draft: LM | None = field(repr=False)  # scores forests with `draft_model`, or a head

    @property
    def eos(self) -> tuple[int, ...]:
        """The end tokens: the target's generation config's, or else the tokenizer's."""
        eos = getattr(getattr(self.target_model, "generation_config", None), "eos_token_id", None)
        if eos is None and self.tokenizer is not None:
            eos = self.tokenizer.eos_token_id
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def forgetful_target(self) -> HuggingFaceLM:
        """The target, for code that reads its model itself. Raises `NotSupported` if it has a memory, or reads sources."""
        if isinstance(self.target, MemoryLM):
            raise NotSupported(
                "the target of this pair reads with memory (sb.hmt), and this looks at the model without it; give the pair "
                "that sb.load returned"
            )
        if isinstance(self.target, EncoderDecoderLM):
            raise NotSupported(
                f"{self.target.model_name} reads sources, and this looks at the model as one that continues prompts; give a "
                "decoder-only model"
            )
        return self.target

    def word(self, token: int) -> str:
        """Return the text of one token; its number if there is no tokenizer."""
        return self.tokenizer.decode([token]) if self.tokenizer is not None else str(token)

    def room(self, prompt_tokens: int, further: Sequence[LM] = ()) -> int | None:
        """Return the number of new tokens for which target and draft have positions; None if there is no limit.

        Args:
            further: other models that draft.
        """
        models = [lm for lm in (self.target, self.draft, *further) if lm is not None]
        limits = [lm.max_positions for lm in models if lm.max_positions is not None]
        return min(limits) - prompt_tokens if limits else None


@rarely_collected()
def load(
    target: "str | Path | PreTrainedModel",
    draft: "str | Path | PreTrainedModel | Skipping | None" = None,
    tokenizer: "str | Path | PreTrainedTokenizerBase | Literal[False] | None" = None,
    dtype: "str | torch.dtype" = "auto",
    device: str | torch.device | None = None,
    check: bool = True,
    quantize: "Quantize | None" = None,
    quantize_draft: "Quantize | None" = None,
    compile: bool = False,
    share_from: ShareFrom = "auto",
    probe: bool = True,
    device_map: Any = None,
    tensor_parallel: bool = False,
    kv: KVType | None = None,
) -> Pair:
    """Load a target model, and optionally a draft model, with their tokenizer.

    Args:
        target: a path, a hub id, a model object, or "bundled" (the pair that comes with specbeam, draft included). A causal
            language model; or an encoder-decoder model for translation, summaries or speech, whose prompts are sources.
        draft: the same kinds of values; None for methods that need no draft model. It must have the target's tokens, as
            far as both have any: a padded vocabulary may be larger or smaller, and tokens of only one model are never
            drafted (docs/models.md). Or a draft head for the target (docs/heads.md lists the kinds); "mtp": the modules of
            multi-token prediction that the target's own files hold (a folder of this name is "./mtp"). "swift", or a
            `Skipping`: the target without some of its sublayers (docs/methods/swift.md; a folder of this name is
            "./swift"). Or one of the names of `quantize`: the target itself with rounded weights, and a cache of its own.
            The draft of an encoder-decoder model is another one, which shares the target's encoder if its own has the same
            weights; the decoder of one without an encoder (`WhisperForCausalLM`); or a causal language model, which does
            not see the source.
        tokenizer: a path, a hub id or an object; None: the target's tokenizer. False: none, for prompts of token ids.
        dtype: "auto" is the checkpoint's own type on a GPU. On a CPU it is float32: in arithmetic for every model, and in
            memory up to 300 M parameters. A larger one that the compiled forward runs stays in the type of its files, mapped
            to memory: then the engine's own copy of the weights, as large as the files (or rounded), is all that stays in
            memory, and while it is made some 200 MB more (a matrix that is stored head by head is copied besides). Its files
            are read while it runs: write new weights to another folder, or rename them into place. Called by itself, such a
            model object computes in the type of its files. Ignored for model objects.
        device: "cpu", "cuda", ...; None: a GPU if there is one. Ignored for model objects.
        quantize: "int8" and "int4" round the target's weights to 8 or 4 bits, and on a GPU "fp8" does to 8. This is faster,
            but it is another model: the output has the law of the rounded model, and reports say so. For the families in
            docs/models.md.
            "torchao-int8", "torchao-int4", "bitsandbytes-int8" and "bitsandbytes-nf4" let these libraries round any model,
            while transformers loads it from files. Files that hold rounded weights need no option: those of GPTQ and AWQ
            with 4 bits are read without their libraries on a CPU, see docs/quantised.md.
        quantize_draft: the same for the draft, which does not change the law of the output. None: the draft stays as it is,
            also beside a rounded target. One of 16 bits beside a target of 4 reads much for its size: round it, too.
        check: compare the logits of a small token tree with those of plain forwards, once per model, and refuse a model that
            gets them wrong.
        compile: use torch.compile for models that transformers would run on a CPU, because specbeam has no forward of its
            own for them. Takes about five seconds for each form of a pass (one prompt or several, one token or several,
            ...), of which a model has up to a dozen. The compiled code is kept on disk.
        share_from: texts whose prompts begin with at least this number of equal tokens, like a system prompt, compute and
            store these once while they are decoded side by side. None: never. "auto": from 64 tokens on, but never in the
            compiled engines for CPUs, where sharing changes the last bits of a text's logits.
        probe: try a draft head on some 128 tokens that the target writes, read as its files say and in the other ways that
            writers of heads disagree about, and take the reading that fits clearly best. A warning says so if it is not that
            of the files, or if none fits. Takes as long as these passes of the target.
        device_map: where transformers and accelerate put the layers of the target, such as "auto", or a dictionary from
            names of modules to devices, "cpu" and "disk" among them. The target is then run by transformers. The draft is
            put on `device`.
        tensor_parallel: spread the target's weights over the processes that ``torchrun`` has started
            (docs/guides/scale.md). Only that of rank 0 returns; the others do as it says until it ends, and end then
            (`SystemExit`). The draft is whole, and only in rank 0. `check` is not done.
        kv: "bfloat16" keeps the target's keys and values rounded to bfloat16, for long texts in half the memory, in the
            compiled forward of a CPU; those of sources, too. It is another model: the output has the law of the target with
            rounded keys and values, and reports say so. So does a draft that is the target with rounded weights. None: as
            the engine computes, in float32 on a CPU.

    Raises:
        BadSetting: an option is wrong.
        MissingFile: a model or tokenizer is missing, or is something else.
        BadCheckpoint: a model's files are broken, lack tensors, hold others than its configuration says, or weights that are
            not finite.
        BadHead: a draft head cannot be read, or does not fit the target.
        UnsupportedModel: a model cannot score a token tree, or writes no texts.
        BrokenLaw: a model's logits are NaN or infinite.
        VocabularyMismatch: draft and target have other tokens at the same ids.
        NotSupported: a package is missing, the weights of this model cannot be rounded so, or those of its files were
            rounded in a way that cannot be read.
    """
    if isinstance(target, str) and target == "bundled":
        target = BUNDLED / "target"
        draft = draft or BUNDLED / "draft"
    if isinstance(draft, str) and draft == "bundled":
        draft = BUNDLED / "draft"
    torch_device = device_of(device)
    check_options(quantize, share_from)
    check_options(quantize_draft, share_from, "quantize_draft")
    check_is_model(draft)
    check_kv(kv)
    rounded_kv: KVType = kv or "float32"
    is_spread = device_map is not None or tensor_parallel
    if is_spread:
        check_spread(target, quantize, compile, device_map, tensor_parallel, kv)
    if tensor_parallel:
        tokenizer = check_before_spreading(target, draft, tokenizer, quantize_draft)
        target_model = spread_model(name_or_path(target), dtype, torch_device)
    else:
        target_model = model_of(target, dtype, torch_device, quantize, device_map is None, device_map)
    if reads_sources(target_model):
        check_draft_of_sources(target_model, draft, share_from)
        if is_spread:
            raise has_encoder(type(target_model).__name__)
    given = given_draft(draft, quantize_draft, quantize, target, target_model)
    draft_model = None
    if given.model is not None:
        draft_model = model_of(given.model, dtype, torch_device, given.quantize, may_map=True)
    if tokenizer is None:
        tokenizer = target
    own_tokenizer = None if tokenizer is False else read_tokenizer(tokenizer)
    shared = None
    if draft_model is not None:
        shared = tokens_in_common(target_model, draft_model, own_tokenizer, target, given.model)
    if tensor_parallel:
        target_lm = HuggingFaceLM(target_model, engine="parallel", share_from=share_from)
        end_together(target_lm.runner.channel)  # type: ignore[union-attr]
    elif device_map is not None:
        target_lm = placed_language_model(target_model, check, share_from)
    else:
        target_lm = language_model(target_model, check, by_engine(quantize), compile, share_from, rounded_kv)
    target_lm.further_draft = FurtherDrafts(target_lm, own_tokenizer, target, dtype, torch_device, check, share_from)
    options = DraftOptions(check, compile, share_from, probe, rounded_kv)
    draft_lm = draft_of(given, draft_model, target_lm, own_tokenizer, options, shared)
    models = [lm for lm in (target_lm, draft_lm) if isinstance(lm, HuggingFaceLM)]
    if compile and "torch" not in {lm.engine for lm in models}:
        raise BadSetting(
            "compile=True is for models that transformers runs, and specbeam runs these itself, by loops that are compiled "
            "already; leave it out"
        )
    return Pair(target_model, draft_model, own_tokenizer, target_lm, draft_lm)
