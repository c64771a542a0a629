"""Output perplexity: the averages told apart, and the scores those of plain forwards."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

import specbeam as sb
import specbeam.lab.evaluate.perplexity as perplexity_module
from specbeam.errors import BadPrompt, NotSupported
from specbeam.lab.evaluate.intervals import edge_interval, ratio_interval, share_interval
from specbeam.lab.evaluate.perplexity import PromptScorer, log_likelihoods, perplexity, summary
from tests.support import words
from tests.support.tiny_models import FAMILIES, tiny
from tests.support.tiny_sources import tiny_reader


def test_three_averages():
    """Outputs of 10 and 30 tokens with mean log-likelihood -.5 and -1.5."""
    found = summary([-5.0, -45.0], [[1] * 10, [2] * 30])
    assert found.perplexity == pytest.approx(2.7183, abs=1e-4)
    assert found.by_token == pytest.approx(3.4903, abs=1e-4)
    assert found.mean_of_outputs == pytest.approx(3.0652, abs=1e-4)
    assert (found.outputs, found.tokens, found.tokens_per_output) == (2, 40, 20)
    assert found.low <= found.perplexity <= found.high


def test_outputs_of_one_prompt_are_resampled_together():
    """Ten prompts, ten equal outputs each: no more is known than from one output each."""
    rng = np.random.default_rng(0)
    logp, prompts = rng.normal(-20, 5, 10), [[one] for one in range(10)]
    once = summary(logp.tolist(), [[1] * 10] * 10, prompts)
    often = summary(np.repeat(logp, 10).tolist(), [[1] * 10] * 100, [one for one in prompts for _ in range(10)])
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    apart = summary(np.repeat(logp, 10).tolist(), [[1] * 10] * 100)
    assert math.log(apart.high / apart.low) < 0.5 * math.log(often.high / often.low)
    assert summary(logp.tolist(), [[1] * 10] * 10) == once


def test_the_most_unlikely_texts_have_a_perplexity_too():
    found = summary([-8000.0, -5.0], [[1] * 10] * 2)
    assert found.mean_of_outputs == math.inf
    assert found.perplexity == pytest.approx(math.exp(400.25))
    assert summary([-8000.0], [[1] * 10]).perplexity == math.inf


def test_no_outputs_are_refused():
    with pytest.raises(BadPrompt, match="there are no outputs"):
        perplexity(words.pair(), [], [])


def test_repetition_is_told():
    plain = summary([-1.0], [[1, 2, 3, 4, 5, 6, 7, 8]])
    assert (plain.distinct_1, plain.distinct_2, plain.repeated) == (1, 1, 0)
    loop = summary([-1.0], [[1, 2, 1, 2, 1, 2, 1, 2]])
    assert (loop.distinct_1, loop.distinct_2) == (2 / 8, 2 / 7)
    assert loop.repeated == 3 / 5  # of the five 4-grams, two are new
    assert summary([-1.0], [[5]]).repeated == 0


def by_hand(model, prompt, output):
    with torch.inference_mode():
        logp = model(torch.tensor([prompt + output])).logits[0].double().log_softmax(-1)
    return sum(float(logp[len(prompt) - 1 + place, token]) for place, token in enumerate(output))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_a_plain_forward(family):
    """Outputs of all lengths in shared passes, whatever stands behind the shorter ones."""
    pair = sb.load(tiny(family), check=False)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, size).tolist() for size in (1, 7, 3, 12)]
    outputs = [rng.integers(0, 61, size).tolist() for size in (9, 1, 20, 4)]
    expected = [by_hand(pair.target_model, *one) for one in zip(prompts, outputs, strict=True)]
    assert log_likelihoods(pair, prompts, outputs) == pytest.approx(expected, abs=1e-3)
    scorer = PromptScorer(pair)
    for number in (0, 2, 2, 3):
        before = scorer.log_likelihood(prompts[number], outputs[1])
        assert scorer.log_likelihood(prompts[number], outputs[number]) == pytest.approx(expected[number], abs=1e-3)
        assert before == pytest.approx(by_hand(pair.target_model, prompts[number], outputs[1]), abs=1e-3)
    found = perplexity(pair, prompts, outputs)
    macro = sum(logp / len(output) for logp, output in zip(expected, outputs, strict=True)) / 4
    assert found.perplexity == pytest.approx(math.exp(-macro), rel=1e-4)


def test_scores_are_raw_whatever_the_output_was_made_with():
    """The score of a beam at temperature 1 is the score here; colder sampling is scored by the same raw law."""
    pair = words.pair()
    for options in ({}, {"temperature": 0.3, "top_k": 5}):
        done = sb.generate(pair, ["abc", "Hello"], "sampling", seed=1, max_new_tokens=12, **options)
        found = log_likelihoods(pair, [one.prompt for one in done], [one.tokens for one in done])
        assert found == pytest.approx([one.beams[0].score * len(one.tokens) for one in done], abs=1e-3)


def test_many_passes_give_what_one_gives(monkeypatch):
    pair = words.pair()
    prompts, outputs = [[5, 6]] * 5, [[7] * size for size in (1, 9, 4, 2, 30)]
    together = log_likelihoods(pair, prompts, outputs)
    monkeypatch.setattr("specbeam.lab.evaluate.perplexity.LOGITS_PER_PASS", 61 * 12)
    assert log_likelihoods(pair, prompts, outputs) == pytest.approx(together, abs=1e-4)


def test_equal_texts_are_scored_once(monkeypatch):
    pair = words.pair()
    scored = []
    score = perplexity_module.score_tokens

    def counted(texts, *arguments):
        scored.extend(texts)
        return score(texts, *arguments)

    monkeypatch.setattr(perplexity_module, "score_tokens", counted)
    known = {}
    first = log_likelihoods(pair, [[5, 6], [5], [5, 6]], [[7], [6, 7], [7]], known=known)
    assert sorted(scored) == [[5, 6, 7], [5, 6, 7]]  # the same tokens, of which other ones are the prompt
    assert first[0] == first[2] != first[1]
    again = log_likelihoods(pair, [[5], [5, 6]], [[6, 7], [8]], known=known)
    assert scored[2:] == [[5, 6, 8]]
    assert again[0] == first[1]


@pytest.mark.parametrize(
    ("prompt", "output", "message"),
    [
        ([], [1], "prompt 0 is empty"),
        ([1], [], "output 0 is empty"),
        ([1], [99], "token id 99; the model's vocabulary is 0 to 60"),
        ([1], [2] * 300, "has 256 positions"),
    ],
)
def test_what_cannot_be_scored_is_refused(prompt, output, message):
    with pytest.raises(BadPrompt, match=message):
        log_likelihoods(words.pair(), [prompt], [output])


def test_intervals_cover():
    """95 % intervals of a ratio of sums hold the true ratio in nearly 95 % of trials."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(100):
        below = rng.integers(5, 15, 60).astype(float)
        low, high = ratio_interval(below * 2.0 + rng.normal(0, 5, 60), below)
        inside += low < 2.0 < high
    assert 87 <= inside <= 100
    assert ratio_interval([3.0], [2.0]) == (1.5, 1.5)


