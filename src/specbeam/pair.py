"""Loading a pair of models from names, paths or model objects: tokenizer, devices, types and checks."""

import threading
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from specbeam.core.forest import Forest
from specbeam.engines.cpu.audio_encoder import AudioEncoder
from specbeam.engines.cpu.cache_words import KeptAs
from specbeam.engines.cpu.encoder import CompiledEncoder, TextEncoder
from specbeam.engines.eligibility import reads_sources
from specbeam.engines.mapped import is_kept, mapped_files, mark_kept
from specbeam.engines.source import Source
from specbeam.engines.torch.in_float32 import as_loaded
from specbeam.errors import (
    BadSetting,
    MissingFile,
    MissingPackage,
    NotSupported,
    SpecbeamError,
    UnsupportedModel,
    VocabularyMismatch,
)
from specbeam.heads.mtp import is_own_modules
from specbeam.heads.probe import probed
from specbeam.heads.read import head_model, is_head, read_head
from specbeam.lm.base import LM
from specbeam.lm.encoder_decoder import EncoderDecoderLM, encoder_for
from specbeam.lm.engines import COMPILED
from specbeam.lm.huggingface import HuggingFaceLM, check_keeps_tokens
from specbeam.lm.kept import kept_type
from specbeam.lm.quantised import (
    BY_LIBRARY,
    OWN,
    Quantize,
    check_is_model,
    check_kv,
    check_rounding,
    is_rounding,
    library_config,
    unknown_method,
)
from specbeam.lm.rounded_files import read_rounded
from specbeam.lm.skipping import Skipping, skipping_model
from specbeam.lm.spread import TIMEOUT_S, end_together, spread_model
from specbeam.memory.lm import MemoryLM
from specbeam.options.checks import is_integer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ShareFrom = int | Literal["auto"] | None
# transformers' from_pretrained changes torch's defaults while it runs: two threads at a time leave models without weights.
_ONE_AT_A_TIME = threading.RLock()
CHECKED_SOURCE = 24  # tokens of the source on which a compiled encoder is tried
BUNDLED = Path(__file__).parent / "bundled"
# Files of SentencePiece models in the folders of Marian, T5 and M2M100 as they were published, and what reads them.
_PIECES = ("source.spm", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "tokenizer.model")
_READ_PIECES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # package: its module


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
        """The end tokens: those of the target's generation config, or else the tokenizer's."""
        eos = getattr(getattr(self.target_model, "generation_config", None), "eos_token_id", None)
        if eos is None and self.tokenizer is not None:
            eos = self.tokenizer.eos_token_id
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def forgetful_target(self) -> HuggingFaceLM:
        """The target, for what looks at its model itself. Raises `NotSupported` if it has a memory, or reads sources."""
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

    def room(self, prompt_tokens: int) -> int | None:
        """Return the number of new tokens for which both target and draft have positions; None if there is no limit."""
        models = [lm for lm in (self.target, self.draft) if lm is not None]
        limits = [lm.max_positions for lm in models if lm.max_positions is not None]
        return min(limits) - prompt_tokens if limits else None


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
    kv: KeptAs | None = None,
) -> Pair:
    """Load a target model, and optionally a draft model, with their tokenizer.

    Args:
        target: a path, a hub id, a model object, or "bundled" (the pair that comes with specbeam, draft included). A causal
            language model; or an encoder-decoder model for translation, summaries or speech, whose prompts are sources.
        draft: the same kinds of values; None for methods that need no draft model. It must have the target's vocabulary.
            Or a draft head for the target (docs/heads.md lists the kinds); "mtp": the modules of multi-token prediction that
            the target's own files hold (a folder of this name is "./mtp"). "swift", or a `Skipping`: the target without some
            of its sublayers (docs/methods/swift.md; a folder of this name is "./swift"). Or one of the names of `quantize`:
            the target itself with rounded weights, and a cache of its own. The draft of an encoder-decoder model is another
            one, which shares the target's encoder if its own has the same weights; the decoder of one without an encoder
            (`WhisperForCausalLM`); or a causal language model, which does not see the source.
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
            (`SystemExit`). The draft is whole, and in rank 0 alone. `check` is not done.
        kv: "bfloat16" keeps the target's keys and values rounded to bfloat16, for long texts in half the memory, in the
            compiled forward of a CPU; those of sources, too. It is another model: the output has the law of the target with
            rounded keys and values, and reports say so. So does a draft that is the target with rounded weights. None: as
            the engine computes, in float32 on a CPU.

    Raises:
        BadSetting: an option is wrong.
        MissingFile: a model or tokenizer cannot be loaded.
        BadHead: a draft head cannot be read, or does not fit the target.
        UnsupportedModel: a model cannot score a token tree.
        VocabularyMismatch: draft and target do not have the same tokens.
        NotSupported: a package is missing, the weights of this model cannot be rounded so, or those of its files were
            rounded in a way that cannot be read.
    """
    if isinstance(target, str) and target == "bundled":
        target = BUNDLED / "target"
        draft = draft or BUNDLED / "draft"
    if isinstance(draft, str) and draft == "bundled":
        draft = BUNDLED / "draft"
    torch_device = _device(device)
    _check_options(quantize, share_from)
    _check_options(quantize_draft, share_from, "quantize_draft")
    check_is_model(draft)
    check_kv(kv)
    rounded_kv: KeptAs = kv or "float32"
    if device_map is not None or tensor_parallel:
        _check_spread(target, quantize, compile, device_map, tensor_parallel, kv)
    if tensor_parallel:
        tokenizer = _check_before_spreading(target, draft, tokenizer, quantize_draft)
        target_model = spread_model(_name_or_path(target), dtype, torch_device, TIMEOUT_S)
    else:
        target_model = _model(target, dtype, torch_device, quantize, device_map is None, device_map)
    if reads_sources(target_model):
        _check_draft_of_sources(target_model, draft, share_from)
        if device_map is not None or tensor_parallel:
            raise _has_encoder(type(target_model).__name__)
    skipping = Skipping() if isinstance(draft, str) and draft == "swift" else draft
    if isinstance(skipping, Skipping):
        draft = None
        if quantize_draft is not None:
            raise BadSetting("quantize_draft is for draft models, and the target drafts for itself; leave it out")
    if is_rounding(draft):
        draft, quantize_draft = _rounded_target(draft, quantize, quantize_draft, target, target_model)
    head = draft if draft is not None and is_head(draft) else None
    draft_model = None
    if draft is not None and head is None:
        draft_model = _model(draft, dtype, torch_device, quantize_draft, may_keep=True)
    loaded_tokenizer = None if tokenizer is False else _tokenizer(tokenizer if tokenizer is not None else target)
    if draft_model is not None:
        _check_same_vocabulary(target_model, draft_model, loaded_tokenizer, draft)
    if tensor_parallel:
        target_lm = HuggingFaceLM(target_model, engine="parallel", share_from=share_from)
        end_together(target_lm.runner.channel)  # type: ignore[union-attr]
    elif device_map is not None:
        target_lm = _placed_lm(target_model, check, share_from)
    else:
        target_lm = language_model(target_model, check, _own(quantize), compile, share_from, rounded_kv)
    if draft_model is not None and reads_sources(draft_model):
        own_kv: KeptAs = rounded_kv if draft_model is target_model else "float32"
        draft_lm: LM | None = _reading_draft(draft_model, target_lm, check, _own(quantize_draft), own_kv)
    elif draft_model is target_model:  # a model may draft for itself, but it needs a second cache for that
        engine = _own(quantize_draft) or ("torch" if target_lm.engine == "torch" else "auto")
        draft_lm = HuggingFaceLM(draft_model, engine=engine, share_from=share_from, kv=rounded_kv)
    elif head is not None:
        if quantize_draft is not None:
            raise _not_for_heads()
        draft_lm = _head_of(target_lm, head, loaded_tokenizer, probe)
    elif isinstance(skipping, Skipping):
        draft_lm = skipping_model(target_lm, skipping)
    else:
        draft_lm = None
        if draft_model is not None:
            draft_lm = language_model(draft_model, check, _own(quantize_draft), compile, share_from)
    models = [lm for lm in (target_lm, draft_lm) if isinstance(lm, HuggingFaceLM)]
    if compile and "torch" not in {lm.engine for lm in models}:
        raise BadSetting(
            "compile=True is for models that transformers runs, and specbeam runs these itself, by loops that are compiled "
            "already; leave it out"
        )
    return Pair(target_model, draft_model, loaded_tokenizer, target_lm, draft_lm)


