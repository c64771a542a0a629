"""The repository form of custom_generate: receives everything as it was passed to `generate`, `assistant_model` too."""

from typing import Any

from specbeam import hf


def generate(
    model: Any,
    inputs: Any = None,
    input_ids: Any = None,
    assistant_model: Any = None,
    draft_model: Any = None,
    **kwargs: Any,
) -> Any:
    """Dynamic-width speculative beam decoding; `assistant_model` is the draft."""
    return model.generate(
        inputs=input_ids if inputs is None else inputs,
        custom_generate=hf.dsbd,
        draft_model=draft_model if draft_model is not None else assistant_model,
        **{name: value for name, value in kwargs.items() if name != "custom_generate"},
    )
