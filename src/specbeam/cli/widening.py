"""Pairs whose models are enlarged before they are timed: `--grow`, `--grow-draft`."""

import re
from typing import Any

from specbeam.bench.widen_model import grown
from specbeam.cli.common import quiet_load
from specbeam.errors import BadSetting
from specbeam.pair import Pair, load


def grown_pair(
    model: str, draft: str | None, grow: str | None, grow_draft: str | None = None, quantize: Any = None
) -> Pair:
    """A pair of the same function, with so many parameters; as it is where none are asked for."""
    pair = quiet_load(model, draft)
    if grow is None and grow_draft is None and quantize is None:
        return pair
    target = pair.target_model
    small = pair.draft_model
    if grow is not None:
        target = grown(target, parameters(grow))
    if grow_draft is not None:
        if small is None:
            raise BadSetting("--grow-draft enlarges the draft model, and there is none; give --draft")
        small = grown(small, parameters(grow_draft, "--grow-draft"))
    return load(target, small, pair.tokenizer, quantize=quantize)


def parameters(text: str, option: str = "--grow") -> int:
    """From "100M" or "1.5B" or plain digits."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MB]?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise BadSetting(f"{option} is {text!r}; it must be a number of parameters like 100M or 1.5B")
    return round(float(found[1]) * {"": 1, "M": 1e6, "B": 1e9}[found[2].upper()])
