"""Constraints enforced by xgrammar. A walker wraps one of its matchers."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from specbeam.core.constraint import Form
from specbeam.doors.grammar.spelling import (
    THREADS_FROM,
    cached_by_tokenizer,
    restricted_to_text,
    text_tokens,
    token_texts,
)
from specbeam.errors import BadSetting, BrokenLaw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class XGrammar:
    """A constraint (`core.constraint.Constraint`) enforced by xgrammar.

    xgrammar ignores unknown keywords of a JSON schema, and allows only properties named in the schema.
    """

    def __init__(self, form: Form, tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]) -> None:
        import xgrammar

        compiler, printable = _compiler(tokenizer, vocab, eos)
        self._text = text_tokens(tokenizer, vocab)
        self._vocab = vocab
        self._library = xgrammar
        self._batch = xgrammar.BatchGrammarMatcher()
        if form.kind == "json_schema":  # xgrammar, but not JSON, allows control characters in strings of limited length
            self._text = self._text & printable
            _refuse_look_around(form.text)
        try:
            if form.kind == "json_schema":  # at most one space wherever JSON allows white space: a run might never end
                self._compiled = compiler.compile_json_schema(form.text, max_whitespace_cnt=1)
            else:
                compile_text = compiler.compile_regex if form.kind == "regex" else compiler.compile_lark
                self._compiled = compile_text(form.text)
        except RuntimeError as error:
            message = re.sub(r"^\[[0-9:]+\] \S+:\d+: ", "", " ".join(str(error).split()))  # without time and place
            raise BadSetting(f"{form.kind} cannot be enforced: {message}") from error

    def start(self) -> "XgrammarMatcher":
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled))

    def allowed(self, walkers: Sequence["XgrammarMatcher"]) -> UInt8[np.ndarray, "walkers bytes"]:
        bits = self._library.allocate_token_bitmask(len(walkers), self._vocab)
        if len(walkers) < THREADS_FROM:
            for row, walker in enumerate(walkers):
                walker.inner.fill_next_token_bitmask(bits, row)
        else:
            self._batch.batch_fill_next_token_bitmask([walker.inner for walker in walkers], bits)
        return restricted_to_text(bits.numpy().view(np.uint8), self._text)

    def complete(self, walkers: Sequence["XgrammarMatcher"]) -> list[bool]:
        return [bool(walker.inner.is_completed()) for walker in walkers]


class XgrammarMatcher:
    """A walker (`core.constraint.Walker`).

    A step back costs as little as a step forward. The cost of a copy grows with the length of the text.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def take(self, token: int) -> None:
        if not self.inner.accept_token(token):
            raise BrokenLaw(f"xgrammar rejects token {token}, which it allowed")

    def back(self, tokens: int) -> None:
        self.inner.rollback(tokens)

    def copy(self) -> "XgrammarMatcher":
        return XgrammarMatcher(self.inner.fork())


LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")  # an opening parenthesis that is not escaped


def _refuse_look_around(schema: str) -> None:
    """Raise `BadSetting` if a pattern in a JSON schema uses look-around.

    xgrammar would ignore the look-around and report it only on standard error.
    """
    for pattern in _patterns(json.loads(schema)):
        if LOOK_AROUND.search(pattern):
            raise BadSetting(
                f"json_schema cannot be enforced: pattern {pattern!r} uses look-around, which xgrammar ignores"
            )


def _patterns(schema: Any) -> Iterator[str]:
    """Yield all regular expressions in a JSON schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            yield from schema["patternProperties"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _patterns(part)


@cached_by_tokenizer
def _compiler(
    tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]
) -> tuple[Any, UInt8[np.ndarray, " bytes"]]:
    """Return xgrammar's compiler for a tokenizer, with its cache, and a mask of tokens without control characters."""
    from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=list(eos))
    if info.vocab_type is VocabType.RAW:
        info = TokenizerInfo(token_texts(tokenizer)[:vocab], vocab_size=vocab, stop_token_ids=list(eos))
    texts = info.decoded_vocab
    is_printable = np.zeros(vocab, dtype=bool)
    is_printable[: len(texts)] = [min(text, default=32) >= 32 for text in texts[:vocab]]
    return GrammarCompiler(info, max_threads=1), np.packbits(is_printable, bitorder="little")
