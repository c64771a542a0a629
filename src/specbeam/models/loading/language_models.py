"""Language models of model objects: one cached per object, checked once."""

from typing import TYPE_CHECKING, Any, Literal

import torch

from specbeam.core.errors import BadSetting, NotSupported
from specbeam.doors.options.checks import is_integer
from specbeam.engines.choices import BY_LIBRARY, OWN_ROUNDINGS, Quantize, check_rounding
from specbeam.engines.cpu.cache_words import KVType
from specbeam.engines.eligibility import reads_sources
from specbeam.engines.mapped import mapped_files
from specbeam.engines.shared_tokens import SharedTokens
from specbeam.engines.torch.source_passes import make_causal
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.huggingface import HuggingFaceLM, prepare_to_score
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.models import ONE_AT_A_TIME, cannot_round
from specbeam.models.stand_ins import StandInModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ShareFrom = int | Literal["auto"] | None
_SAMPLED = 64  # minimum number of sampled values of each weight; at most twice as many


def language_model(
    model: "PreTrainedModel",
    check: bool = True,
    quantize: "Quantize | None" = None,
    compile: bool = False,
    share_from: ShareFrom = "auto",
    kv: KVType = "float32",
    shared: SharedTokens | None = None,
    role: str = "",
    engine: str = "auto",
) -> HuggingFaceLM:
    """Return the language model that scores forests with a model object.

    It is cached on the model object and checked once. A new one replaces it if the model has changed since, or if
    `quantize`, `compile`, `share_from`, `kv`, `shared` or `engine` differ. It takes the arguments of `load`, except that no
    library can round a model object.

    Args:
        shared: the tokens that a draft shares with a target of another vocabulary; None: the vocabularies are the same.
        role: prefix of the model's name in errors.
    """
    check_options(quantize, share_from)
    if quantize in BY_LIBRARY:
        raise cannot_round(quantize)
    options = (quantize or engine, compile, share_from, kv)
    with ONE_AT_A_TIME:
        return _cached_language_model(model, check, options, shared, role)


def _cached_language_model(
    model: "PreTrainedModel", check: bool, given: tuple[Any, ...], shared: SharedTokens | None, role: str
) -> HuggingFaceLM:
    engine, compile, share_from, kv = given
    options = (*given, None if shared is None else shared.key)
    if isinstance(model, StandInModel):  # its folder was checked before
        found = _language_model_of(model, options, shared)
        if found is not None:
            return found
        model = model.whole()
    cached = vars(model).get("_specbeam")
    if cached is None or cached.key != (fingerprint(model), options):
        prepare_to_score(model)
        lm: HuggingFaceLM
        if reads_sources(model):
            if compile:
                raise NotSupported(
                    f"compile=True needs a decoder-only model, and {type(model).__name__} has an encoder; leave it out"
                )
            lm = EncoderDecoderLM(model, engine=engine, kv=kv, shared=shared)
        else:
            lm = HuggingFaceLM(model, engine=engine, share_from=share_from, kv=kv, shared=shared)
        if compile and lm.engine == "plain":
            lm = HuggingFaceLM(model, engine="torch", share_from=share_from, shared=shared)
        if check:
            check_scores_forests(lm, role)
        # The fingerprint is taken again, as an engine may have changed the layout of the weights.
        cached = OnModel((fingerprint(model), options), lm)
        object.__setattr__(model, "_specbeam", cached)
        mapped_files(model).release(model.parameters())
    return cached.found


def _language_model_of(
    stand_in: StandInModel, options: tuple[Any, ...], shared: SharedTokens | None
) -> HuggingFaceLM | None:
    """Return the language model of a stand-in, and cache it on the model object if that is loaded later.

    Returns None if these options let transformers run the model, or its encoder.

    Args:
        options: see `OnModel.key`.
    """
    prepare_to_score(stand_in)
    engine, _, share_from, kv, _ = options
    lm: HuggingFaceLM
    if reads_sources(stand_in):
        lm = EncoderDecoderLM(stand_in, engine=engine, kv=kv, shared=shared)
    else:
        lm = HuggingFaceLM(stand_in, engine=engine, share_from=share_from, kv=kv, shared=shared)
    mapped_files(stand_in).release(stand_in.parameters())
    if lm.engine != "compiled" or (isinstance(lm, EncoderDecoderLM) and lm.engine_note):
        return None
    load_model = stand_in.load_whole

    def load_whole() -> Any:
        model = load_model()
        if reads_sources(model):
            make_causal(model)
        object.__setattr__(model, "_specbeam", OnModel((fingerprint(model), options), lm))
        return model

    stand_in.load_whole = load_whole
    return lm


def placed_language_model(model: "PreTrainedModel", check: bool, share_from: ShareFrom) -> HuggingFaceLM:
    """Return the language model of a target whose layers are on several devices; transformers runs it."""
    prepare_to_score(model)
    lm = HuggingFaceLM(model, engine="plain", share_from=share_from)
    if check:
        check_scores_forests(lm)
    return lm


def check_options(quantize: Any, share_from: Any, name: str = "quantize") -> None:
    """Raise `BadSetting` if one of these options of `load` is wrong."""
    check_rounding(quantize, name)
    is_count = isinstance(share_from, int) and is_integer(share_from) and share_from >= 1
    if share_from not in (None, "auto") and not is_count:
        raise BadSetting(f"share_from is {share_from!r}; it must be a number of tokens of at least 1, 'auto' or None")


def by_engine(quantize: "Quantize | None") -> Any:
    """Return the rounding by an engine of specbeam; None if a library rounds the weights, or nothing does."""
    return quantize if quantize in OWN_ROUNDINGS else None


class OnModel:
    """A result cached on a model object, so that both are freed together. A copy of the object starts without it.

    Args:
        key: identifies the inputs of the result.
    """

    def __init__(self, key: Any = None, found: Any = None) -> None:
        self.key = key
        self.found = found

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OnModel, ()


def fingerprint(model: "PreTrainedModel") -> Any:
    """Return a hash that changes if a model is moved, cast, trained, hooked or patched, or gets other weights."""
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
    """Return the address of a weight, or the id of a library's rounded weight, which may have no address."""
    return weight.data_ptr() if type(weight) is torch.nn.Parameter else id(weight)


@torch.no_grad()
def _sample(model: "PreTrainedModel") -> bytes:
    """Return the sums of some values of each weight on a CPU, as bytes.

    They detect changes through `.data`, such as merged adapters, which do not increase the version of a tensor. Weights on a
    GPU are skipped, as engines for GPUs do not copy weights; so are weights that a library has rounded.
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
