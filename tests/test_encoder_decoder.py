"""Encoder-decoder models: texts that depend on a source, which is read and stored once."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from transformers import WhisperForCausalLM

import specbeam as sb
from specbeam import errors
from specbeam.core import compiling
from specbeam.core.decode import Decoder, decode
from specbeam.core.forest import Forest
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.engines.cache_names import cache_of
from specbeam.engines.source import Source
from specbeam.models import engines
from specbeam.models.pair import load
from tests.support import words
from tests.support.exact import beam_sampling_law, distance, exact_law
from tests.support.programs import random_table, session_of, texts
from tests.support.tiny_models import tiny
from tests.support.tiny_sources import (
    ENDS,
    FAMILIES,
    FRAMES,
    MELS,
    PAD,
    VOCAB,
    SourceTable,
    searched,
    sources,
    tiny_reader,
)
from tests.test_laws_on_models import p_value


def pair_of(family, attention=None, **changes):
    return sb.load(
        tiny_reader(family, attention, **changes), tiny_reader(family, attention, seed=1, layers=1, **changes)
    )


def plain_pair_of(monkeypatch, family, attention=None):
    """The same, run by transformers' forward."""
    by_name = {kind.name: kind for kind in engines.ENGINES_FOR_SOURCES}
    with monkeypatch.context() as patch:
        waiting = by_name["compiled"]._replace(waits=lambda model: "it waits in this test")
        patch.setattr(engines, "ENGINES_FOR_SOURCES", (waiting, by_name["plain"]))
        return pair_of(family, attention)


@pytest.fixture(scope="module")
def translator():
    return pair_of("bart")


@pytest.fixture(scope="module")
def listener():
    return pair_of("whisper")


def check_searches(pair, given, **options):
    """Both searches, all sources in one batch, against transformers' search of each source alone."""
    ours = Settings.given(options)
    theirs = [searched(pair.target_model, source, **options) for source in given]
    wanted = ours.num_return_sequences
    for method in (sb.beam_search(4), sb.speculative_beam_search(4, depth=3)):
        found = sb.generate(pair, given, method, **({"eos_token_id": ENDS} | options))
        assert len(found) == wanted * len(given)
        for number, (tokens, scores) in enumerate(theirs):
            mine = found[number * wanted : (number + 1) * wanted]
            assert [one.tokens for one in mine] == tokens
            for one, text, score in zip(mine, tokens, scores, strict=True):
                beam = next(beam for beam in one.beams if beam.tokens == text)
                # Sums of logits that were scaled up, which negative length penalties multiply.
                assert beam.score == pytest.approx(score, abs=2e-4, rel=1e-4)
    return theirs


FORMS = [(1.0, False), (1.0, True), (0.6, "never"), (2.0, "never"), (-0.5, False)]


def engine_of(family):
    """The engine that "auto" takes for a family."""
    return "compiled" if compiling.AVAILABLE and family != "blenderbot" else "plain"


