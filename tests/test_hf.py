"""The doors of transformers: custom_generate as a callable and as a repository, and pipelines."""

import copy
import inspect

import pytest
import torch
from scipy import stats
from transformers import GenerationConfig, TextStreamer, WatermarkingConfig, pipeline

import specbeam as sb
from specbeam import errors
from specbeam.core.draft.lookup import PromptLookup
from specbeam.doors.hf.call import Call
from specbeam.engines.cache_names import cache_argument, cache_of
from tests.support import words
from tests.support.checking import refused
from tests.support.tiny_models import tiny

PLAIN = {"temperature": 1.0, "top_k": 0}  # pipelines have defaults of their own


@pytest.fixture(scope="module")
def models():
    return tiny("llama", seed=0), tiny("llama", seed=1, num_hidden_layers=1), words.tokenizer()


def inputs_of(tokenizer, texts):
    return tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)


def test_the_callable_returns_the_beams_of_generate(models):
    target, draft, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello", "a longer prompt"])
    out = target.generate(
        **inputs, custom_generate=sb.hf.dsbd, draft_model=draft, num_beams=3, do_sample=True, max_new_tokens=8, seed=4,
        width="fixed", depth=2, temperature=0.8, top_k=20, num_return_sequences=2, return_dict_in_generate=True,
    )  # fmt: skip
    pair = sb.load(target, draft, tokenizer=tokenizer)
    ours = sb.generate(
        pair, ["Hello", "a longer prompt"], sb.dsbd(3, 5, 2, "fixed"), seed=4, max_new_tokens=8, temperature=0.8, top_k=20,
        num_return_sequences=2,
    )  # fmt: skip
    assert out.sequences.shape[0] == 4
    for row, score, one in zip(out.sequences, out.sequences_scores, ours, strict=True):
        new = row[inputs["input_ids"].shape[1] :].tolist()
        assert new[: len(one.tokens)] == one.tokens
        assert set(new[len(one.tokens) :]) <= {tokenizer.pad_token_id}
        assert float(score) in [pytest.approx(beam.score) for beam in one.beams]


def test_without_sampling_it_is_beam_search_at_temperature_zero(models):
    target, draft, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello"])
    rows = [
        target.generate(**inputs, custom_generate=fn, num_beams=3, do_sample=False, max_new_tokens=6, **more)
        for fn, more in ((sb.hf.dsbd, {"draft_model": draft, "width": "fixed"}), (sb.hf.beam_sampling, {}))
    ]
    assert rows[0].tolist() == rows[1].tolist()


def test_one_beam_and_several_return_sequences(models):
    target, draft, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello", "you"])
    out = target.generate(
        **inputs,
        custom_generate=sb.hf.dsbd,
        draft_model=draft,
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=5,
        seed=1,
    )
    assert out.shape[0] == 6
    assert out[:3, :5].tolist() == [inputs["input_ids"][0].tolist()] * 3


def test_torch_seeds_it_when_no_seed_is_given(models):
    target, draft, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello"])
    rows = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        rows.append(
            target.generate(
                **inputs, custom_generate=sb.hf.dsbd, draft_model=draft, do_sample=True, num_beams=2, max_new_tokens=9
            ).tolist()
        )
    assert rows[0] == rows[1] != rows[2]


def test_the_repository_form_receives_the_assistant_model(models):
    target, draft, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello"])
    options = {"num_beams": 2, "do_sample": True, "max_new_tokens": 7, "seed": 3}
    by_folder = target.generate(
        **inputs, custom_generate=str(sb.hf.repository()), trust_remote_code=True, assistant_model=draft, **options
    )
    by_callable = target.generate(**inputs, custom_generate=sb.hf.dsbd, draft_model=draft, **options)
    assert by_folder.tolist() == by_callable.tolist()


def test_a_pipeline_works(models):
    target, draft, tokenizer = models
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer)
    options = {
        "custom_generate": sb.hf.dsbd,
        "draft_model": draft,
        "num_beams": 2,
        "do_sample": True,
        "seed": 3,
    } | PLAIN
    texts = pipe(["Hello", "a longer prompt"], max_new_tokens=6, batch_size=2, **options)
    pair = sb.load(target, draft, tokenizer=tokenizer)
    ours = sb.generate(pair, ["Hello", "a longer prompt"], sb.dsbd(2, 4), seed=3, max_new_tokens=6)
    assert [one[0]["generated_text"] for one in texts] == ["Hello" + ours[0].text, "a longer prompt" + ours[1].text]


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "draft_model"), ({"draft_model": 1, "stopping": True}, "stopping criteria"), ({"draft_model": 1, "num_beam_groups": 2}, "num_beam_groups")],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(models, options, message):
    target, draft, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello"])
    options = dict(options)
    if options.pop("stopping", False):
        options["stopping_criteria"] = [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]
    if "draft_model" in options:
        options["draft_model"] = draft
    with pytest.raises(errors.NotSupported, match=message):
        target.generate(**inputs, custom_generate=sb.hf.dsbd, num_beams=2, do_sample=True, max_new_tokens=4, **options)


