"""The table of engines, with the reasons why an engine cannot run a model, and the choice of "auto"."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specbeam.core.caches.folders import lend_folder
from specbeam.core.errors import NotSupported, UnsupportedModel, warn
from specbeam.engines.choices import Rounding
from specbeam.engines.cpu.cache_words import KVType
from specbeam.engines.cpu.decoder import CompiledDecoder, misfit, misfit_of_bfloat16
from specbeam.engines.cpu.passes import PackedPasses
from specbeam.engines.cpu.source_passes import CompiledSourcePasses
from specbeam.engines.eligibility import is_llama_like, lacks_trees, reads_sources
from specbeam.engines.families import embedding_of, family_of, layers_in, misfit_of_family
from specbeam.engines.gpu.staging import MOST_RANGES
from specbeam.engines.mapped import LARGEST_WIDENED, is_mapped
from specbeam.engines.packed import matrices_of
from specbeam.engines.shared_tokens import SharedTokens
from specbeam.engines.torch.passes import PaddedPasses
from specbeam.engines.torch.source_passes import SourcePasses
from specbeam.models.adapters import is_merged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbeam.engines.gpu.passes import GpuPasses

OLDEST_WITH_FP8 = (8, 9)  # compute capability of GPUs that have fp8
COMPILED = ("compiled", "bfloat16", "int8", "int4")  # engines that are the compiled forward
# Those with which the weights of large models on a CPU stay in memory-mapped files.
MAPPING = ("auto", "compiled", "bfloat16")
# The gain of files over an object on a CPU, for a warning; measurements/engines.md has the figures.
_FACTOR = "5 times as fast where it was measured (135 M weights in bfloat16)"
OWN = ("gpu", "fp8", *COMPILED)  # engines that are a forward of specbeam


class EngineKind(NamedTuple):
    """A row of the table.

    Attributes:
        name: the engine's name.
        described: the engine's name in messages.
        fits: returns the reason why the engine cannot run a model; "" if it can.
        waits: returns the reason why "auto" does not choose the engine although it fits; "" if it does.
        passes: makes the passes of a model; returns None, with a warning, if the engine does not work on this machine.
    """

    name: str
    described: str
    fits: "Callable[[PreTrainedModel], str]"
    waits: "Callable[[PreTrainedModel], str]"
    passes: "Callable[[EngineRequest], Any]"


class EngineRequest(NamedTuple):
    """A model that needs an engine.

    Attributes:
        caches: see `HuggingFaceLM.caches`.
        shared: the target's tokens, which a draft model reads and drafts; None: the model's own tokens.
    """

    model: "PreTrainedModel"
    caches: list[Any]
    shared: SharedTokens | None


class ChosenEngine(NamedTuple):
    """The engine that runs a model.

    Attributes:
        note: a sentence with the reason if "auto" chose transformers; "" otherwise.
    """

    name: str
    passes: "PaddedPasses | PackedPasses | GpuPasses"
    note: str


def choose_engine(
    model: "PreTrainedModel", wanted: str, caches: list[Any], kv: KVType = "float32", shared: SharedTokens | None = None
) -> ChosenEngine:
    """Return the engine that runs a model: the wanted one, or for "auto" the first of the table that fits.

    Args:
        caches: see `HuggingFaceLM.caches`.
        kv: the type of stored keys and values; for other types than float32, "auto" is the compiled forward.
        shared: see `EngineRequest.shared`.

    Raises `NotSupported` if the wanted engine cannot run the model.
    """
    if kv != "float32":
        chosen = choose_engine(model, "compiled" if wanted == "auto" else wanted, caches, shared=shared)
        return _with_rounded_kv(chosen, kv)
    request = EngineRequest(model, caches, shared)
    if reads_sources(model):
        return _engine_for_sources(request, wanted)
    if wanted != "parallel" and any(hasattr(weight, "to_local") for weight in model.parameters()):
        raise NotSupported(
            "the weights of this model are sharded over several processes, which must run each pass together; load the "
            "target with load(..., tensor_parallel=True), and load drafts without sharding"
        )
    return _engine_of(ENGINES, request, wanted)


def _engine_for_sources(request: EngineRequest, wanted: str) -> ChosenEngine:
    """Return the engine that runs the decoder of an encoder-decoder model; see `choose_engine`."""
    names = [kind.name for kind in ENGINES_FOR_SOURCES]
    if wanted not in ("auto", *names):
        raise NotSupported(
            f"engine {wanted!r} runs decoder-only models, and {type(request.model).__name__} has cross-attention; its "
            f"engines are {', '.join(names)}"
        )
    return _engine_of(ENGINES_FOR_SOURCES, request, wanted)


def _engine_of(engines: tuple[EngineKind, ...], request: EngineRequest, wanted: str) -> ChosenEngine:
    """Choose among these engines as `choose_engine` does. Raises `UnsupportedModel` if none of them fits."""
    if wanted != "auto":
        return ChosenEngine(wanted, _wanted_passes(engines, request, wanted), "")
    model = request.model
    reasons: dict[str, str] = {}
    for kind in engines:
        why = kind.fits(model) or kind.waits(model)
        if not why:
            passes = kind.passes(request)
            if passes is not None:
                return ChosenEngine(kind.name, passes, _note(model, reasons) if kind.name == "plain" else "")
            why = "the engine does not work on this machine"
        reasons[kind.name] = f"{kind.described}: {why}"
    raise UnsupportedModel(
        f"no engine runs this {type(model).__name__}. {reasons['plain']}. {_reason_of_ours(model, reasons)}"
    )


def _with_rounded_kv(chosen: ChosenEngine, kv: KVType) -> ChosenEngine:
    """Make the chosen engine store rounded keys and values. Raises `NotSupported` if it is not the compiled forward."""
    if chosen.name not in COMPILED:
        raise NotSupported(
            f"kv={kv!r} needs the compiled forward, rounded or not, and the engine is {chosen.name!r}; leave kv out"
        )
    chosen.passes.store_kv_as(kv)  # type: ignore[union-attr]
    return chosen


def _wanted_passes(engines: tuple[EngineKind, ...], request: EngineRequest, wanted: str) -> Any:
    """Return the passes of a model by the wanted engine. Raises `NotSupported` if the engine cannot run the model."""
    by_name = {kind.name: kind for kind in engines}
    kind = by_name.get(wanted)
    if kind is None:
        raise NotSupported(f"engine is {wanted!r}; it must be one of {', '.join(by_name)}")
    why = kind.fits(request.model)
    passes = None if why else kind.passes(request)
    if passes is None:
        name = type(request.model).__name__
        raise NotSupported(f"{kind.described} cannot run this {name}: {why or 'it does not work on this machine'}")
    return passes


def _note(model: "PreTrainedModel", reasons: dict[str, str]) -> str:
    """Return a sentence with the reason why transformers runs a model instead of the engine for its device."""
    return f"transformers' own forward runs this {type(model).__name__} instead of {_reason_of_ours(model, reasons)}"


def _reason_of_ours(model: "PreTrainedModel", reasons: dict[str, str]) -> str:
    """Return the name of specbeam's engine for a model's device, and the reason why it does not run the model."""
    return reasons["gpu" if "gpu" in reasons and model.device.type == "cuda" else "compiled"]


def _always(model: "PreTrainedModel") -> str:
    return ""


def _on_request(model: "PreTrainedModel") -> str:
    return "it is used on request only"


def _too_large(model: "PreTrainedModel") -> str:
    count = model.num_parameters()
    if count <= LARGEST_WIDENED:
        return ""
    millions = LARGEST_WIDENED // 1_000_000
    return (
        f"it has {count // 1_000_000:,} M parameters, and above {millions} M a second copy of the weights is too large"
    )


def _waits_for_compiled(model: "PreTrainedModel") -> str:
    """Return the reason why the compiled forward should not copy a model's weights; "" if it may."""
    if is_mapped(model) or matrices_of(model) or is_merged(model) or lacks_trees(model):
        return ""
    if model.dtype != torch.float32:
        return f"it is in {model.dtype}, and the compiled forward would copy the weights"
    return _too_large(model)