@pytest.mark.parametrize("engine", ["auto", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_searches_find_the_beams_of_transformers_for_sources_of_mixed_lengths(family, engine, monkeypatch):
    """In one batch, so that sources are padded; with several end tokens."""
    pair = pair_of(family) if engine == "auto" else plain_pair_of(monkeypatch, family)
    assert pair.target.engine == pair.draft.engine == (engine_of(family) if engine == "auto" else "plain")
    number = list(FAMILIES).index(family)
    penalty, stopping = FORMS[number % len(FORMS)]
    check_searches(pair, sources(family), max_new_tokens=10, length_penalty=penalty, early_stopping=stopping)
    assert pair.target.runner.cross.lengths == pair.draft.runner.cross.lengths == []


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_searches_find_the_beams_of_transformers_with_every_form_of_stopping(family, attention):
    pair = pair_of(family, attention)
    for penalty, stopping in FORMS:
        options = {"length_penalty": penalty, "early_stopping": stopping, "max_new_tokens": 20}
        check_searches(pair, sources(family, 5), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 3},
        {"forced_bos_token_id": 17, "forced_eos_token_id": 2, "min_length": 6, "early_stopping": True},
        {"suppress_tokens": [20, 21, 22, 30], "begin_suppress_tokens": [2, 5, 9, 31], "no_repeat_ngram_size": 2},
        {"renormalize_logits": True, "bad_words_ids": [[PAD], [7]], "early_stopping": "never", "length_penalty": 0.8},
        {"prompt": [2, 33, 34]},
    ],
    ids=["return sequences", "forced", "suppressed", "renormalised", "decoder prompt"],
)
def test_settings_mean_what_they_mean_in_transformers(translator, options):
    options = {"max_new_tokens": 9} | options
    prompt = options.pop("prompt", None)
    if prompt is None:
        check_searches(translator, sources("bart"), **options)
        return
    given = sources("bart")
    ours = sb.generate(translator, given, sb.beam_search(4), eos_token_id=ENDS, decoder_input_ids=prompt, **options)
    for source, one in zip(given, ours, strict=True):
        assert [one.tokens] == searched(translator.target_model, source, prompt, **options)[0]


def test_the_models_own_config_gives_what_transformers_takes_from_it():
    model = tiny_reader("bart")
    config = model.generation_config
    config.update(forced_bos_token_id=17, forced_eos_token_id=2, max_length=9, decoder_start_token_id=8, min_length=5)
    source = sources("bart")[1]
    theirs = model.generate(torch.tensor([source]), num_beams=4, do_sample=False)[0].tolist()
    (ours,) = sb.generate(sb.load(model), source, sb.beam_search(4))
    assert theirs[0] == 8
    assert ours.tokens == theirs[1:]
    assert ours.tokens[0] == 17
    assert ours.tokens[-1] == 2


@pytest.mark.parametrize("family", ["bart", "m2m_100", "t5", "whisper"])
def test_drafts_change_no_text_of_a_seed_and_neither_does_the_batch(family):
    pair = pair_of(family)
    given = sources(family)
    options = {"max_new_tokens": 8, "seed": 5, "eos_token_id": ENDS}
    plain = sb.generate(pair, given, sb.beam_sampling(4), **options)
    drafted = sb.generate(pair, given, sb.dsbd(4, 6, 3, "fixed"), **options)
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    (alone,) = sb.generate(pair, [given[1]], sb.dsbd(4, 6, 3, "fixed"), **options)
    assert alone.tokens == drafted[1].tokens
    assert len({tuple(one.tokens) for one in drafted}) > 1