def both(models, texts, draft=True, **options):
    """What `generate` returns by itself and through our door."""
    target, small, tokenizer = models
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    theirs = target.generate(**inputs, **options)
    ours = target.generate(**inputs, **options, custom_generate=sb.hf.beam_search, draft_model=small if draft else None)
    return theirs, ours


EOS = [1, 18, 20, 33, 44]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_return_sequences": 3},
        {"repetition_penalty": 1.4},
        {"encoder_repetition_penalty": 1.4},
        {"encoder_no_repeat_ngram_size": 1, "no_repeat_ngram_size": 2},
        {"eos_token_id": EOS, "early_stopping": True, "num_return_sequences": 3},
        {"eos_token_id": EOS, "length_penalty": 2.0, "early_stopping": "never"},
        {"eos_token_id": EOS, "length_penalty": -1.0},
        {"eos_token_id": EOS, "pad_token_id": 0},
        {"eos_token_id": EOS, "pad_token_id": 7},
        {"prefix_allowed_tokens_fn": lambda number, tokens: [4 + number, 9, 1], "bad_words_ids": [[9], [4]]},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_the_very_tensor_of_generate(models, options):
    for texts in (["Hello", "a longer prompt", "you"], ["Hello"]):
        for draft in (True, False):
            theirs, ours = both(models, texts, draft, num_beams=3, do_sample=False, max_new_tokens=12, **options)
            assert ours.tolist() == theirs.tolist()


def test_scores_come_with_output_scores_as_in_generate(models):
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 9}
    theirs, ours = both(models, ["Hello", "you"], num_beams=3, do_sample=False, num_return_sequences=2, **options)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.sequences_scores.tolist() == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "more", [{}, {"early_stopping": "never", "length_penalty": 2.0}, {"repetition_penalty": 1.5}], ids=str
)
def test_one_beam_is_greedy_search(models, more):
    for options in ({"eos_token_id": EOS}, {"eos_token_id": [1]}):
        theirs, ours = both(
            models, ["Hello", "you"], num_beams=1, do_sample=False, max_new_tokens=12, **options, **more
        )
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix_match", "token_recycling", PromptLookup(2), "model"])
@pytest.mark.parametrize("draft_beams", [None, 4])
def test_one_beam_with_any_drafter_is_greedy_search(models, drafter, draft_beams):
    if draft_beams is not None and drafter in ("prompt_lookup", "suffix_match"):
        with pytest.raises(errors.BadSetting, match="ignores draft_beams=4"):
            models[0].generate(
                **inputs_of(models[2], ["you"]), custom_generate=sb.hf.beam_search, drafter=drafter, draft_beams=4
            )
        return
    target, small, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello", "you"])
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    with_model = {"draft_model": small} if drafter == "model" else {"drafter": drafter}
    call = dict(custom_generate=sb.hf.beam_search, draft_beams=draft_beams, depth=3, **with_model)
    ours = target.generate(**inputs, do_sample=False, max_new_tokens=12, **call)
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_without_an_end_token_nothing_ends(models, beams):
    """Not even at the tokenizer's own."""
    target, draft, tokenizer = models
    target = copy.deepcopy(target)
    target.generation_config.eos_token_id = target.config.eos_token_id = None
    with torch.no_grad():
        target.lm_head.weight[1] = 30 * target.lm_head.weight.mean(0)
    for texts in (["Hello", "you"], ["a longer prompt"]):
        for more in ({"draft_model": draft}, {}):
            options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
            inputs = inputs_of(tokenizer, texts)
            plain = target.generate(**inputs, **options)
            ours = target.generate(**inputs, **options, custom_generate=sb.hf.beam_search, **more)
            assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("change", ["mul_", "copy_"])
def test_weights_that_change_behind_the_back_are_seen(models, change):
    target, _, tokenizer = models
    target, inputs = copy.deepcopy(target), inputs_of(tokenizer, ["Hello"])
    options = {"num_beams": 2, "do_sample": False, "max_new_tokens": 8}
    target.generate(**inputs, **options, custom_generate=sb.hf.beam_search)
    weight = target.lm_head.weight.data
    weight.mul_(-1.5) if change == "mul_" else weight.copy_(torch.randn(weight.shape))
    ours = target.generate(**inputs, **options, custom_generate=sb.hf.beam_search)
    assert ours.tolist() == target.generate(**inputs, **options).tolist()


