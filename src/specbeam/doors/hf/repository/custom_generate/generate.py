"""The repository form of custom_generate, which receives all arguments of `generate`, including `assistant_model`."""

from typing import Any

from specbeam.doors import hf


def generate(
    model: Any,
    inputs: Any = None,
    input_ids: Any = None,
    assistant_model: Any = None,
    draft_model: Any = None,
    **kwargs: Any,
) -> Any:
    """Decode with `sb.hf.dsbd`; the draft model is `draft_model`, or else `assistant_model`."""
    return model.generate(
        inputs=input_ids if inputs is None else inputs,
        custom_generate=hf.dsbd,
        draft_model=draft_model if draft_model is not None else assistant_model,
        **{name: value for name, value in kwargs.items() if name != "custom_generate"},
    )
