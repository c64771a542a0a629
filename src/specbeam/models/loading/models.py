"""Loading of model objects from files or hub ids."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbeam.core.errors import BadCheckpoint, BadSetting, MissingFile, NotSupported, SpecbeamError
from specbeam.core.names import hint
from specbeam.doors.progress import bars_of_transformers
from specbeam.engines.choices import BY_LIBRARY, Quantize, check_device
from specbeam.engines.mapped import mapped_files, mark_mapped
from specbeam.models.adapters import Adapter, adapter_at, merged
from specbeam.models.checkpoints.folders import BUNDLED, checked_folder, gguf_in
from specbeam.models.checkpoints.numbers import check_weights
from specbeam.models.checkpoints.pretrained import Checkpoint, open_checkpoint, pretrained
from specbeam.models.gguf_files import read_gguf
from specbeam.models.mapped_files import stored_type
from specbeam.models.quantised import library_config, rounding_in, unknown_method
from specbeam.models.rounded_files import read_rounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Types of torch by their names in other libraries.
_TYPES = {
    "fp32": "float32",
    "f32": "float32",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}
# from_pretrained changes torch's defaults while it runs: concurrent calls would leave models without weights.
ONE_AT_A_TIME = threading.RLock()


def device_of(name: str | torch.device | None) -> torch.device:
    """Return the device of this name; None: the GPU if there is one, otherwise the CPU.

    Raises `BadSetting` if torch does not know the name, or if there is no such GPU.
    """
    if isinstance(name, str):
        check_device(name)
    gpus = torch.cuda.device_count()
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError as error:
        raise BadSetting(
            f"device is {name!r}; it must be 'cpu', 'cuda', 'cuda:1' or another device of torch"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= gpus:
        found = f"{gpus} GPUs" if gpus else "no usable GPU"
        raise BadSetting(
            f"device is {str(name)!r}, and torch {torch.__version__} finds {found}; leave it out, or give 'cpu'"
        )
    return device


def bundled_folder(source: Any, part: str) -> Any:
    """Return the folder of the bundled "target" or "draft" for the name "bundled", and any other source unchanged."""
    return BUNDLED / part if isinstance(source, str) and source == "bundled" else source


def load_model(
    name: str, dtype: "str | torch.dtype" = "auto", device: str | torch.device | None = None
) -> "PreTrainedModel":
    """Return the model at a path or hub id. Arguments and errors are those of `load`."""
    return model_of(name, dtype, device_of(device))


def model_of(
    source: Any,
    dtype: "str | torch.dtype",
    device: torch.device,
    quantize: "Quantize | None" = None,
    may_map: bool = False,
    device_map: Any = None,
) -> "PreTrainedModel":
    """Return a model object unchanged, or load the model at a path or hub id; see `load`.

    Args:
        may_map: whether the weights of a large model on a CPU may stay in memory-mapped files (models/mapped_files.py).
    """
    by_library = quantize if quantize in BY_LIBRARY else None
    if isinstance(source, torch.nn.Module):
        if by_library is not None and vars(source).get("_specbeam_rounding") != by_library:
            raise cannot_round(by_library)
        return source
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        near = hint(dtype, _TYPES.values(), _TYPES)
        raise BadSetting(
            f"dtype is {dtype!r}{near}; it must be 'auto' or a type of torch, like 'float32' or 'bfloat16'"
        )
    if (file := gguf_in(source)) is not None:
        return _of_gguf(file, dtype, device, by_library, may_map, device_map)
    if device_map is None and (adapter := adapter_at(local_or_hub(source))) is not None:
        return _of_adapter(adapter, dtype, device, quantize)
    name = name_or_path(source)
    with ONE_AT_A_TIME:  # this may build models without weights
        checkpoint = open_checkpoint(name)
    if by_library is not None and checkpoint.is_rounded:
        raise BadSetting(f"the files of {source} already hold rounded weights; leave {by_library!r} out")
    unread = ""
    if checkpoint.is_rounded and device_map is None:
        with ONE_AT_A_TIME:
            read = _read_here(checkpoint, dtype, device)
        if not isinstance(read, str):
            return read
        unread = f" ({read})"
    mapped_type = None
    if dtype == "auto" and device.type == "cpu":
        if may_map and by_library is None and not checkpoint.is_rounded:
            with ONE_AT_A_TIME:
                mapped_type = stored_type(checkpoint)
        dtype = mapped_type or torch.float32
    options: dict[str, Any] = {}
    if by_library is not None:
        options["quantization_config"] = library_config(by_library, dtype)
    if by_library is not None or checkpoint.is_rounded:
        options["device_map"] = {"": device}  # models with rounded weights must be created on their device
    if device_map is not None:
        options["device_map"] = device_map
    how, error = _as_loaded(source, by_library, rounding_in(checkpoint.config), device)
    if checkpoint.is_rounded:
        unread += "; or give the original model, with quantize='int8' or 'int4' to make it small"
    with ONE_AT_A_TIME, bars_of_transformers():
        model = pretrained(checkpoint, how, error, unread, dtype=dtype, **options)
    if by_library is not None:
        object.__setattr__(model, "_specbeam_rounding", by_library)
    if mapped_type is not None:
        mark_mapped(model)
    check_weights(name, model, mapped_files(model).release)
    return model if options else model.to(device)


def _of_gguf(
    file: Path,
    dtype: "str | torch.dtype",
    device: torch.device,
    by_library: "Quantize | None",
    may_map: bool,
    device_map: Any,
) -> "PreTrainedModel":
    """Return the model in a GGUF file; see `model_of`."""
    if by_library is not None:
        raise BadSetting(
            f"{file} holds weights that specbeam reads itself; leave {by_library!r} out, or give 'int8' or 'int4'"
        )
    if device_map is not None:
        raise NotSupported(f"{file} is a GGUF file, and device_map is for models in transformers' format; leave it out")
    with ONE_AT_A_TIME:
        return read_gguf(file, dtype, device, may_pack=may_map, may_map=may_map)


def _of_adapter(
    adapter: Adapter, dtype: "str | torch.dtype", device: torch.device, quantize: "Quantize | None"
) -> "PreTrainedModel":
    """Return the base model of an adapter with the adapter merged; see `model_of`."""
    if quantize in BY_LIBRARY:
        raise BadSetting(
            f"{quantize!r} rounds weights while they are loaded, and {adapter.name} holds an adapter that is merged "
            "afterwards; use 'int8', 'int4' or 'fp8'"
        )
    if adapter_at(adapter.base) is not None:
        raise NotSupported(
            f"{adapter.base}, the base of the adapter {adapter.name}, holds an adapter itself; merge that one first, with "
            "peft's merge_and_unload and save_pretrained, and name the result in adapter_config.json"
        )
    try:
        base = model_of(adapter.base, dtype, device)
    except MissingFile as error:
        raise MissingFile(f"{adapter.name} holds an adapter for {adapter.base}, which is missing: {error}") from error
    if stored := rounding_in(base.config):
        if stored != "gguf":
            raise NotSupported(
                f"{adapter.base}, the base of the adapter {adapter.name}, holds weights rounded by {stored!r}, into which "
                "an adapter cannot be merged; name the unrounded model in adapter_config.json"
            )
        del base.config.quantization_config  # its weights are floats here, and no longer those of the file
    with ONE_AT_A_TIME:
        return merged(adapter, base)


def _as_loaded(
    source: Any, by_library: str | None, stored: str, device: torch.device
) -> tuple[str, type[SpecbeamError]]:
    """Return the beginning of the message and the type of the error if a model cannot be loaded.

    Args:
        by_library: rounding by a library while the model is loaded.
        stored: rounding method of the weights in its files; "" for none.
    """
    if by_library is None and not stored:
        return f"could not load a language model from {source}", BadCheckpoint
    how = repr(by_library) if by_library is not None else f"the rounded weights of its files ({stored})"
    return f"{source} could not be loaded with {how} on {device}", NotSupported


def _read_here(checkpoint: Checkpoint, dtype: "str | torch.dtype", device: torch.device) -> "PreTrainedModel | str":
    """Return a model whose files hold rounded weights, or the reason why a library must read them.

    Raises `NotSupported` if transformers does not know their method either; it would invent weights.
    """
    read: PreTrainedModel | str = "specbeam itself reads rounded weights only on a CPU"
    if device.type == "cpu" and not checkpoint.reads_sources:
        read = read_rounded(checkpoint, dtype)
    if isinstance(read, str) and (method := unknown_method(checkpoint.config)):
        raise NotSupported(
            f"{checkpoint.name} holds weights rounded by {method!r}, which transformers does not know; {read}"
        )
    return read


def cannot_round(quantize: str) -> BadSetting:
    return BadSetting(
        f"{quantize!r} rounds weights while transformers loads them from files, and the model is already an object; give "
        "its folder or hub id, or use 'int8', 'int4' or 'fp8'"
    )


def local_or_hub(source: "str | Path") -> "str | Path":
    """Return a path that exists unchanged, whatever it holds, and otherwise the argument of `from_pretrained`."""
    return source if Path(source).expanduser().exists() else name_or_path(source)


def name_or_path(source: "str | Path") -> str:
    """Return the argument of `from_pretrained`: a hub id, or the path of a folder that holds a model.

    Raises an error that names the content of the path if it is not the folder of a model.
    """
    if not str(source).strip():
        raise MissingFile(f"{str(source)!r} names no model; give a folder that save_pretrained wrote, or a hub id")
    return str(checked_folder(Path(source).expanduser())) if is_local(source) else str(source)


def is_local(source: "str | Path") -> bool:
    """Return whether a source is the path of a folder or file, and not a hub id."""
    path = Path(source).expanduser()
    looks_local = isinstance(source, Path) or path.is_absolute() or str(source).startswith((".", "~"))
    return looks_local or path.exists()
