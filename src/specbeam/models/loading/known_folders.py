"""Folders that `load` has loaded and checked before, whose models and tokenizers then have stand-ins (models/stand_ins.py).

The first load of a folder imports transformers, and compares the compiled forward with transformers' own. What it finds
is described in a cache file: the configuration with its defaults, and the modules that hold the weights. Later loads read
this description and the weights. It counts for the same files, the same versions of the packages and the same sources of
specbeam only.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specbeam.core import compiling
from specbeam.core.caches.files import clean, read_sealed, save_sealed
from specbeam.core.caches.folders import cache_folder
from specbeam.core.errors import BadCheckpoint
from specbeam.core.measure.saved_figures import model_key, source_key, weights_key
from specbeam.engines.choices import is_rounding
from specbeam.engines.eligibility import has_own_encoder
from specbeam.engines.families import (
    FIXED_ROPES,
    Architecture,
    ModelFamily,
    angle_tables,
    architecture_of,
    bias_of_tokens,
    body_of,
    bucket_settings,
    distances_read,
    embedding_of,
    encoder_family,
    family_of,
    head_of,
    layers_in,
    matrix_at,
    norm_at,
    own_scale,
    parts_of,
    places_of,
    source_parts,
    unplaced_in,
)
from specbeam.engines.mapped import is_mapped, mapped_files, mark_mapped
from specbeam.engines.packed import matrices_of
from specbeam.engines.torch.in_float32 import as_loaded
from specbeam.models.adapters import is_merged
from specbeam.models.checkpoints.folders import ADAPTER, CONFIG
from specbeam.models.checkpoints.headers import ONE_FILE, StoredTensor, shards_of, tensors_in
from specbeam.models.checkpoints.hub import snapshot_of
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.heads.mtp import is_own_modules
from specbeam.models.heads.read import is_head
from specbeam.models.huggingface import HuggingFaceLM, prepare_to_score
from specbeam.models.loading.models import is_local, model_of, name_or_path
from specbeam.models.loading.tokenizers import read_tokenizer
from specbeam.models.stand_ins import (
    MODULES,
    DistanceRanges,
    Sines,
    StandInEncoder,
    StandInModel,
    StandInTokenizer,
    whole,
    written,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOG = logging.getLogger("specbeam.loading")
_PACKAGES = ("numba", "safetensors", "tokenizers", "torch", "transformers")
_INDEX = "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"
_DEPRECATED = ("torch_dtype", "use_return_dict")  # settings that transformers warns of when they are read
_OLD_NAMES = {"lm_head.weight": "embed_out.weight"}  # of GPT-NeoX
_TOGETHER = 1 << 22  # number of weights that are compared at a time, so that few pages of mapped files are in memory
_MOST_WRITTEN = 1 << 20  # number of weights
_KEY = "_specbeam_folder"  # attribute of a model object: the key of its folder before it was read
_PLAIN = (bool, int, float, str, type(None))
# Texts on which the tokenizer of a folder is compared with transformers' before it has a stand-in.
_TEXTS = (
    "A dog is running.",
    " two  spaces,\ttabs\n\nand lines ",
    "Ein Hund läuft; don't we'll 12345 6.7%",
    "café été e\u0301 ﬁ Ａ",
    "狗在跑。日本語 한국어 العربية हिन्दी 🙂👩‍👩‍👧",
    "def f(x):\n    return x ** 2  # <|endoftext|> </s> <s> [INST] <pad>",
)


class _Unfit(Exception):
    """A model or tokenizer can have no stand-in, for the reason in the message."""


def model_at_hand(
    source: Any, dtype: "str | torch.dtype", device: torch.device, may_map: bool
) -> "PreTrainedModel | StandInModel":
    """Return the stand-in of a model in a folder that was loaded and checked before; otherwise what `model_of` returns.

    Takes the arguments and raises the errors of `model_of`.
    """
    folder = _folder_of(source) if _is_usual(dtype, device, may_map) else None
    if folder is None:
        return model_of(source, dtype, device, may_map=may_map)
    key = _key("model", folder)
    found = _described(key)
    if found is not None and "unfit" not in found:
        name = name_or_path(source)
        load_whole = partial(_whole_model, name, folder.resolve(), key, dtype, device, may_map)
        return _stand_in(found, folder, name, load_whole)
    model = model_of(source, dtype, device, may_map=may_map)
    object.__setattr__(model, _KEY, key)
    return model


def remember_model(source: Any, lm: Any) -> None:
    """Describe the model of a folder for later loads, after `load` has checked its language model.

    Args:
        source: as given to `model_at_hand`.
        lm: the checked language model.
    """
    is_usual = type(lm) in (HuggingFaceLM, EncoderDecoderLM) and lm.engine == "compiled" and lm.shared is None
    is_compiled = is_usual and not (type(lm) is EncoderDecoderLM and lm.engine_note)  # the encoder, too
    folder = _folder_of(source)
    key = vars(lm.given_model).get(_KEY) if is_compiled else None
    if folder is not None and key is not None and key == _key("model", folder):  # unchanged since it was read
        _describe(key, partial(_fitting_model, lm.given_model, folder))


def tokenizer_at_hand(source: Any) -> Any:
    """Return the stand-in of a tokenizer in a folder that was loaded before; otherwise what `read_tokenizer` returns.

    Takes the argument and raises the errors of `read_tokenizer`.
    """
    folder = _folder_of(source)
    if folder is None or not compiling.AVAILABLE:
        return read_tokenizer(source)
    key = _key("tokenizer", folder)
    found = _described(key)
    if found is not None and "unfit" not in found:
        load_whole = partial(_whole_tokenizer, str(source), folder.resolve(), key)
        return StandInTokenizer(found, _backend(found, folder), str(source), load_whole)
    tokenizer = read_tokenizer(source)
    now = _folder_of(source)  # of a hub id, another one if it has a new revision
    if tokenizer is not None and now is not None and key == _key("tokenizer", now):
        _describe(key, partial(_fitting_tokenizer, tokenizer, folder))
    return tokenizer


def _whole_model(
    name: str, folder: Path, key: str, dtype: "str | torch.dtype", device: torch.device, may_map: bool
) -> "PreTrainedModel":
    """Return the model object that a stand-in stood in for, prepared like one that `load` has used from the start.

    Args:
        name: its path or hub id.
        folder: the absolute path of its files.
        key: of these files when the stand-in was made.

    Raises `BadCheckpoint` if the files have changed.
    """
    _check_is_unchanged("model", name, folder, key)
    model = model_of(folder, dtype, device, may_map=may_map)
    model.name_or_path = model.config._name_or_path = name
    prepare_to_score(model)
    return model


def _whole_tokenizer(name: str, folder: Path, key: str) -> Any:
    """Return the tokenizer of transformers that a stand-in stood in for; see `_whole_model`."""
    _check_is_unchanged("tokenizer", name, folder, key)
    tokenizer: Any = read_tokenizer(folder)
    tokenizer.name_or_path = name
    return tokenizer


def _check_is_unchanged(kind: str, name: str, folder: Path, key: str) -> None:
    """Raise `BadCheckpoint` if the files of a folder have changed since `_key` returned this key."""
    if not folder.is_dir() or _key(kind, folder) != key:
        raise BadCheckpoint(
            f"the files of {name} have changed since they were loaded, and transformers' object of its {kind}, which is "
            "needed now, was not read before; load the pair again"
        )


def _is_usual(dtype: "str | torch.dtype", device: torch.device, may_map: bool) -> bool:
    """Return whether the compiled forward can run a model with these options of `load` and the type of its files."""
    return compiling.AVAILABLE and dtype == "auto" and device.type == "cpu" and may_map


def is_model_folder(source: Any) -> bool:
    """Return whether a source of `load` is the folder or hub id of a model, and not of a draft head or a way to draft."""
    is_named = isinstance(source, str) and (source == "swift" or is_rounding(source) or is_own_modules(source))
    return not is_named and _folder_of(source) is not None and not is_head(source)


def _folder_of(source: Any) -> Path | None:
    """Return the folder of a model in transformers' format, for a hub id that of the hub's cache; None for anything else."""
    if not isinstance(source, (str, Path)):
        return None
    path: Path | None = Path(source).expanduser()
    if not is_local(source):
        path = snapshot_of(source)
    is_whole = path is not None and (path / CONFIG).is_file() and not (path / ADAPTER).is_file()
    return path if is_whole else None


# Descriptions on disk.


def _described(key: str) -> dict[str, Any] | None:
    """Return the description of a folder's model or tokenizer by its key; None if there is none."""
    place = cache_folder("folders")
    if place is None:
        return None
    content = read_sealed(_file(place, key), key)
    if content is None:
        return None
    found: dict[str, Any] = json.loads(content)
    return found


