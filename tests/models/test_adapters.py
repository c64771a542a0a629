"""Adapters in folders: merged into their base model, which then writes the texts of peft's own model."""

import json

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.errors import BadSetting, MissingFile, NotSupported
from tests.support import words
from tests.support.gguf_files import write_gguf
from tests.support.seats import plain_logits
from tests.support.tiny_models import tiny

PROMPT = [3, 4, 5, 9, 20]
KINDS = {
    "lora": {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False},
    "dora": {"r": 4, "use_dora": True, "target_modules": "all-linear", "init_lora_weights": False},
    "rank-stabilised": {"r": 4, "use_rslora": True, "target_modules": ["v_proj"], "init_lora_weights": False, "modules_to_save": ["lm_head"]},
}  # fmt: skip


def saved(folder, config=None, base=None):
    """A base model in a folder and an adapter for it in another; returns peft's model."""
    torch.manual_seed(5)
    base = base or tiny("llama")
    base.save_pretrained(folder / "base")
    words.tokenizer().save_pretrained(folder / "base")
    base.name_or_path = base.config._name_or_path = str(folder / "base")
    joined = get_peft_model(base, config or LoraConfig(**KINDS["lora"], task_type="CAUSAL_LM")).eval()
    joined.save_pretrained(folder / "adapter")
    return joined


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_writes_the_texts_of_peft(kind, tmp_path):
    joined = saved(tmp_path, LoraConfig(**KINDS[kind], task_type="CAUSAL_LM"))
    pair = sb.load(tmp_path / "adapter")
    with torch.no_grad():
        logits = joined(input_ids=torch.tensor([PROMPT])).logits[0, -1]
        found = plain_logits(pair.target_model, [PROMPT])[0]
        assert float((found - logits).abs().max() / logits.std()) < 1e-4
        expected = joined.generate(input_ids=torch.tensor([PROMPT]), num_beams=3, do_sample=False, max_new_tokens=10, pad_token_id=2)  # fmt: skip
    text = sb.generate(pair, PROMPT, sb.beam_search(3), max_new_tokens=10)[0].tokens
    assert text == expected[0, len(PROMPT) :].tolist()[: len(text)]
    assert pair.target.engine_note == "" or not compiling.AVAILABLE
    assert pair.tokenizer is not None  # of the base model


def test_an_adapter_drafts_for_its_base_and_the_base_for_the_adapter(tmp_path):
    saved(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for target, draft in ((base, adapter), (adapter, base)):
        pair = sb.load(target, draft)
        plain = sb.generate(pair, PROMPT, sb.beam_search(3), max_new_tokens=10)[0]
        drafted = sb.generate(pair, PROMPT, sb.speculative_beam_search(3, depth=2), max_new_tokens=10)[0]
        assert drafted.tokens == plain.tokens
        assert drafted.report.accepted > 0


def test_other_kinds_of_adapters_are_merged_by_peft(tmp_path):
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM", init_ia3_weights=False)  # fmt: skip
    joined = saved(tmp_path, config)
    with torch.no_grad():
        logits = joined(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    found = plain_logits(sb.load(tmp_path / "adapter").target_model, [PROMPT])[0]
    assert float((found - logits).abs().max() / logits.std()) < 1e-4


def test_the_base_may_be_a_gguf_file_whose_blocks_are_then_widened(tmp_path):
    saved(tmp_path)
    twin = write_gguf(tmp_path / "base.gguf", tiny("llama", hidden_size=64, intermediate_size=96), "Q8_0")
    joined = saved(tmp_path, base=twin)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "base.gguf")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    pair = sb.load(tmp_path / "adapter", tokenizer=words.tokenizer())
    with torch.no_grad():
        logits = joined(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    found = plain_logits(pair.target_model, [PROMPT])[0]
    assert float((found - logits).abs().max() / logits.std()) < 1e-4


def change_settings(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_tensors(change):
    def changed(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return changed


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_tensors(lambda held: held.pop(FIRST)), f"its file lacks {FIRST}"),
        (change_tensors(lambda held: held.update({"more.weight": torch.ones(2)})), "its file holds more.weight"),
        (change_tensors(lambda held: held[FIRST].fill_(torch.nan)), "holds NaN"),
        (change_settings(r=8), "does not fit"),
        (change_settings(target_modules=["nothing"]), "does not fit"),
        (change_settings(base_model_name_or_path=None), "it must name the model that the adapter changes"),
        (change_settings(base_model_name_or_path="./no/such/model"), "there is no folder no/such/model"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no weights of the adapter"),
        (change_settings(peft_type="PREFIX_TUNING"), "adds learned rows to prompts and cannot be merged"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_what_was_found(change, said, tmp_path):
    saved(tmp_path)
    change(tmp_path / "adapter")
    with pytest.raises(sb.SpecbeamError) as caught:
        sb.load(tmp_path / "adapter")
    assert said in str(caught.value)


def test_prompts_that_were_tuned_are_refused(tmp_path):
    saved(tmp_path, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(NotSupported, match="learned rows"):
        sb.load(tmp_path / "adapter")


def test_an_adapter_of_an_adapter_is_refused(tmp_path):
    saved(tmp_path)
    change_settings(base_model_name_or_path=str(tmp_path / "adapter"))(tmp_path / "adapter")
    with pytest.raises(NotSupported, match="holds an adapter itself"):
        sb.load(tmp_path / "adapter")


def test_a_missing_base_is_said_to_be_that_of_the_adapter(tmp_path):
    saved(tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "x/y"}))
    with pytest.raises(MissingFile, match="adapter holds an adapter for x/y, which is missing: there is no folder x/y"):
        sb.load(tmp_path / "adapter")


def test_a_library_cannot_round_a_model_that_is_merged_afterwards(tmp_path):
    saved(tmp_path)
    with pytest.raises(BadSetting, match="merged afterwards"):
        sb.load(tmp_path / "adapter", quantize="torchao-int8")


def test_without_peft_the_error_says_what_to_install(tmp_path, monkeypatch):
    saved(tmp_path)
    monkeypatch.setattr("specbeam.models.adapters.find_spec", lambda name: None)
    with pytest.raises(sb.SpecbeamError, match=r"pip install 'specbeam\[adapters\]'"):
        sb.load(tmp_path / "adapter")
