"""Models with memory by the doors that users have: real engines, recipes, batches, folders, and what is refused."""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

import specbeam as sb
from specbeam.core.forest import Forest
from specbeam.core.records import Needs, Shape
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import BadHead, BadSetting, MissingFile, NotSupported
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.live_layers import LiveLayers
from specbeam.models.memory.files import CONFIG, WEIGHTS, read_memory, save_memory
from specbeam.models.memory.lm import MemoryLM
from specbeam.models.memory.plan import MemoryPlan
from specbeam.models.memory.recall import new_recall
from specbeam.models.quantised import rounding_of
from specbeam.models.skipping import Skipping, skipping_model
from specbeam.recipes.catalogue import RECIPES
from tests.support.remembered import Naive, tiny_memory, tiny_remembering
from tests.support.tiny_models import tiny

PLAN = MemoryPlan(5, 2, 3, 0.5, "attention", "refresh")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1], [1, 6, 1, 8, 0]]


@pytest.fixture(scope="module")
def pair():
    """A target that the compiled forward runs, and a draft of the same tokens."""
    target, recall = tiny_remembering(double=False, seed=1)
    draft = tiny("llama", seed=2, vocab_size=11, bos_token_id=0, eos_token_id=10, pad_token_id=0)
    return sb.load(target, draft), recall, tiny_memory(draft)


def generated(pair, method, prompts=PROMPTS, **options):
    return sb.generate(pair, prompts, method, max_new_tokens=9, eos_token_id=[], **options)


def test_texts_are_those_of_the_definition_whatever_drafts(pair):
    """On the compiled forward, in a batch of prompts of all lengths, across the ends of segments."""
    loaded, recall, draft_recall = pair
    naive = Naive(loaded.target_model, recall, PLAN)
    expected = [naive.greedy(prompt, 9) for prompt in PROMPTS]
    plans = {
        "no draft model": (sb.greedy(), {}),
        "the whole text": (sb.speculative_sampling(3), {}),
        "a window": (sb.speculative_sampling(3), {"draft_window": 4}),
        "memory of its own": (sb.rsd_s(3, 2), {"draft_memory": (MemoryPlan(4, 1), draft_recall)}),
        "the prompt": (sb.prompt_lookup(3), {}),
    }
    for name, (method, options) in plans.items():
        remembering = sb.hmt(loaded, (PLAN, recall), **options)
        zero = {} if method.greedy else {"temperature": 0}
        answers = generated(remembering, method, **zero)
        assert [answer.tokens for answer in answers] == expected, name
        assert "read in segments of 5 tokens" in answers[0].report.law
    assert loaded.target.caches == []
    assert loaded.draft.caches == []


@dataclass(frozen=True)
class Seldom:
    """A controller that drafts in every twelfth turn only, so after more tokens than two segments of the draft hold."""

    largest = Shape(2, 2)

    def plan(self, session):
        drafts = session.count.target_passes % 12 == 0
        return Shape(min(2, session.remaining - 1) if drafts else 0, 2)

    def settle(self, session, turn):
        pass


def test_a_draft_with_memory_may_be_left_out_for_longer_than_a_segment(pair):
    loaded, recall, draft_recall = pair
    expected = [Naive(loaded.target_model, recall, PLAN).greedy(prompt, 30) for prompt in PROMPTS]
    remembering = sb.hmt(loaded, (PLAN, recall), draft_memory=(MemoryPlan(4, 1), draft_recall))
    method = sb.rsd_s(2, 2, controller=Seldom())
    options = {"max_new_tokens": 30, "eos_token_id": [], "temperature": 0}
    answers = sb.generate(remembering, PROMPTS, method, **options)
    assert [answer.tokens for answer in answers] == expected
    assert all(answer.report.draft_passes > 4 for answer in answers)
    assert loaded.draft.caches == []


