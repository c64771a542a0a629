"""Encoders by the compiled layers: the states of transformers, whatever is read with a source."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.cpu import encoder as compiled
from specbeam.engines.cpu import tiles
from specbeam.engines.cpu.encoder import CompiledEncoder
from specbeam.engines.source import Source, in_line, line_up, part
from specbeam.errors import UnsupportedModel
from specbeam.generation import run
from specbeam.models.encoder_decoder import EncoderDecoderLM
from tests.models.test_compiled_forward import in_steps
from tests.models.test_families import mistaken, other_family, other_numbers
from tests.models.test_source_families import MODELS, VARIANTS, model_of
from tests.support.rounding import rounded
from tests.support.tiny_sources import PAD

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

READERS = [name for name in [*MODELS, *VARIANTS] if name != "whisper"]  # which hears
LENGTHS = (1, 5, 40, 60)  # below, at and beyond a panel, and beyond the distances that "t5 near" tells apart
CLOSE = 5e-5  # of the spread of the states: sums of some hundred float32 numbers in another order


def text_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(2, 40, length)


@torch.inference_mode()
def states_of(encoder, tokens):
    return encoder(input_ids=torch.from_numpy(tokens)[None])[0][0]


def spreads_off(found, expected):
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", READERS)
def test_states_are_those_of_transformers_and_the_same_bits_in_every_company(name):
    model = model_of(name)
    encoder = EncoderDecoderLM(model).encoder
    assert isinstance(encoder, CompiledEncoder)
    texts = [text_of(length) for length in LENGTHS]
    together = encoder.read(texts)
    for text, found in zip(texts, together, strict=True):
        alone = states_of(encoder, text)
        assert spreads_off(alone, states_of(model.get_encoder(), text)) < CLOSE
        assert np.array_equal(alone.numpy(), found)


def on_the_grid(encoder):
    """The encoder whose matrices, and the rows before them, are what whole numbers and scales can say."""
    twin = copy.deepcopy(encoder)
    for one in twin.modules():
        if isinstance(one, torch.nn.Linear):
            numbers, scales = rounded(one.weight.detach().contiguous().numpy())
            one.weight = torch.nn.Parameter(torch.from_numpy(numbers * scales[:, None]), requires_grad=False)
            one.register_forward_pre_hook(lambda _, inputs: (in_steps(inputs[0]),))
    return twin


@pytest.mark.parametrize("engine", ["int8", "int4"])
@pytest.mark.parametrize("name", ["marian", "bart", "t5", "t5 1.1"])
def test_rounded_models_have_the_encoder_on_the_grid_of_8_bits(name, engine):
    changes = {"d_ff": 64} if name.startswith("t5") else {"decoder_ffn_dim": 64}  # 32 divides all depths
    model = model_of(name, **changes)
    encoder = EncoderDecoderLM(model, engine=engine).encoder
    assert encoder.kind == ("int8 tiles" if tiles.available() else "int8")
    text = text_of(20)
    expected = states_of(on_the_grid(model.get_encoder()), text)
    found = states_of(encoder, text)
    assert (found - expected).std() < 0.03 * expected.std()
    exact = states_of(model.get_encoder(), text)
    assert 0 < (found - exact).std() < 0.3 * exact.std()


def without(name):
    """An architecture whose layers lack this norm."""
    return lambda of: replace(of, family=replace(of.family, norms=of.family.norms._replace(**{name: ""})))


def looking_back(of):
    """What is ahead is as far as what is here: the ranges of a decoder."""
    middle = of.biases[0].shape[1] // 2
    return replace(
        of, biases=tuple(torch.cat([one[:, middle:].flip(1), one[:, middle + 1 :]], dim=1) for one in of.biases)
    )


MISTAKES = [
    ("marian", other_numbers(embedding=1.0)),
    ("marian", other_family(norm_of_sum=False)),
    ("bart", other_family(first_norm="")),
    ("bart", mistaken(activation="silu")),
    ("mbart", other_family(final_norm="")),
    ("mbart", without("before_inner")),
    ("t5", mistaken(biases=())),
    ("t5", looking_back),
    ("t5", mistaken(scales=(8**-0.5,) * 3)),
    ("umt5", lambda of: replace(of, biases=of.biases[:1] * 3)),
]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_each_thing_that_an_encoder_has_counts(name, mistake, monkeypatch):
    """An encoder that forgets one of them is off by more than the tests above allow."""
    model = model_of(name)
    text = text_of(40)
    expected = states_of(model.get_encoder(), text)
    right = compiled.architecture_of
    monkeypatch.setattr(compiled, "architecture_of", lambda model, family: mistake(right(model, family)))
    assert spreads_off(states_of(EncoderDecoderLM(model).encoder, text), expected) > 5 * CLOSE


def test_load_refuses_a_model_whose_encoder_is_not_that_of_its_family():
    model = model_of("t5")
    first = model.encoder.block[0].layer[0].SelfAttention
    right = first.compute_bias
    first.compute_bias = lambda *given, **named: 3 * right(*given, **named)
    with pytest.raises(UnsupportedModel, match="encoder of T5ForConditionalGeneration differs from its family's"):
        sb.load(model)


def test_tokens_look_at_what_follows_them():
    encoder = EncoderDecoderLM(model_of("marian")).encoder
    text = text_of(20)
    changed = text.copy()
    changed[-1] += 1
    assert spreads_off(states_of(encoder, text)[:1], states_of(encoder, changed)[:1]) > 5 * CLOSE


def test_transformers_reads_what_is_not_known_here():
    """Padding within a source, which shifts positions; sources beyond the positions known; modules with hooks."""
    model = model_of("m2m_100")
    encoder = EncoderDecoderLM(model).encoder
    text = text_of(20)
    text[7] = PAD
    assert not encoder.knows(text)
    assert torch.equal(states_of(encoder, text), states_of(model.get_encoder(), text))
    assert encoder.knows(text_of(20))
    assert not encoder.knows(text_of(len(encoder.places) + 1))
    model.get_encoder().layers[0].register_forward_hook(lambda *given: None)
    assert not isinstance(EncoderDecoderLM(model).encoder, CompiledEncoder)


def test_sources_of_a_batch_are_read_in_few_passes_and_their_texts_are_those_of_each_alone(monkeypatch):
    pair = sb.load(model_of("marian"))
    encoder = pair.target.encoder
    given = [text_of(length).tolist() for length in (5, 12, 9, 50)]
    options = {"max_new_tokens": 6, "eos_token_id": []}
    alone = [one.tokens for source in given for one in sb.generate(pair, [source], sb.beam_search(3), **options)]
    passes = []
    read = encoder.read
    monkeypatch.setattr(encoder, "read", lambda sources: passes.append(len(sources)) or read(sources))
    monkeypatch.setattr(compiled, "TOGETHER", 30)
    together = [one.tokens for one in sb.generate(pair, given, sb.beam_search(3), batch_size=4, **options)]
    assert together == alone
    assert sorted(passes) == [1, 3]


def test_a_source_that_is_read_already_is_not_read_again():
    encoder = EncoderDecoderLM(model_of("t5")).encoder
    known = Source.of_tokens([5, 6, 7])
    states = known.states_of(encoder)
    made_up = Source.of_states(torch.zeros(4, 32))
    fresh = Source.of_tokens([8, 9])
    encoder.read_together([known, made_up, fresh, fresh])
    assert known.states[encoder] is states
    assert made_up.states == {}
    assert torch.equal(fresh.states[encoder][0], states_of(encoder, np.array([8, 9])))


def test_sources_that_wait_are_read_with_the_first_one_and_texts_are_those_of_each_alone(monkeypatch):
    """By the encoder, and by the matrices of the decoder that make their keys and values; never more than fit a pass."""
    pair = sb.load(model_of("marian"))
    encoder, reader = pair.target.encoder, pair.target.runner.reader
    given = [text_of(length).tolist() for length in (5, 12, 9, 50, 7, 12)]
    options = {"max_new_tokens": 6, "eos_token_id": []}
    alone = [one.tokens for source in given for one in sb.generate(pair, [source], sb.beam_search(3), **options)]
    passes = {encoder: [], reader: []}
    read, made = encoder.read, reader.read
    monkeypatch.setattr(encoder, "read", lambda some: passes[encoder].append([len(one) for one in some]) or read(some))
    monkeypatch.setattr(reader, "read", lambda states: passes[reader].append(len(states)) or made(states))
    for place in ("encoder", "source_passes"):
        monkeypatch.setattr(f"specbeam.engines.cpu.{place}.TOGETHER", 30)
    one_by_one = [one.tokens for one in sb.generate(pair, given, sb.beam_search(3), batch_size=1, **options)]
    assert one_by_one == alone
    assert passes == {encoder: [[50], [12, 12], [9, 7, 5]], reader: [50, 24, 21]}
    assert pair.target.runner.readers == []


def test_sources_that_were_read_ahead_are_taken_up_and_forgotten_with_their_sessions():
    lm = EncoderDecoderLM(model_of("t5"))
    given = [Source.of_tokens(text_of(length).tolist()) for length in (4, 6, 3)]
    line_up([given[0], given[0], *given])
    session = SimpleNamespace(prompt=[0], state={}, context={lm: given[0]})
    lm.fill([session])
    assert [lm.encoder in one.states for one in given] == [True, True, True]
    assert [lm.runner in one.ahead for one in given] == [False, True, True]  # the first one is stored
    alone = EncoderDecoderLM(lm.model).encoder.read([text_of(6)])[0]
    assert np.array_equal(given[1].states[lm.encoder][0].numpy(), alone)
    following = SimpleNamespace(prompt=[0], state={}, context={lm: given[1]})
    again = SimpleNamespace(prompt=[0], state={}, context={lm: given[0]})
    lm.fill([following, again])
    assert [lm.runner in one.ahead for one in given] == [False, False, True]
    for one in (session, following, again):
        lm.close(one)
    assert [lm.encoder in one.states for one in given] == [False, False, True]
    part(given)
    assert [(one.states, one.ahead, one.after) for one in given] == [({}, {}, None)] * 3


def test_a_line_of_sources_is_that_of_the_latest_request():
    first, second, third = (Source.of_tokens([token]) for token in (5, 6, 7))
    line_up([first, second, third])
    assert list(in_line([first], 9)) == [first, second, third]
    assert list(in_line([first], 1)) == [first, second]
    line_up([third, first])
    assert list(in_line([first], 9)) == [first]
    second.after, first.after = first, second  # as two requests at once could leave it
    assert list(in_line([third], 9)) == [third, first, second]
    line_up([first])
    assert list(in_line([first], 9)) == [first]


def test_a_request_that_is_not_read_to_its_end_leaves_nothing_of_its_sources():
    pair = sb.load(model_of("marian"))
    given = [Source.of_tokens(text_of(length).tolist()) for length in (9, 5, 7)]
    settings = Settings.given({"max_new_tokens": 6}, None)
    turns = run(Request.of(pair, given, sb.beam_search(3), settings, seed=1), 1, None)
    next(turns)
    assert [bool(one.states) for one in given] == [False, True, True]
    turns.close()
    assert [(one.states, one.ahead, one.after) for one in given] == [({}, {}, None)] * 3


def test_what_waits_is_read_ahead_for_one_pass_and_no_more():
    """Also where states of all that wait are known already."""
    lm = EncoderDecoderLM(model_of("t5"))
    given = [Source.of_tokens(text_of(60).tolist()) for _ in range(20)]
    lm.encoder.read_together(given)
    line_up(given)
    lm.runner.read_ahead(given[:1], lm.encoder)
    assert sum(lm.runner in one.ahead for one in given) == 4


def test_what_cannot_be_read_here_ends_what_is_read_ahead():
    encoder = EncoderDecoderLM(model_of("t5")).encoder
    first, heard, last = Source.of_tokens([5, 6]), Source.of_features(torch.zeros(4, 8)), Source.of_tokens([7])
    line_up([first, heard, last])
    encoder.read_together([first])
    assert [encoder in one.states for one in (first, heard, last)] == [True, False, False]
