"""GGUF files of tiny models, written with the `gguf` package, whose dequantised weights are the oracle."""

import copy

import gguf
import numpy as np
import torch

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WITH_FOUR_NORMS = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3"}  # fmt: skip
SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # of float16 numbers in a block
KIND = gguf.GGMLQuantizationType


def blocks_of(weight, kind, rng):
    """A matrix in blocks: rounded by the package, or, where it only reads a type, any blocks of about the same size."""
    if kind not in SCALES_AT:
        return gguf.quantize(weight, KIND[kind])
    numbers, size = gguf.GGML_QUANT_SIZES[KIND[kind]]
    blocks = rng.integers(0, 256, (weight.size // numbers, size), dtype=np.uint8)
    for start in SCALES_AT[kind]:
        scale = rng.uniform(2e-5, 6e-5, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8)
    return blocks.reshape(len(weight), -1)


def by_pairs(weight, heads):
    """Rows as llama.cpp has them: the two numbers that are rotated together one after the other."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def apart(weight, heads):
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name, names):
    module, _, end = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{end}"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{names[rest]}.{end}"


def write_gguf(path, model, kind="Q8_0", architecture=None, tokens=None, change=None, **metadata):
    """Write a model; return its twin with the weights that the file stands for, in float32.

    Args:
        kind: the type of all matrices, or what returns it for a name in the file.
        tokens: of the tokenizer, with a type for each.
        change: called with the writer before it writes.
        metadata: replaces or adds values of the architecture, with "__" for dots; None: left out.
    """
    config = model.config
    family = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    architecture = architecture or ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": shared,
        "attention.key_length": size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if family in ("gemma2", "gemma3"):
        values["attention.sliding_window"] = config.sliding_window
    if family == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
    if "rope_theta" in config.rope_parameters:
        values["rope.freq_base"] = config.rope_parameters["rope_theta"]
    values |= {name.replace("__", "."): value for name, value in metadata.items()}
    for name, value in values.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        if isinstance(value, list):
            add = writer.add_array
        if isinstance(value, str):
            add = writer.add_string
        if value is not None:
            add(f"{architecture}.{name}", value)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    if tokens is not None:
        words, types, merges = tokens
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(words)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    if change is not None:
        change(writer)
    rng = np.random.default_rng(0)
    twin = copy.deepcopy(model)
    state = twin.state_dict()
    names = WITH_FOUR_NORMS if family in ("gemma2", "gemma3") else NAMES
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        ours = gguf_name(name, names)
        numbers = weight.float().numpy().copy()
        role = ours.split(".")[2] if ours.startswith("blk.") else ""
        rows = {"attn_q": heads, "attn_k": shared}.get(role) if architecture == "llama" else None
        if rows:
            numbers = by_pairs(numbers, rows)
        if architecture.startswith("gemma") and ours.endswith("norm.weight"):
            numbers += 1
        if numbers.ndim == 1:
            writer.add_tensor(ours, numbers)
            exact = numbers
        else:
            chosen = kind(ours) if callable(kind) else kind
            stored = blocks_of(numbers, chosen, rng)
            writer.add_tensor(ours, stored, raw_dtype=KIND[chosen])
            exact = gguf.dequantize(stored, KIND[chosen])
        if architecture.startswith("gemma") and ours.endswith("norm.weight"):
            exact = exact - 1
        state[name] = torch.from_numpy(np.ascontiguousarray(apart(exact, rows) if rows else exact))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    twin.load_state_dict(state)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return twin
