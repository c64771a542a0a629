"""Generation configs against transformers: whatever one sets means the same here, or is refused by its name."""

import random

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, WatermarkingConfig
from transformers.generation import GenerationMixin

import specbeam as sb
from specbeam import errors
from specbeam.core.laws.warp import dense_logp, processed_rows
from specbeam.doors.options.generation_config import read
from specbeam.doors.options.processors import TextFacts
from specbeam.doors.options.settings import Settings
from specbeam.doors.options.table import config_names, warper_names
from tests.support import words
from tests.support.checking import refused
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import tiny_reader

PROMPT = [5, 6, 9, 20, 6]
START, END, PAD = 0, 1, 2


def causal(family="llama", seed=0, **settings):
    model = tiny(family, seed=seed)
    model.generation_config = GenerationConfig(bos_token_id=START, eos_token_id=END, pad_token_id=PAD, **settings)
    return model


def reader(family="bart", **settings):
    model = tiny_reader(family)
    start = model.config.decoder_start_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=START, eos_token_id=2, pad_token_id=1, decoder_start_token_id=start, **settings
    )
    return model


def theirs(model, prompt=PROMPT, beams=1, **options):
    """What transformers' own `generate` writes, up to the first end token."""
    options = {"do_sample": False, "num_beams": beams} | options
    with torch.no_grad():
        row = GenerationMixin.generate(model, torch.tensor([prompt]), **options)[0]
    tokens = row[1 if model.config.is_encoder_decoder else len(prompt) :].tolist()
    end = model.generation_config.eos_token_id
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def ours(model, prompt=PROMPT, beams=1, **options):
    method = sb.greedy() if beams == 1 else sb.beam_search(beams)
    return sb.generate(sb.load(model), [prompt], method, **options)[0].tokens


FIELDS = {
    "bias": {"sequence_bias": [[[7], -50.0], [[9, 20], 8.0]]},
    "decay": {"exponential_decay_length_penalty": (3, 1.6)},
    "n-grams of the source": {"encoder_no_repeat_ngram_size": 2},
    "tokens of the source": {"encoder_repetition_penalty": 1.8},
    "invalid values": {"remove_invalid_values": True, "min_new_tokens": 4},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "watermark and normalised": {"watermarking_config": {"bias": 3.0}, "renormalize_logits": True},
    "unused warpers": {"typical_p": 0.4, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1},
    "two minimum lengths": {"min_length": 14, "min_new_tokens": 2},
}


@pytest.mark.parametrize("settings", FIELDS.values(), ids=FIELDS.keys())
@pytest.mark.parametrize("make", [causal, reader])
def test_a_field_of_the_checkpoint_means_what_it_means_in_transformers(make, settings):
    model = make(**settings)
    for beams in (1, 3):
        assert ours(model, beams=beams, max_new_tokens=9) == theirs(model, beams=beams, max_new_tokens=9)


def test_guidance_is_that_of_transformers_with_one_beam_and_with_several():
    plain = ours(causal(), max_new_tokens=9)
    for family in ("llama", "gpt2"):
        model = causal(family, guidance_scale=1.7)
        for beams in (1, 3):
            assert ours(model, beams=beams, max_new_tokens=9) == theirs(model, beams=beams, max_new_tokens=9)
    assert ours(causal(guidance_scale=1.7), max_new_tokens=9) != plain


def test_guidance_guides_each_text_by_itself_and_drafts_change_nothing():
    pair = words.pair()
    model = pair.target_model
    start = len(PROMPT) - 1

    def guided(ids, scores):
        with torch.no_grad():
            without = model(ids[:, start:]).logits[:, -1].log_softmax(-1)
        return without + 1.7 * (scores.log_softmax(-1) - without)

    for method in (sb.beam_sampling(3), sb.dsbd(3), sb.speculative_sampling(3)):
        options = {"seed": 3, "max_new_tokens": 8}
        (found,) = sb.generate(pair, [PROMPT], method, guidance_scale=1.7, **options)
        (expected,) = sb.generate(pair, [PROMPT], method, logits_processor=[guided], **options)
        assert [beam.tokens for beam in found.beams] == [beam.tokens for beam in expected.beams]


def test_guidance_that_would_be_another_law_is_refused():
    pair = words.pair()
    with pytest.raises(errors.NotSupported, match="speculative_beam_search does not support guidance_scale"):
        sb.generate(pair, [PROMPT], sb.speculative_beam_search(3), guidance_scale=1.7)
    with pytest.raises(errors.NotSupported, match="reads a source"):
        ours(reader(guidance_scale=1.7))
    rounded = sb.load(causal(guidance_scale=1.7), quantize="int8")
    with pytest.raises(errors.NotSupported, match="the target runs in int8"):
        sb.generate(rounded, [PROMPT], "greedy")


