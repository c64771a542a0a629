"""Tiny tokenizers of every kind of decoder, with pieces that change or join what stands beside them."""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PerceiverTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xFF)]
WORDS = ["a", "yes", "do", "s", "m", "ve", "n't", "'", "'s", "'m", ".", ",", "?", "!", "x.", "é", "你", "\ufffd", "end"]
PIECES = [*WORDS, "▁", "▁▁", "▁a", "▁yes", "▁.", "▁'", "▁n't", "▁s", "▁é", *BYTES, "+A>", "<0x"]
SPACED = [*WORDS, " ", "  ", " a", " .", " '", "' ", " n't", "##s", "##n't", "a</w>", "yes</w>", "a</w>b", "|", "y@@"]


def _fast(pieces, decoder, bpe=False, **more):
    names = [*SPECIAL.values(), *dict.fromkeys(pieces)]
    vocab = {name: number for number, name in enumerate(names)}
    model = models.BPE(vocab, [], unk_token="<unk>") if bpe else models.WordLevel(vocab, unk_token="<unk>")
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if decoder is not None:
        inner.decoder = decoder
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL, **more)
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<|x|>", special=True)])
    return made


def byte_level():
    """Bytes by the names that byte-level vocabularies give them, and two pieces with halves of characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _fast([*letters, "Ġa", "ĠÃ", "©s"], decoders.ByteLevel(), bpe=True)


def _sequence(*stages):
    return _fast(PIECES, decoders.Sequence([*stages]), bpe=True)


def _marked(prepend):
    return decoders.Metaspace(replacement="▁", prepend_scheme=prepend)


class Reversing:
    """A decoder written in Python whose text no further token leaves alone."""

    def decode_chain(self, tokens):
        return [*reversed(tokens)]


def reversing():
    made = _fast(PIECES, None)
    made.backend_tokenizer.decoder = decoders.Decoder.custom(Reversing())
    return made


class SlowWords(PreTrainedTokenizer):
    """A tokenizer in Python that leaves it to transformers to make a text of tokens."""

    def __init__(self, **more):
        names = [*SPECIAL.values(), *SPACED]
        self.names = [*dict.fromkeys(names)]
        super().__init__(**SPECIAL, **more)

    @property
    def vocab_size(self):
        return len(self.names)

    def get_vocab(self):
        return {name: number for number, name in enumerate(self.names)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return [*text]

    def _convert_token_to_id(self, token):
        return self.names.index(token) if token in self.names else self.names.index("<unk>")

    def _convert_id_to_token(self, index):
        return self.names[index] if index < len(self.names) else "<unk>"


class SlowJoined(SlowWords):
    """One that joins tokens in a way of its own."""

    def convert_tokens_to_string(self, tokens):
        return " ".join(tokens).replace("@@ ", "").strip()


KINDS = {
    "byte level": byte_level,
    "byte fallback as in Llama": lambda: _sequence(
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ),
    "byte fallback as in Gemma": lambda: _sequence(
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    ),
    "byte fallback after marks": lambda: _sequence(_marked("always"), decoders.ByteFallback(), decoders.Fuse()),
    "byte fallback of rewritten tokens": lambda: _sequence(decoders.Replace("+", "<0x4"), decoders.ByteFallback()),
    "marks": lambda: _fast(PIECES, _marked("always")),
    "marks, cleaned up": lambda: _fast(PIECES, _marked("never"), clean_up_tokenization_spaces=True),
    "marks, said to be cleaned up": lambda: _fast(
        [*PIECES, " "], _marked("first"), bpe=True, clean_up_tokenization_spaces=True
    ),
    "word pieces": lambda: _fast(SPACED, decoders.WordPiece(cleanup=True), clean_up_tokenization_spaces=True),
    "word pieces as they are": lambda: _fast(SPACED, decoders.WordPiece(cleanup=False)),
    "words": lambda: _fast(SPACED, None),
    "words, cleaned up": lambda: _fast(SPACED, None, clean_up_tokenization_spaces=True),
    "letters": lambda: _fast(SPACED, decoders.Fuse()),
    "letters, cleaned up": lambda: _fast(SPACED, decoders.Fuse(), clean_up_tokenization_spaces=True),
    "ends of words": lambda: _fast(SPACED, decoders.BPEDecoder("</w>"), bpe=True),
    "speech": lambda: _fast(SPACED, decoders.CTC("<pad>", "|", cleanup=True)),
    "replaced in the whole text": lambda: _fast(
        PIECES, decoders.Sequence([decoders.Fuse(), decoders.Replace("a▁", "b")])
    ),
    "replaced by a pattern": lambda: _fast(
        PIECES, decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a(?=▁)"), "b")])
    ),
    "marks replaced in the whole text": lambda: _fast(
        PIECES, decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    ),
    "written in Python": reversing,
    "slow": SlowWords,
    "slow, cleaned up": lambda: SlowWords(clean_up_tokenization_spaces=True),
    "slow, joined otherwise": SlowJoined,
    "slow bytes": ByT5Tokenizer,
    "slow bytes with marks": PerceiverTokenizer,
}
# Those whose decoders can change any part of a text, or are not known: their texts come at the end.
AT_THE_END = (
    "byte fallback of rewritten tokens",
    "replaced in the whole text",
    "replaced by a pattern",
    "written in Python",
    "slow, joined otherwise",
)


@cache
def tokenizer_of(kind):
    """Return the tokenizer of a kind; it is shared and not to be changed."""
    return KINDS[kind]()
