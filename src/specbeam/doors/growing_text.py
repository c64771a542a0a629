"""Streamed text: the part of a growing text that later tokens cannot change.

The changeable part depends on the tokenizer's decoder, which may join bytes to characters, decode a run of bytes as a whole,
decode the last token differently, or remove spaces before punctuation. Exactly this part is held back.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinMethodType
from typing import Any

from specbeam.doors.grammar.spelling import UNKNOWN, special_tokens, text_of_tokens
from specbeam.errors import BrokenPart
from specbeam.models.stand_ins import StandInTokenizer

CONTEXT = 16  # tokens decoded again before new ones, because the first token of a text may be decoded differently
HALF_CHARACTER = 3  # maximum number of replacement characters of an incomplete character
# Methods of transformers that decode with the tokenizer's decoder or token by token, without other changes. Methods with
# other names may change texts in any way.
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
# Methods that convert tokens to text in Python. Further tokens only extend the text and complete its last character.
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
BYTE_MARK = frozenset("<0x>123456789abcdefABCDEF+")  # characters in names of byte tokens, such as <0x0A>
CLEANED_UP = frozenset(
    " .?!,'ntmsvre"
)  # characters in the strings changed by the clean-up: a space and at most three others


@dataclass(frozen=True)
class OpenEnd:
    """The changeable end of a decoded text.

    Attributes:
        is_known: whether the decoder is known; otherwise all text may change.
        has_byte_runs: neighbouring byte tokens are decoded as a whole, up to the next other token.
        has_half_characters: the last token may end within a character.
        marks_last: the last token is decoded differently from the same token in the middle.
    """

    is_known: bool = True
    has_byte_runs: bool = False
    has_half_characters: bool = False
    marks_last: bool = False


UNKNOWN_END = OpenEnd(is_known=False)


class GrowingText:
    """The text of a growing list of tokens.

    Args:
        tokenizer: the tokenizer.
        shows_special: whether special tokens are included.
        is_exact: whether the text is that of `text_of_tokens`, as for constraints.
        ends: end tokens, which are not part of the text.
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
        self._length = 0  # number of decoded tokens
        self._raw = ""  # their text before the clean-up
        self._settled = ""

    def settled(self, tokens: Sequence[int]) -> str:
        """Return the part of the text of these tokens that no further token can change.

        Args:
            tokens: token ids, beginning with those of the previous call.
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
        """Return the number of tokens before a final run of bytes, which further bytes may extend."""
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
        """Return whether a token is decoded even if special tokens are hidden."""
        return token not in self._special and self._tokenizer.convert_ids_to_tokens(token) is not None

    def _certain(self, tokens: list[int]) -> str:
        """Return the part of the text of tokens that does not depend on further tokens."""
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
        """Return the text of tokens before the clean-up.

        New tokens are decoded together with the last few known ones. If the text of these depends on the new ones or on
        earlier ones, all tokens are decoded.
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
    """Return the rest of a text after the part sent. Raises `BrokenPart` if the text does not begin with that part."""
    if not text.startswith(sent):
        raise BrokenPart(
            f"the stream sent {sent[-80:]!r}, and the final text differs: {text[:80]!r}; this tokenizer decodes in an "
            "unknown way: please report its name"
        )
    return text[len(sent) :]


def _common_start(first: str, second: str) -> str:
    """Return the longest common prefix of two texts."""
    return first[: common_length(first, second)]


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _without_half_character(text: str) -> str:
    """Return a text without final replacement characters, which may stand for a part of a character."""
    for _ in range(HALF_CHARACTER):
        text = text.removesuffix(UNKNOWN)
    return text


def cleaned_length(text: str) -> int:
    """Return the number of characters whose clean-up does not depend on further text.

    The clean-up removes spaces in a few strings of a space and at most three other characters. No such string extends across
    a place if the text before it has no space, has no space in its last three characters, or ends with a character that is
    in none of these strings.
    """
    for end in range(len(text), 0, -1):
        is_far_from_spaces = end >= 3 and " " not in text[end - 3 : end]
        if text[end - 1] not in CLEANED_UP or is_far_from_spaces or " " not in text[:end]:
            return end
    return 0


def _cleans_up(tokenizer: Any) -> bool | None:
    """Return whether decoding removes spaces before punctuation; None if unknown.

    Some versions of transformers do so only for tokenizers without byte-pair encoding.
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
    """Return the changeable end of texts of a tokenizer."""
    if isinstance(tokenizer, StandInTokenizer):  # it decodes like its backend
        return _end_of_stages(tokenizer.backend_tokenizer.decoder)
    methods = ["decode", "_decode"]
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        methods.append("clean_up_tokenization")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        methods.append("convert_ids_to_tokens")
    if not all(_name_of(tokenizer, method) in DECODING for method in methods):
        return UNKNOWN_END
    if backend is not None:  # some classes replace its method by a function
        return _end_of_stages(backend.decoder) if isinstance(backend.decode, BuiltinMethodType) else UNKNOWN_END
    is_known = _name_of(tokenizer, "convert_tokens_to_string") in SPELLING
    return OpenEnd(has_half_characters=True) if is_known else UNKNOWN_END


def _name_of(tokenizer: Any, method: str) -> str:
    """Return the qualified name of a method of transformers; "" if it is defined elsewhere."""
    function = getattr(getattr(tokenizer, method, None), "__func__", None)
    module = str(getattr(function, "__module__", ""))
    return str(getattr(function, "__qualname__", "")) if module.startswith("transformers.") else ""


def _end_of_stages(decoder: Any) -> OpenEnd:
    """Return the changeable end of texts of a decoder of the library tokenizers, from its stages."""
    if decoder is None:  # tokens are joined by spaces
        return OpenEnd()
    try:
        stages = [*_stages_in(json.loads(decoder.__getstate__()))]
    except Exception:  # the library has no other class; the decoder is written in Python
        return UNKNOWN_END
    end = OpenEnd()
    is_one_text = False  # whether the tokens are joined to one text
    for number, stage in enumerate(stages):
        kind = stage["type"]
        if kind == "Strip" and stage["stop"]:  # the library fails for texts shorter than the stripped part
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
    """Return whether a stage before the byte stage neither creates nor changes byte tokens."""
    if stage["type"] != "Replace":
        return True
    pattern = stage["pattern"].get("String", "")
    return pattern != "" and BYTE_MARK.isdisjoint(pattern) and BYTE_MARK.isdisjoint(stage["content"])


def _only_adds(stage: Mapping[str, Any], end: OpenEnd) -> bool:
    """Return whether more text only extends the output of a stage for whole texts."""
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
