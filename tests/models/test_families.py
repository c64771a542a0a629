"""Every family of the table: its compiled logits are those of transformers, in every word size, batch and length."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.forest import Forest
from specbeam.engines.cpu import decoder as compiled
from specbeam.engines.cpu.curves import tanh
from specbeam.engines.cpu.layers import activate
from specbeam.engines.families import ACTIVATIONS, FAMILIES, family_of, has_alibi, known_families
from specbeam.errors import BadPrompt, NotSupported, UnsupportedModel
from specbeam.models.engines import ENGINES
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import language_model
from specbeam.models.pair import Pair
from tests.models.test_compiled_forward import in_steps, scored
from tests.models.test_huggingface import check_random_turns
from tests.support.rounding import rounded
from tests.support.seats import plain_logits, seat
from tests.support.tiny_models import MIXTURES, tiny

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

SHORT, LONG = [1.0, 1.5, 1.2, 2.0], [4.0, 3.0, 2.0, 8.0]


def longrope(original, short=SHORT, long=LONG):
    """Settings of angles that change for all tokens of a text as soon as it is longer than `original`, as in Phi-3."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long, "factor": 4.0}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


# A tiny model of each family in which all that it has counts: caps that bind, windows of four tokens, layers of two kinds.
MODELS = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "granite": {},
    "phi3": {},
    "olmo2": {},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3": {"final_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "opt-350m": {},
    "bloom": {},
    "falcon": {},
    "falcon-40b": {},
    "falcon-rw": {},
}
# What configurations of these families may have besides.
VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "attention_bias": True}),
    ("phi3", {"sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ("olmo2", {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"}),
    ("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 4}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "silu", "n_inner": 40}),
    ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_fast", "attention_bias": False}),
    ("gemma3", {"layer_types": ["sliding_attention"] * 2}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("mistral", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ("phi3", longrope(160)),
    ("phi3", longrope(32, short=LONG)),
    ("opt", {"activation_function": "gelu", "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("opt", {"_remove_final_layer_norm": True, "word_embed_proj_dim": 64, "tie_word_embeddings": False}),
    ("opt-350m", {"hidden_size": 96, "word_embed_proj_dim": 32}),
    ("bloom", {"hidden_size": 48, "n_head": 6, "tie_word_embeddings": False}),
    ("falcon", {"bias": True, "alibi": True, "hidden_size": 48, "num_attention_heads": 6}),
    ("falcon", {"multi_query": False, "activation": "gelu_pytorch_tanh", "tie_word_embeddings": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ("falcon-40b", {"alibi": True, "bias": True}),
    ("falcon-40b", {"num_kv_heads": 4, "multi_query": False}),
    ("falcon-rw", {"alibi": False, "multi_query": True, "bias": False}),
    ("falcon-rw", {"hidden_size": 48, "num_attention_heads": 12}),
]  # fmt: skip


def model_of(name, **changes):
    """A tiny model whose vectors of weights, norms and biases, are at random, too."""
    model = tiny(name, **(MODELS[name] | changes))
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


def last_row(lm, prompt):
    return scored(lm, prompt, Forest.rooted([prompt[-1]]))[0]


def spreads_off(found, expected):
    """The largest difference, in standard deviations of what is expected."""
    return float((found - expected).abs().max() / expected.std())


# Both add a few thousand float32 products, each in its own order: differences of some 1e-6 of the spread are found, and the
# smallest mistake below makes a thousand times as much.
CLOSE = 3e-5


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in MODELS), *VARIANTS], ids=str)
def test_logits_are_those_of_transformers_on_trees_in_any_company(name, changes):
    model = model_of(name, **changes)
    lm = HuggingFaceLM(model, chunk=5)
    assert lm.engine == "compiled"
    assert lm.engine_note == ""
    check_random_turns(lm, model, turns=4)
    check_scores_forests(lm)
    text = np.random.default_rng(3).integers(0, lm.vocab, 150).tolist()  # far beyond windows of four tokens
    assert spreads_off(last_row(lm, text), plain_logits(model, [text])[0]) < CLOSE


def check_bits_in_company(model, kind):
    """Rows have the same bits alone, beside other sessions, and whatever chunks their prompts come in."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 61, length).tolist() for length in (23, 2, 40)]
    alone = [last_row(HuggingFaceLM(model), prompt) for prompt in prompts]
    for chunk in (5, 512):
        lm = HuggingFaceLM(model, chunk=chunk)
        assert lm.runner.decoder.kind == kind
        seats = [seat(prompt) for prompt in prompts]
        forests = [Forest.rooted([prompt[-1]]) for prompt in prompts]
        for row, found in zip(alone, lm.extend(seats, forests), strict=True):
            assert torch.equal(found.logits[0], row)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_in_every_company_and_in_every_chunk(name, packed):
    model = model_of(name)
    check_bits_in_company(model, "float32")
    check_bits_in_company(model.bfloat16().float(), "bfloat16")


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_bfloat16_holds_are_kept_in_it_and_are_the_same_model(name, packed):
    model = model_of(name).bfloat16().float()
    lm = HuggingFaceLM(model, chunk=5)
    assert lm.runner.decoder.kind == "bfloat16"
    check_random_turns(lm, model, turns=2)


def on_the_grid(model):
    """The model whose matrices are what whole numbers and scales can say, and whose rows before each what int8 can say."""
    twin = copy.deepcopy(model)
    for name, one in twin.named_modules():
        # The matrix between embeddings and the first layer makes embeddings, which are not rounded.
        if isinstance(one, (torch.nn.Linear, Conv1D)) and not name.endswith("project_in"):
            matrix = one.weight.detach()
            matrix = matrix.T if isinstance(one, Conv1D) else matrix
            numbers, scales = rounded(matrix.contiguous().numpy())
            weight = torch.from_numpy(numbers * scales[:, None])
            one.weight = torch.nn.Parameter(weight.T if isinstance(one, Conv1D) else weight, requires_grad=False)
            one.register_forward_pre_hook(lambda _, inputs: (in_steps(inputs[0]),))
    return twin


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_int8_are_the_model_on_the_grid_and_the_same_in_every_batch(name):
    """A row that falls between two steps of the grid may be rounded to the other one, so differences are those of steps."""
    model = model_of(name)
    lm = language_model(model, quantize="int8")
    twin = on_the_grid(model)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 61, length).tolist() for length in (9, 30)]
    seats = [seat(prompt) for prompt in prompts]
    together = lm.extend(seats, [Forest.rooted([prompt[-1]]) for prompt in prompts])
    for one in seats:
        lm.close(one)
    for prompt, found in zip(prompts, together, strict=True):
        assert torch.equal(found.logits[0], last_row(lm, prompt))
        expected = plain_logits(twin, [prompt])[0]
        exact = plain_logits(model, [prompt])[0]
        assert (found.logits[0] - expected).std() < 0.02 * expected.std()
        assert (found.logits[0] - exact).std() < 0.2 * exact.std()


def mistaken(**changes):
    return lambda of: replace(of, **changes)


def other_numbers(**changes):
    return lambda of: replace(of, numbers=of.numbers._replace(**changes))


def other_family(**changes):
    return lambda of: replace(of, family=replace(of.family, **changes))


MISTAKES = [
    ("gemma2", other_numbers(attention_cap=0.0)),
    ("gemma2", other_numbers(logits_cap=0.0)),
    ("gemma2", mistaken(scales=(1.0, 1.0))),
    ("gemma2", other_family(norm="rms")),
    ("gemma2", other_family(norms=FAMILIES[0].norms)),
    ("gemma2", mistaken(kinds=("full_attention",) * 2)),
    ("gemma3", mistaken(ropes=(1, 1))),
    ("gemma3", other_family(head_norms="no", norms=FAMILIES[0].norms)),
    ("smollm3", mistaken(ropes=(0, 0))),
    ("granite", other_numbers(embedding=1.0)),
    ("granite", other_numbers(residual=1.0)),
    ("granite", other_numbers(logits_divisor=1.0)),
    ("granite", mistaken(scales=(8**-0.5, 8**-0.5))),
    ("gpt_neox", mistaken(parallel=False)),
    ("gpt_neox", mistaken(activation="gelu tanh")),
    ("gpt_neox", other_family(by_head=False)),
    ("gpt2", mistaken(activation="gelu")),
    ("opt-350m", other_family(norm_of_sum=False)),
    ("bloom", mistaken(biases=(torch.zeros(4, 256),))),
    ("bloom", lambda of: replace(of, biases=(of.biases[0].roll(1, 0),))),
    ("bloom", other_family(by_head=False)),
    ("falcon-40b", other_family(by_head=False)),
    ("falcon-40b", other_family(norms=FAMILIES[0].norms._replace(before_attention="ln_mlp", before_inner="ln_mlp"))),
    ("falcon-rw", mistaken(parallel=True)),
]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_each_thing_that_a_family_has_counts(name, mistake, monkeypatch):
    """A forward that forgets one of them is off by more than the tests above allow."""
    model = model_of(name)
    if name == "gemma3":  # whose angles differ little within a few tokens
        model = model_of(name, rope_parameters={kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full_attention", 1e6), ("sliding_attention", 10.0))})  # fmt: skip
    text = np.random.default_rng(7).integers(0, 61, 40).tolist()
    expected = plain_logits(model, [text])[0]
    assert spreads_off(last_row(HuggingFaceLM(model), text), expected) < CLOSE
    right = compiled.architecture_of
    monkeypatch.setattr(compiled, "architecture_of", lambda model: mistake(right(model)))
    assert spreads_off(last_row(HuggingFaceLM(model), text), expected) > 5 * CLOSE


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gpt2", {"add_cross_attention": True}, "cross-attention to another text"),
        ("gemma3", {"use_bidirectional_attention": True}, "attend to later tokens"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'dynamic'"),
        ("gpt_neox", {"hidden_act": "relu2"}, "activation is 'relu2'"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "adds sublayers to normed states"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "leaves out biases"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "has two norms"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "does not run parallel"),
        ("opt-350m", {"word_embed_proj_dim": 24}, "its head reads 24 numbers"),
    ],
)  # fmt: skip
def test_what_no_row_of_the_table_describes_is_refused_by_name(name, changes, reason):
    with pytest.raises(NotSupported, match=reason):
        HuggingFaceLM(tiny(name, **changes), engine="compiled")


@pytest.mark.parametrize("name", ["bloom", "falcon-rw"])
def test_models_with_alibi_are_run_by_engines_of_specbeam_only(name, monkeypatch):
    model = model_of(name)
    for engine in ("plain", "torch", "parallel"):
        with pytest.raises(NotSupported, match="it uses ALiBi: it derives positions from cache slots"):
            HuggingFaceLM(model, engine=engine)
    halves = HuggingFaceLM(model_of(name).bfloat16())  # transformers would run another model of this type
    assert halves.engine == "compiled"
    monkeypatch.setattr(compiling, "AVAILABLE", False)
    with pytest.raises(UnsupportedModel, match=r"no engine runs this .*ALiBi.*numba"):
        HuggingFaceLM(model_of(name))


def test_a_bloom_reads_texts_up_to_the_positions_of_its_biases():
    lm = HuggingFaceLM(tiny("bloom", max_position_embeddings=None))
    assert lm.max_positions == lm.runner.decoder.angles.shape[2] == 1 << 15


def test_rows_given_as_embeddings_are_those_of_their_tokens():
    """Of a model whose embeddings have another width than its hidden states."""
    model = model_of("opt-350m")
    lm = HuggingFaceLM(model)
    by_token = last_row(lm, [3, 4, 5])
    one = seat([-1, -2, 5])
    one.vectors = {lm: model.get_input_embeddings().weight[[3, 4]].detach()}
    (found,) = lm.extend([one], [Forest.rooted([5])])
    assert spreads_off(found.logits[0], by_token) < CLOSE


def test_falcons_store_only_their_own_keys_and_values():
    per_head = 2 * 2 * 8 * 4  # keys and values, layers, size, bytes
    heads = {"falcon": 1, "falcon-40b": 2, "falcon-rw": 4}
    assert {name: HuggingFaceLM(tiny(name)).slot_bytes // per_head for name in heads} == heads


def test_positions_that_are_learned_end():
    lm = HuggingFaceLM(tiny("gpt2", n_positions=16))
    with pytest.raises(IndexError, match="beyond"):
        scored(lm, [3] * 17, Forest.rooted([3]))


@pytest.mark.parametrize("engine", ["compiled", "plain"])
@pytest.mark.parametrize("chunk", [16, 512])
def test_longrope_has_its_short_angles_up_to_its_first_length(engine, chunk):
    """In texts that fill it, in chunks or at once; with the factors that such angles are multiplied by."""
    model = model_of("phi3", **longrope(48))
    assert model.model.rotary_emb.attention_scaling > 1.1
    lm = HuggingFaceLM(model, chunk=chunk, engine=engine)
    assert lm.max_positions == 48
    text = np.random.default_rng(7).integers(0, 61, 49).tolist()
    for length in (3, 40, 48):
        assert spreads_off(last_row(lm, text[:length]), plain_logits(model, [text[:length]])[0]) < CLOSE
    if engine == "plain":  # one token more: what the limit is for
        assert spreads_off(last_row(lm, text), plain_logits(model, [text])[0]) > 5 * CLOSE or chunk > 49


@pytest.mark.parametrize("engine", ["compiled", "plain"])
def test_a_text_does_not_outgrow_the_angles_of_what_is_stored(engine):
    """Beyond 16 tokens transformers reads the whole text anew, with the long factors; what is stored has the short ones."""
    model = tiny("phi3", **longrope(16))
    lm = HuggingFaceLM(model, engine=engine)
    pair = Pair(model, None, None, lm, None)
    given = {"max_new_tokens": 12, "eos_token_id": []}
    (found,) = sb.generate(pair, [[5, 6, 7, 8]], sb.greedy(), **given)
    expected = model.generate(torch.tensor([[5, 6, 7, 8]]), do_sample=False, max_new_tokens=12, eos_token_id=[99])
    assert found.beams[0].tokens == expected[0, 4:].tolist()
    for prompt in ([5, 6, 7, 8, 9], list(range(3, 23))):
        with pytest.raises(BadPrompt, match="beyond 16 tokens the model changes the rotary angles"):
            sb.generate(pair, [prompt], sb.greedy(), **given)


def test_a_model_with_its_long_factors_at_all_lengths_reads_long_prompts_as_it_did():
    """As docs/models.md says to load one: texts longer than 16 tokens are those of the model as it is."""
    model = tiny("phi3", **longrope(16))
    prompt = list(range(3, 23))
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=[99])
    long = tiny("phi3", **longrope(16, short=LONG))
    pair = sb.load(long, tokenizer=False)
    assert pair.target.engine == "compiled"
    (found,) = sb.generate(pair, [prompt], sb.greedy(), max_new_tokens=12, eos_token_id=[])
    assert found.beams[0].tokens == expected[0, 20:].tolist()


PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"


def cells_of(line):
    return [cell.strip().strip("`") for cell in line.strip("|\n").split("|")]


def test_the_page_of_models_lists_the_rows_of_the_tables():
    lines = [cells_of(line) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    families = [line[:4] for line in lines if line[2:3] == ["yes"]]
    assert families == [[one.name, one.model, "yes", "yes"] for one in FAMILIES]
    engines = {kind.name for kind in ENGINES}
    assert [line[0] for line in lines if line[0] in engines] == [kind.name for kind in ENGINES]


def test_a_tiny_model_of_every_row_is_tried_here():
    """And the doors that draft with the model's own layers and read its states are tried with every family, too."""
    those_without_source = {family for family in FAMILIES if not family.cross}
    assert {family_of(tiny(name)) for name in (*MODELS, *MIXTURES)} == those_without_source
    assert all(family.name in known_families() for family in FAMILIES)
    assert family_of(tiny("phi")) is None


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"llama", "mistral", "qwen2", "gpt2", "gpt_neox"}))
def test_beam_search_finds_the_tokens_of_transformers(name):
    target = model_of(name)
    pair = sb.load(target, model_of(name, num_hidden_layers=1, **one_layer(name)))
    prompt = [3, 7, 11]
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 2}
    expected = target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    expected = expected[: expected.index(1) + 1] if 1 in expected else expected  # behind the end is padding
    for method in (sb.beam_search(3), sb.speculative_beam_search(3, 4, 2)):
        found = sb.generate(pair, [prompt], method, max_new_tokens=12)[0].tokens
        assert found == expected