METHODS = [
    sb.sampling(),
    sb.speculative_sampling(3),
    sb.dsbd(3, 4, 2, "dynamic"),
    sb.dsbd(3, 4, 2, "fixed", coupling="rejection"),
    sb.rsd_s(),
    sb.traversal(),
    sb.block_verification(),
    sb.specinfer(),
    sb.prompt_lookup(),
    sb.suffix_match(),
    sb.token_recycling(),
    sb.mtad(),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_that_draws_reads_the_source(translator, method):
    """At temperature 0 all of them write the greedy text of each source, or beams at least as likely."""
    given = sources("bart", 2)
    options = {"max_new_tokens": 6, "eos_token_id": []}
    if method.name in ("mtad", "dsbd"):
        answers = sb.generate(translator, given, method, seed=1, **options)
        assert answers[0].tokens != answers[1].tokens
        return
    greedy = sb.generate(translator, given, sb.greedy(), **options)
    found = sb.generate(translator, given, method, temperature=0, **options)
    assert [one.tokens for one in found] == [one.tokens for one in greedy]


def test_samples_of_a_prompt_read_one_source_and_a_batch_frees_what_it_read(translator):
    given = sources("bart", 2)
    options = {"max_new_tokens": 5, "num_return_sequences": 3, "eos_token_id": []}
    request = Request.of(translator, given, sb.sampling(), Settings.given(options), 3)
    decoder = Decoder(translator.target)
    for session in request.sessions:
        decoder.add(session)
    decoder.step()
    cross = translator.target.runner.cross
    assert sorted(cross.lengths) == sorted(len(source) for source in given)
    assert {translator.target.frames_of(session) for session in request.sessions} == {*cross.lengths}
    assert translator.target.slot_bytes == 2 * 2 * 32 * 4  # keys and values of two layers, 32 numbers of 4 bytes
    decoder.cancel(request.sessions[0])
    assert len(cross.lengths) == 2
    while decoder.busy:
        decoder.step()
    assert cross.lengths == []
    assert all(not source.states for session in request.sessions for source in session.context.values())
    drawn = [request.answers(session)[0].tokens for session in request.sessions[1:]]
    again = sb.generate(translator, given, sb.sampling(), seed=3, **options)
    assert [one.tokens for one in again][1:] == drawn
    assert len({tuple(text) for text in drawn}) > 2


def test_sources_can_be_dropped_where_decoding_broke(translator):
    (session,) = Request.of(translator, [[3, 4]], sb.greedy(), Settings(max_new_tokens=4), 3).sessions
    decoder = Decoder(translator.target)
    decoder.add(session)
    decoder.step()
    decoder.close()
    for lm in (translator.target, translator.draft):
        lm.drop_sources()
        assert (lm.runner.cross.lengths, lm.runner.readers, lm.caches) == ([], [], [])


def test_a_source_that_could_not_be_read_leaves_nothing_behind(translator, monkeypatch):
    lm = translator.target
    source = Source.of_tokens([3, 4])
    owner = SimpleNamespace(prompt=[2], state={}, context={lm: source})
    with monkeypatch.context() as patch:
        patch.setattr(lm, "encoder", torch.nn.Linear(1, 1))
        with pytest.raises(TypeError):
            lm.extend([owner], [Forest.rooted([2])])
    assert (owner.state, lm.caches, lm.runner.readers) == ({}, [], [])
    found = lm.extend([owner], [Forest.rooted([2])])[0].logits
    assert found.shape == (1, lm.vocab)
    lm.close(owner)
    assert lm.runner.cross.bytes == 0


def test_sources_that_end_at_different_times_stay_where_their_sessions_look(translator):
    """Rows of sources move when others are freed: some texts have one token, others ten."""
    given = sources("bart", 5)
    ends = {
        tuple(source): sb.generate(translator, source, sb.greedy(), max_new_tokens=1)[0].tokens[0] for source in given
    }
    options = {"max_new_tokens": 10, "eos_token_id": [ends[tuple(given[0])], ends[tuple(given[3])]]}
    together = sb.generate(translator, given, sb.greedy(), **options)
    for source, one in zip(given, together, strict=True):
        (alone,) = sb.generate(translator, source, sb.greedy(), **options)
        assert one.tokens == alone.tokens
    assert len({len(one.tokens) for one in together}) > 1


def stored_bytes(beams):
    """The bytes of stored sources while one source of 1,500 frames is decoded, and of transformers' cache for it."""
    model = tiny_reader("whisper", max_source_positions=1500, decoder_layers=2, d_model=128)
    pair = sb.load(model)
    features = torch.randn(MELS, 3000, generator=torch.Generator().manual_seed(1))
    settings = Settings.given({"max_new_tokens": 4, "eos_token_id": []})
    (session,) = Request.of(pair, features, sb.beam_search(beams), settings, 0).sessions
    decoder = Decoder(pair.target)
    decoder.add(session)
    most = 0
    while decoder.busy:
        decoder.step()
        most = max(most, pair.target.runner.cross.bytes)
    return most, model, features


def test_sixteen_beams_store_a_source_of_1500_frames_once_and_transformers_sixteen_times():
    once, model, features = stored_bytes(beams=16)
    by_hand = 2 * 2 * 1500 * 128 * 4  # keys and values of two layers, 1,500 frames of 128 numbers of 4 bytes
    assert by_hand <= once < 1.01 * by_hand  # the compiled forward stores whole panels of frames
    seen = []

    def look(module, given, named, output):
        layers = cache_of(output).cross_attention_cache.layers
        seen.append(sum(one.numel() * one.element_size() for layer in layers for one in (layer.keys, layer.values)))

    handle = model.register_forward_hook(look, with_kwargs=True)
    searched(model, features, num_beams=16, max_new_tokens=3)
    handle.remove()
    assert seen[-1] == 16 * by_hand


# Drafts.


def test_a_draft_whose_encoder_is_the_targets_shares_what_it_makes(listener, monkeypatch):
    target = listener.target_model
    draft = tiny_reader("whisper", seed=1, layers=1)
    draft.model.encoder.load_state_dict(target.model.encoder.state_dict())
    pair = sb.load(target, draft)
    assert pair.draft.encoder is pair.target.encoder
    heard = []
    read = getattr(pair.target.encoder, "read", None)
    if read is None:  # transformers' encoder
        handle = pair.target.encoder.register_forward_hook(lambda *given: heard.append(1))
    else:
        monkeypatch.setattr(
            pair.target.encoder, "read", lambda windows: heard.extend([1] * len(windows)) or read(windows)
        )
    other = draft.model.encoder.register_forward_hook(lambda *given: heard.append(2))
    options = {"max_new_tokens": 8, "eos_token_id": []}
    drafted = sb.generate(pair, sources("whisper", 2), sb.speculative_beam_search(3, depth=2), **options)
    if read is None:
        handle.remove()
    other.remove()
    assert heard == [1, 1]
    plain = sb.generate(listener, sources("whisper", 2), sb.beam_search(3), **options)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_a_decoder_without_an_encoder_drafts_for_a_model_that_has_one(listener):
    torch.manual_seed(2)
    draft = WhisperForCausalLM(tiny_reader("whisper", layers=1).config).eval()
    pair = sb.load(listener.target_model, draft)
    options = {"max_new_tokens": 8, "eos_token_id": []}
    drafted = sb.generate(pair, sources("whisper", 2), sb.dsbd(3, 4, 2, "fixed"), seed=4, **options)
    plain = sb.generate(listener, sources("whisper", 2), sb.beam_sampling(3), seed=4, **options)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    with pytest.raises(errors.NotSupported, match="is a decoder without an encoder; it can only draft"):
        sb.load(draft)


def test_a_causal_model_that_sees_no_source_may_draft(translator):
    pair = sb.load(translator.target_model, tiny("llama", vocab_size=VOCAB))
    options = {"max_new_tokens": 6, "eos_token_id": [], "seed": 2}
    drafted = sb.generate(pair, sources("bart", 2), sb.dsbd(3, 4, 2, "fixed"), **options)
    plain = sb.generate(translator, sources("bart", 2), sb.beam_sampling(3), **options)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_a_model_that_drafts_for_itself_has_a_cache_of_its_own(translator):
    pair = sb.load(translator.target_model, translator.target_model)
    assert pair.draft is not pair.target
    found = sb.generate(pair, sources("bart", 1), sb.speculative_beam_search(3, depth=3), max_new_tokens=8)
    plain = sb.generate(translator, sources("bart", 1), sb.beam_search(3), max_new_tokens=8)
    assert found[0].tokens == plain[0].tokens
    assert found[0].report.target_passes < plain[0].report.target_passes


@pytest.mark.parametrize("method", [sb.prompt_lookup(3), sb.suffix_match(3)], ids=lambda method: method.name)
def test_drafts_without_a_model_are_copied_from_the_source(translator, method):
    """A text that is made to repeat its source takes fewer passes than it has tokens; one of another vocabulary does not."""
    source = [7, 30, 31, 32, 33, 34, 35, 36, 37]

    def copying(ids, scores):
        wanted = source[1:][ids.shape[1] - 1]
        return scores.where(torch.arange(scores.shape[1]) == wanted, -torch.inf)

    options = {"max_new_tokens": 8, "eos_token_id": [], "logits_processor": [copying], "temperature": 0}
    (copied,) = sb.generate(translator, [source], method, **options)
    assert copied.tokens == source[1:]
    assert copied.report.target_passes < 6
    marian = sb.load(tiny_reader("marian", share_encoder_decoder_embeddings=False, decoder_vocab_size=VOCAB))
    (alone,) = sb.generate(marian, [source], method, **options)
    assert alone.tokens == source[1:]
    assert alone.report.target_passes == 8


# What is refused.


def test_what_cannot_read_a_source_is_refused_by_name(translator, tmp_path):
    target = translator.target_model
    for options, message in (
        ({"draft": "swift"}, "skipping sublayers needs a decoder-only target, and BartForConditionalGeneration has"),
        ({"draft": "mtp"}, "the draft head mtp needs a decoder-only target"),
        ({"compile": True}, "compile=True needs a decoder-only model"),
    ):
        with pytest.raises(errors.NotSupported, match=message):
            sb.load(target, **options)
    with pytest.raises(errors.NotSupported, match="reads sources, and the target LlamaForCausalLM continues prompts"):
        sb.load(tiny("llama"), target)
    with pytest.raises(errors.BadSetting, match="share_from is for long prompts"):
        sb.load(target, share_from=10)
    pair = load(target)
    for call, message in (
        (lambda: sb.generate(pair, [3, 4], sb.swift()), "swift skips sublayers of decoder-only"),
        (lambda: sb.hmt(pair), "a model with memory continues prompts"),
        (lambda: pair.forgetful_target, "this operation needs a decoder-only model"),
        (lambda: sb.lite_search(pair, "a", lambda texts: [0.5] * len(texts)), "a search over steps continues prompts"),
    ):
        with pytest.raises(errors.NotSupported, match=message):
            call()


def test_a_decoder_that_looks_positions_up_in_an_unknown_way_is_refused():
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model("pegasus_x", **FAMILIES["pegasus"], block_size=4, num_global_tokens=2)
    with pytest.raises(errors.UnsupportedModel, match="looks up positions in an unsupported way"):
        sb.load(AutoModelForSeq2SeqLM.from_config(config))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 0 is empty"),
        (
            [*range(3, 60), *range(3, 20)],
            "has 74 tokens, and the encoder of BartForConditionalGeneration has 64 positions",
        ),
        ([3, 99], "has token id 99; the model's vocabulary is 0 to 60"),
        ("text", "there is no tokenizer"),
    ],
)
def test_sources_that_the_encoder_cannot_read_are_refused(translator, prompt, message):
    with pytest.raises(errors.BadPrompt, match=message):
        sb.generate(translator, [prompt], sb.beam_search(2))


