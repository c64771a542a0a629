"""Decoders that look at sources in the forward for GPUs: on one where there is one, otherwise in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import WhisperForCausalLM

pytest.importorskip("triton")

import specbeam as sb
from specbeam.core import compiling
from specbeam.core.forest import Forest
from specbeam.core.records import Needs
from specbeam.engines.gpu import decoder as gpu
from specbeam.engines.gpu.kernels import Scores, attended, norm_sum
from specbeam.engines.gpu.source_kernels import looked_at_sources
from specbeam.engines.gpu.staging import Inputs
from specbeam.engines.kv.cross_pool import CrossPool
from specbeam.engines.source import Source
from specbeam.errors import NotSupported
from specbeam.models.encoder_decoder import EncoderDecoderLM
from specbeam.models.loading.checks import check_scores_forests
from specbeam.models.pair import Pair
from tests.models.test_families import CLOSE, spreads_off
from tests.models.test_gpu import (
    DEVICE,
    KINDS,
    ON_GPU,
    StepByStep,
    assert_near,
    inputs_of,
    numbers,
    random,
    store_of,
    whole,
)
from tests.models.test_source_families import (
    MISTAKES,
    MODELS,
    VARIANTS,
    Reading,
    check_turns,
    last_row,
    model_of,
    random_text,
    seats_of,
    state_sources,
)
from tests.support.seats import plain_logits, seat
from tests.support.tiny_sources import PAD, VOCAB, sources


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def lm_of(name, **changes):
    return EncoderDecoderLM(model_of(name, **changes).to(DEVICE), chunk=5, engine="gpu")


def marked(names, quick):
    """What takes the interpreter too long is for a GPU."""
    return [pytest.param(name, marks=() if name in quick else ON_GPU) for name in names]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processors", [1, 12], ids="on {} processors".format)
@pytest.mark.parametrize(("heads", "size", "counts"), [(2, 8, [2, 3]), (3, 24, [1, 7]), (1, 64, [3, 70])])
def test_rows_look_at_all_frames_of_the_source_of_their_session(kind, processors, heads, size, counts):
    rows = sum(counts)
    q = random(rows, heads, size, kind=kind)
    keys, values = (random(heads, 200, size, kind=kind) for _ in range(2))
    keys[:, 140:] = values[:, 140:] = torch.nan  # behind all sources
    table = torch.zeros(8, 4, dtype=torch.int32, device=DEVICE)
    places = [(17, 1), (40, 100)]
    for session, (first, frames) in enumerate(places):
        start = sum(counts[:session])
        table[:, session] = numbers([start, counts[session], 0, 0, 0, 0, first, frames])
    inputs = Inputs(*[numbers([0])] * 5, table, keys=None, seen=numbers([0]))
    found = looked_at_sources(q, keys, values, inputs, 3, max(counts), processors, 0.3)
    for mine, (first, frames) in zip(found.split(counts), places, strict=True):
        start = 0 if mine.data_ptr() == found.data_ptr() else counts[0]
        scores = torch.einsum(
            "rhd,hsd->hrs", q[start : start + len(mine)].float(), keys[:, first : first + frames].float()
        )
        weights = (0.3 * scores).softmax(-1)
        expected = torch.einsum("hrs,hsd->rhd", weights, values[:, first : first + frames].float())
        assert_near(mine, expected.reshape(len(mine), -1), kind)


@pytest.mark.parametrize("processors", [1, 12], ids="on {} processors".format)
def test_scores_have_the_bias_of_their_range_of_distances(processors):
    heads, rows, slots, ranges = (4, 2), 5, 64, 7
    q = random(rows, heads[0], 16, kind=torch.float32)
    store = store_of(heads[1], 16, torch.float32, {0: 64})
    keys, values = (whole(store, 0, 0, one)[None] for one in (0, 1))
    biases = random(heads[0], ranges, kind=torch.float32)
    named = torch.randint(0, ranges + 1, (rows, slots), device=DEVICE).to(torch.uint8)
    inputs = inputs_of(rows, [rows], [0], [slots], named[None])
    found = attended(q, heads[1], store.layer(0), inputs, 1, rows, processors, Scores(0, 0.5, biases=biases))
    k, v = (one[0, :, :slots].repeat_interleave(2, 0) for one in (keys, values))
    scores = 0.5 * torch.einsum("rhd,hsd->hrs", q, k) + biases[:, (named.long() - 1).clamp(min=0)]
    weights = scores.masked_fill(named == 0, -torch.inf).softmax(-1)
    assert_near(found, torch.einsum("hrs,hsd->rhd", weights, v).reshape(rows, -1), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_sums(kind):
    x, more, weight = random(3, 48, kind=kind), random(3, 48, kind=kind), random(96, kind=kind)
    total = (x.float() + 0.5 * more.float()).to(kind).float()
    expected = torch.nn.functional.layer_norm(total, (48,), weight[:48].float(), weight[48:].float(), 1e-5)
    norm_sum(x, more, weight, 1e-5, 0.5)
    assert_near(x, expected, kind)


def parts(frames, value, layers=2):
    """Keys and values of a source in each layer, all of one number."""
    return [
        (torch.full((frames, 3, 4), float(value)), torch.full((frames, 3, 4), -float(value))) for _ in range(layers)
    ]


def held(pool, row):
    """The one number that the keys and values of a row consist of."""
    place = slice(pool.firsts[row], pool.firsts[row] + pool.lengths[row])
    (number,) = {*pool.keys[:, :, place].unique().tolist(), *(-pool.values[:, :, place]).unique().tolist()}
    return number


def test_sources_of_a_pool_stay_where_they_are_while_others_come_and_go():
    pool = CrossPool(2, 3, 4, torch.zeros(1), frames=16)
    before = pool.keys
    assert [pool.add(frames, parts(frames, frames)) for frames in (6, 3, 5)] == [0, 1, 2]
    assert pool.drop(1) == 2  # the last row gets its number
    assert [held(pool, row) for row in range(2)] == [6, 5]
    assert pool.add(4, parts(4, 4)) == 2  # the gap is too short: it does not fit anywhere
    assert pool.keys is not before
    grown = pool.keys
    assert pool.add(3, parts(3, 3)) == 3
    assert pool.firsts == [0, 9, 14, 6]
    assert [held(pool, row) for row in range(4)] == [6, 5, 4, 3]
    assert pool.drop(3) == 3
    with pytest.raises(RuntimeError):  # the keys of a layer are too short
        pool.add(3, [*parts(3, 8, layers=1), *parts(2, 8, layers=1)])
    assert pool.lengths == [6, 5, 4]
    for _ in range(3):
        pool.drop(0)
    assert (pool.lengths, pool.firsts) == ([], [])
    assert pool.keys is grown


@pytest.mark.parametrize("name", marked([*MODELS, *VARIANTS], ["marian", "t5"]))
def test_logits_are_those_of_transformers_on_trees_for_sources_of_mixed_lengths(name):
    lm = lm_of(name)
    assert lm.engine == "gpu"
    assert not lm.supports_runs
    if DEVICE == "cuda":
        check_turns(lm, lm.model)
    else:
        check_turns(lm, lm.model, turns=1, lengths=(1, 3, 7))
    assert lm.runner.cross.lengths == []


@ON_GPU
def test_a_decoder_without_its_encoder_has_the_logits_of_transformers():
    target = lm_of("whisper")
    torch.manual_seed(2)
    model = WhisperForCausalLM(target.model.config).eval().to(DEVICE)
    lm = EncoderDecoderLM(model, chunk=5, encoder=target.encoder, engine="gpu")
    assert lm.engine == "gpu"
    check_turns(lm, model)


@pytest.mark.parametrize("name", marked(MODELS, ["m2m_100"]))
def test_long_texts_have_the_logits_of_the_compiled_forward(name):
    """Far beyond the distances that T5 tells apart, and with padding, which has no position in M2M100."""
    setting = "max_target_positions" if name == "whisper" else "max_position_embeddings"
    longer = {} if "t5" in name else {setting: 256}
    lm = lm_of(name, **longer)
    host = EncoderDecoderLM(model_of(name, **longer))
    text = random_text(np.random.default_rng(3), lm, 180 if DEVICE == "cuda" else 7)
    text[3] = text[-1] = PAD
    (source, *_) = state_sources()
    assert spreads_off(last_row(lm, text, source), last_row(host, text, source)) < CLOSE
    if DEVICE == "cuda":
        check_scores_forests(lm)


def test_distances_beyond_the_last_have_its_bias():
    lm = lm_of("t5 near", relative_attention_max_distance=6)
    text = random_text(np.random.default_rng(3), lm, 9)
    (source, *_) = state_sources()
    expected = plain_logits(Reading(lm.model, source), [text])[0]
    assert spreads_off(last_row(lm, text, source), expected) < CLOSE
    ranges = lm.runner.limits.ranges
    assert (ranges[0], len({*ranges.tolist()})) == (1, lm.runner.decoder.layers[0].scores.biases.shape[1])


@ON_GPU
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", ["marian", "whisper", "t5", "mt5"])
def test_rounded_weights_have_the_logits_of_the_same_weights_in_float32(name, kind):
    lm = EncoderDecoderLM(model_of(name).to(DEVICE, kind), engine="gpu")
    twin = model_of(name).to(kind).float()
    text = random_text(np.random.default_rng(3), lm, 12)
    for source in state_sources():
        expected = plain_logits(Reading(twin, source), [text])[0]
        found = last_row(lm, text, source).float().cpu()
        assert (found - expected).std() < (0.01 if kind == torch.float16 else 0.08) * expected.std()


QUICK_MISTAKES = {("marian", 1), ("t5", 11)}


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        pytest.param(*one, marks=() if (one[0], number) in QUICK_MISTAKES else ON_GPU)
        for number, one in enumerate(MISTAKES)
    ],
)
def test_each_thing_that_a_family_has_counts(name, mistake, monkeypatch):
    """A forward that forgets one of them is off by more than the tests above allow."""
    text = np.random.default_rng(7).integers(2, VOCAB, 40 if DEVICE == "cuda" else 6).tolist()
    (source, *_) = state_sources()
    lm = lm_of(name)
    expected = plain_logits(Reading(lm.model, source), [text])[0]
    if DEVICE == "cuda":
        assert spreads_off(last_row(lm, text, source), expected) < CLOSE
    right = gpu.architecture_of
    monkeypatch.setattr(gpu, "architecture_of", lambda model: mistake(right(model)))
    assert spreads_off(last_row(lm_of(name), text, source), expected) > 5 * CLOSE


def test_graphs_stay_until_the_buffers_of_sources_move(monkeypatch):
    lm = lm_of("bart")
    runner = lm.runner
    lm.reserve(4, 64)
    runner.cross = runner.decoder.sources = CrossPool(2, 4, 8, runner.decoder.embedding, frames=18)
    cleared = []
    monkeypatch.setattr(runner.graphs, "clear", lambda: cleared.append(len(runner.cross.lengths)))
    room = runner.cross.keys.shape[2]
    generator = torch.Generator().manual_seed(3)
    given = [Source.of_states(torch.randn(frames, 32, generator=generator)) for frames in (room - 9, 5, 4, 1)]
    text = [3, 4, 5]
    seats = seats_of(lm, lm.model, [text] * 3, given[:3])
    lm.extend(seats, [Forest.rooted([5])] * 3)
    assert cleared == []
    last = seat(text, context={lm: given[3]})
    lm.extend([last], [Forest.rooted([5])])
    assert cleared == [4]
    lm.close(seats.pop(1))
    assert runner.cross.lengths == [room - 9, 1, 4], "the last row has moved"
    seats.append(last)
    for one, scored in zip(seats, lm.extend(seats, [Forest.rooted([5]).grown([7], [0])] * 3), strict=True):
        expected = plain_logits(Reading(lm.model, one.context[lm]), [[*text, 7]])[0]
        assert spreads_off(scored.logits[-1].float().cpu(), expected) < CLOSE
        lm.close(one)
    assert runner.cross.keys.shape[2] > room, "it keeps its buffers, as graphs read them"


@pytest.mark.skipif(
    not compiling.AVAILABLE or DEVICE == "cuda", reason="loops are compiled; on a GPU they meet the driver"
)
@pytest.mark.parametrize("name", [pytest.param("marian", marks=pytest.mark.slow), "t5"])
def test_loops_run_passes_and_searches_find_the_tokens_of_the_plain_engine(name, monkeypatch):
    """One source after the other, of different lengths, by the steps that launch graphs."""
    model = model_of(name)
    engines = [EncoderDecoderLM(model, engine=engine) for engine in ("plain", "gpu")]
    host, there = (Pair(model, None, None, lm, None) for lm in engines)
    driver = StepByStep(there.target.runner)
    monkeypatch.setattr(there.target.runner.graphs, "captured_for_steps", driver.captured_for_steps)
    for source in sources(name, 2):
        options = {"max_new_tokens": 4, "eos_token_id": []}
        found, expected = (sb.generate(pair, source, sb.beam_search(2), **options)[0] for pair in (there, host))
        assert found.tokens == expected.tokens
    assert driver.launched > 2


def test_what_it_does_not_have_is_refused():
    lm = lm_of("t5")
    source, *_ = state_sources()
    one = seat([3, 4], context={lm: source})
    with pytest.raises(NotSupported, match=r"reads sources.*hidden states"):
        lm.extend([one], [Forest.rooted([4])], [Needs(hidden=True)])
    with pytest.raises(NotSupported, match="needs a source for each prompt"):
        lm.extend([seat([3, 4])], [Forest.rooted([4])])
    with pytest.raises(NotSupported, match="the context is dict"):
        lm.extend([seat([3, 4], context={lm: {}})], [Forest.rooted([4])])
    mixed = model_of("t5").half()
    mixed.decoder.block[0].layer[2].DenseReluDense.wo.float()  # as transformers loads T5 in float16
    with pytest.raises(NotSupported, match=r"its decoder are in torch\.float16 and torch\.float32"):
        EncoderDecoderLM(mixed.to(DEVICE), engine="gpu")
    with pytest.raises(NotSupported, match="more than 255 ranges of distances"):
        EncoderDecoderLM(model_of("t5", relative_attention_num_buckets=300).to(DEVICE), engine="gpu")


@ON_GPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["marian", "t5"])
def test_a_captured_pass_reads_whatever_source_the_session_has(name, kind):
    model = model_of(name).to(DEVICE, kind)
    captured, plain = (EncoderDecoderLM(model, engine="gpu") for _ in range(2))
    plain.runner.graphs.capture = None
    plain.runner.graphs.steps_can_launch = False
    forest = Forest.rooted([8]).grown([1, 2, 3], [0, 0, 1])
    generator = torch.Generator().manual_seed(3)
    graphs = captured.runner.graphs
    known = []
    for frames in (9, 40, 1, 200, 3, 64):
        source = Source.of_states(torch.randn(frames, 32, generator=generator))
        rows = []
        for lm in (captured, plain):
            one = seat([5, 6, 7, 8], context={lm: source})
            rows.append(lm.extend([one], [forest])[0].logits.clone())
            lm.close(one)
        assert torch.equal(*rows)
        known.append((graphs.step_graphs.copy(), [graph for graph in graphs.graphs.made.values() if graph]))
    assert known[2] == known[-1], "a length of a source captures nothing"
    assert any(known[-1])
    batch = [(Source.of_states(torch.randn(frames, 32, generator=generator))) for frames in (7, 90, 30)]
    for _ in range(3):
        rows = []
        for lm in (captured, plain):
            seats = [seat([5, 6, 7, 8], context={lm: source}) for source in batch]
            rows.append(torch.cat([one.logits for one in lm.extend(seats, [forest] * 3)]))
            for one in seats:
                lm.close(one)
        assert torch.equal(*rows)
        batch = batch[1:] + batch[:1]


@ON_GPU
@pytest.mark.parametrize("name", ["marian", "bart", "pegasus", "m2m_100", "whisper", "t5", "mt5"])
def test_methods_find_and_draw_on_a_gpu_what_they_do_on_a_cpu(name):
    fewer = {"num_decoder_layers": 1} if "t5" in name else {"decoder_layers": 1}
    host = sb.load(model_of(name), model_of(name, **fewer))
    models = [model_of(name).to(DEVICE), model_of(name, **fewer).to(DEVICE)]
    there = Pair(*models, None, *(EncoderDecoderLM(model, engine="gpu") for model in models))
    given = sources(MODELS[name][0], 4)
    options = {"max_new_tokens": 16, "eos_token_id": [5], "seed": 4}
    for method in (sb.beam_search(4), sb.speculative_beam_search(4, depth=3), sb.dsbd(3, 4, 2, "fixed"), sb.sampling()):
        for some in (given, given[:1]):
            texts = [[one.tokens for one in sb.generate(pair, some, method, **options)] for pair in (host, there)]
            assert texts[0] == texts[1], method


@pytest.mark.parametrize(
    "what",
    marked(
        ["offset", "logits bias", "cross bias", "length of the source", "positions of the tree"],
        quick=["length of the source", "positions of the tree"],
    ),
)
def test_what_is_no_setting_of_a_family_counts_too(what):
    lm = lm_of("t5" if what == "positions of the tree" else "bart")
    decoder = lm.runner.decoder
    text = [7, 9, 4]
    (source, *_) = state_sources()
    if what == "offset":
        decoder.places = lm.model.model.decoder.embed_positions.weight
    elif what == "logits bias":
        decoder.logits_bias = decoder.logits_bias[:0]
    elif what == "cross bias":
        decoder.layers = [replace(one, source=replace(one.source, both_bias=None)) for one in decoder.layers]
    one = seat(text, context={lm: source})
    lm.extend([one], [Forest.rooted([4])])
    if what == "length of the source":
        lm.runner.cross.lengths[0] = 4  # one frame less than it has
    elif what == "positions of the tree":
        one.state[lm].trie.arrays.slot_position[1:3] += 7
    (found,) = lm.extend([one], [Forest.rooted([4]).grown([5], [0])])
    expected = plain_logits(Reading(lm.model, source), [[*text, 5]])[0]
    assert spreads_off(found.logits[-1].float().cpu(), expected) > 5 * CLOSE
    lm.close(one)
