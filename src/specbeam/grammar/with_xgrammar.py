"""Grammars by xgrammar: a walker is one of its matchers."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from specbeam.core.constraint import Form
from specbeam.errors import BadSetting, BrokenLaw
from specbeam.grammar.spelling import MANY, fitted, made_once, pieces, text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class XGrammar:
    """Keeps to a form. See `Constraint`.

    Of a JSON schema it passes over the keywords that it does not know, and allows no property that the schema does not name.
    """

    def __init__(self, form: Form, tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]) -> None:
        import xgrammar

        compiler, printable = _compiler(tokenizer, vocab, eos)
        self._text = text_tokens(tokenizer, vocab)
        self._vocab = vocab
        self._library = xgrammar
        self._batch = xgrammar.BatchGrammarMatcher()
        if form.kind == "json_schema":  # it lets control characters into strings of limited length; JSON does not
            self._text = self._text & printable
            _refuse_look_around(form.text)
        try:
            if form.kind == "json_schema":  # at most one white space where JSON allows it, or a run of it never ends
                self._compiled = compiler.compile_json_schema(form.text, max_whitespace_cnt=1)
            else:
                compile_text = compiler.compile_regex if form.kind == "regex" else compiler.compile_lark
                self._compiled = compile_text(form.text)
        except RuntimeError as error:
            said = re.sub(r"^\[[0-9:]+\] \S+:\d+: ", "", " ".join(str(error).split()))  # without time and place
            raise BadSetting(f"{form.kind} cannot be kept to: {said}") from error

    def start(self) -> "XgrammarMatcher":
        return XgrammarMatcher(self._library.GrammarMatcher(self._compiled))

    def allowed(self, walkers: Sequence["XgrammarMatcher"]) -> UInt8[np.ndarray, "walkers bytes"]:
        bits = self._library.allocate_token_bitmask(len(walkers), self._vocab)
        if len(walkers) < MANY:
            for row, walker in enumerate(walkers):
                walker.inner.fill_next_token_bitmask(bits, row)
        else:
            self._batch.batch_fill_next_token_bitmask([walker.inner for walker in walkers], bits)
        return fitted(bits.numpy().view(np.uint8), self._text)

    def complete(self, walkers: Sequence["XgrammarMatcher"]) -> list[bool]:
        return [bool(walker.inner.is_completed()) for walker in walkers]


class XgrammarMatcher:
    """See `Walker`. A step back costs as little as a step on; the cost of a copy grows with the text."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def take(self, token: int) -> None:
        if not self.inner.accept_token(token):
            raise BrokenLaw(f"xgrammar refuses token {token}, which it allowed")

    def back(self, tokens: int) -> None:
        self.inner.rollback(tokens)

    def copy(self) -> "XgrammarMatcher":
        return XgrammarMatcher(self.inner.fork())


LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")  # an opening parenthesis that is not escaped


def _refuse_look_around(schema: str) -> None:
    """Of a pattern in a schema it would leave look-around out and say so on standard error alone."""
    for pattern in _patterns(json.loads(schema)):
        if LOOK_AROUND.search(pattern):
            raise BadSetting(
                f"json_schema cannot be kept to: pattern {pattern!r} looks around, which xgrammar leaves out"
            )


def _patterns(schema: Any) -> Iterator[str]:
    """Every regular expression in a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            yield from schema["patternProperties"]
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _patterns(part)


@made_once
def _compiler(
    tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]
) -> tuple[Any, UInt8[np.ndarray, " bytes"]]:
    """Its compiler for a tokenizer, which remembers forms, and one bit for every token without control characters."""
    from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

    words = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=list(eos))
    if words.vocab_type is VocabType.RAW:
        words = TokenizerInfo(pieces(tokenizer)[:vocab], vocab_size=vocab, stop_token_ids=list(eos))
    spelled = words.decoded_vocab
    fine = np.zeros(vocab, dtype=bool)
    fine[: len(spelled)] = [min(piece, default=32) >= 32 for piece in spelled[:vocab]]
    return GrammarCompiler(words, max_threads=1), np.packbits(fine, bitorder="little")
