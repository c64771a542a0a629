"""Every family that reads sources: its compiled logits are those of transformers, in every word size, batch and length."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import WhisperForCausalLM
from transformers.modeling_outputs import BaseModelOutput

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.forest import Forest
from specbeam.engines.cpu import decoder as compiled
from specbeam.engines.cpu.sums import WIDTH
from specbeam.engines.families import FAMILIES, architecture_of, family_of
from specbeam.engines.kv.cross import CrossPanels
from specbeam.engines.source import Source
from specbeam.errors import NotSupported
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.live_layers import LiveLayers, first_layers
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.loading.language_models import language_model
from specbeam.models.skipping import Skipping, SkippingLM
from tests.models.test_compiled_forward import in_steps
from tests.models.test_families import CLOSE, mistaken, other_family, other_numbers, spreads_off
from tests.support.rounding import rounded
from tests.support.seats import check_rows_and_settle, plain_logits, seat
from tests.support.tiny_sources import VOCAB, sources, tiny_reader

if not compiling.AVAILABLE:
    pytest.skip("needs numba", allow_module_level=True)

# A tiny model of each family, and of what its configurations may have besides.
MODELS = {
    "marian": ("marian", {"scale_embedding": True}),
    "bart": ("bart", {}),
    "mbart": ("mbart", {"scale_embedding": True, "activation_function": "gelu_new"}),
    "pegasus": ("pegasus", {"scale_embedding": True, "activation_function": "relu"}),
    "m2m_100": ("m2m_100", {"scale_embedding": True, "activation_function": "relu"}),
    "whisper": ("whisper", {}),
    "t5": ("t5", {}),
    "t5 1.1": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {}),
    "umt5": ("umt5", {}),
}
VARIANTS = {
    "marian relu": ("marian", {"activation_function": "relu", "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 40}),
    "marian swish": ("marian", {"activation_function": "swish", "decoder_attention_heads": 2}),
    "bart scaled": ("bart", {"scale_embedding": True, "decoder_ffn_dim": 64}),
    "t5 near": ("t5", {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "d_kv": 16}),
}  # fmt: skip


def model_of(name, **changes):
    """A tiny model whose vectors of weights, norms and biases, are at random, too, as are the biases of its logits."""
    family, known = (MODELS | VARIANTS)[name]
    model = tiny_reader(family, scale=2.0, **(known | changes))
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias += torch.randn_like(model.final_logits_bias)
    return model


def state_sources(size=32, lengths=(5, 40, 1)):
    """Sources of different lengths, as the states that an encoder has made of them."""
    generator = torch.Generator().manual_seed(8)
    return [Source.of_states(torch.randn(length, size, generator=generator)) for length in lengths]


class Reading:
    """A model that reads one source, called as one that reads none."""

    def __init__(self, model, source):
        self.model = model
        self.device = model.device
        self.states = source.given.to(model.device, model.dtype)

    def __call__(self, input_ids):
        if isinstance(self.model, WhisperForCausalLM):
            return self.model(input_ids=input_ids, encoder_outputs=self.states)
        return self.model(decoder_input_ids=input_ids, encoder_outputs=BaseModelOutput(last_hidden_state=self.states))


def seats_of(lm, model, prompts, given):
    return [
        seat(prompt, keeps=len(prompt) != 4, context={lm: source}, model=Reading(model, source))
        for prompt, source in zip(prompts, given, strict=True)
    ]


def random_text(rng, lm, length):
    """Tokens without padding, after which some decoders count positions in other ways."""
    tokens = rng.integers(2, lm.vocab, length)
    return tokens.tolist()


def check_turns(lm, model, turns=4, lengths=(1, 4, 17)):
    """Sessions of sources of different length in one batch, random forests and verdicts; each row against its path."""
    rng = np.random.default_rng(1)
    seats = seats_of(lm, model, [random_text(rng, lm, length) for length in lengths], state_sources())
    for _ in range(turns):
        check_rows_and_settle(lm, model, rng, seats, rng.integers(0, 9, len(seats)).tolist(), 2e-4)
        lm.compact(seats[0])
    for one in seats:
        lm.close(one)


def last_row(lm, prompt, source):
    one = seat(prompt, context={lm: source})
    row = lm.extend([one], [Forest.rooted([prompt[-1]])])[0].logits[0]
    lm.close(one)
    return row


@pytest.mark.parametrize("name", [*MODELS, *VARIANTS])
def test_logits_are_those_of_transformers_on_trees_for_sources_of_mixed_lengths(name):
    model = model_of(name)
    lm = EncoderDecoderLM(model, chunk=5)
    assert (lm.engine, lm.engine_note) == ("compiled", "")
    check_turns(lm, model)
    check_scores_forests(lm)
    rng = np.random.default_rng(3)
    text = random_text(rng, lm, 60)
    (source, *_) = state_sources()
    expected = plain_logits(Reading(model, source), [text])[0]
    assert spreads_off(last_row(lm, text, source), expected) < CLOSE
    assert lm.runner.cross.bytes == 0


def test_a_decoder_without_its_encoder_has_the_logits_of_transformers():
    target = EncoderDecoderLM(model_of("whisper"))
    torch.manual_seed(2)
    model = WhisperForCausalLM(target.model.config).eval()
    lm = EncoderDecoderLM(model, chunk=5, encoder=target.encoder)
    assert lm.engine == "compiled"
    check_turns(lm, model)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_same_bits_in_every_company_and_in_every_chunk(name, packed):
    model = model_of(name)
    rng = np.random.default_rng(4)
    given = state_sources()
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16":
            model = model.bfloat16().float()
        alone_lm = EncoderDecoderLM(model)
        prompts = [random_text(rng, alone_lm, length) for length in (23, 2, 40)]
        alone = [last_row(alone_lm, prompt, source) for prompt, source in zip(prompts, given, strict=True)]
        for chunk in (5, 512):
            lm = EncoderDecoderLM(model, chunk=chunk)
            assert lm.runner.decoder.kind == dtype
            seats = seats_of(lm, model, prompts, given)
            found = lm.extend(seats, [Forest.rooted([prompt[-1]]) for prompt in prompts])
            for row, one in zip(alone, found, strict=True):
                assert torch.equal(one.logits[0], row)


def on_the_grid(model):
    """The model whose decoder's matrices, and the rows before them, are what whole numbers and scales can say."""
    twin = copy.deepcopy(model)
    decoder = twin.get_decoder()
    for one in [*decoder.modules(), twin.get_output_embeddings()]:
        if isinstance(one, torch.nn.Linear):
            numbers, scales = rounded(one.weight.detach().contiguous().numpy())
            one.weight = torch.nn.Parameter(torch.from_numpy(numbers * scales[:, None]), requires_grad=False)
            one.register_forward_pre_hook(lambda _, inputs: (in_steps(inputs[0]),))
    return twin


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_int8_are_the_model_on_the_grid_and_the_same_in_every_batch(name):
    model = model_of(name)
    lm = language_model(model, quantize="int8")
    assert lm.engine == "int8"
    twin = on_the_grid(model)
    rng = np.random.default_rng(6)
    prompts = [random_text(rng, lm, length) for length in (9, 30)]
    given = state_sources()[:2]
    seats = seats_of(lm, model, prompts, given)
    together = lm.extend(seats, [Forest.rooted([prompt[-1]]) for prompt in prompts])
    for one in seats:
        lm.close(one)
    for prompt, source, found in zip(prompts, given, together, strict=True):
        assert torch.equal(found.logits[0], last_row(lm, prompt, source))
        expected = plain_logits(Reading(twin, source), [prompt])[0]
        exact = plain_logits(Reading(model, source), [prompt])[0]
        assert (found.logits[0] - expected).std() < 0.03 * expected.std()
        assert (
            found.logits[0] - exact
        ).std() < 0.4 * exact.std()  # rounding spreads in layers without a scale of scores


