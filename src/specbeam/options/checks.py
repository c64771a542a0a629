"""What the options of `generate` may be: each refusal names the option, what was found and what it must be."""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from specbeam.errors import BadSetting

STEEPEST = 32  # length penalty: beyond, scores of long texts leave the range of floats
FORMS = ("json_schema", "regex", "grammar")
GRAMMAR_BACKENDS = ("llguidance", "xgrammar")


def require(fine: bool, name: str, found: object, expected: str) -> None:
    if not fine:
        raise BadSetting(f"{name} is {found!r}; it must be {expected}")


def check(options: Mapping[str, Any]) -> None:
    """Raises `BadSetting` for the first option that is not what it must be; None is "not set"."""
    for name, fine, expected in _CHECKS:
        if options[name] is not None or name in _NEEDED:
            require(fine(options[name]), name, options[name], expected)
    _check_forms(options)


def listed(tokens: Any) -> list[Any]:
    """Token ids from one id, a sequence, an array or a tensor."""
    known = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return list(known) if isinstance(known, Iterable) and not isinstance(known, str) else [known]


def texts(stops: Any) -> tuple[Any, ...]:
    """Stop strings from one text or several."""
    return (stops,) if isinstance(stops, str) else tuple(stops) if isinstance(stops, (list, tuple, set)) else ()


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_word(word: object) -> bool:
    return isinstance(word, (list, tuple)) and len(word) > 0 and all(is_integer(one) and one >= 0 for one in word)


def _are_words(words: object) -> bool:
    return isinstance(words, (list, tuple)) and all(map(_is_word, words))


def _are_texts(stops: object) -> bool:
    return isinstance(stops, (str, list, tuple, set)) and all(isinstance(one, str) and one for one in texts(stops))


def _are_callables(processors: object) -> bool:
    return isinstance(processors, (list, tuple)) and all(map(callable, processors))


_INTEGERS = (
    "max_new_tokens", "max_length", "min_new_tokens", "top_k", "num_return_sequences", "no_repeat_ngram_size"
)  # fmt: skip
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "length_penalty")
_NEEDED = ("num_return_sequences", "grammar_backend")
_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    *((name, is_integer, "an integer") for name in _INTEGERS),
    *((name, _is_number, "a number") for name in _NUMBERS),
    ("max_new_tokens", lambda count: count >= 1, ">= 1"),
    ("min_new_tokens", lambda count: count >= 0, ">= 0"),
    ("temperature", lambda value: value >= 0, ">= 0"),
    ("top_k", lambda count: count >= 0, ">= 0 (0: all tokens)"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("min_p", lambda value: 0 <= value <= 1, "in [0, 1]"),
    ("repetition_penalty", lambda value: value > 0, "> 0"),
    *((name, math.isfinite, "a finite number") for name in ("temperature", "length_penalty", "repetition_penalty")),
    ("temperature", lambda value: value == 0 or value >= 1e-4, "0 or at least 0.0001"),
    ("length_penalty", lambda value: abs(value) <= STEEPEST, f"between -{STEEPEST} and {STEEPEST}"),
    ("no_repeat_ngram_size", lambda size: size >= 0, ">= 0 (0: off)"),
    ("num_return_sequences", lambda count: count >= 1, ">= 1"),
    ("early_stopping", lambda value: isinstance(value, bool) or value == "never", "True, False or 'never'"),
    (
        "eos_token_id",
        lambda ends: all(map(is_integer, listed(ends))),
        "a token id or several; stop_strings ends at texts",
    ),
    ("stop_strings", _are_texts, "texts of at least one character"),
    ("bad_words_ids", _are_words, "lists of token ids, one per word, like [[5], [6, 7]]"),
    ("prefix_allowed_tokens_fn", callable, "a callable that takes the number of a prompt and its tokens"),
    ("logits_processor", _are_callables, "a list of callables that take input_ids and scores"),
    ("grammar_backend", lambda name: name in GRAMMAR_BACKENDS, " or ".join(map(repr, GRAMMAR_BACKENDS))),
)


def _check_forms(options: Mapping[str, Any]) -> None:
    forms = [name for name in FORMS if options[name] is not None]
    if len(forms) > 1:
        raise BadSetting(f"{' and '.join(forms)} are given; a text can keep to one of them")
    for name in forms:
        value = options[name]
        if isinstance(value, PurePath):
            raise BadSetting(f"{name} is the path {value}; give what stands there: {name}=path.read_text()")
        if name != "json_schema":
            require(isinstance(value, str), name, value, "a text; one form serves all prompts")
            require(_is_proper(value), name, value, "proper text; this holds half a character")


def _is_proper(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
