"""Tiny targets with modules of multi-token prediction in their files, under the names of each writer."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 128, "eos_token_id": None, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
KINDS = {
    "llama": ("llama", SIZES),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", SIZES),
    "glm": ("glm4_moe", SIZES | EXPERTS | {"use_qk_norm": True, "attention_bias": True}),
    "deepseek": ("deepseek_v3", SIZES | EXPERTS | LATENT),
    "window": ("mistral", SIZES | {"sliding_window": 8}),
}
# What a module has around its layer, here and in the files of each writer.
NAMES = {
    "deepseek": ("model.layers.{layer}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "mimo": (
        "model.mtp_layers.{number}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    ),
    "qwen": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}


def random_like(name, weight, generator):
    if weight.ndim > 1:
        return torch.randn(weight.shape, generator=generator) * 0.3
    if "norm" in name:
        return torch.rand(weight.shape, generator=generator) + 0.5
    return torch.randn(weight.shape, generator=generator) * 0.2


def tiny_target(kind, seed=0, **changes):
    """A target with random weights and laws that differ clearly from token to token."""
    name, settings = KINDS[kind]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(settings | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            weight.copy_(random_like(weight_name, weight, generator))
        model.lm_head.weight *= 3
    return model


def layer_of(tensors, layer=1):
    """The weights of a layer of the target, as its files have them."""
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): weight for name, weight in tensors.items() if name.startswith(prefix)}


def modules_in(tensors, form, count=1, seed=3, width=16):
    """Random modules under the names of a writer; the same weights for each of them, and for MiMo in its order."""
    prefix, names = NAMES[form]
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number in range(count):
        around = {name: torch.rand(width, generator=generator) + 0.5 for name in ("enorm", "hnorm", "norm")}
        joins = torch.randn(width, 2 * width, generator=generator) * 0.3
        if form == "mimo":
            joins = joins.roll(width, 1)
        start = prefix.format(layer=2 + number, number=number)
        for name, weight in zip(names, (around["enorm"], around["hnorm"], joins, around["norm"]), strict=True):
            found[f"{start}{name}.weight"] = weight
        inner = f"{start}layers.{number}." if form == "qwen" else start
        for name, weight in layer_of(tensors).items():
            found[inner + name] = random_like(name, weight, generator)
    return found


def with_modules(folder, model, form="deepseek", count=1, shards=1, without=(), **tensors):
    """The files of a target with modules, in a folder; the target as it is loaded from there.

    Args:
        shards: number of files.
        without: names of tensors that are left out.
        tensors: further ones.
    """
    model.save_pretrained(folder)
    every = load_file(folder / "model.safetensors")
    every |= modules_in(every, form, count) | tensors
    return written(folder, {name: weight for name, weight in every.items() if name not in without}, shards)


def written(folder, tensors, shards=1):
    """A target whose files hold these tensors."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors)
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, folder / "model.safetensors", {"format": "pt"})
        return loaded(folder)
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[shard::shards]
        where |= dict.fromkeys(chosen, file)
        save_file({name: tensors[name].contiguous() for name in chosen}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return loaded(folder)


def loaded(folder):
    from transformers.utils import logging

    logging.set_verbosity_error()  # it tells of each tensor of the modules that it leaves out
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def with_fitting_modules(folder, kind, count):
    """A target whose layers change little, with modules that look at the token above alone: so some drafts are accepted."""
    model = tiny_target(kind, num_nextn_predict_layers=count)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".layers." in name and weight.ndim > 1:
                weight *= 0.5
        model.model.embed_tokens.weight *= 8
        model.model.norm.weight.fill_(1)
    with_modules(folder, model, count=count)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if not name.startswith(("model.layers.0", "model.layers.1.")) and ".layers." in name:
            if name.endswith("eh_proj.weight"):
                weight.zero_()[:, : len(weight)].fill_diagonal_(1)
            elif "norm" in name:
                weight.fill_(1)
            else:
                weight *= 0.3
    return written(folder, tensors)
