"""How tokens spell text: what a grammar library has to know of a tokenizer."""

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Bool, UInt8

from specbeam.errors import NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MANY = 32  # walkers whose masks are worth several threads
Made = TypeVar("Made")


def made_once(make: Callable[..., Made]) -> Callable[..., Made]:
    """Keep what is made of a tokenizer as long as there is the tokenizer: for a large vocabulary it takes a second."""
    known: weakref.WeakKeyDictionary[Any, dict[Hashable, Made]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def found(tokenizer: "PreTrainedTokenizerBase", *how: Hashable) -> Made:
        own = known.setdefault(tokenizer, {})
        key = (len(tokenizer), *how)
        if key not in own:
            own[key] = make(tokenizer, *how)
        return own[key]

    return found


@made_once
def text_tokens(tokenizer: "PreTrainedTokenizerBase", vocab: int) -> UInt8[np.ndarray, " bytes"]:
    """One bit for every token of the model that stands for text, in the layout of `Constraint.allowed`.

    Special tokens do not, nor do rows that the model has beyond its tokenizer.
    """
    is_text = np.zeros(vocab, dtype=bool)
    known = np.array(list(tokenizer.get_vocab().values()), dtype=np.int64)
    is_text[known[known < vocab]] = True
    is_text[[token for token in special_tokens(tokenizer) if token < vocab]] = False
    return np.packbits(is_text, bitorder="little")


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Tokens that decoding leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}


def fitted(bits: UInt8[np.ndarray, "rows some"], text: UInt8[np.ndarray, " bytes"]) -> UInt8[np.ndarray, "rows bytes"]:
    """Bits of a library whose rows have a width of their own, without tokens that are no text."""
    width = min(bits.shape[1], len(text))
    allowed = np.zeros((len(bits), len(text)), dtype=np.uint8)
    np.bitwise_and(bits[:, :width], text[:width], out=allowed[:, :width])
    return allowed


@made_once
def pieces(tokenizer: "PreTrainedTokenizerBase") -> list[bytes]:
    """The text of each token, for tokenizers that no library knows how to read. Empty, which is never allowed, for numbers
    that are no token and for tokens that are no text by themselves, like one byte of a character.

    Raises `NotSupported` unless a text is the text of its tokens one after the other.
    """
    known = set(tokenizer.get_vocab().values())
    texts = [_decoded(tokenizer, [token]) if token in known else "" for token in range(max(known) + 1)]
    texts = ["" if UNKNOWN in text else text for text in texts]
    spelling = np.array([token for token in sorted(known - special_tokens(tokenizer)) if texts[token]], dtype=np.int64)
    rng = np.random.default_rng(0)
    for sample in rng.choice(spelling, size=(64, 8)).tolist() if len(spelling) else [[]]:
        if not sample or _decoded(tokenizer, sample) != "".join(texts[token] for token in sample):
            raise NotSupported(
                f"cannot tell which text the tokens of {type(tokenizer).__name__} stand for: its decoder changes them by "
                "their neighbours; take a byte-level or byte-fallback tokenizer"
            )
    return [text.encode() for text in texts]


def spelled(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    """The text that tokens stand for, character by character.

    A decoder may tidy up around punctuation or drop the space at the beginning of a text; neither belongs to the tokens, so
    they are decoded behind a letter.
    """
    letter = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    head = _decoded(tokenizer, letter)
    whole = _decoded(tokenizer, [*letter, *tokens])
    return whole[len(head) :] if whole.startswith(head) else _decoded(tokenizer, tokens)


@made_once
def closing_tokens(
    tokenizer: "PreTrainedTokenizerBase", vocab: int, stop_strings: tuple[str, ...]
) -> Bool[np.ndarray, " vocab"] | None:
    """Return which tokens of a model can complete one of these strings, and perhaps some that cannot.

    A token that completes a string holds its last character, or is part of a character. None if the text of a token depends
    on its neighbours, so that nobody can tell.
    """
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    last = {stop[-1] for stop in stop_strings}
    head, texts = _behind_a_letter(tokenizer)
    closing = np.ones(vocab, dtype=bool)
    for token, text in enumerate(texts[:vocab]):
        spelling = text[len(head) :]
        is_clear = text.startswith(head) and spelling != "" and UNKNOWN not in spelling
        closing[token] = not is_clear or not last.isdisjoint(spelling)
    return closing


@made_once
def _behind_a_letter(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, list[str]]:
    """Return the text of a letter, and that of the letter and each token, special ones too."""
    letter = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    each = [[*letter, token] for token in range(len(tokenizer))]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.decode(letter), [tokenizer.decode(tokens) for tokens in each]
    head, *texts = backend.decode_batch([letter, *each], skip_special_tokens=False)
    return head, texts


UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are no character


def _decoded(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
