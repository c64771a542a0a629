"""Tiny random models of the families that users run."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256} | {
    k: v for k, v in _SMALL.items() if k.endswith("_id")
}
FAMILIES = {
    "llama": ("llama", _SMALL),
    "qwen2": ("qwen2", _SMALL),
    "qwen2-window": (
        "qwen2",
        _SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", _SMALL | {"head_dim": 8}),
    "mistral": ("mistral", _SMALL | {"sliding_window": 4}),
    "gemma": ("gemma", _SMALL | {"head_dim": 8}),
    "gemma2": ("gemma2", _SMALL | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", _SMALL | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "opt": ("opt", _SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", _SMALL),
    "smollm3": ("smollm3", _SMALL | {"no_rope_layers": [1, 0]}),
    "granite": (
        "granite",
        _SMALL
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("olmo2", _SMALL),
    "mixtral": ("mixtral", _SMALL | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        _SMALL | {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "olmoe": ("olmoe", _SMALL | {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "phi": ("phi", _SMALL),
    "phi3": ("phi3", _SMALL),
    "falcon": ("falcon", _SMALL | {"ffn_hidden_size": 48}),
}
# Families that only some tests try: embeddings of another width than hidden states, and ALiBi, with which transformers
# cannot score token trees.
SPECIAL = {
    "opt-350m": ("opt", _SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 64, "do_layer_norm_before": False}),
    "bloom": ("bloom", _SMALL),
    "falcon-40b": ("falcon", _SMALL | {"ffn_hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-rw": (
        "falcon",
        _SMALL | {"ffn_hidden_size": 48, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
}
MIXTURES = ("mixtral", "qwen3_moe", "olmoe")
NO_SDPA = ("gemma2", "bloom")


def tiny(family: str, attention: str | None = None, seed: int = 0, **changes: object) -> torch.nn.Module:
    """A random model, float32, with logits spread enough that laws differ clearly from token to token."""
    torch.manual_seed(seed)
    kind, settings = (FAMILIES | SPECIAL)[family]
    config = AutoConfig.for_model(kind, **(settings | changes))
    attention = attention or ("eager" if family in NO_SDPA else "sdpa")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.25 if "embed" not in name and "wte" not in name else 0.5)
    return model
