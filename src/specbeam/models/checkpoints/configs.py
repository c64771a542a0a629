"""Reading of model configurations, with checks that a model can be loaded before memory is allocated."""

from collections.abc import Iterator, Mapping
from typing import Any

from specbeam.core.errors import BadCheckpoint, MissingFile, NotSupported, UnsupportedModel
from specbeam.core.names import hint
from specbeam.models.checkpoints.boundary import json_object, reading
from specbeam.models.checkpoints.folders import ADAPTER, CONFIG, adapter
from specbeam.models.checkpoints.headers import FLOATS, StoredTensor, file_of
from specbeam.models.checkpoints.hub import hub_lookups, hub_note

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_TASKS = {  # suffixes of classes that do not generate text, and their task
    "ForSequenceClassification": "classifies texts",
    "ForTokenClassification": "classifies tokens",
    "ForQuestionAnswering": "marks answers in texts",
    "ForMultipleChoice": "chooses among answers",
    "ForMaskedLM": "fills gaps and does not continue texts",
    "ForPreTraining": "is an encoder and does not continue texts",
    "ForImageClassification": "classifies images",
    "ForAudioClassification": "classifies sounds",
    "ForCTC": "transcribes speech without a language model",
    "RewardModel": "scores texts",
}
_MASKED = ("ForMaskedLM", "ForPreTraining")
_PACKED = 16  # maximum number of rounded weights packed into one stored number
_MOST_EXPERTS = 1024  # number of experts above which the files must hold at least as many tensors
_SLACK = 2**26  # weights allowed beyond twice those in the files, for computed positions
_NO_MATRIX = (
    "vocab",
    "position",
    "token",
    "window",
    "max_",
    "length",
    "ctx",
)  # parts of the names of fields that are not matrix sizes in each layer


def described_by(name: str) -> dict[str, Any]:
    """Return the content of the config.json of a folder or hub id. Raises an error if it does not describe a model."""
    if (of_adapter := file_of(name, ADAPTER)) is not None:
        raise adapter(name, json_object(of_adapter))
    path = file_of(name, CONFIG)
    if path is None:
        raise MissingFile(
            f"there is no folder {name}, and no model {name} with a {CONFIG} on the hub or in its cache"
            f"{hint(name, ['bundled'])}; give a folder that save_pretrained wrote, or the id of a model on the hub"
            f"{hub_note()}"
        )
    described = json_object(path)
    kind = described.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise BadCheckpoint(f"{path} names no model_type (it is {kind!r}); give a model in transformers' format")
    _check_needs_no_code(name, described)
    rounded = described.get("quantization") or described.get("quantization_config")
    if rounded is not None and not isinstance(rounded, Mapping):
        raise BadCheckpoint(f"{path} has quantization_config {rounded!r}; it must be a JSON object")
    if isinstance(rounded, Mapping) and "quant_method" not in rounded and {"group_size", "bits"} <= rounded.keys():
        raise NotSupported(
            f"{name} holds weights that MLX rounded to {rounded['bits']} bits, which only MLX reads; give the original "
            "model, with quantize='int8' or 'int4' to make it small"
        )
    return described