def test_max_length_of_the_checkpoint_limits_prompt_and_text():
    model = causal(max_length=9)
    assert len(ours(model)) == len(theirs(model)) == 4
    assert len(ours(model, beams=3)) == 4
    assert len(ours(model, max_new_tokens=6)) == 6
    assert len(ours(model, max_length=7)) == 2
    model.generation_config.max_new_tokens = 3
    with pytest.warns(UserWarning, match="max_length=20 is ignored"):
        assert len(ours(model, max_length=20)) == len(theirs(model, max_length=20)) == 3
    with pytest.raises(errors.BadPrompt, match="max_length is 5 in the model's generation_config"):
        ours(causal(max_length=5))


def test_a_limit_of_the_checkpoint_beyond_the_positions_asks_for_no_room():
    model = causal(max_length=4096, min_new_tokens=400)
    assert len(ours(model, list(range(3, 53)))) == 256 - 50
    with pytest.raises(errors.BadPrompt, match="the model has 256 positions"):
        ours(model, max_length=4096)


REFUSED = {
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["a"],
    "force_words_ids": [[5]],
    "token_healing": True,
    "max_time": 5.0,
    "assistant_ensemble_weight": 0.5,
}


@pytest.mark.parametrize(("name", "value"), REFUSED.items(), ids=REFUSED.keys())
def test_a_field_that_is_not_honoured_is_refused_by_its_name(name, value):
    model = causal()
    setattr(model.generation_config, name, value)
    for call in (
        lambda: ours(model, max_new_tokens=2),
        lambda: "".join(sb.stream(sb.load(model, tokenizer=words.tokenizer()), "abc", "greedy", max_new_tokens=2)),
        lambda: ours(causal(), generation_config=model.generation_config),
    ):
        with pytest.raises(errors.NotSupported, match=rf"generation_config sets {name}=.*does not support"):
            call()


def test_fields_that_say_nothing_pass_without_a_word():
    nothing = {
        "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0, "token_healing": False, "num_beams": 4,
        "do_sample": True, "num_return_sequences": 2, "use_cache": False, "cache_implementation": "static",
        "output_scores": True, "output_logits": True, "return_dict_in_generate": True, "low_memory": True,
        "prompt_lookup_num_tokens": 10, "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.4,
        "guidance_scale": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_k": 50, "temperature": 0.7,
        "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "remove_invalid_values": False,
        "repetition_penalty": 1.0, "length_penalty": 1.0, "min_length": 0, "_from_model_config": True,
        "transformers_version": "4.20.1", "disable_compile": True, "suppress_tokens": [], "sequence_bias": [],
    }  # fmt: skip
    model = causal()
    plain = ours(model, max_new_tokens=6)
    for name, value in nothing.items():
        setattr(model.generation_config, name, value)
    assert ours(model, max_new_tokens=6) == plain


def test_a_field_of_the_models_authors_is_named_in_a_warning():
    model = causal()
    plain = ours(model, max_new_tokens=6)
    model.generation_config.chat_format = "chatml"
    with pytest.warns(UserWarning, match="sets chat_format, which neither transformers' generate nor"):
        assert ours(model, max_new_tokens=6) == plain
    with pytest.raises(errors.NotSupported, match="chat_format"):
        ours(causal(), generation_config=GenerationConfig(chat_format="chatml"))


def test_every_field_that_transformers_knows_is_honoured_refused_or_known_to_say_nothing():
    empty = GenerationConfig()
    for name in vars(empty):
        config = GenerationConfig()
        setattr(config, name, object())
        found = read(config, (*config_names(), *warper_names()))
        assert not found.unknown
        if found.refused:
            assert name in REFUSED


def test_a_processor_of_the_user_takes_the_place_of_the_options_own():
    model = causal(repetition_penalty=1.1)
    own = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.9)])
    with pytest.warns(UserWarning, match="RepetitionPenaltyLogitsProcessor in logits_processor replaces"):
        found = ours(model, max_new_tokens=12, logits_processor=own)
    assert found == theirs(model, max_new_tokens=12, logits_processor=own)


