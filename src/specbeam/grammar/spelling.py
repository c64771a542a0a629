"""How tokens spell text: what a grammar library has to know of a tokenizer."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from specbeam.errors import NotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def pieces(tokenizer: "PreTrainedTokenizerBase") -> list[bytes]:
    """The text of each token, empty for numbers that are no token: for tokenizers that no library knows how to read.

    Raises `NotSupported` unless a text is the text of its tokens one after the other.
    """
    known = set(tokenizer.get_vocab().values())
    texts = [tokenizer.decode([token]) if token in known else "" for token in range(max(known) + 1)]
    spelling = np.array(sorted(known - special_tokens(tokenizer)), dtype=np.int64)
    rng = np.random.default_rng(0)
    for sample in rng.choice(spelling, size=(64, 8)).tolist():
        if tokenizer.decode(sample) != "".join(texts[token] for token in sample):
            raise NotSupported(
                f"cannot tell which text the tokens of {type(tokenizer).__name__} stand for: its decoder changes them by "
                "their neighbours; take a byte-level or byte-fallback tokenizer"
            )
    return [text.encode() for text in texts]
