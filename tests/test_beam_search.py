"""Beam search against transformers: the same beams and scores, whatever drafts, whatever else is in the batch."""

import copy
import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LogitsProcessor

import specbeam as sb
from specbeam.core.control.cost import CostCurve
from specbeam.core.laws.joint import joint_law
from specbeam.core.laws.warp import Warp
from specbeam.core.ranked import whole_rows
from specbeam.core.verify.search import SearchRule
from specbeam.doors.options.processors import TextFacts
from specbeam.doors.options.settings import Settings
from specbeam.models.table import TableLM
from specbeam.recipes.catalogue import RECIPES
from specbeam.recipes.joint.block_drafter import EveryBlock
from tests.support import words
from tests.support.checking import refused
from tests.support.exact import distance, exact_law, hf_beam_sampling_law
from tests.support.programs import random_table, run, session_of
from tests.support.steps import needs_numba
from tests.support.tiny_models import tiny

PROMPTS = ["abc", "Hello there", "a", "no, no"]
SHARP = {"vocab_size": 5, "eos_token_id": 4, "bos_token_id": 0, "pad_token_id": 0}


@pytest.fixture(scope="module")
def pair():
    return words.pair()


def by_transformers(pair, prompt, beams, new_tokens=14, **options):
    """Beams and scores of `generate` itself, for one prompt."""
    ids = torch.tensor([prompt if isinstance(prompt, list) else pair.tokenizer(prompt)["input_ids"]])
    out = pair.target_model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=beams, num_return_sequences=beams, do_sample=False,
        max_new_tokens=new_tokens, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    eos = options.get("eos_token_id", pair.target_model.generation_config.eos_token_id)
    eos = eos if isinstance(eos, list) else [eos]
    return [
        (cut(row[ids.shape[1] :].tolist(), eos), score)
        for row, score in zip(out.sequences, out.sequences_scores.tolist(), strict=True)
    ]


def cut(tokens, eos):
    """Up to and with the first end token: what is behind is padding."""
    ends = [place for place, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def agree(found, expected, beams):
    assert [one.tokens for one in found.beams[:beams]] == [tokens for tokens, _ in expected]
    assert [one.score for one in found.beams[:beams]] == pytest.approx(
        [score for _, score in expected], abs=1e-4, rel=1e-5
    )


METHODS = {
    "plain": lambda beams: sb.beam_search(beams),
    "drafted": lambda beams: sb.speculative_beam_search(beams, beams + 3, 3),
    "drafted deeply": lambda beams: sb.speculative_beam_search(beams, beams, 6),
    "prompt_lookup": lambda beams: sb.speculative_beam_search(beams, drafter="prompt_lookup"),
    "suffix_match": lambda beams: sb.speculative_beam_search(beams, drafter="suffix_match"),
    "token_recycling": lambda beams: sb.speculative_beam_search(beams, 8, 3, drafter="token_recycling"),
}


def ban_vowels(batch, tokens):
    return [token for token in range(61) if token % 5 or token < 4]


OPTIONS = [
    {},
    {"length_penalty": 2.0},
    {"length_penalty": -1.0},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"early_stopping": True},
    {"early_stopping": "never", "length_penalty": 1.5},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 5},
    {"eos_token_id": [1, 20, 33, 47]},
    {"eos_token_id": [1, 5, 6, 7, 8, 9, 10, 11, 12], "early_stopping": True, "length_penalty": -0.5},
    {"bad_words_ids": [[18], [58, 3], [44, 15]], "repetition_penalty": 0.8},
    {"prefix_allowed_tokens_fn": ban_vowels},
]


@pytest.mark.parametrize("beams", [2, 4, 7])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "defaults")
def test_the_beams_and_scores_of_transformers(pair, beams, options):
    expected = [by_transformers(pair, prompt, beams, **options) for prompt in PROMPTS]
    for make in METHODS.values():
        found = sb.generate(pair, PROMPTS, make(beams), max_new_tokens=14, **options)
        for one, answer in zip(found, expected, strict=True):
            agree(one, answer, beams)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        agree(sb.generate(pair, prompt, METHODS["drafted"](beams), max_new_tokens=14, **options)[0], answer, beams)


class Likes(LogitsProcessor):
    """A user's processor that depends on the path."""

    def __call__(self, input_ids, scores):
        liked = (input_ids[:, -1] * 7 + input_ids.shape[1]) % scores.shape[1]
        return scores.scatter_add(1, liked[:, None], torch.full((len(scores), 1), 3.0))


