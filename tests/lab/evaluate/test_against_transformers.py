"""The tool that compares beams with those of transformers."""

import copy
from dataclasses import replace

import pytest
import torch

import specbeam as sb
from specbeam import errors
from specbeam.core.beams import FIRST_ENOUGH
from specbeam.core.limits import Limits
from specbeam.core.records import Scored
from specbeam.core.verify.search import SearchRule
from specbeam.lab.evaluate.against_transformers import comparisons
from specbeam.lab.evaluate.replay import EqualsInOrder, forward_logits, leaves, replaying
from specbeam.models.huggingface import HuggingFaceLM
from tests.support import words

PROMPTS = ["abc", "Hello there", "no"]
METHODS = [sb.beam_search(3), sb.speculative_beam_search(3, 5, 3)]
LETTERS = [chr(97 + n % 26) + chr(97 + n * 7 % 26) for n in range(25)]


@pytest.fixture(scope="module")
def rounded():
    """A pair in bfloat16, where nearly every prompt differs in the third digit of a score."""
    target, draft = words.pair().target_model.to(torch.bfloat16), words.pair().draft_model.to(torch.bfloat16)
    return sb.load(target, draft, tokenizer=words.tokenizer())


def test_no_difference_in_float32():
    found = list(comparisons(words.pair(), PROMPTS, METHODS, max_new_tokens=10, repetition_penalty=1.2))
    assert [(one.prompt, one.method) for one in found] == [
        (number, method.name) for number in range(3) for method in METHODS
    ]
    assert all(one.difference is None and one.failure is None and one.off < 1e-4 for one in found)


def test_a_real_difference_is_not_called_rounding():
    """The paper's beams at temperature 0 end differently from those of transformers."""
    options = {"max_new_tokens": 12, "temperature": 0.0}
    found = [one.difference for one in comparisons(words.pair(), PROMPTS, [sb.beam_sampling(3)], **options)]
    found = [one for one in found if one is not None]
    assert found
    assert not any(one.is_rounding for one in found)
    assert all(one.ours[: one.step] == one.theirs[: one.step] and one.ours != one.theirs for one in found)
    assert all(one.gap is None or one.gap > 0 for one in found)


def test_differences_in_bfloat16_are_rounding(rounded):
    found = list(comparisons(rounded, LETTERS[:5], [sb.speculative_beam_search(4, 5, 2)], 5, max_new_tokens=8))
    assert all(one.difference.is_rounding for one in found if one.difference is not None)
    assert any(one.difference.step is not None for one in found if one.difference is not None)


HONEST_STOP = Limits.stop.func
HONEST_VERIFY = SearchRule.verify


@property
def no_penalty(limits):
    return HONEST_STOP(limits)._replace(penalty=0.0)


@property
def always_early(limits):
    return HONEST_STOP(limits)._replace(early=FIRST_ENOUGH)


def a_little_off(rule, session, forest, scored):
    """Return a verdict whose beams carry on wrong scores."""
    verdict = HONEST_VERIFY(rule, session, forest, scored)
    beams = verdict.layers.beams
    wrong = beams._replace(scores=beams.scores - 0.05 * (beams.tokens % 7) / 7)
    return replace(verdict, layers=verdict.layers._replace(beams=wrong))


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(Limits, "stop", no_penalty), (Limits, "stop", always_early), (SearchRule, "verify", a_little_off)],
    ids=["length", "end", "score"],
)
def test_mistakes_of_a_search_are_no_rounding_even_in_bfloat16(rounded, monkeypatch, owner, name, wrong):
    monkeypatch.setattr(owner, name, wrong)
    options = {"max_new_tokens": 10, "eos_token_id": [1, 18, 20, 33, 44, 47, 9]}
    found = [one.difference for one in comparisons(rounded, LETTERS[:7], [sb.beam_search(4)], **options)]
    assert any(one is not None and not one.replayed for one in found)


