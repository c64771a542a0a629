"""Reading of 4-bit GPTQ and AWQ checkpoints without the libraries of these methods, and of DB-LLM checkpoints of 2 bits.

The result is a transformers model with a `PackedLinear` for each rounded matrix, whose numbers stay in the files; the
compiled forward packs them without another rounding (engines/cpu/nibbles.py, engines/cpu/binary_panels.py). The law of 4-bit
weights is exactly that of (number - zero point) * scale in float32 arithmetic. Libraries that multiply in float16 also round
these weights and sums. Products with matrices of 2 bits round rows to 8 bits.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from specbeam.core.errors import BadCheckpoint
from specbeam.engines.cpu.decoder import misfit_of_shape
from specbeam.engines.cpu.nibbles import fits_scales
from specbeam.engines.cpu.rounding import GROUP
from specbeam.engines.dual_binary import BINARY_GROUP, BITS_OF_WORD, DBLLM, DualBinaryMatrix
from specbeam.engines.families import family_of
from specbeam.engines.mapped import mark_mapped
from specbeam.engines.packed import BITS, PER_WORD, Layout, PackedLinear, PackedMatrix, StoredMatrix
from specbeam.models.checkpoints.boundary import reading, reading_file
from specbeam.models.checkpoints.headers import StoredTensor, file_of
from specbeam.models.checkpoints.hub import hub_lookups
from specbeam.models.checkpoints.numbers import fault_of
from specbeam.models.checkpoints.pretrained import Checkpoint
from specbeam.models.mapped_files import common_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTS = ("qweight", "qzeros", "scales", "g_idx", "planes")
_WORDS_OF = {
    ".qweight": PER_WORD,
    ".planes": BITS_OF_WORD // 2,
}  # weights in a word, by the names of tensors with numbers
_NEW_NAMES = {"embed_out.weight": "lm_head.weight"}  # transformers' names of tensors, by their names in older files
_READABLE = "specbeam itself reads 4-bit GPTQ and AWQ weights, and those of DB-LLM, on a CPU"
_Tensors = Mapping[str, StoredTensor]


class _CannotRead(Exception):
    """The reason why specbeam does not read the files itself."""


class _Packing(NamedTuple):
    """The packing of a checkpoint's matrices.

    Attributes:
        layout: the order of 4-bit numbers in words, or the name of DB-LLM's method.
        group: inputs that share a scale and a zero point; -1: all.
    """

    layout: Layout | Literal["dbllm"]
    group: int


def read_rounded(checkpoint: Checkpoint, dtype: "str | torch.dtype") -> "PreTrainedModel | str":
    """Return the model of a 4-bit checkpoint, or the reason why it is not read here.

    Args:
        dtype: type of all other weights; "auto": float32, or the files' type for more weights than `mapped.LARGEST_WIDENED`.
    """
    config = checkpoint.config
    tensors = checkpoint.stored
    try:
        packing = _packing_of(_stored_settings(config))
        if any(path.suffix != ".safetensors" for path in checkpoint.files):
            raise _CannotRead("these files are not safetensors")
        model = _without_weights(config, tensors, packing)
        words = _words_of(tensors, model) if dtype == "auto" else None
        _load(model, tensors, words or (torch.float32 if dtype == "auto" else dtype))
    except _CannotRead as found:
        return f"{_READABLE}, but {found}"
    if words is not None:
        mark_mapped(model)
    _finish(model, checkpoint)
    return model


def _stored_settings(config: Any) -> dict[str, Any]:
    """Return the settings of the rounding."""
    stored = config.quantization_config
    return dict(stored if isinstance(stored, dict) else stored.to_dict())


def _packing_of(stored: dict[str, Any]) -> _Packing:
    """Return the packing that settings describe. Raises `_CannotRead` if it is not supported."""
    method = str(getattr(stored.get("quant_method"), "value", stored.get("quant_method")))
    if method == DBLLM:
        return _Packing(DBLLM, _group_of(stored))
    if method not in ("gptq", "awq"):
        raise _CannotRead(f"these weights were rounded by {method!r}")
    bits = stored.get("bits", stored.get("w_bit"))
    if bits != BITS:
        raise _CannotRead(f"these weights have {bits} bits")
    form = str(stored.get("checkpoint_format") or stored.get("format") or stored.get("version") or "").lower()
    layouts: dict[str, Layout] = {"": "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}
    if method == "awq":
        layouts = {"": "awq", "gemm": "awq"}
    if form not in layouts or stored.get("is_marlin_format"):
        known = ", ".join(repr(one) for one in layouts if one)
        raise _CannotRead(f"the layout of these weights is {form or 'marlin'!r}; of {method}, it must be {known}")
    words = stored.get("pack_dtype") or "int32"
    if words != "int32":
        raise _CannotRead(f"these weights are packed in {words}; it must be int32")
    return _Packing(layouts[form], _group_of(stored))


def _group_of(stored: dict[str, Any]) -> int:
    """Return the size of groups that settings state; -1: all inputs."""
    group = stored.get("group_size", stored.get("q_group_size", -1))
    if not isinstance(group, int) or isinstance(group, bool):
        raise _CannotRead(f"the group_size of these weights is {group!r}; it must be a whole number")
    return group


class WithoutWeights(TorchFunctionMode):
    """A context in which new modules get matrices on the meta device, without memory."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; tensors made by `torch.empty` get no memory."""
        named = dict(kwargs or {})
        if function is torch.empty:
            named["device"] = "meta"
        return function(*args, **named)