def test_a_draft_that_would_be_ignored_is_refused(models):
    target, draft, tokenizer = models
    call = {"custom_generate": sb.hf.beam_search, "drafter": "prompt_lookup", "draft_model": draft}
    with pytest.raises(errors.BadSetting, match="drafter='prompt_lookup' ignores draft_model"):
        target.generate(**inputs_of(tokenizer, ["Hello"]), num_beams=2, **call)


def test_one_beam_takes_no_method_for_a_drafter(models):
    target, _, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello"])
    for call, message in (
        ({"drafter": "mtjd"}, "drafter is 'mtjd'"),
        ({"draft_beams": 3}, "draft_beams=3"),
        ({"depth": 3}, "depth=3"),
    ):
        for beams in (1, 2):
            with refused(message):
                target.generate(**inputs, num_beams=beams, custom_generate=sb.hf.beam_search, **call)


@pytest.mark.parametrize("drafter", ["none", "model", "prompt_lookup"])
def test_one_beam_that_draws_is_plain_sampling(models, drafter):
    """First tokens of transformers and of ours, against the law of the model."""
    target, small, _ = models
    prompt = [5, 6, 7]
    with torch.inference_mode():
        law = target(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    counted = {"draft_model": small} if drafter == "model" else {"drafter": drafter} if drafter != "none" else {}
    ids = torch.tensor([prompt] * 3000)
    found = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=2, min_new_tokens=2,
        custom_generate=sb.hf.beam_search, seed=5, **counted,
    )[:, 3]  # fmt: skip
    allowed = law.index_fill(0, torch.tensor([1]), 0.0)
    allowed /= allowed.sum()
    seen = torch.bincount(found, minlength=len(law)).double()
    big = allowed * len(ids) >= 5
    hoped = torch.cat([allowed[big], allowed[~big].sum()[None]]) * len(ids)
    counts = torch.cat([seen[big], seen[~big].sum()[None]])
    assert stats.chisquare(counts.numpy(), hoped.numpy()).pvalue > 1e-3


def test_inputs_that_would_be_ignored_are_refused(models):
    target, _, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello"])
    ids = inputs["input_ids"]
    filled = cache_of(target(ids, use_cache=True))
    (cache_name,) = cache_argument(target, filled)
    for given, message in (
        ({cache_name: filled}, f"{cache_name} has 5 tokens"),
        ({"token_type_ids": torch.ones_like(ids)}, "token_type_ids would be ignored"),
        ({"position_ids": torch.arange(ids.shape[1])[None].repeat(2, 1) + 3}, "position_ids other than 0, 1, 2"),
    ):
        call = {"num_beams": 2, "max_length": 9, "max_new_tokens": 3}
        with pytest.raises(errors.NotSupported, match=message):
            Call(target, ids.repeat(2, 1), None, None, GenerationConfig(**call), given)
    Call(target, ids, None, None, GenerationConfig(), {"token_type_ids": torch.zeros_like(ids)})


def test_rows_that_are_missing_are_an_error(models):
    target, _, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello", "you"])
    with pytest.raises(errors.TooFewAnswers, match="prompt 0 has 1 answer, num_return_sequences is 3"):
        target.generate(
            **inputs, num_beams=3, do_sample=False, num_return_sequences=3, max_new_tokens=4,
            prefix_allowed_tokens_fn=lambda number, tokens: [5], custom_generate=sb.hf.beam_search,
        )  # fmt: skip


def test_a_stream_follows_one_prompt(models):
    target, _, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello", "you"])
    with pytest.raises(errors.NotSupported, match="stream_to needs one prompt with one return sequence; there are 2"):
        target.generate(
            **inputs,
            num_beams=2,
            max_new_tokens=4,
            custom_generate=sb.hf.beam_search,
            stream_to=TextStreamer(tokenizer),
        )


def test_a_processor_behind_the_warpers_is_refused(models):
    """Warpers see the joint law, so it would come before them; beam search keeps the order of transformers."""
    target, _, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello"])
    options = {"max_new_tokens": 4, "watermarking_config": WatermarkingConfig(bias=4.0)}
    for num_beams, door in ((1, sb.hf.beam_search), (3, sb.hf.beam_sampling)):
        with pytest.raises(errors.NotSupported, match="WatermarkLogitsProcessor comes after TopKLogitsWarper"):
            target.generate(**inputs, **options, num_beams=num_beams, do_sample=True, top_k=5, custom_generate=door)
    for num_beams in (1, 3):
        theirs = target.generate(**inputs, **options, num_beams=num_beams, do_sample=False)
        ours = target.generate(
            **inputs, **options, num_beams=num_beams, do_sample=False, custom_generate=sb.hf.beam_search
        )
        assert ours.tolist() == theirs.tolist()


