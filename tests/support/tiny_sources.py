"""Tiny random models of the families that read sources, and sources for them."""

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
from transformers.generation import GenerationMixin

from specbeam.models.table import TableLM

VOCAB = 61
PAD = 1
ENDS = [2, 5, 9]
MELS = 8
FRAMES = 40
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "decoder_start_token_id": PAD,
}
_WHISPER = _BART | {
    "num_mel_bins": MELS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "decoder_start_token_id": 3,
}
FAMILIES = {
    "bart": _BART,
    "mbart": _BART,
    "marian": _BART,
    "pegasus": _BART,
    "m2m_100": _BART,
    "blenderbot": _BART,
    "t5": _T5,
    "umt5": _T5,
    "mt5": _T5,
    "whisper": _WHISPER,
}


def tiny_reader(family, attention=None, seed=0, layers=2, scale=None, **changes):
    """A random encoder-decoder model, float32, whose weights are scaled up so that its texts do not end at once.

    Args:
        attention: implementation of attention; None: the default of transformers, "sdpa" where the family has it.
        layers: of the decoder; the encoder has three.
        scale: of the weights; None: large, so that scores differ clearly.
    """
    torch.manual_seed(seed)
    name = "num_decoder_layers" if "num_decoder_layers" in FAMILIES[family] else "decoder_layers"
    config = AutoConfig.for_model(family, **(FAMILIES[family] | {name: layers} | changes))
    kind = AutoModelForSpeechSeq2Seq if family == "whisper" else AutoModelForSeq2SeqLM
    model = kind.from_config(config, attn_implementation=attention).eval()
    if scale is None:
        scale = 2.5 if "t5" in family else 6.0
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
    for field in ("suppress_tokens", "begin_suppress_tokens", "encoder_no_repeat_ngram_size"):
        setattr(model.generation_config, field, None)
    return model


def sources(family, count=3, seed=3):
    """Sources of different lengths; windows of features for Whisper."""
    generator = torch.Generator().manual_seed(seed)
    if family == "whisper":
        return [torch.randn(MELS, FRAMES, generator=generator) for _ in range(count)]
    lengths = (3, 11, 6, 9, 5)[:count]
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def searched(model, source, prompt=None, **options):
    """What transformers' beam search finds: the tokens and scores of its return sequences, padding cut off."""
    options = {"num_beams": 4, "do_sample": False, "eos_token_id": ENDS} | options
    given = {"input_ids": torch.tensor([source])} if isinstance(source, list) else {"input_features": source[None]}
    start = [model.config.decoder_start_token_id] if prompt is None else prompt
    found = GenerationMixin.generate(
        model,
        **given,
        decoder_input_ids=torch.tensor([start]),
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    texts = found.sequences[:, len(start) :].tolist()
    return [_without_padding(text) for text in texts], found.sequences_scores.tolist()


def _without_padding(text):
    """The tokens up to the first end token, or all."""
    ends = [place for place, token in enumerate(text) if token in ENDS]
    return text[: ends[0] + 1] if ends else text


class SourceTable(TableLM):
    """A table whose law is a function of the source and the new tokens: `session.context` holds the source."""

    def __init__(self, law, vocab):
        self._of_source = law
        super().__init__(lambda path: [1.0] * vocab)

    def refuses(self, session):
        return "" if self in session.context else "the session has no source"

    def _rows(self, session, forest):
        self._law = lambda path: self._of_source(session.context[self], path)
        return super()._rows(session, forest)
