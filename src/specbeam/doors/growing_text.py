"""Text that arrives token by token: as much of it as no further token can change.

What can change depends on the tokenizer's decoder. It may join bytes to characters, decode a run of bytes as a whole, treat
the last token in its own way, or take spaces away before punctuation. All of that is held back, and nothing else.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinMethodType
from typing import Any

from specbeam.doors.grammar.spelling import UNKNOWN, special_tokens, text_of_tokens
from specbeam.errors import BrokenPart

CONTEXT = 16  # tokens that are decoded again before new ones: the first token of a text may be decoded otherwise
HALF_CHARACTER = 3  # replacement characters at most for the bytes of a character that is not complete
# The methods of transformers that decode by the tokenizer's decoder, or token by token, and do nothing else to a text. A
# method with another name may do anything.
DECODING = frozenset(
    {
        "PreTrainedTokenizerBase.decode",
        "PreTrainedTokenizerBase.clean_up_tokenization",
        "CodeGenTokenizer.decode",
        "MarianTokenizer.decode",
        "MarianTokenizer._decode",
        "PythonBackend._decode",
        "PythonBackend.convert_ids_to_tokens",
        "SentencePieceBackend._decode",
        "TokenizersBackend._decode",
    }
)
# Those that make a text of tokens in Python. Further tokens only add to it, and complete its last character.
SPELLING = frozenset(
    {
        "ByT5Tokenizer.convert_tokens_to_string",
        "M2M100Tokenizer.convert_tokens_to_string",
        "MarianTokenizer.convert_tokens_to_string",
        "PerceiverTokenizer.convert_tokens_to_string",
        "PythonBackend.convert_tokens_to_string",
        "SentencePieceBackend.convert_tokens_to_string",
        "Speech2TextTokenizer.convert_tokens_to_string",
    }
)
BYTE_MARK = frozenset("<0x>123456789abcdefABCDEF+")  # characters of the name of a byte token, <0x0A>
CLEANED_UP = frozenset(" .?!,'ntmsvre")  # characters of what cleaning up looks for: a space and at most three others


@dataclass(frozen=True)
class OpenEnd:
    """What further tokens can change at the end of a decoded text.

    Attributes:
        is_known: whether the decoder is known; if not, everything can change.
        has_byte_runs: neighbouring byte tokens are decoded as a whole, up to the next token that is no byte.
        has_half_characters: the last token may end within a character.
        marks_last: the last token is decoded otherwise than the same token in the middle.
    """

    is_known: bool = True
    has_byte_runs: bool = False
    has_half_characters: bool = False
    marks_last: bool = False


UNKNOWN_END = OpenEnd(is_known=False)


class GrowingText:
    """The text of a list of tokens that only grows.

    Args:
        tokenizer: decodes.
        shows_special: whether the text has special tokens.
        is_exact: whether the text is that of `text_of_tokens`, as under a constraint.
        ends: tokens that end a text and are no part of it.
    """

    def __init__(
        self, tokenizer: Any, shows_special: bool = False, is_exact: bool = False, ends: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._shows_special = shows_special
        self._is_exact = is_exact
        self._end = open_end_of(tokenizer)
        has_names = self._end.has_byte_runs or self._end.marks_last
        self._special = special_tokens(tokenizer) if has_names else set()
        self._cleans = False if is_exact or not self._end.is_known else _cleans_up(tokenizer)
        self._length = 0  # tokens whose text is known
        self._raw = ""  # their text, before it is cleaned up
        self._settled = ""

    def settled(self, tokens: Sequence[int]) -> str:
        """Return the text that begins the text of these tokens, whatever tokens follow them.

        Args:
            tokens: token ids, the first of which are those of the call before.
        """
        if tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]
        closed = [*tokens[: self._closed(tokens)]]
        if len(closed) > self._length:
            self._raw = self._raw_text(closed)
            self._length = len(closed)
            text = self._certain(closed)
            if len(text) > len(self._settled) and text.startswith(self._settled):
                self._settled = text
        return self._settled

    def _closed(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens before the run of bytes at the end, which further bytes may join."""
        if not self._end.is_known:
            return 0
        if not self._end.has_byte_runs:
            return len(tokens)
        has_bytes = False
        for place in range(len(tokens) - 1, -1, -1):
            name = self._tokenizer.convert_ids_to_tokens(tokens[place])
            is_byte = name is not None and "<0x" in "".join(filter(BYTE_MARK.__contains__, name))
            has_bytes |= is_byte
            if not is_byte and self._is_shown(tokens[place]):
                return place + 1 if has_bytes else len(tokens)
        return 0

    def _is_shown(self, token: int) -> bool:
        """Return whether a token is decoded whether or not special tokens are shown."""
        return token not in self._special and self._tokenizer.convert_ids_to_tokens(token) is not None

    def _certain(self, tokens: list[int]) -> str:
        """Return the part of the text of tokens that is the same whatever follows them."""
        raw = self._raw
        if self._end.marks_last:
            follower = [token for token in tokens if self._is_shown(token)][-1:]
            raw = _common_start(raw, self._decode([*tokens, *follower])) if follower else ""
        if self._end.has_half_characters:
            raw = _without_half_character(raw)
        if self._cleans is False:
            return raw
        certain = raw[: cleaned_length(raw)]
        cleaned = str(self._tokenizer.clean_up_tokenization(certain))
        return cleaned if self._cleans else _common_start(certain, cleaned)

    def _raw_text(self, tokens: list[int]) -> str:
        """Return the text of tokens before it is cleaned up.

        New tokens are decoded together with the last few known ones. Where these read otherwise in front of the new ones
        than alone, or alone than in the text, all tokens are decoded.
        """
        start = max(self._length - CONTEXT, 0)
        if start:
            known = self._decode(tokens[start : self._length])
            longer = self._decode(tokens[start:])
            whole = _without_half_character(known)
            half = known[len(whole) :]
            if whole and longer.startswith(whole) and self._raw.endswith(half):
                return self._raw.removesuffix(half) + longer[len(whole) :]
        return self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        if self._is_exact:
            return text_of_tokens(self._tokenizer, tokens)
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=not self._shows_special, clean_up_tokenization_spaces=False
            )
        )