def test_beams_in_a_batch_are_those_of_beam_sampling_one_by_one(pair):
    loaded, recall, _ = pair
    remembering = sb.hmt(loaded, (PLAN, recall))
    drafted = generated(remembering, sb.dsbd(3, depth=3), seed=5)
    for number, prompt in enumerate(PROMPTS):
        (alone,) = generated(remembering, sb.beam_sampling(3), [prompt], seed=5)
        assert [beam.tokens for beam in drafted[number].beams] == [beam.tokens for beam in alone.beams]
    assert loaded.target.caches == []


def test_a_draft_with_memory_drafts_for_a_target_without(pair):
    loaded, _, draft_recall = pair
    plain = generated(loaded, sb.greedy())
    drafted = generated(
        sb.hmt(loaded, draft_memory=(MemoryPlan(4, 2), draft_recall)), sb.speculative_sampling(3), temperature=0
    )
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert "segments" not in drafted[0].report.law
    assert loaded.draft.caches == []


@pytest.mark.parametrize("family", ["opt", "gemma"])
def test_rows_of_other_families_are_those_of_the_definition(family):
    """In float64, by transformers: learnt positions, and embeddings that the model scales."""
    model, recall = tiny_remembering(family=family, seed=3)
    pair = sb.load(model)
    naive = Naive(model, recall, PLAN)
    (answer,) = generated(sb.hmt(pair, (PLAN, recall)), sb.prompt_lookup(3), PROMPTS[:1], temperature=0)
    assert answer.tokens == naive.greedy(PROMPTS[0], 9)
    (drawn,) = generated(sb.hmt(pair, (PLAN, recall)), sb.beam_sampling(2), PROMPTS[:1], seed=1)
    for beam in drawn.beams:
        each = [naive.law([*PROMPTS[0], *beam.tokens[:place]])[token] for place, token in enumerate(beam.tokens)]
        assert beam.score == pytest.approx(sum(torch.tensor(each).log().tolist()) / len(each), abs=1e-9)


def test_rows_that_are_stored_do_not_grow_with_the_text(pair):
    loaded, recall, _ = pair
    remembering = sb.hmt(loaded, (PLAN, recall))
    peaks = []
    for length in (12, 300):
        prompt = [number % 10 for number in range(length)]
        (answer,) = generated(remembering, sb.greedy(), [prompt])
        peaks.append(answer.report.peak_kv_tokens)
    assert peaks == [PLAN.window] * 2
    long = [number % 10 for number in range(300)]
    with pytest.raises(sb.SpecbeamError, match="256 positions"):
        sb.generate(loaded, [long], sb.greedy(), max_new_tokens=9)