def test_a_user_s_processor(pair):
    for prompt in PROMPTS:
        expected = by_transformers(pair, prompt, 4, logits_processor=[Likes()])
        for make in METHODS.values():
            agree(sb.generate(pair, prompt, make(4), max_new_tokens=14, logits_processor=[Likes()])[0], expected, 4)


class Sharp(Likes):
    """A target that is sure of itself."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, super().__call__(input_ids, scores))


MANY_ENDS = [56, 37, 44, 28, 34, 9, 3, 32, 20, 33, 58, 8, 41, 13, 52, 39, 31, 30, 21, 7]


@pytest.mark.parametrize(
    ("prompt", "beams", "options"),
    [
        pytest.param([42, 52], 3, {"eos_token_id": MANY_ENDS}, id="candidates"),
        pytest.param([32], 2, {"eos_token_id": [18, 4, 10], "early_stopping": "never", "length_penalty": 1.0}, id="never"),
        pytest.param(
            [40], 2, {"eos_token_id": [7, 31, 48, 28, 30, 41], "early_stopping": "never", "length_penalty": -1.0,
                      "logits_processor": [Sharp()]}, id="sign"),
        pytest.param(
            [24, 6, 5], 2, {"eos_token_id": [46, 38, 20, 28, 25, 58], "early_stopping": "never", "length_penalty": -1.0,
                            "logits_processor": [Sharp()]}, id="sign again"),
    ],
)  # fmt: skip
def test_texts_that_a_rule_misread_would_change(pair, prompt, beams, options):
    """Chosen so that too few candidates, "never" read as False, or its length whatever the penalty's sign, give others."""
    expected = by_transformers(pair, prompt, beams, **options)
    for make in METHODS.values():
        agree(sb.generate(pair, [prompt], make(beams), max_new_tokens=14, **options)[0], expected, beams)


@pytest.mark.parametrize("eos", [[], [1], [1, 18, 20]], ids=len)
def test_truncation_leaves_as_many_tokens_as_in_transformers(pair, eos):
    """A beam must be able to go on beside every way to end."""
    kept, model = [], pair.target_model
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id = eos or None
    ids = torch.tensor([[5, 6, 7]])
    model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=2, do_sample=True, top_k=1, top_p=0.01, max_new_tokens=3,
        generation_config=config, custom_generate=lambda model, ids, logits_processor, **more: kept.append(logits_processor),
    )  # fmt: skip
    scores = torch.randn(1, 61, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    warp = Settings(top_k=1, top_p=0.01).warp(TextFacts(tuple(eos), 3, search=True))
    ours = joint_law(
        whole_rows(scores.numpy()), np.zeros(1), np.ones(1, dtype=np.int64), warp.cut._replace(normalise=False)
    ).logits
    assert int((ours > -np.inf).sum()) == max(2, 1 + len(eos))
    np.testing.assert_array_equal(ours, kept[0](ids, scores).numpy())


@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_fewer_allowed_tokens_than_beams(pair, early_stopping):
    """transformers fills its beams with copies of the prompt, of no odds; ours are those of the real ones."""
    options = {"early_stopping": early_stopping, "prefix_allowed_tokens_fn": lambda number, tokens: [5, 9, 1]}
    expected = [one for one in by_transformers(pair, "abc", 6, 5, **options) if one[1] > -1e8]
    assert len(expected) > 3
    for make in METHODS.values():
        found = sb.generate(pair, "abc", make(6), max_new_tokens=5, **options)[0]
        agree(found, expected, len(expected))


def test_copies_of_the_prompt_do_not_count_as_texts(pair):
    """With early_stopping=True those of transformers end the search before real texts are there."""
    options = {
        "early_stopping": True,
        "prefix_allowed_tokens_fn": lambda number, tokens: [[5], [9], [11, 1]][len(tokens) % 3],
    }
    theirs = by_transformers(pair, "abc", 4, 12, **options)
    found = sb.generate(pair, "abc", sb.beam_search(4), max_new_tokens=12, **options)[0]
    assert any(score < -1e6 for _, score in theirs)
    assert all(one.finished and one.score > -1e6 for one in found.beams[:4])


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "opt", "gpt2", "gpt_neox"])
def test_six_families(family):
    pair = words.pair(family)
    for beams, options in ((3, {}), (5, {"length_penalty": 1.7, "no_repeat_ngram_size": 3})):
        for prompt in PROMPTS[:2]:
            expected = by_transformers(pair, prompt, beams, **options)
            for name in ("plain", "drafted", "prompt_lookup"):
                agree(sb.generate(pair, prompt, METHODS[name](beams), max_new_tokens=14, **options)[0], expected, beams)


