"""Keys and values that are kept in bfloat16: the law of the model with rounded ones, whatever else is in a pass."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import specbeam as sb
from specbeam.core import compiling
from specbeam.engines.cache_names import cache_argument

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from specbeam.core.forest import Forest
from specbeam.errors import NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from tests.models.test_compiled_forward import scored
from tests.support import words
from tests.support.checking import refused
from tests.support.seats import plain_logits, seat
from tests.support.tiny_models import tiny

FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "bloom", "falcon"]


class RoundedCache(DynamicCache):
    """A cache of transformers that rounds what it is given, before anything reads it."""

    def update(self, keys, values, *more, **named):
        return super().update(keys.bfloat16().float(), values.bfloat16().float(), *more, **named)


def last_row(lm, text):
    return scored(lm, text, Forest.rooted([text[-1]]))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_with_a_rounded_cache(name):
    """A number between two steps may be rounded to the other one, so differences are some of those that rounding makes.

    Of some 2,500 numbers one or two are, each by a whole step: a tenth of what all of them together make, more or less.
    """
    model = tiny(name)
    text = np.random.default_rng(3).integers(3, 61, 40).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([text]), **cache_argument(model, RoundedCache())).logits[0, -1]
    exact = plain_logits(model, [text])[0]
    rounding = float((exact - expected).std())
    assert rounding > 1e-4 * float(expected.std())
    found = last_row(HuggingFaceLM(model, kv="bfloat16", chunk=7), text)
    assert float((found - expected).std()) < 0.3 * rounding
    unrounded = last_row(HuggingFaceLM(model), text)  # which is what a forgotten rounding would give
    assert float((unrounded - expected).std()) > 0.9 * rounding


def test_a_row_has_the_same_bits_in_every_company_and_in_every_chunk():
    model = tiny("llama")
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 61, length).tolist() for length in (23, 2, 40)]
    alone = [last_row(HuggingFaceLM(model, kv="bfloat16"), prompt) for prompt in prompts]
    for chunk in (5, 512):
        lm = HuggingFaceLM(model, kv="bfloat16", chunk=chunk)
        seats = [seat(prompt) for prompt in prompts]
        forests = [Forest.rooted([prompt[-1]]) for prompt in prompts]
        for row, found in zip(alone, lm.extend(seats, forests), strict=True):
            assert torch.equal(found.logits[0], row)
    check_scores_forests(lm)


def test_beginnings_that_are_copied_give_the_bits_of_those_that_are_computed():
    lm = HuggingFaceLM(tiny("llama"), kv="bfloat16")
    text = np.random.default_rng(5).integers(0, 61, 50).tolist()
    first = last_row(lm, text)
    lm.remember_prompts(8, 1 << 20)
    for _ in range(2):
        one = seat(text)
        found = lm.extend([one], [Forest.rooted([text[-1]])])[0].logits[0]
        lm.close(one)
        assert torch.equal(found, first)
    assert lm.known_prompts.found == 48


def test_keys_and_values_take_half_the_memory():
    wide = HuggingFaceLM(tiny("llama"))
    narrow = HuggingFaceLM(tiny("llama"), kv="bfloat16")
    for lm in (wide, narrow):
        lm.reserve(1, 1000)
    stores = [lm.runner.store for lm in (wide, narrow)]
    assert stores[0].keys_by_panel.nbytes == 2 * stores[1].keys_by_panel.nbytes
    assert stores[0].values_by_slot.nbytes == 2 * stores[1].values_by_slot.nbytes
    assert wide.slot_bytes == 2 * narrow.slot_bytes


def test_beams_and_texts_are_those_of_the_rounded_target_and_the_law_says_so():
    model = tiny("llama", hidden_size=64, intermediate_size=96)
    pair = sb.load(model, tiny("llama", seed=1, num_hidden_layers=1), tokenizer=words.tokenizer(), kv="bfloat16")
    assert pair.target.kv == "bfloat16"
    assert pair.draft.kv == "float32"
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=12)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 5, 3), seed=1, max_new_tokens=12)[0]
    assert [beam.tokens for beam in drafted.beams] == [beam.tokens for beam in plain.beams]
    assert plain.report.law.endswith("of the target in bfloat16 keys and values")
    wide = sb.load(model, tokenizer=words.tokenizer())
    assert "keys and values" not in sb.generate(wide, "abc", sb.beam_sampling(3), max_new_tokens=2)[0].report.law


@pytest.mark.slow
def test_a_target_that_drafts_for_itself_in_int8_keeps_both_caches_rounded():
    model = tiny("llama", hidden_size=64, intermediate_size=96)
    pair = sb.load(model, "int8", tokenizer=words.tokenizer(), kv="bfloat16")
    assert (pair.target.kv, pair.draft.kv) == ("bfloat16", "bfloat16")
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=12)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 5, 3), seed=1, max_new_tokens=12)[0]
    assert drafted.tokens == plain.tokens


def test_what_cannot_be_is_refused():
    with refused("kv is 'int3'; it must be 'bfloat16'"):
        sb.load(tiny("llama"), tokenizer=words.tokenizer(), kv="int3")
    with pytest.raises(NotSupported, match="compiled forward cannot run this PhiForCausalLM"):
        sb.load(tiny("phi"), tokenizer=words.tokenizer(), kv="bfloat16")
    with pytest.raises(NotSupported, match="kv='bfloat16' needs the compiled forward, rounded or not"):
        HuggingFaceLM(tiny("llama"), engine="plain", kv="bfloat16")
