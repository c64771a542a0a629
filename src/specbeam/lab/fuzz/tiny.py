"""Tiny random models of the families that users run, for random calls."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 61
POSITIONS = 128
MELS = 8
FRAMES = 40
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS},
    "mixtral": _EXPERTS,
    "falcon": {"alibi": False, "new_decoder_architecture": False, "multi_query": True},
}
_READER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_WHISPER = _READER | {
    "num_mel_bins": MELS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "decoder_start_token_id": 3,
}


def tiny_decoder(family: str, seed: int, **changes: Any) -> PreTrainedModel:
    """Return a decoder-only model in float32 with clearly different laws after different tokens."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(_DECODER | _OWN.get(family, {}) | changes))
    attention = "eager" if family in ("gemma2", "bloom") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    return _sharpened(model)


def tiny_reader(family: str, seed: int, **changes: Any) -> PreTrainedModel:
    """Return an encoder-decoder model in float32: "t5", "whisper", or a relative of BART."""
    torch.manual_seed(seed)
    known: dict[str, dict[str, Any]] = {"t5": _T5, "whisper": _WHISPER}
    config = AutoConfig.for_model(family, **(known.get(family, _READER) | changes))
    kind = AutoModelForSpeechSeq2Seq if family == "whisper" else AutoModelForSeq2SeqLM
    model = kind.from_config(config, attn_implementation="sdpa").eval()
    scale = 2.5 if family == "t5" else 6.0
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        setattr(model.generation_config, name, None)
    return model


@torch.no_grad()
def _sharpened(model: PreTrainedModel) -> PreTrainedModel:
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            is_embedding = "embed" in name or "wte" in name
            weight.normal_(0, 0.5 if is_embedding else 0.25)
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of 259 tokens: three special ones and all bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ("<s>", "</s>", "<pad>")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate([*specials, *letters])}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    (bos, eos, pad) = specials
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos, pad_token=pad)