def test_drafts_save_passes(pair):
    """A target that drafts for itself passes every layer."""
    model = tiny("llama")
    twin = sb.load(model, model, tokenizer=words.tokenizer())
    plain = sb.generate(twin, "abc", sb.beam_search(3), max_new_tokens=12)[0]
    fast = sb.generate(twin, "abc", sb.speculative_beam_search(3, 6, 3), max_new_tokens=12)[0]
    assert [one.tokens for one in fast.beams[:3]] == [one.tokens for one in plain.beams[:3]]
    assert fast.report.target_passes == -(-plain.report.target_passes // 4)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=needs_numba) if make is sb.swift else make
        for make in RECIPES
        if make.__name__ not in ("auto", "mtjd")
    ],
)
def test_the_drafter_of_any_recipe_will_do(make):
    """A search needs nodes alone, whatever grew them under its beams: here a target that drafts for itself."""
    model = tiny("llama", num_hidden_layers=4 if make is sb.swift else 2)
    twin = sb.load(model, model, tokenizer=words.tokenizer())
    drafter = make().parts(twin.target, twin.draft).drafter
    for beams, nodes in ((8, 32), (3, 24)):
        found = sb.generate(twin, PROMPTS, sb.speculative_beam_search(beams, nodes, 3, drafter), max_new_tokens=8)
        for prompt, one in zip(PROMPTS, found, strict=True):
            agree(one, by_transformers(twin, prompt, beams, 8), beams)
    wide = make.__name__ in ("rsd_s", "opt_tree", "dyspec", "mmtad", "speculative_beam_search", "dsbd")
    assert not wide or sum(one.report.accepted for one in found) > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_every_path_there_is(depth):
    """Without end tokens the layers of a draft that holds all paths pass."""
    pair = sb.load(tiny("llama", seed=3, **SHARP), tiny("llama", seed=4, **SHARP))
    plain = sb.generate(pair, [[1, 2, 3]], sb.beam_search(3), max_new_tokens=6, eos_token_id=[])[0]
    fast = sb.generate(
        pair, [[1, 2, 3]], sb.speculative_beam_search(3, 6, depth, EveryBlock(5)), max_new_tokens=6, eos_token_id=[]
    )[0]
    assert [one.tokens for one in fast.beams[:3]] == [one.tokens for one in plain.beams[:3]]
    assert fast.report.target_passes == 6 // (1 + depth)


def test_the_common_prefix_of_all_beams_is_streamed(pair):
    pieces = list(sb.stream(pair, "Hello there", sb.speculative_beam_search(3), max_new_tokens=20))
    assert "".join(pieces) == sb.generate(pair, "Hello there", sb.beam_search(3), max_new_tokens=20)[0].text


def test_several_answers(pair):
    found = sb.generate(pair, "abc", sb.beam_search(4), max_new_tokens=8, num_return_sequences=3)
    assert [one.tokens for one in found] == [tokens for tokens, _ in by_transformers(pair, "abc", 4, 8)[:3]]


def best_text(method, target, draft, steps, eos):
    """The best hypothesis of a whole run by the method's own loop."""
    parts = method.parts(TableLM(target), TableLM(draft))
    parts = replace(parts, rule=SearchRule(method.beams, "dice"))

    def program(dice):
        session = session_of(sb.Method("", "", method.beams, lambda *_: parts), None, dice, steps, eos=eos)
        session.warp = Warp(search=True)
        run(session, TableLM(target))
        score = session.limits.normalised
        return tuple(max(session.hypotheses(), key=lambda one: score(one.loglik, len(one.tokens))).tokens)

    return exact_law(program)


@pytest.mark.parametrize(
    ("vocab", "steps", "eos"),
    [pytest.param(3, 2, (), marks=pytest.mark.slow), pytest.param(4, 2, (3,), marks=pytest.mark.slow), (3, 2, (2,))],
)
def test_the_law_of_hf_beam_sampling_by_enumeration(vocab, steps, eos):
    beams = 2
    target, draft = random_table(1, vocab), random_table(2, vocab)
    expected = hf_beam_sampling_law(target, beams, steps, eos)
    assert sum(expected.values()) == pytest.approx(1)
    for method in (
        sb.beam_sampling(beams, semantics="hf"),
        sb.dsbd(beams, beams + 1, 2, "fixed", semantics="hf"),
    ):
        assert distance(best_text(method, target, draft, steps, eos), expected) < 1e-12


