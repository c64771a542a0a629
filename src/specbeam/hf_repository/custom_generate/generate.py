"""The repository form of custom_generate: receives everything as it was passed to `generate`, `assistant_model` too."""

from specbeam import hf


def generate(model, inputs=None, input_ids=None, assistant_model=None, draft_model=None, **kwargs):
    """Dynamic-width speculative beam decoding; `assistant_model` is the draft."""
    return model.generate(
        inputs=input_ids if inputs is None else inputs,
        custom_generate=hf.dsbd,
        draft_model=draft_model if draft_model is not None else assistant_model,
        **{name: value for name, value in kwargs.items() if name != "custom_generate"},
    )
