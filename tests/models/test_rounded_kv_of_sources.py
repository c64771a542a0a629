"""Keys and values in bfloat16 of decoders that look at sources: their own, and those of the sources, which are the most."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.forest import Forest
from specbeam.engines.cache_names import cache_argument
from specbeam.errors import NotSupported
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.loading.checks import check_scores_forests
from tests.models.test_rounded_kv import RoundedCache
from tests.models.test_source_families import model_of, state_sources
from tests.support.seats import seat
from tests.support.tiny_sources import VOCAB, tiny_reader

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

NAMES = ["marian", "t5", "whisper"]


def text_of(length, seed=3):
    return np.random.default_rng([length, seed]).integers(3, VOCAB, length).tolist()


def last_row(lm, text, source):
    one = seat(text, context={lm: source})
    row = lm.extend([one], [Forest.rooted([text[-1]])])[0].logits[0].clone()
    lm.close(one)
    return row


@torch.inference_mode()
def by_transformers(model, text, source, own, of_source):
    """The logits after a text, with caches of these classes for the decoder's own keys and values and for the source's."""
    found = model(
        decoder_input_ids=torch.tensor([text]),
        encoder_outputs=BaseModelOutput(last_hidden_state=source.given),
        **cache_argument(model, EncoderDecoderCache(own(), of_source())),
        use_cache=True,
    )
    return found.logits[0, -1]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_with_rounded_caches_and_rounding_one_of_the_two_is_not_enough(name):
    """A number between two steps may be rounded to the other one: differences are some of those that rounding makes."""
    model = tiny_reader(name)  # whose weights are so large that attention counts
    text = text_of(40)
    source = state_sources()[1]
    exact = by_transformers(model, text, source, DynamicCache, DynamicCache)
    expected = by_transformers(model, text, source, RoundedCache, RoundedCache)
    rounding = float((exact - expected).std())
    assert rounding > 1e-4 * float(expected.std())
    found = last_row(EncoderDecoderLM(model, kv="bfloat16", chunk=7), text, source)
    off = float((found - expected).std())
    assert off < 0.1 * rounding
    for own, of_source in ((RoundedCache, DynamicCache), (DynamicCache, RoundedCache)):
        of_half = by_transformers(model, text, source, own, of_source)
        assert float((of_half - expected).std()) > 0.15 * rounding
    unrounded = last_row(EncoderDecoderLM(model), text, source)
    assert float((unrounded - expected).std()) > 0.9 * rounding


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_every_company_in_every_chunk_and_when_it_is_computed_again(name):
    model = model_of(name)
    given = state_sources()
    prompts = [text_of(length) for length in (23, 2, 40)]
    lm = EncoderDecoderLM(model, kv="bfloat16")
    alone = [last_row(lm, prompt, source) for prompt, source in zip(prompts, given, strict=True)]
    again = [last_row(lm, prompt, source) for prompt, source in zip(prompts, given, strict=True)]
    assert all(torch.equal(first, second) for first, second in zip(alone, again, strict=True))
    for chunk in (5, 512):
        other = EncoderDecoderLM(model, kv="bfloat16", chunk=chunk)
        seats = [seat(prompt, context={other: source}) for prompt, source in zip(prompts, given, strict=True)]
        forests = [Forest.rooted([prompt[-1]]) for prompt in prompts]
        for row, found in zip(alone, other.extend(seats, forests), strict=True):
            assert torch.equal(found.logits[0], row)
    check_scores_forests(lm)


def test_the_store_of_sources_and_that_of_texts_take_half_the_memory():
    model = model_of("whisper")
    wide, narrow = EncoderDecoderLM(model), EncoderDecoderLM(model, kv="bfloat16")
    known = []
    for lm in (wide, narrow):
        for source in state_sources():
            lm.extend([seat([5, 6], context={lm: source})], [Forest.rooted([6])])
        store, cross = lm.runner.store, lm.runner.cross
        of_sources = [(cross.keys.shape, cross.keys.nbytes), (cross.values.shape, cross.values.nbytes)]
        of_texts = [(one.shape, one.nbytes) for one in (store.keys_by_panel, store.values_by_slot)]
        known.append([*of_sources, *of_texts])
        assert cross.bytes == sum(size for _, size in of_sources) > 0
    for (shape, size), (same, half) in zip(*known, strict=True):
        assert shape == same
        assert size == 2 * half
    assert wide.slot_bytes == 2 * narrow.slot_bytes


def test_beams_and_texts_are_those_of_the_rounded_target_alone_and_in_batches_and_the_law_says_so():
    pair = sb.load(model_of("t5"), model_of("t5", num_decoder_layers=1), kv="bfloat16")
    assert (pair.target.kv, pair.draft.kv) == ("bfloat16", "float32")
    given = [text_of(length) for length in (9, 4, 12)]
    options = {"max_new_tokens": 10, "eos_token_id": []}
    plain = sb.generate(pair, given, sb.beam_search(3), batch_size=3, **options)
    drafted = sb.generate(pair, given, sb.speculative_beam_search(3, depth=2), batch_size=3, **options)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    alone = [sb.generate(pair, [one], sb.beam_search(3), **options)[0].tokens for one in given]
    assert [one.tokens for one in plain] == alone
    assert plain[0].report.law.endswith("of the target in bfloat16 keys and values")


def test_a_target_that_drafts_for_itself_in_int8_keeps_both_rounded():
    pair = sb.load(model_of("t5"), draft="int8", kv="bfloat16")
    assert (pair.target.kv, pair.draft.kv) == ("bfloat16", "bfloat16")
    assert pair.draft.runner.cross.words == np.uint16


def test_what_cannot_be_is_refused():
    with pytest.raises(NotSupported, match="kv='bfloat16' needs the compiled forward, rounded or not"):
        EncoderDecoderLM(model_of("t5"), engine="plain", kv="bfloat16")