def unsent(text: str, sent: str) -> str:
    """Return what follows the text that was sent. Raises `BrokenPart` if the whole text does not begin with it."""
    if not text.startswith(sent):
        raise BrokenPart(
            f"the stream sent {sent[-80:]!r}, and the text does not begin with it: {text[:80]!r}; the tokenizer decodes "
            "in a way that is not known to specbeam: please report this with the name of the tokenizer"
        )
    return text[len(sent) :]


def _common_start(first: str, second: str) -> str:
    """Return the longest text that both texts begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    length = next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
    return first[:length]


def _without_half_character(text: str) -> str:
    """Return a text without the replacement characters at its end that may stand for a part of a character."""
    for _ in range(HALF_CHARACTER):
        text = text.removesuffix(UNKNOWN)
    return text


def cleaned_length(text: str) -> int:
    """Return how many characters of a text are cleaned up alike, whatever follows them.

    Cleaning up takes away spaces, in a few strings of a space and at most three other characters. No such string goes across
    a place before which there is no space, no space among the last three characters, or a character that none of them has.
    """
    for end in range(len(text), 0, -1):
        is_far_from_spaces = end >= 3 and " " not in text[end - 3 : end]
        if text[end - 1] not in CLEANED_UP or is_far_from_spaces or " " not in text[:end]:
            return end
    return 0


def _cleans_up(tokenizer: Any) -> bool | None:
    """Return whether decoding takes spaces away before punctuation; None if that cannot be told.

    Some versions of transformers do so only for tokenizers that are no byte-pair encoding.
    """
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return True
    ids = tokenizer("a .", add_special_tokens=False)["input_ids"]
    raw = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if tokenizer.clean_up_tokenization(raw) == raw:
        return None
    return bool(tokenizer.decode(ids) != raw)


# Decoders.


def open_end_of(tokenizer: Any) -> OpenEnd:
    """Return what further tokens can change at the end of a text of this tokenizer."""
    methods = ["decode", "_decode"]
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        methods.append("clean_up_tokenization")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        methods.append("convert_ids_to_tokens")
    if not all(_name_of(tokenizer, method) in DECODING for method in methods):
        return UNKNOWN_END
    if backend is not None:  # some classes put a function of their own in place of its method
        return _end_of_stages(backend.decoder) if isinstance(backend.decode, BuiltinMethodType) else UNKNOWN_END
    is_known = _name_of(tokenizer, "convert_tokens_to_string") in SPELLING
    return OpenEnd(has_half_characters=True) if is_known else UNKNOWN_END


def _name_of(tokenizer: Any, method: str) -> str:
    """Return the name of a method with the class of transformers that defines it; "" if it is defined elsewhere."""
    function = getattr(getattr(tokenizer, method, None), "__func__", None)
    module = str(getattr(function, "__module__", ""))
    return str(getattr(function, "__qualname__", "")) if module.startswith("transformers.") else ""


def _end_of_stages(decoder: Any) -> OpenEnd:
    """Return what further tokens can change behind the stages of a decoder of the library tokenizers."""
    if decoder is None:  # tokens are joined by spaces
        return OpenEnd()
    try:
        stages = [*_stages_in(json.loads(decoder.__getstate__()))]
    except Exception:  # the library raises no other class; the decoder is written in Python
        return UNKNOWN_END
    end = OpenEnd()
    is_one_text = False  # all tokens are one text by now
    for number, stage in enumerate(stages):
        kind = stage["type"]
        if kind == "Strip" and stage["stop"]:  # the library fails where a text is shorter than what it strips
            end = UNKNOWN_END
        elif kind == "Fuse":
            is_one_text = True
        elif is_one_text:
            end = end if _only_adds(stage, end) else UNKNOWN_END
        elif kind == "ByteLevel":
            end = replace(end, has_half_characters=True) if end == OpenEnd() else UNKNOWN_END
            is_one_text = True
        elif kind == "ByteFallback":
            keeps_bytes = end == OpenEnd() and all(map(_keeps_byte_tokens, stages[:number]))
            end = replace(end, has_byte_runs=True) if keeps_bytes else UNKNOWN_END
        elif kind == "BPEDecoder":
            end = replace(end, marks_last=True) if end == OpenEnd() else UNKNOWN_END
        elif kind not in ("CTC", "Metaspace", "Replace", "Strip", "WordPiece") or end.marks_last:
            end = UNKNOWN_END
        if not end.is_known:
            return UNKNOWN_END
    return end


def _stages_in(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for stage in decoder["decoders"]:
            yield from _stages_in(stage)
    else:
        yield decoder


def _keeps_byte_tokens(stage: Mapping[str, Any]) -> bool:
    """Return whether a stage before that of the bytes makes no byte token, and changes none."""
    if stage["type"] != "Replace":
        return True
    pattern = stage["pattern"].get("String", "")
    return pattern != "" and BYTE_MARK.isdisjoint(pattern) and BYTE_MARK.isdisjoint(stage["content"])


def _only_adds(stage: Mapping[str, Any], end: OpenEnd) -> bool:
    """Return whether a stage that reads the whole text only adds to its own text when more text comes."""
    if end.marks_last:
        return False
    if stage["type"] == "Metaspace":
        return True
    if stage["type"] == "Strip":
        return bool(stage["content"] != UNKNOWN)
    if stage["type"] == "Replace":
        pattern = stage["pattern"].get("String", "")
        return len(pattern) == 1 and UNKNOWN not in pattern + stage["content"]
    return False
