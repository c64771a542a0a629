"""Models with rounded weights: rounded by the compiled forward, by a library while transformers loads them, or in files.

Rounding changes a model and its law. The output has the law of a rounded target; rounding a draft does not change it.
"""

from importlib.util import find_spec
from typing import Any

import torch

from specbeam.core.errors import NotSupported
from specbeam.engines.choices import OWN_ROUNDINGS

GROUP = 32  # weights that share a scale in torchao's rounding to 4 bits, as in the compiled forward


def library_config(name: str, dtype: "str | torch.dtype") -> Any:
    """Return transformers' configuration for rounding by a library.

    Args:
        name: one of `BY_LIBRARY`.
        dtype: the type of all other weights and of products; "auto": the files' type.

    Raises `NotSupported` if the library is missing.
    """
    library, form = name.split("-")
    for package in (library, "accelerate"):
        if find_spec(package) is None:
            raise NotSupported(
                f"{name!r} needs {package} (pip install {package}); 'int8' and 'int4' on a CPU and 'fp8' on a GPU need no "
                "package, for the families in docs/models.md"
            )
    if library == "torchao":
        return _torchao_config(form)
    from transformers import BitsAndBytesConfig

    if form == "int8":
        # With a threshold, outliers in one row would change the arithmetic of other rows: a text would depend on its batch.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    compute = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=form, bnb_4bit_compute_dtype=compute)


def _torchao_config(form: str) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    from transformers import TorchAoConfig

    if form == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    # torchao's other 4-bit weights run on GPUs only.
    of_4_bits = torch.int4  # type: ignore[attr-defined]
    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=of_4_bits, granularity=PerGroup(GROUP)))


def rounding_of(lm: Any) -> str:
    """Return the rounding of a language model, which is part of its law: "int8", "torchao-int8", ...; "" for none.

    Weights come before keys and values. For files of rounded weights, the name is transformers' name of the method.
    """
    lm = getattr(lm, "lm", lm)  # the model inside a model with memory
    kv = getattr(lm, "kv", "float32")
    parts = [_rounding_of_weights(lm), f"{kv} keys and values" if kv != "float32" else ""]
    return ", ".join(part for part in parts if part)


def _rounding_of_weights(lm: Any) -> str:
    """Return the rounding of a language model's weights; "" for none."""
    engine = getattr(lm, "engine", "")
    model = getattr(lm, "known" if hasattr(lm, "known") else "model", None)
    stored = rounding_in(getattr(model, "config", None))
    if engine == "bfloat16":
        return "bfloat16 products"
    if engine in OWN_ROUNDINGS:
        named = f"{stored} and {engine}" if stored else str(engine)
        encoder = getattr(lm, "encoder", None)
        of_encoder = getattr(encoder, "rounding", None)
        if encoder is None or of_encoder == engine:
            return named
        return f"{named} (encoder in {of_encoder})" if of_encoder is not None else f"{named} (encoder not rounded)"
    name = vars(model).get("_specbeam_rounding") if model is not None else None
    return str(name) if name is not None else stored


def unknown_method(config: Any) -> str:
    """Return the rounding method of weights in files if transformers does not know it; "" otherwise."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    method = rounding_in(config)
    return "" if method in ("", "bitsandbytes", *KNOWN) else method


def rounding_in(config: Any) -> str:
    """Return the rounding method of weights in files; "" for none."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return ""
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return f"{getattr(method, 'value', method) or 'rounded weights'}"
