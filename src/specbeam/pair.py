"""From names, paths or model objects to a pair that decodes: tokenizer, devices, types, checks."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from specbeam.core.forest import Forest
from specbeam.errors import (
    BadSetting,
    MissingFile,
    NotSupported,
    SpecbeamError,
    UnsupportedModel,
    VocabularyMismatch,
)
from specbeam.lm.huggingface import HuggingFaceLM, check_decoder_only

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Quantize = Literal["int8"]
BUNDLED = Path(__file__).parent / "bundled"


@dataclass(frozen=True, eq=False)
class Pair:
    """A target model, perhaps a draft model, and their tokenizer."""

    target_model: "PreTrainedModel"
    draft_model: "PreTrainedModel | None"
    tokenizer: "PreTrainedTokenizerBase | None"
    target: HuggingFaceLM = field(repr=False)
    draft: HuggingFaceLM | None = field(repr=False)

    @property
    def eos(self) -> tuple[int, ...]:
        """End tokens: those of the target's generation config, else the tokenizer's."""
        found = getattr(getattr(self.target_model, "generation_config", None), "eos_token_id", None)
        if found is None and self.tokenizer is not None:
            found = self.tokenizer.eos_token_id
        if found is None:
            return ()
        return (found,) if isinstance(found, int) else tuple(found)

    def word(self, token: int) -> str:
        """The text of one token; its number where there is no tokenizer."""
        return self.tokenizer.decode([token]) if self.tokenizer is not None else str(token)

    def room(self, prompt_tokens: int) -> int | None:
        """New tokens for which target and draft have positions; None if there is no limit."""
        models = [lm for lm in (self.target, self.draft) if lm is not None]
        limits = [lm.max_positions for lm in models if lm.max_positions is not None]
        return min(limits) - prompt_tokens if limits else None


def load(
    target: "str | Path | PreTrainedModel",
    draft: "str | Path | PreTrainedModel | None" = None,
    tokenizer: "str | Path | PreTrainedTokenizerBase | None" = None,
    dtype: "str | torch.dtype" = "auto",
    device: str | torch.device | None = None,
    check: bool = True,
    quantize: "Quantize | None" = None,
    quantize_draft: "Quantize | None" = None,
    compile: bool = False,
) -> Pair:
    """Load a pair.

    Args:
        target: a path, a hub id, a model object, or "bundled" (the pair that comes with specbeam, draft included).
        draft: likewise; None for methods that need none. It must have the target's vocabulary.
        tokenizer: a path, a hub id or an object; by default the target's.
        dtype: "auto" is float32 on a CPU and the checkpoint's own type elsewhere. Ignored for model objects.
        device: "cpu", "cuda", ...; by default a GPU if there is one. Ignored for model objects.
        quantize: "int8" rounds the target's weights to 8 bits: faster on a CPU, and another model, whose law is what is
            decoded; reports say so. For Llama, Mistral and Qwen2 in float32.
        quantize_draft: the same for the draft, which changes no law.
        check: compare a small token tree with plain forwards, once per model, and refuse a model that gets it wrong.
        compile: by torch.compile, what transformers would run on a CPU: models that specbeam has no forward of its own for.
            Takes some five seconds for each form of a pass (one prompt or several, one token or several, ...), of which a
            model has up to a dozen; kept on disk.

    Raises:
        BadSetting, MissingFile, UnsupportedModel, VocabularyMismatch.
    """
    if isinstance(target, str) and target == "bundled":
        target = BUNDLED / "target"
        draft = draft or BUNDLED / "draft"
    if isinstance(draft, str) and draft == "bundled":
        draft = BUNDLED / "draft"
    there = _device(device)
    target_model = _model(target, dtype, there)
    draft_model = None if draft is None else _model(draft, dtype, there)
    words = _tokenizer(tokenizer if tokenizer is not None else target)
    if draft_model is not None:
        _check_same_vocabulary(target_model, draft_model, words, draft)
    target_lm = language_model(target_model, check, quantize, compile)
    if draft_model is target_model:  # a model may draft for itself, but not out of the same cache
        engine = quantize_draft or ("torch" if target_lm.engine == "torch" else "auto")
        draft_lm: HuggingFaceLM | None = HuggingFaceLM(draft_model, engine=engine)
    else:
        draft_lm = None if draft_model is None else language_model(draft_model, check, quantize_draft, compile)
    if compile and "torch" not in {lm.engine for lm in (target_lm, draft_lm) if lm is not None}:
        raise BadSetting(
            "compile=True is for models that transformers runs, and specbeam runs these itself, by loops that are compiled "
            "already; leave it out"
        )
    return Pair(target_model, draft_model, words, target_lm, draft_lm)


def language_model(
    model: "PreTrainedModel", check: bool = True, quantize: "Quantize | None" = None, compile: bool = False
) -> HuggingFaceLM:
    """The scorer of a model object; one per model, checked once, and made anew when the model has changed since, or is to be
    quantised or compiled otherwise.
    """
    how = (quantize, compile)
    known = vars(model).get("_specbeam")
    state = (_state(model), how)
    if known is None or known.state != state:
        check_decoder_only(model)
        _use_a_backend_with_masks(model)
        model.eval()
        if quantize not in (None, "int8"):
            raise BadSetting(f"quantize is {quantize!r}; it must be 'int8' or None")
        lm = HuggingFaceLM(model, engine=quantize or "auto")
        if compile and lm.engine == "plain":
            lm = HuggingFaceLM(model, engine="torch")
        if check:
            check_scores_forests(lm)
        known = _Kept((_state(model), how), lm)  # an engine may have laid the weights out anew
        object.__setattr__(model, "_specbeam", known)
    assert known.lm is not None
    return known.lm


class _Kept:
    """A model's scorer, kept on the model so that both are freed together. Copies of the model start without one."""

    def __init__(self, state: Any = None, lm: HuggingFaceLM | None = None) -> None:
        self.state = state
        self.lm = lm

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Kept, ()