def test_a_memory_is_written_and_read_again(pair, tmp_path):
    loaded, recall, _ = pair
    folder = tmp_path / "memory"
    save_memory(folder, recall, PLAN, loaded.target_model, None)
    loaded.target_model.save_pretrained(folder / "backbone")
    again = sb.hmt(folder)
    expected = generated(sb.hmt(loaded, (PLAN, recall)), sb.greedy())
    assert [one.tokens for one in generated(again, sb.greedy())] == [one.tokens for one in expected]
    config = folder / "backbone" / "config.json"
    config.rename(folder / "config.json")
    with pytest.raises(MissingFile, match=r"has no config\.json"):
        sb.hmt(folder)
    (folder / "config.json").rename(config)
    by_tail = sb.hmt(loaded, folder, query="previous_tail")
    assert by_tail.target.plan.query == "previous_tail"
    other = sb.load(tiny("llama", seed=9, vocab_size=11))
    with pytest.warns(UserWarning, match="other weights"):
        sb.hmt(other, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb.hmt(loaded, folder)


def test_folders_without_a_memory_say_what_is_missing(pair, tmp_path):
    loaded, recall, _ = pair
    with pytest.raises(MissingFile, match=f"no {CONFIG} .it holds nothing"):
        sb.hmt(loaded, tmp_path / "none")
    save_memory(tmp_path, recall, PLAN, loaded.target_model, None)
    with pytest.raises(MissingFile, match="does not name its model"):
        sb.hmt(tmp_path)
    weights = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(weights[:-40])
    with pytest.raises(BadHead, match="cannot be read"):
        read_memory(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(MissingFile, match="the weights of the memory"):
        read_memory(tmp_path)
    config = (tmp_path / CONFIG).read_text()
    (tmp_path / WEIGHTS).write_bytes(weights)
    (tmp_path / CONFIG).write_text(config.replace('"segment": 5', '"segment": 0'))
    with pytest.raises(BadHead, match="segment is 0"):
        read_memory(tmp_path)
    (tmp_path / CONFIG).write_text(config.replace('"width": 8', '"width": 9'))
    with pytest.raises(BadHead, match=r"by memory\.json it must hold"):
        read_memory(tmp_path)
    (tmp_path / CONFIG).write_text(config.replace('"hmt"', '"other"'))
    with pytest.raises(BadHead, match="has kind 'other'"):
        read_memory(tmp_path)


def test_what_would_be_ignored_is_refused(pair):
    loaded, recall, draft_recall = pair
    undrafted = sb.load(loaded.target_model)
    with pytest.raises(BadSetting, match="neither memory nor draft_memory"):
        sb.hmt(loaded)
    with pytest.raises(BadSetting, match="the pair has no draft"):
        sb.hmt(undrafted, (PLAN, recall), draft_window=4)
    with pytest.raises(BadSetting, match="leave draft_memory or draft_window out"):
        sb.hmt(loaded, (PLAN, recall), draft_window=4, draft_memory=(PLAN, draft_recall))
    with pytest.raises(BadSetting, match="without queries; leave it out"):
        sb.hmt(loaded, (MemoryPlan(5, 2, recall="previous"), recall), query="refresh")
    with pytest.raises(BadSetting, match="already has a memory"):
        sb.hmt(sb.hmt(loaded, (PLAN, recall)), (PLAN, recall))
    with pytest.raises(BadSetting, match=r"needs 304 positions, and .* has 256"):
        sb.hmt(loaded, (MemoryPlan(300, 2), recall))
    with pytest.raises(BadSetting, match="would not see its past"):
        MemoryLM(loaded.target, MemoryPlan(4, 0), None)
    with pytest.raises(BadHead, match="the memory has 16 numbers"):
        sb.hmt(loaded, (PLAN, new_recall(torch.zeros(3, 16), 4, 0)))
    remembering = sb.hmt(loaded, (PLAN, recall))
    with pytest.raises(NotSupported, match="has a memory"):
        _ = remembering.forgetful_target
    assert "no hidden states" in remembering.target.lacks(Needs(hidden=True))


def test_a_pass_that_fails_leaves_nothing_stored_and_the_next_call_reads_the_text_again(pair, monkeypatch):
    """At each pass in turn: of full segments, of the last one, of a wave over the end of a segment."""
    loaded, recall, _ = pair
    remembering = MemoryLM(loaded.target, PLAN, recall)
    root = Forest.rooted([PROMPTS[0][-1]])
    forest = root.grown([1, 2, 3, 4], [0, 1, 2, 3])
    rows = {}
    extend = HuggingFaceLM.extend
    for fails_at in range(10):
        left = [fails_at]

        def fail(lm, *given, left=left):
            left[0] -= 1
            found = extend(lm, *given)
            if left[0] == -1:
                raise MemoryError("no room")
            return found

        request = Request.of(loaded, PROMPTS[:2], sb.greedy(), Settings.given({"max_new_tokens": 3}, None), 3)
        one, other = request.sessions
        monkeypatch.setattr(HuggingFaceLM, "extend", fail)
        try:
            remembering.extend([one, other], [forest, Forest.rooted([1])])
            break
        except MemoryError:
            monkeypatch.setattr(HuggingFaceLM, "extend", extend)
        was_read = remembering in one.state
        rows[was_read] = rows.get(was_read, 0) + 1
        if not was_read:
            assert one.state == {}
            (again,) = remembering.extend([one], [root])
            assert torch.isfinite(again.logits).all()
        for owner in (one, other):
            remembering.close(owner)
        assert loaded.target.caches == []
    for owner in (one, other):
        remembering.close(owner)
    assert rows[False] >= 3
    assert rows[True] >= 1
    assert loaded.target.caches == []


def test_a_target_with_memory_takes_no_draft_that_works_on_its_cache(pair):
    loaded, recall, _ = pair
    for draft in (skipping_model(loaded.target, Skipping("m1")), LiveLayers(loaded.target, 1)):
        with pytest.raises(BadSetting, match=f"{type(draft).__name__}.*without this draft"):
            sb.hmt(replace(loaded, draft=draft), (PLAN, recall))
    assert sb.hmt(replace(loaded, draft=None), (PLAN, recall)).draft is None


def test_a_model_with_memory_is_rounded_as_its_model_is_and_takes_its_bytes(pair):
    loaded, recall, _ = pair
    remembering = MemoryLM(loaded.target, PLAN, recall)
    assert remembering.slot_bytes == loaded.target.slot_bytes
    assert not hasattr(remembering, "remember_prompts")
    assert rounding_of(remembering) == ""
    by_library = tiny("llama", seed=1, vocab_size=11)
    object.__setattr__(by_library, "_specbeam_rounding", "torchao-int8")
    lm = HuggingFaceLM(by_library, engine="plain")
    assert rounding_of(MemoryLM(lm, MemoryPlan(4, 2, recall="initial"), None)) == "torchao-int8"


def test_a_memory_trained_as_in_the_paper_is_decoded_by_a_causal_query(pair):
    loaded, recall, _ = pair
    remembering = sb.hmt(loaded, (MemoryPlan(5, 2, query="first_half"), recall))
    assert remembering.target.plan.query == "refresh"


def test_models_whose_states_are_no_embeddings_are_refused():
    """OPT with projections between embeddings and layers is fine; a head that reads other states is not."""
    config = OPTConfig(
        vocab_size=11, hidden_size=32, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = OPTForCausalLM(config).eval()
    recall = tiny_memory(model)
    assert recall.size == 16
    remembering = MemoryLM(HuggingFaceLM(model, engine="plain"), PLAN, recall)
    assert remembering.plan is PLAN
    lm = HuggingFaceLM(model, engine="plain")
    lm.runner.takes_vectors = False
    with pytest.raises(NotSupported, match="takes only tokens"):
        MemoryLM(lm, PLAN, recall)
    model.set_input_embeddings(torch.nn.Identity())
    with pytest.raises(NotSupported, match="no embedding matrix"):
        MemoryLM(lm, PLAN, recall)


CHANGE_THE_LAW = ("mtad", "mjsd", "mmtad", "mtjd")
REFUSED = (
    "propd",
    "multi_draft",
    "swift",
)  # early layers, a second cache of the draft, and skipped layers are without memory
TAKES_ANOTHER = ("auto",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [make for make in RECIPES if make.__name__ not in TAKES_ANOTHER], ids=lambda make: make.__name__
)
def test_recipes_take_a_pair_with_memory_or_say_why_not(make, pair):
    """At temperature 0 those for one sequence give the text of greedy decoding, and beams those of beam search."""
    loaded, recall, draft_recall = pair
    remembering = sb.hmt(loaded, (PLAN, recall), draft_memory=(MemoryPlan(4, 1), draft_recall))
    method = make()
    name = make.__name__
    if name in REFUSED:
        with pytest.raises(NotSupported, match=name):
            generated(remembering, method)
        return
    zero = {} if method.greedy or method.search else {"temperature": 0}
    answers = generated(remembering, method, **zero)
    if name in CHANGE_THE_LAW:
        assert [len(answer.tokens) for answer in answers] == [9] * 3
        return
    plain = sb.greedy() if method.beams == 1 else sb.beam_search(method.beams)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in generated(remembering, plain)]
    assert loaded.target.caches == []
    assert loaded.draft.caches == []
