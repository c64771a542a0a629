"""Mixtures of experts in the compiled forward: logits of transformers, rows that do not see each other, the same beams."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from dataclasses import replace

from specbeam.engines.cpu import decoder as compiled
from specbeam.errors import NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from tests.models.test_families import CLOSE, check_bits_in_company, last_row, spreads_off
from tests.models.test_huggingface import check_random_turns
from tests.support.seats import plain_logits
from tests.support.tiny_models import MIXTURES, tiny

MODELS = [
    ("mixtral", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("olmoe", {}),
]  # fmt: skip


def model_of(name, **changes):
    """A tiny model whose norms are at random, too."""
    model = tiny(name, **changes)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize(("name", "changes"), MODELS, ids=str)
def test_logits_are_those_of_transformers_on_trees_in_any_company(name, changes):
    model = model_of(name, **changes)
    lm = HuggingFaceLM(model, chunk=5)
    assert lm.engine == "compiled"
    check_random_turns(lm, model, turns=4)
    check_scores_forests(lm)
    text = np.random.default_rng(3).integers(0, lm.vocab, 150).tolist()
    assert spreads_off(last_row(lm, text), plain_logits(model, [text])[0]) < CLOSE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_row_has_the_same_bits_in_every_company_and_in_every_chunk(name, dtype, packed):
    """Whatever experts its neighbours choose."""
    model = model_of(name)
    check_bits_in_company(model.bfloat16().float() if dtype == "bfloat16" else model, dtype)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("mixtral", {"divides": False}),
        ("mixtral", {"chosen": 1}),
        ("qwen3_moe", {"divides": True}),
        ("olmoe", {"chosen": 3}),
    ],
)
def test_how_rows_choose_counts(name, mistake, monkeypatch):
    model = model_of(name)
    text = np.random.default_rng(7).integers(0, 61, 40).tolist()
    right = compiled.architecture_of
    monkeypatch.setattr(compiled, "architecture_of", lambda model: replace(right(model), **mistake))
    assert spreads_off(last_row(HuggingFaceLM(model), text), plain_logits(model, [text])[0]) > 100 * CLOSE


@pytest.mark.parametrize("name", MIXTURES)
def test_beam_search_finds_the_tokens_of_transformers(name):
    target = model_of(name)
    pair = sb.load(target, model_of(name, num_hidden_layers=1))
    prompt = [3, 7, 11]
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 2}
    expected = target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    expected = expected[: expected.index(1) + 1] if 1 in expected else expected  # behind the end is padding
    for method in (sb.beam_search(3), sb.speculative_beam_search(3, 4, 2)):
        assert sb.generate(pair, [prompt], method, max_new_tokens=12)[0].tokens == expected


def test_experts_are_not_rounded():
    with pytest.raises(NotSupported, match="experts cannot be rounded to int8"):
        HuggingFaceLM(tiny("mixtral"), engine="int8")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0]}, "only some of its layers have experts"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "only some of its layers have experts"),
        ("olmoe", {"clip_qkv": 3.0}, "clip_qkv"),
    ],
)
def test_what_the_table_does_not_describe_is_refused_by_name(name, changes, reason):
    with pytest.raises(NotSupported, match=reason):
        HuggingFaceLM(tiny(name, **changes), engine="compiled")