def _state(model: "PreTrainedModel") -> Any:
    """What changes when a model is moved, cast, trained on, given other weights, hooked or patched."""
    weights = [
        (one.data_ptr(), 0 if one.is_inference() else one._version, one.dtype, one.device) for one in model.parameters()
    ]
    hooks = [
        len(one._forward_hooks) + len(one._forward_pre_hooks) + ("forward" in vars(one)) for one in model.modules()
    ]
    return hash((tuple(weights), tuple(hooks), _sample(model)))


_LOOKS = 64  # numbers of each weight


@torch.no_grad()
def _sample(model: "PreTrainedModel") -> bytes:
    """Sums of some numbers of each weight: changes through `.data`, as merged adapters make them, count no version up. On a
    GPU nothing keeps a copy of the weights, so nothing has to be looked at.
    """
    weights = [one.reshape(-1) for one in model.parameters() if one.device.type == "cpu" and one.is_floating_point()]
    sums = [one[:: max(len(one) // _LOOKS, 1)].sum(dtype=torch.float64) for one in weights]
    return torch.stack(sums).numpy().tobytes() if sums else b""


def check_scores_forests(lm: HuggingFaceLM) -> None:
    """Raise `UnsupportedModel` unless logits on a small tree equal plain forwards on its paths."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, lm.vocab, 5).tolist()
    tokens = rng.integers(0, lm.vocab, 6).tolist()
    forest = Forest.rooted([prompt[-1]]).grown(tokens, [0, 0, 1, 2, 2, 4])
    seat: Any = SimpleNamespace(prompt=prompt, state={})
    name = type(lm.model).__name__
    try:
        found = lm.extend([seat], [forest])[0].logits.float()
        paths = [prompt + forest.path(node) for node in range(forest.size)]
        plain = [_alone(lm, path) for path in paths]
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
        lm.close(seat)
    expected = torch.stack(plain).float().to(found.device)
    spread = expected.std().clamp_min(1e-6)
    wrong = float((found - expected).abs().max() / spread)
    limit = 1e-3 if lm.model.dtype == torch.float32 else 0.3
    if not wrong <= limit:
        raise UnsupportedModel(
            f"{name} does not honour masks and positions: on a token tree its logits are off by {wrong:.2g} of their "
            "spread; specbeam needs a decoder whose attention takes both from the caller"
        )


@torch.inference_mode()
def _alone(lm: HuggingFaceLM, path: list[int]) -> torch.Tensor:
    """Logits behind a path without any tree: of the model itself, or of its quantised form, which is another model."""
    if lm.engine != "int8":
        return lm.model(input_ids=torch.tensor([path], device=lm.device)).logits[0, -1]
    seat: Any = SimpleNamespace(prompt=path, state={})
    try:
        return lm.extend([seat], [Forest.rooted([path[-1]])])[0].logits[0].clone()
    finally:
        lm.close(seat)


def _device(asked: str | torch.device | None) -> torch.device:
    gpus = torch.cuda.device_count()
    try:
        device = torch.device(asked or ("cuda" if gpus else "cpu"))
    except RuntimeError as error:
        raise BadSetting(
            f"device is {asked!r}; it must be 'cpu', 'cuda', 'cuda:1' or another one of torch's"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= gpus:
        has = f"has {gpus} GPUs" if gpus else "has no GPU that it can use"
        raise BadSetting(
            f"device is {str(asked)!r}, and torch {torch.__version__} {has} here; leave it out, or say 'cpu'"
        )
    return device


def _model(source: Any, dtype: "str | torch.dtype", device: torch.device) -> "PreTrainedModel":
    if isinstance(source, torch.nn.Module):
        return source
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise BadSetting(f"dtype is {dtype!r}; it must be 'auto' or a type of torch, like 'float32' or 'bfloat16'")
    name = _found(source)
    try:
        config = AutoConfig.from_pretrained(name)
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModel(
                f"{source} is an encoder-decoder model ({config.model_type}); specbeam decodes causal language models"
            )
        if dtype == "auto" and device.type == "cpu":
            dtype = torch.float32
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        if isinstance(error, SpecbeamError):
            raise
        raise MissingFile(f"could not load a causal language model from {source}: {error}") from error
    return model.to(device)


def _found(source: "str | Path") -> str:
    """A hub id as it is; a path only if it is a folder with a model in it."""
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
    """A tokenizer, or None where a bare model object names no place to find one."""
    if isinstance(source, (str, Path)):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(_found(source))
        except (OSError, ValueError) as error:
            raise MissingFile(f"could not load a tokenizer from {source}: {error}; give load(tokenizer=...)") from error
    if isinstance(source, torch.nn.Module):
        place = getattr(source, "name_or_path", "")
        named = place and (Path(place) / "tokenizer_config.json").is_file()
        return _tokenizer(place) if named else None
    return source


def _check_same_vocabulary(target: "PreTrainedModel", draft: "PreTrainedModel", words: Any, draft_source: Any) -> None:
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise VocabularyMismatch(
            f"draft has {sizes[1]} tokens, target has {sizes[0]}; choose a draft of the same family, trained with the "
            "same tokenizer"
        )
    if words is None or not isinstance(draft_source, (str, Path)):
        return
    if not (Path(draft_source) / "tokenizer_config.json").is_file():
        return
    own = _tokenizer(draft_source)
    theirs = own.get_vocab() if own is not None else {}
    ours = words.get_vocab()
    if theirs != ours:
        odd = next(iter({*theirs.items()} ^ {*ours.items()}))
        raise VocabularyMismatch(
            f"draft and target both have {sizes[0]} tokens but not the same ones (first difference: {odd[0]!r}); "
            "choose a draft trained with the target's tokenizer"
        )


def _use_a_backend_with_masks(model: "PreTrainedModel") -> None:
    """Token trees need a mask per node: SDPA and eager take one, flash and flex kernels do not."""
    if model.config._attn_implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa")
