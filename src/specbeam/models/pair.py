"""`load`, and the pair of target and draft model with their tokenizer that it returns."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

import torch

from specbeam.core.arguments import refusing_unknown
from specbeam.core.errors import BadSetting, NotSupported, warn
from specbeam.core.garbage import rarely_collected
from specbeam.core.lm import LM
from specbeam.doors.progress import show_compilation
from specbeam.engines.choices import Quantize, check_is_model, check_kv, check_what_runs
from specbeam.engines.cpu.cache_words import KVType
from specbeam.engines.eligibility import reads_sources
from specbeam.models.chains.lm import ChainLM
from specbeam.models.chains.loading import check_served_options, served_models
from specbeam.models.chains.targets import opened_target
from specbeam.models.checkpoints.folders import BUNDLED as BUNDLED
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.engines import MAPPING, advice_for_plain
from specbeam.models.huggingface import HuggingFaceLM, vocab_of
from specbeam.models.loading.drafts import (
    DraftOptions,
    check_draft_of_sources,
    check_draft_options,
    draft_of,
    given_draft,
    with_fewer_drafted,
)
from specbeam.models.loading.further import FurtherDrafts
from specbeam.models.loading.known_folders import is_model_folder, model_at_hand, remember_model, tokenizer_at_hand
from specbeam.models.loading.language_models import (
    ShareFrom,
    by_engine,
    check_options,
    language_model,
    placed_language_model,
)
from specbeam.models.loading.models import bundled_folder, device_of, model_of, name_or_path
from specbeam.models.loading.own import is_own, own_draft
from specbeam.models.loading.spread import check_before_spreading, check_spread, has_encoder
from specbeam.models.loading.tokenizers import ends_of, read_tokenizer
from specbeam.models.loading.vocabularies import tokens_in_common
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.quantised import rounding_of
from specbeam.models.skipping import Skipping
from specbeam.models.spread import end_together, spread_model
from specbeam.models.stand_ins import at_hand, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadedWhenRead:
    """A field of a pair: reading it loads the object of transformers, if the pair has a stand-in for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, pair: "Pair | None", owner: type) -> Any:
        return self if pair is None else whole(vars(pair)[self.name])

    def __set__(self, pair: "Pair", value: Any) -> None:
        vars(pair)[self.name] = value


@dataclass(frozen=True, eq=False)
class Pair:
    """A target model, an optional draft model, and their tokenizer.

    They are objects of transformers. `load` may have left one in its files until it is read here: see `known_folders.py`.
    """

    target_model: "PreTrainedModel | Any"  # None for a language model of one's own
    draft_model: "PreTrainedModel | None"
    tokenizer: "PreTrainedTokenizerBase | None"
    target: HuggingFaceLM | MemoryLM | ChainLM | Any = field(
        repr=False
    )  # scores forests with `target_model`; with memory see `hmt`
    draft: LM | None = field(repr=False)  # scores forests with `draft_model` or a head

    def __repr__(self) -> str:
        draft = "no draft" if self.draft is None else f"the draft {_said(self.draft)}"
        return f"<Pair of the target {_said(self.target)} and {draft}>"

    def close(self) -> None:
        """Free the engine of a target that another program runs, if `load` made it; it decodes no more.

        This happens by itself when the pair is dropped, or at the end of a `with`. Other models are freed with their last
        reference.
        """
        if isinstance(self.target, ChainLM):
            self.target.release()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def eos(self) -> tuple[int, ...]:
        """The end tokens from the target's generation config, or else from the tokenizer."""
        return ends_of(self.known("target_model"), self.known("tokenizer"))

    def known(self, name: Literal["target_model", "draft_model", "tokenizer"]) -> Any:
        """Return an object of the pair if it has been loaded, otherwise its stand-in."""
        return at_hand(vars(self)[name])

    @property
    def generation_config(self) -> Any:
        """The target's own generation config; None if it has none."""
        return getattr(self.known("target_model"), "generation_config", None)

    @property
    def forgetful_target(self) -> HuggingFaceLM:
        """The target, for code that calls its model directly.

        Raises `NotSupported` for a target with memory or an encoder, or one that another program runs.
        """
        if isinstance(self.target, ChainLM):
            raise NotSupported(
                f"{self.target.model_name} runs the target, and this operation needs the model itself: load its files"
            )
        if isinstance(self.target, MemoryLM):
            raise NotSupported(
                "the target of this pair has a memory (sb.hmt), and this operation needs the plain model; give the pair "
                "that sb.load returned"
            )
        if isinstance(self.target, EncoderDecoderLM):
            raise NotSupported(
                f"{self.target.model_name} is an encoder-decoder model, and this operation needs a decoder-only model"
            )
        return self.target

    def word(self, token: int) -> str:
        """Return the text of one token; without a tokenizer, its id."""
        tokenizer = self.known("tokenizer")
        return str(token) if tokenizer is None else str(tokenizer.decode([token]))

    def room(self, prompt_tokens: int, further: Sequence[LM] = ()) -> int | None:
        """Return the number of new tokens for which target and draft have positions; None if there is no limit.

        Args:
            further: other draft models.
        """
        models = [lm for lm in (self.target, self.draft, *further) if lm is not None]
        limits = [lm.max_positions for lm in models if lm.max_positions is not None]
        return min(limits) - prompt_tokens if limits else None