def test_a_source_made_by_hand_that_is_too_long_is_refused_before_the_encoder_reads_it(translator):
    with pytest.raises(errors.BadPrompt, match="has 74 tokens, and the encoder"):
        sb.generate(translator, [Source.of_tokens([5] * 74)], sb.beam_search(2))


def test_features_that_do_not_fit_are_refused(listener):
    for features, message in (
        ([3, 4], rf"prompt 0 is list; .* reads features, float\[{MELS}, {FRAMES}\]"),
        (torch.zeros(MELS, 7), rf"has the shape \[{MELS}, 7\]"),
        (torch.full((MELS, FRAMES), torch.nan), "not finite"),
    ):
        with pytest.raises(errors.BadPrompt, match=message):
            sb.generate(listener, [features], sb.greedy(), max_new_tokens=2)


def test_settings_that_do_not_fit_are_refused(translator):
    for options, message in (
        ({"decoder_input_ids": [[2], [2]]}, "has 2 prompts, and there are 1 sources"),
        ({"decoder_input_ids": [99]}, "the decoder.s first tokens include 99"),
        ({"suppress_tokens": [99]}, "suppress_tokens holds 99; the model's vocabulary is 0 to 60"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id is -1"),
        ({"decoder_input_ids": []}, "a list of token ids, or one such list for each source"),
    ):
        with pytest.raises(errors.BadSetting, match=message):
            sb.generate(translator, [[3, 4]], sb.beam_search(2), **options)
    with pytest.raises(errors.NotSupported, match="decoder_input_ids is for encoder-decoder models"):
        sb.generate(sb.load(tiny("llama")), [[3, 4]], sb.greedy(), decoder_input_ids=[3])
    with pytest.raises(errors.BadPrompt, match="may get 70 new tokens, but the model has 64 positions"):
        sb.generate(translator, [[3, 4]], sb.greedy(), max_new_tokens=70)


def test_the_model_is_left_as_it_was(translator):
    """Outside of passes of ours its decoder looks positions up by itself, and a session that fails leaves no source."""
    source = sources("bart", 1)[0]
    before = searched(translator.target_model, source, max_new_tokens=6)
    sb.generate(translator, source, sb.beam_search(3), max_new_tokens=4)
    assert searched(translator.target_model, source, max_new_tokens=6) == before
    assert "forward" not in vars(translator.target_model.model.decoder.embed_positions)
    assert load(translator.target_model).target is translator.target

    def broken(ids, scores):
        raise RuntimeError("broken on purpose")

    with pytest.raises(errors.BrokenProcessor):
        sb.generate(translator, source, sb.beam_search(3), logits_processor=[broken], max_new_tokens=4)
    assert translator.target.runner.cross.lengths == []
    assert translator.target.runner.cross.bytes == 0  # the buffers go with the last source


# Other doors.


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_custom_generate_function_writes_what_generate_writes(family):
    """Padded sources in a batch, a draft with an encoder of its own, several return sequences, scores."""
    model = tiny_reader(family)
    draft = tiny_reader(family, seed=1, layers=1)
    given = sources(family)
    longest = max(map(len, given))
    ids = torch.tensor([[*source, *[PAD] * (longest - len(source))] for source in given])
    mask = (ids != PAD).long()
    options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 7, "eos_token_id": ENDS}
    inputs = {"input_ids": ids, "attention_mask": mask, **options}
    theirs = model.generate(**inputs, return_dict_in_generate=True, output_scores=True)
    for more in ({}, {"draft_model": draft, "sources": ids, "depth": 2}):
        ours = model.generate(**inputs, custom_generate=sb.hf.beam_search, return_dict_in_generate=True, **more)
        assert torch.equal(ours.sequences, theirs.sequences[:, : ours.sequences.shape[1]])
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=2e-4, rtol=0)
    with pytest.raises(errors.NotSupported, match="has its own encoder, and generate passes only"):
        model.generate(**inputs, custom_generate=sb.hf.beam_search, draft_model=draft)


