"""Tensors that may be missing or too many without changing a text: models that hold them are loaded as transformers does."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specbeam as sb
from specbeam.errors import BadCheckpoint
from tests.models.checkpoints.damage import all_of, also, config, tensors, without
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import tiny_reader

ONES = torch.ones(4)
MASK = torch.ones(1, 1, 8, 8, dtype=torch.bool)
POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


def module_of(layer):
    names = ("eh_proj.weight", "enorm.weight", "mlp.up_proj.weight")
    return tensors(lambda held: held | {f"model.layers.{layer}.{name}": ONES.clone() for name in names})


def without_prefix(held):
    return {name.removeprefix("transformer."): one for name, one in held.items()}


TABLE = {
    "angles of positions": ("llama", also(model__layers__0__self_attn__rotary_emb__inv_freq=ONES)),
    "masks of a GPT-2": (
        "gpt2",
        also(transformer__h__0__attn__bias=MASK, transformer__h__0__attn__masked_bias=torch.tensor(-1e4)),
    ),
    "an old GPT-2": ("gpt2", all_of(tensors(without_prefix), also(h__1__attn__bias=MASK))),
    "masks of a GPT-NeoX": ("gpt_neox", also(gpt_neox__layers__0__attention__bias=MASK)),
    "modules behind the layers": ("llama", module_of(2)),
    "modules of Qwen": ("qwen3", also(mtp__fc__weight=ONES)),
    "modules of MiMo": ("qwen2", also(model__mtp_layers__0__input_proj__weight=ONES)),
    "a tower of pictures": (
        "llama",
        all_of(config(vision_config={"depth": 1}), also(vision_tower__patch__weight=ONES)),
    ),
    "scales of rounded keys": ("llama", also(model__layers__0__self_attn__k_scale=torch.tensor(2.0))),
    "a value head": ("llama", also(v_head__summary__weight=ONES)),
}
SOURCES = {
    "no positions, which Marian computes": ("marian", without(*POSITIONS)),
    "no positions of Whisper's encoder": ("whisper", without(POSITIONS[0])),
    "versions of fairseq": ("bart", also(model__encoder__version=ONES, model__decoder__version=ONES)),
    "no bias of logits": ("bart", without("final_logits_bias")),
    "a bias of relative positions": (
        "t5",
        also(decoder__block__0__layer__1__EncDecAttention__relative_attention_bias__weight=torch.ones(32, 4)),
    ),
}


def check_is(folder, model):
    found = sb.load(folder, tokenizer=False, check=False).target_model.state_dict()
    wanted = model.state_dict()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("name", TABLE)
def test_a_model_is_loaded_with_what_changes_no_text(name, tmp_path):
    family, change = TABLE[name]
    model = tiny(family)
    model.save_pretrained(tmp_path)
    change(tmp_path)
    check_is(tmp_path, model)


@pytest.mark.parametrize("name", SOURCES)
def test_a_model_that_reads_sources_is_loaded_with_what_changes_no_text(name, tmp_path):
    family, change = SOURCES[name]
    model = tiny_reader(family)
    model.save_pretrained(tmp_path)
    change(tmp_path)
    check_is(tmp_path, type(model).from_pretrained(tmp_path, dtype=torch.float32))


@pytest.mark.parametrize("family", ["marian", "whisper"])
def test_positions_that_are_made_are_those_of_a_new_model(family, tmp_path):
    model = type(tiny_reader(family))(tiny_reader(family).config)
    model.save_pretrained(tmp_path)
    without(*(POSITIONS if family == "marian" else POSITIONS[:1]))(tmp_path)
    check_is(tmp_path, model)


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight", ""])
def test_a_tied_model_may_hold_either_matrix_or_both(left_out, tmp_path):
    model = tiny("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    both = tensors(lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()})
    all_of(both, without(left_out))(tmp_path)
    check_is(tmp_path, model)


def test_a_tied_model_with_another_head_keeps_it_as_in_transformers(tmp_path):
    tiny("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors(lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"] * 2})(tmp_path)
    check_is(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


STRANGE = {
    "positions that are learnt": ("bart", without(POSITIONS[0]), f"lacks {POSITIONS[0]}"),
    "positions of Whisper's decoder": ("whisper", without(POSITIONS[1]), f"lacks {POSITIONS[1]}"),
    "a bias that looks like a mask": ("bart", also(model__decoder__layers__0__self_attn__bias=ONES), "self_attn.bias"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_looks_like_it_is_refused(name, tmp_path):
    family, change, said = STRANGE[name]
    tiny_reader(family).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(BadCheckpoint, match=said):
        sb.load(tmp_path, tokenizer=False)


def test_an_expert_that_is_missing_is_named(tmp_path):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_local_experts": 3,
    }
    made = AutoConfig.for_model("mixtral", num_attention_heads=2, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    check = sb.load(tmp_path, tokenizer=False, check=False).target_model
    assert check.config.num_local_experts == 3
    gone = []

    def drop(held):
        gone.append(next(name for name in held if ".experts.1." in name))
        return {name: one for name, one in held.items() if name not in gone}

    tensors(drop)(tmp_path)
    with pytest.raises(BadCheckpoint, match=gone[0]):
        sb.load(tmp_path, tokenizer=False)