def _without_weights(config: Any, tensors: _Tensors, packing: _Packing) -> "PreTrainedModel":
    """Return a model without weights, with a `PackedLinear` for each 4-bit matrix."""
    from transformers import AutoModelForCausalLM

    plain = copy.deepcopy(config)
    del plain.quantization_config
    with reading("the configuration does not describe a model"), WithoutWeights():
        model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32, trust_remote_code=False)
    family = family_of(model)
    if family is not None and family.transposed:
        raise _CannotRead(f"rounded matrices of {family.name} models are not supported")
    suffix = ".planes" if packing.layout == DBLLM else ".qweight"
    for whole in [one for one in tensors if one.endswith(suffix)]:
        _replace(model, whole.removesuffix(suffix), tensors, packing)
    if why := misfit_of_shape(model, None):
        raise _CannotRead(f"the compiled forward does not run this {type(model).__name__}: {why}")
    return model


def _replace(model: nn.Module, name: str, tensors: _Tensors, packing: _Packing) -> None:
    """Replace the module of this name by a `PackedLinear`. Raises `_CannotRead` if the tensors do not fit the module."""
    try:
        module: Any = model.get_submodule(name)
    except AttributeError:
        raise _CannotRead(f"the files hold numbers of {name}, and the model has no such module") from None
    if not isinstance(module, nn.Linear):
        raise _CannotRead(f"{name} is rounded, and is not an nn.Linear")
    if module is model.get_output_embeddings():  # type: ignore[operator]
        raise _CannotRead(f"{name}, the model's head, is rounded; it must have 16 or 32 bits")
    shape = (module.out_features, module.in_features)
    matrix: StoredMatrix
    if packing.layout == DBLLM:
        matrix = _binary_matrix_of(name, shape, tensors, packing)
    else:
        matrix = _checked_matrix(name, shape, tensors, packing)
    bias = module.bias
    whole = f"{name}.bias"
    if bias is None and whole in tensors and bool(_read(tensors, whole).any()):
        raise _CannotRead(f"{name} has a bias in the files and none in the model")
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, PackedLinear(matrix, bias))


