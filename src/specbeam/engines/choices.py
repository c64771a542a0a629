"""Engines, roundings and types of stored keys and values that users choose by name. Imports nothing heavy."""

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, get_args

from specbeam.core.errors import BadSetting
from specbeam.core.names import hint

CHOICES = ("auto", "gpu", "compiled", "layers", "plain")  # engines
# Engines that another option of `load` chooses.
_BY_OPTION = {
    "int8": "quantize='int8'",
    "int4": "quantize='int4'",
    "fp8": "quantize='fp8'",
    "bfloat16": "compute='bfloat16'",
    "torch": "compile=True",
    "parallel": "tensor_parallel=True",
}
# Engines by names that other libraries and users give them.
_ELSEWHERE = {
    "cpu": "compiled",
    "numba": "compiled",
    "cuda": "gpu",
    "triton": "gpu",
    "transformers": "plain",
    "hf": "plain",
}

Rounding = Literal["int8", "int4"]  # by the compiled forward
OnGpu = Literal["fp8"]
ByLibrary = Literal["torchao-int8", "torchao-int4", "bitsandbytes-int8", "bitsandbytes-nf4"]
Quantize = Literal[Rounding, OnGpu, ByLibrary]
OWN_ROUNDINGS: tuple[str, ...] = (*get_args(Rounding), *get_args(OnGpu))
BY_LIBRARY: tuple[str, ...] = get_args(ByLibrary)
# Engines that round numbers, which changes the model: reports state it.
ROUNDED_ENGINES: tuple[str, ...] = (*OWN_ROUNDINGS, "bfloat16")
_KNOWN = ", ".join(repr(one) for one in (*OWN_ROUNDINGS, *BY_LIBRARY))
# Kinds of torch.device. Extensions of torch, which add further ones, are listed as entry points.
_DEVICES = (
    "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "meta", "privateuseone", "mkldnn", "ideep", "hip", "ve", "fpga",
    "maia", "lazy", "vulkan", "opengl", "opencl", "ipu",
)  # fmt: skip
_EXTENSIONS = "torch.backends"
_LIKE_A_ROUNDING = re.compile(r"(u?int|fp|nf|float)\d+|(torchao|bitsandbytes)-[\w-]+", re.IGNORECASE)


def check_engine(engine: Any, others: dict[str, bool]) -> None:
    """Raise `BadSetting` if the option `engine` of `load` is wrong, or if another option chooses the engine, too.

    Args:
        others: for each option that chooses an engine, whether it is given.
    """
    if isinstance(engine, str) and engine in _BY_OPTION:
        raise BadSetting(f"engine is {engine!r}; give {_BY_OPTION[engine]} instead")
    if engine not in CHOICES:
        names = ", ".join(map(repr, CHOICES))
        raise BadSetting(f"engine is {engine!r}; it must be one of {names}{hint(str(engine), CHOICES, _ELSEWHERE)}")
    if engine != "auto" and (given := [name for name, is_given in others.items() if is_given]):
        raise BadSetting(f"engine and {given[0]} both choose what runs the models; give one of them")


def check_what_runs(
    engine: Any, compute: object, quantize: str | None, compile: bool, device_map: Any, tensor_parallel: bool
) -> None:
    """Raise `BadSetting` if one of these options of `load` is wrong, or if several of them choose what runs the models."""
    others = {"compile": compile, "device_map": device_map is not None, "tensor_parallel": tensor_parallel}
    is_rounded = quantize is not None
    check_engine(
        engine, {"quantize": is_rounded and quantize in OWN_ROUNDINGS, **others, "compute": compute is not None}
    )
    check_compute(compute, {"quantize": is_rounded, **others})


def check_device(name: str) -> None:
    """Raise `BadSetting` for a text that names no device of torch. Whether there is this device is left to loading."""
    kind, colon, number = name.partition(":")
    is_one = kind in _DEVICES or (kind.isidentifier() and len(entry_points(group=_EXTENSIONS)) > 0)
    if not is_one or number.isdecimal() != bool(colon):
        near = hint(kind.lower(), _DEVICES, {"gpu": "cuda"})
        raise BadSetting(f"device is {name!r}{near}; it must be 'cpu', 'cuda', 'cuda:1' or another device of torch")


def is_rounding(name: object) -> bool:
    """Return whether a value names a rounding of weights."""
    return isinstance(name, str) and name in (*OWN_ROUNDINGS, *BY_LIBRARY)


def check_kv(kv: object) -> None:
    """Raise `BadSetting` unless a value is a type for stored keys and values, or None."""
    if kv not in (None, "bfloat16"):
        raise BadSetting(f"kv is {kv!r}; it must be 'bfloat16', or None for the engine's own type")


def check_compute(compute: object, others: dict[str, bool]) -> None:
    """Raise `BadSetting` unless a value is a type of products or None, or if another option chooses the engine, too.

    Args:
        others: for each option that chooses an engine, whether it is given.
    """
    if compute not in (None, "bfloat16"):
        raise BadSetting(f"compute is {compute!r}; it must be 'bfloat16', or None for float32")
    if compute is not None and (given := [name for name, is_given in others.items() if is_given]):
        raise BadSetting(f"compute and {given[0]} both choose how products are made; give one of them")


def check_rounding(name: object, option: str) -> None:
    """Raise `BadSetting`, which names the option, unless a value is None or names a rounding of weights."""
    if name is None or is_rounding(name):
        return
    raise BadSetting(f"{option} is {name!r}; it must be one of {_KNOWN}, or None")


def check_is_model(name: object) -> None:
    """Raise `BadSetting` if the name of a draft looks like an unknown rounding, and there is no folder of this name."""
    if not isinstance(name, str) or is_rounding(name) or Path(name).is_dir():
        return
    if _LIKE_A_ROUNDING.fullmatch(name):
        raise BadSetting(f"draft is {name!r}, which is no folder; the roundings of the target are {_KNOWN}")