def test_depths_and_methods_are_chosen_by_what_passes_over_a_source_cost(translator):
    (one,) = sb.generate(translator, sources("bart", 1), sb.dsbd(3), max_new_tokens=5, seed=1)
    (plain,) = sb.generate(translator, sources("bart", 1), sb.beam_sampling(3), max_new_tokens=5, seed=1)
    assert one.tokens == plain.tokens
    assert translator.target.runner.cross.lengths == []


def reading_words(tmp_path, **changes):
    """A saved T5 with the tokenizer of the tests."""
    model = tiny_reader("t5", vocab_size=len(words.tokenizer()), **changes)
    model.save_pretrained(tmp_path)
    words.tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def test_texts_go_in_and_come_out(tmp_path, capsys, monkeypatch):
    folder = reading_words(tmp_path)
    pair = sb.load(folder)
    (one,) = sb.generate(pair, "abc", sb.beam_search(2), max_new_tokens=6)
    assert one.text == pair.tokenizer.decode(one.tokens, skip_special_tokens=True)
    assert "".join(sb.stream(pair, "abc", sb.beam_search(2), max_new_tokens=6)) == one.text
    from specbeam.doors.cli.main import main

    for arguments, code in (
        (["generate", "-m", folder, "--method", "beam_search", "-s", "beams=2", "--max-new-tokens", "6", "abc"], 0),
        (["generate", "-m", folder, "--method", "greedy", "--target-language", "fra", "abc"], 2),
        (["bench", "-m", folder], 2),
    ):
        monkeypatch.setattr("sys.argv", ["specbeam", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert (ended.value.code or 0) == code, shown.err
        if code == 0:
            assert shown.out == f"{one.text}\n"


# Laws.


def law_beside_another_source(method, seeds, beams, steps):
    """The law of the texts of source 0, decoded in one batch with those of source 1, whose chance is fixed."""
    tables = [random_table(seed, 2) for seed in (1, 2)]
    drafts = [random_table(seed, 2) for seed in (3, 4)]

    def program(dice):
        target = SourceTable(lambda source, path: tables[source](path), 2)
        draft = SourceTable(lambda source, path: drafts[source](path), 2)
        sessions = []
        for number in (0, 1):
            session = session_of(method, draft, dice if number == 0 else None, steps, (), key=7)
            session.context = {target: seeds[number], draft: seeds[number]}
            sessions.append(session)
        for _ in decode(target, sessions):
            pass
        assert all(session.failure is None for session in sessions)
        return texts(sessions[0])

    return exact_law(program), beam_sampling_law(tables[0], beams, steps, replacement=False)


@pytest.mark.parametrize(
    ("method", "beams"),
    [(sb.dsbd(2, 2, 1, "fixed", coupling="rejection"), 2), (sb.speculative_sampling(2), 1), (sb.specinfer((2, 1)), 1)],
    ids=["dsbd", "chain", "tree"],
)
def test_texts_have_the_law_of_their_own_source_in_a_batch_with_another(method, beams):
    found, expected = law_beside_another_source(method, (0, 1), beams, 2)
    assert distance(found, expected) < 1e-12
    wrong, expected = law_beside_another_source(method, (1, 0), beams, 2)  # each reads what the other should
    assert distance(wrong, expected) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "marian"])
