"""Bounds on the number of tokens of a text, known before it is tokenized."""

import re
from typing import Any

# Normalizers that keep at least a quarter of a text: NFC joins at most three letters (Hangul) to one.
_KEEPING = re.compile(
    r"None|NFC\(\)|(Sequence\(normalizers=\[)?(Prepend\(prepend=\"▁\"\)(, )?)?"
    r"(Replace\(pattern=String\(\" \"\), content=\"▁\"\))?(\]\))?"
)
JOINED = 4


def characters_per_token(tokenizer: Any) -> int | None:
    """Return a number of characters that no token of a text exceeds on average; None if there is no bound.

    There is a bound if each byte of a text is in some token: in byte-level BPE, and in BPE with a token per byte. Other
    tokenizers give one unknown token for any number of letters, or drop white space.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        return None
    model = inner.model
    is_whole = "ByteLevel" in str(inner.pre_tokenizer) or getattr(model, "byte_fallback", False)
    if type(model).__name__ != "BPE" or not is_whole or not _KEEPING.fullmatch(str(inner.normalizer)):
        return None
    added = inner.get_added_tokens_decoder().values()
    if any(one.lstrip or one.rstrip for one in added):  # such a token swallows any number of spaces beside it
        return None
    return JOINED * max(map(len, inner.get_vocab()))