def _check_spread(
    target: Any, quantize: Any, compile: bool, device_map: Any, tensor_parallel: bool, kv: Any = None
) -> None:
    """Raise `BadSetting` if a target cannot be spread over devices or processes with these options."""
    name = "tensor_parallel" if tensor_parallel else "device_map"
    if device_map is not None and tensor_parallel:
        raise BadSetting("device_map and tensor_parallel both say where weights are; give one of them")
    if isinstance(target, torch.nn.Module):
        raise BadSetting(f"{name} is for models that are loaded from files, and the target is an object already")
    if compile or quantize is not None or kv is not None:
        given = "compile" if compile else "quantize" if quantize is not None else "kv"
        raise BadSetting(f"{name} is for targets that transformers runs as they are; leave {given} out")
    if find_spec("accelerate") is None:
        raise MissingPackage(f"{name} needs accelerate: pip install accelerate")


def _check_before_spreading(target: Any, draft: Any, tokenizer: Any, quantize_draft: "Quantize | None") -> Any:
    """Return the tokenizer; raise what `load` raises otherwise only when all processes have loaded their weights.

    The other processes do as that of rank 0 says from then on, and would wait for it.
    """
    from transformers import AutoConfig

    name = _name_or_path(target)
    try:
        config: Any = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise MissingFile(f"could not load a language model from {target}: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise _has_encoder(f"the model in {target}")
    if isinstance(draft, Skipping) or (isinstance(draft, str) and (draft == "swift" or draft in OWN)):
        raise NotSupported(
            f"draft={draft!r} is the target run by specbeam itself, which cannot run one whose weights are spread; give a "
            "draft model of its own"
        )
    if draft is not None and not is_rounding(draft) and is_head(draft):
        if quantize_draft is not None:
            raise _not_for_heads()
    elif isinstance(draft, (str, Path)) and not is_rounding(draft):
        _name_or_path(draft)
    return _tokenizer(tokenizer if tokenizer is not None else target)


def _has_encoder(what: str) -> NotSupported:
    return NotSupported(
        f"device_map and tensor_parallel are for decoder-only models, and {what} has an encoder; leave them out"
    )


def _not_for_heads() -> BadSetting:
    return BadSetting("quantize_draft is for draft models, and the draft is a head; leave it out")


def _placed_lm(model: "PreTrainedModel", check: bool, share_from: ShareFrom) -> HuggingFaceLM:
    """Return the language model of a target whose layers are on several devices, which transformers has to run."""
    check_keeps_tokens(model)
    _use_a_backend_with_masks(model)
    model.eval()
    lm = HuggingFaceLM(model, engine="plain", share_from=share_from)
    if check:
        check_scores_forests(lm)
    return lm


def _check_draft_of_sources(model: "PreTrainedModel", draft: Any, share_from: ShareFrom) -> None:
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
    model: "PreTrainedModel", target: HuggingFaceLM, check: bool, quantize: "Quantize | None", kv: KeptAs = "float32"
) -> EncoderDecoderLM:
    """Return the language model of a draft that reads sources. Raises `NotSupported` if the target does not."""
    if not isinstance(target, EncoderDecoderLM):
        raise NotSupported(
            f"the draft is {type(model).__name__}, which reads sources, and the target is {target.model_name}, which "
            "continues prompts; both have to be of one kind"
        )
    encoder = encoder_for(model, target)
    if encoder is None and model is not target.model:
        own = language_model(model, check, quantize)
        assert isinstance(own, EncoderDecoderLM)
        if own.input_name != target.input_name:
            raise NotSupported(f"the draft reads {own.input_name}, and the target reads {target.input_name}")
        return own
    check_keeps_tokens(model)
    _use_a_backend_with_masks(model)
    model.eval()
    # It needs a cache of its own for each target.
    lm = EncoderDecoderLM(model, encoder=target.encoder, engine=quantize or "auto", kv=kv)
    if check and model is not target.model:
        check_scores_forests(lm)
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