@pytest.mark.slow
def test_the_law_of_hf_beam_sampling_on_a_transformer():
    """Best texts of transformers, of ours and of ours with drafts, each against the enumerated law."""
    target, draft = tiny("llama", seed=3, **SHARP), tiny("llama", seed=4, **SHARP)
    pair, prompt = sb.load(target, draft), [1, 2, 3]

    def table(path):
        with torch.inference_mode():
            return target(torch.tensor([[*prompt, *path]])).logits[0, -1].double().softmax(-1).numpy()

    law = hf_beam_sampling_law(functools.cache(table), 2, 2, (4,))
    draws = 4000
    torch.manual_seed(0)
    ids = torch.tensor([prompt] * 500)
    theirs = [
        tuple(cut(row[3:].tolist(), [4]))
        for _ in range(draws // 500)
        for row in target.generate(ids, attention_mask=torch.ones_like(ids), num_beams=2, do_sample=True, top_k=0,
                                   max_new_tokens=2, pad_token_id=4)
    ]  # fmt: skip
    runs = {"transformers": theirs}
    for method in (sb.beam_sampling(2, semantics="hf"), sb.dsbd(2, 3, 2, "fixed", semantics="hf")):
        found = sb.generate(pair, [prompt] * draws, method, seed=1, max_new_tokens=2, batch_size=200)
        runs[method.name] = [tuple(one.tokens) for one in found]
    for name, texts in runs.items():
        assert chi_square(Counter(texts), law) > 1e-3, name


def test_one_beam_of_hf_semantics_is_plain_sampling(pair):
    """As in transformers, which looks for no candidates then; the same seed gives the same texts."""
    expected = sb.generate(pair, PROMPTS, "sampling", seed=3, max_new_tokens=10)
    for method in (sb.beam_sampling(1, semantics="hf"), sb.dsbd(1, 4, 3, "fixed", semantics="hf")):
        found = sb.generate(pair, PROMPTS, method, seed=3, max_new_tokens=10)
        assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_one_beam_is_greedy_search(pair):
    for options in ({"early_stopping": "never", "length_penalty": 2.0}, {}):
        expected = [
            one.tokens for one in sb.generate(pair, PROMPTS, "greedy", max_new_tokens=14, eos_token_id=MANY_ENDS)
        ]
        for make in METHODS.values():
            found = sb.generate(pair, PROMPTS, make(1), max_new_tokens=14, eos_token_id=MANY_ENDS, **options)
            assert [one.tokens for one in found] == expected


def chi_square(counts, law):
    assert set(counts) <= set(law)
    big = [text for text, odds in law.items() if odds * counts.total() >= 5]
    seen = np.array([counts[text] for text in big])
    hoped = np.array([law[text] for text in big])
    return stats.chisquare(seen, hoped / hoped.sum() * seen.sum()).pvalue


def test_hf_semantics_draws_the_same_with_and_without_drafts(pair):
    accepted = 0
    for options in ({}, {"temperature": 0.7, "top_k": 12}, {"top_p": 0.9, "length_penalty": 0.5}):
        plain = sb.generate(pair, PROMPTS, sb.beam_sampling(3, semantics="hf"), seed=2, max_new_tokens=10, **options)
        fast = sb.dsbd(3, 40, 3, "fixed", semantics="hf")
        drafted = sb.generate(pair, PROMPTS, fast, seed=2, max_new_tokens=10, **options)
        assert [[b.tokens for b in one.beams] for one in drafted] == [[b.tokens for b in one.beams] for one in plain]
        accepted += sum(one.report.accepted for one in drafted)
    assert accepted > 0


def test_settings_that_contradict_each_other():
    with pytest.raises(sb.SpecbeamError, match="needs width='fixed'"):
        sb.dsbd(3, width="dynamic", semantics="hf")
    with pytest.raises(sb.SpecbeamError, match="draft_beams is 2, beams is 3"):
        sb.speculative_beam_search(3, 2)
    with refused("drafter is 'oracle'"):
        sb.speculative_beam_search(3, drafter="oracle")
    with pytest.raises(sb.SpecbeamError, match="drafter 'prompt_lookup' ignores draft_beams=9"):
        sb.speculative_beam_search(3, 9, drafter="prompt_lookup")


def test_the_doors_of_transformers(pair):
    tokenizer = pair.tokenizer
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 10, "num_return_sequences": 2}
    plain = pair.target_model.generate(**batch, **options)
    fast = pair.target_model.generate(
        **batch, **options, custom_generate=sb.hf.beam_search, draft_model=pair.draft_model
    )
    assert tokenizer.batch_decode(plain, skip_special_tokens=True) == tokenizer.batch_decode(
        fast, skip_special_tokens=True
    )
    options["prefix_allowed_tokens_fn"] = lambda number, tokens: [4 + number, 5, 6 + int(tokens[-1]) % 3, 1]
    plain = pair.target_model.generate(**batch, **options)
    fast = pair.target_model.generate(**batch, **options, custom_generate=sb.hf.beam_search)
    assert tokenizer.batch_decode(plain, skip_special_tokens=True) == tokenizer.batch_decode(
        fast, skip_special_tokens=True
    )