def test_shares_at_the_edge_have_an_interval():
    """Wilson's: ten of ten prompts right leave room down to 72 %."""
    assert share_interval([1.0] * 10, [1.0] * 10) == pytest.approx((0.7225, 1), abs=1e-4)
    assert share_interval([0.0] * 10, [3.0] * 10) == pytest.approx((0, 0.2775), abs=1e-4)
    for number in (1, 7, 400):
        theirs = [binomtest(hits, number).proportion_ci(0.95, method="wilson") for hits in (0, number)]
        for is_all, expected in zip((False, True), theirs, strict=True):
            assert edge_interval(is_all, number) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert share_interval([1.0, 0.0] * 20, [1.0] * 40) == ratio_interval([1.0, 0.0] * 20, [1.0] * 40)


@pytest.mark.parametrize("family", ["marian", "t5", "m2m_100"])
def test_outputs_for_sources_of_mixed_lengths_are_scored_by_the_decoder(family):
    model = tiny_reader(family)
    pair = sb.load(model)
    given = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 2], [20, 2]]
    outputs = [[4, 5, 6], [7], [8, 9, 10, 11]]
    found = log_likelihoods(pair, given, outputs)
    start = model.generation_config.decoder_start_token_id
    for source, output, score in zip(given, outputs, found, strict=True):
        with torch.no_grad():
            rows = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[start, *output]])).logits
        expected = rows[0, :-1].double().log_softmax(-1)[range(len(output)), output].sum()
        assert score == pytest.approx(float(expected), abs=1e-4)
    (answer,) = sb.generate(pair, [given[0]], sb.beam_search(3), max_new_tokens=6, length_penalty=0.0)
    # The score of a search without processors is what is scored here.
    assert log_likelihoods(pair, [given[0]], [answer.tokens])[0] == pytest.approx(answer.beams[0].score, abs=1e-4)
    with pytest.raises(BadPrompt, match="prompt 0 has token id 99"):
        log_likelihoods(pair, [[99]], [[4]])


def test_outputs_of_models_that_hear_are_refused():
    with pytest.raises(NotSupported, match="reads audio"):
        log_likelihoods(sb.load(tiny_reader("whisper")), [[5]], [[4]])
