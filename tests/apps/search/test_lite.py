"""Searches over steps: budgets are kept, seeds reproduce, nothing is lost, and each step has its law."""

import math
from collections import defaultdict

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

import specbeam as sb
from specbeam.apps.search.baselines import _Visits, best_of, step_beams, tree_search
from specbeam.apps.search.tree import CUT_OFF, FINISHED, OPEN, BudgetRule, Node, SearchResult, calibrated
from specbeam.apps.search.value import checked_values, classifier_value
from specbeam.core.decode import decode
from specbeam.core.laws.warp import Warp
from specbeam.core.limits import Limits
from specbeam.core.session import Session
from specbeam.core.verify.walk import MatchRule
from specbeam.errors import BadSetting, BrokenValue, MissingFile, NotSupported, SearchFailed
from specbeam.models.table import TableLM
from tests.support import words
from tests.support.exact import exact_law
from tests.support.steps import source_of_steps

PROMPTS = ["abc", "Hello"]
SETTINGS = {"separator": "e", "step_tokens": 16, "max_new_tokens": 32, "seed": 5, "temperature": 1.5}


OF_TEXTS = {"max_new_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def pair():
    return words.pair()


def by_letters(texts):
    """The share of letters between a and m: a value that says something of every text."""
    return [0.02 + 0.9 * sum(letter in "abcdefghijklm" for letter in text) / max(len(text), 1) for text in texts]


def shape(result):
    return [(node.parent, node.tokens, node.value, node.status, node.draws, node.times) for node in result.nodes]


def check_tree(result, budget):
    """What holds of every tree."""
    greedy = result.spent - sum(node.times * len(node.tokens) for node in result.nodes)
    assert 0 <= greedy <= SETTINGS["max_new_tokens"]
    assert result.spent <= budget
    assert result.draws == sum(node.times for node in result.nodes[1:]) == sum(node.draws for node in result.nodes)
    for place, node in enumerate(result.nodes):
        assert node.parent < place
        assert node.draws <= node.limit
        assert (node.status == CUT_OFF) == math.isnan(node.value) or len(result.tokens_to(place)) == 32
        assert len(result.tokens_to(place)) <= 32
    if result.path:
        assert result.nodes[result.path[-1]].status == FINISHED
        assert result.tokens == result.tokens_to(result.path[-1])
        assert result.text == "".join(result.nodes[place].text for place in result.path)


@pytest.mark.parametrize("expand", ["incremental", "batch"])
def test_the_budget_is_never_exceeded_and_the_tree_says_where_it_went(pair, expand):
    for budget in (1, 60, 200):
        for result in sb.lite_search(
            pair, PROMPTS, by_letters, budget=budget, expand=expand, threshold=1.0, **SETTINGS
        ):
            check_tree(result, budget)
            assert result.ended in ("budget", "exhausted", "failed")
            assert result.ended != "budget" or result.spent == budget


def test_the_same_seed_gives_the_same_search_in_any_company(pair):
    both = sb.lite_search(pair, PROMPTS, by_letters, budget=200, threshold=1.0, **SETTINGS)
    alone = sb.lite_search(pair, PROMPTS[1], by_letters, budget=200, threshold=1.0, batch_size=1, **SETTINGS)
    assert shape(both[1]) == shape(alone[0])
    other = sb.lite_search(pair, PROMPTS[1], by_letters, budget=200, threshold=1.0, **(SETTINGS | {"seed": 6}))
    assert shape(other[0]) != shape(alone[0])
    twice = sb.lite_search(pair, [PROMPTS[1]] * 2, by_letters, budget=200, threshold=1.0, **SETTINGS)
    assert shape(twice[0]) == shape(alone[0]) != shape(twice[1])


def test_a_search_ends_at_the_first_finished_text_of_enough_value(pair):
    seen = []

    def value(texts):
        return [0.9 if len(text) > 12 else 0.3 for text in texts]

    results = sb.lite_search(
        pair, PROMPTS, value, "speculative_sampling", budget=3000, on_progress=lambda n, r: seen.append((n, r.spent)),
        **(SETTINGS | {"seed": 4}),
    )  # fmt: skip
    for number, result in enumerate(results):
        check_tree(result, 3000)
        if result.ended == "value":
            assert result.value == 0.9
            assert sb.generate(pair, PROMPTS[number], "greedy", max_new_tokens=32)[0].text == result.greedy_text
    assert "value" in {result.ended for result in results}
    assert "exact" in results[0].law or results[0].ended == "value"


def test_a_text_may_be_finished_by_what_it_says(pair):
    """Models that never end: the step that holds an "a" is the last one."""
    settings = SETTINGS | {"eos_token_id": []}
    for seed in range(3):
        (result,) = sb.lite_search(
            pair, "abc", by_letters, ends=["a", "i"], threshold=1.0, budget=300, **(settings | {"seed": seed})
        )
        for node in result.nodes[1:]:
            assert (node.status == FINISHED) == (node.status != CUT_OFF and ("a" in node.text or "i" in node.text))
        assert not result.tokens or "a" in result.text or "i" in result.text
        if result.tokens and not result.path:  # the greedy text, cut where its last step ends
            assert result.text.endswith("e")
            assert pair.tokenizer.decode(result.tokens) == result.text


def test_numbers_of_draws_are_those_of_the_paper():
    """ceil(log(1 - eps) / (d log(1 - v))): 0.9 at value 1/2 takes 4 draws at depth 1, 2 at depth 2."""
    rule = BudgetRule(0.9, 10)
    assert [rule.limit(0.5, depth) for depth in (1, 2, 3, 4)] == [4, 2, 2, 1]
    assert [rule.limit(value, 1) for value in (0.0, 0.05, 0.3, 0.9, 0.99, 1.0)] == [10, 10, 7, 1, 1, 1]
    assert calibrated(1.0, 0.0, 1) == 0.5
    assert calibrated(0.6, 0.3, 2) == pytest.approx((0.6 + 0.15) / 1.5)
    for value in (0.2, 0.5, 0.8):  # with that many draws one of them is right as often as is wanted
        assert 1 - (1 - value) ** rule.limit(value, 1) >= 0.9 or rule.limit(value, 1) == 10


def test_a_text_of_value_0_is_not_continued(pair):
    (result,) = sb.lite_search(pair, "abc", lambda texts: [0.0 if "z" in text else 0.4 for text in texts], **SETTINGS)
    assert all(node.draws == 0 for node in result.nodes if node.value == 0)
    (result,) = sb.lite_search(pair, "abc", lambda texts: [0.0] * len(texts), **SETTINGS)
    assert (result.ended, result.draws) == ("exhausted", 0)


BROKEN = [
    (lambda texts: 1 / 0, "raised ZeroDivisionError"),
    (lambda texts: [math.nan] * len(texts), "returned nan"),
    (lambda texts: [1.5] * len(texts), "returned 1.5"),
    (lambda texts: [-0.1] * len(texts), "returned -0.1"),
    (lambda texts: [0.5] * (len(texts) + 1), "values for"),
    (lambda texts: None, "raised TypeError"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_a_broken_value_function_loses_nothing(pair, broken, message):
    calls = []

    def value(texts):
        calls.append(texts)
        return by_letters(texts) if len(calls) < 6 else broken(texts)

    with pytest.raises(SearchFailed, match=message) as caught:
        sb.lite_search(pair, PROMPTS, value, budget=300, threshold=1.0, **SETTINGS)
    error = caught.value
    assert isinstance(error.__cause__, BrokenValue)
    assert len(error.results) == 2
    assert all(result.spent > 0 and len(result.nodes) > 1 for result in error.results)
    assert all((result.failure is not None) == (result.ended == "failed") for result in error.results)
    assert any(result.ended == "failed" for result in error.results)


def test_a_separator_that_never_comes_is_told_with_what_was_drawn(pair):
    with pytest.raises(SearchFailed, match="separator '#' was not found within 16 tokens") as caught:
        sb.lite_search(
            pair, "abc", by_letters, threshold=1.0, children=2, **(SETTINGS | {"separator": "#", "eos_token_id": []})
        )
    (result,) = caught.value.results
    assert {node.status for node in result.nodes[1:]} == {CUT_OFF}
    assert result.spent > 0


def test_wrong_settings_are_refused_before_anything_is_drawn(pair):
    for wrong in ({"budget": 0}, {"separator": ""}, {"children": 0}, {"iterations": 0}, {"confidence": 1.0},
                  {"threshold": 1.2}, {"progress": -1.0}, {"step_tokens": 0}, {"temperature": 0.0}):  # fmt: skip
        with pytest.raises(BadSetting, match=next(iter(wrong))):
            sb.lite_search(pair, "abc", by_letters, **(SETTINGS | wrong))
    with pytest.raises(BadSetting, match="greedy gives the same step"):
        sb.lite_search(pair, "abc", by_letters, "greedy")
    with pytest.raises(NotSupported, match="stop_strings"):
        sb.lite_search(pair, "abc", by_letters, stop_strings=["x"])
    with pytest.raises(BadSetting, match=r"lite_search\(\) has no option tokens"):
        sb.lite_search(pair, "abc", by_letters, tokens=3)
    with pytest.raises(sb.SpecbeamError, match="prompt 1 is empty"):
        sb.lite_search(pair, ["abc", ""], by_letters)


def step_law(table, separator, eos, most):
    """The law of one step, straight from its definition."""
    law = defaultdict(float)

    def walk(path, odds):
        if path and (path[-1] in (separator, eos) or len(path) == most):
            law[path] += odds
            return
        for token, chance in enumerate(table(path)):
            walk((*path, token), odds * chance)

    walk((), 1.0)
    return dict(law)


def table(path):
    return [[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]][path[-1] if path else 0]


def draft_table(path):
    return [[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.3, 0.1, 0.6]][path[-1] if path else 0]


SAMPLING = sb.sampling().with_parts(rule=MatchRule("dice"))  # by dice, whose outcomes can be enumerated


@pytest.mark.parametrize("method", [SAMPLING, sb.speculative_sampling(2), sb.rsd_c((2, 1)), sb.block_verification(2)])
def test_a_step_has_the_law_of_the_text_up_to_the_separator(method):
    """By enumeration: the session of a draw, which ends at the separator 1, at the end token 2, or after three tokens."""

    def program(dice):
        limits = Limits(
            3, (2,), stop_strings=("1",), decode=lambda tokens: "".join(map(str, tokens)), early_stopping=True
        )
        session = Session([0], method.parts(None, TableLM(draft_table)), Warp(), limits, 1)
        session.dice = dice
        with source_of_steps():
            for _ in decode(TableLM(table), [session]):
                pass
        return tuple(next(iter(session.hypotheses())).tokens)

    expected = step_law(table, 1, 2, 3)
    found = exact_law(program)
    assert set(found) == set(expected)
    for path, odds in expected.items():
        assert found[path] == pytest.approx(odds, abs=1e-12)


def test_siblings_are_drawn_independently(pair):
    """First steps of many searches: how often two siblings are equal is what their law says."""
    (result,) = sb.lite_search(
        pair, "abc", lambda texts: [0.05] * len(texts), children=400, expand="batch", confidence=0.999999999,
        iterations=1, **(SETTINGS | {"step_tokens": 1, "temperature": 1.0, "seed": 1}),
    )  # fmt: skip
    ids = torch.tensor([result.prompt])
    with torch.inference_mode():
        p = pair.target_model(ids).logits[0, -1].double().softmax(-1)
    counts = torch.zeros(len(p))
    for node in result.nodes[1:]:
        counts[node.tokens[0]] += node.times
    draws = int(counts.sum())
    assert draws == result.nodes[0].limit > 250
    likely = p * draws >= 5
    statistic = float(((counts - p * draws)[likely] ** 2 / (p * draws)[likely]).sum())
    degrees = int(likely.sum())
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5


def test_a_classifier_is_a_value_function(pair, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        pad_token_id=2,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    words.tokenizer().save_pretrained(tmp_path)
    value = classifier_value(tmp_path, batch_size=2)
    texts = ["abc", "Hello", "so it is"]
    found = checked_values(value, texts)
    assert found == pytest.approx(
        [checked_values(value, [text])[0] for text in texts], abs=1e-5
    )  # padding changes nothing
    (result,) = sb.lite_search(pair, "abc", tmp_path, budget=60, threshold=1.0, **SETTINGS)
    assert result.nodes[0].value == pytest.approx(found[0], abs=1e-5)
    with pytest.raises(MissingFile, match="no sequence classifier"):
        sb.lite_search(pair, "abc", tmp_path / "nothing")


def test_what_searches_are_compared_with(pair):
    (best,) = best_of(pair, "abc", by_letters, 4, max_new_tokens=12, seed=1)
    values = [node.value for node in best.nodes[1:] if node.status == FINISHED]
    assert best.draws == 4
    assert not values or best.value == max(values)
    (first,) = best_of(pair, "abc", lambda texts: [1.0] * len(texts), 40, threshold=0.5, max_new_tokens=60, seed=1)
    assert first.ended == "value"
    assert first.nodes[-1].status == FINISHED
    assert best.ended == "exhausted"
    (beams,) = step_beams(pair, "abc", by_letters, 2, 3, **SETTINGS)
    for depth in {node.depth for node in beams.nodes[1:]}:
        assert sum(node.times for node in beams.nodes if node.depth == depth) <= 6
    assert all(node.status != OPEN or node.value <= 1 for node in beams.nodes)


def test_a_tree_search_takes_the_child_of_largest_bound():
    """Visits 1 and 3, values 0.4 and 0.9, 0.2, 0.1: means 0.4 and 0.4, bounds 1.577 and 1.080 at exploration 1."""
    nodes = [Node(-1, 0, [], "", draws=4), Node(0, 1, [1], "a", 0.4), Node(0, 1, [2], "b", 0.9)]
    nodes += [Node(2, 2, [3], "c", 0.2), Node(2, 2, [4], "d", 0.1, "closed")]
    visits = _Visits(0, SearchResult([], "", nodes=nodes), 4, 1.0)
    for node in (1, 2, 3, 4):
        visits.add_value(node)
    assert visits.counts == {0: 4, 1: 1, 2: 3, 3: 1, 4: 1}
    assert visits.sums == pytest.approx({0: 1.6, 1: 0.4, 2: 1.2, 3: 0.2, 4: 0.1})
    bounds = [mean + math.sqrt(math.log(4) / count) for mean, count in ((0.4, 1), (0.4, 3))]
    assert bounds == pytest.approx([visits._bound(0, 1), visits._bound(0, 2)], abs=1e-12)
    assert visits.leaf() == 1
    nodes[1].status = FINISHED
    assert visits.leaf() == 2
    nodes[2].draws = 4
    assert visits.leaf() == 3  # the other child is closed
    nodes[3].status = FINISHED
    assert not visits.can_grow(0)


def test_a_tree_search_keeps_its_limits(pair):
    results = tree_search(pair, PROMPTS, by_letters, 12, 3, threshold=1.0, **SETTINGS)
    alone = tree_search(pair, PROMPTS[1], by_letters, 12, 3, threshold=1.0, **SETTINGS)
    assert shape(results[1]) == shape(alone[0])
    for result in results:
        assert result.draws == sum(node.times for node in result.nodes[1:]) <= 12
        assert all(node.draws <= 3 for node in result.nodes)
        assert result.draws == 12 or result.ended == "exhausted"
    (found,) = tree_search(pair, "abc", lambda texts: [1.0] * len(texts), 200, 3, **SETTINGS)
    assert found.ended == "value"
    assert found.nodes[-1].status == FINISHED
    with pytest.raises(BadSetting, match=r"step_tokns \(did you mean step_tokens\?\)"):
        tree_search(pair, "abc", by_letters, 2, 2, step_tokns=3)
    with pytest.raises(BadSetting, match="exploration is -1"):
        tree_search(pair, "abc", by_letters, 2, 2, exploration=-1)


def test_what_searches_are_compared_with_fails_as_they_do(pair, tmp_path):
    """Failures of decoding are raised with all that was drawn, and settings are those of `lite_search`."""

    def raising(tokens, scores):
        if tokens.shape[1] > 6:
            raise RuntimeError("the processor is broken")
        return scores

    for compared, counts in ((best_of, (2,)), (step_beams, (2, 2)), (tree_search, (2, 2))):
        with pytest.raises(SearchFailed, match="the processor is broken") as caught:
            compared(pair, "abc", by_letters, *counts, **OF_TEXTS, logits_processor=[raising])
        assert [result.ended for result in caught.value.results] == ["failed"]
        with pytest.raises(MissingFile, match="no sequence classifier"):
            compared(pair, "abc", tmp_path / "nothing", *counts)
        with pytest.raises(MissingFile):
            compared(str(tmp_path / "no models"), "abc", by_letters, *counts)
        with pytest.raises(BadSetting, match="threshold is"):
            compared(pair, "abc", by_letters, *counts, threshold=1.2)
