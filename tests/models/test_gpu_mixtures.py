"""Mixtures of experts in the forward for GPUs: on one where there is one, otherwise in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from specbeam.core.forest import Forest
from specbeam.engines.gpu import decoder as gpu
from specbeam.engines.gpu import expert_kernels
from specbeam.engines.gpu.expert_kernels import choose_experts, grouped_by_expert, multiplied_by_experts
from specbeam.errors import NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import language_model
from tests.models.test_compiled_forward import scored
from tests.models.test_families import CLOSE, last_row, spreads_off
from tests.models.test_gpu import DEVICE, KINDS, ON_GPU, assert_near, random
from tests.models.test_huggingface import check_random_turns
from tests.models.test_mixtures import MODELS, model_of
from tests.support.seats import plain_logits
from tests.support.tiny_models import MIXTURES


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("divides", [False, True], ids=["shares of all", "shares of the chosen"])
@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1, 2, 2), (5, 6, 3), (3, 128, 8)])
def test_rows_choose_their_likeliest_experts(rows, experts, chosen, divides):
    scores = random(rows, experts, kind=torch.float32)
    found = choose_experts(scores, chosen, divides)
    odds, expected = scores.softmax(1).topk(chosen, 1)
    odds = odds / odds.sum(1, keepdim=True) if divides else odds
    assert found.experts.view(rows, chosen).tolist() == expected.tolist()
    torch.testing.assert_close(found.shares.view(rows, chosen), odds)


def test_of_equal_experts_the_first_ones_are_chosen_and_nan_chooses_known_ones():
    scores = torch.zeros(2, 5, device=DEVICE)
    scores[1] = torch.nan
    found = choose_experts(scores, 2, True)
    assert found.experts[:2].tolist() == [0, 1]
    assert found.shares[:2].tolist() == [0.5, 0.5]
    assert set(found.experts[2:].tolist()) <= {*range(5)}


@pytest.mark.parametrize("block", [16, 2048])
def test_choices_are_grouped_by_expert_in_the_order_of_rows(block, monkeypatch):
    monkeypatch.setattr(expert_kernels, "_CHOICES", block)
    experts = torch.randint(0, 6, (50,), dtype=torch.int32, device=DEVICE)
    experts[experts == 3] = 4  # nobody chooses this one
    groups = grouped_by_expert(experts, 6)
    assert groups.order.tolist() == experts.sort(stable=True).indices.tolist()
    assert groups.starts.tolist() == [0, *experts.bincount(minlength=6).cumsum(0).tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1, 4, 2), (40, 5, 3), (70, 2, 1)])
def test_products_are_those_of_each_choice_with_its_expert(kind, rows, experts, chosen):
    x = random(rows, 40, kind=kind) / 7
    up, down = random(experts, 72, 40, kind=kind), random(experts, 40, 72, kind=kind) / 9
    choices = choose_experts(random(rows, experts, kind=torch.float32), chosen, True)
    groups = grouped_by_expert(choices.experts, experts)
    first = multiplied_by_experts(x, up, groups, rows)
    found = multiplied_by_experts(first, down, groups, rows, choices.shares)
    of_choices = choices.experts.long()
    read = x.float().repeat_interleave(chosen, 0)
    expected = torch.einsum("cow,cw->co", up.float()[of_choices], read)
    assert_near(first, expected[groups.order.long()], kind)
    last = torch.einsum("cow,cw->co", down.float()[of_choices], expected.to(kind).float())
    assert_near(found, last * choices.shares[:, None], kind)


@pytest.mark.parametrize(("name", "changes"), MODELS, ids=str)
def test_logits_are_those_of_transformers_on_trees(name, changes):
    model = model_of(name, **changes).to(DEVICE)
    lm = HuggingFaceLM(model, engine="gpu")
    assert lm.engine == "gpu"
    prompt = torch.randint(3, 61, (7,)).tolist()
    forest = Forest.rooted([prompt[-1]]).grown([7, 8], [0, 0])
    found = scored(lm, prompt, forest)
    expected = plain_logits(model, [prompt + forest.path(node) for node in range(forest.size)])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_many_rows_are_mixed_in_parts(monkeypatch):
    model = model_of("mixtral").to(DEVICE)
    text = np.random.default_rng(7).integers(0, 61, 11).tolist()
    lm = HuggingFaceLM(model, engine="gpu")
    monkeypatch.setattr(expert_kernels, "MOST_ROWS", 4)
    assert spreads_off(last_row(lm, text), plain_logits(model, [text])[0]) < CLOSE


@ON_GPU
@pytest.mark.parametrize(("name", "changes"), MODELS, ids=str)
def test_logits_are_those_of_transformers_in_random_turns(name, changes):
    model = model_of(name, **changes).to(DEVICE)
    lm = HuggingFaceLM(model, chunk=5, engine="gpu")
    check_random_turns(lm, model, turns=6 if DEVICE == "cuda" else 2)
    check_scores_forests(lm)
    text = np.random.default_rng(3).integers(0, lm.vocab, 150 if DEVICE == "cuda" else 20).tolist()
    assert spreads_off(last_row(lm, text), plain_logits(model, [text])[0]) < CLOSE


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("mixtral", {"divides": False}), ("mixtral", {"chosen": 1}), ("qwen3_moe", {"divides": True})],
)
def test_how_rows_choose_counts(name, mistake, monkeypatch):
    model = model_of(name).to(DEVICE)
    text = np.random.default_rng(7).integers(0, 61, 8).tolist()
    right = gpu.architecture_of
    monkeypatch.setattr(gpu, "architecture_of", lambda model: replace(right(model), **mistake))
    lm = HuggingFaceLM(model, engine="gpu")
    assert spreads_off(last_row(lm, text), plain_logits(model, [text])[0]) > 100 * CLOSE


def test_the_matrices_of_experts_are_not_copied():
    model = model_of("olmoe").to(DEVICE)
    layer = HuggingFaceLM(model, engine="gpu").runner.decoder.layers[1]
    own = model.model.layers[1].mlp.experts
    assert layer.experts.up.data_ptr() == own.gate_up_proj.data_ptr()
    assert layer.experts.down.data_ptr() == own.down_proj.data_ptr()


@ON_GPU
@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are captured on GPUs")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MIXTURES)
def test_captured_passes_are_those_run_step_by_step(name, kind):
    """Whatever experts the rows of a later pass choose."""
    model = model_of(name).to(DEVICE, kind)
    captured, plain = (HuggingFaceLM(model, engine="gpu") for _ in range(2))
    plain.runner.graphs.capture, plain.runner.graphs.steps_can_launch = None, False
    for turn in range(6):
        prompt = np.random.default_rng(turn).integers(3, 61, 4).tolist()
        forest = Forest.rooted([prompt[-1]]).grown([turn, 2, 3], [0, 0, 1])
        assert torch.equal(scored(captured, prompt, forest), scored(plain, prompt, forest))
    graphs = captured.runner.graphs
    assert graphs.step_graphs or any(graphs.graphs.made.values())


@ON_GPU
@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has an engine of its own")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MIXTURES)
def test_load_takes_the_forward_for_gpus(name, kind):
    lm = language_model(model_of(name).to(DEVICE, kind))
    assert lm.engine == "gpu"
    check_scores_forests(lm)


@pytest.mark.skipif(DEVICE == "cpu", reason="fp8 is for GPUs that have it")
@ON_GPU
def test_experts_are_not_rounded_to_fp8():
    with pytest.raises(NotSupported, match="experts cannot be rounded to fp8"):
        language_model(model_of("mixtral").to(DEVICE, torch.bfloat16), quantize="fp8")
