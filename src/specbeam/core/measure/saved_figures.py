"""Measurements of this machine, saved on disk under keys that include everything they depend on."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specbeam import __version__
from specbeam.core.caches.files import clean, digest_of, discard, keep, read_own
from specbeam.core.caches.folders import cache_folder
from specbeam.core.threads import allowed_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_SECONDS = 1e6  # longest plausible measurement


def machine() -> list[Any]:
    """Return what determines the speed of this machine: processor, threads of compiled code, torch version and GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    vectors = torch.backends.cpu.get_cpu_capability()
    return [
        platform.machine(),
        _processor(),
        vectors,
        os.cpu_count(),
        allowed_threads(),
        torch.__version__,
        gpu,
    ]


@cache
def _processor() -> str:
    """Return the name of the processor, or the description by `platform`."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            (name, _, value) = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor()


def model_key(model: "PreTrainedModel | None") -> list[str] | None:
    """Return a key from a model's configuration, weight shapes, dtype and device; None for no model.

    It excludes the model's path, which may hold another model by now, and the values of its weights, which do not
    affect the cost of a pass.
    """
    if model is None:
        return None
    config = _without_names(model.config.to_dict())
    shapes = [(name, [*weight.shape], str(weight.dtype)) for name, weight in model.named_parameters()]
    header = hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).hexdigest()
    return [json.dumps(config, default=str), header, str(model.dtype), str(model.device)]


def _without_names(config: dict[Any, Any]) -> dict[Any, Any]:
    """Return a configuration, including nested ones, without the paths of models."""
    return {
        name: _without_names(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name != "_name_or_path"
    }


def weights_key(model: Any) -> str | None:
    """Return a hash of 16 numbers of every weight, to distinguish models of equal shapes; None for no model.

    For a model whose weights another program has (`ServedModel`) it is the model's name.
    """
    if model is None:
        return None
    if not hasattr(model, "parameters"):
        return str(model.name_or_path)
    samples = []
    module: torch.nn.Module = model
    for _, weight in sorted(module.named_parameters()):
        stride = max(weight.numel() // 16, 1)
        # Quantised tensors of other libraries consist of several plain ones and cannot be flattened.
        if hasattr(weight, "to_local"):  # sharded over several processes
            numbers = weight.to_local()
        else:
            numbers = weight.dequantize() if is_traceable_wrapper_subclass(weight) else weight
        samples.append(numbers.detach().flatten()[::stride][:16].double().cpu())
    return hashlib.blake2b(torch.cat(samples).numpy().tobytes(), digest_size=8).hexdigest()


@cache
def source_key(*rooms: str) -> str:
    """Return a hash of the sources of these subpackages, such as "engines": costs may change with them."""
    package = Path(__file__).parent.parent.parent
    digest = hashlib.blake2b(digest_size=8)
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class NumberField:
    """A number of a record, or a nested list of numbers of this shape; finite, and between two bounds."""

    shape: tuple[int | None, ...] = ()  # None: any length
    least: float = 0.0
    most: float = MOST_SECONDS
    is_whole: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether a value from disk is valid."""
        return self._accepts(value, self.shape)

    def _accepts(self, value: Any, shape: tuple[int | None, ...]) -> bool:
        if shape:
            (length, *inner) = shape
            is_list = isinstance(value, list) and length in (None, len(value))
            return is_list and all(self._accepts(one, tuple(inner)) for one in value)
        kinds = int if self.is_whole else (int, float)
        # Comparisons are false with NaN.
        return isinstance(value, kinds) and not isinstance(value, bool) and self.least <= value <= self.most


@dataclass(frozen=True)
class FlagField:
    """A boolean of a record."""

    def accepts(self, value: Any) -> bool:
        """Return whether a value from disk is valid."""
        return isinstance(value, bool)


@dataclass(frozen=True)
class ChoiceField:
    """A string of a record, one of several names."""

    names: tuple[str, ...]

    def accepts(self, value: Any) -> bool:
        """Return whether a value from disk is valid."""
        return value in self.names


@dataclass(frozen=True)
class RecordFields:
    """The fields of a record, which may be nested in another one.

    Args:
        kinds: the type of each field; other fields are invalid.
        fits: returns whether the valid values of a record are consistent.
    """

    kinds: "Mapping[str, NumberField | FlagField | ChoiceField | RecordFields]"
    fits: Callable[[dict[str, Any]], bool] = lambda record: True

    def accepts(self, value: Any) -> bool:
        """Return whether a value from disk is a valid record."""
        if not isinstance(value, dict) or value.keys() != self.kinds.keys():
            return False
        return all(kind.accepts(value[name]) for name, kind in self.kinds.items()) and self.fits(value)


@dataclass(frozen=True)
class Figures:
    """A kind of measurements on disk, which are validated when they are read.

    Args:
        kind: prefix of the file names.
        fields: the fields of a record.
    """

    kind: str
    fields: RecordFields

    def load(self, key: Any) -> dict[str, Any] | None:
        """Return the record saved under a key of JSON values; None if there is no valid one.

        A damaged file is deleted, so the caller measures again.
        """
        (path, whole_key) = self._place(key)
        content = None if path is None else read_own(path)
        if path is None or content is None:
            return None
        try:
            record = json.loads(content)
        except (ValueError, RecursionError):
            record = None
        digest = record.pop(_DIGEST, None) if isinstance(record, dict) else None
        if digest is None or digest != _digest(whole_key, record) or not self.fields.accepts(record):
            discard(path, "it is damaged")
            return None
        found: dict[str, Any] = record
        return found

    def keep(self, key: Any, record: dict[str, Any]) -> None:
        """Save a record on disk under a key of JSON values. Does nothing if the disk cannot be written.

        The machine and the version of specbeam are added to the key. An invalid record is not kept.
        """
        (path, whole_key) = self._place(key)
        as_read = json.loads(json.dumps(record))
        if path is not None and self.fields.accepts(as_read):
            text = json.dumps({_DIGEST: _digest(whole_key, as_read), **as_read})
            keep(path, text.encode())
            clean(path.parent)

    def _place(self, key: Any) -> tuple[Path | None, str]:
        """Return the file of a record, None without a usable folder, and the whole key."""
        whole_key = json.dumps([key, machine(), __version__])
        name = hashlib.blake2b(whole_key.encode(), digest_size=8).hexdigest()
        place = folder()
        return place and place / f"{self.kind}-{name}.json", f"{self.kind} {whole_key}"


_DIGEST = "digest"  # the field with a hash of the others


def _digest(key: str, record: Any) -> str:
    return digest_of(key, json.dumps(record).encode()).decode()


def folder() -> Path | None:
    """Return the folder of measurements; None without a usable folder."""
    return cache_folder("figures")
