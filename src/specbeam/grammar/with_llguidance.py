"""Grammars by llguidance: a state is one of its matchers, and a copy of one costs about a microsecond."""

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from specbeam.constraint import Form
from specbeam.errors import BadSetting, BrokenLaw
from specbeam.grammar.spelling import fitted, pieces, special_tokens, text_tokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from transformers import PreTrainedTokenizerBase

# At most one space wherever JSON allows white space, for an endless run of it would be valid too.
JSON = {"whitespace_pattern": "[ ]?"}


class LLGuidance:
    """Keeps to a form. See `Constraint`.

    Where the form leaves but one text, its usual tokens are the only ones that are allowed.
    """

    def __init__(self, form: Form, tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]) -> None:
        from llguidance import LLMatcher

        self._text = text_tokens(tokenizer, vocab)
        grammar = _read(form)
        broken, complaints = LLMatcher.validate_grammar_with_warnings(grammar)
        if not broken:
            for complaint in complaints:  # the form itself asks to pass over something
                warnings.warn(f"{form.kind}: {complaint}", stacklevel=2)
            self._root = LLMatcher(_words(tokenizer, eos), grammar, log_level=0)
            complaints = [_said(self._root)] if self._root.is_error() else []
        if complaints:
            raise BadSetting(f"{form.kind} cannot be kept to: {' '.join('; '.join(complaints).split())}")

    def root(self) -> Any:
        return self._root

    def advance(self, state: Any, token: int) -> Any:
        after = state.deep_copy()
        if not after.consume_token(token):
            raise BrokenLaw(f"llguidance lost its way: {_said(after)}")
        return after

    def allowed(self, states: Sequence[Any]) -> UInt8[np.ndarray, "states bytes"]:
        rows = [np.frombuffer(state.compute_bitmask(), dtype=np.uint8) for state in states]
        for state in states:
            if (
                state.is_error() and state.stop_reason() != "NoExtensionBias"
            ):  # that is: no token spells what has to come
                raise BrokenLaw(f"llguidance gave up: {_said(state)}")
        return fitted(np.stack(rows), self._text)

    def complete(self, states: Sequence[Any]) -> list[bool]:
        return [bool(state.is_accepting()) for state in states]


def _read(form: Form) -> str:
    from llguidance import LLMatcher

    if form.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(form.text, defaults=JSON)
    return LLMatcher.grammar_from_regex(form.text) if form.kind == "regex" else LLMatcher.grammar_from_lark(form.text)


def _said(matcher: Any) -> str:
    """Its complaint, without the state and the grammar that it prints behind."""
    return " ".join(matcher.get_error().split("<state>")[0].split())


_WORDS: "weakref.WeakKeyDictionary[Any, dict[tuple[int, int], LLTokenizer]]" = weakref.WeakKeyDictionary()


def _words(tokenizer: "PreTrainedTokenizerBase", eos: tuple[int, ...]) -> "LLTokenizer":
    """Its view of a tokenizer, made once: for a large vocabulary that takes a second."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    end = eos[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    known, key = _WORDS.setdefault(tokenizer, {}), (end, len(tokenizer))
    if key not in known:
        try:
            known[key] = from_tokenizer(tokenizer, eos_token=end)
        except ValueError:  # a decoder that it does not know
            known[key] = LLTokenizer(TokenizerWrapper(_Spelled(tokenizer, end)), eos_token=end)
    return known[key]


class _Spelled:
    """A tokenizer by the text of its tokens, in the form that llguidance asks for."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_token_id
        self.special_token_ids = sorted(special_tokens(tokenizer))
        self.tokens = pieces(tokenizer)
        for token in {end, *self.special_token_ids}:
            self.tokens[token] = b"\xff" + tokenizer.convert_ids_to_tokens(token).encode()  # never text

        texts = {piece: token for token, piece in enumerate(self.tokens) if piece and piece[0] != 0xFF}
        self._tokens, self._longest = texts, max(map(len, texts))

    def __call__(self, text: bytes) -> list[int]:
        """Asked for the usual tokens of a text that is certain: the longest at each place; an end where there is none."""
        found: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._tokens), 0)
            found.append(self._tokens.get(text[:size], self.eos_token_id))
            text = text[size or 1 :]
        return found
