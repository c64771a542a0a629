"""Grammars by xgrammar: a state is one of its matchers, and a fork of one costs about a microsecond."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from specbeam.constraint import Form
from specbeam.errors import BadSetting, BrokenLaw
from specbeam.grammar.spelling import fitted, pieces, text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class XGrammar:
    """Keeps to a form. See `Constraint`.

    Of a JSON schema it passes over the keywords that it does not know, and allows no property that the schema does not name.
    """

    def __init__(self, form: Form, tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]) -> None:
        import xgrammar

        words = _words(tokenizer, vocab, eos)
        self._text, self._vocab, self._library = text_tokens(tokenizer, vocab), vocab, xgrammar
        if form.kind == "json_schema":  # it lets control characters into strings of limited length; JSON does not
            self._text &= _printable(words.decoded_vocab, vocab)
        compiler = xgrammar.GrammarCompiler(words, max_threads=1)
        try:
            if form.kind == "json_schema":  # at most one white space where JSON allows it, or a run of it never ends
                self._compiled = compiler.compile_json_schema(form.text, max_whitespace_cnt=1)
            else:
                compile_text = compiler.compile_regex if form.kind == "regex" else compiler.compile_lark
                self._compiled = compile_text(form.text)
        except RuntimeError as error:
            raise BadSetting(f"{form.kind} cannot be kept to: {' '.join(str(error).split())}") from error

    def root(self) -> Any:
        return self._library.GrammarMatcher(self._compiled)

    def advance(self, state: Any, token: int) -> Any:
        after = state.fork()
        if not after.accept_token(token):
            raise BrokenLaw(f"xgrammar refuses token {token}, which it allowed")
        return after

    def allowed(self, states: Sequence[Any]) -> UInt8[np.ndarray, "states bytes"]:
        bits = self._library.allocate_token_bitmask(len(states), self._vocab)
        for row, state in enumerate(states):
            state.fill_next_token_bitmask(bits, row)
        return fitted(bits.numpy().view(np.uint8), self._text)

    def complete(self, states: Sequence[Any]) -> list[bool]:
        return [bool(state.is_completed()) for state in states]


def _printable(pieces: Sequence[bytes], vocab: int) -> UInt8[np.ndarray, " bytes"]:
    """One bit for every token without control characters."""
    fine = np.zeros(vocab, dtype=bool)
    fine[: len(pieces)] = [min(piece, default=32) >= 32 for piece in pieces[:vocab]]
    return np.packbits(fine, bitorder="little")


def _words(tokenizer: "PreTrainedTokenizerBase", vocab: int, eos: tuple[int, ...]) -> Any:
    """Its view of a tokenizer."""
    from xgrammar import TokenizerInfo, VocabType

    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=list(eos))
    if info.vocab_type is not VocabType.RAW:
        return info
    return TokenizerInfo(pieces(tokenizer)[:vocab], vocab_size=vocab, stop_token_ids=list(eos))
