"""A grown T5 has more weights and the same function; so beam search on it can be timed beside transformers'."""

from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

import specbeam as sb
from specbeam.doors.cli import bench_speed
from specbeam.doors.cli.widening import GrownSizes, grown_pair
from specbeam.doors.prompts import PromptRow
from specbeam.errors import BadSetting, NotSupported
from specbeam.lab.bench.baselines import ctranslate2, transformers
from specbeam.lab.bench.outcome import specbeam
from specbeam.lab.bench.speed import speed
from specbeam.lab.bench.widen_model import check_no_less, grown
from specbeam.lab.bench.widen_reader import ReaderSize, grown_reader, reader_size_for
from tests.support import words
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import VOCAB, tiny_reader

GATED = {"feed_forward_proj": "gated-gelu"}
UNSCALED = {
    "tie_word_embeddings": False
}  # transformers reads it as this, and still ties what a checkpoint does not untie
MODELS = {
    "t5": ("t5", {}),
    "t5 with its own head": ("t5", {}),
    "t5 1.1 with its own head": ("t5", GATED | UNSCALED),
    "t5 1.1, tied": ("t5", GATED | UNSCALED),
    "t5 gated": ("t5", GATED),
    "mt5": ("mt5", {}),
    "mt5 with its own head": ("mt5", {}),
    "umt5": ("umt5", {}),
    "umt5 with its own head": ("umt5", {}),
}
CLOSE = 3e-4  # of the spread of logits: large weights make much of what float32 rounds
EPS = 0.03  # so large that a norm which forgets to scale it is found


def model_of(name, **changes):
    family, known = MODELS[name]
    model = tiny_reader(family, layer_norm_epsilon=EPS, **(known | changes))
    return with_its_own_head(model) if name.endswith("with its own head") else model


def with_its_own_head(model):
    """The model as transformers loads it from a checkpoint whose head is not the embedding, whatever its config says."""
    other = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(7))
    model.lm_head.weight = nn.Parameter(other * model.lm_head.weight.std())
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert loaded.config.tie_word_embeddings
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.shared.weight)
    return loaded


def text_of(length, rows, seed):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.manual_seed(seed))


@torch.inference_mode()
def logits(model):
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:] = 0  # a shorter source
    return model(input_ids=text_of(11, 3, 0), attention_mask=mask, decoder_input_ids=text_of(20, 3, 1)).logits


def spreads_off(found, expected):
    return float((found - expected).abs().max() / expected.std())


def enlarged(model, **factors):
    own = ReaderSize.of(model.config)
    return replace(own, **{name: getattr(own, name) * factor for name, factor in factors.items()})


ALL = {"hidden": 3, "encoder_layers": 2, "decoder_layers": 3, "inner": 2, "heads": 2}


@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays_whatever_grows(name):
    model = model_of(name)
    expected = logits(model)
    for factors in [{one: factor} for one, factor in ALL.items()] + [{"hidden": 4}, ALL]:
        size = enlarged(model, **factors)
        large = grown_reader(model, size)
        assert ReaderSize.of(large.config) == size
        assert large.num_parameters() > model.num_parameters()
        assert spreads_off(logits(large), expected) < CLOSE, factors


def without_what_logits_are_divided_by(model, large):
    weight = large.decoder.final_layer_norm.weight
    weight.mul_((model.config.d_model / large.config.d_model) ** 0.5)


def with_the_former_eps(model, large):
    for module in large.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = EPS


def with_new_heads_that_write(model, large):
    attention = large.encoder.block[0].layer[0].SelfAttention
    attention.o.weight[: model.config.d_model, -1] = 0.3


def with_new_layers_that_write(model, large):
    large.decoder.block[-1].layer[-1].DenseReluDense.wo.weight[0] = 0.3


@pytest.mark.parametrize(
    "mistake",
    [
        without_what_logits_are_divided_by,
        with_the_former_eps,
        with_new_heads_that_write,
        with_new_layers_that_write,
    ],
)
@torch.no_grad()
def test_each_thing_that_growth_takes_care_of_counts(mistake):
    model = model_of("t5")
    large = grown_reader(model, enlarged(model, **ALL))
    mistake(model, large)
    assert spreads_off(logits(large), logits(model)) > 5 * CLOSE


@pytest.mark.parametrize("name", ["t5", *(name for name in MODELS if name.endswith("with its own head"))])
def test_texts_are_those_of_the_small_model(name):
    model = model_of(name)
    large = grown_reader(model, enlarged(model, **ALL))
    given = [one.tolist() for one in text_of(9, 3, 2)]
    found = [
        sb.generate(sb.load(one), given, sb.beam_search(5), max_new_tokens=12, eos_token_id=[])
        for one in (model, large)
    ]
    for small, same in zip(*found, strict=True):
        assert [beam.tokens for beam in same.beams] == [beam.tokens for beam in small.beams]


@pytest.mark.parametrize("short", [True, False])
def test_numbers_are_as_short_as_those_of_the_model(short):
    model = model_of("t5")
    if short:
        model = model.bfloat16().float()
    large = grown_reader(model, enlarged(model, **ALL))
    matrices = [one.weight for one in large.modules() if isinstance(one, torch.nn.Linear | torch.nn.Embedding)]
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in matrices) == short


