"""The text of each token, for grammar libraries."""

import functools
import re
import weakref
from collections.abc import Callable, Hashable
from textwrap import indent
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Bool, UInt8

from specbeam.errors import NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


THREADS_FROM = 32  # number of walkers from which computing masks in several threads is faster
Made = TypeVar("Made")


def in_lines(*messages: str) -> str:
    """Return messages of a library after a blank; those that mark a place by a caret below the line, with their lines."""
    text = "\n".join(message.rstrip() for message in messages)
    if not re.search(r"^ *\^ *$", text, re.MULTILINE):
        return " " + " ".join(text.split())
    return "\n" + indent(text, "  ")


def cached_by_tokenizer(make: Callable[..., Made]) -> Callable[..., Made]:
    """Return `make` with a cache that lives as long as the tokenizer, its first argument.

    For a large vocabulary, a call takes about a second. The key includes the tokenizer's length, because tokens may be
    added.
    """
    caches: weakref.WeakKeyDictionary[Any, dict[Hashable, Made]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def make_or_look_up(tokenizer: "PreTrainedTokenizerBase", *arguments: Hashable) -> Made:
        cache = caches.setdefault(tokenizer, {})
        key = (len(tokenizer), *arguments)
        if key not in cache:
            cache[key] = make(tokenizer, *arguments)
        return cache[key]

    return make_or_look_up


@cached_by_tokenizer
def text_tokens(tokenizer: "PreTrainedTokenizerBase", vocab: int) -> UInt8[np.ndarray, " bytes"]:
    """Return a bit mask of the text tokens, in the layout of `Constraint.allowed`, for `vocab` logits.

    Special tokens and logits without a token are not text.
    """
    is_text = np.zeros(vocab, dtype=bool)
    known = np.array(list(tokenizer.get_vocab().values()), dtype=np.int64)
    is_text[known[known < vocab]] = True
    is_text[[token for token in special_tokens(tokenizer) if token < vocab]] = False
    return np.packbits(is_text, bitorder="little")


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Return the tokens that decoding omits."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}


def restricted_to_text(
    bits: UInt8[np.ndarray, "rows some"], text: UInt8[np.ndarray, " bytes"]
) -> UInt8[np.ndarray, "rows bytes"]:
    """Return the bit masks of a library, truncated or zero-padded to the width of `text`, restricted to text tokens.

    Args:
        bits: masks of allowed tokens, of the library's width.
        text: mask of the text tokens, see `text_tokens`.
    """
    width = min(bits.shape[1], len(text))
    allowed = np.zeros((len(bits), len(text)), dtype=np.uint8)
    np.bitwise_and(bits[:, :width], text[:width], out=allowed[:, :width])
    return allowed


@cached_by_tokenizer
def token_texts(tokenizer: "PreTrainedTokenizerBase") -> list[bytes]:
    """Return the text of each token id in UTF-8, for tokenizers unknown to the grammar library.

    The text is empty for ids without a token and for parts of characters, such as single bytes; they are never allowed.
    Raises `NotSupported` unless texts of tokens are concatenated in a sequence, tested on 64 random sequences of 8 tokens.
    """
    known = set(tokenizer.get_vocab().values())
    texts = [_decoded(tokenizer, [token]) if token in known else "" for token in range(max(known) + 1)]
    texts = ["" if UNKNOWN in text else text for text in texts]
    readable = np.array([token for token in sorted(known - special_tokens(tokenizer)) if texts[token]], dtype=np.int64)
    rng = np.random.default_rng(0)
    for sample in rng.choice(readable, size=(64, 8)).tolist() if len(readable) else [[]]:
        if not sample or _decoded(tokenizer, sample) != "".join(texts[token] for token in sample):
            raise NotSupported(
                f"the text of tokens of {type(tokenizer).__name__} depends on their neighbours, so no form can be enforced; "
                "use a byte-level or byte-fallback tokenizer"
            )
    return [text.encode() for text in texts]


def text_of_tokens(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    """Return the exact text of tokens, character by character.

    A decoder may change spaces around punctuation or drop the first space of a text. To avoid both, the tokens are decoded
    after a letter and without clean-up, and the letter is removed.
    """
    letter = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    head = _decoded(tokenizer, letter)
    whole = _decoded(tokenizer, [*letter, *tokens])
    return whole[len(head) :] if whole.startswith(head) else _decoded(tokenizer, tokens)


@cached_by_tokenizer
def closing_tokens(
    tokenizer: "PreTrainedTokenizerBase", vocab: int, stop_strings: tuple[str, ...]
) -> Bool[np.ndarray, " vocab"] | None:
    """Return a mask over the `vocab` tokens of a model: True for all that can complete a stop string, and some others.

    A token can complete a stop string only if its text contains the last character of the string, or if it is a part of a
    character. Returns None if the text of a token depends on its neighbours, because this then does not hold.
    """
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    last = {stop[-1] for stop in stop_strings}
    head, texts = _texts_after_a_letter(tokenizer)
    closing = np.ones(vocab, dtype=bool)
    for token, text in enumerate(texts[:vocab]):
        spelling = text[len(head) :]
        is_clear = text.startswith(head) and spelling != "" and UNKNOWN not in spelling
        closing[token] = not is_clear or not last.isdisjoint(spelling)
    return closing


@cached_by_tokenizer
def _texts_after_a_letter(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, list[str]]:
    """Return the text of a letter, and the text of the letter followed by each token, including special tokens."""
    letter = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    sequences = [[*letter, token] for token in range(len(tokenizer))]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.decode(letter), [tokenizer.decode(tokens) for tokens in sequences]
    head, *texts = backend.decode_batch([letter, *sequences], skip_special_tokens=False)
    return head, texts


UNKNOWN = "\ufffd"  # the decoder's character for invalid bytes


def _decoded(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    """Return the decoded text of tokens, without special tokens and without clean-up of spaces."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