def advice_for_plain(model: "PreTrainedModel", engine: str, is_object: bool) -> str:
    """Return a warning about a model that would run compiled if `load` got its files without a type; "" for others.

    Args:
        engine: the engine that runs the model.
        is_object: whether `load` got the object; otherwise its files and a type.
    """
    why = _waits_for_compiled(model) if engine == "plain" and model.device.type == "cpu" else ""
    if not why or misfit_of_family(model):
        return ""
    name = repr(model.name_or_path) if model.name_or_path else "FOLDER"
    what = f"{type(model).__name__} object" if is_object else type(model).__name__
    advice = f"sb.load({name})" if is_object else f"sb.load({name}) without dtype"
    return (
        f"transformers' own forward runs this {what}, because {why}. {advice} runs its files compiled, {_FACTOR}; or give "
        "engine='compiled', which keeps both copies"
    )


def _waits_for_gpu(model: "PreTrainedModel") -> str:
    if model.device.type != "cuda":
        return f"on {model.device} this engine is for tests only"
    if reads_sources(model):
        return "it is used on request only for decoders with cross-attention: docs/models.md lists the tests there"
    return ""


def _misfit_of_gpu(model: "PreTrainedModel") -> str:
    if find_spec("triton") is None:
        return "triton is missing (pip install triton)"
    return misfit_of_family(model) or _misfit_of_source_layers(model)


def _misfit_of_source_layers(model: "PreTrainedModel") -> str:
    """Return the reason why the forward for GPUs cannot run the decoder of an encoder-decoder model; "" if it can."""
    family = family_of(model)
    if family is None or not family.cross:
        return ""
    if family.distances and model.config.relative_attention_num_buckets > MOST_RANGES:
        return f"its attention distinguishes more than {MOST_RANGES} ranges of distances"
    matrices = [weight for layer in layers_in(model, family) for weight in layer.parameters() if weight.dim() > 1]
    types = {str(matrix.dtype) for matrix in (embedding_of(model, family).weight, *matrices)}
    return "" if len(types) == 1 else f"the matrices of its decoder are in {' and '.join(sorted(types))}"


