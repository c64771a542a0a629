"""Checkpoints of GPTQ and AWQ: what the compiled forward makes of their files is the model of their weights, exactly."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from safetensors.torch import load_file, save_file

from specbeam.core.forest import Forest
from specbeam.engines import packed
from specbeam.engines.mapped import is_mapped
from specbeam.engines.packed import Grouped, PackedLinear, packed_in_words, weights_in
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.quantised import rounding_of
from tests.models.test_compiled_forward import scored
from tests.models.test_huggingface import check_random_turns
from tests.support import words
from tests.support.rounded_folders import write_rounded
from tests.support.seats import plain_logits
from tests.support.tiny_models import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 128}
TEXT = [3, 4, 5, 9, 20]
# Both sides add some hundred float32 products in orders of their own.
CLOSE = 3e-5


def model_of(family="llama", **changes):
    widths = {"opt": ("ffn_dim", "word_embed_proj_dim"), "falcon-40b": ("ffn_hidden_size",)}.get(family, ())
    return tiny(family, **(SIZES | dict.fromkeys(widths, 64) | changes))


def loaded(folder, *drafts, **options):
    return sb.load(folder, *drafts, tokenizer=words.tokenizer(), **options)


def last_row(lm, text=TEXT):
    return scored(lm, text, Forest.rooted([text[-1]]))[0]


def spreads_off(found, expected):
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize(
    ("layout", "family", "options"),
    [
        ("gptq", "llama", {"size": 32}),
        ("gptq", "llama", {"size": 64, "symmetric": True}),
        ("gptq", "qwen2", {"size": -1}),
        ("gptq", "gpt_neox", {"size": 32, "symmetric": True}),
        ("gptq", "opt", {"size": 32}),
        ("gptq", "falcon-40b", {"size": 32}),
        ("awq", "bloom", {"size": 64}),
        ("gptq_v2", "phi3", {"size": 64, "zeros": 15}),
        ("awq", "llama", {"size": 64}),
        ("awq", "qwen3", {"size": 32, "words": torch.bfloat16}),
    ],
    ids=str,
)
def test_the_compiled_forward_is_the_float32_model_of_the_exact_weights(layout, family, options, tmp_path):
    """To the last bit that of its own float32 panels; on trees that of transformers, up to the order of sums."""
    twin = write_rounded(tmp_path, model_of(family), layout, **options)
    target = loaded(tmp_path).target
    assert target.engine == "compiled"
    assert target.engine_note == ""
    assert set(target.runner.decoder.kinds_of_matrices) == {"nibbles"}
    assert weights_in(target.model) == twin.num_parameters()
    assert rounding_of(target) == layout.split("_")[0]
    assert torch.equal(last_row(target), last_row(HuggingFaceLM(twin)))
    lm = HuggingFaceLM(target.model, chunk=5)
    check_random_turns(lm, twin, turns=2)
    check_scores_forests(lm)
    assert spreads_off(target.model(torch.tensor([TEXT])).logits[0, -1], plain_logits(twin, [TEXT])[0]) < CLOSE


@pytest.mark.parametrize("mistake", ["zero points", "order of columns", "groups"])
def test_what_a_layout_says_counts(mistake, tmp_path, monkeypatch):
    layout = "awq" if mistake == "order of columns" else "gptq"
    twin = write_rounded(tmp_path, model_of(), layout, size=64)
    expected = plain_logits(twin, [TEXT])[0]
    assert spreads_off(last_row(loaded(tmp_path).target), expected) < CLOSE
    if mistake == "zero points":
        right = packed.PackedMatrix.read
        monkeypatch.setattr(packed.PackedMatrix, "read", lambda self: right(self)._replace(zeros=right(self).zeros - 1))
    if mistake == "order of columns":
        monkeypatch.setattr(packed, "_AWQ_COLUMNS", range(8))
    if mistake == "groups":
        monkeypatch.setattr(Grouped, "in_groups_of", lambda self, size: Grouped(self.words, *(np.tile(part, (2, 1)) for part in self[1:])))  # fmt: skip
    assert spreads_off(last_row(loaded(tmp_path, check=False).target), expected) > 1000 * CLOSE


def test_a_zero_point_of_none_is_stored_as_fifteen_by_the_first_layout(tmp_path):
    """Zero points are stored less one, in four bits: 0 becomes 15."""
    twin = write_rounded(tmp_path, model_of(), "gptq", zeros=0)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = tensors["model.layers.0.mlp.up_proj.qzeros"]
    assert bool(((stored & 15) == 15).any())
    assert spreads_off(last_row(loaded(tmp_path).target), plain_logits(twin, [TEXT])[0]) < CLOSE


def test_large_models_stay_as_their_files_are(tmp_path, monkeypatch):
    monkeypatch.setattr("specbeam.engines.mapped.LARGEST_WIDENED", 0)
    twin = write_rounded(tmp_path, model_of(), "awq")
    target = loaded(tmp_path).target
    assert target.engine == "compiled"
    assert is_mapped(target.model)
    assert target.model.dtype == torch.float16
    assert target.runner.decoder.kind == "float16"
    assert spreads_off(last_row(target), plain_logits(twin, [TEXT])[0]) < CLOSE


def test_a_module_keeps_no_numbers_of_its_matrix(tmp_path):
    write_rounded(tmp_path, model_of(), "gptq")
    model = loaded(tmp_path).target_model
    held = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(held) == 2 * 7
    assert not any(list(module.parameters()) + list(module.buffers()) for module in held)


@pytest.mark.slow
@pytest.mark.parametrize("only", ["mlp", "self_attn"])
def test_matrices_that_were_left_alone_stay_so(only, tmp_path):
    twin = write_rounded(tmp_path, model_of(), "gptq", only=only)
    target = loaded(tmp_path).target
    kinds = target.runner.decoder.kinds_of_matrices
    assert (kinds.qkv == "nibbles", kinds.down == "nibbles") == (only == "self_attn", only == "mlp")
    assert spreads_off(last_row(target), plain_logits(twin, [TEXT])[0]) < CLOSE


def test_a_folder_of_4_bits_drafts_for_a_full_target_and_changes_no_beam(tmp_path):
    model = model_of()
    write_rounded(tmp_path, model, "gptq")
    pair = loaded(model, tmp_path)
    assert (pair.target.engine, pair.draft.engine) == ("compiled", "compiled")
    assert set(pair.draft.runner.decoder.kinds_of_matrices) == {"nibbles"}
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=12)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 5, 3), seed=1, max_new_tokens=12)[0]
    assert [beam.tokens for beam in drafted.beams] == [beam.tokens for beam in plain.beams]
    assert "of the target in" not in drafted.report.law
    assert drafted.report.target_passes < plain.report.target_passes


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_a_target_of_4_bits_is_rounded_again_as_its_own_draft_and_its_law_stays(kind, tmp_path):
    write_rounded(tmp_path, model_of(), "gptq")
    pair = loaded(tmp_path, kind)
    assert (pair.target.engine, pair.draft.engine) == ("compiled", kind)
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=8)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 5, 3), seed=1, max_new_tokens=8)[0]
    assert drafted.tokens == plain.tokens
    assert drafted.report.law.endswith("of the target in gptq")
    assert rounding_of(pair.draft) == f"gptq and {kind}"


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shuffle_groups(tensors):
    tensors["model.layers.1.mlp.up_proj.g_idx"] = tensors["model.layers.1.mlp.up_proj.g_idx"].flip(0)


def widen_scales(tensors):
    tensors["model.layers.0.mlp.up_proj.scales"] = tensors["model.layers.0.mlp.up_proj.scales"].float() * 1.0001


def pack_head(tensors):
    for part in ("qweight", "qzeros", "scales"):
        tensors[f"lm_head.{part}"] = tensors[f"model.layers.0.mlp.up_proj.{part}"].clone()


def forget_norm(tensors):
    del tensors["model.layers.1.input_layernorm.weight"]


def add_tensor(tensors):
    tensors["model.layers.0.mlp.act.scales"] = torch.ones(4)


def add_bias(tensors):
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(128).half()


@pytest.mark.parametrize(
    ("settings", "change", "said"),
    [
        ({"bits": 8}, None, "these weights have 8 bits"),
        ({"checkpoint_format": "marlin"}, None, "layout of these weights is 'marlin'; of gptq, it must be 'gptq', 'gptq_v2'"),
        ({"pack_dtype": "int16"}, None, "packed in int16"),
        ({"group_size": 16}, None, "in groups of 16; a group must be a multiple of 32"),
        ({"group_size": 64}, None, "4 bits in groups of 64 make it ["),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None, "these weights were rounded by 'bitsandbytes'"),
        ({"quant_method": "fp8"}, None, "these weights were rounded by 'fp8'"),
        ({"quant_method": "compressed-tensors"}, None, "these weights were rounded by 'compressed-tensors'"),
        ({"quant_method": "magic"}, None, "rounded by 'magic', which transformers does not know"),
        ({"desc_act": True}, shuffle_groups, "the groups of model.layers.1.mlp.up_proj are out of order (desc_act"),
        ({}, widen_scales, "is F32 with numbers that float16 cannot hold"),
        ({}, pack_head, "lm_head, the model's head, is rounded"),
        ({}, forget_norm, "the files lack model.layers.1.input_layernorm.weight"),
        ({}, add_tensor, "the files hold model.layers.0.mlp.act.scales, which the model does not have"),
        ({}, add_bias, "has a bias in the files and none in the model"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_what_was_found_and_what_can_be(settings, change, said, tmp_path):
    write_rounded(tmp_path, model_of(num_hidden_layers=2), "gptq", size=32, **settings)
    if change is not None:
        change_tensors(tmp_path, change)
    with pytest.raises(sb.SpecbeamError) as caught:
        loaded(tmp_path)
    assert said in str(caught.value)
    assert "specbeam itself reads 4-bit GPTQ and AWQ weights, and those of DB-LLM, on a CPU, but" in str(caught.value)


def test_a_bias_of_zeros_that_a_model_lacks_is_none(tmp_path):
    twin = write_rounded(tmp_path, model_of(), "gptq")
    change_tensors(
        tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(128).half()})
    )
    assert spreads_off(last_row(loaded(tmp_path).target), plain_logits(twin, [TEXT])[0]) < CLOSE


def test_numbers_survive_words_and_weights_are_exact():
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 16, (64, 5)).astype(np.uint8)
    scales = rng.standard_normal((2, 5)).astype(np.float16).astype(np.float32)
    zeros = rng.integers(0, 17, (2, 5)).astype(np.uint8)
    found = Grouped(packed_in_words(numbers), scales, zeros).weights()
    exact = (numbers.reshape(2, 32, 5).astype(float) - zeros[:, None]) * scales[:, None].astype(float)
    assert np.array_equal(found, exact.reshape(64, 5).T)
