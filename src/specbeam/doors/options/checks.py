"""Checks of the options of `generate`. Each error names the option, the value that was found and what is expected."""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from specbeam.doors.inputs import token_lists
from specbeam.errors import BadPrompt, BadSetting

LARGEST_LENGTH_PENALTY = 32  # beyond it the scores of long texts leave the range of floats
LARGEST_INTEGER = 2**31 - 1  # the compiled loops count in integers that a larger setting would leave
FORMS = ("json_schema", "regex", "grammar")
GRAMMAR_BACKENDS = ("llguidance", "xgrammar")


def require(condition: bool, name: str, found: object, expected: str) -> None:
    """Raise `BadSetting` with the option's name, its value and what it must be, unless `condition` holds."""
    if not condition:
        raise BadSetting(f"{name} is {found!r}; it must be {expected}")


def check(options: Mapping[str, Any]) -> None:
    """Raise `BadSetting` for the first option with a wrong value. `options` has every option; None means not set."""
    for name, is_valid, expected in _CHECKS:
        if options[name] is not None or name in _NEEDED:
            require(is_valid(options[name]), name, options[name], expected)
    _check_forms(options)


def as_list(tokens: Any) -> list[Any]:
    """Return the list of token ids in one id, a sequence, an array or a tensor."""
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return list(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else [ids]


def as_decoder_prompts(given: Any) -> list[int] | list[list[int]]:
    """Return what decoders begin with as a list of token ids, or as several. Raises `BadSetting` if it is neither."""
    try:
        return token_lists(given, "decoder_input_ids")
    except BadPrompt as error:
        raise BadSetting(f"{error}; it must be a list of token ids, or one such list for each source") from error


def as_texts(stops: Any) -> tuple[Any, ...]:
    """Return the stop strings in one text, or in a list, tuple or set of texts; () for anything else."""
    return (stops,) if isinstance(stops, str) else tuple(stops) if isinstance(stops, (list, tuple, set)) else ()


def is_integer(value: object) -> bool:
    """Return whether `value` is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_token(value: object) -> bool:
    """Return whether `value` may be a token id: an integer from 0 to `LARGEST_INTEGER`."""
    return is_integer(value) and 0 <= value <= LARGEST_INTEGER  # type: ignore[operator]


def _is_small(value: int) -> bool:
    return abs(value) <= LARGEST_INTEGER


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Return whether a number is one that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 300 digits
        return False


def _is_word(word: object) -> bool:
    """Return whether `word` is a list or tuple of at least one token id."""
    return isinstance(word, (list, tuple)) and len(word) > 0 and all(map(is_token, word))


def _are_words(words: object) -> bool:
    return isinstance(words, (list, tuple)) and all(map(_is_word, words))


def _are_texts(stops: object) -> bool:
    """Return whether `stops` is one text that is not empty, or a list, tuple or set of such texts."""
    return isinstance(stops, (str, list, tuple, set)) and all(
        isinstance(stop, str) and stop for stop in as_texts(stops)
    )


def _are_tokens(tokens: object) -> bool:
    """Return whether `tokens` is a list or tuple of token ids."""
    return isinstance(tokens, (list, tuple)) and all(map(is_token, tokens))


def _are_biases(biases: object) -> bool:
    """Return whether `biases` is a mapping from words to numbers, or a list of such pairs. -inf bans a word."""
    pairs: Any = list(biases.items()) if isinstance(biases, Mapping) else biases
    if not isinstance(pairs, (list, tuple)):
        return False
    return all(isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_bias(*pair) for pair in pairs)


def _is_bias(word: object, bias: object) -> bool:
    return _is_word(word) and _is_number(bias) and (_is_finite(bias) or bias == -math.inf)


def _is_decay(decay: object) -> bool:
    """Return whether `decay` is a number of tokens after which a factor above 0 applies."""
    if not isinstance(decay, (list, tuple)) or len(decay) != 2:
        return False
    start, factor = decay
    return is_integer(start) and _is_small(start) and _is_number(factor) and _is_finite(factor) and factor > 0


def _are_callables(processors: object) -> bool:
    return isinstance(processors, (list, tuple)) and all(map(callable, processors))


_INTEGERS = (
    "max_new_tokens", "max_length", "min_new_tokens", "top_k", "num_return_sequences", "no_repeat_ngram_size", "min_length",
    "forced_bos_token_id", "decoder_start_token_id", "encoder_no_repeat_ngram_size"
)  # fmt: skip
_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "length_penalty", "encoder_repetition_penalty", "guidance_scale",
    "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"
)  # fmt: skip
_FINITE = ("temperature", "length_penalty", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale")
_NEEDED = ("num_return_sequences", "grammar_backend")  # options that may not be None
# The checks in their order: name of the option, test of its value, and what the value must be.
_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    *((name, is_integer, "an integer") for name in _INTEGERS),
    *((name, _is_small, f"no larger than {LARGEST_INTEGER:,}") for name in _INTEGERS),
    *((name, _is_number, "a number") for name in _NUMBERS),
    ("max_new_tokens", lambda count: count >= 1, ">= 1"),
    ("min_new_tokens", lambda count: count >= 0, ">= 0"),
    ("temperature", lambda value: value >= 0, ">= 0"),
    ("top_k", lambda count: count >= 0, ">= 0 (0: all tokens)"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("min_p", lambda value: 0 <= value <= 1, "in [0, 1]"),
    ("repetition_penalty", lambda value: value > 0, "> 0"),
    ("encoder_repetition_penalty", lambda value: value > 0, "> 0"),
    *((name, _is_finite, "a finite number") for name in _FINITE),
    ("temperature", lambda value: value == 0 or value >= 1e-4, "0 or at least 0.0001"),
    (
        "length_penalty",
        lambda value: abs(value) <= LARGEST_LENGTH_PENALTY,
        f"between -{LARGEST_LENGTH_PENALTY} and {LARGEST_LENGTH_PENALTY}",
    ),
    ("no_repeat_ngram_size", lambda size: size >= 0, ">= 0 (0: off)"),
    ("encoder_no_repeat_ngram_size", lambda size: size >= 0, ">= 0 (0: off)"),
    ("top_h", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("typical_p", lambda value: 0 < value <= 1, "in (0, 1] (1: off)"),
    ("epsilon_cutoff", lambda value: 0 <= value < 1, "in [0, 1) (0: off)"),
    ("eta_cutoff", lambda value: 0 <= value < 1, "in [0, 1) (0: off)"),
    ("num_return_sequences", lambda count: count >= 1, ">= 1"),
    ("early_stopping", lambda value: isinstance(value, bool) or value == "never", "True, False or 'never'"),
    (
        "eos_token_id",
        lambda ends: all(is_integer(end) and _is_small(end) for end in as_list(ends)),
        "a token id or several; to end at a text, use stop_strings",
    ),
    ("stop_strings", _are_texts, "texts of at least one character"),
    ("stop_strings", lambda stops: all(map(is_proper, as_texts(stops))), "proper text; this holds half a character"),
    ("bad_words_ids", _are_words, "lists of token ids, one per word, like [[5], [6, 7]]"),
    ("min_length", lambda count: count >= 0, ">= 0"),
    ("forced_bos_token_id", lambda token: token >= 0, ">= 0"),
    ("decoder_start_token_id", lambda token: token >= 0, ">= 0"),
    (
        "forced_eos_token_id",
        lambda ends: all(map(is_token, as_list(ends))),
        "a token id or several",
    ),
    ("suppress_tokens", _are_tokens, "a list of token ids"),
    ("begin_suppress_tokens", _are_tokens, "a list of token ids"),
    ("renormalize_logits", lambda value: isinstance(value, bool), "True or False"),
    ("remove_invalid_values", lambda value: isinstance(value, bool), "True or False"),
    ("sequence_bias", _are_biases, "pairs of token ids and a number, like [[[5], -1.0], [[6, 7], 2.5]]"),
    ("exponential_decay_length_penalty", _is_decay, "a number of new tokens and a factor above 0, like (15, 1.6)"),
    ("prefix_allowed_tokens_fn", callable, "a callable that takes the number of a prompt and its tokens"),
    ("logits_processor", _are_callables, "a list of callables that take input_ids and scores"),
    ("grammar_backend", lambda name: name in GRAMMAR_BACKENDS, " or ".join(map(repr, GRAMMAR_BACKENDS))),
)


def _check_forms(options: Mapping[str, Any]) -> None:
    """Raise `BadSetting` if several of json_schema, regex and grammar are given, or if one is a path or no proper text."""
    forms = [name for name in FORMS if options[name] is not None]
    if len(forms) > 1:
        raise BadSetting(f"{' and '.join(forms)} are given; give only one of them")
    for name in forms:
        value = options[name]
        if isinstance(value, PurePath):
            raise BadSetting(f"{name} is the path {value}; give its content: {name}=path.read_text()")
        if name != "json_schema":
            require(isinstance(value, str), name, value, "a text; one form serves all prompts")
            require(is_proper(value), name, value, "proper text; this holds half a character")


def is_proper(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8; half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