def _own(quantize: "Quantize | None") -> Any:
    """Return how an engine of our own rounds a model, None if none does: what a library rounds was loaded so."""
    return quantize if quantize in OWN else None


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


def first_tokens(tokenizer: "PreTrainedTokenizerBase | None", vocab: int) -> list[int]:
    """Return the tokens that a text begins with on which a head is tried."""
    tokens = [] if tokenizer is None else list(tokenizer("A dog is running.")["input_ids"])
    return tokens[:8] if len(tokens) > 1 else [min(3, vocab - 1), min(4, vocab - 1)]


def language_model(
    model: "PreTrainedModel",
    check: bool = True,
    quantize: "Quantize | None" = None,
    compile: bool = False,
    share_from: ShareFrom = "auto",
    kv: KeptAs = "float32",
) -> HuggingFaceLM:
    """Return the language model that scores forests with a model object.

    There is one per model object, cached on it and checked once. A new one is made if the model has changed since, or if
    `quantize`, `compile`, `share_from` or `kv` differ. The arguments are those of `load`, but no library can round a model
    object.
    """
    _check_options(quantize, share_from)
    if quantize in BY_LIBRARY:
        raise _cannot_round(quantize)
    options = (quantize, compile, share_from, kv)
    with _ONE_AT_A_TIME:
        return _cached_language_model(model, check, options)