def without(name):
    """An architecture whose layers lack this norm."""
    return lambda of: replace(of, family=replace(of.family, norms=of.family.norms._replace(**{name: ""})))


def row_by_row(of):
    """Distances are those of neighbours: what is left out is how far back a token is."""
    return replace(of, biases=tuple(one[:, :2] for one in of.biases))


MISTAKES = [
    ("marian", other_numbers(embedding=1.0)),
    ("marian", other_family(norm_of_sum=False)),
    ("marian", without("after_cross")),
    ("bart", other_family(first_norm="")),
    ("bart", mistaken(activation="silu")),
    ("bart", mistaken(scales=(1.0, 1.0))),
    ("mbart", other_family(final_norm="")),
    ("mbart", without("before_cross")),
    ("pegasus", other_numbers(embedding=1.0)),
    ("pegasus", mistaken(activation="silu")),
    ("t5", mistaken(biases=())),
    ("t5", row_by_row),
    ("t5", other_numbers(logits_divisor=1.0)),
    ("t5", mistaken(scales=(8**-0.5, 8**-0.5))),
    ("t5", mistaken(activation="gelu")),
    ("umt5", lambda of: replace(of, biases=of.biases[:1] * 2)),
]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_each_thing_that_a_family_has_counts(name, mistake, monkeypatch):
    """A forward that forgets one of them is off by more than the tests above allow."""
    model = model_of(name)
    text = np.random.default_rng(7).integers(2, VOCAB, 40).tolist()
    (source, *_) = state_sources()
    lm = EncoderDecoderLM(model)
    expected = plain_logits(Reading(model, source), [text])[0]
    assert spreads_off(last_row(lm, text, source), expected) < CLOSE
    right = compiled.architecture_of
    monkeypatch.setattr(compiled, "architecture_of", lambda model: mistake(right(model)))
    assert spreads_off(last_row(EncoderDecoderLM(model), text, source), expected) > 5 * CLOSE