def config_of(name: str, described: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a model. Raises an error if it cannot be read, or has impossible sizes."""
    from transformers import AutoConfig

    with reading(f"the {CONFIG} of {name} cannot be read"), hub_lookups(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    with reading(f"the {CONFIG} of {name} cannot be read"):
        text = config.get_text_config(decoder=True)
        sizes = {field: getattr(text, field, None) for field in _SIZES}
    for field, size in sizes.items():
        if size is None or isinstance(size, (list, tuple)):
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BadCheckpoint(f"the {CONFIG} of {name} has {field} {size!r}; it must be a whole number of at least 1")
    heads = sizes["num_attention_heads"]
    shared = sizes["num_key_value_heads"]
    is_causal = not getattr(config, "is_encoder_decoder", False)
    if is_causal and isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise BadCheckpoint(
            f"the {CONFIG} of {name} has num_attention_heads {heads} and num_key_value_heads {shared}; the second must "
            "divide the first"
        )
    return config


def class_for_texts(name: str, described: Mapping[str, Any], config: Any) -> Any:
    """Return the transformers class that loads a model: causal, text encoder-decoder, or speech encoder-decoder.

    Raises `UnsupportedModel` if the model does not generate text, or was saved with another head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    from transformers.models.auto import modeling_auto as known

    _check_writes_texts(name, described)
    kind = config.model_type
    of_texts = {
        *known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    if kind not in of_texts:
        raise UnsupportedModel(
            f"{name} is a {kind!r} model, for which transformers has no class that generates text; give a causal language "
            "model, or one for translation, summarisation or speech"
        )
    fills_gaps = kind in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES and hasattr(config, "is_decoder")
    reads_sources = getattr(config, "is_encoder_decoder", False)
    if fills_gaps and not config.is_decoder and not reads_sources and kind in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(
            f"{name} is a bidirectional encoder ({kind!r}, is_decoder false), which does not continue texts; give a causal "
            "language model"
        )
    if not reads_sources:
        return AutoModelForCausalLM
    hears = kind in known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    return AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM


def check_fits_files(name: str, config: Any, stored: Mapping[str, StoredTensor], kind: Any) -> None:
    """Raise `BadCheckpoint` if a configuration describes a far larger model than its files hold.

    transformers would allocate it and fill it with random weights.

    Args:
        stored: the tensors of the files.
        kind: the transformers class that loads the model.
    """
    numbers = sum(one.numbers * (1 if one.type in FLOATS else _PACKED) for one in stored.values())
    described = config.to_dict()
    largest = max([len(stored), *(one.shape[0] for one in stored.values() if one.shape)])
    for field, value in _whole_numbers(described):
        counts_layers = ("layers" in field and "window" not in field) or field == "n_layer"
        counts_experts = "experts" in field and value > _MOST_EXPERTS
        if (counts_layers or counts_experts) and value > largest:
            raise BadCheckpoint(
                f"the {CONFIG} of {name} has {field} {value}, and its files hold only {len(stored)} tensors; it belongs to "
                "another model"
            )
    if not _may_be_larger(config, described, numbers):
        return
    import torch

    with reading(f"the {CONFIG} of {name} does not describe a model"), torch.device("meta"):
        model = kind.from_config(config, trust_remote_code=False)
    wanted = sum(weight.numel() for weight in model.parameters())
    if wanted > 2 * numbers + _SLACK:
        raise BadCheckpoint(
            f"the {CONFIG} of {name} describes {wanted:,} weights, and its files hold {numbers:,}{_misfit(model, stored)}; "
            "it belongs to another model"
        )


def check_generation_config(name: str) -> None:
    """Raise `BadCheckpoint` if a model's generation_config.json is broken; transformers would ignore it."""
    path = file_of(name, "generation_config.json")
    if path is not None:
        json_object(path)


def _check_needs_no_code(name: str, described: Mapping[str, Any]) -> None:
    """Raise `NotSupported` if a model needs custom code, `UnsupportedModel` if transformers does not know it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = described["model_type"]
    if kind in CONFIG_MAPPING:
        return
    if described.get("auto_map"):
        raise NotSupported(
            f"{name} is a {kind!r} model, which needs custom code (auto_map), and specbeam runs no code from a model's "
            "folder; if you trust it, load it with transformers (trust_remote_code=True) and give the model object"
        )
    raise UnsupportedModel(
        f"{name} is a {kind!r} model, which this version of transformers does not know; update transformers, or give "
        "another model"
    )


def _check_writes_texts(name: str, described: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModel` if a model was saved with a head that does not generate text."""
    classes = described.get("architectures")
    if not isinstance(classes, list):
        return
    for one in classes:
        for end, does in _TASKS.items():
            if str(one).endswith(end) and not _may_continue(end, described):
                raise UnsupportedModel(f"{name} is a {one}, which {does}; give a causal language model or a translator")


def _may_continue(end: str, described: Mapping[str, Any]) -> bool:
    """Return whether a model of a masked class is a decoder, or has one, by its configuration."""
    is_decoder = bool(described.get("is_decoder") or described.get("is_encoder_decoder"))
    return end in _MASKED and is_decoder


def _may_be_larger(config: Any, described: Mapping[str, Any], numbers: int) -> bool:
    """Return whether a model may be larger than its files, by products of sizes in its configuration."""
    text = config.get_text_config(decoder=True)
    width = getattr(text, "hidden_size", None)
    layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(width, int) or not isinstance(layers, int):
        return True
    for field, value in _whole_numbers(described):
        in_each_layer = not any(part in field for part in _NO_MATRIX)
        if value * width * (layers if in_each_layer else 1) > 2 * numbers:
            return True
    return False


def _whole_numbers(described: Any, field: str = "") -> Iterator[tuple[str, int]]:
    """Yield the integers of a configuration and its parts, with the names of their fields."""
    if isinstance(described, Mapping):
        for name, value in described.items():
            yield from _whole_numbers(value, str(name))
    elif isinstance(described, list | tuple):
        for value in described:
            yield from _whole_numbers(value, field)
    elif isinstance(described, int) and not isinstance(described, bool):
        yield field, described


def _misfit(model: Any, stored: Mapping[str, StoredTensor]) -> str:
    """Return the first tensor whose shape in the files is not the model's, as a part of a message; "" if none."""
    for name, weight in model.named_parameters():
        if name in stored and stored[name].shape != tuple(weight.shape):
            return f" ({name} is {[*stored[name].shape]} in the files, and {[*weight.shape]} by {CONFIG})"
    return ""
