"""Copies of a target with matrices of two bits: what is trained, what is written, and what is refused."""

import copy
from itertools import product

import pytest
import torch

import specbeam as sb
from specbeam.errors import BadSetting, UnsupportedModel
from specbeam.lab.train import DrawPlan, Schedule, train_dbllm
from specbeam.lab.train.dbllm import Binarised, DeviationLoss, names_of_matrices, uncertainty
from specbeam.models.loading.models import load_model
from tests.support import words
from tests.support.tiny_models import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 128}
PROMPTS = ["abc", "Hello", "you", "cab"]
DRAWS = DrawPlan(beams=2, max_new_tokens=6)


def pair_of(family="llama", **changes):
    return sb.load(tiny(family, **(SIZES | changes)), tokenizer=words.tokenizer())


def test_a_weight_becomes_the_nearest_sum_of_scales_and_gradients_reach_both():
    torch.manual_seed(0)
    weight = torch.randn(3, 128, requires_grad=True)
    binarised = Binarised(weight)
    with torch.no_grad():
        binarised.scales.copy_(torch.randn(2, 3, 2))
    rounded = binarised(weight)
    first, second = binarised.scales.detach().bfloat16().float().repeat_interleave(64, 2)
    levels = torch.stack([a * first + b * second for a, b in product((0, 1), (0, 1))])
    nearest = (levels - weight.detach()).abs().min(0).values
    torch.testing.assert_close((rounded - weight).detach().abs(), nearest)
    rounded.backward(torch.ones(3, 128))
    assert torch.equal(weight.grad, torch.ones(3, 128))
    counts = binarised.bits(weight.detach()).unflatten(2, (-1, 64)).sum(3)
    assert torch.equal(binarised.scales.grad, counts.float())


def test_a_trained_copy_is_what_was_trained_and_serves_as_target_and_as_draft(tmp_path):
    pair = pair_of()
    before = copy.deepcopy(pair.target_model.state_dict())
    names = names_of_matrices(pair.target_model)
    assert len(names) == 2 * 7
    trained = train_dbllm(pair, PROMPTS, tmp_path, draws=DRAWS, schedule=Schedule(epochs=6))
    assert all(torch.equal(weight, before[name]) for name, weight in pair.target_model.state_dict().items())
    _, first, *_, last = trained.curve
    assert last.loss < first.loss
    again = train_dbllm(pair, PROMPTS, tmp_path, draws=DRAWS, schedule=Schedule(epochs=6))
    assert again.curve[1:] == trained.curve[1:]  # the first loss is NaN
    state = torch.load(tmp_path / "training" / "state.pt", weights_only=False)["model"]
    written = load_model(str(tmp_path))
    for name in names:
        parts = [state[f"{name}.parametrizations.weight.{part}"] for part in ("original", "0.scales")]
        binarised = Binarised(parts[0])
        binarised.scales.data = parts[1]
        torch.testing.assert_close(written.get_submodule(name).weight, binarised(parts[0]).detach(), atol=0, rtol=1e-6)
    taught = sb.load(pair.target_model, draft=tmp_path, tokenizer=words.tokenizer(), probe=False)
    plain = sb.generate(taught, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=10)[0]
    drafted = sb.generate(taught, "abc", sb.dsbd(3, 3, 2), seed=1, max_new_tokens=10)[0]
    assert drafted.tokens == plain.tokens
    alone = sb.load(tmp_path, tokenizer=words.tokenizer(), probe=False)
    assert sb.generate(alone, "abc", max_new_tokens=4)[0].report.law.endswith("of the target in dbllm")


def test_unsure_laws_count_more():
    """A law of one token has no uncertainty; two equal laws have the mean."""
    logits = torch.zeros(2, 8)
    logits[0, 0] = 100.0
    unsure = torch.full((8,), 1 / 8).log()
    sure = torch.tensor([0.0, *[-100.0] * 7])
    laws = torch.stack([sure, unsure])
    torch.testing.assert_close(uncertainty(logits, laws), torch.tensor([0.0, 2.0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(uncertainty(logits[1:].repeat(2, 1), laws[1:].repeat(2, 1)), torch.ones(2))


@pytest.mark.parametrize(
    ("family", "changes", "options", "error", "said"),
    [
        ("gpt2", {}, {}, UnsupportedModel, "GPT2LMHeadModel cannot have weights of 2 bits"),
        (
            "llama",
            {"hidden_size": 32},
            {},
            UnsupportedModel,
            "has 32 inputs; for weights of 2 bits it must be a multiple",
        ),
        ("llama", {}, {"deviation": -1}, BadSetting, "deviation is -1; it must be at least 0"),
        ("llama", {}, {"power": -1}, BadSetting, "power is -1; it must be at least 0"),
        ("llama", {}, {"variation": 2}, BadSetting, "variation is 2; it must be in"),
    ],
)
def test_what_cannot_be_trained_is_refused(family, changes, options, error, said, tmp_path):
    pair = sb.load(tiny(family, **((SIZES if family == "llama" else {}) | changes)), tokenizer=words.tokenizer())
    with pytest.raises(error, match=said):
        train_dbllm(pair, PROMPTS, tmp_path, loss=DeviationLoss(**options))