@pytest.mark.parametrize("name", ["opt", "opt-350m", "bloom", "falcon", "falcon-40b", "falcon-rw"])
def test_beams_are_those_of_transformers_forward_with_and_without_drafts(name):
    """With ALiBi, which transformers' forward cannot do, they are those without drafts."""
    target, draft = model_of(name), model_of(name, num_hidden_layers=1)
    engines = ["compiled"] if has_alibi(target.config) else ["compiled", "plain"]
    options = {"seed": 3, "max_new_tokens": 10, "eos_token_id": []}
    prompts = [[3, 7, 11], list(range(20, 50))]
    texts = []
    for engine in engines:
        lms = [HuggingFaceLM(one, engine=engine) for one in (target, draft)]
        pair = Pair(target, draft, None, *lms)
        for method in (sb.beam_sampling(3), sb.dsbd(3, 4, 3, width="fixed")):
            found = sb.generate(pair, prompts, method, **options)
            texts.append([beam.tokens for one in found for beam in one.beams])
    assert all(found == texts[0] for found in texts)


def test_int4_follows_a_model_of_each_new_family_from_afar():
    """Sixteen steps for 32 weights: logits that keep most of what they are."""
    widths = {"hidden_size": 64, "ffn_dim": 64, "ffn_hidden_size": 64, "word_embed_proj_dim": 64}
    for name in ("opt", "bloom", "falcon", "falcon-40b", "falcon-rw"):
        model = model_of(name, **widths)
        lm = language_model(model, quantize="int4")
        text = np.random.default_rng(3).integers(0, 61, 20).tolist()
        expected = plain_logits(model, [text])[0]
        off = (last_row(lm, text) - expected).std() / expected.std()
        assert 0.001 < off < 0.6, (name, off)


