"""The tokenizer of the bundled pair: byte-level BPE, one vocabulary for both jobs and both models."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<out>", "<sounds>"]
# A word with its leading space, letters and digits together: a sound such as " AH0" is one piece.
PIECES = r" ?[\p{L}\p{M}\p{N}']+| ?[^\s\p{L}\p{M}\p{N}']+|\s+"


def train_tokenizer(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """A prompt is encoded as ``<s> prompt <out>``; what follows ``<out>`` is the answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    wrap = {name: tokenizer.token_to_id(name) for name in ("<s>", "<out>")}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <out>", pair=None, special_tokens=list(wrap.items())
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<out>", "<sounds>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