def _describe(key: str, made: Callable[[], dict[str, Any]]) -> None:
    """Save what `made` returns as the description of a folder, or the reason why there is none."""
    place = cache_folder("folders")
    if place is None or _described(key) is not None:
        return
    try:
        found = made()
    except Exception as error:  # of any kind: transformers serves this folder in later loads, too
        LOG.info("transformers loads this folder each time: %s: %s", type(error).__name__, error)
        found = {"unfit": str(error)}
    save_sealed(_file(place, key), key, json.dumps(found).encode())
    clean(place)


def _file(place: Path, key: str) -> Path:
    return place / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.json"


def _key(kind: str, folder: Path) -> str:
    """Return a text that changes with the files of a folder, with the packages, and with specbeam's sources."""
    files = []
    for path in sorted([*folder.iterdir(), *folder.glob("*/*")]):  # chat templates may be in a folder of their own
        if path.is_file():
            status = path.stat()
            name = path.relative_to(folder).as_posix()
            files.append([name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])
    return json.dumps([kind, str(folder.resolve()), files, _versions()])


@cache
def _versions() -> list[Any]:
    from specbeam.core.compiling.code_cache import compiled_by

    packages = [version(name) for name in _PACKAGES]
    return [*packages, *compiled_by(), source_key("models", "engines"), torch.backends.cpu.get_cpu_capability()]