def one_layer(name):
    """What a configuration says of layers one by one, for a model of one layer."""
    if name == "smollm3":
        return {"no_rope_layers": [1]}
    return {"layer_types": ["sliding_attention"]} if name in ("gemma2", "gemma3") else {}


def test_activations_are_those_of_transformers():
    from transformers.activations import ACT2FN

    x = torch.linspace(-12, 12, 4096).reshape(1, -1)
    plain = HuggingFaceLM(tiny("llama")).runner.decoder.weights.extras
    numbers = {"silu": 0, "gelu tanh": 1, "gelu": 2, "relu": 3}
    for name, activation in ACTIVATIONS.items():
        if name not in ACT2FN:
            continue
        out = np.empty((1, 4096), dtype=np.float32)
        extras = plain._replace(activation=numbers[activation], gated=False)
        activate(x.numpy(), 4096, extras, out)
        expected = ACT2FN[name](x.double()).float()
        torch.testing.assert_close(torch.from_numpy(out), expected, atol=1e-6, rtol=1e-6)


def test_hyperbolic_tangents_are_those_of_numpy():
    x = np.concatenate([np.linspace(-20, 20, 3000), np.geomspace(1e-20, 1, 1000)]).astype(np.float32)
    found = x.copy()
    tanh(found, np.empty(len(x), dtype=np.int32), np.empty(len(x), dtype=np.float32))
    np.testing.assert_allclose(found, np.tanh(x.astype(float)), rtol=1e-6)
