"""Safe output for other programs: JSON without NaN; XML and terminal text without control characters."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SURROGATES = re.compile("[\ud800-\udfff]")
# Control characters except newline and tab, and lone surrogates.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NO_XML = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def as_json(value: Any, is_ascii: bool = False) -> str:
    """Return a value as a line of JSON. NaN and infinity become null, because JSON lacks them.

    >>> as_json({"ratio": float("nan"), "text": "ä"})
    '{"ratio": null, "text": "ä"}'
    """
    try:
        text = json.dumps(value, ensure_ascii=is_ascii, allow_nan=False)
    except ValueError:
        text = json.dumps(_with_finite_numbers(value), ensure_ascii=is_ascii, allow_nan=False)
    return _escaped(text, _SURROGATES)


def _with_finite_numbers(value: Any) -> Any:
    """Return a copy of a value with None in place of non-finite numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _with_finite_numbers(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_with_finite_numbers(one) for one in value]
    return value


def for_terminal(text: str) -> str:
    r"""Return a text with escaped control characters, except for newlines and tabs.

    >>> print(for_terminal("red: \x1b[31m"))
    red: \x1b[31m
    """
    return _escaped(text, _STEERING)


def without_control(text: str) -> str:
    r"""Return a text without control characters, except for newlines and tabs.

    >>> without_control("\x1b[1mwide\xa0\u3000space\u200d")
    '[1mwide\xa0\u3000space\u200d'
    """
    return _STEERING.sub("", text)


def for_xml(text: str) -> str:
    r"""Return a text with characters escaped that XML 1.0 forbids or changes; markup is not escaped.

    >>> print(for_xml("a\x00b\n<"))
    a\x00b\n<
    """
    return _escaped(text, _NO_XML)


def _escaped(text: str, letters: re.Pattern[str]) -> str:
    """Return a text with these letters replaced by Python escapes."""
    return letters.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