# Models.


def _fitting_model(model: Any, folder: Path) -> dict[str, Any]:
    """Return the description of a model whose stand-in has all that the compiled forward reads.

    Raises an error of any kind otherwise.
    """
    stored = _stored(folder)
    if any(len(one.path.relative_to(folder).parts) > 2 for one in stored.values()):
        raise _Unfit("the key of its folder does not cover files below its subfolders")
    described = describe_model(model, stored)
    stand_in = _stand_in(described, folder, str(folder), partial(whole, model))
    if why := difference(stand_in, model):
        raise _Unfit(why)
    return described


def _stand_in(described: Mapping[str, Any], folder: Path, name: str, load_whole: Callable[[], Any]) -> StandInModel:
    """Return the stand-in of the model in a folder; see `StandInModel.of`."""
    model = StandInModel.of(described, name, _Weights(folder, described["is_mapped"]), load_whole)
    if described["is_mapped"]:
        mark_mapped(model)
    return model


class _Weights:
    """Reads the tensors of a folder: as float32, or as they are in the mapped files.

    Args:
        stays_mapped: whether the tensors stay in the files.
    """

    def __init__(self, folder: Path, stays_mapped: bool) -> None:
        self.stored = _stored(folder)
        self.stays_mapped = stays_mapped
        self.files: dict[Path, Any] = {}

    def __call__(self, name: str) -> Tensor:
        """Return a tensor by its name in the files."""
        from safetensors import safe_open

        path = self.stored[name].path
        if path not in self.files:
            self.files[path] = safe_open(path, framework="pt")
        found: Tensor = self.files[path].get_tensor(name)
        return found if self.stays_mapped else found.float()


