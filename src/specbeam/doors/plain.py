"""Texts that other programs can read: JSON without NaN, XML and terminals without control characters."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SURROGATES = re.compile("[\ud800-\udfff]")
# Control characters but those that lay out a text, and halves of characters.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NO_XML = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def as_json(value: Any, is_ascii: bool = False) -> str:
    """Return a value as one line of JSON. NaN and infinity, for which JSON has no form, become null.

    >>> as_json({"ratio": float("nan"), "text": "ä"})
    '{"ratio": null, "text": "ä"}'
    """
    try:
        text = json.dumps(value, ensure_ascii=is_ascii, allow_nan=False)
    except ValueError:
        text = json.dumps(_with_finite_numbers(value), ensure_ascii=is_ascii, allow_nan=False)
    return _escaped(text, _SURROGATES)


def _with_finite_numbers(value: Any) -> Any:
    """Return a copy of a value with None in place of each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _with_finite_numbers(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_with_finite_numbers(one) for one in value]
    return value


def for_terminal(text: str) -> str:
    r"""Return a text that cannot steer a terminal: control characters but ends of lines and tabs are written out.

    >>> print(for_terminal("red: \x1b[31m"))
    red: \x1b[31m
    """
    return _escaped(text, _STEERING)


def without_control(text: str) -> str:
    r"""Return a text without control characters but ends of lines and tabs; other marks and spaces stay.

    >>> without_control("\x1b[1mwide\xa0\u3000space\u200d")
    '[1mwide\xa0\u3000space\u200d'
    """
    return _STEERING.sub("", text)


def for_xml(text: str) -> str:
    r"""Return a text in which characters that XML 1.0 forbids or changes are written out; markup is not escaped.

    >>> print(for_xml("a\x00b\n<"))
    a\x00b\n<
    """
    return _escaped(text, _NO_XML)


def _escaped(text: str, letters: re.Pattern[str]) -> str:
    """Return a text with an escape, as in a string of Python, in place of each of these letters."""
    return letters.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