@pytest.mark.parametrize(
    "what", ["offset", "logits bias", "cross bias", "length of the source", "positions of the tree"]
)
def test_what_is_no_setting_of_a_family_counts_too(what, monkeypatch):
    model = model_of("t5" if what == "positions of the tree" else "bart")
    text = np.random.default_rng(7).integers(2, VOCAB, 20).tolist()
    (source, *_) = state_sources()
    expected = plain_logits(Reading(model, source), [text])[0]
    lm = EncoderDecoderLM(model, chunk=5)
    decoder = lm.runner.decoder
    if what == "offset":
        places = model.model.decoder.embed_positions.weight.detach().numpy()
        decoder.model = decoder.model._replace(places=np.ascontiguousarray(places))
    elif what == "logits bias":
        decoder.model = decoder.model._replace(logits_bias=np.zeros(0, dtype=np.float32))
    elif what == "cross bias":
        lm.runner.reader.bias = np.zeros(0, dtype=np.float32)
    elif what == "length of the source":
        lm.extend([seat([3], context={lm: source})], [Forest.rooted([3])])
        lm.runner.cross.lengths[0] = 6  # one frame more than it has
    else:
        one = seat(text, context={lm: source})
        lm.extend([one], [Forest.rooted([text[-1]])])
        found = lm.extend([one], [Forest.rooted([text[-1]]).grown([5], [0])])[0].logits[0]
        longer = plain_logits(Reading(model, source), [[*text, 5]])[0]
        assert spreads_off(found, longer) < CLOSE
        cache = one.state[lm]
        cache.trie.arrays.slot_position[1:6] += 7
        found = lm.extend([one], [Forest.rooted([text[-1]]).grown([5, 6], [0, 0])])[0].logits[0]
        longer = plain_logits(Reading(model, source), [[*text, 6]])[0]
        assert spreads_off(found, longer) > 5 * CLOSE
        return
    assert spreads_off(last_row(lm, text, source), expected) > 5 * CLOSE


@pytest.mark.parametrize("name", ["t5", "mt5", "umt5"])
def test_scores_of_t5_have_no_factor_even_where_transformers_has_no_setting_for_it(name):
    """As in transformers before 5.15."""
    model = model_of(name)
    for module in model.modules():
        vars(module).pop("scaling", None)
    assert architecture_of(model).scales == (1.0, 1.0)


def test_a_decoder_that_transformers_forgets_to_make_causal_has_the_logits_of_a_causal_one():
    """As umT5 in transformers 5.15 to 5.17, whose tokens attend to later ones unless a mask is given."""
    model, forgotten = model_of("umt5"), model_of("umt5")
    for block in forgotten.decoder.block:
        block.layer[0].SelfAttention.is_causal = False
    lms = [EncoderDecoderLM(one) for one in (model, forgotten)]
    text = np.random.default_rng(7).integers(2, VOCAB, 20).tolist()
    (source, *_) = state_sources()
    expected, found = (plain_logits(Reading(one, source), [text])[0] for one in (model, forgotten))
    assert torch.equal(found, expected)
    for lm in lms:
        assert spreads_off(last_row(lm, text, source), expected) < CLOSE
        check_scores_forests(lm)


