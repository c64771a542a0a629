"""Large models that stay in memory as their files are, and are laid out once, for the compiled forward."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from safetensors.torch import load_file, save_file

from specbeam.core.forest import Forest
from specbeam.engines.cpu.embedding import embedded_rows, table_of
from specbeam.engines.mapped import is_mapped, mapped_files
from specbeam.engines.torch.in_float32 import InFloat32
from specbeam.errors import UnsupportedModel
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import language_model
from tests.models.test_compiled_forward import scored
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import sources, tiny_reader

KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
PATH = [3, 4, 5]


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr("specbeam.engines.mapped.LARGEST_WIDENED", 0)


@pytest.fixture
def folder_of(tmp_path):
    """Write a tiny model in a type of floats; the tokenizer of the bundled pair, which has more tokens, is not needed."""

    def write(words, family="llama", **changes):
        tiny(family, **changes).to(words).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return write


def loaded(folder, **options):
    return sb.load(folder, tokenizer=False, **options)


def logits_of(lm):
    return scored(lm, PATH, Forest.rooted([5]))[0]


@pytest.mark.parametrize("words", KINDS, ids=KINDS.values())
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["", "tied"])
def test_weights_stay_in_the_words_of_their_files_and_arithmetic_is_float32(folder_of, words, changes):
    folder = folder_of(words, **changes)
    target = loaded(folder).target
    assert target.engine == "compiled"
    assert target.model.dtype == words
    assert target.runner.decoder.kind == KINDS[words]
    assert is_mapped(target.model)
    wide = loaded(folder, dtype="float32")
    assert wide.target_model.dtype == torch.float32
    expected = wide.target_model(torch.tensor([PATH])).logits[0, -1]
    torch.testing.assert_close(logits_of(target), expected, atol=2e-4, rtol=2e-4)
    config = target.model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert target.slot_bytes == 4 * numbers  # keys and values are float32, whatever the weights are


@pytest.mark.parametrize("family", ["bart", "m2m_100", "t5"])
def test_decoders_that_read_sources_stay_in_files_of_float32_alone(family, tmp_path, monkeypatch):
    monkeypatch.setattr("specbeam.models.engines.LARGEST_WIDENED", 0)
    tiny_reader(family).save_pretrained(tmp_path / "wide")
    tiny_reader(family).bfloat16().save_pretrained(tmp_path / "words")
    given = sources(family, 2)
    texts = []
    for name in ("wide", "words"):
        pair = loaded(tmp_path / name)
        assert (is_mapped(pair.target_model), pair.target.engine) == (
            name == "wide",
            "compiled" if name == "wide" else "plain",
        )
        assert pair.target_model.dtype == torch.float32
        options = {"max_new_tokens": 6, "eos_token_id": []}
        texts.append([one.tokens for one in sb.generate(pair, given, sb.beam_search(3), **options)])
    as_object = sb.generate(sb.load(tiny_reader(family)), given, sb.beam_search(3), **options)
    assert texts[0] == [one.tokens for one in as_object]


def test_a_type_that_is_asked_for_is_the_one_that_transformers_computes_in(folder_of):
    target = loaded(folder_of(torch.bfloat16), dtype="bfloat16").target
    assert target.engine == "plain"
    assert not is_mapped(target.model)


def test_files_of_several_types_become_float32(folder_of):
    folder = folder_of(torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float() * 1.0001
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    target = loaded(folder).target
    assert target.model.dtype == torch.float32
    assert torch.equal(target.model.model.norm.weight, weights["model.norm.weight"])


def test_models_that_the_compiled_forward_does_not_run_become_float32(folder_of):
    pair = loaded(folder_of(torch.bfloat16, "phi"))
    assert pair.target_model.dtype == torch.float32
    assert pair.target.engine == "plain"


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_rounded_weights_are_those_of_the_same_model_in_float32(folder_of, rounding):
    folder = folder_of(torch.bfloat16, intermediate_size=64)
    kept = loaded(folder, quantize=rounding).target
    wide = loaded(folder, quantize=rounding, dtype="float32").target
    assert kept.model.dtype == torch.bfloat16
    for name in ("qkv", "out", "gate_up", "down"):
        assert np.array_equal(getattr(kept.runner.decoder.weights, name), getattr(wide.runner.decoder.weights, name))
    assert torch.equal(logits_of(kept), logits_of(wide))


def test_weights_lie_in_their_file_and_have_left_memory(folder_of):
    model = loaded(folder_of(torch.bfloat16)).target_model
    files = mapped_files(model)
    weights = list(model.parameters())
    assert all(files.holds(weight) for weight in weights)
    before = [weight.clone() for weight in weights]
    files.release(weights)
    assert all(torch.equal(weight, other) for weight, other in zip(weights, before, strict=True))


def test_what_was_written_into_a_mapped_weight_is_not_given_back(folder_of):
    """A part of memory that the process has written to is no copy of its file."""
    pair = loaded(folder_of(torch.bfloat16))
    model = pair.target_model
    before = logits_of(pair.target)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3.0)
    changed = model.model.layers[0].mlp.down_proj.weight.clone()
    assert not mapped_files(model).holds(model.model.layers[0].mlp.down_proj.weight)
    again = language_model(model)
    assert again is not pair.target
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, changed)
    assert not torch.allclose(logits_of(again), before)


def test_the_check_of_load_computes_in_float32_and_finds_a_mistake_of_a_hundredth(folder_of, monkeypatch):
    from specbeam.engines.cpu import decoder

    folder = folder_of(torch.bfloat16)
    panels_of = decoder.panels_of

    def wrong(matrices, *options):
        return panels_of([[part * 1.01 for part in parts] for parts in matrices], *options)

    monkeypatch.setattr(decoder, "panels_of", wrong)
    with pytest.raises(UnsupportedModel, match="off by"):
        loaded(folder)


@pytest.mark.parametrize("words", [torch.bfloat16, torch.float16])
def test_a_model_of_two_bytes_can_be_called_in_float32(folder_of, words):
    model = tiny("llama").to(words)
    tokens = torch.tensor([PATH])
    with InFloat32(mapped_files(model)), torch.inference_mode():
        found = model(tokens).logits
    expected = model.float()(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_likelihood_of_a_text_is_computed_in_float32(folder_of):
    from specbeam.lab.evaluate.perplexity import perplexity

    folder = folder_of(torch.bfloat16)
    texts = [[5, 6, 7, 8], [9, 10, 11]], [[3, 4], [7, 7, 5]]
    kept, wide = (perplexity(loaded(folder, dtype=dtype), *texts) for dtype in ("auto", "float32"))
    assert kept.perplexity == pytest.approx(wide.perplexity, rel=1e-5)


@pytest.mark.parametrize("words", KINDS)
def test_embeddings_are_looked_up_as_float32(words):
    weight = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)).to(words)
    weight[7, :4] = torch.tensor([0.0, -0.0, 6e-8, -6e-5])
    table = table_of(weight)
    assert table.nbytes == weight.nbytes
    found = embedded_rows(table, np.array([7, 49, 0]))
    assert np.array_equal(found, weight[[7, 49, 0]].float().numpy())
    with pytest.raises(IndexError):
        embedded_rows(table, np.array([50]))


def test_a_model_object_of_two_bytes_is_laid_out_on_request(folder_of):
    model = tiny("llama").to(torch.bfloat16)
    assert HuggingFaceLM(model).engine == "plain"
    lm = HuggingFaceLM(model, engine="compiled")
    expected = model.float()(torch.tensor([PATH])).logits[0, -1]
    torch.testing.assert_close(logits_of(lm), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "family",
    [
        *("gemma", "gemma2", "gemma3", "qwen3", "smollm3", "granite", "phi3", "olmo2", "gpt2", "gpt_neox", "opt"),
        *("opt-350m", "bloom", "falcon", "falcon-40b", "falcon-rw"),
    ],
)
def test_every_family_is_laid_out_in_bfloat16_as_the_float32_of_its_weights(family, folder_of):
    folder = folder_of(torch.bfloat16, family)
    target = loaded(folder).target
    assert (target.engine, target.runner.decoder.kind) == ("compiled", "bfloat16")
    wide = loaded(folder, dtype="float32").target_model
    embedding = wide.get_input_embeddings()
    if hasattr(embedding, "embed_scale"):  # a kept Gemma scales embeddings by a number of the type of its files
        embedding.embed_scale = embedding.embed_scale.bfloat16().float()
    expected = wide(torch.tensor([PATH])).logits[0, -1]
    torch.testing.assert_close(logits_of(target), expected, atol=2e-4, rtol=2e-4)


def test_a_kept_model_that_transformers_runs_is_checked_in_the_type_that_it_computes_in(folder_of):
    model = loaded(folder_of(torch.bfloat16)).target_model
    lm = HuggingFaceLM(model, engine="plain")
    check_scores_forests(lm)


def test_a_product_whose_arguments_are_named_is_computed_in_float32():
    x, matrix = torch.randn(2, 8), torch.randn(3, 8, dtype=torch.bfloat16)
    with InFloat32(mapped_files(tiny("llama"))):
        found = torch.nn.functional.linear(input=x, weight=matrix, bias=None)
    assert torch.equal(found, torch.nn.functional.linear(x, matrix.float()))


def test_a_written_page_that_was_swapped_out_counts_as_no_file(folder_of, monkeypatch):
    from specbeam.engines import mapped

    model = loaded(folder_of(torch.bfloat16)).target_model
    maps = list(mapped._maps())
    swapped = [(first, stop, fields | {"Swap": "4 kB"}) for first, stop, fields in maps]
    assert mapped_files(model).parts
    monkeypatch.setattr(mapped, "_maps", lambda: swapped)
    assert not mapped_files(model).parts


def test_the_check_reads_the_files_once_and_goes_over_each_leafs_path(folder_of, monkeypatch):
    model = loaded(folder_of(torch.bfloat16), check=False).target_model
    lm = language_model(model, check=False)
    shapes = []
    forward = model.forward

    def seen(*args, input_ids=None, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return forward(*args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model, "forward", seen)
    check_scores_forests(lm)
    assert shapes == [(3, 8)]  # a prompt of 5 and paths of 3 tokens; seven nodes have three leaves
