"""The doors of transformers: custom_generate as a callable and as a repository, and pipelines."""

import pytest
import torch
from transformers import pipeline

import specbeam as sb
from specbeam import errors
from tests.support import words
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
