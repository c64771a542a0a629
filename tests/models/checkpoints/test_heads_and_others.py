"""Heads, memories, classifiers, rounded matrices and states of trainings: read as closely as models are."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import specbeam as sb
from specbeam.apps.search.value import classifier_value
from specbeam.core import compiling
from specbeam.errors import BadCheckpoint, BadHead, BadSetting, NotSupported, SpecbeamError
from specbeam.lab.train.state import STATE, resume_from
from specbeam.models.memory.files import WEIGHTS as MEMORY
from specbeam.models.memory.files import read_memory, save_memory
from specbeam.models.memory.plan import MemoryPlan
from tests.models.checkpoints.damage import (
    RunsCode,
    as_type,
    config,
    copied,
    cut,
    header,
    header_size,
    number,
    pickled,
    runs_code,
    tensors,
    text,
    without,
)
from tests.models.heads.test_readers import GOLDEN
from tests.support.remembered import tiny_memory
from tests.support.rounded_folders import write_rounded
from tests.support.tiny_models import tiny

NAN = float("nan")
FC = "fc.weight"
HEADS = {
    "NaN": (number(NAN, FC), "fc.weight holds NaN"),
    "infinity": (number(torch.inf, FC), "fc.weight holds infinite"),
    "NaN in its own embedding": (number(NAN, "embed_tokens.weight"), "embed_tokens.weight holds NaN"),
    "NaN in a layer": (number(NAN, "layers.0.mlp.up_proj.weight"), "up_proj.weight holds NaN"),
    "int8": (as_type(torch.int8, FC), "fc.weight is stored as int8"),
    "float8": (as_type(torch.float8_e4m3fn, FC), "fc.weight is stored as float8_e4m3fn"),
    "complex numbers": (as_type(torch.complex64, FC), "fc.weight is stored as complex64"),
    "a missing tensor": (without("layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight"),
    "a tensor too many": (tensors(lambda held: held | {"strange": torch.ones(2)}), "strange"),
    "a tensor cut short": (tensors(lambda held: held | {FC: held[FC][:3].clone()}), "fc.weight"),
    "cut": (cut("model.safetensors", -20), "model.safetensors cannot be read"),
    "empty": (cut("model.safetensors", 0), "it is empty"),
    "junk": (text("model.safetensors", "junk" * 99), "model.safetensors cannot be read"),
    "a header of a gigabyte": (header_size(2**30), "model.safetensors cannot be read"),
    "a header that is no object": (header(lambda held: b"[]"), "model.safetensors cannot be read"),
    "a pickle that runs code": (runs_code, "runs no code"),
    "a pickle of a list": (pickled(lambda held: [*held.values()]), "does not hold tensors by name"),
    "a configuration that is a list": (text("config.json", "[]"), "config.json holds list"),
    "no configuration's JSON": (text("config.json", "{"), "config.json cannot be read"),
    "a width of a billion": (config(transformer_layer_config={"hidden_size": 10**9}), "transformer_layer_config"),
}


@pytest.fixture(scope="module")
def target():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4)).eval()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_refused_by_name(name, target, tmp_path):
    damage, said = HEADS[name]
    folder = copied(GOLDEN / "plain", tmp_path / "head")
    if "own embedding" in name:
        tensors(lambda held: held | {"embed_tokens.weight": torch.ones(32, 16)})(folder)
    damage(folder)
    with pytest.raises(SpecbeamError, match=said):
        sb.load(target, draft=folder, tokenizer=False, probe=False, check=False)
    assert not (folder / "was_run").exists()


def test_two_files_of_a_head_that_hold_the_same_tensor_are_refused(target, tmp_path):
    folder = copied(GOLDEN / "plain", tmp_path / "head")
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(BadHead, match=r"several files in .* hold"):
        sb.load(target, draft=folder, tokenizer=False, probe=False, check=False)


def test_a_map_of_tokens_holds_whole_numbers(target, tmp_path):
    folder = copied(GOLDEN / "two_layers", tmp_path / "head")
    as_type(torch.float32, "d2t")(folder)
    with pytest.raises(BadHead, match=r"d2t is stored as torch\.float32"):
        sb.load(target, draft=folder, tokenizer=False, probe=False, check=False)


def test_a_memory_is_read_as_closely(tmp_path):
    model = tiny("llama")
    faults = {"holds NaN": number(NAN, "summary"), "holds infinite": number(torch.inf, "keys.weight")}
    for number_of, (said, damage) in enumerate(faults.items()):
        folder = tmp_path / str(number_of)
        save_memory(folder, tiny_memory(model), MemoryPlan(5, 2, 3, 0.5, "attention", "refresh"), model, "some/model")
        (folder / MEMORY).rename(folder / "model.safetensors")
        damage(folder)
        (folder / "model.safetensors").rename(folder / MEMORY)
        with pytest.raises(BadHead, match=said):
            read_memory(folder)


CLASSIFIERS = {
    "no head": (without("score.weight"), "lacks score.weight"),
    "NaN": (number(NAN, "score.weight"), "score.weight holds NaN"),
    "another head": (tensors(lambda held: held | {"lm_head.weight": torch.ones(61, 16)}), "holds lm_head.weight"),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_is_read_as_closely(name, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    made = LlamaConfig(**sizes, num_attention_heads=2, num_labels=1, pad_token_id=2)
    LlamaForSequenceClassification(made).save_pretrained(tmp_path)
    damage, said = CLASSIFIERS[name]
    number(0.5, "score.weight")(tmp_path)
    damage(tmp_path)
    with pytest.raises(BadCheckpoint, match=said):
        classifier_value(tmp_path)


Q_PROJ = "model.layers.1.self_attn.q_proj"
ROUNDED = {
    "NaN in scales": (number(NAN, f"{Q_PROJ}.scales"), BadCheckpoint, f"{Q_PROJ}.scales holds NaN"),
    "NaN in the rest": (number(NAN, "model.norm.weight"), BadCheckpoint, "model.norm.weight holds NaN"),
    "integers in the rest": (
        as_type(torch.int16, "model.norm.weight"),
        BadCheckpoint,
        "model.norm.weight is stored as int16",
    ),
    "another vocabulary": (config(vocab_size=72), BadCheckpoint, r"\[61, 32\] in the files, and \[72, 32\] by config"),
    "no zero points": (without(f"{Q_PROJ}.qzeros"), NotSupported, f"{Q_PROJ}.qzeros is missing"),
    "no norm": (without("model.norm.weight"), NotSupported, "lack model.norm.weight"),
    "a bias too many": (
        tensors(lambda held: held | {"model.norm.bias": torch.ones(32)}),
        NotSupported,
        "hold model.norm.bias",
    ),
    "a layer too many": (config(num_hidden_layers=1), NotSupported, "model.layers.1"),
    "a group of text": (
        config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": "many"}),
        NotSupported,
        "group_size of these weights is 'many'",
    ),
    "cut": (cut("model.safetensors", -20), BadCheckpoint, "model.safetensors cannot be read"),
}


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_matrices_are_read_as_closely(name, tmp_path):
    damage, error, said = ROUNDED[name]
    write_rounded(tmp_path, tiny("llama", intermediate_size=64))
    damage(tmp_path)
    with pytest.raises(error, match=said):
        sb.load(tmp_path, tokenizer=False, device="cpu")


@pytest.mark.skipif(not compiling.AVAILABLE, reason="needs numba")
def test_a_tied_model_of_rounded_matrices_keeps_another_head_that_its_files_hold(tmp_path):
    write_rounded(tmp_path, tiny("llama", intermediate_size=64, tie_word_embeddings=True), words=torch.float32)
    tensors(lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"] * 2})(tmp_path)
    model = sb.load(tmp_path, tokenizer=False, device="cpu", check=False).target_model
    assert torch.equal(model.lm_head.weight, 2 * model.model.embed_tokens.weight)


def test_the_state_of_a_training_runs_no_code(tmp_path):
    torch.save({"step": RunsCode(str(tmp_path / "was_run"))}, tmp_path / STATE)
    with pytest.raises(BadSetting, match="is broken"):
        resume_from(tmp_path, torch.device("cpu"), lambda state: None)
    assert not (tmp_path / "was_run").exists()
