"""Constraints enforced by llguidance. A walker wraps one of its matchers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from specbeam.core.constraint import Form
from specbeam.doors.grammar.spelling import (
    THREADS_FROM,
    cached_by_tokenizer,
    in_lines,
    restricted_to_text,
    special_tokens,
    text_tokens,
    token_texts,
)
from specbeam.errors import BadSetting, BrokenLaw

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

# At most one space wherever JSON allows white space; otherwise texts could continue with spaces forever.
JSON = {"whitespace_pattern": "[ ]?"}
NO_TOKEN_FITS = "NoExtensionBias"  # llguidance's stop reason if no token spells the required text


class LLGuidance:
    """A constraint (`core.constraint.Constraint`) enforced by llguidance.

    If the form allows only one text, only the usual tokens of this text are allowed.
    """

    def __init__(self, form: Form, tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]) -> None:
        from llguidance import LLExecutor, LLMatcher

        self._text = text_tokens(tokenizer, vocab)
        self._executor = LLExecutor()
        grammar = _grammar_of(form)
        is_invalid, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        if is_invalid:
            raise _refusal(form, messages)
        # about keywords that are ignored because the schema allows it
        self.complaints = [f"{form.kind}: {message}" for message in messages]
        end = eos[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self._tokenizer = _llguidance_tokenizer(tokenizer, end)
        self._root = LLMatcher(self._tokenizer, grammar, log_level=0)
        if self._root.is_error():
            raise _refusal(form, [_error_of(self._root)])

    def start(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self._root.deep_copy(), self._root, [])

    def allowed(self, walkers: Sequence["LlguidanceMatcher"]) -> UInt8[np.ndarray, "walkers bytes"]:
        columns = -(-self._tokenizer.vocab_size // 32)
        bits = np.zeros((len(walkers), columns), dtype=np.int32)
        if len(walkers) < THREADS_FROM:
            address = bits.ctypes.data
            for row, walker in enumerate(walkers):
                walker.inner.unsafe_compute_mask_ptr(address + row * 4 * columns, 4 * columns)
        else:
            places = [(walker.inner, row) for row, walker in enumerate(walkers)]
            self._executor.unsafe_compute_mask_ptr(places, bits.ctypes.data, 4 * columns, len(walkers))
        for walker in walkers:
            if walker.inner.is_error() and walker.inner.stop_reason() != NO_TOKEN_FITS:
                raise BrokenLaw(f"llguidance gave up: {_error_of(walker.inner)}")
        return restricted_to_text(bits.view(np.uint8), self._text)

    def complete(self, walkers: Sequence["LlguidanceMatcher"]) -> list[bool]:
        return [bool(walker.inner.is_accepting()) for walker in walkers]


class LlguidanceMatcher:
    """A walker (`core.constraint.Walker`).

    A step back costs the computation of one mask, independent of the length of the text. The cost of a copy grows with the
    length of the text.
    """

    def __init__(self, inner: "LLMatcher", root: "LLMatcher", tokens: list[int]) -> None:
        self.inner = inner
        self._root = root
        self._tokens = tokens

    def take(self, token: int) -> None:
        if not self.inner.consume_token(token):
            raise BrokenLaw(f"llguidance rejects token {token}, which it allowed: {_error_of(self.inner)}")
        self._tokens.append(token)

    def back(self, tokens: int) -> None:
        del self._tokens[len(self._tokens) - tokens :]
        if not self.inner.is_error() and self.inner.rollback(tokens):
            # llguidance 1.9.1 caches its last mask by the number of parsed rows and keeps it after a rollback. Without a new
            # mask here, it would return the old mask for other tokens of the same length.
            self.inner.compute_bitmask()
        else:  # a matcher cannot roll back from a dead end: start again
            self.inner = self._root.deep_copy()
            if not self.inner.consume_tokens(self._tokens):
                raise BrokenLaw(f"llguidance rejects tokens that it allowed: {_error_of(self.inner)}")

    def copy(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self.inner.deep_copy(), self._root, list(self._tokens))


def _refusal(form: Form, messages: Sequence[str]) -> BadSetting:
    """Return the error for a form that llguidance rejects with these messages."""
    return BadSetting(f"{form.kind} cannot be enforced:{in_lines(*messages)}")


def _grammar_of(form: Form) -> str:
    """Return the form as a grammar of llguidance."""
    from llguidance import LLMatcher

    if form.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(form.text, defaults=JSON))
    if form.kind == "regex":
        return str(LLMatcher.grammar_from_regex(form.text))
    return str(LLMatcher.grammar_from_lark(form.text))


def _error_of(matcher: Any) -> str:
    """Return the error message of a matcher, without the state and grammar that follow it."""
    return " ".join(matcher.get_error().split("<state>")[0].split())


@cached_by_tokenizer
def _llguidance_tokenizer(tokenizer: "PreTrainedTokenizerBase", end: int) -> "LLTokenizer":
    """Return a tokenizer converted for llguidance, with `end` as the end token."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, eos_token=end)
    except ValueError:  # a decoder unknown to llguidance
        pass
    except BaseException as error:  # a panic in Rust is no `Exception`, and would end the server's engine
        if type(error).__name__ != "PanicException":
            raise
    return LLTokenizer(TokenizerWrapper(_LongestMatchTokenizer(tokenizer, end)), eos_token=end)


class _LongestMatchTokenizer:
    """A tokenizer made from the texts of its tokens, with the attributes required by llguidance."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(special_tokens(tokenizer))
        self.tokens = list(token_texts(tokenizer))
        for token in {end, *self.special_token_ids}:
            self.tokens[token] = b"\xff" + tokenizer.convert_ids_to_tokens(token).encode()  # 0xFF never occurs in text

        self._token_of = {text: token for token, text in enumerate(self.tokens) if text and text[0] != 0xFF}
        self._longest = max(map(len, self._token_of))

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens that spell a text: the longest one at each place, or the end token if none fits.

        llguidance calls it if only one text is possible.
        """
        tokens: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._token_of), 0)
            tokens.append(self._token_of.get(text[:size], self.eos_token_id))
            text = text[size or 1 :]
        return tokens
