"""What a path of a model holds, and errors with advice for paths without a loadable model. Imports nothing heavy."""

import re
from pathlib import Path
from typing import Any

from specbeam.core.errors import MissingFile, NotSupported, SpecbeamError
from specbeam.models.checkpoints.boundary import json_object

BUNDLED = Path(__file__).parents[2] / "bundled"  # the pair that comes with specbeam
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
_GGUF = ".gguf"
_PART_OF_GGUF = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_FOLDER = "give the folder that save_pretrained wrote"
_CONVERT = "; specbeam reads the safetensors or pytorch_model.bin of transformers"
_FOREIGN = {  # patterns of files of other programs, with descriptions
    "*.gguf": "a GGUF model of llama.cpp{where}; give the file itself",
    "consolidated*.pth": "Meta's own format ({file}); give the model in transformers' format, whose folder holds "
    "config.json and model.safetensors",
    "consolidated*.safetensors": "Mistral's own format ({file}); give the model in transformers' format, whose folder holds "
    "config.json and model.safetensors",
    "*.onnx": "an ONNX model ({file})" + _CONVERT,
    "onnx/*.onnx": "an ONNX model ({file})" + _CONVERT,
    "tf_model*.h5": "only TensorFlow weights ({file})" + _CONVERT + "; older releases of transformers convert them",
    "saved_model.pb": "a TensorFlow model ({file})" + _CONVERT,
    "flax_model*.msgpack": "only Flax weights ({file})" + _CONVERT + "; older releases of transformers convert them",
    "*.ckpt": "a training checkpoint ({file})" + _CONVERT,
}
_OF_FILES = {
    _GGUF: "a GGUF file, which only `load` without device_map and tensor_parallel takes",
    ".onnx": "an ONNX file" + _CONVERT,
    ".pth": "a file of weights; give a folder with config.json and weights in transformers' format",
}


def gguf_in(source: Any) -> Path | None:
    """Return the GGUF file that a path names, or the only one in a folder without a model of transformers; None if neither.

    Raises `MissingFile` if there is none or a folder holds several, `NotSupported` for a file that is a part of a model.
    """
    path = Path(source).expanduser()
    if path.suffix.lower() == _GGUF and not path.exists():
        raise MissingFile(f"there is no file {path}; give a GGUF file, or a folder with one")
    if path.suffix.lower() == _GGUF and path.is_file():
        _check_is_whole(path)
        return path
    if not path.is_dir() or (path / CONFIG).is_file() or (path / ADAPTER).is_file():
        return None
    found = sorted(one for one in path.iterdir() if one.suffix.lower() == _GGUF and one.is_file())
    models = [one for one in found if not one.name.lower().startswith("mmproj")]  # those read pictures
    for one in models:
        _check_is_whole(one)
    if len(models) > 1:
        names = ", ".join(one.name for one in models[:4]) + (" and more" if len(models) > 4 else "")
        raise MissingFile(f"{path} holds {len(models)} GGUF files ({names}); give one of them")
    return models[0] if models else None


def _check_is_whole(path: Path) -> None:
    """Raise `NotSupported` if the name of a file is that of a part of a model."""
    part = _PART_OF_GGUF.search(path.name)
    if part is not None and int(part[2]) > 1:
        raise NotSupported(
            f"{path} is part {int(part[1])} of {int(part[2])} of a split GGUF model, and specbeam reads whole files; join "
            "them with llama-gguf-split --merge, and give the result"
        )


def checked_folder(path: Path) -> Path:
    """Return the folder of a model. Raises an error that names the content of the path if it is something else."""
    if path.is_file():
        raise MissingFile(f"{path} is {_OF_FILES.get(path.suffix.lower(), 'a file, not a folder; ' + _FOLDER)}")
    if not path.is_dir():
        raise MissingFile(f"there is no folder {path}; give a folder that save_pretrained wrote, or a hub id")
    if (path / ADAPTER).is_file():
        raise adapter(str(path), json_object(path / ADAPTER))
    if (path / "model_index.json").is_file():
        raise NotSupported(f"{path} holds a diffusers pipeline (model_index.json), which generates images, not text")
    if (path / "modules.json").is_file():
        raise NotSupported(
            f"{path} holds a sentence-transformers model (modules.json), which computes embeddings, not text"
        )
    if not (path / CONFIG).is_file():
        raise _without_config(path)
    return path


def adapter(where: str, described: dict[str, Any]) -> NotSupported:
    """Return the error where an adapter cannot be merged, given the content of adapter_config.json."""
    kind = adapter_kind(described)
    base = described.get("base_model_name_or_path")
    return NotSupported(
        f"{where} holds a {kind} adapter ({ADAPTER}), which changes {base or 'another model'}; merge the two with peft "
        "(PeftModel.from_pretrained, then merge_and_unload and save_pretrained) and give the merged model"
    )


def adapter_kind(described: dict[str, Any]) -> str:
    """Return the name of an adapter's method, given the content of adapter_config.json."""
    return str(described.get("peft_type") or "LoRA").replace("LORA", "LoRA")


def without_weights(where: str, folder: Path | None) -> SpecbeamError:
    """Return the error for a model with a configuration and without weights that transformers reads."""
    if folder is not None and (what := _foreign(folder)):
        return NotSupported(f"{where} holds {what}")
    return MissingFile(
        f"{where} holds {CONFIG} and no weights: neither model.safetensors nor pytorch_model.bin, nor an index of shards"
    )


def _without_config(path: Path) -> SpecbeamError:
    """Return the error for a folder without config.json."""
    if what := _foreign(path):
        return NotSupported(f"{path} holds {what}")
    states = sorted(path.glob("checkpoint-*/config.json"))
    if states:
        return MissingFile(f"{path} has no {CONFIG}, but {states[-1].parent.name} has one; give {states[-1].parent}")
    held = sorted(one.name for one in path.iterdir())
    there = "it is empty"
    if held:
        there = f"it holds {', '.join(held[:4])}" + (" and more" if len(held) > 4 else "")
    return MissingFile(f"{path} has no {CONFIG} ({there}); {_FOLDER}")


def _foreign(path: Path) -> str:
    """Return a description of a folder's files of other programs; "" if there are none."""
    for pattern, what in _FOREIGN.items():
        found = sorted(path.glob(pattern))
        if found:
            name = found[0].relative_to(path)
            return what.format(file=name, where=f" ({name})")
    return ""
