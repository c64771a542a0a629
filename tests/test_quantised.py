"""Targets and drafts of rounded weights: whose law it is, the same beams with any draft, and names that are refused."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

import specbeam as sb
from specbeam.errors import BadSetting, NotSupported
from specbeam.models import quantised
from specbeam.models.loading.language_models import language_model
from specbeam.models.quantised import rounding_of
from tests.support import words
from tests.support.checking import refused
from tests.support.steps import needs_numba
from tests.support.tiny_models import tiny


def target(**changes):
    return tiny("llama", **{"hidden_size": 64, "intermediate_size": 96, **changes})


@needs_numba
@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_the_target_rounded_drafts_for_itself_and_the_beams_are_those_of_the_target(kind):
    model = target()
    pair = sb.load(model, draft=kind, tokenizer=words.tokenizer())
    assert pair.draft_model is model
    assert pair.draft is not pair.target
    assert (pair.target.engine, pair.draft.engine) == ("compiled", kind)
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=12)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 5, 3), seed=1, max_new_tokens=12)[0]
    assert drafted.tokens == plain.tokens
    assert [beam.tokens for beam in drafted.beams] == [beam.tokens for beam in plain.beams]
    assert "int" not in drafted.report.law
    assert drafted.report.draft_passes > 0
    assert drafted.report.target_passes < plain.report.target_passes


@needs_numba
def test_a_target_in_int4_has_the_law_of_the_rounded_model():
    pair = sb.load(target(), target(seed=1, num_hidden_layers=1), tokenizer=words.tokenizer(), quantize="int4")
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=2, max_new_tokens=12)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 5), seed=2, max_new_tokens=12)[0]
    assert plain.tokens == drafted.tokens
    assert plain.report.law.endswith("of the target in int4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft": "int8", "quantize_draft": "int4"}, "quantize_draft is 'int4'; leave one of them out"),
        ({"quantize": "torchao-int8"}, "give its folder or hub id, or use 'int8', 'int4' or 'fp8'"),
        ({"draft": "torchao-int8"}, "the model is already an object"),
        ({"draft": "int5"}, "draft is 'int5', which is no folder; the roundings of the target are 'int8', 'int4', 'fp8'"),
        ({"draft": "torchao-int2"}, "which is no folder"),
        ({"quantize": "int2"}, "'int8', 'int4', 'fp8', 'torchao-int8', 'torchao-int4', 'bitsandbytes-int8', 'bitsandbytes-nf4'"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_are_refused(options, said):
    with refused(said):
        sb.load(target(), **options)


def test_a_model_object_is_rounded_by_no_library():
    with pytest.raises(BadSetting, match="while transformers loads them"):
        language_model(target(), quantize="bitsandbytes-nf4")


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    target().save_pretrained(tmp_path)
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(NotSupported, match="'torchao-int8' needs torchao \\(pip install torchao\\); 'int8' and 'int4'"):
        sb.load(tmp_path, tokenizer=words.tokenizer(), quantize="torchao-int8")


@pytest.mark.parametrize(
    ("stored", "name"),
    [(None, ""), ({"quant_method": "gptq"}, "gptq"), (SimpleNamespace(quant_method="awq"), "awq")],
)
def test_files_of_rounded_weights_name_their_method_in_the_law(stored, name):
    model = SimpleNamespace(config=SimpleNamespace(quantization_config=stored))
    assert rounding_of(SimpleNamespace(engine="plain", model=model)) == name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchao-int8", "torchao-int4", "bitsandbytes-int8", "bitsandbytes-nf4"])
def test_what_a_library_rounds_drafts_and_decodes(kind, tmp_path):
    for package in (kind.split("-")[0], "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    target(intermediate_size=128).save_pretrained(tmp_path)  # bitsandbytes takes 64 weights at once
    own = sb.load(tmp_path, tokenizer=words.tokenizer(), quantize=kind)
    assert own.target.engine == "plain"
    text = sb.generate(own, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=8)[0]
    assert text.report.law.endswith(f"of the target in {kind}")
    again = sb.generate(own, ["Hello", "abc"], sb.beam_sampling(3), seed=1, max_new_tokens=8)[1]
    assert again.tokens == text.tokens  # whatever else is in the batch
    pair = sb.load(tmp_path, tokenizer=words.tokenizer(), draft=kind)
    plain = sb.generate(pair, "abc", sb.beam_sampling(3), seed=1, max_new_tokens=8)[0]
    drafted = sb.generate(pair, "abc", sb.dsbd(3, 4), seed=1, max_new_tokens=8)[0]
    assert drafted.tokens == plain.tokens
    assert "of the target in" not in drafted.report.law
    with refused("has already rounded"):
        sb.load(tmp_path, tokenizer=words.tokenizer(), quantize=kind, draft="int8")
    assert torch.is_tensor(pair.draft_model.get_output_embeddings().weight)


def test_fp8_is_refused_off_a_gpu():
    with pytest.raises(
        NotSupported, match=r"quantize='fp8' cannot run .*: it is for GPUs; on a CPU use 'int8' or 'int4'"
    ):
        sb.load(target(), quantize="fp8")