def test_logits_that_are_off_are_no_rounding_even_in_bfloat16(rounded, monkeypatch):
    """A cache that forgets: the search is right, on logits of another text."""
    honest = HuggingFaceLM.extend

    def forgetful(lm, sessions, forests, needs=None):
        rows = [found.logits for found in honest(lm, sessions, forests, needs)]
        return [Scored(one + 0.5 * torch.sin(torch.arange(one.shape[1]))) for one in rows]

    monkeypatch.setattr(HuggingFaceLM, "extend", forgetful)
    for one in comparisons(rounded, LETTERS[:2], [sb.beam_search(4)], max_new_tokens=8):
        assert one.difference.replayed
        assert one.difference.apart > 0.4
        assert not one.difference.is_rounding


def test_only_searches_of_one_width_are_compared():
    pair = words.pair()
    for methods, message in (
        ([sb.beam_search(3), sb.speculative_beam_search(4)], "different numbers of beams: 3 of beam_search, 4 of spec"),
        ([sb.beam_search(1)], "beam_search keeps fewer than 2 beams"),
    ):
        with pytest.raises(sb.SpecbeamError, match=message):
            next(comparisons(pair, ["abc"], methods, max_new_tokens=4))


def test_a_prompt_that_cannot_be_run_costs_itself_only():
    found = list(comparisons(words.pair(), ["abc", "a" * 300, "no"], METHODS, 3, max_new_tokens=5))
    assert [one.failure is not None for one in found] == [False, False, True, True, False, False]
    assert "256 positions" in found[2].failure
    assert [one.prompt for one in found] == [0, 0, 1, 1, 2, 2]


def test_options_mean_the_same_on_both_sides():
    pair = words.pair()
    for options in (
        {"num_return_sequences": 2},
        {"stop_strings": ["e", "!b"]},
        {"eos_token_id": []},
        {"max_length": 12},
        {"length_penalty": -1.0, "prefix_allowed_tokens_fn": lambda number, tokens: [5]},
        {
            "early_stopping": True,
            "prefix_allowed_tokens_fn": lambda number, tokens: [4 + number, 9 + number, 11, 12, 13, 1],
        },
    ):
        for one in comparisons(pair, PROMPTS, METHODS, 2, **{"max_new_tokens": 8} | options):
            assert one.difference is None, (options, one)
            assert one.failure is None
    with pytest.raises(errors.BadSetting, match="transformers has no option regex"):
        list(comparisons(pair, PROMPTS, METHODS, regex="a+"))


def test_what_the_model_says_of_its_ends_and_texts_holds_on_both_sides():
    model = copy.deepcopy(words.pair().target_model)
    config = model.generation_config
    config.eos_token_id = None
    pair = sb.load(model, tokenizer=words.tokenizer())
    assert all(one.difference is None for one in comparisons(pair, PROMPTS, [sb.beam_search(3)], max_new_tokens=9))
    config.repetition_penalty, config.length_penalty, config.early_stopping = 1.4, 2.0, True
    config.no_repeat_ngram_size = 2
    assert all(one.difference is None for one in comparisons(pair, PROMPTS, [sb.beam_search(3)], max_new_tokens=9))


def test_a_replayed_model_says_what_was_recorded():
    model = words.pair().target_model
    path = (5, 6, 7)
    made = replaying(model, {path: torch.arange(61.0)})
    ids = torch.tensor([path, (5, 6, 8)])
    rows = made(input_ids=ids).logits[:, -1]
    assert torch.equal(rows[0], torch.arange(61.0))
    assert torch.allclose(rows[1], forward_logits(model, (5, 6, 8))[-1])
    unchanged = model(ids).logits[0, -1]
    assert torch.allclose(unchanged, forward_logits(model, path)[-1], atol=1e-5)


def test_leaves_are_paths_that_no_other_prolongs():
    paths = [(1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 3, 5), (1, 3)]
    assert [*leaves(dict.fromkeys(paths, torch.zeros(1)))] == [(1, 2, 3, 5), (1, 2, 4), (1, 3)]


def test_equal_values_keep_their_order():
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]])
    with EqualsInOrder():
        top, places = torch.topk(values, k=4)
    assert places.tolist() == [[1, 3, 2, 4]]
    assert top.tolist() == [[3.0, 3.0, 2.0, 2.0]]
