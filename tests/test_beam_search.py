"""Beam search against transformers: the same beams and scores, whatever drafts, whatever else is in the batch."""

import pytest
import torch
from transformers import LogitsProcessor

import specbeam as sb
from tests.support import words
from tests.support.tiny_models import tiny

PROMPTS = ["abc", "Hello there", "a", "no, no"]


@pytest.fixture(scope="module")
def pair():
    return words.pair()


def by_transformers(pair, prompt, beams, new_tokens=14, **options):
    """Beams and scores of `generate` itself, for one prompt."""
    ids = torch.tensor([pair.tokenizer(prompt)["input_ids"]])
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
        [score for _, score in expected], abs=1e-4, rel=1e-6
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
@pytest.mark.parametrize("options", OPTIONS, ids=str)
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


def test_the_common_prefix_of_all_beams_is_streamed(pair):
    pieces = list(sb.stream(pair, "Hello there", sb.speculative_beam_search(3), max_new_tokens=20))
    assert "".join(pieces) == sb.generate(pair, "Hello there", sb.beam_search(3), max_new_tokens=20)[0].text


def test_several_answers(pair):
    found = sb.generate(pair, "abc", sb.beam_search(4), max_new_tokens=8, num_return_sequences=3)
    assert [one.tokens for one in found] == [tokens for tokens, _ in by_transformers(pair, "abc", 4, 8)[:3]]
