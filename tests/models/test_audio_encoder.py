"""The encoder of audio by the compiled layers: the states of transformers, whatever windows are read with one."""

import numpy as np
import pytest
import torch

import specbeam as sb
from specbeam.core import compiling
from specbeam.engines.cpu import audio_encoder, tiles
from specbeam.engines.cpu import encoder as compiled
from specbeam.engines.cpu.audio_encoder import AudioEncoder
from specbeam.engines.source import Source
from specbeam.errors import UnsupportedModel
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.quantised import rounding_of
from tests.models.test_compiled_encoder import CLOSE, on_the_grid, spreads_off, without
from tests.models.test_families import mistaken, other_family
from tests.models.test_source_families import model_of
from tests.support.tiny_sources import MELS

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

from specbeam.core.compiling.compiler import compiled as by_numba
from specbeam.engines.cpu import shares, team, window_attention
from specbeam.engines.cpu.odds import write_odds
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.cpu.window_attention import Windows, attend_within

ROWS = 150  # of a window: several blocks of queries, and no multiple of the steps of a product


def hearing(**changes):
    return model_of("whisper", max_source_positions=ROWS, activation_function="gelu", **changes)


def window(seed=0, rows=ROWS):
    return torch.randn(1, MELS, 2 * rows, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def states_of(encoder, features):
    return encoder(input_features=features)[0][0]


def test_states_are_those_of_transformers_and_the_same_bits_in_every_company():
    model = hearing()
    encoder = EncoderDecoderLM(model).encoder
    assert isinstance(encoder, AudioEncoder)
    windows = [window(seed) for seed in range(3)]
    together = encoder.read([one[0].numpy() for one in windows])
    for features, found in zip(windows, together, strict=True):
        alone = states_of(encoder, features)
        assert spreads_off(alone, states_of(model.get_encoder(), features)) < CLOSE
        assert np.array_equal(alone.numpy(), found)
    with torch.inference_mode():
        (called,) = encoder(input_features=torch.cat(windows))
    assert np.array_equal(called.numpy(), np.stack(together))
    sources = [Source.of_features(one[0]) for one in windows]
    encoder.read_together(sources)
    assert [np.array_equal(one.states[encoder][0], found) for one, found in zip(sources, together, strict=True)] == [
        True
    ] * 3


def test_an_encoder_of_16_bits_is_tried_against_transformers_in_float32():
    """In 16 bits transformers rounds every layer's output, by more than a mistake might change."""
    model = hearing(init_std=0.3, encoder_layers=6).to(torch.bfloat16)
    encoder = EncoderDecoderLM(model, engine="compiled").encoder
    assert encoder.error_on(window()[0].numpy()) < 1e-3
    assert next(encoder.module.parameters()).dtype == torch.bfloat16


def test_notes_and_laws_say_that_an_encoder_is_left_to_transformers():
    model = hearing()
    assert EncoderDecoderLM(model, engine="int8").engine_note == ""
    assert rounding_of(EncoderDecoderLM(model, engine="int8")) == "int8"
    model.get_encoder().conv1.register_forward_hook(lambda *given: None)
    lm = EncoderDecoderLM(model, engine="int8")
    assert lm.encoder is model.get_encoder()
    assert "the encoder of WhisperForConditionalGeneration: " in lm.engine_note
    assert rounding_of(lm) == "int8 (encoder not rounded)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_features_are_rounded_to_the_type_of_a_model_that_stays_in_it(dtype):
    model = hearing()
    exact = EncoderDecoderLM(hearing().to(dtype).float()).encoder
    kept = EncoderDecoderLM(model.to(dtype), engine="compiled").encoder
    assert kept.kind == str(dtype).removeprefix("torch.")
    features = window()
    expected = states_of(exact.module, features.to(dtype).float())
    source = Source.of_features(features[0])
    kept.read_together([source])
    assert spreads_off(source.states[kept][0], expected) < CLOSE
    assert torch.equal(Source.of_features(features[0]).states_of(kept), source.states[kept])


def test_rounded_models_have_layers_on_the_grid_of_8_bits_and_exact_convolutions():
    model = hearing()
    encoder = EncoderDecoderLM(model, engine="int8").encoder
    assert encoder.kind == ("int8 tiles" if tiles.available() else "int8")
    assert all(one.panels.dtype == np.float32 for one in encoder.convolutions)
    features = window()
    expected = states_of(on_the_grid(model.get_encoder()), features)
    found = states_of(encoder, features)
    assert (found - expected).std() < 0.03 * expected.std()
    exact = states_of(model.get_encoder(), features)
    assert 0 < (found - exact).std() < 0.3 * exact.std()


MISTAKES = [
    mistaken(activation="silu"),
    mistaken(scales=(1.0,) * 3),
    other_family(final_norm=""),
    other_family(norm_of_sum=True, norms=compiled.encoder_family(compiled.family_of(model_of("bart"))).norms),
    without("before_inner"),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_thing_that_its_layers_have_counts(mistake, monkeypatch):
    model = hearing()
    expected = states_of(model.get_encoder(), window())
    right = compiled.architecture_of
    monkeypatch.setattr(compiled, "architecture_of", lambda model, family: mistake(right(model, family)))
    assert spreads_off(states_of(EncoderDecoderLM(model).encoder, window()), expected) > 5 * CLOSE


def reversed_kernel(encoder):
    encoder.conv1.weight.copy_(encoder.conv1.weight.flip(2))


def other_biases(encoder):
    encoder.conv2.bias.zero_()


def moved_places(encoder):
    encoder.embed_positions.weight.copy_(encoder.embed_positions.weight.roll(1, 0))


@pytest.mark.parametrize("mistake", [reversed_kernel, other_biases, moved_places])
@torch.no_grad()
def test_what_stands_before_the_layers_counts(mistake):
    model = hearing()
    expected = states_of(model.get_encoder(), window())
    mistake(model.get_encoder())
    assert spreads_off(states_of(EncoderDecoderLM(model).encoder, window()), expected) > 5 * CLOSE


def test_transformers_hears_with_what_is_not_known_here():
    model = hearing()
    encoder = EncoderDecoderLM(model).encoder
    with pytest.raises(ValueError, match=f"mel input features to be of length {2 * ROWS}, but found 40"):
        encoder(input_features=window(rows=20))
    assert encoder.inputs_of(Source.of_features(window(rows=20)[0])) is None
    assert encoder.inputs_of(Source.of_tokens([5])) is None
    wide = hearing()
    conv = wide.get_encoder().conv1
    wide.get_encoder().conv1 = torch.nn.Conv1d(MELS, conv.out_channels, kernel_size=5, padding=2)
    assert "conv1 has another kernel" in audio_encoder.misfit_of_convolutions(wide.get_encoder())
    assert EncoderDecoderLM(wide).encoder is wide.get_encoder()
    few = hearing(num_mel_bins=6)
    assert "conv1 is 18 deep" in audio_encoder.misfit_of_convolutions(few.get_encoder())
    model.get_encoder().conv2.register_forward_hook(lambda *given: None)
    assert EncoderDecoderLM(model).encoder is model.get_encoder()


def test_load_tries_a_short_window_and_refuses_an_encoder_that_is_not_that_of_its_family(monkeypatch):
    model = hearing()
    tried = []
    right = AudioEncoder.error_on
    monkeypatch.setattr(AudioEncoder, "error_on", lambda self, given: tried.append(given.shape) or right(self, given))
    sb.load(model)
    assert tried == [(MELS, 48)]
    assert model.config.max_source_positions == ROWS
    changed = hearing()
    layer = changed.get_encoder().layers[0]
    monkeypatch.setattr(type(layer), "forward", lambda self, states, mask, **named: 2 * states)
    with pytest.raises(UnsupportedModel, match="encoder of WhisperForConditionalGeneration differs from its family's"):
        sb.load(changed)


def exact_attention(qkv, heads, size, scale):
    """The attention of one window in float64."""
    q, k, v = (
        part.reshape(len(qkv), heads, size).transpose(1, 0, 2) for part in np.split(qkv.astype(float), 3, axis=1)
    )
    scores = scale * q @ k.transpose(0, 2, 1)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = odds / odds.sum(-1, keepdims=True) @ v
    return mixed.transpose(1, 0, 2).reshape(len(qkv), -1)


@pytest.mark.parametrize(("heads", "size"), [(3, 8), (2, 64)])
def test_attention_within_windows_is_that_of_each_whatever_their_lengths_and_the_number_of_threads(
    heads, size, monkeypatch
):
    lengths = (1, 5, WIDTH, WIDTH + 1, 150)
    rng = np.random.default_rng(2)
    windows = [2 * rng.standard_normal((length, 3 * heads * size), dtype=np.float32) for length in lengths]
    ends = np.cumsum(lengths)
    joined = np.concatenate(windows)
    found = np.full((len(joined), heads * size), np.nan, dtype=np.float32)
    scale = np.float32(size**-0.5)
    attend_within(Windows(joined, ends, heads, size, scale, found), 1)
    for one, mixed in zip(windows, np.split(found, ends[:-1]), strict=True):
        off = np.abs(mixed - exact_attention(one, heads, size, scale)).max()
        assert off < 2e-5, off
        alone = np.empty_like(mixed)
        attend_within(Windows(one, np.array([len(one)]), heads, size, scale, alone), 1)
        assert np.array_equal(alone, mixed)
    monkeypatch.setattr(team, "allowed_threads", lambda: 3)
    helping = team.Team()
    helping.learn_function(window_attention.FORM, window_attention.do_window_share)
    shared = np.full_like(found, np.nan)
    with helping.threads(3) as threads:
        attend_within(Windows(joined, ends, heads, size, scale, shared), threads)
        assert threads != 1
    assert np.array_equal(shared, found)


def test_forms_of_a_team_have_places_of_their_own():
    assert window_attention.FORM not in [*window_attention.ATTENTION_FORM_OF.values(), *team.FORM_OF.values()]
    assert shares.FORMS + window_attention.FORM < shares.WORDS


@by_numba
def odds_of(scores, count, totals):
    write_odds(scores, count, totals)


def test_odds_are_those_of_each_query_and_keys_behind_the_last_are_left_alone():
    rng = np.random.default_rng(1)
    scores = 30 * rng.standard_normal((40, WIDTH), dtype=np.float32)
    scores[:, 1] = -1000 * np.arange(40)
    scores[:, 2] = 7
    scores[5, 3] = np.nan
    expected = np.exp(scores[:37].astype(float) - scores[:37].max(0))
    found = scores.copy()
    totals = np.empty(WIDTH, dtype=np.float32)
    odds_of(found, 37, totals)
    known = np.delete(np.arange(WIDTH), 3)
    assert np.allclose(found[:37, known], expected[:, known], rtol=4e-6, atol=2e-38)  # a difference has 2^-24 of 100
    assert np.allclose(totals[known], expected[:, known].sum(0), rtol=2e-6)
    assert np.isnan(totals[3])
    assert np.array_equal(found[37:], scores[37:])