@pytest.mark.parametrize(
    "options",
    [{"min_new_tokens": 4}, {"min_length": 10}, {"forced_eos_token_id": 9}, {"begin_suppress_tokens": [1, 18]}],
    ids=str,
)
def test_processors_that_count_tokens_count_the_padding_as_transformers_does(pair, options):
    batch = pair.tokenizer(["a", "Hello there"], return_tensors="pt", padding=True)
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 8, "eos_token_id": [1, 18, 20]} | options
    plain = pair.target_model.generate(**batch, **settings)
    fast = pair.target_model.generate(**batch, **settings, custom_generate=sb.hf.beam_search)
    assert [cut(row, [1, 18, 20]) for row in fast[:, 11:].tolist()] == [
        cut(row, [1, 18, 20]) for row in plain[:, 11:].tolist()
    ]


@pytest.mark.parametrize("seed", range(12))
def test_drafts_change_nothing_where_all_that_a_prefix_allows_is_banned(pair, seed):
    """transformers allows it again if it is so for all live beams, so the beams of a step must be seen together."""

    def allowed(number, tokens):
        return sorted({*np.random.default_rng([seed, int(tokens[-1])]).integers(0, 61, 4).tolist()})

    options = {
        "max_new_tokens": 12,
        "eos_token_id": 1,
        "no_repeat_ngram_size": 1,
        "prefix_allowed_tokens_fn": allowed,
    }
    prompt = np.random.default_rng(seed).integers(0, 61, 12).tolist()
    (plain,) = sb.generate(pair, [prompt], sb.beam_search(3), **options)
    for depth in (1, 3):
        (drafted,) = sb.generate(pair, [prompt], sb.speculative_beam_search(3, depth=depth), **options)
        agree(drafted, [(beam.tokens, beam.score) for beam in plain.beams], 3)


@pytest.mark.parametrize("drafter", ["prompt_lookup", "suffix_match", "token_recycling"])
def test_drafts_without_a_model_that_cannot_pay_are_left_out_within_a_few_turns(drafter, pair, monkeypatch):
    """Ten beams, and a pass whose time is that of its rows: hardly more rows are computed than without drafts."""
    monkeypatch.setattr("specbeam.recipes.depth._curve", lambda lm, role: CostCurve((1, 100), (1.0, 100.0)))
    plain = sb.generate(pair, "abc", sb.beam_search(10), max_new_tokens=96)[0]
    method = sb.speculative_beam_search(10, drafter=drafter)
    found = sb.generate(pair, "abc", method, max_new_tokens=96)[0]
    assert [beam.tokens for beam in found.beams] == [beam.tokens for beam in plain.beams]
    assert found.report.rows.scored <= 1.2 * plain.report.rows.scored
    fixed = sb.speculative_beam_search(10, depth=4, drafter=drafter)
    assert sb.generate(pair, "abc", fixed, max_new_tokens=96)[0].report.rows.scored > 2 * plain.report.rows.scored


def test_drafts_without_a_model_that_pay_are_kept(monkeypatch):
    """A text that repeats itself, and rows that cost nothing."""
    monkeypatch.setattr("specbeam.recipes.depth._curve", lambda lm, role: CostCurve((1, 100), (1.0, 1.01)))
    lm = TableLM(lambda path: [1.0 if token == (len(path) + 2) % 7 else 1e-9 for token in range(8)])
    method = sb.speculative_beam_search(1, drafter="prompt_lookup")
    session = session_of(method, None, steps=60)
    run(session, lm)
    assert session.count.target_passes <= 60 / 3
