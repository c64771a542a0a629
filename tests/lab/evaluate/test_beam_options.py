"""Beam search under every option, and under options that nobody thought of: the beams and scores of transformers."""

import functools
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specbeam as sb
from specbeam.lab.evaluate.against_transformers import comparisons
from specbeam.lab.evaluate.beam_options import AgainstThePast, covering, option_values, some_tokens, with_every_option
from tests.support import words

FAMILIES = ["llama", "qwen2", "mistral", "opt", "gpt2", "gpt_neox"]
PROMPTS = ["abc", "Hello there", "a", "no, no", "What is it?", "b b", "Zero", "x.y", "so", "Then he", "I", "up, up", "!",
           "Ask me", "the end", "Q"]  # fmt: skip


@functools.cache
def pair_of(family):
    return words.pair(family)


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(1, 4), min_size=2, max_size=6))
@settings(max_examples=20)
def test_any_two_values_meet(sizes):
    values = {name: [f"{name}{number}" for number in range(size)] for name, size in sizes.items()}
    rows = covering(values)
    for one, other in combinations(values, 2):
        met = {(row[one], row[other]) for row in rows}
        assert len(met) == len(values[one]) * len(values[other])
    assert rows == covering(values)


@pytest.mark.filterwarnings("ignore:Unfeasible length")
def test_every_option_on_a_tiny_pair():
    methods = [sb.beam_search(3), sb.speculative_beam_search(3, 5, 3)]
    found = list(with_every_option(pair_of("llama"), PROMPTS, methods, max_new_tokens=16))
    assert [one.comparison.difference for one in found] == [None] * len(found)
    assert sorted(one.comparison.prompt for one in found) == sorted([*range(len(PROMPTS))] * 2)
    values = option_values(pair_of("llama"), PROMPTS, 16)
    assert {name for one in found for name in one.options} == set(values)


@pytest.mark.filterwarnings("ignore:Unfeasible length")
def test_few_prompts_meet_every_option_all_the_same():
    found = list(with_every_option(pair_of("llama"), PROMPTS[:3], [sb.beam_search(2)], max_new_tokens=4))
    values = option_values(pair_of("llama"), PROMPTS[:3], 4)
    assert len(found) == len(covering(values))
    assert {one.comparison.prompt for one in found} == {0, 1, 2}


OPTIONS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 12)},
    optional={
        "length_penalty": st.sampled_from([-2.0, -0.5, 0.0, 0.6, 1.7, 3.0]),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "eos_token_id": st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True),
        "min_new_tokens": st.integers(0, 8),
        "repetition_penalty": st.sampled_from([0.7, 1.1, 2.0]),
        "no_repeat_ngram_size": st.integers(1, 4),
        # transformers takes [t] banned and an end token at once; a sequence that begins with it as well
        "bad_words_ids": st.lists(st.lists(st.integers(4, 60), min_size=1, max_size=3), min_size=1, max_size=4),
        "prefix_allowed_tokens_fn": st.just(some_tokens(61, {1, 2, 3})),
        "logits_processor": st.just([AgainstThePast()]),
    },
)


def check_generated(family, beams, drafted, depth, options, prompt):
    methods = [sb.beam_search(beams), sb.speculative_beam_search(beams, beams + drafted, depth)]
    for one in comparisons(pair_of(family), [prompt], methods, **options):
        assert one.difference is None or one.difference.is_rounding, (family, beams, options, one)


GENERATED = given(
    st.sampled_from(FAMILIES),
    st.integers(2, 7),
    st.integers(0, 5),
    st.integers(1, 5),
    OPTIONS,
    st.sampled_from(PROMPTS),
)


@GENERATED
@pytest.mark.filterwarnings("ignore:Unfeasible length")
@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_generated_options(family, beams, drafted, depth, options, prompt):
    check_generated(family, beams, drafted, depth, options, prompt)


@pytest.mark.slow
@GENERATED
@pytest.mark.filterwarnings("ignore:Unfeasible length")
@settings(max_examples=1500, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_many_generated_options(family, beams, drafted, depth, options, prompt):
    check_generated(family, beams, drafted, depth, options, prompt)
