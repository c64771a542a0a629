"""Checkpoints whose matrices are two binary matrices each: what is read, and what the compiled forward makes of it."""

import copy
import json

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from safetensors.torch import load_file, save_file

from specbeam.engines.dual_binary import BINARY_GROUP, rounded_binaries
from specbeam.engines.packed import weights_in
from specbeam.models.quantised import rounding_of
from tests.models.test_rounded_files import TEXT, change_tensors, last_row, loaded, model_of
from tests.support.seats import plain_logits


def write_binary(folder, model, **settings):
    """Write a model with layers of random bits and scales, word by word; return the model of these weights, in float32."""
    rng = np.random.default_rng(5)
    twin = copy.deepcopy(model)
    copy.deepcopy(twin).bfloat16().save_pretrained(folder)
    for weight in twin.parameters():
        weight.data = weight.data.bfloat16().float()
    tensors = load_file(folder / "model.safetensors")
    for name, module in twin.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        columns, depth = module.weight.shape
        bits = rng.integers(0, 2, (2, depth, columns))
        words = sum(bits[:, step::32] << step for step in range(32))
        scales = torch.from_numpy(rng.normal(0, 0.1, (2, depth // 64, columns))).bfloat16()
        del tensors[f"{name}.weight"]
        tensors[f"{name}.planes"] = torch.from_numpy(words.astype(np.uint32).view(np.int32))
        tensors[f"{name}.scales"] = scales
        weight = (scales.double().repeat_interleave(64, 1) * torch.from_numpy(bits)).sum(0)
        module.weight = torch.nn.Parameter(weight.t().float(), requires_grad=False)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "dbllm", "bits": 2, "group_size": 64} | settings
    (folder / "config.json").write_text(json.dumps(config))
    return twin


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "bloom"])
def test_a_folder_is_the_model_of_its_weights_up_to_the_rounding_of_rows(family, tmp_path):
    twin = write_binary(tmp_path, model_of(family))
    target = loaded(tmp_path).target
    assert target.engine == "compiled"
    assert set(target.runner.decoder.kinds_of_matrices) == {"dual binary"}
    assert rounding_of(target) == "dbllm"
    assert weights_in(target.model) == twin.num_parameters()
    expected = plain_logits(twin, [TEXT])[0].detach()
    unrounded = target.model(torch.tensor([TEXT])).logits[0, -1]
    torch.testing.assert_close(unrounded, expected, atol=1e-4, rtol=1e-4)
    off = (last_row(target) - expected).abs().max() / expected.std()
    assert 0 < off.item() < 0.2


def test_a_text_does_not_depend_on_its_batch(tmp_path):
    write_binary(tmp_path, model_of())
    pair = loaded(tmp_path)
    texts = ["abc", "Hello you", "cab"]
    together = sb.generate(pair, texts, sb.beam_sampling(3), seed=3, max_new_tokens=9)
    for text, found in zip(texts, together, strict=True):
        alone = sb.generate(pair, text, sb.beam_sampling(3), seed=3, max_new_tokens=9)[0]
        assert [beam.tokens for beam in alone.beams] == [beam.tokens for beam in found.beams]
        assert [beam.score for beam in alone.beams] == [beam.score for beam in found.beams]
        assert alone.report.law.endswith("of the target in dbllm")


def test_a_draft_of_2_bits_changes_no_beam(tmp_path):
    model = model_of()
    write_binary(tmp_path, model)
    pair = loaded(model, tmp_path)
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=12)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 5, 3), seed=1, max_new_tokens=12)[0]
    assert [beam.tokens for beam in drafted.beams] == [beam.tokens for beam in plain.beams]
    assert "of the target in" not in drafted.report.law
    assert drafted.report.draft_passes > 0


def test_a_grid_has_the_least_error_of_its_tried_scales():
    """On numbers of the grid there is none, whatever the sign of the longer side."""
    rng = np.random.default_rng(0)
    steps = rng.integers(-1, 3, (3, 2 * BINARY_GROUP)).astype(np.float32)
    steps[:, ::BINARY_GROUP] = 2  # the scale that clips nothing is the right one
    for scale in (0.25, -0.25):
        assert np.array_equal(rounded_binaries(scale * steps).weights(), scale * steps)
    matrix = rng.standard_normal((3, 2 * BINARY_GROUP)).astype(np.float32)
    found = rounded_binaries(matrix)
    error = ((found.weights() - matrix) ** 2).mean()
    assert error < 0.16  # the best grid of four levels has 0.118 on a normal law, with levels at other places
    assert np.array_equal(found.columns(1, 3).weights(), found.weights()[1:])


def drop_scales(tensors):
    del tensors["model.layers.1.mlp.up_proj.scales"]


def break_scale(tensors):
    tensors["model.layers.1.mlp.up_proj.scales"][1, 0, 3] = torch.nan


def widen_scales(tensors):
    tensors["model.layers.1.mlp.up_proj.scales"] = tensors["model.layers.1.mlp.up_proj.scales"].float()


def pack_head(tensors):
    for part in ("planes", "scales"):
        tensors[f"lm_head.{part}"] = tensors[f"model.layers.0.mlp.up_proj.{part}"].clone()


@pytest.mark.parametrize(
    ("settings", "change", "said"),
    [
        ({"group_size": 32}, None, "in groups of 32; a group must have 64"),
        ({"group_size": None}, None, "the group_size of these weights is None"),
        ({}, drop_scales, "model.layers.1.mlp.up_proj.scales is missing; it must be BF16[2, 1, 128]"),
        ({}, widen_scales, "up_proj.scales is F32[2, 1, 128]; it must be BF16[2, 1, 128]"),
        ({}, break_scale, "it must hold finite floats"),
        ({}, pack_head, "lm_head, the model's head, is rounded"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_was_found(settings, change, said, tmp_path):
    write_binary(tmp_path, model_of(num_hidden_layers=2), **settings)
    if change is not None:
        change_tensors(tmp_path, change)
    with pytest.raises(sb.SpecbeamError) as caught:
        loaded(tmp_path)
    assert said in str(caught.value)