def test_texts_of_a_model_have_the_law_that_its_own_forward_gives_for_the_source(family):
    """Whole texts by frequency: two sources and four methods mixed in every batch."""
    small = {"vocab_size": 6, "eos_token_id": 5}
    pair = sb.load(tiny_reader(family, scale=1.5, **small), tiny_reader(family, seed=1, layers=1, scale=1.5, **small))
    methods = [sb.sampling(), sb.speculative_sampling(2), sb.rsd_s(3, 2), sb.traversal((2, 2))]
    given = [[3, 4], [4, 3, 2, 3, 4]]
    requests = [
        Request.of(pair, given * 200, method, Settings(max_new_tokens=3, eos_token_id=[5]), 40 + number)
        for number, method in enumerate(methods)
    ]
    line = [session for row in zip(*(request.sessions for request in requests), strict=True) for session in row]
    for _ in decode(pair.target, line, at_once=200):
        pass
    for number, source in enumerate(given):
        law = plain_law(pair.target_model, source, 3)
        for request in requests:
            drawn = [tuple(next(one.hypotheses()).tokens) for one in request.sessions[number::2]]
            assert p_value(Counter(drawn), law) > 1e-4


def plain_law(model, source, length):
    """Odds of every text about a source, by plain forwards."""
    law = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, odds in law.items():
            if text and text[-1] == 5:
                longer[text] = odds
                continue
            prompt = torch.tensor([[model.config.decoder_start_token_id, *text]])
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([source]), decoder_input_ids=prompt).logits[0, -1]
            for token, chance in enumerate(logits.double().softmax(-1).tolist()):
                longer[(*text, token)] = odds * chance
        law = longer
    return law