def test_layers_of_a_decoder_that_reads_sources_do_not_draft():
    lm = EncoderDecoderLM(tiny_reader("t5"))
    assert lm.engine == "compiled"
    for make in (lambda: LiveLayers(lm, 1), lambda: first_layers(lm, 1), lambda: SkippingLM(lm, Skipping("m1"))):
        with pytest.raises(NotSupported, match=r"decoder-only models, and .* has an encoder"):
            make()


def test_what_a_row_has_held_before_does_not_reach_the_next_source():
    generator = np.random.default_rng(4)
    short, long = (generator.standard_normal((frames, 2, 2, 2, 8)).astype(np.float32) for frames in (5, 40))
    store = CrossPanels(2, 2, 8, WIDTH)
    store.add(short)
    store.add(np.full_like(long, np.nan))
    store.drop(1)
    row = store.add(short)
    frames = -(-len(short) // WIDTH) * WIDTH
    assert np.isfinite(store.keys[:, row, :, : frames // WIDTH]).all()
    assert np.isfinite(store.values[:, row, :, :frames]).all()


def test_an_engine_that_runs_no_sources_is_refused_by_name():
    model = model_of("t5")
    for name in ("torch", "layers", "parallel"):
        with pytest.raises(NotSupported, match=f"'{name}' runs decoder-only models.*gpu, compiled, bfloat16"):
            EncoderDecoderLM(model, engine=name)
    model.decoder.block[0].register_forward_hook(lambda *given: None)
    assert "hooks" in EncoderDecoderLM(model).engine_note
    model = model_of("t5")
    model.encoder.block[0].register_forward_hook(lambda *given: None)
    assert EncoderDecoderLM(model).engine == "compiled"  # transformers runs the encoder then


def test_a_tiny_model_of_every_row_is_tried_here():
    found = {family_of(model_of(name)).name for name in MODELS} | {"Whisper's decoder"}
    assert found == {family.name for family in FAMILIES if family.cross}


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_weights_in_int8_draft_for_their_own_model_and_change_no_text(name):
    """The encoder reads once for both."""
    model = model_of(name)
    family, _ = MODELS[name]
    pair = sb.load(model, draft="int8")
    assert (pair.target.engine, pair.draft.engine) == ("compiled", "int8")
    assert pair.draft.encoder is pair.target.encoder
    given = sources(family, 2)
    options = {"max_new_tokens": 8, "eos_token_id": []}
    drafted = sb.generate(pair, given, sb.speculative_beam_search(3, depth=3), **options)
    plain = sb.generate(pair, given, sb.beam_search(3), **options)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert drafted[0].report.target_passes < plain[0].report.target_passes
    changes = {"d_ff": 64} if name == "t5" else {"decoder_ffn_dim": 64}  # 32 divides all depths
    rounded_pair = sb.load(model_of(name, **changes), quantize="int4")
    assert rounded_pair.target.engine == "int4"
    again = [sb.generate(rounded_pair, given, sb.beam_sampling(3), seed=2, **options) for _ in range(2)]
    assert [one.tokens for one in again[0]] == [one.tokens for one in again[1]]


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_compiled_runs_write_the_texts_of_single_turns(name, monkeypatch):
    from specbeam.core.decode import Decoder

    pair = sb.load(
        model_of(name), model_of(name, **({"num_decoder_layers": 1} if name == "t5" else {"decoder_layers": 1}))
    )
    assert pair.target.supports_runs
    given = sources(MODELS[name][0], 2)
    options = {"max_new_tokens": 12, "eos_token_id": [5], "seed": 4}
    methods = (sb.beam_search(3), sb.speculative_beam_search(3, depth=2), sb.dsbd(3, 4, 2, "fixed"), sb.sampling())
    in_runs = [sb.generate(pair, given, method, **options) for method in methods]
    monkeypatch.setattr(Decoder, "_run", lambda self, live: [])
    by_turns = [sb.generate(pair, given, method, **options) for method in methods]
    for one, other in zip(in_runs, by_turns, strict=True):
        assert [answer.tokens for answer in one] == [answer.tokens for answer in other]