for _name in ("target_model", "draft_model", "tokenizer"):
    setattr(Pair, _name, LoadedWhenRead(_name))


def as_pair(pair: Any, prompts: Any = None) -> Pair:
    """Return a pair unchanged, or load the pair of a name or path.

    Raises `BadSetting` for anything else, such as a model: each call would check and prepare it again.

    Args:
        prompts: the argument after the pair.
    """
    if isinstance(prompts, Pair):
        raise BadSetting("the pair is given as prompt; give the pair first, such as sb.generate(pair, prompts)")
    if isinstance(pair, Pair):
        return pair
    if isinstance(pair, (str, Path)):
        return load(pair)
    raise BadSetting(
        f"pair is of type {type(pair).__name__}; give the pair that sb.load returned, such as pair = sb.load(model), or a "
        "name or path for sb.load"
    )


def _said(lm: Any) -> str:
    """Return the class, the size and the engine of a model, as far as they are known."""
    if isinstance(lm, ChainLM):
        return lm.model_name
    if not isinstance(lm, HuggingFaceLM):
        return type(lm.model).__name__ if hasattr(lm, "model") else type(lm).__name__
    facts = [f"{lm.weights / 1e6:,.1f} M weights", rounding_of(lm), f"engine {lm.engine!r}"]
    return f"{lm.model_name} ({', '.join(filter(None, facts))})"


def _check_kind(name: str, source: object, kinds: tuple[type, ...]) -> None:
    """Raise `BadSetting` if an argument of `load` is neither a name nor an object of these kinds."""
    if not isinstance(source, kinds):
        what = "a tokenizer" if name == "tokenizer" else "a model"
        raise BadSetting(
            f"{name} is {reprlib.repr(source)} of type {type(source).__name__}; give a path, a hub id, 'bundled' or {what} "
            "of transformers"
        )


# Arguments of `load` by their names in transformers and vLLM.
_ELSEWHERE = {
    "model": "target",
    "assistant_model": "draft",
    "draft_model": "draft",
    "torch_dtype": "dtype",
    "quantization": "quantize",
    "quantization_config": "quantize",
    "load_in_8bit": "quantize",
    "load_in_4bit": "quantize",
}


