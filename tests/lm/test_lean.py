"""The lean forward against the model's own, on forests of several sessions."""

import pytest
import torch

import specbeam as sb
from specbeam.lm.huggingface import HuggingFaceLM
from specbeam.lm.lean import lean
from specbeam.pair import language_model
from tests.lm.test_huggingface import check_random_turns
from tests.support.tiny_models import tiny

MODELS = {
    "llama": {},
    "llama, one kv head": {"num_key_value_heads": 1},
    "llama, own head size": {"head_dim": 16},
    "llama, bias": {"attention_bias": True},
    "llama3 angles": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {},
    "qwen2-window": {},
    "mistral": {},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model(name):
    family = name.split(",")[0].split("3")[0]
    changes = MODELS[name]
    if changes.get("attention_bias"):
        model = tiny(family, **changes)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.bias = None
    else:
        model = tiny(family, **changes)
    lm = HuggingFaceLM(model, chunk=5)
    assert lm.lean is not None
    check_random_turns(lm, model)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gpt2", {}), ("qwen3", {}), ("gemma", {}), ("llama", {"hidden_act": "gelu"}), ("llama", {"mlp_bias": True})],
)
def test_models_that_it_does_not_fit_are_called_as_they_are(family, changes):
    assert lean(tiny(family, **changes)) is None


def test_models_with_hooks_or_other_types_are_called_as_they_are():
    model = tiny("llama")
    assert lean(model) is not None
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert lean(model) is None
    handle.remove()
    assert lean(tiny("llama").to(torch.bfloat16)) is None


def test_new_weights_are_noticed():
    model = tiny("llama")
    first = language_model(model)
    assert language_model(model) is first
    before = sb.generate(sb.load(model), [[5, 6, 7]], sb.greedy(), max_new_tokens=8)[0].tokens
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3.0)
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    after = sb.generate(sb.load(model), [[5, 6, 7]], sb.greedy(), max_new_tokens=8)[0].tokens
    expected = model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=8)[0, 3:].tolist()
    assert language_model(model) is not first
    assert after == expected != before
