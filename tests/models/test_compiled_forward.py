"""The compiled forward against the model's own, on forests of several sessions."""

import copy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.forest import Forest
from specbeam.engines.cpu.rounding import GROUP, rounded_groups
from specbeam.errors import NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.language_models import language_model
from tests.models.test_huggingface import check_random_turns
from tests.support import words
from tests.support.checking import refused
from tests.support.rounding import rounded
from tests.support.steps import needs_numba
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


FASTEST = "compiled" if compiling.AVAILABLE else "plain"


@needs_numba
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
    lm = HuggingFaceLM(model, chunk=5, engine="compiled")
    assert lm.engine == "compiled"
    check_random_turns(lm, model)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("phi", {}, "its family is not supported by this engine"),
        ("llama", {"hidden_act": "sigmoid"}, "its activation is 'sigmoid'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type is 'dynamic'",
        ),
    ],
)
def test_models_that_they_do_not_fit_are_called_as_they_are_and_it_is_said_why(family, changes, reason):
    model = tiny(family, **changes)
    lm = HuggingFaceLM(model)
    assert lm.engine == "plain"
    assert lm.engine_note.startswith(
        f"transformers' own forward runs this {type(model).__name__} instead of the compiled"
    )
    assert reason in lm.engine_note or not compiling.AVAILABLE
    with pytest.raises(NotSupported, match="the compiled forward"):
        HuggingFaceLM(model, engine="compiled")


@pytest.mark.parametrize(
    ("family", "changes"), [("gpt2", {}), ("llama", {"hidden_act": "gelu"}), ("llama", {"mlp_bias": True})]
)
def test_the_forward_layer_by_layer_is_for_llamas_alone(family, changes):
    with pytest.raises(
        NotSupported, match=r"the forward that .* cannot run this .*: it is for unchanged Llama, Mistral and Qwen2"
    ):
        HuggingFaceLM(tiny(family, **changes), engine="layers")


def test_an_engine_that_does_not_exist_is_refused_by_name():
    with pytest.raises(
        NotSupported, match=r"engine is 'fast'; it must be one of gpu, fp8, compiled, bfloat16, int8, int4, layers"
    ):
        HuggingFaceLM(tiny("llama"), engine="fast")


def test_models_with_hooks_or_other_types_are_called_as_they_are():
    model = tiny("llama")
    assert HuggingFaceLM(model).engine == FASTEST
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert HuggingFaceLM(model).engine == "plain"
    handle.remove()
    assert HuggingFaceLM(tiny("llama").to(torch.bfloat16)).engine == "plain"


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


@needs_numba
@pytest.mark.parametrize(
    ("kind", "family", "off"),
    [("int8", "llama", 0.1), ("int8", "qwen2", 0.1), ("int8", "mistral", 0.1), ("int4", "llama", 0.8)],
)
def test_rounded_weights_are_near_the_model_and_the_same_in_every_batch(kind, family, off):
    model = tiny(family, hidden_size=64, intermediate_size=96)
    lm = language_model(model, quantize=kind)
    assert language_model(model, quantize=kind) is lm
    grid = on_the_grid(model, kind)
    prompt, tokens = [3, 4, 5, 6], [7, 8, 9]
    forest = Forest.rooted([6]).grown(tokens, [0, 0, 1])
    rows = scored(lm, prompt, forest)
    for node in range(forest.size):
        path = prompt + forest.path(node)
        alone = scored(lm, path, Forest.rooted([path[-1]]))[0]
        torch.testing.assert_close(rows[node], alone, atol=1e-4, rtol=1e-4)
        plain = model(torch.tensor([path])).logits[0, -1]
        assert (rows[node] - grid(torch.tensor([path])).logits[0, -1]).std() < 0.005 * plain.std()
        assert (rows[node] - plain).std() < off * plain.std()
    exact = language_model(model)
    assert exact is not lm
    assert exact.engine == FASTEST


def on_the_grid(model, kind):
    """The model whose matrices are what whole numbers and scales can say, and whose rows before each what int8 can say."""
    twin = copy.deepcopy(model)
    for one in twin.modules():
        if isinstance(one, torch.nn.Linear):
            matrix = one.weight.detach().numpy()
            if kind == "int8":
                numbers, scales = rounded(matrix)
                weight = numbers * scales[:, None]
            else:
                numbers, scales = rounded_groups(matrix)
                weight = (numbers.reshape(*scales.shape, GROUP) * scales[..., None]).reshape(matrix.shape)
            one.weight = torch.nn.Parameter(torch.from_numpy(weight), requires_grad=False)
            one.register_forward_pre_hook(lambda _, inputs: (in_steps(inputs[0]),))
    return twin


def in_steps(x):
    steps = x.abs().amax(-1, keepdim=True) / 127
    return (x / steps).round() * steps


def scored(lm, prompt, forest):
    seat = SimpleNamespace(prompt=prompt, state={})
    try:
        return lm.extend([seat], [forest])[0].logits.clone()
    finally:
        lm.close(seat)


@needs_numba
def test_int8_keeps_the_promises_of_its_own_law():
    model, draft = tiny("llama"), tiny("llama", seed=1, num_hidden_layers=1)
    pair = sb.load(model, draft, tokenizer=words.tokenizer(), quantize="int8", quantize_draft="int8")
    for seed in range(3):
        plain = sb.generate(pair, ["abc", "Hello you"], sb.beam_sampling(3), seed=seed, max_new_tokens=12)
        drafted = sb.generate(pair, "abc", sb.dsbd(3, 5, width="fixed"), seed=seed, max_new_tokens=12)
        assert plain[0].tokens == drafted[0].tokens
        assert plain[0].report.law.endswith("of the target in int8")


@needs_numba
def test_int8_is_refused_where_it_cannot_be(monkeypatch):
    with pytest.raises(NotSupported, match=r"^quantize='int8' cannot run this PhiForCausalLM: .*Llama, Mistral"):
        language_model(tiny("phi"), quantize="int8")
    with refused("one of 'int8', 'int4'"):
        sb.load(tiny("llama"), quantize="int3")
    with pytest.raises(NotSupported, match=r"32, 48, 32 deep.*multiples of 32"):
        sb.load(tiny("llama"), quantize="int4")
    monkeypatch.setattr(compiling, "AVAILABLE", False)
    with pytest.raises(NotSupported, match=r"numba is older than 0.63, or switched off"):
        language_model(tiny("llama"), quantize="int8")


@needs_numba
def test_positions_that_the_model_has_not_are_refused():
    model = tiny("llama", max_position_embeddings=16)
    lm = HuggingFaceLM(model, engine="compiled")
    with pytest.raises(IndexError):
        scored(lm, [3] * 17, Forest.rooted([3]))


def test_everything_runs_without_numba():
    program = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import specbeam as sb
pair = sb.load("bundled")
assert pair.target.engine == "plain"
print(sb.generate(pair, "Guten Morgen!", "dsbd", seed=0, max_new_tokens=8)[0].text)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