def _stored(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors of a folder."""
    one = folder / ONE_FILE
    files = [one] if one.is_file() else shards_of(str(folder), folder / _INDEX)
    return tensors_in(files)


def describe_model(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the description from which `StandInModel.of` makes the stand-in of a model.

    Args:
        stored: the tensors of its files.

    Raises `_Unfit` if the model has no stand-in.
    """
    config = model.config
    family = family_of(model)
    if family is None or config.get_text_config() is not config or matrices_of(model) or is_merged(model):
        raise _Unfit("its family or its files need transformers")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in FIXED_ROPES:
        raise _Unfit(f"its rope_type is {rope.get('rope_type')!r}")
    names = _names_in_files(model, stored)
    made = {
        path: one
        for path, one in model.named_parameters()
        if id(one) not in names and path.endswith("embed_positions.weight") and _is_small(one)
    }
    names |= {id(one): path for path, one in made.items()}
    paths = {id(module): path for path, module in model.named_modules()}
    halves = {}
    if has_own_encoder(model):
        halves = {"encoder": paths[id(model.get_encoder())], "decoder": paths[id(model.get_decoder())]}
    return {
        "class": type(model).__name__,
        "config": {"settings": _settings_of(config), "stated": json.loads(json.dumps(config.to_dict()))},
        "generation_config": _generation_of(model),
        "paths": {
            "base": paths[id(model.base_model)],
            "input": paths[id(model.get_input_embeddings())],
            "output": paths[id(model.get_output_embeddings())],
            **halves,
        },
        "modules": list(_parts_of(model, names)),
        "made": {path: written(one) for path, one in made.items()},
        "buffers": {name: written(one) for name, one in model._buffers.items() if one is not None and _is_small(one)},
        "is_mapped": is_mapped(model),
    }


def _is_small(one: Tensor) -> bool:
    """Return whether a tensor may be in a description, such as Marian's computed positions and its biases of tokens."""
    return one.dtype == torch.float32 and one.numel() <= _MOST_WRITTEN


def _names_in_files(model: Any, stored: Mapping[str, StoredTensor]) -> dict[int, str]:
    """Return the name in the files of each weight, by its id; tied weights have one name."""
    found: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        bare = name.removeprefix(f"{model.base_model_prefix}.")
        for own in (name, bare, _OLD_NAMES.get(name, name)):
            if own in stored and stored[own].shape == tuple(weight.shape):
                found.setdefault(id(weight), own)
    return found


def _parts_of(model: Any, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Yield the descriptions of all modules, parents first."""
    for path, module in model.named_modules():
        if not path:
            continue
        weights = {}
        for name, one in module._parameters.items():
            if one is not None and id(one) not in names:
                raise _Unfit(f"its files hold {path}.{name} under another name or in parts")
            weights[name] = None if one is None else names[id(one)]
        part: dict[str, Any] = {"path": path, "weights": weights}
        if "inv_freq" in module._buffers:
            part |= {"frequencies": module.inv_freq.float().tolist(), "factor": float(module.attention_scaling)}
        else:
            kind = next((name for name, one in MODULES.items() if isinstance(module, one)), "")
            numbers = {name: one.item() for name, one in module._buffers.items() if one is not None and one.dim() == 0}
            part |= {"kind": kind, "numbers": numbers, **_settings_in(vars(module))}
            if hasattr(module, "get_embedding"):
                part["kind"] = Sines.__name__
            if hasattr(module, "_relative_position_bucket"):
                part |= {"kind": DistanceRanges.__name__, **_ranges_of(module)}
            if has_own_encoder(model) and module is model.get_encoder():
                part["kind"] = StandInEncoder.__name__
                part["settings"]["main_input_name"] = module.main_input_name
        yield part


def _settings_in(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values that are numbers, texts, flags, or tuples of these, without private ones."""
    public = {name: value for name, value in values.items() if not name.startswith("_")}
    tuples = {name: value for name, value in public.items() if type(value) is tuple}
    return {
        "settings": {name: value for name, value in public.items() if isinstance(value, _PLAIN)},
        "tuples": {name: value for name, value in tuples.items() if all(isinstance(one, _PLAIN) for one in value)},
    }


def _ranges_of(attention: Any) -> dict[str, Any]:
    """Return the ranges of the distances that an attention module reads (`DistanceRanges`)."""
    back = distances_read(attention)
    ranges = attention._relative_position_bucket(-back, **bucket_settings(attention))
    return {"ranges": ranges.tolist(), "first": int(back[0])}


def _settings_of(config: Any) -> dict[str, Any]:
    """Return all settings of a configuration that JSON can hold, defaults and computed ones included."""
    found = {"_attn_implementation": config._attn_implementation}
    for name in (*dir(config), *config.attribute_map):
        if name.startswith("_") or name in _DEPRECATED or not hasattr(config, name):
            continue
        value = getattr(config, name)
        if not callable(value) and _survives(value):
            found[name] = value
    return found


def _generation_of(model: Any) -> dict[str, Any] | None:
    """Return the fields of a model's generation config, and the fields of a generation config with defaults only."""
    from transformers import GenerationConfig

    config = getattr(model, "generation_config", None)
    if config is None:
        return None
    each = {"settings": vars(config), "empty": vars(GenerationConfig())}
    public = {
        part: {name: value for name, value in fields.items() if not name.startswith("_")}
        for part, fields in each.items()
    }
    return _as_read(public)


def _survives(value: Any) -> bool:
    """Return whether a value is the same after it was written and read as JSON."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _as_read(value: Any) -> Any:
    """Return a value as JSON reads it. Raises `_Unfit` if it is another one."""
    if not _survives(value):
        raise _Unfit("its configuration holds values that JSON cannot keep")
    return json.loads(json.dumps(value))


def difference(stand_in: Any, model: Any) -> str:
    """Return the first difference between a stand-in and its model in what the compiled forward reads; "" for none."""
    if model_key(stand_in) != model_key(model) or weights_key(stand_in) != weights_key(model):
        return "its configuration or its weights differ"
    with as_loaded(model):
        of = architecture_of(model)
    with as_loaded(stand_in):
        ours = architecture_of(stand_in)
    if why := _difference_of_settings(ours, of):
        return why
    if has_own_encoder(model):
        family = encoder_family(of.family)
        if why := _difference_of_settings(architecture_of(stand_in, family), architecture_of(model, family)):
            return f"of the encoder, {why}"
    files = mapped_files(stand_in), mapped_files(model)
    for found, wanted in zip(_numbers_of(stand_in, ours), _numbers_of(model, of), strict=True):
        if found.dtype != wanted.dtype or found.shape != wanted.shape:
            return "the shape of a weight differs"
        rows = max(_TOGETHER // max(math.prod(wanted.shape[1:]), 1), 1)
        for part, other in zip(found.split(rows), wanted.split(rows), strict=True):
            if not torch.equal(part, other):
                return "a weight differs"
            files[0].release([part])
            files[1].release([other])
    return ""


def _difference_of_settings(ours: Architecture, theirs: Architecture) -> str:
    """Return the first difference between two architectures, their biases aside; "" for none."""
    for name, value in vars(theirs).items():
        if name != "biases" and vars(ours)[name] != value:
            return f"{name} is {vars(ours)[name]}, and must be {value}"
    return ""


def _numbers_of(model: Any, of: Architecture) -> Iterator[Tensor]:
    """Yield all numbers of a model that the compiled forward reads."""
    family = of.family
    body = body_of(model, family)
    embedding = embedding_of(model, family)
    yield torch.tensor([own_scale(embedding), unplaced_in(body, family), model.num_parameters()], dtype=torch.float64)
    yield from of.biases
    yield from (embedding.weight, head_of(model), places_of(body, of), bias_of_tokens(model, None))
    yield from (norm_at(body, path, family) for path in (family.first_norm, family.final_norm))
    yield from (one for name in (family.enter, family.leave) if (one := matrix_at(model, name, family)) is not None)
    yield from angle_tables(model, of, 0)
    for layer in layers_in(model, family):
        yield from _tensors_in(parts_of(layer, of))
        if family.cross:
            yield from _tensors_in(source_parts(layer, of))
    if has_own_encoder(model):
        yield from _numbers_of_encoder(model, encoder_family(family))


def _numbers_of_encoder(model: Any, family: ModelFamily) -> Iterator[Tensor]:
    """Yield all numbers of an encoder that the compiled encoder reads.

    Args:
        family: that of the encoder.
    """
    body = body_of(model, family)
    of = architecture_of(model, family)
    yield from of.biases
    yield places_of(body, of)
    yield from (norm_at(body, path, family) for path in (family.first_norm, family.final_norm))
    yield from angle_tables(model, of, 0)
    if body.main_input_name == "input_ids":
        yield torch.tensor([own_scale(body.embed_tokens), unplaced_in(body, family)], dtype=torch.float64)
        yield body.embed_tokens.weight
    else:
        yield from (one for part in (body.conv1, body.conv2) for one in (part.weight, part.bias))
    for layer in layers_in(model, family):
        yield from _tensors_in(parts_of(layer, of))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    else:
        for one in value:
            yield from _tensors_in(one)


# Tokenizers.


def _fitting_tokenizer(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Return the description of a tokenizer whose stand-in encodes and decodes like it.

    Raises an error of any kind otherwise.
    """
    described = describe_tokenizer(tokenizer)
    written = tokenizer.backend_tokenizer.to_str()
    from tokenizers import Tokenizer

    file = folder / _TOKENIZER
    if not file.is_file() or _unpadded(Tokenizer.from_file(str(file))).to_str() != written:
        described["backend"] = written  # transformers has changed it
    stand_in = StandInTokenizer(described, _backend(described, folder), str(folder), partial(whole, tokenizer))
    if why := difference_of_tokens(stand_in, tokenizer):
        raise _Unfit(why)
    return described


def _backend(described: Mapping[str, Any], folder: Path) -> Any:
    """Return the tokenizer of the `tokenizers` library in a folder, as transformers has made it."""
    from tokenizers import Tokenizer

    if (written := described.get("backend")) is not None:
        return _unpadded(Tokenizer.from_str(written))
    return _unpadded(Tokenizer.from_file(str(folder / _TOKENIZER)))


def _unpadded(backend: Any) -> Any:
    """Let a tokenizer neither pad nor truncate, like transformers without options for it."""
    backend.no_padding()
    backend.no_truncation()
    return backend


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return the description from which `StandInTokenizer` makes the stand-in of a tokenizer.

    Raises `_Unfit` if the tokenizer does more than its backend.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    kind = type(tokenizer)
    for method in ("__call__", "__len__", "_decode", "_encode_plus", "decode", "get_vocab"):
        if getattr(kind, method) is not getattr(TokenizersBackend, method, None):
            raise _Unfit(f"{kind.__name__} has a {method} of its own")
    if tokenizer.clean_up_tokenization_spaces or tokenizer.split_special_tokens:
        raise _Unfit("it cleans up spaces or splits special tokens")
    _unpadded(tokenizer.backend_tokenizer)
    named = ("all_special_ids", "all_special_tokens", "chat_template", "model_max_length")
    tokens = ("bos_token", "eos_token", "pad_token", "unk_token")
    settings = {name: getattr(tokenizer, name, None) for name in (*named, *tokens, *(f"{one}_id" for one in tokens))}
    return {"settings": _as_read(settings)}


def difference_of_tokens(stand_in: StandInTokenizer, tokenizer: Any) -> str:
    """Return the first difference between a tokenizer and its stand-in on some texts; "" for none."""
    if len(stand_in) != len(tokenizer) or stand_in.get_vocab() != tokenizer.get_vocab():
        return "the tokens differ"
    special = "".join(tokenizer.all_special_tokens)
    for text in (*_TEXTS, special, f" {special} a"):
        for adds in (True, False):
            tokens = tokenizer(text, add_special_tokens=adds, verbose=False)["input_ids"]
            if stand_in(text, add_special_tokens=adds)["input_ids"] != tokens:
                return f"the tokens of {text!r} differ"
            for skips in (True, False):
                if stand_in.decode(tokens, skip_special_tokens=skips) != tokenizer.decode(
                    tokens, skip_special_tokens=skips
                ):
                    return f"the text of the tokens of {text!r} differs"
    return ""
