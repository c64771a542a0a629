"""Checks of transformers' report on a loaded model: tensors that are missing, unexpected or of another shape.

transformers fills in random weights for missing tensors and ignores unexpected ones, with a warning. Here both are errors,
unless the tensor is known not to affect texts.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from specbeam.core.errors import BadCheckpoint
from specbeam.models.checkpoints.headers import FLOATS, StoredTensor

_LISTED = 4  # maximum number of names in an error
# Tensors that transformers computes, or that other programs store with the weights.
_COMPUTED = re.compile(
    r"\.(original_)?inv_freq$"  # angles of rotated positions
    r"|(^|\.)(position_ids|token_type_ids|num_batches_tracked)$"
    r"|(^|\.)(en|de)coder\.version$"  # fairseq's
    r"|(^|\.)v_head\.summary\.(weight|bias)$"  # TRL's value head
    r"|(^|\.)([kvq]|kv|k_proj\.output|v_proj\.output|prob|k_cache|v_cache)_scale$"  # for rounded keys and values
)
_MASK = re.compile(r"(^|\.)\w*att\w*\.(bias|masked_bias)$")  # a causal mask is a matrix, and a bias is a vector
_MODULES = re.compile(r"^(model\.|language_model\.)*(mtp|mtp_\w+|nextn\w*)\.")
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.(.+)")
_SENSES = re.compile(
    r"^(model\.)?(vision\w*|visual\w*|image\w*|multi_modal_projector|mm_projector|audio\w*|embed_vision|embed_audio"
    r"|aligner)\."
)
_SENSE_FIELDS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual")
_SINUSOIDS = re.compile(r"(^|\.)embed_positions\.weights?$")
_SINUSOIDAL = ("marian", "m2m_100", "nllb-moe", "pegasus", "speech_to_text", "xglm", "fsmt")
_OF_WHISPER = "encoder.embed_positions.weight"  # the decoder's positions are learned
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")


def check_report(
    where: str,
    report: Mapping[str, Any],
    model: nn.Module,
    described: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Raise `BadCheckpoint`, which names tensors, if a model was loaded from files that do not fit it.

    Args:
        where: name of the files in errors.
        report: transformers' loading info with `missing_keys`, `unexpected_keys` and `mismatched_keys`.
        described: the content of config.json.
        stored: the tensors of the files.
    """
    if report["mismatched_keys"]:
        found = sorted((name, [*shape], [*wanted]) for name, shape, wanted in report["mismatched_keys"])
        said = [f"{name} is {shape} in the files, and {wanted} by config.json" for name, shape, wanted in found]
        raise BadCheckpoint(f"{where}: {_some(said)}; the configuration belongs to another model")
    kind = str(described.get("model_type"))
    is_rounded = bool(described.get("quantization_config"))
    missing = [name for name in report["missing_keys"] if not _is_made(name, kind)]
    if is_rounded:  # quantization libraries add tensors under many names
        missing = [name for name in missing if name.endswith((".weight", ".bias"))]
    if missing:
        raise BadCheckpoint(
            f"{where} lacks {_some(sorted(missing))}, which {type(model).__name__} needs; transformers would fill in random "
            "weights. Download or save the model again, or give a model that was saved with this class"
        )
    strange = [name for name in report["unexpected_keys"] if not _is_harmless(name, kind, described, stored)]
    if is_rounded:
        modules = {name for name, _ in model.named_modules()}
        strange = [name for name in strange if not _is_companion(name, modules)]
    if strange:
        raise BadCheckpoint(
            f"{where} holds {_some(sorted(strange))}, which {type(model).__name__} does not have; transformers would ignore "
            "them. The configuration belongs to another model, or the files hold more than one model"
        )


def check_types(where: str, stored: Mapping[str, StoredTensor], model: nn.Module) -> None:
    """Raise `BadCheckpoint` if files hold weights that are not floats, which transformers would convert to floats."""
    others = {name: one for name, one in stored.items() if one.type not in FLOATS}
    if not others:
        return
    is_float = {name: one.is_floating_point() for name, one in model.state_dict().items()}
    for name, one in others.items():
        if not is_float.get(name, True) or _COMPUTED.search(name) or _is_mask(name, stored):
            continue
        raise BadCheckpoint(
            f"{where}: {name} is stored as {one.type}, and config.json has no quantization_config that describes the "
            "rounding; give the original model, or files with a quantization_config"
        )


def lacking_experts(stored: Mapping[str, StoredTensor]) -> str:
    """Return the end of a message that names expert tensors missing among others of their layer; "" if none."""
    found: dict[tuple[str, str], set[int]] = {}
    for name in stored:
        if match := _EXPERT.fullmatch(name):
            found.setdefault((match[1], match[3]), set()).add(int(match[2]))
    most: dict[str, int] = {}
    for (above, _), numbers in found.items():
        most[above] = max(most.get(above, 0), *numbers)
    lacking = []
    for (above, below), numbers in found.items():
        lacking += [f"{above}{number}{below}" for number in range(most[above] + 1) if number not in numbers]
    return f"; the files lack {_some(sorted(lacking))}" if lacking else ""


def _is_made(name: str, kind: str) -> bool:
    """Return whether transformers computes a tensor, so that files may lack it."""
    if kind == "whisper":
        return name.endswith(_OF_WHISPER)
    return bool(_COMPUTED.search(name)) or (kind in _SINUSOIDAL and bool(_SINUSOIDS.search(name)))


def _is_harmless(name: str, kind: str, described: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a tensor of the files that a model does not have cannot affect texts."""
    if _is_made(name, kind) or _is_mask(name, stored):
        return True
    if _SENSES.search(name):
        return any(field in described for field in _SENSE_FIELDS)
    return bool(_MODULES.search(name)) or _is_in_module(name, described, stored)


def _is_companion(name: str, modules: Collection[str]) -> bool:
    """Return whether a tensor is a rounding library's companion of a weight: x.weight_scale, x.weight.absmax, ..."""
    above, _, last = name.rpartition(".")
    is_weight = last in ("weight", "bias")
    return not is_weight and (above in modules or above.rpartition(".")[0] in modules or ".quant_state." in name)


def _is_mask(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a tensor is the causal mask of an attention, as in old files; a bias has one dimension."""
    if not _MASK.search(name):
        return False
    found = next((one for known, one in stored.items() if f".{name}".endswith(f".{known}")), None)
    return found is not None and len(found.shape) != 1


def _is_in_module(name: str, described: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a tensor is in a multi-token prediction layer after the model's layers, as in DeepSeek and GLM."""
    match = _LAYER.match(name)
    inner = described.get("text_config")
    among = {**described, **(inner if isinstance(inner, Mapping) else {})}
    layers = among.get("num_hidden_layers")
    if match is None or not isinstance(layers, int) or int(match[1]) < layers:
        return False
    projection = f"layers.{match[1]}.eh_proj.weight"
    return any(f".{one}".endswith(f".{projection}") for one in stored)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more