def _cached_language_model(model: "PreTrainedModel", check: bool, options: tuple[Any, ...]) -> HuggingFaceLM:
    quantize, compile, share_from, kv = options
    cached = vars(model).get("_specbeam")
    if cached is None or cached.state != (_fingerprint(model), options):
        check_keeps_tokens(model)
        _use_a_backend_with_masks(model)
        model.eval()
        lm: HuggingFaceLM
        if reads_sources(model):
            if compile:
                raise _not_compiled(model)
            lm = EncoderDecoderLM(model, engine=quantize or "auto", kv=kv)
        else:
            lm = HuggingFaceLM(model, engine=quantize or "auto", share_from=share_from, kv=kv)
        if compile and lm.engine == "plain":
            lm = HuggingFaceLM(model, engine="torch", share_from=share_from)
        if check:
            check_scores_forests(lm)
        # The fingerprint is taken again, because an engine may have changed the layout of the weights.
        cached = _CachedLM((_fingerprint(model), options), lm)
        object.__setattr__(model, "_specbeam", cached)
        mapped_files(model).release(model.parameters())
    assert cached.lm is not None
    return cached.lm


def _not_compiled(model: "PreTrainedModel") -> NotSupported:
    return NotSupported(
        f"compile=True is for decoder-only models, and {type(model).__name__} has an encoder; leave it out"
    )


def _check_options(quantize: Any, share_from: Any, name: str = "quantize") -> None:
    """Raise `BadSetting` if one of these options of `load` is wrong."""
    check_rounding(quantize, name)
    is_count = isinstance(share_from, int) and is_integer(share_from) and share_from >= 1
    if share_from not in (None, "auto") and not is_count:
        raise BadSetting(f"share_from is {share_from!r}; it must be a number of tokens of at least 1, 'auto' or None")


class _CachedLM:
    """The language model of a model object, stored on the object so that both are freed together.

    A copy of the model object starts without it.
    """

    def __init__(self, state: Any = None, lm: HuggingFaceLM | None = None) -> None:
        self.state = state  # fingerprint and options that `lm` was made for
        self.lm = lm

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _CachedLM, ()


def _fingerprint(model: "PreTrainedModel") -> Any:
    """Return a hash that changes if a model is moved, cast, trained, given other weights, hooked or patched."""
    weights = [
        (_place(weight), 0 if weight.is_inference() else weight._version, weight.dtype, weight.device)
        for weight in model.parameters()
    ]
    hooks = [
        len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in vars(module))
        for module in model.modules()
    ]
    return hash((tuple(weights), tuple(hooks), _sample(model)))


def _place(weight: torch.Tensor) -> int:
    """Return the address of a weight; of one that a library has rounded, which may have none, that of the object."""
    return weight.data_ptr() if type(weight) is torch.nn.Parameter else id(weight)


_SAMPLED = 64  # number of values of each weight that are sampled, or up to twice as many


