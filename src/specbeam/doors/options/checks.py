"""Checks of the options of `generate`. Each error names the option, its value and the valid values."""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from specbeam.core.errors import BadSetting

Check = tuple[Callable[[Any], bool], str]  # a check of a value, and a description of valid values
LARGEST_LENGTH_PENALTY = 32  # larger penalties let the scores of long texts overflow
LARGEST_INTEGER = 2**31 - 1  # larger numbers would overflow in compiled loops
FORMS = ("json_schema", "regex", "grammar")
GRAMMAR_BACKENDS = ("llguidance", "xgrammar")


def require(condition: bool, name: str, found: object, expected: str) -> None:
    """Raise `BadSetting` with the option's name, its value and the valid values unless `condition` holds."""
    if not condition:
        raise BadSetting(f"{name} is {found!r}; it must be {expected}")


def as_list(tokens: Any) -> list[Any]:
    """Return the list of token ids in one id, a sequence, an array or a tensor."""
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return list(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else [ids]


def as_texts(stops: Any) -> tuple[Any, ...]:
    """Return the stop strings in one text, or in a list, tuple or set of texts; () for anything else."""
    if isinstance(stops, str):
        return (stops,)
    return tuple(stops) if isinstance(stops, (list, tuple, set)) else ()


def is_integer(value: object) -> bool:
    """Return whether `value` is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_token(value: object) -> bool:
    """Return whether `value` may be a token id: an integer from 0 to `LARGEST_INTEGER`."""
    return is_integer(value) and 0 <= value <= LARGEST_INTEGER  # type: ignore[operator]


def _is_small(value: int) -> bool:
    return abs(value) <= LARGEST_INTEGER


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Return whether a number is finite as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 300 digits
        return False


def _is_word(word: object) -> bool:
    """Return whether `word` is a list or tuple of one or more token ids."""
    return isinstance(word, (list, tuple)) and len(word) > 0 and all(map(is_token, word))


def are_words(words: object) -> bool:
    return isinstance(words, (list, tuple)) and all(map(_is_word, words))


def are_texts(stops: object) -> bool:
    """Return whether `stops` is a non-empty text, or a list, tuple or set of such texts."""
    return isinstance(stops, (str, list, tuple, set)) and all(
        isinstance(stop, str) and stop for stop in as_texts(stops)
    )


def are_tokens(tokens: object) -> bool:
    """Return whether `tokens` is a list or tuple of token ids."""
    return isinstance(tokens, (list, tuple)) and all(map(is_token, tokens))


def are_biases(biases: object) -> bool:
    """Return whether `biases` is a mapping from words to numbers, or a list of such pairs. -inf bans a word."""
    pairs: Any = list(biases.items()) if isinstance(biases, Mapping) else biases
    if not isinstance(pairs, (list, tuple)):
        return False
    return all(isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_bias(*pair) for pair in pairs)


def _is_bias(word: object, bias: object) -> bool:
    return _is_word(word) and _is_number(bias) and (_is_finite(bias) or bias == -math.inf)


def is_decay(decay: object) -> bool:
    """Return whether `decay` is a pair of a number of tokens and a factor above 0."""
    if not isinstance(decay, (list, tuple)) or len(decay) != 2:
        return False
    start, factor = decay
    return is_integer(start) and _is_small(start) and _is_number(factor) and _is_finite(factor) and factor > 0


def are_callables(processors: object) -> bool:
    return isinstance(processors, (list, tuple)) and all(map(callable, processors))


INTEGER: tuple[Check, ...] = (
    (is_integer, "an integer"),
    (_is_small, f"no larger than {LARGEST_INTEGER:,}"),
)
NUMBER: tuple[Check, ...] = ((_is_number, "a number"),)
FINITE: tuple[Check, ...] = ((_is_finite, "a finite number"),)
FLAG: tuple[Check, ...] = ((lambda value: isinstance(value, bool), "True or False"),)


def check_forms(options: Mapping[str, Any]) -> None:
    """Raise `BadSetting` if more than one of json_schema, regex and grammar is given, or if one is not valid text."""
    forms = [name for name in FORMS if options[name] is not None]
    catalogues = ["catalogue"] if options.get("catalogue") is not None else []
    if len(forms + catalogues) > 1:
        raise BadSetting(f"{' and '.join(forms + catalogues)} are given; give only one of them")
    for name in forms:
        value = options[name]
        if isinstance(value, PurePath):
            raise BadSetting(f"{name} is the path {value}; give its content: {name}=path.read_text()")
        if name != "json_schema":
            require(isinstance(value, str), name, value, "a text; one form serves all prompts")
            require(is_proper(value), name, value, "valid Unicode text; this has half a character (a lone surrogate)")


def are_proper(stops: Any) -> bool:
    """Return whether all stop strings can be encoded in UTF-8."""
    return all(map(is_proper, as_texts(stops)))


def are_integers(tokens: Any) -> bool:
    """Return whether `tokens` is an integer or several; they may lie outside the vocabulary."""
    return all(is_integer(token) and _is_small(token) for token in as_list(tokens))


def are_token_ids(tokens: Any) -> bool:
    """Return whether `tokens` is a token id or several."""
    return all(map(is_token, as_list(tokens)))


def is_proper(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8; lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