def _checked_matrix(name: str, shape: tuple[int, int], tensors: _Tensors, packing: _Packing) -> PackedMatrix:
    """Return the place of a 4-bit matrix in the files. Raises `_CannotRead` if panels cannot hold it exactly."""
    matrix = _matrix_of(name, shape, tensors, packing)
    _check_order(matrix, tensors)
    _check_scales(matrix, tensors)
    return matrix


def _binary_matrix_of(name: str, shape: tuple[int, int], tensors: _Tensors, packing: _Packing) -> DualBinaryMatrix:
    """Return the place of a matrix of two binary matrices in the files. Raises `_CannotRead` if tensors do not fit."""
    columns, depth = shape
    if packing.group != BINARY_GROUP or depth % BINARY_GROUP:
        raise _CannotRead(
            f"{name} has {depth} inputs in groups of {packing.group}; a group must have {BINARY_GROUP} and divide the inputs"
        )
    wanted = {
        "planes": ("I32", (2, depth // BITS_OF_WORD, columns)),
        "scales": ("BF16", (2, depth // BINARY_GROUP, columns)),
    }
    for part, (kind, expected) in wanted.items():
        found = tensors.get(f"{name}.{part}")
        if found is None or found.shape != expected or found.type != kind:
            what = "is missing" if found is None else f"is {found.type}{[*found.shape]}"
            raise _CannotRead(f"{name}.{part} {what}; it must be {kind}{[*expected]}")
    _check_numbers(f"{name}.scales", _read(tensors, f"{name}.scales"))
    paths = {tensors[f"{name}.{part}"].path for part in wanted}
    if len(paths) > 1:
        raise _CannotRead(f"the tensors of {name} are in several files")
    return DualBinaryMatrix(paths.pop(), name, shape)


def _matrix_of(name: str, shape: tuple[int, int], tensors: _Tensors, packing: _Packing) -> PackedMatrix:
    """Return the place of a matrix in the files. Raises `_CannotRead` if tensors lack the types and shapes of its layout."""
    assert packing.layout != DBLLM
    columns, depth = shape
    group = depth if packing.group == -1 else packing.group
    if group <= 0 or group % GROUP or depth % group:
        raise _CannotRead(
            f"{name} has {depth} inputs in groups of {group}; a group must be a multiple of {GROUP} and divide the inputs"
        )
    groups = depth // group
    words = (depth, columns // PER_WORD) if packing.layout == "awq" else (depth // PER_WORD, columns)
    wanted = {"qweight": words, "qzeros": (groups, columns // PER_WORD), "scales": (groups, columns)}
    for part, expected in wanted.items():
        found = tensors.get(f"{name}.{part}")
        if found is None or found.shape != expected or (part != "scales" and found.type != "I32"):
            what = "is missing" if found is None else f"is {found.type}{[*found.shape]}"
            raise _CannotRead(f"{name}.{part} {what}; {BITS} bits in groups of {group} make it {[*expected]}")
    paths = {tensors[f"{name}.{part}"].path for part in wanted}
    if len(paths) > 1:
        raise _CannotRead(f"the tensors of {name} are in several files")
    return PackedMatrix(paths.pop(), name, packing.layout, shape, groups)


def _check_order(matrix: PackedMatrix, tensors: _Tensors) -> None:
    """Raise `_CannotRead` if the groups of a matrix are not in the order of its inputs."""
    whole = f"{matrix.name}.g_idx"
    if whole not in tensors:
        return
    depth = matrix.shape[1]
    in_order = np.arange(depth) // (depth // matrix.groups)
    if not np.array_equal(_read(tensors, whole).numpy(), in_order):
        raise _CannotRead(f"the groups of {matrix.name} are out of order (desc_act: g_idx does not ascend)")


def _check_scales(matrix: PackedMatrix, tensors: _Tensors) -> None:
    """Raise `_CannotRead` if the engine's panels cannot hold the scales of a matrix exactly."""
    whole = f"{matrix.name}.scales"
    kind = tensors[whole].type
    _check_numbers(whole, _read(tensors, whole))
    if kind in ("F16", "BF16"):
        return
    if kind != "F32" or not fits_scales(_read(tensors, whole).numpy()):
        raise _CannotRead(f"{whole} is {kind} with numbers that float16 cannot hold")


def _read(tensors: _Tensors, name: str) -> torch.Tensor:
    from safetensors import safe_open

    path = tensors[name].path
    with reading_file(path), safe_open(path, framework="pt") as file:
        found: torch.Tensor = file.get_tensor(name)
    return found


def _check_numbers(name: str, found: torch.Tensor) -> None:
    """Raise `BadCheckpoint` unless a tensor holds finite floats."""
    if fault := fault_of(found):
        raise BadCheckpoint(f"{name} {fault}; it must hold finite floats: download or convert the files again")


def _is_packed(name: str, model: nn.Module) -> bool:
    above, _, last = name.rpartition(".")
    return last in _PARTS and isinstance(dict(model.named_modules()).get(above), PackedLinear)


def _words_of(tensors: _Tensors, model: nn.Module) -> torch.dtype | None:
    """Return the type of the files if weights keep it; None if they are converted to float32. See `stored_type`."""
    whole = [one for name, one in tensors.items() if not _is_packed(name, model)]
    packed = 0
    for name, one in tensors.items():
        packed += _WORDS_OF.get(name[name.rfind(".") :], 0) * math.prod(one.shape)
    numbers = packed + sum(math.prod(one.shape) for one in whole)
    return common_type(whole, numbers)


def _load(model: Any, tensors: _Tensors, dtype: Any) -> None:
    """Load all weights except the 4-bit matrices. Raises `_CannotRead` if the files hold other weights than the model."""
    words = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    own = model.state_dict()
    state = {}
    for name in tensors:
        goal = name if name in own else _NEW_NAMES.get(name, name)
        if goal in own:
            state[goal] = _checked(name, _read(tensors, name), own[goal], words)
        elif not _is_packed(name, model) and not _is_ignorable(name, tensors):
            raise _CannotRead(f"the files hold {name}, which the model does not have")
    unloaded = model.load_state_dict(state, strict=False, assign=True).missing_keys
    model.tie_weights(missing_keys={*unloaded}, recompute_mapping=False)  # a head in the files is not tied
    weights = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(weights[name]) for name in state if name in weights}
    missing = [name for name in unloaded if id(weights.get(name)) not in loaded]  # tied weights are not missing
    if missing:
        raise _CannotRead(f"the files lack {', '.join(missing[:3])}")


def _checked(name: str, found: torch.Tensor, own: torch.Tensor, words: torch.dtype) -> torch.Tensor:
    """Return a tensor of the files, floats as `words`. Raises `BadCheckpoint` if its shape is not the model's."""
    if found.shape != own.shape:
        raise BadCheckpoint(f"{name} is {[*found.shape]} in the files, and {[*own.shape]} by config.json")
    if not own.is_floating_point():
        return found
    _check_numbers(name, found)
    return found.to(words)


def _is_ignorable(name: str, tensors: _Tensors) -> bool:
    """Return whether a tensor unknown to a model may be ignored: rotary angles, or a bias of zeros."""
    return name.endswith(".inv_freq") or (name.endswith(".bias") and not bool(_read(tensors, name).any()))


def _finish(model: Any, checkpoint: Checkpoint) -> None:
    """Set the attributes that transformers sets when it loads a model, such as its name and generation config."""
    from transformers import GenerationConfig

    name = checkpoint.name
    model.config.quantization_config = _stored_settings(checkpoint.config)
    model.config._name_or_path = name
    model.name_or_path = name
    model.config.dtype = model.dtype
    if file_of(name, "generation_config.json") is not None:
        with reading(f"the generation_config.json of {name} cannot be read"), hub_lookups(name):
            model.generation_config = GenerationConfig.from_pretrained(name)
    model.eval()