@refusing_unknown("option", _ELSEWHERE, rarely_collected)
def load(
    target: "str | Path | PreTrainedModel | LM",
    draft: "str | Path | PreTrainedModel | Skipping | LM | None" = None,
    tokenizer: "str | Path | PreTrainedTokenizerBase | Literal[False] | None" = None,
    dtype: "str | torch.dtype" = "auto",
    device: str | torch.device | None = None,
    check: bool = True,
    quantize: "Quantize | None" = None,
    quantize_draft: "Quantize | None" = None,
    draft_vocab: int | None = None,
    compile: bool = False,
    share_from: ShareFrom = "auto",
    probe: bool = True,
    device_map: Any = None,
    tensor_parallel: bool = False,
    kv: KVType | None = None,
    engine: Literal["auto", "gpu", "compiled", "layers", "plain"] = "auto",
    compute: Literal["bfloat16"] | None = None,
) -> Pair:
    """Load a target model, and optionally a draft model, with their tokenizer.

    Args:
        target: a path, a hub id, a model object, or "bundled" (the pair that comes with specbeam, draft included). Either a
            causal language model, or an encoder-decoder model for translation, summarisation or speech, whose prompts are
            sources. A path may be a GGUF file, or a folder with one (docs/quantised.md); or an adapter of peft, which is
            merged into its base model (docs/models.md).
            "vllm:MODEL" and engine objects of vLLM are run by vLLM, and "openai:URL" by a server that lists
            log-probabilities of token ids (docs/on_vllm.md); their drafts are models, or made without a model.
            Or a language model of your own, an `LM` (docs/write_a_method.md), whose draft is one, too, or None.
        draft: None for methods without a draft model; otherwise one of:
            - a model, given like the target. Its tokens must be the target's; it may have a padded vocabulary, and tokens
              of only one of both models are never drafted (docs/models.md).
            - a draft head for the target (docs/heads.md lists the kinds).
            - "mtp": the modules for multi-token prediction in the target's own files. (A folder of this name is "./mtp".)
            - "swift" or a `Skipping`: the target without some sublayers (docs/methods/swift.md; a folder is "./swift").
            - a value of `quantize`: the target with rounded weights and its own cache.
            - for an encoder-decoder target: another encoder-decoder model, which shares the target's encoder if both
              encoders have equal weights; a decoder without an encoder (`WhisperForCausalLM`); or a causal language model,
              which does not see the source.
        tokenizer: a path, a hub id, "bundled" or an object; None: the target's tokenizer; False: none, for token ids.
        dtype: "auto" is the checkpoint's type on a GPU. On a CPU, arithmetic is in float32, and so are the weights of models
            of up to 300 M parameters. If the compiled forward runs a larger model, its weights stay in memory-mapped files,
            and only the engine's copy takes memory: as much as the files (less if rounded), and about 200 MB more while it
            is made (plus a copy of each matrix that is stored head by head). The files are read while the model is in use:
            write new weights to another folder, or rename them into place. Called directly, such a model object computes
            in the type of its files. Ignored for model objects.
        device: "cpu", "cuda", ...; None: a GPU if there is one. Ignored for model objects.
        quantize: "int8" and "int4" round the target's weights to 8 or 4 bits, and "fp8" rounds them to 8 bits on a GPU. This
            is faster but changes the model: the output has the law of the rounded model, and reports state it. For the
            families in docs/models.md.
            "torchao-int8", "torchao-int4", "bitsandbytes-int8" and "bitsandbytes-nf4" let these libraries round any model
            while transformers loads it from files. Files of rounded weights need no option; 4-bit GPTQ and AWQ files are
            read without their libraries on a CPU (docs/quantised.md).
        quantize_draft: the same for the draft, without effect on exact laws. None: the draft is not rounded.
            With a 4-bit target, also round the draft: in 16 bits it would read much memory for its size.
        draft_vocab: a draft model drafts only the tokens with ids below this number, without effect on exact laws, so
            that a pass reads less of its head. Other tokens are never drafted: of Qwen2.5's 151,936 the first 32,000 make
            up 97 % of English sentences and 77 % of German ones. None: all.
        check: compare the logits of a small token tree with those of plain forwards, once per model, and reject the model
            if they differ.
        compile: use torch.compile for models without a forward of specbeam's on a CPU. Compiling takes about five seconds
            for each of up to a dozen forms of a pass (one prompt or several, one token or several, ...). The code is cached
            on disk.
        share_from: texts decoded together whose prompts begin with at least this number of equal tokens, such as a system
            prompt, compute these tokens once. In the compiled engines for CPUs that changes no bit. None: never.
            "auto": 64.
        probe: try a draft head on 128 tokens that the target draws, with the conventions of its files and with those
            of other writers of heads, and use the convention that fits clearly best. A warning is given if this is not the
            convention of the files, or if none fits. It takes the time of these target passes.
        device_map: where transformers and accelerate put the layers of the target: a name such as "auto", or a dictionary
            from module names to devices, including "cpu" and "disk". transformers then runs the target; the draft is put
            on `device`.
        tensor_parallel: shard the target's weights over the processes that ``torchrun`` has started (docs/guides/scale.md).
            `load` returns only on rank 0; the other ranks follow rank 0 and end with it (`SystemExit`). The draft is loaded
            whole, on rank 0 only. `check` is skipped.
        kv: "bfloat16" stores the target's keys and values in bfloat16, including those of sources: half the memory for long
            texts. For the compiled forward on a CPU. The output has the law of the target with rounded keys and values, and
            reports state it. A draft that is the target with rounded weights stores them likewise. None: the engine's type,
            float32 on a CPU.
        engine: runs the target and a draft model (docs/models.md has the families of each). "gpu" and "compiled" are
            specbeam's forwards for GPUs and CPUs. "plain" is transformers' own forward, for any model, as captured graphs
            on a GPU. "layers" calls the layers of a Llama, Mistral or Qwen2 one by one, on any device, which is slow.
            "auto": the fastest of the first three that runs the model. Texts have the same law with each of them.
            `quantize`, `compute`, `compile`, `device_map` and `tensor_parallel` choose an engine themselves. A draft with
            rounded weights has the engine of its rounding.
        compute: "bfloat16" rounds each row to bfloat16 before its product with a matrix, for the compiled forward of models
            whose weights are bfloat16 numbers; attention, norms, sums and encoders stay in float32. On processors with the
            instructions for it (AVX512_BF16), many rows take half the time. The output has the law of the model with these
            products, and reports state it; a text still does not depend on its batch. A draft model whose weights are
            bfloat16 numbers computes likewise. None: float32.

    Raises:
        BadSetting: an option is wrong or unknown.
        MissingFile: a model or tokenizer is missing, or the path holds something else.
        BadCheckpoint: a model's files are broken, lack tensors, do not fit the configuration, or hold weights that are not
            finite.
        BadHead: a draft head cannot be read, or does not fit the target.
        UnsupportedModel: a model cannot score a token tree, or does not generate text.
        BrokenLaw: a model's logits are NaN or infinite.
        VocabularyMismatch: draft and target have different tokens at the same ids.
        ServerGone, ServerRefused: the server of "openai:URL" does not answer, or refuses.
        MissingPackage: vLLM is not installed.
        NotSupported: a package is missing, `engine` cannot run the model, the model cannot be rounded in this way, or its
            files hold weights that were rounded in a way that cannot be read.
    """
    show_compilation()
    how_it_runs = {
        "quantize": quantize,
        "compile": compile,
        "device_map": device_map is not None,
        "tensor_parallel": tensor_parallel,
        "kv": kv,
        "engine": engine,
        "compute": compute,
    }
    of_draft = {"quantize_draft": quantize_draft, "draft_vocab": draft_vocab}
    if is_own(target):
        of_files = {"dtype": dtype, "device": device, "share_from": share_from}
        own = own_draft(draft, how_it_runs | of_draft | of_files)
        return Pair(None, None, read_tokenizer(tokenizer) if tokenizer else None, target, own)
    if isinstance(target, str) and target == "bundled":
        draft = draft or "bundled"
    target = bundled_folder(target, "target")
    draft = bundled_folder(draft, "draft")
    tokenizer = bundled_folder(tokenizer, "target")
    torch_device = device_of(device)
    check_options(quantize, share_from)
    check_options(quantize_draft, share_from, "quantize_draft")
    check_is_model(draft)
    _check_kind("draft", draft, (str, Path, torch.nn.Module, Skipping, NoneType))
    check_draft_options(draft, quantize_draft, draft_vocab)
    if tokenizer is not None and tokenizer is not False and not callable(tokenizer):
        _check_kind("tokenizer", tokenizer, (str, Path))
    check_kv(kv)
    check_what_runs(engine, compute, quantize, compile, device_map, tensor_parallel)
    run_by: str = compute or engine
    rounded_kv: KVType = kv or "float32"
    is_spread = device_map is not None or tensor_parallel
    others = (quantize, quantize_draft, draft_vocab, kv, compute)
    takes_defaults = not is_spread and not compile and all(one is None for one in others)
    has_usual_draft = draft is None or is_model_folder(draft)
    is_usual = takes_defaults and has_usual_draft and engine in ("auto", "compiled")
    opened = opened_target(target, dtype, tokenizer)
    if opened is not None:
        check_served_options(how_it_runs)
        options_of_draft = DraftOptions(check, False, share_from, probe)
        draft_dtype = "auto" if isinstance(target, str) else dtype
        return Pair(*served_models(opened, draft, tokenizer, draft_dtype, torch_device, options_of_draft, **of_draft))
    _check_kind("target", target, (str, Path, torch.nn.Module))
    if is_spread:
        check_spread(target, quantize, compile, device_map, tensor_parallel, kv)
    if tensor_parallel:
        tokenizer = check_before_spreading(target, draft, tokenizer)
        target_model = spread_model(name_or_path(target), dtype, torch_device)
    else:
        may_map = device_map is None and engine in MAPPING
        if is_usual:
            target_model = model_at_hand(target, dtype, torch_device, may_map)
        else:
            target_model = model_of(target, dtype, torch_device, quantize, may_map, device_map)
    if reads_sources(target_model):
        check_draft_of_sources(target_model, draft, share_from)
        if is_spread:
            raise has_encoder(type(target_model).__name__)
    given = given_draft(draft, quantize_draft, quantize, target, target_model)
    draft_model = None
    if given.model is not None and is_usual:
        draft_model = model_at_hand(given.model, dtype, torch_device, engine in MAPPING)
    elif given.model is not None:
        draft_model = model_of(given.model, dtype, torch_device, given.quantize, may_map=engine in MAPPING)
    if tokenizer is None:
        tokenizer = target
    own_tokenizer = None
    if tokenizer is not False:
        own_tokenizer = tokenizer_at_hand(tokenizer) if is_usual else read_tokenizer(tokenizer)
    shared = None
    if draft_model is not None:
        shared = tokens_in_common(target_model, draft_model, own_tokenizer, target, given.model)
        shared = with_fewer_drafted(shared, draft_vocab, vocab_of(target_model))
    if tensor_parallel:
        target_lm = HuggingFaceLM(target_model, engine="parallel", share_from=share_from)
        end_together(target_lm.runner.channel)  # type: ignore[union-attr]
    elif device_map is not None:
        target_lm = placed_language_model(target_model, check, share_from)
    else:
        target_lm = language_model(
            target_model, check, by_engine(quantize), compile, share_from, rounded_kv, engine=run_by
        )
    further = FurtherDrafts(target_lm, own_tokenizer, target, dtype, torch_device, check, share_from, run_by)
    target_lm.further_draft = further
    options = DraftOptions(check, compile, share_from, probe, rounded_kv, run_by)
    draft_lm = draft_of(given, draft_model, target_lm, own_tokenizer, options, shared)
    models = [lm for lm in (target_lm, draft_lm) if isinstance(lm, HuggingFaceLM)]
    for lm in models if engine == "auto" else []:
        is_given = any(lm.given_model is one for one in (target, given.model))  # as an object
        has_type = isinstance(dtype, torch.dtype) or dtype != "auto"
        is_plain = lm.engine == "plain" and (is_given or has_type)
        advice = advice_for_plain(lm.model, lm.engine, is_given) if is_plain else ""
        if advice:
            warn(advice)
    if compile and "torch" not in {lm.engine for lm in models}:
        raise BadSetting(
            "compile=True is for models that transformers runs, and specbeam's own forward runs these models; leave it out"
        )
    if is_usual and check:
        remember_model(target, target_lm)
        remember_model(given.model, draft_lm)
    return Pair(target_model, draft_model, own_tokenizer, target_lm, draft_lm)