@torch.no_grad()
def _sample(model: "PreTrainedModel") -> bytes:
    """Return the sums of some values of each weight on a CPU, as bytes.

    They detect changes through `.data`, as merged adapters make them, which do not increase the version of a tensor. Weights
    on a GPU are left out, because engines for GPUs keep no copy of the weights, and so are those that a library has rounded.
    """
    weights = [
        weight.reshape(-1)
        for weight in model.parameters()
        if type(weight) is torch.nn.Parameter and weight.device.type == "cpu" and weight.is_floating_point()
    ]
    files = mapped_files(model)
    sums = []
    for weight in weights:
        sums.append(weight[:: max(len(weight) // _SAMPLED, 1)].sum(dtype=torch.float64))
        files.release([weight])
    return torch.stack(sums).numpy().tobytes() if sums else b""


def check_scores_forests(lm: HuggingFaceLM) -> None:
    """Raise an error unless the logits of a small token tree equal those of plain forwards on its paths.

    The largest difference may be 1e-3 of the standard deviation of the logits in float32; 0.3 of it in other types, and
    where numbers are rounded: sums over a tree have another order than those over a path, so that a number between two
    steps may go to the other one.

    Raises:
        UnsupportedModel: the model cannot score the tree, or scores it wrong.
        NotSupported: torch could not compile the model.
    """
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, lm.vocab, 5).tolist()
    tokens = rng.integers(0, lm.vocab, 6).tolist()
    source = None
    if isinstance(lm, EncoderDecoderLM):
        source = lm.made_up_source()
        prompt = _without_padding(prompt, lm)
        tokens = _without_padding(tokens, lm)
    forest = Forest.rooted([prompt[-1]]).grown(tokens, [0, 0, 1, 2, 2, 4])
    owner: Any = SimpleNamespace(
        prompt=prompt, state={}, context={lm: source} if source else {}
    )  # in place of a session
    name = type(lm.model).__name__
    widened = (
        is_kept(lm.model) and lm.engine in COMPILED and source is None
    )  # the engine computes in float32, whatever the weights are in
    try:
        found = lm.extend([owner], [forest])[0].logits.float().clone()
        lm.close(owner)  # so that no path needs another row of the store
        plain = _logits_of_nodes(lm, prompt, forest, source, widened)
    except SpecbeamError:
        raise
    except Exception as error:
        if lm.engine == "torch":
            raise NotSupported(
                f"torch could not compile {name}: {type(error).__name__}: {error}. Leave compile out"
            ) from error
        raise UnsupportedModel(
            f"{name} could not score a token tree: {type(error).__name__}: {error}. It must take a 4-dimensional "
            "attention mask, position_ids and a transformers Cache"
        ) from error
    finally:
        lm.close(owner)
    expected = torch.stack(plain).float().to(found.device)
    spread = expected.std().clamp_min(1e-6)
    error_in_spreads = float((found - expected).abs().max() / spread)
    is_in_float32 = widened or lm.model.dtype == torch.float32
    limit = 1e-3 if is_in_float32 and not _rounds(lm) else 0.3
    if not error_in_spreads <= limit:
        raise UnsupportedModel(
            f"{name} does not honour masks and positions: on a token tree its logits are off by {error_in_spreads:.2g} of "
            "their spread; specbeam needs a decoder whose attention takes both from the caller"
        )
    if isinstance(lm, EncoderDecoderLM):
        _check_encoder(lm, 1e-3 if is_in_float32 else 0.3)


def _check_encoder(lm: EncoderDecoderLM, limit: float) -> None:
    """Raise `UnsupportedModel` unless what a compiled encoder makes of a source is what transformers' does, up to `limit`.

    One whose matrices are rounded is another encoder, and is not compared.
    """
    encoder = lm.encoder
    if not isinstance(encoder, CompiledEncoder) or encoder.kind.startswith("int"):
        return
    error = encoder.error_on(_checked_inputs(lm, encoder))
    if not error <= limit:
        raise UnsupportedModel(
            f"the encoder of {type(lm.model).__name__} is not that of its family: what it makes of a source is off by "
            f"{error:.2g} of its spread; SPECBEAM_KERNELS=off lets transformers run the model"
        )


def _checked_inputs(lm: EncoderDecoderLM, encoder: CompiledEncoder) -> np.ndarray:
    """Return what a compiled encoder is tried on: tokens, or features of a short window."""
    rng = np.random.default_rng(0)
    if isinstance(encoder, TextEncoder):
        tokens = rng.integers(0, min(lm.vocab, len(encoder.embedding)), CHECKED_SOURCE).tolist()
        return np.array(_without_padding(tokens, lm))
    assert isinstance(encoder, AudioEncoder)
    channels, frames = encoder.shape
    return rng.standard_normal((channels, min(2 * CHECKED_SOURCE, frames)), dtype=np.float32)


def _without_padding(tokens: list[int], lm: EncoderDecoderLM) -> list[int]:
    """Return the tokens with another one in place of padding, after which some decoders count positions in other ways."""
    padding = lm.model.config.pad_token_id
    return [(token + 1) % lm.vocab if token == padding else token for token in tokens]


def _logits_of_nodes(
    lm: HuggingFaceLM, prompt: list[int], forest: Forest, source: Source | None, widened: bool
) -> list[torch.Tensor]:
    """Return the logits of each node of a tree, float[vocab], without a tree; see `_plain_logits`.

    Where a pass reads much or takes long, one goes over each leaf's path for all nodes on it.

    Args:
        widened: whether the model object is kept as its files are, and called in float32.
    """
    if source is not None or not (widened or _rounds(lm)):
        return [_plain_logits(lm, prompt + forest.path(node), source) for node in range(forest.size)]
    leaves = sorted(set(range(forest.size)) - set(forest.parents.tolist()))
    paths = [forest.path(leaf) for leaf in leaves]
    along = [_own_logits(lm, prompt, path) for path in paths] if _rounds(lm) else _kept_logits(lm, prompt, paths)
    found = []
    for node in range(forest.size):
        path = forest.path(node)
        rows = next(rows for rows, whole in zip(along, paths, strict=True) if whole[: len(path)] == path)
        found.append(rows[len(path)])
    if _rounds(lm):  # one as a prompt of its own, which has nothing in common with the tree
        found[leaves[-1]] = _plain_logits(lm, prompt + paths[-1])
    return found


@torch.inference_mode()
def _plain_logits(lm: HuggingFaceLM, path: list[int], source: Source | None = None) -> torch.Tensor:
    """Return the logits after a path, float[vocab], without a tree.

    They are those of the model object itself; with weights, or keys and values, that the engine rounds those of `lm`, as
    that is another model.
    """
    if source is not None and not _rounds(lm):
        assert isinstance(lm, EncoderDecoderLM)
        return lm.plain_logits(source, path)
    if not _rounds(lm):
        return lm.model(input_ids=torch.tensor([path], device=lm.device)).logits[0, -1]
    context = {lm: source} if source is not None else {}
    owner: Any = SimpleNamespace(prompt=path, state={}, context=context)  # of the cache, in place of a session
    try:
        return lm.extend([owner], [Forest.rooted([path[-1]])])[0].logits[0].clone()
    finally:
        lm.close(owner)


def _own_logits(lm: HuggingFaceLM, prompt: list[int], path: list[int]) -> torch.Tensor:
    """Return the logits of the engine itself after a prompt and after each token of a path, float[1 + path, vocab]."""
    owner: Any = SimpleNamespace(prompt=prompt, state={}, context={})  # of the cache, in place of a session
    try:
        forest = Forest.rooted([prompt[-1]]).grown(path, range(len(path)))
        return lm.extend([owner], [forest])[0].logits.clone()
    finally:
        lm.close(owner)


def _rounds(lm: HuggingFaceLM) -> bool:
    """Return whether the engine of a language model rounds what the model object does not."""
    return lm.engine in OWN or lm.kv != "float32"


@torch.inference_mode()
def _kept_logits(lm: HuggingFaceLM, prompt: list[int], paths: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits after a prompt and after each token of each path, of a model that is kept as its files are.

    The model object is called once, in float32 as the engine computes, so that its files are read once.
    """
    longest = max(len(path) for path in paths)
    rows = [prompt + path + [prompt[-1]] * (longest - len(path)) for path in paths]  # no row looks at what follows it
    with as_loaded(lm.model):
        logits = lm.model(input_ids=torch.tensor(rows, device=lm.device), use_cache=False).logits
    return list(logits[:, len(prompt) - 1 :])


def _device(name: str | torch.device | None) -> torch.device:
    """Return the device of that name; None: the GPU if there is one, or else the CPU.

    Raises `BadSetting` if torch does not know the name, or if there is no such GPU.
    """
    gpus = torch.cuda.device_count()
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError as error:
        raise BadSetting(
            f"device is {name!r}; it must be 'cpu', 'cuda', 'cuda:1' or another device of torch"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= gpus:
        gpus_here = f"has {gpus} GPUs" if gpus else "has no GPU that it can use"
        raise BadSetting(
            f"device is {str(name)!r}, and torch {torch.__version__} {gpus_here} here; leave it out, or say 'cpu'"
        )
    return device


def load_model(
    name: str, dtype: "str | torch.dtype" = "auto", device: str | torch.device | None = None
) -> "PreTrainedModel":
    """Return the model at a path or hub id, loaded as `load` loads it; see there for the arguments and errors."""
    return _model(name, dtype, _device(device))


def _model(
    source: Any,
    dtype: "str | torch.dtype",
    device: torch.device,
    quantize: "Quantize | None" = None,
    may_keep: bool = False,
    device_map: Any = None,
) -> "PreTrainedModel":
    """Return a model object as it is, or load the model at a path or hub id; see `load`.

    Args:
        may_keep: whether a large model on a CPU may stay in the type of its files (lm/kept.py), for the compiled forward.
    """
    by_library = quantize if quantize in BY_LIBRARY else None
    if isinstance(source, torch.nn.Module):
        if by_library is not None and vars(source).get("_specbeam_rounding") != by_library:
            raise _cannot_round(by_library)
        return source
    from transformers import AutoConfig

    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise BadSetting(f"dtype is {dtype!r}; it must be 'auto' or a type of torch, like 'float32' or 'bfloat16'")
    name = _name_or_path(source)
    unread = ""
    try:
        config = AutoConfig.from_pretrained(name)
        is_stored_rounded = getattr(config, "quantization_config", None) is not None
        wanted = dtype
        kept = None
        if dtype == "auto" and device.type == "cpu":
            if may_keep and by_library is None and not is_stored_rounded:
                with _ONE_AT_A_TIME:  # it makes a model without weights
                    kept = kept_type(name, config, _class_for(config))
            dtype = kept or torch.float32
        if by_library is not None and is_stored_rounded:
            raise BadSetting(f"the weights of {source} are rounded in its files already; leave {by_library!r} out")
        options: dict[str, Any] = {}
        if by_library is not None:
            options["quantization_config"] = library_config(by_library, dtype)
        if by_library is not None or is_stored_rounded:
            options["device_map"] = {"": device}  # such models are made on their device, and stay there
        if device_map is not None:
            options["device_map"] = device_map
        if is_stored_rounded and device_map is None:
            with _ONE_AT_A_TIME:
                read = _read_here(name, config, wanted, device)
            if not isinstance(read, str):
                return read
            unread = f" ({read})"
        with _ONE_AT_A_TIME:
            model = _class_for(config).from_pretrained(name, dtype=dtype, **options)
    except (OSError, ValueError) as error:
        if isinstance(error, SpecbeamError):
            raise
        raise MissingFile(f"could not load a language model from {source}: {error}{unread}") from error
    except (ImportError, RuntimeError, NotImplementedError) as error:
        if by_library is None and not is_stored_rounded:
            raise
        how = repr(by_library) if by_library is not None else "the rounded weights of its files"
        raise NotSupported(f"{source} could not be loaded with {how} on {device}: {error}{unread}") from error
    if by_library is not None:
        object.__setattr__(model, "_specbeam_rounding", by_library)
    if kept is not None:
        mark_kept(model)
    return model if options else model.to(device)


def _read_here(name: str, config: Any, dtype: "str | torch.dtype", device: torch.device) -> "PreTrainedModel | str":
    """Return a model whose files hold rounded weights, or the reason why a library has to read them.

    Raises `NotSupported` if transformers knows no library for them either: it would make weights up.
    """
    read: PreTrainedModel | str = "specbeam itself reads rounded weights on a CPU alone"
    if device.type == "cpu" and not getattr(config, "is_encoder_decoder", False):
        read = read_rounded(name, config, dtype)
    if isinstance(read, str) and (method := unknown_method(config)):
        raise NotSupported(
            f"{name} holds weights that were rounded by {method!r}, which transformers does not know; {read}"
        )
    return read


def _class_for(config: Any) -> Any:
    """Return the class of transformers that loads a model of this kind: causal, encoder-decoder, or one that hears."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

    if not getattr(config, "is_encoder_decoder", False):
        return AutoModelForCausalLM
    hears = config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    return AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM


def _cannot_round(quantize: str) -> BadSetting:
    return BadSetting(
        f"{quantize!r} rounds weights while transformers loads them from files, and the model is an object already; give "
        "its folder or hub id, or 'int8', 'int4' or 'fp8'"
    )


def _name_or_path(source: "str | Path") -> str:
    """Return what transformers loads from: a hub id as it is, or the path of a folder that holds a model.

    Raises `MissingFile` if there is no such folder, or if it has no config.json.
    """
    path = Path(source).expanduser()
    looks_local = isinstance(source, Path) or path.is_absolute() or str(source).startswith((".", "~"))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise MissingFile(f"{path} has no config.json; give the folder that save_pretrained wrote")
        return str(path)
    if looks_local:
        raise MissingFile(f"there is no folder {path}; give a folder that save_pretrained wrote, or a hub id")
    return str(source)


def _tokenizer(source: Any) -> "PreTrainedTokenizerBase | None":
    """Return a tokenizer object as it is, or load the tokenizer at a path or hub id, or of a model object.

    Returns None if a model object does not name a folder with a tokenizer. Raises `MissingFile` if loading fails,
    `MissingPackage` if it does as a package is missing.
    """
    if isinstance(source, (str, Path)):
        from transformers import AutoTokenizer

        name = _name_or_path(source)
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, ImportError) as error:
            _check_reads_pieces(name, error)
            raise MissingFile(
                f"could not load a tokenizer from {source}: {_beginning(error)}; give load(tokenizer=...)"
            ) from error
    if isinstance(source, torch.nn.Module):
        folder = getattr(source, "name_or_path", "")
        has_tokenizer = folder and (Path(folder) / "tokenizer_config.json").is_file()
        return _tokenizer(folder) if has_tokenizer else None
    return source


def _check_reads_pieces(name: str, error: Exception) -> None:
    """Raise `MissingPackage` if a tokenizer is a SentencePiece model alone and no package reads it.

    Transformers then says what else it tried, not what is missing.

    Args:
        name: path or hub id of the tokenizer.
        error: what transformers raised.
    """
    from transformers.utils import cached_file

    def has(file: str) -> bool:
        try:
            found = cached_file(name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        except OSError:  # the hub's cache has nothing of this name
            return False
        return found is not None

    missing = [package for package, module in _READ_PIECES.items() if not _is_there(module)]
    if not missing or has("tokenizer.json"):
        return
    file = next(filter(has, _PIECES), None)
    if file is not None:
        raise MissingPackage(
            f"the tokenizer of {name} is a SentencePiece model ({file}), which {' and '.join(missing)} must read: "
            f"pip install {' '.join(_READ_PIECES)}; transformers says: {_beginning(error)}"
        ) from error


def _beginning(error: Exception) -> str:
    """Return what an error says, at most 300 letters of it: transformers lists all models that it knows."""
    said = str(error)
    return said if len(said) <= 300 else f"{said[:300]} ..."


def _is_there(module: str) -> bool:
    """Return whether a module can be imported, which may be inside of a package."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _check_same_vocabulary(
    target: "PreTrainedModel", draft: "PreTrainedModel", tokenizer: Any, draft_source: Any
) -> None:
    """Raise `VocabularyMismatch` if the models have different numbers of tokens, or the draft's tokenizer differs.

    Args:
        tokenizer: the target's tokenizer, or None.
        draft_source: the draft as it was given to `load`; its tokenizer is compared if this is a local folder with one.
    """
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise VocabularyMismatch(
            f"draft has {sizes[1]} tokens, target has {sizes[0]}; choose a draft of the same family, trained with the "
            "same tokenizer"
        )
    if tokenizer is None or not isinstance(draft_source, (str, Path)):
        return
    if not (Path(draft_source) / "tokenizer_config.json").is_file():
        return
    draft_tokenizer = _tokenizer(draft_source)
    draft_vocab = draft_tokenizer.get_vocab() if draft_tokenizer is not None else {}
    target_vocab = tokenizer.get_vocab()
    if draft_vocab != target_vocab:
        difference = next(iter({*draft_vocab.items()} ^ {*target_vocab.items()}))
        raise VocabularyMismatch(
            f"draft and target both have {sizes[0]} tokens but not the same ones (first difference: {difference[0]!r}); "
            "choose a draft trained with the target's tokenizer"
        )


def _use_a_backend_with_masks(model: "PreTrainedModel") -> None:
    """Switch the model to SDPA unless its attention takes a mask per node, which token trees need.

    SDPA and eager attention take one; flash and flex kernels do not.
    """
    if model.config._attn_implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa")
