"""Grammars by llguidance: a walker is one of its matchers."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from specbeam.core.constraint import Form
from specbeam.errors import BadSetting, BrokenLaw
from specbeam.grammar.spelling import MANY, fitted, made_once, pieces, special_tokens, text_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

# At most one space wherever JSON allows white space, for an endless run of it would be valid too.
JSON = {"whitespace_pattern": "[ ]?"}
NO_WAY_ON = "NoExtensionBias"  # its word for: no token spells what has to come


class LLGuidance:
    """Keeps to a form. See `Constraint`.

    Where the form leaves but one text, its usual tokens are the only ones that are allowed.
    """

    def __init__(self, form: Form, tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]) -> None:
        from llguidance import LLExecutor, LLMatcher

        self._text = text_tokens(tokenizer, vocab)
        self._executor = LLExecutor()
        grammar = _read(form)
        broken, complaints = LLMatcher.validate_grammar_with_warnings(grammar)
        if broken:
            raise _refused(form, complaints)
        for complaint in complaints:  # the form itself asks to pass over something
            warnings.warn(f"{form.kind}: {complaint}", stacklevel=2)
        end = eos[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self._words = _words(tokenizer, end)
        self._root = LLMatcher(self._words, grammar, log_level=0)
        if self._root.is_error():
            raise _refused(form, [_said(self._root)])

    def start(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self._root.deep_copy(), self._root, [])

    def allowed(self, walkers: Sequence["LlguidanceMatcher"]) -> UInt8[np.ndarray, "walkers bytes"]:
        words = -(-self._words.vocab_size // 32)
        bits = np.zeros((len(walkers), words), dtype=np.int32)
        if len(walkers) < MANY:
            for row, walker in zip(bits, walkers, strict=True):
                walker.inner.unsafe_compute_mask_ptr(row.ctypes.data, 4 * words)
        else:
            places = [(walker.inner, row) for row, walker in enumerate(walkers)]
            self._executor.unsafe_compute_mask_ptr(places, bits.ctypes.data, 4 * words, len(walkers))
        for walker in walkers:
            if walker.inner.is_error() and walker.inner.stop_reason() != NO_WAY_ON:
                raise BrokenLaw(f"llguidance gave up: {_said(walker.inner)}")
        return fitted(bits.view(np.uint8), self._text)

    def complete(self, walkers: Sequence["LlguidanceMatcher"]) -> list[bool]:
        return [bool(walker.inner.is_accepting()) for walker in walkers]


class LlguidanceMatcher:
    """See `Walker`. A step back costs one more mask, whatever the length of the text; the cost of a copy grows with it."""

    def __init__(self, inner: "LLMatcher", root: "LLMatcher", tokens: list[int]) -> None:
        self.inner = inner
        self._root = root
        self._tokens = tokens

    def take(self, token: int) -> None:
        if not self.inner.consume_token(token):
            raise BrokenLaw(f"llguidance lost its way: {_said(self.inner)}")
        self._tokens.append(token)

    def back(self, tokens: int) -> None:
        del self._tokens[len(self._tokens) - tokens :]
        if not self.inner.is_error() and self.inner.rollback(tokens):
            # It remembers its last mask by the number of rows that it has parsed, also when these are taken back (1.9.1):
            # without a mask from here it would give the old one for other tokens of the same length.
            self.inner.compute_bitmask()
        else:  # it never comes back from a dead end
            self.inner = self._root.deep_copy()
            if not self.inner.consume_tokens(self._tokens):
                raise BrokenLaw(f"llguidance lost its way: {_said(self.inner)}")

    def copy(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self.inner.deep_copy(), self._root, list(self._tokens))


def _refused(form: Form, complaints: Sequence[str]) -> BadSetting:
    return BadSetting(f"{form.kind} cannot be kept to: {' '.join('; '.join(complaints).split())}")


def _read(form: Form) -> str:
    from llguidance import LLMatcher

    if form.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(form.text, defaults=JSON)
    return LLMatcher.grammar_from_regex(form.text) if form.kind == "regex" else LLMatcher.grammar_from_lark(form.text)


def _said(matcher: Any) -> str:
    """Its complaint, without the state and the grammar that it prints behind."""
    return " ".join(matcher.get_error().split("<state>")[0].split())


@made_once
def _words(tokenizer: "PreTrainedTokenizerBase", end: int) -> "LLTokenizer":
    """Its view of a tokenizer."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, eos_token=end)
    except ValueError:  # a decoder that it does not know
        return LLTokenizer(TokenizerWrapper(_Spelled(tokenizer, end)), eos_token=end)


class _Spelled:
    """A tokenizer by the text of its tokens, in the form that llguidance asks for."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(special_tokens(tokenizer))
        self.tokens = list(pieces(tokenizer))
        for token in {end, *self.special_token_ids}:
            self.tokens[token] = b"\xff" + tokenizer.convert_ids_to_tokens(token).encode()  # never text

        texts = {piece: token for token, piece in enumerate(self.tokens) if piece and piece[0] != 0xFF}
        self._tokens = texts
        self._longest = max(map(len, texts))

    def __call__(self, text: bytes) -> list[int]:
        """Asked for the usual tokens of a text that is certain: the longest at each place; an end where there is none."""
        found: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._tokens), 0)
            found.append(self._tokens.get(text[:size], self.eos_token_id))
            text = text[size or 1 :]
        return found