WRONG = {
    "typical_p": (0.0, 1.5, "a"),
    "top_h": (0.0, 2.0),
    "epsilon_cutoff": (-0.1, 1.0),
    "eta_cutoff": (1.0, "b"),
    "guidance_scale": (float("nan"), "c"),
    "encoder_repetition_penalty": (0.0, -1.0),
    "encoder_no_repeat_ngram_size": (-1, 1.5),
    "sequence_bias": ([5], [[[5], "a"]], [[[], 1.0]], [[[5], float("inf")]], {5: 1.0}, [[[99], 1.0]]),
    "exponential_decay_length_penalty": (5, (3,), (3, 0.0), ("a", 1.5), (3, float("inf"))),
    "remove_invalid_values": (1, "yes"),
    "watermarking_config": (5, {"shade": 3}, {"greenlist_ratio": 1.5}, {"context_width": 0}),
}


@pytest.mark.parametrize(("name", "values"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_value_is_refused_by_the_options_name(name, values):
    pair = words.pair(draft_seed=None)
    for value in values:
        with refused(name):
            sb.generate(pair, "abc", "sampling", **{name: value})


WARPED = [
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.3},
    {"top_h": 0.5},
    {"temperature": 1.7, "top_h": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9, "eta_cutoff": 0.01},
    {"temperature": 0.8, "top_k": 9, "typical_p": 0.9, "watermarking_config": WatermarkingConfig(bias=2.0)},
]


def processors_of_transformers(model, beams, **options):
    config = GenerationConfig(do_sample=True, num_beams=beams, **({"top_k": 0} | options))
    config._eos_token_tensor = torch.tensor([END])
    ids = torch.tensor([PROMPT])
    return model._get_logits_processor(config, len(PROMPT), ids, device="cpu")


@pytest.mark.parametrize("options", WARPED, ids=["+".join(options) for options in WARPED])
def test_warpers_make_the_law_of_transformers(options):
    model = causal()
    ids = torch.tensor([PROMPT])
    logits = model(ids).logits[:, -1].detach()
    settings = Settings(**options)
    warp = settings.warp(TextFacts((END,), len(PROMPT), vocab=61), single=True)
    law = np.exp(dense_logp(processed_rows(logits.numpy(), warp, ids.numpy), warp))[0]
    expected = processors_of_transformers(model, 1, **options)(ids, logits).softmax(-1)[0]
    np.testing.assert_allclose(law, expected.numpy(), atol=1e-6)
    drawn = sb.generate(
        sb.load(model), [PROMPT], "sampling", seed=3, max_new_tokens=1, num_return_sequences=12, **options
    )
    assert all(expected[text.tokens[0]] > 0 for text in drawn)
    searched = settings.warp(TextFacts((END,), len(PROMPT), search=True, vocab=61)).processors
    scores = logits.log_softmax(-1)
    theirs = processors_of_transformers(model, 3, **options)
    assert [type(one) for one in searched] == [type(one) for one in theirs]
    torch.testing.assert_close(searched(ids, scores), theirs(ids, scores))


def test_a_watermark_after_warpers_of_a_joint_law_is_refused():
    pair = words.pair()
    options = {"watermarking_config": WatermarkingConfig(), "max_new_tokens": 3}
    with pytest.raises(errors.NotSupported, match="watermarking_config applies after temperature"):
        sb.generate(pair, "abc", sb.dsbd(3), top_k=5, **options)
    assert sb.generate(pair, "abc", sb.dsbd(3), **options)
    assert sb.generate(pair, "abc", sb.dsbd(1), top_k=5, **options)


def test_drafts_change_no_text_under_the_new_processors():
    pair = words.pair()
    options = {
        "sequence_bias": {(7,): 3.0, (9, 20): 8.0}, "exponential_decay_length_penalty": (3, 1.2), "typical_p": 0.9,
        "encoder_repetition_penalty": 1.4, "seed": 5, "max_new_tokens": 10,
    }  # fmt: skip
    plain = sb.generate(pair, [PROMPT, [4, 4]], sb.beam_sampling(3), **options)
    drafted = sb.generate(pair, [PROMPT, [4, 4]], sb.dsbd(3), **options)
    for one, other in zip(plain, drafted, strict=True):
        assert [beam.tokens for beam in one.beams] == [beam.tokens for beam in other.beams]


def random_settings(chance, reads):
    """Some fields of a generation config, at random."""
    tokens = [chance.randrange(3, 61) for _ in range(6)]
    many = {
        "repetition_penalty": chance.choice([0.8, 1.3]),
        "no_repeat_ngram_size": chance.choice([2, 3]),
        "bad_words_ids": [[tokens[0]], tokens[1:3]],
        "min_new_tokens": chance.randrange(6),
        "min_length": chance.randrange(12),
        "suppress_tokens": tokens[3:5],
        "begin_suppress_tokens": tokens[5:],
        "forced_bos_token_id": tokens[0],
        "forced_eos_token_id": 2 if reads else END,
        "sequence_bias": [[[tokens[1]], chance.uniform(-5, 5)], [tokens[1:3], chance.uniform(-9, 9)]],
        "exponential_decay_length_penalty": (chance.randrange(8), chance.uniform(1.0, 1.5)),
        "encoder_repetition_penalty": chance.choice([0.7, 1.6]),
        "encoder_no_repeat_ngram_size": chance.choice([1, 2, 3]),
        "renormalize_logits": True,
        "remove_invalid_values": True,
        "watermarking_config": {"bias": chance.uniform(0.5, 3), "greenlist_ratio": 0.5},
        "length_penalty": chance.choice([-1.0, 0.0, 0.5, 2.0]),
        "early_stopping": chance.choice([True, False, "never"]),
        "max_length": chance.randrange(12, 20),
        "max_new_tokens": chance.randrange(4, 12),
        "typical_p": 0.5,
        "top_k": 5,
        "temperature": 0.5,
    }
    if not reads:
        many["guidance_scale"] = chance.choice([0.5, 1.5])
    chosen = chance.sample(sorted(many), chance.randrange(1, 6))
    settings = {name: many[name] for name in chosen}
    if not {"max_length", "max_new_tokens"} & set(settings):
        settings["max_new_tokens"] = 10
    return settings


def check_random_settings(numbers):
    models = [(causal, "llama"), (causal, "gpt2"), (reader, "bart"), (reader, "t5")]
    for number in numbers:
        chance = random.Random(number)
        make, family = chance.choice(models)
        settings = random_settings(chance, make is reader)
        model = make(family, **settings)
        prompt = [chance.randrange(3, 61) for _ in range(chance.randrange(1, 8))]
        for beams in (1, 3):
            assert ours(model, prompt, beams) == theirs(model, prompt, beams), (number, family, beams, settings)


def test_random_settings_give_the_texts_of_transformers():
    check_random_settings(range(25))


@pytest.mark.slow
def test_many_random_settings_give_the_texts_of_transformers():
    check_random_settings(range(1_000, 1_600))


def test_beams_hold_no_more_texts_than_the_method_has_beams():
    pair = words.pair()
    others = 0
    for method in (
        sb.dsbd(4),
        sb.dsbd(4, width="auto"),
        sb.beam_sampling(3),
        sb.beam_search(4),
        sb.speculative_beam_search(4),
    ):
        for seed in range(6):
            (one,) = sb.generate(pair, "abc", method, seed=seed, max_new_tokens=9, eos_token_id=[1, 18, 20, 33, 44])
            others += len(one.report.other_beams)
            assert 1 <= len(one.beams) <= method.beams
            assert one.tokens == one.beams[0].tokens
            every = [*one.beams, *one.report.other_beams]
            order = [(beam.finished, beam.score) for beam in every]
            at_limit = any(len(beam.tokens) == 9 for beam in every)
            key = (lambda pair: pair[1]) if at_limit else None  # what the limit cut off competes by its score
            assert order == sorted(order, key=key, reverse=True)
    assert others > 0


@pytest.mark.parametrize("width", ["dynamic", "auto"])
def test_a_width_that_is_chosen_keeps_as_many_beams_as_texts_are_asked_for(width):
    pair = words.pair()
    methods = [sb.dsbd(4, width=width), sb.dsbd(4, width=width, min_beams=2)]
    if width == "auto":
        methods.append(sb.beam_sampling(4, width=width))
    else:
        methods.append(sb.dsbd(4, width=width, coupling="rejection", threshold=1.0))
    for method in methods:
        for seed in range(8):
            texts = sb.generate(pair, "abc", method, seed=seed, max_new_tokens=7, num_return_sequences=3)
            assert len(texts) == 3
            assert min(texts[0].report.widths) >= 3
            assert ("3 to 4 beams" if width == "dynamic" else "at least 3") in texts[0].report.law


def test_explicit_options_win_over_a_config_and_the_config_over_the_checkpoint():
    checkpoint = GenerationConfig(typical_p=0.3, guidance_scale=2.0)
    settings = Settings.given({"typical_p": 0.9}, GenerationConfig(typical_p=0.5, guidance_scale=1.5))
    whole = settings.completed(checkpoint, draws=True)
    assert (whole.typical_p, whole.guidance_scale) == (0.9, 1.5)