def test_a_number_of_parameters_becomes_a_usual_shape():
    config = T5Config(
        vocab_size=6144, d_model=256, d_kv=64, d_ff=512, num_layers=4, num_decoder_layers=2, num_heads=4, **GATED
    )
    model = T5ForConditionalGeneration(config)
    size = reader_size_for(model, 100_000_000)
    assert abs(size.parameters(config, tied=True) - 100e6) < 10e6
    assert 512 <= size.hidden <= 1024
    assert size.heads * config.d_kv == size.hidden
    assert abs(size.encoder_layers - 2 * size.decoder_layers) <= 1


@pytest.mark.parametrize("inner", [512, 1024])
def test_a_number_little_above_the_own_is_not_ignored(inner):
    config = T5Config(
        vocab_size=6144, d_model=256, d_kv=64, d_ff=inner, num_layers=4, num_decoder_layers=2, num_heads=4
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    own = ReaderSize.of(config)
    has = own.parameters(config, tied=True)
    assert reader_size_for(model, has) == own
    for times in (1.05, 1.1, 1.2, 1.3):
        size = reader_size_for(model, round(times * has))
        check_no_less(own, size)
        assert size != own
        assert size.parameters(config, tied=True) == pytest.approx(times * has, rel=0.1)  # half a layer, or half a step
    next_larger = replace(own, inner=inner + 64).parameters(config, tied=True)
    with pytest.raises(BadSetting, match=f"the model has {has:,}, and the next larger size {next_larger:,}"):
        reader_size_for(model, has + 1000)


@pytest.mark.parametrize("name", ["t5", "t5 with its own head"])
def test_the_words_of_a_head_of_its_own_count(name):
    model = model_of(name, vocab_size=30_000)
    large = grown_reader(model, 5_000_000)
    assert abs(large.num_parameters() - 5e6) < 0.5e6


def test_a_model_does_not_shrink_and_others_are_refused():
    model = model_of("t5")
    own = ReaderSize.of(model.config)
    with pytest.raises(BadSetting, match="heads is 3; it must be at least the model's own, 4"):
        grown_reader(model, replace(own, heads=3))
    with pytest.raises(BadSetting, match="already"):
        grown_reader(model, 10)
    with pytest.raises(NotSupported, match="this is MarianMTModel"):
        grown_reader(tiny_reader("marian"), 10**7)
    with pytest.raises(NotSupported, match="this is LlamaForCausalLM"):
        grown_reader(tiny("llama"), 10**7)
    with pytest.raises(NotSupported, match="T5ForConditionalGeneration is t5"):
        grown(model, 10**7)


@pytest.fixture
def folder(tmp_path):
    model = tiny_reader(
        "t5", vocab_size=len(words.tokenizer()), pad_token_id=2, eos_token_id=1, decoder_start_token_id=0
    )
    model.save_pretrained(tmp_path)
    words.tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_speed_of_a_grown_reader_is_measured_beside_transformers(folder):
    pair = grown_pair(folder, None, GrownSizes("300K"), sources=True)
    assert abs(pair.target_model.num_parameters() - 300_000) < 100_000
    running = [
        transformers(pair, "beam_search", 5, max_new_tokens=8),
        specbeam(pair, "beams", sb.beam_search(5), max_new_tokens=8),
    ]
    given = ["abc", "Hello you"]
    theirs, ours = (one.run(given, 0).tokens for one in running)
    assert ours == theirs
    assert min(map(len, ours)) > 1
    lines = speed(pair, running, [PromptRow(text) for text in given], batch_size=2, repeats=1)
    assert lines[0].logp_per_token == pytest.approx(lines[1].logp_per_token, rel=1e-4)


def test_ctranslate2_reads_sources_too(folder):
    pytest.importorskip("ctranslate2")
    pair = grown_pair(folder, None, GrownSizes("300K"), sources=True)
    given = ["abc", "Hello you"]
    for mode, method in (("greedy", sb.greedy()), ("beam_search", sb.beam_search(5))):
        theirs = ctranslate2(pair, mode, 5, threads=1, max_new_tokens=8).run(given, 0).tokens
        assert theirs == specbeam(pair, mode, method, max_new_tokens=8).run(given, 0).tokens


@pytest.mark.parametrize("given", [[], ["abc"]])
def test_a_model_that_hears_is_refused_before_anything_runs(tmp_path, given):
    tiny_reader("whisper", vocab_size=len(words.tokenizer())).save_pretrained(tmp_path)
    words.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(NotSupported, match="is a whisper model, which reads audio; use specbeam transcribe"):
        bench_speed.speed(bench_speed.SpeedArguments(prompt=given, model=str(tmp_path), rows=3, repeats=1))


def test_what_does_not_take_sources_says_so(folder):
    with pytest.raises(NotSupported, match="this command continues prompts"):
        grown_pair(folder, None, GrownSizes("300K"))
    with pytest.raises(BadSetting, match="--grow-vocab is for decoder-only models"):
        grown_pair(folder, None, GrownSizes(grow_vocab="128K"), sources=True)
    with pytest.raises(BadSetting, match="is an encoder-decoder model; give sources for it by --prompt or --file"):
        bench_speed.speed(bench_speed.SpeedArguments(model=folder, rows=3, repeats=1))