def test_without_end_tokens_nothing_is_padded(models):
    theirs, ours = both(models, ["Hello", "you"], num_beams=3, do_sample=False, max_new_tokens=4, eos_token_id=[])
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("name", ["dsbd", "beam_sampling"])
def test_settings_have_the_defaults_of_the_recipe(name):
    """All but the number of beams, which is `num_beams`, and traces, which `generate` has no place for."""
    here = inspect.signature(getattr(sb.hf, name)).parameters
    for setting, parameter in inspect.signature(getattr(sb, name)).parameters.items():
        if setting not in ("beams", "trace"):
            assert here[setting].default == parameter.default, setting


def test_settings_of_the_recipe_arrive(models):
    target, draft, tokenizer = models
    call = {**inputs_of(tokenizer, ["Hello"]), "num_beams": 3, "do_sample": True, "max_new_tokens": 6, "seed": 4}
    widths = {"width": "auto", "mass": 0.8, "min_beams": 1}
    drafted = target.generate(**call, custom_generate=sb.hf.dsbd, draft_model=draft, **widths)
    plain = target.generate(**call, custom_generate=sb.hf.beam_sampling, **widths)
    assert drafted.tolist() == plain.tolist()
    for door, more in ((sb.hf.dsbd, {"draft_model": draft}), (sb.hf.beam_sampling, {})):
        with pytest.raises(errors.BadSetting, match="semantics='hf'"):
            target.generate(**call, custom_generate=door, semantics="hf", width="auto", **more)
    with pytest.raises(errors.BadSetting, match="shared noise draws without replacement"):
        target.generate(**call, custom_generate=sb.hf.dsbd, draft_model=draft, replacement=True)


def test_another_method_decodes_in_its_place(models):
    """By name or as a recipe; beams and draws have to be those that `generate` was asked for."""
    target, draft, tokenizer = models
    inputs = inputs_of(tokenizer, ["Hello", "a longer prompt"])
    options = {"max_new_tokens": 8, "seed": 4, "top_k": 20}
    call = {**inputs, **options, "custom_generate": sb.hf.dsbd, "draft_model": draft}
    pair = sb.load(target, draft, tokenizer=tokenizer)
    for method in ("traversal", sb.traversal((2, 1)), sb.dsbd(3, depth=2)):
        beams = getattr(method, "beams", 1)
        found = target.generate(**call, do_sample=True, num_beams=beams, method=method)
        ours = sb.generate(pair, ["Hello", "a longer prompt"], method, **options)
        for row, one in zip(found, ours, strict=True):
            new = row[inputs["input_ids"].shape[1] :].tolist()
            assert new[: len(one.tokens)] == one.tokens
    with pytest.raises(sb.SpecbeamError, match="num_beams=3, and traversal has 1: leave num_beams out"):
        target.generate(**call, do_sample=True, num_beams=3, method="traversal")
    with pytest.raises(sb.SpecbeamError, match="do_sample=True, and beam_search does not sample"):
        target.generate(**call, do_sample=True, num_beams=3, method=sb.beam_search(3))
    with pytest.raises(sb.SpecbeamError, match="method traversal ignores depth=2"):
        target.generate(**call, do_sample=True, method="traversal", depth=2)
    without = {name: value for name, value in call.items() if name != "draft_model"}
    with pytest.raises(sb.SpecbeamError, match="traversal needs draft_model"):
        target.generate(**without, do_sample=True, method="traversal")
    plain = target.generate(**without, do_sample=True, num_beams=2, method=sb.beam_sampling(2))
    assert plain.tolist() == target.generate(
        **without | {"custom_generate": sb.hf.beam_sampling}, do_sample=True, num_beams=2
    ).tolist()  # fmt: skip


def test_a_misspelt_argument_is_recognised(models):
    target, draft, tokenizer = models
    ids = inputs_of(tokenizer, ["Hello"])["input_ids"]
    with pytest.raises(
        sb.SpecbeamError, match=r"draft_modl would be ignored; leave it out \(did you mean draft_model\?\)"
    ):
        sb.hf.dsbd(target, ids, draft_model=draft, draft_modl=draft, generation_config=target.generation_config)


def test_the_module_lists_its_functions_alone():
    assert dir(sb.hf) == ["beam_sampling", "beam_search", "dsbd", "repository"]