def _misfit_of_fp8(model: "PreTrainedModel") -> str:
    why = _misfit_of_gpu(model)
    if why or model.device.type != "cuda":
        return why or "it is for GPUs; on a CPU use 'int8' or 'int4'"
    family = family_of(model)
    if family is not None and family.mixture:
        return "experts cannot be rounded to fp8"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"it rounds models in bfloat16 or float16, and this model is in {model.dtype}: load it with dtype='bfloat16'"
    if (has := torch.cuda.get_device_capability(model.device)) < OLDEST_WITH_FP8:
        return f"the GPU has no fp8: its compute capability is {has[0]}.{has[1]}, and fp8 needs 8.9"
    return ""


def _misfit_of_layers(model: "PreTrainedModel") -> str:
    if is_llama_like(model):
        return ""
    return f"it is for unchanged Llama, Mistral and Qwen2 models; this is a {type(model).__name__}"


def _misfit_of_torch(model: "PreTrainedModel") -> str:
    if model.device.type == "cuda":
        return "it is for CPUs; on a GPU passes are already captured as graphs: leave it out"
    return lacks_trees(model)


def _compiled_kind(name: str, described: str, rounding: Rounding | None, rounds_rows: bool = False) -> EngineKind:
    """Return the row of the compiled forward with this rounding of matrices, or of rows to bfloat16."""

    def passes(request: EngineRequest) -> PackedPasses:
        with torch.inference_mode():
            decoder = CompiledDecoder(request.model, rounding, request.shared, rounds_rows)
            kind = CompiledSourcePasses if reads_sources(request.model) else PackedPasses
            return kind(request.model, decoder, request.caches)

    waits = _on_request if rounding or rounds_rows else _waits_for_compiled
    fits = misfit_of_bfloat16 if rounds_rows else partial(misfit, rounding=rounding)
    return EngineKind(name, described, fits, waits, passes)


def _gpu_passes(request: EngineRequest, rounded: bool = False) -> "GpuPasses | None":
    """Return passes on a GPU; None, with a warning, if Triton does not work on this machine."""
    lend_folder("TRITON_CACHE_DIR", "triton")  # Triton needs a cache folder, and the default is in the home folder
    from specbeam.engines.gpu.decoder import GpuDecoder
    from specbeam.engines.gpu.passes import GpuPasses
    from specbeam.engines.gpu.source_passes import GpuSourcePasses

    model = request.model
    kind = GpuSourcePasses if reads_sources(model) else GpuPasses
    # GpuDecoder moves the weights. Outside of inference mode they can still be trained afterwards.
    with torch.inference_mode(False), torch.no_grad():
        passes = kind(model, GpuDecoder(model, rounded, request.shared), request.caches, model.device.type == "cuda")
    try:
        passes.try_out()
    except Exception as error:  # Triton has no C compiler, does not know the GPU, ...
        warn(f"the forward for GPUs cannot be used, as Triton does not work here: {error!r}")
        return None
    return passes


def _passes_by_layer(request: EngineRequest) -> PackedPasses:
    from specbeam.engines.by_layer import layer_decoder  # imports transformers

    return PackedPasses(request.model, layer_decoder(request.model, request.shared), request.caches)


def _torch_passes(request: EngineRequest) -> PaddedPasses:
    return PaddedPasses(request.model, request.caches, compile=True, shared=request.shared)


def _parallel_passes(request: EngineRequest) -> PaddedPasses:
    from specbeam.engines.torch.repeated import Channel, RepeatedPasses

    assert request.shared is None  # a sharded model is a target
    return RepeatedPasses(request.model, request.caches, Channel())


def _plain_passes(request: EngineRequest) -> PaddedPasses:
    if reads_sources(request.model):
        return SourcePasses(request.model, request.caches, request.shared)
    return PaddedPasses(request.model, request.caches, shared=request.shared)


# In the order in which "auto" tries them.
ENGINES = (
    EngineKind("gpu", "the forward for GPUs", _misfit_of_gpu, _waits_for_gpu, _gpu_passes),
    EngineKind("fp8", "quantize='fp8'", _misfit_of_fp8, _on_request, partial(_gpu_passes, rounded=True)),
    _compiled_kind("compiled", "the compiled forward", None),
    _compiled_kind("bfloat16", "compute='bfloat16'", None, rounds_rows=True),
    _compiled_kind("int8", "quantize='int8'", "int8"),
    _compiled_kind("int4", "quantize='int4'", "int4"),
    EngineKind("layers", "the forward that calls layers one by one", _misfit_of_layers, _on_request, _passes_by_layer),
    EngineKind("torch", "compile=True", _misfit_of_torch, _on_request, _torch_passes),
    EngineKind("parallel", "the forward in several processes", lacks_trees, _on_request, _parallel_passes),
    EngineKind("plain", "transformers' forward", lacks_trees, _always, _plain_passes),
)
# Engines that run the decoders of encoder-decoder models.
ENGINES_FOR_SOURCES = tuple(kind for kind in ENGINES if kind.name in ("gpu", *COMPILED, "plain"))
