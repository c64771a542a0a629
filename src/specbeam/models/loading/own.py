"""Language models of one's own, by the protocol `LM`, as the models of a pair."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from specbeam.core import LM
from specbeam.errors import BadSetting


def is_own(model: Any) -> TypeGuard[LM]:
    """Return whether a model is one of the user's own, not of transformers."""
    return isinstance(model, LM) and not isinstance(model, torch.nn.Module)


def changed_options(options: Mapping[str, Any]) -> list[str]:
    """Return the names of options of `load` whose value is not the default: None, False or "auto"."""
    return [name for name, value in options.items() if not (value is None or value is False or value == "auto")]


def own_draft(draft: Any, options: Mapping[str, Any]) -> LM | None:
    """Return the draft of a target of one's own.

    Args:
        options: options of `load` for models of transformers, by name; see `changed_options`.

    Raises `BadSetting` if one of them is given, or if the draft is not of one's own.
    """
    if wrong := changed_options(options):
        raise BadSetting(
            f"{', '.join(wrong)} of load() is for models of transformers, and the target is your own; leave it out"
        )
    if draft is None or is_own(draft):
        return draft
    raise BadSetting(f"draft is {draft!r}, and the target is your own; give a model of your own, or none")
